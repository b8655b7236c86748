# SPDX-License-Identifier: Apache-2.0
"""LAMB, Muon and the one-bit optimizers on models with experts: prepared, and what one process or the paper makes of them."""

from __future__ import annotations

from typing import Any

import moe_models
import torch
import torch.distributed as dist
import zeropp
from moe_models import batch, loss_of
from reference import onebit_adam
from torch import Tensor, nn
from zeropp.zero.engine import engine_of
from zeropp.zero.model.spread import Spread
from zeropp.zero.prepare import prepare_over
from zeropp.zero.step.onebit import CHUNK_ELEMS

LR, STEPS = 1e-2, 3
# So small that no token changes its experts where two ways to sum differ.
MUON = {"lr": 1e-4, "weight_decay": 0.1}


def lamb(model: nn.Module) -> torch.optim.Optimizer:
    return zeropp.optim.LAMB(model.parameters(), lr=LR, weight_decay=0.01)


def _is_hidden(name: str, parameter: Tensor) -> bool:
    """Return True for Muon's. A router's gradients add up to 0 over the experts, so one direction of it is rounding alone."""
    return parameter.ndim >= 2 and not any(one in name for one in ("embed", "lm_head", "gate.weight"))


def muon(model: nn.Module) -> torch.optim.Optimizer:
    hidden = [p for n, p in model.named_parameters() if _is_hidden(n, p)]
    others = [p for n, p in model.named_parameters() if not _is_hidden(n, p)]
    return zeropp.optim.Muon([{"params": hidden}, {"params": others, "use_muon": False}], **MUON)


class MuonOfEach:
    """torch.optim.Muon over each matrix, every expert a parameter of its own, and AdamW over the others."""

    def __init__(self, model: nn.Module) -> None:
        hidden = [p for n, p in model.named_parameters() if _is_hidden(n, p)]
        others = [p for n, p in model.named_parameters() if not _is_hidden(n, p)]
        self.whole = [
            (p, [nn.Parameter(one) for one in (p.detach() if p.ndim == 3 else p.detach()[None])]) for p in hidden
        ]
        self.muon = torch.optim.Muon([one for _, matrices in self.whole for one in matrices], **MUON)
        self.adam = torch.optim.AdamW(others, **MUON)

    def step(self) -> None:
        for parameter, matrices in self.whole:
            gradient = parameter.grad
            assert gradient is not None
            for one, matrix in zip(matrices, gradient if parameter.ndim == 3 else gradient[None], strict=True):
                one.grad = matrix.clone()
        self.muon.step()
        self.adam.step()


def one_process(name: str, make: Any, ranks: int, steps: int = STEPS) -> dict[str, Tensor]:
    """Return the values after some steps on all ranks' batches."""
    model = moe_models.build(name)
    optimizer = make(model)
    for step in range(steps):
        loss_of(model, torch.cat([batch(step, rank) for rank in range(ranks)])).backward()
        optimizer.step()
        model.zero_grad()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def trained(name: str, make: Any, config: zeropp.Config, ranks: Any = None, steps: int = STEPS) -> Any:
    """Return the values after some steps of a prepared model; ``ranks``: of all their batches on this rank alone."""
    model = moe_models.build(name, "grouped_mm")
    model, optimizer = prepare_over(ranks, model, make(model), config)
    for step in range(steps):
        every = range(dist.get_world_size()) if ranks is not None else [dist.get_rank()]
        loss_of(model, torch.cat([batch(step, rank) for rank in every])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return zeropp.full_state_dict(model)


def close(got: dict[str, Tensor], wanted: dict[str, Tensor], bound: float) -> None:
    for name, value in wanted.items():
        error = (got[name] - value).abs().max().item()
        assert error <= bound, (name, error, bound)


# Where a gradient is near 0, one fp32 rounding of it moves the element of an update by a part of itself; a wrong ratio of norms, or one
# for each rank, moves every element by a good part of lr.
LAMB_BOUND = 5e-3 * LR
# As tests/zero/test_muon.py: an ulp of the momentum may cross a border where it is rounded to bf16. sqrt(2): the tall matrices' factor.
MUON_BOUND = 10 * 2.0**-8 * MUON["lr"] * STEPS * 2**0.5


# -- one bit -------------------------------------------------------------------------------------------------------------

ONE_BIT: dict[str, Any] = {
    "1-bit Adam": lambda model: zeropp.optim.OneBitAdam(model.parameters(), lr=LR, freeze_step=2),
    "1-bit LAMB": lambda model: zeropp.optim.OneBitLamb(model.parameters(), lr=LR, freeze_step=2),
}  # fmt: skip


class Given(nn.Module):
    """A tensor whose gradients are given."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(37, 9, generator=torch.Generator().manual_seed(seed)))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.a * gradient).sum()


class Two(nn.Module):
    """A tensor that all ranks have, and one that differs between the parts."""

    def __init__(self, part: int) -> None:
        super().__init__()
        self.shared, self.apart = Given(0), Given(1 + part)

    def forward(self, gradients: tuple[Tensor, Tensor]) -> Tensor:
        return self.shared(gradients[0]) + self.apart(gradients[1])


def given(step: int, rank: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(37, 9, generator=draw) + 0.5, torch.randn(37, 9, generator=draw) - 0.5


RATES = {"lr": LR, "weight_decay": 0.1}
FROZEN = {"var_freeze_step": 4, "var_update_scaler": 2, "local_step_scaler": 2}
PAPERS: dict[str, Any] = {
    "1-bit Adam": (zeropp.optim.OneBitAdam, onebit_adam.OneBitAdam, {"freeze_step": 3}),
    "0/1 Adam": (zeropp.optim.ZeroOneAdam, onebit_adam.ZeroOneAdam, {**FROZEN, "local_step_clipper": 1}),
    "0/1 Adam, local steps": (zeropp.optim.ZeroOneAdam, onebit_adam.ZeroOneAdam, {**FROZEN, "local_step_clipper": 2}),
}  # fmt: skip


def one_bit_follows_its_paper(kind: str) -> None:
    """Two of four ranks have each part: those two average it, over half as many ranks as the others, divided by all of them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ours, paper, more = PAPERS[kind]
    local = more.get("local_step_clipper", 1) > 1
    for stage in (0,) if local else (0, 1, 2):
        model = Two(rank % 2)
        spread = [Spread(name="apart", modules=(model.apart,), parts=2)]
        config = zeropp.Config(stage=stage, units=[Given])
        model, optimizer = prepare_over(None, model, ours(model.parameters(), **RATES, **more), config, spread)
        units = {unit.params[0].names[0]: unit for unit in engine_of(model).units}
        wanted = {}
        for name, sharers in (("shared.a", 4), ("apart.a", 2)):
            with zeropp.gathered(model):
                value = dict(model.named_parameters())[name].detach().reshape(-1).double()
            flat = nn.functional.pad(value, (0, units[name].elems - value.numel()))
            real = nn.functional.pad(torch.ones_like(value), (0, units[name].elems - value.numel()))
            wanted[name] = paper(flat, real, sharers, CHUNK_ELEMS, **RATES, **more)
        for step in range(10):
            model(given(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            for at, (name, want) in enumerate(wanted.items()):
                members = range(ranks) if at == 0 else range(rank % 2, ranks, 2)
                share = len(members) / ranks
                every = [given(step, one)[at].reshape(-1).double() * share for one in members]
                want.step([nn.functional.pad(one, (0, units[name].elems - one.numel())) for one in every])
        with zeropp.gathered(model):
            for name, parameter in model.named_parameters():
                seen = parameter.detach().reshape(-1).double()
                # As tests/zero/test_onebit.py: a sign that differs would show as lr.
                torch.testing.assert_close(seen, wanted[name].x[: seen.numel()], rtol=0, atol=1e-3 * LR * 10)
