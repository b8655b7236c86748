# SPDX-License-Identifier: Apache-2.0
"""float64 and complex128 are trained in float64: reduced, measured, stepped and kept in it. Models in float64 and
complex128, and modules that hold several types, beside the same model under plain torch."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from ranks import on_cpu_only, on_ranks, shards_tier
from tiny import sentence
from torch import Tensor, nn

KEYS = {
    "reduce": "Precision.reduce: 'bf16'",
    "state": "Precision.state: 'int8'",
    "comm": "Config.comm.grads: 'int8'",
    "disk": "Config.offload.optimizer.kind: 'nvme'",
    "delayed": "Config.offload.delayed_update: 1",
    "lion": "optimizer Lion",
    "lamb": "optimizer LAMB",
}

STAGES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0}, "stage 1": {"stage": 1}, "stage 2": {"stage": 2}, "stage 3": {"stage": 3},
    "gathering": {"stage": 3, "host_copy": "off"},
}  # fmt: skip
OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, amsgrad=True, betas=(0.4, 0.9)),
    "maximize": lambda p: torch.optim.AdamW(p, lr=1e-3, maximize=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}
#: Rounding to float64 is 1.1e-16; a step has a few dozen of it, and five steps carry them on. Anything in float32 would be off by 1e-8.
CLOSE = 1e-12


class Block(nn.Module):
    def __init__(self, width: int = 10) -> None:
        super().__init__()
        on_cpu_only("the simulated GPU has no complex tensors")
        self.line = nn.Linear(width, width, dtype=torch.float64)
        self.turn = nn.Parameter(torch.randn(width, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.line(x)) + (self.turn.conj() * x).imag


class Fine(nn.Module):
    """A module whose parameters are float64 and complex128, one of them of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.gain


class Mixed(nn.Module):
    """Four types in one module. What is computed in float64 does not depend on the parameters of the other types."""

    def __init__(self) -> None:
        super().__init__()
        on_cpu_only("the simulated GPU has no complex tensors")
        self.coarse = nn.Linear(10, 10)
        self.low = nn.Linear(10, 10, dtype=torch.bfloat16).requires_grad_(False)
        self.fine = nn.Linear(10, 10, dtype=torch.float64)
        self.turn = nn.Parameter(torch.randn(10, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        coarse = self.coarse(x.float()) * self.turn.real + self.low(x.bfloat16()).float()
        return torch.cat([self.fine(x), coarse.double()], dim=1)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    x, wanted = torch.randn(2, 4, 10, generator=draw, dtype=torch.float64)
    return x, wanted


def loss_of(model: Any, step: int, rank: int) -> Tensor:
    x, wanted = batch(step, rank)
    y = model(x)
    return (y - wanted.repeat(1, y.shape[1] // 10)).square().mean()


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums of matrix products then have one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def pair(optimizer: str = "AdamW", kind: type[nn.Module] = Fine, **config: Any) -> tuple[Any, Any, Any, Any]:
    torch.manual_seed(0)
    plain = kind()
    model = copy.deepcopy(plain)
    make = OPTIMIZERS[optimizer]
    return (*zeropp.prepare(model, make(model.parameters()), zeropp.Config(**config)), plain, make(plain.parameters()))


def same(got: dict[str, Tensor], wanted: dict[str, Tensor], close: float = CLOSE) -> None:
    assert got.keys() == wanted.keys()
    for name, values in wanted.items():
        assert got[name].dtype == values.dtype, name
        bound = close if values.dtype in (torch.float64, torch.complex128) else 2e-5
        torch.testing.assert_close(got[name], values, rtol=bound, atol=bound, msg=lambda s, n=name: f"{n}: {s}")


def plain_step(plain: Any, theirs: Any, steps: list[int], norm: float | None) -> Tensor:
    """The mean over all ranks' batches, on each of them."""
    ranks = dist.get_world_size()
    for step in steps:
        (sum(loss_of(plain, step, rank) for rank in range(ranks)) / ranks / len(steps)).backward()
    for p in plain.parameters():
        p.grad = None if p.grad is None else p.grad.resolve_conj()
    total = nn.utils.clip_grad_norm_(plain.parameters(), float("inf") if norm is None else norm)
    theirs.step()
    theirs.zero_grad()
    return total


@on_ranks()
@pytest.mark.parametrize(
    "optimizer, stage, ranks",
    [
        *(("AdamW", stage, 2) for stage in STAGES),
        *((one, "gathering", 2) for one in OPTIMIZERS if one != "AdamW"),
        ("AdamW", "stage 3", 1),
        ("Adam, amsgrad", "gathering", 1),
        ("AdamW", "stage 2", 3),  # a third of a sum, too, is no float32
    ],
)
def test_trains(stage: str, optimizer: str) -> None:
    """Gradients, norms, values and states of five clipped steps."""
    with one_thread():
        model, ours, plain, theirs = pair(optimizer, **STAGES[stage])
        for step in range(5):
            loss_of(model, step, dist.get_rank()).backward()
            torch.testing.assert_close(
                torch.tensor(ours.clip_grad_norm_(0.5), dtype=torch.float64),
                plain_step(plain, theirs, [step], 0.5).detach(), rtol=CLOSE, atol=0.0,
            )  # fmt: skip
            ours.step()
            ours.zero_grad()
        same(zeropp.full_state_dict(model), plain.state_dict())
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            for kind in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "square_avg"):
                if kind in theirs.state[q]:
                    same({kind: zeropp.get_full(p, kind)}, {kind: theirs.state[q][kind]})


@on_ranks()
@pytest.mark.parametrize(
    "how, stage, ranks",
    [
        *((how, stage, 2) for how in ("accumulate", "no_sync") for stage in ("stage 0", "stage 1", "stage 2")),
        ("accumulate", "stage 2", 1),
        ("accumulate", "stage 2", 3),
        ("no_sync", "stage 1", 3),
    ],
)
def test_accumulates(stage: str, how: str) -> None:
    """Three micro-steps: a third is no float32."""
    with one_thread():
        more = {"accumulate": 3} if how == "accumulate" else {}
        model, ours, plain, theirs = pair("SGD", **STAGES[stage], **more)
        for step in (0, 3):
            for micro in range(3):
                held = zeropp.no_sync(model) if how == "no_sync" and micro < 2 else nullcontext()
                with held:
                    loss = loss_of(model, step + micro, dist.get_rank())
                    (loss if more else loss / 3).backward()
            ours.step()
            ours.zero_grad()
            plain_step(plain, theirs, [step, step + 1, step + 2], None)
        same(zeropp.full_state_dict(model), plain.state_dict())


@on_ranks()
@pytest.mark.parametrize("stage, ranks", [*((stage, 2) for stage in STAGES), ("stage 0", 1)])
def test_mixed(stage: str) -> None:
    """Each parameter is as exact as its type, in one optimizer."""
    with one_thread():
        model, ours, plain, theirs = pair("AdamW", Mixed, **STAGES[stage])
        for step in range(4):
            loss_of(model, step, dist.get_rank()).backward()
            ours.step()
            ours.zero_grad()
            plain_step(plain, theirs, [step], None)
        same(zeropp.full_state_dict(model), plain.state_dict())


@on_ranks(1, 2)
def test_clips_values() -> None:
    for stage in ("stage 2", "gathering"):
        torch.manual_seed(0)
        plain = nn.Linear(7, 3, dtype=torch.float64)
        model = copy.deepcopy(plain)
        model, ours = zeropp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.3), zeropp.Config(**STAGES[stage]))
        for m in (model, plain):
            m(torch.ones(2, 7, dtype=torch.float64) / 3).square().sum().backward()
        ours.clip_grad_value_(0.1)
        ours.step()
        nn.utils.clip_grad_value_(plain.parameters(), 0.1)
        with torch.no_grad():
            for p in plain.parameters():
                p -= 0.3 * p.grad
        same(zeropp.full_state_dict(model), plain.state_dict())
        ours.zero_grad()
        model(torch.full((2, 7), float("nan"), dtype=torch.float64)).sum().backward()
        assert "'weight'" in sentence(ours.step, zeropp.Error)


def steps(model: Any, ours: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = loss_of(model, step, dist.get_rank())
        loss.backward()
        ours.step()
        ours.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@on_ranks(1, 2)
def test_kept() -> None:
    """Checkpoints at other stages, state dicts, shards from construction, states on disk for a while: every bit."""
    paths = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(paths)
    folder = Path(paths[0])
    try:
        for optimizer in ("AdamW", "RMSprop"):
            _kept(folder / optimizer, optimizer)
        model, ours, *_ = pair("AdamW", **STAGES["stage 3"])
        twin, adam, *_ = pair("AdamW", **STAGES["stage 3"])
        steps(model, ours, 0, 2)
        steps(twin, adam, 0, 2)
        assert zeropp.offload_states(optimizer=ours, to="nvme", path=folder) > 0
        zeropp.offload_states(optimizer=ours, to="cpu")
        assert steps(model, ours, 2, 4) == steps(twin, adam, 2, 4)
        same(zeropp.full_state_dict(model), zeropp.full_state_dict(twin), 0.0)
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)


def _kept(folder: Path, optimizer: str) -> None:
    model, ours, *_ = pair(optimizer, **STAGES["gathering"])
    steps(model, ours, 0, 2)
    zeropp.save(folder, model, ours)
    wanted = zeropp.full_state_dict(model)
    after = steps(model, ours, 2, 4)
    for stage in ("gathering", "stage 1", "stage 3", "stage 0"):
        other, theirs, *_ = pair(optimizer, **STAGES[stage])
        zeropp.load(folder, other, theirs)
        same(zeropp.full_state_dict(other), wanted, 0.0)
        assert steps(other, theirs, 2, 4) == after, stage
    torch.manual_seed(7)
    with zeropp.sharded_init():
        fresh = Fine()
    fresh, _ = zeropp.prepare(fresh, None, zeropp.Config(**STAGES["gathering"]))
    torch.manual_seed(7)
    same(zeropp.full_state_dict(fresh), Fine().state_dict(), 0.0)
    zeropp.load_full_state_dict(fresh, wanted)
    same(zeropp.full_state_dict(fresh), wanted, 0.0)
    p = fresh.blocks[1].turn
    zeropp.set_full(p, torch.full(p.shape, 2 - 1j / 3, dtype=p.dtype))
    assert bool((zeropp.get_full(p) == 2 - 1j / 3).all())
    with zeropp.gathered(p, write=True), torch.no_grad():
        p.fill_(1 / 3)
    assert bool((zeropp.get_full(p) == 1 / 3).all())


@on_ranks(1, 2)
def test_counted() -> None:
    """Bytes a parameter: 8 each for it, its gradient and two states."""
    model, ours, *_ = pair("AdamW", **STAGES["stage 3"])
    steps(model, ours, 0, 1)
    loss_of(model, 1, dist.get_rank()).backward()
    found = zeropp.memory(model, ours)
    guess = zeropp.estimate(Fine(), zeropp.Config(**STAGES["stage 3"]), ranks=dist.get_world_size())
    held = {kind: found[shards_tier()][kind]["held"] for kind in ("params", "grads", "master", "optimizer")}
    estimated = {kind: guess["cpu"][kind] for kind in held}
    assert found["bytes_per_parameter"]["planned"] == pytest.approx(32 / dist.get_world_size())
    assert held["master"] == estimated["master"] == 0
    assert held == pytest.approx(estimated, rel=0.03, abs=1024)


@on_ranks(2)
def test_refusals() -> None:

    def told(make: Any = OPTIMIZERS["AdamW"], **config: Any) -> str:
        model = nn.Linear(4, 4, dtype=torch.float64)
        return sentence(
            lambda: zeropp.prepare(model, make(model.parameters()), zeropp.Config(**config)), zeropp.ConfigError
        )

    nvme = zeropp.Tier("nvme", path=tempfile.gettempdir())
    sentences = {
        "reduce": told(precision=zeropp.Precision(reduce="bf16")),
        "state": told(precision=zeropp.Precision(state="int8")),
        "comm": told(comm=zeropp.Comm(grads="int8")),
        "disk": told(offload=zeropp.Offload(optimizer=nvme)),
        "delayed": told(offload=zeropp.Offload(optimizer="cpu", delayed_update=1)),
        "lion": told(lambda p: zeropp.optim.Lion(p, lr=1e-3)),
        "lamb": told(lambda p: zeropp.optim.LAMB(p)),
    }
    for name, said in sentences.items():
        assert f"{KEYS[name]} does not combine with parameter 'weight' in float64: " in said, sentences


class Real(nn.Module):
    """A model in float64 without complex numbers, which the simulated GPU lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.lines = nn.ModuleList(nn.Linear(10, 10, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for line in self.lines:
            x = torch.tanh(line(x))
        return x * self.gain


def on_the_device(step: int, rank: int) -> Tensor:
    draw = torch.Generator("cpu").manual_seed(100 * step + rank)
    return torch.randn(4, 10, generator=draw, dtype=torch.float64, device="cpu").to(torch.get_default_device())


def trained_on_gpu(optimizer: str, clip: float | None, micro: int = 1, **config: Any) -> tuple[Any, Any, list[float]]:
    """Return the model, the same under plain torch, and the differences of their norms."""
    model, ours, plain, theirs = pair(optimizer, Real, accumulate=micro, units=(nn.Linear,), **config)
    ranks, off = dist.get_world_size(), []
    for step in range(4):
        for one in range(micro):
            model(on_the_device(micro * step + one, dist.get_rank())).square().mean().backward()
            for rank in range(ranks):
                (plain(on_the_device(micro * step + one, rank)).square().mean() / ranks / micro).backward()
        if clip is not None:
            norm = ours.clip_grad_norm_(clip)
            off.append(float(norm) / float(nn.utils.clip_grad_norm_(plain.parameters(), clip)) - 1)
        for one in (ours, theirs):
            one.step()
            one.zero_grad()
    getattr(ours, "flush", lambda: None)()
    return model, plain, off


@on_ranks(1, 2, devices=("sim", "sim-lazy", "sim-offload"))
@pytest.mark.parametrize(
    "optimizer, stage, micro",
    [("AdamW", 1, 1), ("AdamW", 3, 1), ("Adam, amsgrad", 2, 3), ("SGD", 3, 3), ("RMSprop", 3, 1)],
)
def test_trains_on_gpus(optimizer: str, stage: int, micro: int) -> None:
    with one_thread():
        model, plain, off = trained_on_gpu(optimizer, 0.01, micro, stage=stage)
        same(cpu(zeropp.full_state_dict(model)), cpu(plain.state_dict()))
        assert max(map(abs, off)) < CLOSE


@on_ranks(2, devices=("sim-lazy",))
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_trains_on_gpus_where_nccl_moves_the_shards(stage: int) -> None:
    with one_thread():
        model, plain, off = trained_on_gpu("AdamW", 0.01, stage=stage, comm=zeropp.Comm(gather="nccl"))
        same(cpu(zeropp.full_state_dict(model)), cpu(plain.state_dict()))
        assert max(map(abs, off)) < CLOSE


@on_ranks(1, 2, devices=("sim-lazy",))
def test_stage_0_and_the_step_in_the_backward_on_gpus() -> None:
    with one_thread():
        for config in ({"stage": 0}, {"stage": 3, "step_in_backward": True}):
            model, plain, _ = trained_on_gpu("AdamW", None, **config)
            same(cpu(zeropp.full_state_dict(model)), cpu(plain.state_dict()))


def cpu(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in values.items()}
