# SPDX-License-Identifier: Apache-2.0
"""1-bit Adam, 0/1 Adam, 1-bit LAMB, and LAMB on shards: against their papers' algorithms (tests/reference), stages
against each other, bytes, resuming, bad input."""

from __future__ import annotations

import math
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from ranks import on_ranks, shards_tier
from reference import lamb, onebit_adam, onebit_lamb
from torch import Tensor, nn
from training import batch, gpt
from zeropp.zero.engine import engine_of
from zeropp.zero.step.onebit import CHUNK_ELEMS

SENTENCES = [
    "Config.stage: 3 does not combine with optimizer OneBitAdam",
    "Config.stage: 2 does not combine with ZeroOneAdam.local_step_clipper=16",
    "zeropp.optim.OneBitLamb.step: it sends local gradients itself, so it works inside zeropp.prepare only",
    "were accumulated inside no_sync and not reduced",
    "no parameter has a gradient",
    "are not finite",
]

STEPS = 14
ADAM = {"lr": 1e-2, "weight_decay": 0.1}
OPTIMIZERS: dict[str, Any] = {
    "1-bit Adam": lambda p: zeropp.optim.OneBitAdam(p, freeze_step=5, **ADAM),
    "0/1 Adam": lambda p: zeropp.optim.ZeroOneAdam(
        p, var_freeze_step=9, var_update_scaler=2, local_step_clipper=1, **ADAM
    ),
    "1-bit LAMB": lambda p: zeropp.optim.OneBitLamb(p, freeze_step=5, **ADAM),
    "LAMB": lambda p: zeropp.optim.LAMB(p, **ADAM),
}  # fmt: skip
LOCAL = {"var_freeze_step": 6, "var_update_scaler": 2, "local_step_scaler": 3, "local_step_clipper": 4}


# --- the papers ---------------------------------------------------------------------------------------------------------
class Given(nn.Module):
    """Two tensors whose gradients are given; the last elements of the first never get one."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.a = nn.Parameter(torch.randn(37, 9, generator=draw))
        self.b = nn.Parameter(torch.randn(50, generator=draw) * 0.1)

    def forward(self, gradients: tuple[Tensor, Tensor]) -> Tensor:
        return (self.a * gradients[0]).sum() + (self.b * gradients[1]).sum()


def gradients_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1000 * step + rank)
    a = torch.randn(37, 9, generator=draw) + 0.5 * torch.sin(torch.arange(333.0)).view(37, 9)
    a[35:] = 0
    return a, 0.01 * torch.randn(50, generator=draw) + 0.01


def flat(model: nn.Module, values: list[Tensor]) -> Tensor:
    """Return values as the unit lays them out."""
    (unit,) = engine_of(model).units
    out = torch.zeros(unit.elems, dtype=torch.float64)
    for entry, value in zip(unit.params, values, strict=True):
        out[entry.offset_elems : entry.offset_elems + entry.numel] = value.detach().reshape(-1).double()
    return out


def whole(model: nn.Module) -> list[Tensor]:
    return list(zeropp.full_state_dict(model).values())


def real(model: nn.Module) -> Tensor:
    """1 where an element belongs to a tensor."""
    return flat(model, [torch.ones(entry.shape) for entry in engine_of(model).units[0].params])


def follows(make: Any, reference: Any, stage: int, steps: int, *, compare_every: int = 1) -> None:
    model = Given()
    model, optimizer = zeropp.prepare(model, make(model.parameters()), zeropp.Config(stage=stage, units=[Given]))
    ranks = dist.get_world_size()
    want = reference(model, flat(model, whole(model)), ranks)
    for step in range(steps):
        model(gradients_of(step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        want.step([flat(model, list(gradients_of(step, rank))) for rank in range(ranks)])
        if (step + 1) % compare_every == 0:
            seen = flat(model, whole(model))
            # One step moves a parameter by about lr; each of some ten operations of a step rounds to fp32, and sums
            # behind a scale add 500 terms in fp32. A sign that differs would show as lr, a hundred times more.
            torch.testing.assert_close(seen, want.x, rtol=0, atol=1e-4 * ADAM["lr"] * (step + 1) + 4e-7 * 4)


@on_ranks(2, 3)
def test_one_bit_adam() -> None:
    def reference(model: nn.Module, x: Tensor, ranks: int) -> Any:
        return onebit_adam.OneBitAdam(x, real(model), ranks, CHUNK_ELEMS, freeze_step=5, **ADAM)

    for stage in (0, 1, 2):
        follows(OPTIMIZERS["1-bit Adam"], reference, stage, STEPS)


@on_ranks(2)
def test_zero_one_adam() -> None:
    def reference(model: nn.Module, x: Tensor, ranks: int) -> Any:
        return onebit_adam.ZeroOneAdam(
            x,
            real(model),
            ranks,
            CHUNK_ELEMS,
            var_freeze_step=9,
            var_update_scaler=2,
            local_step_scaler=100,
            local_step_clipper=1,
            **ADAM,
        )

    for stage in (0, 1, 2):
        follows(OPTIMIZERS["0/1 Adam"], reference, stage, STEPS)


@on_ranks(2)
def test_zero_one_adam_local_steps() -> None:
    """Intervals 1, 1, 1, 2, 2, 2, 4, ...: compared where all ranks agree."""

    def reference(model: nn.Module, x: Tensor, ranks: int) -> Any:
        return onebit_adam.ZeroOneAdam(x, real(model), ranks, CHUNK_ELEMS, **LOCAL, **ADAM)

    follows(lambda p: zeropp.optim.ZeroOneAdam(p, **LOCAL, **ADAM), reference, 0, 24, compare_every=4)


@on_ranks(2)
def test_a_local_step_is_not_lost() -> None:
    """A tensor without a gradient in the step of the agreement moves by what it moved before, as far as one bit tells."""
    model = Given()
    made = {**LOCAL, "var_freeze_step": 2, "local_step_scaler": 1, "local_step_clipper": 2}
    model, optimizer = zeropp.prepare(
        model,
        zeropp.optim.ZeroOneAdam(model.parameters(), lr=1e-2, betas=(0.0, 0.999), **made),
        zeropp.Config(stage=0, units=[Given]),
    )
    seen = []
    for step in range(6):  # agreements: 3, 4, 6; a is local in 5, and without a gradient in 6
        ones = torch.ones(37, 9), torch.ones(50)
        loss = model.b.sum() if step == 5 else model(ones)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append([one.clone() for one in whole(model)])
    before, local, agreed = (seen[at][0] for at in (3, 4, 5))
    ratio = (before - agreed) / (before - local)
    assert bool((before - local > 5e-3).all()) and bool(((ratio - 1).abs() < 0.3).all()), ratio


@on_ranks(2)
def test_one_bit_lamb() -> None:
    def reference(model: nn.Module, x: Tensor, ranks: int) -> Any:
        (unit,) = engine_of(model).units
        spans = [(e.offset_elems, e.offset_elems + e.numel) for e in unit.params]
        return onebit_lamb.OneBitLamb(x, spans, ranks, CHUNK_ELEMS, freeze_step=5, **ADAM)

    for stage in (0, 1, 2):
        follows(OPTIMIZERS["1-bit LAMB"], reference, stage, STEPS)


class _Lamb:
    def __init__(self, model: nn.Module, x: Tensor) -> None:
        (unit,) = engine_of(model).units
        self.spans = [slice(e.offset_elems, e.offset_elems + e.numel) for e in unit.params]
        self.x, self.m, self.v, self.t = x, torch.zeros_like(x), torch.zeros_like(x), 0

    def step(self, gradients: list[Tensor]) -> None:
        self.t += 1
        g = torch.stack(gradients).mean(0)
        for at in self.spans:
            self.x[at], self.m[at], self.v[at], _, _ = lamb.step(
                self.x[at], self.m[at], self.v[at], g[at], t=self.t, **ADAM
            )


@on_ranks(2)
def test_sliced_lamb() -> None:
    for stage in (0, 1, 2, 3):
        follows(OPTIMIZERS["LAMB"], lambda model, x, ranks: _Lamb(model, x), stage, 6)


# --- stages, phases ------------------------------------------------------------------------------------------------------
def train(
    make: Any, steps: int, *, clip: float | None = None, micro: int = 1, **config: Any
) -> tuple[list[float], Any]:
    model = gpt()
    model, optimizer = zeropp.prepare(model, make(model.parameters()), zeropp.Config(accumulate=micro, **config))
    losses = [one_step(model, optimizer, step, clip, micro) for step in range(steps)]
    return losses, zeropp.full_state_dict(model)


def one_step(model: Any, optimizer: Any, step: int, clip: float | None = None, micro: int = 1) -> float:
    total = 0.0
    for at in range(micro):
        loss = model(*batch(step, at))
        optimizer.backward(loss)
        total += loss.item()
        if clip is not None and at == micro - 1:
            optimizer.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
    return total / micro


@on_ranks(2)
def test_every_stage() -> None:
    """Stages 0, 1 and 2 equal each other bit for bit: plain, clipped and accumulated, in fp32 and bf16."""
    for name, make in OPTIMIZERS.items():
        for more in ({}, {"clip": 0.5, "micro": 2}, {"precision": "bf16"}):
            if more and name != "1-bit Adam":
                continue
            runs = [train(make, 8, stage=stage, **more) for stage in (0, 1, 2)]
            for losses, values in runs[1:]:
                assert losses == runs[0][0], (name, more, losses, runs[0][0])
                assert all(torch.equal(values[key], runs[0][1][key]) for key in values), (name, more)


@on_ranks(2, pytest.param("2 hosts", marks=pytest.mark.slow), devices=("sim-lazy",))
def test_gpus_have_the_bits_of_the_cpu() -> None:
    """A GPU compresses, adds and steps in kernels; messages go through the host, also to another one."""
    made = {**OPTIMIZERS, "local steps": lambda p: zeropp.optim.ZeroOneAdam(p, **LOCAL, **ADAM)}
    cases = [("1-bit Adam", 0), ("1-bit Adam", 2), ("0/1 Adam", 1), ("1-bit LAMB", 2), ("local steps", 0)]

    def values(make: Any, stage: int, device: str) -> list[Tensor]:
        with torch.device(device):
            model = Given()
            model, optimizer = zeropp.prepare(
                model, make(model.parameters()), zeropp.Config(stage=stage, units=[Given], device=device)
            )
            for step in range(STEPS):
                with torch.device("cpu"):
                    gradients = gradients_of(step, dist.get_rank())
                model(tuple(one.to(device) for one in gradients)).backward()
                optimizer.step()
                optimizer.zero_grad()
            return [value.cpu() for value in whole(model)]

    for name, stage in cases:
        here, there = (values(made[name], stage, device) for device in ("sim", "cpu"))
        assert all(torch.equal(mine, wanted) for mine, wanted in zip(here, there, strict=True)), (name, stage)


@on_ranks(2)
def test_warm_up_is_adamw() -> None:
    plain, values = train(lambda p: torch.optim.AdamW(p, **ADAM), 5, stage=2)
    for make in (
        OPTIMIZERS["1-bit Adam"],
        lambda p: zeropp.optim.ZeroOneAdam(p, var_update_scaler=9, local_step_clipper=1, **ADAM),
    ):
        losses, mine = train(make, 5, stage=2)
        assert losses == plain, (losses, plain)
        assert all(torch.equal(mine[key], values[key]) for key in values)


@on_ranks(2)
def test_learns() -> None:
    """Beside AdamW: the mean loss of the last steps of one and of the other."""
    answer = []
    for make in (
        lambda p: torch.optim.AdamW(p, lr=3e-3), lambda p: zeropp.optim.OneBitAdam(p, lr=3e-3, freeze_step=20),
        lambda p: zeropp.optim.ZeroOneAdam(
            p, lr=3e-3, var_freeze_step=30, var_update_scaler=8, local_step_scaler=15, local_step_clipper=2
        ),
    ):  # fmt: skip
        losses, _ = train(make, 60, stage=0)
        answer.append(sum(losses[-10:]) / 10)
    exact, *ones = answer
    # 60 steps from a loss of 5.5: all three learn; the gap is noise of short runs, bounded generously.
    assert exact < 4 and all(one < exact + 0.3 for one in ones), answer


# --- bytes ---------------------------------------------------------------------------------------------------------------
def bytes_of(step: Any) -> dict[str, int]:
    zeropp.traffic(reset=True)
    step()
    return {kind: row["bytes"] for kind, row in zeropp.traffic()["shm"].items() if row["bytes"]}


@on_ranks(2)
def test_moves_one_bit() -> None:
    """n/8 bytes and the scales each way; stages 1 and 2 the parameters besides; a few bytes a unit and rank for norms."""
    ranks = dist.get_world_size()
    for name in ("1-bit Adam", "0/1 Adam", "1-bit LAMB"):
        for stage in (0, 1, 2):
            model = gpt()
            model, optimizer = zeropp.prepare(model, OPTIMIZERS[name](model.parameters()), zeropp.Config(stage=stage))
            for step in range(STEPS - 1):
                one_step(model, optimizer, step)
            units = engine_of(model).units
            message = sum(4 * math.ceil(math.ceil(u.shard_elems / CHUNK_ELEMS) + u.shard_elems / 8 / 4) for u in units)
            parameters = 0 if stage == 0 else sum(u.shard_elems * 4 for u in units)
            seen = bytes_of(lambda: one_step(model, optimizer, STEPS))  # noqa: B023
            assert seen.pop("all_to_all") == (ranks - 1) * message, (name, stage)
            small = seen.pop("all_gather") - (ranks - 1) * (message + parameters)
            tensors = sum(len(u.params) for u in units)
            assert 0 <= small <= (ranks - 1) * (16 * len(units) + 32 * tensors + 64), (name, stage, small)
            assert not seen, (name, stage, seen)
            exact = 4 * sum(u.elems for u in units)
            assert message * ranks < exact / 30, "32 times fewer, but for the scales"


@on_ranks(2)
def test_local_steps_send_nothing() -> None:
    model = gpt()
    make = {"lr": 1e-6, "var_freeze_step": 1, "var_update_scaler": 1, "local_step_scaler": 1, "local_step_clipper": 4}
    model, optimizer = zeropp.prepare(
        model, zeropp.optim.ZeroOneAdam(model.parameters(), **make), zeropp.Config(stage=0)
    )
    seen = []
    for step in range(12):
        seen.append(bytes_of(lambda: one_step(model, optimizer, step)).get("all_to_all", 0) > 0)  # noqa: B023
    assert [step + 1 for step, sent in enumerate(seen) if sent] == [2, 4, 8, 12], seen


@on_ranks(2)
def test_holds_what_is_planned() -> None:
    """Errors whole and of a shard, messages, moments of a shard; padding of these small units is 10% at most."""
    for stage in (0, 2):
        model = gpt(width=128)
        model, optimizer = zeropp.prepare(
            model, zeropp.optim.OneBitAdam(model.parameters(), freeze_step=1), zeropp.Config(stage=stage)
        )
        for step in range(3):
            one_step(model, optimizer, step)
        seen = zeropp.memory(model, optimizer)[shards_tier()]["optimizer"]
        numel, ranks = sum(p.numel() for p in model.parameters()), dist.get_world_size()
        states = 8 if stage == 0 else 8 / ranks
        wanted = numel * (states + 4 + 4 / ranks + 3 / 8 + 12 / CHUNK_ELEMS)
        assert abs(seen["planned"] - wanted) <= 1 and wanted <= seen["held"] <= 1.1 * wanted, (stage, seen, wanted)


@on_ranks(2)
def test_skips_an_overflow() -> None:
    """fp16: a step whose local gradient overflows on one rank is skipped on all, and nothing is owed for it."""
    model = gpt()
    model, optimizer = zeropp.prepare(
        model,
        zeropp.optim.OneBitAdam(model.parameters(), lr=1e-4, freeze_step=2),
        zeropp.Config(stage=2, precision="fp16"),
    )
    for step in range(4):
        one_step(model, optimizer, step)
    before, owed = (
        zeropp.full_state_dict(model),
        [s.reducer.worker_error.clone() for s in engine_of(model).strategy.slots],
    )
    scale = optimizer.loss_scale
    optimizer.backward(model(*batch(4)).float() * (1e9 if dist.get_rank() == 1 else 1.0))
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.overflow and optimizer.loss_scale < scale, (optimizer.overflow, optimizer.loss_scale)
    after = zeropp.full_state_dict(model)
    assert all(torch.equal(after[name], before[name]) for name in before)
    for slot, error in zip(engine_of(model).strategy.slots, owed, strict=True):
        assert torch.equal(slot.reducer.worker_error, error)
    one_step(model, optimizer, 5)
    assert not optimizer.overflow


@on_ranks(1)
def test_one_rank() -> None:
    """Nothing to send: the variance is frozen all the same, and the momentum is exact."""
    for name in ("0/1 Adam", "1-bit LAMB", "LAMB"):
        losses, _ = train(OPTIMIZERS[name], STEPS, stage=2)
        assert all(math.isfinite(loss) for loss in losses), (name, losses)

    def reference(model: nn.Module, x: Tensor, ranks: int) -> Any:
        made = onebit_adam.OneBitAdam(x, real(model), ranks, CHUNK_ELEMS, freeze_step=5, **ADAM)
        made.mean = lambda values: values[0]
        return made

    follows(OPTIMIZERS["1-bit Adam"], reference, 1, STEPS)


# --- checkpoints ---------------------------------------------------------------------------------------------------------
@on_ranks(2)
def test_resumes_exactly() -> None:
    """In every phase, and between agreements of local steps: the losses that follow are those of the run that went on."""
    makers = dict(OPTIMIZERS)
    makers["local steps"] = lambda p: zeropp.optim.ZeroOneAdam(
        p, lr=1e-5, **{**LOCAL, "var_freeze_step": 4, "local_step_scaler": 2}
    )
    for name, make in makers.items():
        stage = 0 if name == "local steps" else 2
        for at in (7, 11) if stage == 0 else (7,):
            folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
            dist.broadcast_object_list(folder, 0)
            model = gpt()
            model, optimizer = zeropp.prepare(model, make(model.parameters()), zeropp.Config(stage=stage))
            for step in range(at):
                one_step(model, optimizer, step)
            zeropp.save(folder[0], model, optimizer)
            want = [one_step(model, optimizer, step) for step in range(at, at + 5)]
            model = gpt()
            model, optimizer = zeropp.prepare(model, make(model.parameters()), zeropp.Config(stage=stage))
            zeropp.load(folder[0], model, optimizer)
            seen = [one_step(model, optimizer, step) for step in range(at, at + 5)]
            assert seen == want, (name, at, seen, want)


@on_ranks(2)
def test_loads_at_another_stage() -> None:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, 0)
    make = OPTIMIZERS["1-bit Adam"]
    want: list[float] = []
    for stage in (1, 0, 2):
        model = gpt()
        model, optimizer = zeropp.prepare(model, make(model.parameters()), zeropp.Config(stage=stage))
        if want:
            zeropp.load(folder[0], model, optimizer)
        else:
            for step in range(7):
                one_step(model, optimizer, step)
            zeropp.save(folder[0], model, optimizer)
        seen = [one_step(model, optimizer, step) for step in range(7, 10)]
        assert not want or seen == want, (stage, seen, want)
        want = seen


# --- bad input -----------------------------------------------------------------------------------------------------------
def sentence(call: Any) -> str:
    try:
        call()
    except zeropp.Error as error:
        return str(error)
    return "nothing was raised"


@on_ranks(2)
def test_refuses() -> None:
    def prepared(optimizer: Any, stage: int) -> Any:
        model = gpt()
        return zeropp.prepare(model, optimizer(model.parameters()), zeropp.Config(stage=stage))

    found = [
        sentence(lambda: prepared(zeropp.optim.OneBitAdam, 3)),
        sentence(lambda: prepared(zeropp.optim.ZeroOneAdam, 2)),
        sentence(lambda: zeropp.optim.OneBitLamb(gpt().parameters()).step()),
    ]
    model, optimizer = prepared(lambda p: zeropp.optim.OneBitAdam(p, freeze_step=1), 1)
    one_step(model, optimizer, 0)
    with zeropp.no_sync(model):
        model(*batch(1)).backward()
    found.append(sentence(optimizer.step))
    optimizer.zero_grad()
    found.append(sentence(optimizer.step))
    loss = model(*batch(1)) * (math.inf if dist.get_rank() == 1 else 1.0)
    loss.backward()
    found.append(sentence(optimizer.step))
    optimizer.zero_grad()
    one_step(model, optimizer, 2)  # and goes on
    assert all(want in seen for want, seen in zip(SENTENCES, found, strict=True)), found


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda p: zeropp.optim.OneBitAdam(p, freeze_step=0), "freeze_step is 0, wanted a whole number >= 1"),
        (lambda p: zeropp.optim.OneBitAdam(p, lr=-1.0), "lr is -1.0, wanted lr >= 0 and finite"),
        (lambda p: zeropp.optim.OneBitAdam(p, betas=(0.9, 1.0)), r"betas\[1\] is 1.0, wanted 0 <= beta < 1"),
        (lambda p: zeropp.optim.ZeroOneAdam(p, var_update_scaler=1.5), "var_update_scaler is 1.5, wanted a whole number"),
        (lambda p: zeropp.optim.ZeroOneAdam(p, local_step_clipper=True), "local_step_clipper is True, wanted a whole"),
        (lambda p: zeropp.optim.OneBitLamb(p, min_coeff=3.0, max_coeff=2.0), "min_coeff is 3.0, max_coeff 2.0, wanted"),
        (lambda p: zeropp.optim.OneBitLamb(p, coeff_beta=1.0), "coeff_beta is 1.0, wanted 0 <= coeff_beta < 1"),
        (lambda p: zeropp.optim.OneBitLamb(p, factor_threshold=-0.1), "factor_threshold is -0.1, wanted"),
    ],
)  # fmt: skip
def test_numbers_out_of_range_are_refused(make: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make([torch.nn.Parameter(torch.zeros(3))])
