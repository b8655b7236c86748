# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the benchmarks of GPUs: the device, a language model of blocks, and contenders that take turns on every rank.

Without a GPU each of them ends with a sentence and the status of a missing peer. ``ZEROPP_BENCH_DEVICE=sim`` runs their code on the
simulated GPU of tests/sim, whose times mean nothing: a test does so.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from harness import ROOT, PeerMissing, Run
from torch import Tensor, nn
from turns import TWINS

VARIABLE = "ZEROPP_BENCH_DEVICE"
SIM = ROOT / "tests" / "sim"


def kind() -> str:
    """Return the type of the device that is measured."""
    return os.environ.get(VARIABLE, "cuda")


def require_gpus(bench: Run, least: int = 1) -> int:
    """Return how many GPUs this machine has; raise PeerMissing where it has fewer than ``least``."""
    if kind() == "sim":
        return 2
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < least:
        wanted = "a GPU" if least == 1 else f"{least} GPUs"
        raise PeerMissing(f"{bench.name}: this machine has {found} GPUs for torch {torch.__version__}, wanted {wanted}")
    return found


def this_device() -> torch.device:
    """Return this rank's GPU, which becomes the current one."""
    if kind() == "sim":
        sys.path.insert(0, str(SIM))
        importlib.import_module("sim")
        return torch.device("sim", 0)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def open_group(folder: str) -> None:
    """Make the process group of the peers: NCCL, or that of the simulated GPU, whose ranks meet in ``folder``."""
    if kind() == "sim":
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        importlib.import_module("sim").init_process_group(folder, rank, ranks)
    else:
        dist.init_process_group("cpu:gloo,cuda:nccl")


def on_gpus(bench: Run, worker: str, ranks: int, **args: Any) -> list[Any]:
    """Run a worker on so many ranks, one a GPU; return what each returned."""
    paths = os.pathsep.join(map(str, (ROOT / "python", SIM, os.environ.get("PYTHONPATH", ""))))
    if kind() == "sim":
        sys.path.insert(0, str(SIM))
        build = importlib.import_module("sim_build")
        if why_not := build.why_no_torch_device():
            raise PeerMissing(f"{bench.name}: {why_not}")
        build.torch_device()
    with tempfile.TemporaryDirectory(prefix="zeropp-gpus-") as folder:
        given = {"folder": folder, "quick": bench.quick, **args}
        return bench.launch(worker, ranks=ranks, args=given, timeout_s=1200.0, env={"PYTHONPATH": paths})


def finish() -> None:
    """Wait for everything that the GPU was given."""
    torch.accelerator.synchronize()


def milliseconds(call: Callable[[], Any], repeat: int = 1) -> float:
    """Return milliseconds a call, from an idle GPU to an idle GPU."""
    finish()
    began = time.perf_counter_ns()
    for _ in range(repeat):
        call()
    finish()
    return (time.perf_counter_ns() - began) / 1e6 / repeat


def in_turns(contenders: dict[str, Callable[[], Any]], rounds: int, repeat: int = 1) -> dict[str, list[float]]:
    """Return milliseconds a call of each contender, round by round: the slowest rank's. The order is drawn anew each round."""
    order, rng = list(contenders), random.Random(0)  # the same on every rank
    samples: dict[str, list[float]] = {name: [] for name in order}
    for index in range(rounds + 1):
        rng.shuffle(order)
        for name in order:
            with TWINS.turn():
                spent = milliseconds(contenders[name], repeat)
            if index:
                samples[name].append(slowest(spent))
    return samples


def slowest(spent: float) -> float:
    """Return the largest of all ranks' figures."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return spent
    every = torch.zeros(dist.get_world_size(), device=kind())
    dist.all_gather_into_tensor(every, torch.tensor([spent], device=kind()))
    return float(every.max())


# -- a model -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """A language model of blocks, and what it is trained on."""

    name: str
    width: int
    layers: int
    tokens: int
    """Of one sequence."""
    vocabulary: int = 32_000

    @property
    def parameters(self) -> int:
        return self.layers * 12 * self.width**2 + self.vocabulary * self.width


SIZES = (
    Size("0.1B, 48 layers", 384, 48, 2048),
    Size("0.5B", 1280, 24, 2048),
    Size("3B", 2560, 36, 2048),
    Size("8B", 4096, 36, 2048),
)
TINY = Size("tiny", 64, 2, 16, 128)


class Block(nn.Module):
    """A block of a transformer, before its norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        split = self.qkv(self.first(x)).view(rows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, width))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Model(nn.Module):
    """Blocks between an embedding and its transposition."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = nn.functional.linear(x, self.embedding.weight)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def build(size: Size, device: torch.device) -> Model:
    """Return the model in bf16, with the same values on all ranks."""
    torch.manual_seed(0)
    with torch.device("cpu"):
        return Model(size).to(torch.bfloat16).to(device)


def batch(size: Size, device: torch.device) -> Tensor:
    """Return this rank's sequence."""
    draw = torch.Generator("cpu").manual_seed(int(os.environ.get("RANK", "0")))
    return torch.randint(size.vocabulary, (1, size.tokens), generator=draw, device="cpu").to(device)


def sharded(size: Size, device: torch.device, offloads: bool = False) -> tuple[nn.Module, Any]:
    """Return the model and AdamW of torch's FSDP2, in bf16 with sums in fp32."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    model = build(size, device).float()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy() if offloads else OffloadPolicy()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)


def stepper(model: nn.Module, optimizer: Any, tokens: Tensor) -> Callable[[], float]:
    """Return one step of training; it returns the loss as a tensor, so that nothing waits."""

    def step() -> Any:
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
