# SPDX-License-Identifier: Apache-2.0
"""Train a language model on sequences that several ranks share (Ulysses, ALST), under ZeRO-3.

    torchrun --nproc-per-node 2 examples/long_context.py --tokens 4096 --sp 2

Each rank holds a part of every sequence and of every parameter, gradient and optimizer state. MLPs, logits and the loss are computed in
tiles, and activations that the backward needs are recomputed.
"""

import argparse

import torch
import torch.distributed as dist
import transformers
import zeropp
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--tokens", type=int, default=4096, help="of a sequence")
parser.add_argument("--sp", type=int, default=None, help="ranks that share a sequence; default: all")
parser.add_argument("--steps", type=int, default=10)
args = parser.parse_args()

dist.init_process_group("zeropp")
ranks = dist.get_world_size()
sp = args.sp or ranks
mesh = init_device_mesh("cpu", (ranks // sp, sp), mesh_dim_names=("dp", "sp"))

torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
    max_position_embeddings=args.tokens, use_cache=False,
)  # fmt: skip
model = transformers.LlamaForCausalLM(config)
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer = zeropp.prepare(model, optimizer, zeropp.Config(stage=3, clip=1.0))
zeropp.nn.tile_sequence(model)
handle = zeropp.parallel.ulysses(model, mesh["sp"])


def sample(index: int) -> dict[str, torch.Tensor]:
    """Return numbers that count up, modulo 32, which a model learns soon."""
    tokens = (index + torch.arange(args.tokens)) % 32
    return {"input_ids": tokens, "labels": tokens}


loader = handle.loader(
    DataLoader([sample(index) for index in range(args.steps * ranks // sp)], batch_size=1, shuffle=True)
)
for step, batch in enumerate(loader):
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        shown = f"{batch['input_ids'].shape[1]} of {args.tokens} tokens on this rank"
        print(f"step {step} loss {mean.item() / ranks:.4f} ({shown})", flush=True)
dist.destroy_process_group()
