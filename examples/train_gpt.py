# SPDX-License-Identifier: Apache-2.0
"""Train a byte-level GPT on real text, one process a rank, under torchrun.

There are two of these scripts: ddp_gpt.py is ordinary DistributedDataParallel, and train_gpt.py is the same with
zeropp. Their diff shows all that a script needs:

    torchrun --nproc-per-node 2 examples/train_gpt.py --preset small
    diff examples/ddp_gpt.py examples/train_gpt.py
"""

import torch
import torch.distributed as dist
import zeropp
from gpt import GPT, PRESETS, learning_rate
from report import Report, arguments, choose_device
from text import Text

args = arguments(__doc__)
preset = PRESETS[args.preset]
steps = args.steps or preset.steps
device = choose_device(args.device)
dist.init_process_group(args.backend)
rank, ranks = dist.get_rank(), dist.get_world_size()
text = Text(args.data)
batches = {"rank": rank, "ranks": ranks, "batch": preset.batch, "context": preset.model.context, "device": device}

torch.manual_seed(0)
model = GPT(preset.model).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=preset.lr, betas=(0.9, 0.95), weight_decay=0.1)
model, optimizer = zeropp.prepare(model, optimizer, zeropp.Config(stage=3, device=device, **args.tiers))

report = Report(args, model, optimizer, steps, tokens_per_step=ranks * preset.batch * preset.model.context)
start = zeropp.load(args.checkpoint, model, optimizer)["step"] if args.resume else 0
for step in report.steps(start):
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, steps, preset.lr)
    inputs, targets = text.batch(step, **batches)
    loss = model(inputs, targets)
    loss.backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if report.step(step, loss) or (step + 1) % args.save_every == 0:
        zeropp.save(args.checkpoint, model, optimizer, step=step + 1, keep=2)

report.finish(model, optimizer, text.validation_batches(**batches))
dist.destroy_process_group()
