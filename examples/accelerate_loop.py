# SPDX-License-Identifier: Apache-2.0
"""Train the byte-level GPT of gpt.py in a raw Accelerate loop. With zeropp it differs from an ordinary one in the import
and the constructor:

    torchrun --nproc-per-node 2 examples/accelerate_loop.py --zeropp '{"stage": 3}'
"""

import argparse
import json
from pathlib import Path

import torch
from gpt import GPT, GPTConfig
from text import Text
from zeropp.accelerate import ZeroppAccelerator  # in place of: from accelerate import Accelerator

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--zeropp", default='{"stage": 3}', help="a configuration: a file, or JSON text")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--data", help="folder or file; default: Python's own source")
parser.add_argument("--folder", type=Path, default="out/accelerate", help="the state, and the model as safetensors")
parser.add_argument("--resume", action="store_true", help="go on from the state in the folder")
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


accelerator = ZeroppAccelerator(zeropp=args.zeropp, gradient_accumulation_steps=2)
torch.manual_seed(0)
model = GPT(GPTConfig(layers=args.layers, heads=4, width=args.width, context=CONTEXT))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
loader = torch.utils.data.DataLoader(Windows(Text(args.data).train, 50_000), batch_size=8)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
if args.resume:
    accelerator.load_state(args.folder / "state")

step = 0
for inputs, targets in loader:
    with accelerator.accumulate(model):
        loss = model(inputs, targets)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if not accelerator.sync_gradients:
        continue
    step += 1
    if step % 10 == 0 or step == 1:
        mean = float(accelerator.reduce(loss.detach(), "mean"))
        accelerator.print(json.dumps({"step": step, "loss": round(mean, 4)}))
    if step == args.steps:
        break
accelerator.save_state(args.folder / "state")
accelerator.save_model(model, args.folder)
