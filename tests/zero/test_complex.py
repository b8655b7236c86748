# SPDX-License-Identifier: Apache-2.0
"""Complex parameters: held as pairs of numbers, trained as torch trains them."""

from __future__ import annotations

import copy
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from ranks import on_cpu_only, on_ranks
from safetensors.torch import load_file
from tiny import sentence
from torch import Tensor, nn

SENTENCES = {
    "value": "clip_grad_value_ clamps elements, and has no meaning for complex parameters, such as 'gain'",
    "norm": "clip_grad_norm_: norm_type 1.0 has no meaning for complex parameters",
    "muon": "torch.complex64, wanted real matrices",
}

CONFIGS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0}, "stage 1": {"stage": 1}, "stage 2": {"stage": 2}, "stage 3": {"stage": 3},
    "gathering": {"stage": 3, "host_copy": "off"}, "bf16": {"stage": 3, "host_copy": "off", "precision": "bf16"},
    "int8 states": {"stage": 2, "precision": zeropp.Precision(state="int8")},
}  # fmt: skip


class Spectral(nn.Module):
    """Mixes channels of the lowest frequencies (Li et al. 2021, arXiv:2010.08895); a conjugated weight, and a real one."""

    def __init__(self, channels: int = 6, modes: int = 5) -> None:
        super().__init__()
        on_cpu_only("the simulated GPU has no complex tensors")
        self.modes = modes
        self.mix = nn.Parameter(torch.randn(channels, channels, modes, dtype=torch.complex64) / channels)
        self.phase = nn.Parameter(torch.randn(modes, dtype=torch.complex64))
        self.point = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        low = torch.fft.rfft(x.float(), dim=1)[:, : self.modes]
        mixed = torch.einsum("bmi,iom->bmo", low, self.mix) * self.phase.conj().unsqueeze(-1)
        return torch.fft.irfft(mixed, n=x.shape[1], dim=1).to(x.dtype) + self.point(x)


class Operator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5 + 0.5j))  # of no dimension
        self.blocks = nn.ModuleList(Spectral() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x * self.gain.abs()


def pair(optimizer: str, **config: Any) -> tuple[Any, Any, Any, Any]:
    torch.manual_seed(0)
    plain = Operator()
    model = copy.deepcopy(plain)
    make = {
        "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    }[optimizer]
    return (*zeropp.prepare(model, make(model.parameters()), zeropp.Config(**config)), plain, make(plain.parameters()))


def loss_of(model: Any, step: int) -> Tensor:
    """Return a loss that is equal on every rank."""
    draw = torch.Generator().manual_seed(step)
    x, wanted = torch.randn(2, 4, 16, 6, generator=draw)
    return (model(x).float() - wanted).square().mean()


def steps(model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = loss_of(model, step)
        loss.backward()
        if hasattr(optimizer, "clip_grad_norm_"):
            optimizer.clip_grad_norm_(0.5)
        else:
            for p in model.parameters():  # torch's optimizers raise on lazily conjugated ones
                p.grad = p.grad.resolve_conj()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def same(got: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == wanted.keys()
    for name, values in wanted.items():
        assert got[name].dtype.is_complex == values.dtype.is_complex, name
        assert got[name].shape == values.shape, name
        torch.testing.assert_close(
            got[name].to(values.dtype), values, rtol=tolerance, atol=tolerance, msg=lambda s, n=name: f"{n}: {s}"
        )


@on_ranks(1, 2)
@pytest.mark.parametrize(
    "name, optimizer", [*((name, "AdamW") for name in CONFIGS), ("gathering", "SGD"), ("stage 2", "RMSprop")]
)
def test_trains(name: str, optimizer: str) -> None:
    """Losses, gradients, values and states of five clipped steps."""
    config = CONFIGS[name]
    tolerance = {"bf16": 0.05, "int8 states": 0.05}.get(name, 2e-5)
    model, ours, plain, theirs = pair(optimizer, **config)
    loss_of(model, 99).backward()
    loss_of(plain, 99).backward()
    grads = {n: p.grad for n, p in plain.named_parameters()}
    same({n: zeropp.get_full(p, "grad") for n, p in model.named_parameters()}, grads, tolerance)
    ours.zero_grad()
    theirs.zero_grad()
    for a, b in zip(steps(model, ours, 0, 5), steps(plain, theirs, 0, 5), strict=True):
        assert abs(a - b) <= tolerance * b, (name, a, b)
    same(zeropp.full_state_dict(model), plain.state_dict(), tolerance)
    if optimizer == "AdamW" and name not in ("bf16", "int8 states"):
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            for kind in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(zeropp.get_full(p, kind), theirs.state[q][kind], rtol=1e-3, atol=1e-6)


class Product(nn.Module):
    """d|p f|/dp is a conjugated view, which autograd hands over as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(40, dtype=torch.complex64))

    def forward(self, factor: Tensor) -> Tensor:
        return (self.p * factor).real.sum()


@on_ranks(1, 2)
def test_conjugated() -> None:
    """Such a gradient is taken for what it is."""
    on_cpu_only("the simulated GPU has no complex tensors")
    factor = torch.randn(40, dtype=torch.complex64, generator=torch.Generator().manual_seed(3))
    for config in (CONFIGS["stage 2"], CONFIGS["gathering"]):
        torch.manual_seed(0)
        plain = Product()
        model = copy.deepcopy(plain)
        model, ours = zeropp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5), zeropp.Config(**config))
        plain(factor).backward()
        model(factor).backward()
        torch.testing.assert_close(zeropp.get_full(model.p, "grad"), plain.p.grad.resolve_conj())
        ours.step()
        torch.testing.assert_close(zeropp.get_full(model.p), (plain.p - 0.5 * plain.p.grad).detach().resolve_conj())


@on_ranks(1, 2)
def test_kept() -> None:
    """Checkpoints, state dicts, files for others, shards from construction, other stages."""
    model, ours, _, _ = pair("AdamW", **CONFIGS["gathering"])
    steps(model, ours, 0, 2)
    paths = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(paths)
    try:
        _kept(Path(paths[0]), model, ours)
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(paths[0])


def _kept(folder: Path, model: Any, ours: Any) -> None:
    zeropp.save(folder / "ckpt", model, ours)
    zeropp.export(model, folder / "whole")
    wanted = zeropp.full_state_dict(model)
    after = steps(model, ours, 2, 4)
    for name in ("gathering", "stage 1"):
        other, theirs, _, _ = pair("AdamW", **CONFIGS[name])
        zeropp.load(folder / "ckpt", other, theirs)
        same(zeropp.full_state_dict(other), wanted, 0)
        assert steps(other, theirs, 2, 4) == after, name
    loaded = load_file(folder / "whole" / "model.safetensors")
    same(loaded, wanted, 0)
    for source in (folder / "whole", wanted):
        torch.manual_seed(7)
        with zeropp.sharded_init():
            fresh = Operator()
        fresh, _ = zeropp.prepare(fresh, None, zeropp.Config(**CONFIGS["gathering"]))
        torch.manual_seed(7)
        same(zeropp.full_state_dict(fresh), Operator().state_dict(), 0)
        zeropp.load_full_state_dict(fresh, source)
        same(zeropp.full_state_dict(fresh), wanted, 0)
    if dist.get_rank() == 0:
        from zeropp.checkpoint.offline import whole_state

        same(whole_state(folder / "ckpt", None), wanted, 0)
    p = next(p for p in fresh.parameters() if p.ndim == 3)
    zeropp.set_full(p, torch.full(p.shape, 2 - 3j))
    assert bool((zeropp.get_full(p) == 2 - 3j).all())
    begin, end = zeropp.local_range(p)
    assert zeropp.get_local(p).tolist() == [2.0 if i % 2 == 0 else -3.0 for i in range(begin, end)]


@on_ranks(1, 2)
def test_refusals() -> None:
    model, ours, _, _ = pair("SGD", **CONFIGS["gathering"])
    loss_of(model, 0).backward()
    told = {
        "value": sentence(lambda: ours.clip_grad_value_(0.1), zeropp.ConfigError),
        "norm": sentence(lambda: ours.clip_grad_norm_(0.1, norm_type=1.0), zeropp.ConfigError),
        "muon": sentence(lambda: zeropp.optim.Muon([torch.ones(2, 2, dtype=torch.complex64)]), ValueError),
    }
    assert {name for name, said in told.items() if SENTENCES[name] in said} == set(SENTENCES), told
