# SPDX-License-Identifier: Apache-2.0
"""A GPT with tied embeddings, its batches, and plain torch's way to train it: what the stages are measured
against."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zeropp
from data_parallel import data_parallel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zeropp.zero.engine import engine_of

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from gpt import GPT, GPTConfig

CONTEXT = 16
STAGES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3, gathering": {"stage": 3, "host_copy": "off", "prefetch": 0},
    "stage 3, gathering ahead": {"stage": 3, "host_copy": "off", "prefetch": 1 << 20},
}  # fmt: skip


def gpt(width: int = 48, layers: int = 2, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=layers, heads=4, width=width, context=CONTEXT)).to(dtype)


def checkpointed(model: Any, reentrant: bool) -> None:
    """Every block keeps its input only."""

    def around(plain: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: checkpoint(plain, x, use_reentrant=reentrant)

    for block in model.blocks:
        block.forward = around(block.forward)


def batch(step: int, micro: int = 0, rows: int = 2) -> tuple[Tensor, Tensor]:
    """Bytes of a sequence that can be learned: each one is the one before plus a step of its own."""
    draw = torch.Generator().manual_seed(10_000 * step + 100 * micro + dist.get_rank())
    with torch.device("cpu"):  # a generator draws on its own device only
        start, by = torch.randint(0, 256, (rows, 1), generator=draw), torch.randint(1, 4, (rows, 1), generator=draw)
        text = (start + by * torch.arange(CONTEXT + 1)) % 256
    text = text.to(torch.get_default_device())
    return text[:, :-1], text[:, 1:]


def train(model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    """The losses of those steps, each of one micro-batch."""
    losses = []
    for step in range(first, last):
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def loss_after_fifty_steps(model: Any, optimizer: Any) -> float:
    """Clipped, of eight rows each; the mean of the last ten losses."""
    losses = []
    for step in range(50):
        loss = model(*batch(step, rows=8))
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


@dataclass
class Recipe:
    """How both sides train."""

    steps: int = 50
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda params: torch.optim.AdamW(params, lr=3e-3)
    groups: Callable[[nn.Module], Any] = lambda model: model.parameters()
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    scheduler_first: bool = False
    """Is the scheduler built before `prepare`?"""
    micro: int = 1
    clip: float | None = None
    config: dict[str, Any] = field(default_factory=dict)


@dataclass
class Run:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)


def reference(recipe: Recipe, dtype: torch.dtype = torch.float32) -> Run:
    """Train by torch DDP (gloo), torch's optimizer, torch's clipping."""
    model, run = gpt(dtype=dtype), Run()
    ddp = data_parallel(model)
    optimizer = recipe.optimizer(recipe.groups(model))
    scheduler = recipe.scheduler(optimizer) if recipe.scheduler else None
    for step in range(recipe.steps):
        total = 0.0
        for micro in range(recipe.micro):
            last = micro == recipe.micro - 1
            with contextlib.nullcontext() if last or ddp is model else ddp.no_sync():
                loss = ddp(*batch(step, micro)) / recipe.micro
                loss.backward()
            total += loss.item()
        if recipe.clip is not None:
            run.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip).item())
        _finish_step(run, total, optimizer, scheduler)
    run.values = {n: p.detach().clone() for n, p in model.named_parameters()}
    return run


def ours(recipe: Recipe, **config: Any) -> Run:
    """The same by zeropp: no_sync between, one reduction at the end."""
    model, run = gpt(), Run()
    optimizer = recipe.optimizer(recipe.groups(model))
    scheduler = recipe.scheduler(optimizer) if recipe.scheduler and recipe.scheduler_first else None
    model, optimizer = zeropp.prepare(model, optimizer, zeropp.Config(**recipe.config, **config))
    if recipe.scheduler and not recipe.scheduler_first:
        scheduler = recipe.scheduler(optimizer)
    accumulates = recipe.config.get("accumulate", 1) > 1
    for step in range(recipe.steps):
        total = 0.0
        for micro in range(recipe.micro):
            last = micro == recipe.micro - 1
            with contextlib.nullcontext() if last or accumulates else zeropp.no_sync(model):
                loss = model(*batch(step, micro))
                (loss if accumulates else loss / recipe.micro).backward()
            total += loss.item() / recipe.micro
            if accumulates and not last:  # as users write it: step and zero_grad in every micro-step
                optimizer.step()
                optimizer.zero_grad()
        if recipe.clip is not None and "clip" not in recipe.config:
            run.norms.append(float(optimizer.clip_grad_norm_(recipe.clip)))
        _finish_step(run, total, optimizer, scheduler)
    with zeropp.gathered(model):
        run.values = {n: p.detach().clone() for n, p in model.named_parameters()}
    return run


def _finish_step(run: Run, loss: float, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()
    if scheduler is not None:
        scheduler.step()
    run.losses.append(loss)
    run.rates.append([float(group["lr"]) for group in optimizer.param_groups])


def rounded(norms: list[float]) -> list[float]:
    """Return the norms as a GPU's tensors have them: a step on the host of a GPU returns more digits than one on the GPU."""
    return norms if torch.get_default_device().type == "cpu" else torch.tensor(norms, device="cpu").tolist()


def same(what: str, got: Run, want: Run) -> None:
    """Bit for bit."""
    assert got.losses == want.losses, f"{what}: losses part at step {_first_difference(got.losses, want.losses)}"
    got_norms, want_norms = rounded(got.norms), rounded(want.norms)
    assert got_norms == want_norms, f"{what}: norms part at step {_first_difference(got_norms, want_norms)}"
    assert got.rates == want.rates, what
    for name, value in want.values.items():
        assert torch.equal(got.values[name], value), f"{what}: {name} off by {(got.values[name] - value).abs().max()}"


def _first_difference(a: list[float], b: list[float]) -> str:
    at = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
    return f"{at}: {a[at]!r} and {b[at]!r}"


def within_rounding(what: str, got: Run, plain: Run, exact: Run) -> None:
    """`got` is as near to plain torch in fp32 as rounding allows.

    How far rounding moves this training is measured, not guessed: `exact` is plain torch in float64, so
    |plain - exact| is what fp32 rounding, amplified by the training itself, does to the losses. Two fp32 runs whose
    roundings are unrelated differ by about sqrt(2) of that; 4 times the largest so far leaves room for an unlucky
    draw, and 8 units in the last place for steps where both happen to round alike.
    """
    u = 2.0**-24
    noise = 0.0
    for step, (mine, theirs, true) in enumerate(zip(got.losses, plain.losses, exact.losses, strict=True)):
        noise = max(noise, abs(theirs - true))
        most = 4 * noise + 8 * u * abs(theirs)
        assert abs(mine - theirs) <= most, (
            f"{what}: loss {mine} at step {step}, torch's {theirs}, more than {most} apart"
        )
    for step, (mine, theirs) in enumerate(zip(got.norms, plain.norms, strict=True)):
        assert abs(mine - theirs) <= 1e-3 * theirs, f"{what}: norm {mine} at step {step}, torch's {theirs}"
    assert got.rates == plain.rates, what


def every_stage(
    recipe: Recipe, plain: Run | None = None, exact: Run | None = None, stages: Any = None
) -> dict[str, Any]:
    """All stages equal to each other, and to DDP within rounding."""
    plain = plain or reference(copy.copy(recipe))
    exact = exact or reference(copy.copy(recipe), torch.float64)
    first: Run | None = None
    for name, config in STAGES.items():
        if stages is not None and name not in stages:
            continue
        got = ours(recipe, **config)
        within_rounding(name, got, plain, exact)
        if first is not None:
            same(f"{name} against the first stage", got, first)
        first = first or got
    assert first is not None
    return {"first": first.losses[0], "last": first.losses[-1]}


def master_values(model: nn.Module) -> dict[str, Tensor]:
    """Whole fp32 masters by name, put together from every rank's shard."""
    engine, found = engine_of(model), {}
    for unit in engine.units:
        whole = unit.master
        if not engine.local:
            parts = [torch.empty_like(unit.master) for _ in range(engine.ranks)]
            dist.all_gather(parts, unit.master)
            whole = torch.cat(parts)
        for entry in unit.params:
            values = whole[entry.offset_elems : entry.offset_elems + entry.numel]
            found[entry.names[0]] = values.view(entry.shape).clone()
    return found


def goes_on_from_each(
    folder: Path,
    prepared: Callable[..., tuple[Any, Any]],
    plain: dict[str, Any],
    held: Sequence[dict[str, Any]],
    until: int,
) -> None:
    """Save after 3 steps with each of the configurations ``held``, load with each of them: the losses go on as with ``plain``."""
    model, optimizer = prepared(**plain)
    first, wanted = train(model, optimizer, 0, 3), train(model, optimizer, 3, until)
    for index, source in enumerate(held):
        model, optimizer = prepared(**source)
        assert train(model, optimizer, 0, 3) == first
        zeropp.save(folder, model, optimizer, step=index)
        for target in held:
            model, optimizer = prepared(**target)
            train(model, optimizer, 10, 11)  # what the load must overwrite
            assert zeropp.load(folder, model, optimizer)["step"] == index
            assert train(model, optimizer, 3, until) == wanted, (source, target)
