# SPDX-License-Identifier: Apache-2.0
"""Config(precision=Precision(state="bf16" | "int8")): training with optimizers' states in fewer bits.

The operator on whole parameters is the reference here (tests/ops/test_moments.py holds it to the definition): random bits
and blocks count from a parameter's first element, so shards must have the operator's bits; of 8 bits where no shard cuts
a block. The gradients it is given are the ones that zeropp shows, which test_parity.py compares with DDP's."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from ranks import on_ranks, shards_tier
from torch import Tensor, nn
from training import STAGES, batch, gpt, loss_after_fifty_steps, train
from zeropp.zero.engine import engine_of

LR = 3e-3
MOMENTS = ("exp_avg", "exp_avg_sq")
WHOLE = ("stage 0",)  # where no parameter is cut


def prepared(state: str, config: dict[str, Any], **adam: Any) -> tuple[nn.Module, Any]:
    model = gpt()
    precision = zeropp.Precision(state=state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, **adam)
    return zeropp.prepare(model, optimizer, zeropp.Config(precision=precision, **config))


def moments_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {f"{n}/{kind}": zeropp.get_full(p, kind) for n, p in model.named_parameters() for kind in MOMENTS}


def _operator(model: nn.Module, state: str, amsgrad: bool) -> tuple[list[str], list[Tensor], dict[str, Any]]:
    """Parameters in the model's order of units, whole, and moments of zeros for the operator."""
    names = [entry.names[0] for unit in engine_of(model).units for entry in unit.params]
    with zeropp.gathered(model):
        values = dict(model.named_parameters())
        params = [values[name].detach().clone().reshape(-1) for name in names]
    kind = torch.uint8 if state == "int8" else torch.bfloat16
    moments = [[torch.zeros(p.numel(), dtype=kind) for p in params] for _ in range(2 + amsgrad)]
    scales = [torch.zeros(zeropp.ops.moments_scales(p.numel())) for _ in moments for p in params]
    return names, params, {
        "exp_avgs": moments[0], "exp_avg_sqs": moments[1], "max_exp_avg_sqs": moments[2] if amsgrad else (),
        "scales": scales if state == "int8" else (),
    }  # fmt: skip


def one_step(model: nn.Module, optimizer: Any, step: int) -> tuple[float, dict[str, Tensor]]:
    """Train one step. Return the loss, and the whole gradients that the step used."""
    loss = model(*batch(step))
    loss.backward()
    with zeropp.gathered(model, grads=True):
        shown = {n: p.grad.detach().clone().reshape(-1) for n, p in model.named_parameters()}
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), shown


def same_as_operator(state: str, name: str, amsgrad: bool = False) -> list[float]:
    model, optimizer = prepared(state, STAGES[name], amsgrad=amsgrad, weight_decay=0.1)
    names, params, moments = _operator(model, state, amsgrad)
    losses = []
    for step in range(1, 5):
        loss, shown = one_step(model, optimizer, step)
        grads = [shown[n] for n in names]
        zeropp.ops.adam_step_(params, grads, **moments, step=step, lr=LR, weight_decay=0.1)
        with zeropp.gathered(model):
            values = dict(model.named_parameters())
            for n, want in zip(names, params, strict=True):
                assert torch.equal(values[n].detach().reshape(-1), want), (state, name, step, n)
        losses.append(loss)
    return losses


@on_ranks(2)
def test_every_stage_bf16() -> None:
    first = None
    for name in STAGES:
        losses = same_as_operator("bf16", name, amsgrad=name == "stage 2")
        if name != "stage 2":
            assert first in (None, losses), name
            first = losses


@on_ranks(1, 2)
def test_every_stage_int8() -> None:
    for amsgrad in (False, True):
        for name in WHOLE if dist.get_world_size() > 1 else STAGES:
            same_as_operator("int8", name, amsgrad)
    first = None
    for name, config in STAGES.items():  # the same slices: the same bits
        if name not in WHOLE:
            losses = train(*prepared("int8", config), 0, 6)
            assert first in (None, losses), name
            first = losses


@on_ranks(2)
def test_bytes_held() -> None:
    """The bytes of moments a parameter of this rank's shard."""
    found = {}
    for state in ("fp32", "bf16", "int8"):
        model, optimizer = prepared(state, {"stage": 3})
        train(model, optimizer, 0, 1)
        kinds = zeropp.memory(model, optimizer)[shards_tier()]["optimizer"]
        elems = sum(unit.shard.numel() for unit in engine_of(model).units)
        found[state] = kinds["held"] / elems
        assert abs(kinds["planned"] - kinds["held"]) < 0.1 * kinds["held"], (state, kinds)
    # Two moments; in 8 bits 2 and a scale of 4 bytes for each block that a parameter's slice has a part of.
    assert found["fp32"] == 8.0 and found["bf16"] == 4.0, found
    assert 2 + 2 * 4 / 256 <= found["int8"] < 2.1, found


@on_ranks(2)
def test_checkpoints() -> None:
    """A resumed run is the uninterrupted one; every format is read into every other."""
    folder = Path(_shared_folder())
    for state in ("fp32", "bf16", "int8"):
        config = {"stage": 3, "host_copy": "off"}
        model, optimizer = prepared(state, config)
        train(model, optimizer, 0, 3)
        zeropp.save(folder / state, model, optimizer, step=3)
        moments = moments_of(model)
        losses = train(model, optimizer, 3, 6)
        for stage in (1, 3):
            again = prepared(state, {"stage": stage})
            assert zeropp.load(folder / state, *again)["step"] == 3
            assert train(*again, 3, 6) == losses, (state, stage)
        for other in ("fp32", "bf16", "int8"):
            model, optimizer = prepared(other, {"stage": 0})  # other slices, too
            zeropp.load(folder / state, model, optimizer)
            for key, found in moments_of(model).items():
                _check_converted(state, other, moments[key], found, key)
            train(model, optimizer, 3, 4)


def _check_converted(saved: str, held: str, want: Tensor | None, found: Tensor | None, key: str) -> None:
    assert want is not None and found is not None
    if held == "fp32" or held == saved == "bf16":
        assert torch.equal(found, want.to(found.dtype)), (saved, held, key)
    elif held == "bf16":
        assert torch.equal(found, want.bfloat16()), (saved, held, key)
    else:  # to the nearest level of the block: neighbours are at most 7/8 of the greater one apart, or level(1) = 8^-6
        greatest = want.abs().max().item()
        off = (found - want).abs()
        assert bool((off <= 0.44 * want.abs() + 8.0**-6 * greatest).all()), (saved, held, key)
        assert float(off.norm() / want.float().norm()) < 0.02, (saved, held, key)


@on_ranks(2)
def test_away() -> None:
    """zeropp.offload_states takes codes and scales to a file and back."""
    for state in ("bf16", "int8"):
        model, optimizer = prepared(state, {"stage": 1})
        first, losses = train(model, optimizer, 0, 2), train(model, optimizer, 2, 4)
        model, optimizer = prepared(state, {"stage": 1})
        assert train(model, optimizer, 0, 2) == first
        held = zeropp.memory(model, optimizer)[shards_tier()]["optimizer"]["held"]
        moved = zeropp.offload_states(optimizer=optimizer, to="nvme", path=_shared_folder())
        assert held - 4 * 2 * len(engine_of(model).units) <= moved <= held  # tensors of one element stay
        assert zeropp.memory(model, optimizer)[shards_tier()]["optimizer"]["held"] == 0
        zeropp.offload_states(optimizer=optimizer, to="cpu")
        assert train(model, optimizer, 2, 4) == losses, state


def _shared_folder() -> str:
    found = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(found, 0)
    return found[0]


@on_ranks(2)
def test_values() -> None:
    for state in ("bf16", "int8"):
        model, optimizer = prepared(state, {"stage": 3, "host_copy": "off"})
        param = next(iter(model.parameters()))
        assert zeropp.get_full(param, "exp_avg") is None
        train(model, optimizer, 0, 2)
        new = torch.linspace(-1, 1, param.numel()).view(param.shape)
        zeropp.set_full(param, new, "exp_avg")
        got = zeropp.get_full(param, "exp_avg")
        assert got is not None and got.shape == param.shape
        # bf16: 2^-9 of itself; 8 bits: half of the distance of levels near a block's greatest, 2 * 7/8 / 128
        assert bool(((got.float() - new).abs() <= (new.abs() * 2**-8 if state == "bf16" else 0.0069)).all())
        before = zeropp.get_local(param, "exp_avg_sq")
        assert before is not None
        zeropp.set_local(param, before.float(), "exp_avg_sq")
        after = zeropp.get_local(param, "exp_avg_sq")
        assert after is not None and torch.equal(after, before)
        train(model, optimizer, 2, 3)


@on_ranks(2)
def test_converges() -> None:
    """50 steps end where fp32 states end."""
    last = {}
    for state in ("fp32", "bf16", "int8"):
        model, optimizer = prepared(state, {"stage": 3})
        last[state] = loss_after_fifty_steps(model, optimizer)
    for state in ("bf16", "int8"):
        assert abs(last[state] - last["fp32"]) < 0.03 * last["fp32"], last


@on_ranks(2)
def test_low_precision_parameters() -> None:
    """With bf16 parameters: master weights in fp32, moments in fewer bits, and parameters that are the masters rounded."""
    for state in ("bf16", "int8"):
        model = gpt()
        precision = zeropp.Precision(param="bf16", state=state)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        model, optimizer = zeropp.prepare(model, optimizer, zeropp.Config(precision=precision))
        losses = train(model, optimizer, 0, 10)
        assert losses[-1] < losses[0]
        for unit in engine_of(model).units:
            assert unit.master is not None
            assert all(
                torch.equal(unit.shard[f : f + n], unit.master[f : f + n].bfloat16()) for _, f, n in unit.pieces()
            )


# -- Lion, Adagrad, SGD, LAMB -------------------------------------------------------------------------------------------
OTHERS: dict[str, tuple[Any, dict[str, Any], tuple[str, ...], Any]] = {
    "Lion": (zeropp.optim.Lion, {"lr": 1e-3, "weight_decay": 0.1}, ("exp_avg",), zeropp.ops.lion_step_),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "lr_decay": 0.01}, ("sum",), zeropp.ops.adagrad_step_),
    "SGD": (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9}, ("momentum_buffer",), zeropp.ops.sgd_step_),
    "LAMB": (zeropp.optim.LAMB, {"lr": 1e-2}, ("exp_avg", "exp_avg_sq"), None),
}


def other(name: str, state: str | None, config: dict[str, Any], **more: Any) -> tuple[nn.Module, Any]:
    kind, rates, _, _ = OTHERS[name]
    model = gpt()
    optimizer = kind(model.parameters(), **rates, **more)
    return zeropp.prepare(model, optimizer, zeropp.Config(precision=zeropp.Precision(state=state), **config))


def _follow(name: str, state: str, stage: str) -> list[float]:
    """Four steps, each compared with the operator over whole parameters: bit for bit."""
    _, rates, states, operator = OTHERS[name]
    model, optimizer = other(name, state, STAGES[stage])
    names, params, _ = _operator(model, state, False)
    kind = torch.uint8 if state == "int8" else torch.bfloat16
    codes = [[torch.zeros(p.numel(), dtype=kind) for p in params] for _ in states]
    scales = [torch.zeros(zeropp.ops.moments_scales(p.numel())) for _ in states for p in params]
    losses = []
    for step in range(1, 5):
        loss, shown = one_step(model, optimizer, step)
        low = {"scales": scales} if state == "int8" else {}
        operator(params, [shown[n] for n in names], *codes, step=step, **rates, **low)
        with zeropp.gathered(model):
            values = dict(model.named_parameters())
            for n, want in zip(names, params, strict=True):
                assert torch.equal(values[n].detach().reshape(-1), want), (name, state, stage, step, n)
        losses.append(loss)
    return losses


@on_ranks(2)
def test_others_every_stage() -> None:
    """bf16: the operator's bits at every stage. 8 bits: where no shard cuts a block; equal shards give equal bits."""
    for name, (_, _, _, operator) in OTHERS.items():
        for state in ("bf16", "int8"):
            seen: dict[bool, list[float]] = {}
            for stage, config in STAGES.items():
                whole = state == "bf16" or stage in WHOLE
                followed = operator is not None and whole
                losses = _follow(name, state, stage) if followed else train(*other(name, state, config), 1, 5)
                assert seen.setdefault(whole, losses) == losses, (name, state, stage)


@on_ranks(2)
def test_others_checkpoints() -> None:
    """A resumed run is the uninterrupted one, and every format is read into every other; bytes are as few as they say."""
    folder = Path(_shared_folder())
    for name, (_, _, states, _) in OTHERS.items():
        for state in ("bf16", "int8"):
            model, optimizer = other(name, state, {"stage": 3, "host_copy": "off"})
            train(model, optimizer, 0, 2)
            held = zeropp.memory(model, optimizer)[shards_tier()]["optimizer"]
            assert abs(held["planned"] - held["held"]) < 0.1 * held["held"], (name, state, held)
            zeropp.save(folder / name / state, model, optimizer, step=2)
            moments = {kind: zeropp.get_full(next(iter(model.parameters())), kind) for kind in states}
            losses = train(model, optimizer, 2, 4)
            again = other(name, state, {"stage": 1})
            assert zeropp.load(folder / name / state, *again)["step"] == 2
            assert train(*again, 2, 4) == losses, (name, state)
            if name == "LAMB":  # of fp32 it has states of its own
                model, optimizer = other(name, "bf16" if state == "int8" else "int8", {"stage": 0})
            else:
                model, optimizer = other(name, None, {"stage": 0})
            zeropp.load(folder / name / state, model, optimizer)
            for kind, want in moments.items():
                found = zeropp.get_full(next(iter(model.parameters())), kind)
                other_kind = "fp32" if name != "LAMB" else "bf16" if state == "int8" else "int8"
                _check_converted(state, other_kind, want, found, kind)
            train(model, optimizer, 2, 3)


@on_ranks(2)
def test_adagrad_begins_above_zero() -> None:
    for state in ("bf16", "int8"):
        model, optimizer = other("Adagrad", state, {"stage": 2}, initial_accumulator_value=0.25)
        train(model, optimizer, 0, 1)
        sums = zeropp.get_full(next(iter(model.parameters())), "sum")
        assert sums is not None and 0.24 < float(sums.float().min()) < 0.26


def test_refusals() -> None:
    model = torch.nn.Linear(4, 4)
    with pytest.raises(zeropp.ConfigError, match=r"Precision.state: 'bf16' does not combine with SGD without"):
        config = zeropp.Config(precision=zeropp.Precision(state="bf16"))
        zeropp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
    for optimizer in (torch.optim.RMSprop, zeropp.optim.OneBitAdam, zeropp.optim.OneBitLamb):
        with pytest.raises(
            zeropp.ConfigError, match=f"Precision.state: 'int8' does not combine with optimizer {optimizer.__name__}"
        ):
            config = zeropp.Config(stage=1, precision=zeropp.Precision(state="int8"))
            zeropp.prepare(model, optimizer(model.parameters(), lr=0.1), config)
    for kind in ("optimizer", "params", "grads"):
        offload = zeropp.Offload(**{kind: zeropp.Tier("nvme", path="/tmp")})
        with pytest.raises(zeropp.ConfigError, match=f"Precision.state: 'bf16' does not combine with .*offload.{kind}"):
            zeropp.Config(precision=zeropp.Precision(state="bf16"), offload=offload)
