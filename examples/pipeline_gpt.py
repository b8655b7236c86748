# SPDX-License-Identifier: Apache-2.0
"""Train a byte-level GPT as a pipeline of stages, each partitioned by ZeRO over its data ranks, under torchrun.

torch's own schedule runs the micro-batches; zeropp cuts the model and reduces the gradients once a step:

    torchrun --nproc-per-node 4 examples/pipeline_gpt.py --stages 2 --steps 20
"""

import argparse

import torch
import torch.distributed as dist
import zeropp
from gpt import PRESETS, VOCABULARY, Block
from text import Text
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn import functional as F

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--stages", type=int, default=2, help="ranks of the pipeline")
parser.add_argument("--schedule", default="1F1B", help="of torch, such as GPipe, Interleaved1F1B or ZBVZeroBubble")
parser.add_argument("--micro-batches", type=int, default=4)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--stage", type=int, default=3, help="of ZeRO")
args = parser.parse_args()


class Embed(nn.Module):
    """Bytes ``(B, T)`` to vectors ``(B, T, D)``, with learned positions."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)

    def forward(self, bytes_BT: Tensor) -> Tensor:
        return self.tokens(bytes_BT) + self.places.weight[: bytes_BT.shape[1]]


def loss_of(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


dist.init_process_group("zeropp")
shape = (args.stages, dist.get_world_size() // args.stages)
mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp"))
preset = PRESETS["small"]
sizes = preset.model

torch.manual_seed(0)
with zeropp.sharded_init(mesh=mesh):
    blocks = (Block(sizes) for _ in range(sizes.layers))
    head = (nn.LayerNorm(sizes.width), nn.Linear(sizes.width, VOCABULARY))
    model = nn.Sequential(Embed(sizes.width, sizes.context), *blocks, *head)
schedule_class = get_schedule_class(args.schedule)
chunks = zeropp.parallel.cut(model, mesh["pp"], schedule_class)
optimizer = torch.optim.AdamW(chunks.parameters(), lr=preset.lr)
chunks, optimizer = zeropp.prepare(chunks, optimizer, zeropp.Config(stage=args.stage), mesh=mesh)

stages = zeropp.parallel.stages(chunks, mesh["pp"])
one_or_all = stages if len(stages) > 1 else stages[0]
schedule = zeropp.parallel.pipeline(schedule_class(one_or_all, args.micro_batches, loss_fn=loss_of))
first, last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)

text = Text(None)
rows = {"batch": preset.batch, "context": sizes.context, "device": torch.device("cpu")}
for step in range(args.steps):
    inputs, targets = text.batch(step, rank=mesh.get_local_rank("dp"), ranks=shape[1], **rows)
    losses: list[Tensor] = []
    schedule.step(*((inputs,) if first else ()), target=targets if last else None, losses=losses if last else None)
    norm = optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if last and mesh.get_local_rank("dp") == 0 and (step + 1) % 10 == 0:
        print(f"step {step + 1}: loss {torch.stack(losses).mean():.3f} nats a byte, norm {norm:.2f}", flush=True)
dist.destroy_process_group()
