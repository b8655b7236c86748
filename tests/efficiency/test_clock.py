# SPDX-License-Identifier: Apache-2.0
"""The clock of a prepared model: steps, micro-steps, training or not, and where it stands after a load."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import zeropp
from ranks import on_ranks
from torch import nn
from zeropp import Config, Efficiency, Growth
from zeropp.zero.engine import engine_of

EFFICIENCY = Efficiency(seq_length=Growth(1, 8, steps=4))
Seen = list[tuple[int, int, bool]]


def prepared(make: Any = torch.optim.AdamW, **fields: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return zeropp.prepare(model, make(model.parameters(), lr=1e-3), Config(efficiency=EFFICIENCY, **fields))


def steps(model: nn.Module, optimizer: Any, count: int, micro: int) -> Seen:
    clock, seen = engine_of(model).clock, []
    handle = model[0].register_forward_hook(
        lambda module, inputs, result: seen.append((clock.step, clock.micro_step, clock.training(module)))
    )
    for _ in range(count):
        for at in range(micro):
            with zeropp.no_sync(model) if at < micro - 1 and engine_of(model).accumulate == 1 else torch.enable_grad():
                model(torch.ones(2, 4)).sum().backward()
            if engine_of(model).accumulate > 1:
                optimizer.step()
                optimizer.zero_grad()
        if engine_of(model).accumulate == 1:
            optimizer.step()
            optimizer.zero_grad()
    handle.remove()
    return seen


def folder() -> str:
    found = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return os.path.join(found[0], "ckpt")  # type: ignore[arg-type]  # noqa: PTH118


@on_ranks(1, 2)
def test_counts_micro_steps_of_either_kind_of_accumulation() -> None:
    wanted = [(step, at, True) for step in range(2) for at in range(3)]
    assert steps(*prepared(), 2, 3) == wanted
    assert steps(*prepared(accumulate=3), 2, 3) == wanted


@on_ranks(1, 2)
def test_says_where_the_samples_of_a_rank_stand_in_the_global_batch() -> None:
    model, _ = prepared()
    clock = engine_of(model).clock
    assert clock.first_sample(5) == 5 * dist.get_rank()
    model(torch.ones(2, 4)).sum().backward()
    assert clock.first_sample(5) == 5 * (dist.get_world_size() + dist.get_rank())


@on_ranks(1, 2)
def test_a_load_restores_the_step_for_every_optimizer() -> None:
    for make in (torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad, zeropp.optim.LAMB):
        for fields in ({"stage": 0}, {"stage": 3}):
            model, optimizer = prepared(make, **fields)
            steps(model, optimizer, 3, 1)
            path = folder()
            zeropp.save(path, model, optimizer, step=99)
            again, other = prepared(make, **fields)
            zeropp.load(path, again, other)
            assert engine_of(again).clock.step == 3, (make, fields)
            assert steps(again, other, 1, 1) == [(3, 0, True)]


@on_ranks(1, 2)
def test_a_load_restores_the_step_where_no_parameter_took_them_all() -> None:
    """As with adapters in layers that some steps leave out."""
    model, optimizer = prepared(stage=2)
    for at in (0, 1, 0, 1):
        model[at](torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    path = folder()
    zeropp.save(path, model, optimizer)
    again, other = prepared(stage=3)
    zeropp.load(path, again, other)
    assert engine_of(model).clock.step == engine_of(again).clock.step == 4


@on_ranks(1)
def test_evaluation_and_generation_do_not_train() -> None:
    model, _ = prepared()
    clock, seen = engine_of(model).clock, []
    model[0].register_forward_hook(lambda module, inputs, result: seen.append(clock.training(module)))
    with torch.no_grad():
        model(torch.ones(2, 4))  # as generate does in training mode
    model.eval()
    model(torch.ones(2, 4))
    model.train()
    assert seen == [False, False]
    assert clock.training(model) and (clock.step, clock.micro_step) == (0, 0)


@on_ranks(1)
def test_a_checkpointed_block_trains_in_both_of_its_runs() -> None:
    for reentrant in (True, False):
        model, _ = prepared()
        clock, seen = engine_of(model).clock, []
        inner = model[1].forward

        def run(x: torch.Tensor, inner: Any = inner, seen: Any = seen, clock: Any = clock, model: Any = model) -> Any:
            seen.append((clock.micro_step, clock.training(model[1])))
            return inner(x)

        model[1].forward = lambda x, run=run, kind=reentrant: torch.utils.checkpoint.checkpoint(
            run, x, use_reentrant=kind
        )
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
        assert seen == [(0, True), (0, True)], reentrant
