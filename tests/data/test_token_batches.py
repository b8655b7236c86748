# SPDX-License-Identifier: Apache-2.0
"""Batches by tokens: against DeepSpeed's rule tried for every end, over ranks, and the learning rate."""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

import pytest
import torch
import zeropp
from hypothesis import given, settings
from hypothesis import strategies as st
from zeropp.data import TokenBatchSampler


def tried(lengths: list[int], samples: list[int], max_tokens: int, max_batch: int | None) -> list[list[int]]:
    """Pack samples by trying every end for every begin."""
    found, begin = [], 0
    samples = [sample for sample in samples if lengths[sample] <= max_tokens]
    while begin < len(samples):
        ends = [
            end for end in range(begin + 1, len(samples) + 1)
            if sum(lengths[sample] for sample in samples[begin:end]) <= max_tokens and end - begin <= (max_batch or end)
        ]  # fmt: skip
        found.append(samples[begin : max(ends)])
        begin = max(ends)
    return found


@settings(deadline=None, max_examples=80)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40), max_tokens=st.integers(30, 90), a_step=st.integers(1, 3),
    max_batch=st.one_of(st.none(), st.integers(1, 6)), order=st.sampled_from(["dataloader", "seqlen"]),
)  # fmt: skip
def test_micro_batches_take_what_fits(
    lengths: list[int], max_tokens: int, a_step: int, max_batch: int | None, order: str
) -> None:
    samples = sorted(range(len(lengths)), key=lambda i: lengths[i] if order == "seqlen" else i)
    wanted = tried(lengths, samples, max_tokens, max_batch)
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "micro_batches": a_step,
        "max_batch": max_batch,
        "order": order,
    }
    if len(wanted) < a_step:
        with pytest.raises(zeropp.ConfigError, match=f"a step has {a_step}"):
            TokenBatchSampler(lengths, **options)
        return
    sampler = TokenBatchSampler(lengths, **options)
    kept = wanted[: len(wanted) // a_step * a_step]
    assert list(sampler) == kept and len(sampler) == len(kept)
    assert sampler.left_out == len(lengths) - sum(map(len, kept))
    assert sampler.batch_sizes == [sum(map(len, kept[i : i + a_step])) for i in range(0, len(kept), a_step)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_share_each_step(ranks: int) -> None:
    lengths = torch.randint(1, 100, (500,), generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"max_tokens": 400, "micro_batches": 12, "order": "random", "seed": 3}
    alone = TokenBatchSampler(lengths, **options)
    each = [TokenBatchSampler(lengths, **options, rank=rank, ranks=ranks) for rank in range(ranks)]
    lists = [list(sampler) for sampler in each]
    a_rank = 12 // ranks
    for step in range(alone.steps_a_pass):
        got = [one for rank in lists for one in rank[step * a_rank : (step + 1) * a_rank]]
        assert got == alone.of_step(step)
        assert all(int(lengths[one].sum()) <= 400 for one in got)
    everything = [sample for one in alone for sample in one]
    assert len(set(everything)) == len(everything) == 500 - alone.left_out
    later = TokenBatchSampler(lengths, **options, rank=0, ranks=ranks, step=1)
    assert list(later) == lists[0][a_rank:] and later.step == alone.steps_a_pass
    assert list(later) == lists[0]  # the next pass
    first, second = (TokenBatchSampler(lengths, **options, rank=0, ranks=ranks) for _ in range(2))
    assert list(itertools.islice(first, 7)) == lists[0][:7]
    second.load_state_dict(first.state_dict())
    assert list(second) == lists[0][7:]


def test_the_learning_rate_follows_the_batch() -> None:
    lengths = [10, 10, 10, 10, 20, 20, 40]
    for scaling, wanted in (
        ("linear", [2.0, 1.0, 0.5]),
        ("sqrt", [math.sqrt(2), 1.0, math.sqrt(0.5)]),
        ("none", [1.0] * 3),
    ):
        sampler = TokenBatchSampler(lengths, max_tokens=40, micro_batches=1, base_batch=2, scaling=scaling)
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=3.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, sampler.lr_factor)
        for factor in (*wanted, *wanted):
            assert optimizer.param_groups[0]["lr"] == pytest.approx(3.0 * factor)
            optimizer.step()
            scheduler.step()


def test_samples_that_fit_nowhere_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    sampler = TokenBatchSampler([5, 99, 5, 8, 9, 2, 2], max_tokens=10, micro_batches=1, min_batch=2)
    assert list(sampler) == [[0, 2], [5, 6]] and sampler.left_out == 3
    assert "1 samples have more than 10 tokens" in caplog.text


def test_packing_takes_linear_time() -> None:
    lengths = torch.randint(1, 100, (400_000,))
    start = time.process_time()
    TokenBatchSampler(lengths, max_tokens=2000, micro_batches=8)
    assert time.process_time() - start < 5.0  # every end for every begin: minutes


def test_bad_arguments_are_named() -> None:
    def refused(said: str, **change: Any) -> None:
        options: dict[str, Any] = {"lengths": [3, 4], "max_tokens": 10, "micro_batches": 1, **change}
        with pytest.raises(zeropp.ConfigError, match=said):
            TokenBatchSampler(options.pop("lengths"), **options)

    refused("max_tokens 0", max_tokens=0)
    refused("step -1", step=-1)
    refused("seed 'x'", seed="x")
    refused("micro_batches 1.5", micro_batches=1.5)
    refused("max_batch 1 is below min_batch 2", min_batch=2, max_batch=1)
    refused("order 'longest'", order="longest")
    refused("scaling 'cubic'", scaling="cubic")
    refused(r"lengths of shape \[0\]", lengths=[])
    refused(r"lengths of shape \[2\]", lengths=[3, -1])
    refused("3 micro_batches cannot be shared evenly by 2 ranks", micro_batches=3, rank=0, ranks=2)
