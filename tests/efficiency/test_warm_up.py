# SPDX-License-Identifier: Apache-2.0
"""Sequence-length warm-up against plain torch: at several numbers of ranks and micro-steps, and after a kill."""

from __future__ import annotations

import functools
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import zeropp
from helpers.launch import run_ranks
from zeropp import Config, Efficiency, Growth, LayerDrop, TokenDrop, elastic

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from gpt import GPT, GPTConfig

ROWS, CONTEXT, STEPS = 6, 16, 8
SCHEDULE = Growth(4, CONTEXT, steps=6, multiple=4)
LENGTHS = [4, 4, 8, 8, 12, 12, 16, 16]
# Sums of fp32 numbers in another order: relative 2**-24 a sum, losses up to 6, eight steps of AdamW.
FP32 = 2e-5


def gpt() -> Any:
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=2, heads=4, width=32, context=CONTEXT))


def adamw(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    start, by = torch.randint(0, 256, (ROWS, 1), generator=draw), torch.randint(1, 4, (ROWS, 1), generator=draw)
    text = (start + by * torch.arange(CONTEXT + 1)) % 256
    return text[:, :-1], text[:, 1:]


@functools.cache
def plain() -> list[float]:
    """Return plain torch's losses over batches cut by hand."""
    model = gpt()
    optimizer, losses = adamw(model), []
    for step in range(STEPS):
        inputs, targets = batch(step)
        loss = model(inputs[:, : LENGTHS[step]], targets[:, : LENGTHS[step]])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_step(model: Any, optimizer: Any, share: Any, step: int, ranks: int) -> list[float]:
    """Train one step over this rank's share of the batch; return its loss over all ranks and the length."""
    total, length = torch.zeros(()), 0
    for part in share:
        rows = [tensor[part.sequences.start : part.sequences.stop] for tensor in batch(step)]
        elastic.place(model, part)
        inputs, targets = zeropp.data.cut(rows, model)
        length = inputs.shape[1]
        loss = part.weight * model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach() / len(share) / ranks
    if ranks > 1:
        torch.distributed.all_reduce(total)
    return [total.item(), length]


def curve(rank: int, ranks: int, folder: str, accumulate: int, stage: int, kill_at: int) -> list[list[float]]:
    """Train from the checkpoint in ``folder``, or from the start; return (loss, length) of each step."""
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
    share = elastic.share(ROWS, ROWS // ranks // accumulate, rank=rank, ranks=ranks)
    config = Config(stage=stage, accumulate=len(share), efficiency=Efficiency(seq_length=SCHEDULE))
    model = gpt()
    model, optimizer = zeropp.prepare(model, adamw(model), config)
    first = zeropp.load(folder, model, optimizer)["step"] if (Path(folder) / "latest").exists() else 0
    found = []
    for step in range(first, STEPS):
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        found.append(train_step(model, optimizer, share, step, ranks))
        if step == 2:
            zeropp.save(folder, model, optimizer, step=step + 1)
    return found


def dropping(rank: int, ranks: int, accumulate: int) -> list[float]:
    """Train with tokens dropped and sequences cut; return the loss of each step."""
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
    share = elastic.share(ROWS, -(-ROWS // ranks // accumulate), rank=rank, ranks=ranks)
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=4, heads=4, width=32, context=CONTEXT))
    efficiency = Efficiency(seq_length=SCHEDULE, token_drop=TokenDrop(keep=Growth(2, CONTEXT, steps=12)))
    model, optimizer = zeropp.prepare(model, adamw(model), Config(accumulate=len(share), efficiency=efficiency))
    found = []
    for step in range(4):
        found.append(train_step(model, optimizer, share, step, ranks)[0])
    return found


def check(found: list[list[float]], first: int = 0) -> None:
    assert [length for _, length in found] == LENGTHS[first:]
    assert [loss for loss, _ in found] == pytest.approx(plain()[first:], abs=FP32)


@pytest.mark.parametrize(("ranks", "accumulate", "stage"), [(1, 1, 3), (1, 3, 0), (2, 1, 2), (2, 3, 3)])
def test_equals_plain_torch_over_batches_cut_by_hand(ranks: int, accumulate: int, stage: int, tmp_path: Path) -> None:
    for outcome in run_ranks(ranks, curve, str(tmp_path / "ckpt"), accumulate, stage, -1):
        check(outcome.value)


def test_shares_of_any_number_of_ranks_keep_the_same_tokens() -> None:
    one, *others = [
        outcome.value
        for ranks, micro in ((1, 1), (1, 3), (2, 1), (2, 3))
        for outcome in run_ranks(ranks, dropping, micro)
    ]
    for other in others:
        assert other == pytest.approx(one, abs=FP32)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_killed_run_continues_on_another_number_of_ranks(before: int, after: int, tmp_path: Path) -> None:
    killed = run_ranks(before, curve, str(tmp_path / "ckpt"), 1, 3, 5, check=False)
    assert all(outcome.code == -signal.SIGKILL for outcome in killed)
    for outcome in run_ranks(after, curve, str(tmp_path / "ckpt"), 3, 3, -1):
        check(outcome.value, first=3)


def together(rank: int, ranks: int, folder: str, resumed: bool) -> list[float]:
    """Train with shorter sequences, fewer tokens and fewer layers at once; return the loss of each step."""
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=4, heads=4, width=32, context=CONTEXT))
    efficiency = Efficiency(
        seq_length=SCHEDULE,
        token_drop=TokenDrop(keep=Growth(2, CONTEXT, steps=12)),
        layer_drop=LayerDrop(theta=0.5, gamma=0.5),
    )
    model, optimizer = zeropp.prepare(model, adamw(model), Config(efficiency=efficiency))
    first = zeropp.load(folder, model, optimizer)["step"] if resumed else 0
    each, found = ROWS // ranks, []
    for step in range(first, STEPS):
        rows = [tensor[rank * each : (rank + 1) * each] for tensor in batch(step)]
        loss = model(*zeropp.data.cut(rows, model))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach() / ranks
        if ranks > 1:
            torch.distributed.all_reduce(total)
        found.append(total.item())
        if step == 3 and not resumed:
            zeropp.save(folder, model, optimizer, step=step + 1)
    model.eval()
    plain = GPT(GPTConfig(layers=4, heads=4, width=32, context=CONTEXT)).eval()
    plain.load_state_dict(zeropp.full_state_dict(model))
    with torch.no_grad():
        rows = zeropp.data.cut(list(batch(0)), model)
        assert torch.equal(model(*rows), plain(*batch(0))), "an evaluation leaves out nothing"
    return found


def test_all_at_once_at_any_number_of_ranks_and_after_a_load(tmp_path: Path) -> None:
    two = next(outcome.value for outcome in run_ranks(2, together, str(tmp_path / "ckpt"), False))
    (one,) = [outcome.value for outcome in run_ranks(1, together, str(tmp_path / "one"), False)]
    (resumed,) = [outcome.value for outcome in run_ranks(1, together, str(tmp_path / "ckpt"), True)]
    assert two == pytest.approx(one, abs=FP32) and len(set(one)) == STEPS
    assert resumed == pytest.approx(one[4:], abs=FP32)
