# SPDX-License-Identifier: Apache-2.0
"""Train the byte-level GPT of gpt.py with Lightning. zeropp is one import and the strategy's name:

python examples/lightning_gpt.py --strategy zeropp --devices 2
"""

import argparse

import lightning.pytorch as pl
import torch
import zeropp.lightning  # noqa: F401  (registers "zeropp", "zeropp_stage_2", ...)
from gpt import GPT, GPTConfig
from text import Text

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--strategy", default="zeropp", help="zeropp, zeropp_stage_1, zeropp_stage_2, or ddp")
parser.add_argument("--devices", type=int, default=2, help="processes")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--data", help="folder or file; default: Python's own source")
parser.add_argument("--folder", default="out/lightning", help="checkpoints")
parser.add_argument("--resume", help="a checkpoint to go on from")
args = parser.parse_args()
CONTEXT = 64


class Windows(torch.utils.data.Dataset):
    """Inputs and targets as consecutive windows of the text."""

    def __init__(self, text: torch.Tensor, count: int) -> None:
        self.text, self.count = text, min(count, (len(text) - 1) // CONTEXT)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = self.text[index * CONTEXT : (index + 1) * CONTEXT + 1].long()
        return row[:-1], row[1:]


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gpt = GPT(GPTConfig(layers=args.layers, heads=4, width=args.width, context=CONTEXT))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        loss = self.gpt(*batch)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> None:
        self.log("val_loss", self.gpt(*batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3, weight_decay=0.1)


text = Text(args.data)
trainer = pl.Trainer(
    strategy=args.strategy, accelerator="cpu", devices=args.devices, max_steps=args.steps, gradient_clip_val=1.0,
    logger=False, limit_val_batches=8, val_check_interval=args.steps, default_root_dir=args.folder,
    callbacks=[pl.callbacks.ModelCheckpoint(dirpath=args.folder, filename="{step}", every_n_train_steps=args.steps // 2, save_top_k=-1)],
)  # fmt: skip
loaders = (torch.utils.data.DataLoader(Windows(part, 50_000), batch_size=12) for part in (text.train, text.validation))
trainer.fit(Model(), *loaders, ckpt_path=args.resume)
if trainer.is_global_zero:
    print({name: round(float(value), 4) for name, value in trainer.callback_metrics.items()})
