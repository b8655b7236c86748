# SPDX-License-Identifier: Apache-2.0
"""Train the byte-level GPT of gpt.py in a raw Fabric loop. zeropp is one import and the strategy's name:

python examples/fabric_loop.py --strategy zeropp --devices 2
"""

import argparse
import json
from pathlib import Path

import torch
import zeropp.lightning  # noqa: F401  (registers "zeropp", "zeropp_stage_2", ...)
from gpt import GPT, GPTConfig
from lightning.fabric import Fabric
from text import Text

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--strategy", default="zeropp", help="zeropp, zeropp_stage_1, zeropp_stage_2, or ddp")
parser.add_argument("--devices", type=int, default=2, help="processes")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--data", help="folder or file; default: Python's own source")
parser.add_argument("--folder", type=Path, default=Path("out/fabric"), help="the checkpoint")
parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in the folder")
args = parser.parse_args()
CONTEXT, BATCH = 64, 8

fabric = Fabric(accelerator="cpu", devices=args.devices, strategy=args.strategy)
fabric.launch()
torch.manual_seed(0)
with fabric.init_module():  # at stage 3 the model is never whole in memory
    model = GPT(GPTConfig(layers=args.layers, heads=4, width=args.width, context=CONTEXT))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
model, optimizer = fabric.setup(model, optimizer)
state = {"model": model, "optimizer": optimizer, "step": 0}
path = args.folder / "last.ckpt"
if args.resume:
    fabric.load(path, state)

text = Text(args.data).train
while state["step"] < args.steps:
    draw = torch.Generator().manual_seed(state["step"] * fabric.world_size + fabric.global_rank)
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1), generator=draw)
    rows = text[starts + torch.arange(CONTEXT + 1)].long()
    loss = model(rows[:, :-1], rows[:, 1:])
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    state["step"] += 1
    if state["step"] % 10 == 0 or state["step"] == 1:
        mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
        if fabric.is_global_zero:
            print(json.dumps({"step": state["step"], "loss": round(float(mean), 4)}), flush=True)
fabric.save(path, state)
