# SPDX-License-Identifier: Apache-2.0
"""Train the byte-level GPT of gpt.py with a number of ranks that may change at any time; run it again on every machine:

    torchrun --nnodes 1:4 --nproc-per-node 2 --max-restarts 100 \
        --rdzv-backend c10d --rdzv-endpoint HOST:29400 --rdzv-id my-run examples/elastic_gpt.py --out out/elastic

When ranks die, leave or join, torchrun restarts this script on the present ones, and it resumes from the newest checkpoint
with the same batch. metrics.jsonl in --out has one object a step: step, loss, ranks, and the number of the start.
"""

import argparse
import ctypes
import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import zeropp
from gpt import GPT, GPTConfig, learning_rate
from text import Text
from zeropp import elastic

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", type=Path, default=Path("out/elastic"), help="on a disk that all machines see")
parser.add_argument("--steps", type=int, default=600)
parser.add_argument("--batch", type=int, default=24, help="sequences a step over all ranks, whatever their number")
parser.add_argument("--micro-batch", type=int, default=12, help="most sequences in one forward of one rank")
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--context", type=int, default=64)
parser.add_argument("--save-every", type=int, default=20, metavar="STEPS", help="what a restart loses at most")
parser.add_argument("--data", help="a folder or file of text; default: the source of Python's standard library")
args = parser.parse_args()

PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a torchrun that is killed takes its rank with it

dist.init_process_group("zeropp")
share = elastic.share(args.batch, args.micro_batch)
torch.manual_seed(0)
model = GPT(GPTConfig(layers=args.layers, heads=4, width=args.width, context=args.context))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
model, optimizer = zeropp.prepare(model, optimizer, zeropp.Config(stage=3, accumulate=len(share), clip=1.0))
found = elastic.resume(args.out / "checkpoint", model, optimizer)
start = found["step"] if found else 0

text = Text(args.data)
args.out.mkdir(parents=True, exist_ok=True)
metrics = (args.out / "metrics.jsonl").open("a", buffering=1)
for step in range(start, args.steps):
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, args.steps, 2e-3)
    inputs, targets = text.batch(
        step, rank=0, ranks=1, batch=args.batch, context=args.context, device=torch.device("cpu")
    )
    mean = torch.zeros(())
    for part in share:
        rows = slice(part.sequences.start, part.sequences.stop)
        loss = part.weight * model(inputs[rows], targets[rows])
        loss.backward()
        optimizer.step()  # does something at the last micro-step
        optimizer.zero_grad()
        mean += loss.detach() / len(share) / dist.get_world_size()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        row = {"step": step + 1, "loss": mean.item(), "ranks": dist.get_world_size(), "start": start}
        metrics.write(json.dumps({**row, "process": os.getpid()}) + "\n")
    if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
        zeropp.save(args.out / "checkpoint", model, optimizer, step=step + 1, keep=2, background=True)

dist.destroy_process_group()
