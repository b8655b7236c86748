# SPDX-License-Identifier: Apache-2.0
"""Words that a step reads when it runs: grad_scale as a tensor is the same number, bit for bit, and skip writes nothing."""

from __future__ import annotations

import pytest
import torch
from helpers import step_calls
from helpers.step_calls import CASES, STEPS
from torch import Tensor

SCALE = 0.37


def word(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor([value], dtype=dtype)


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(map(torch.equal, left, right))


@pytest.mark.parametrize(("op", "kind"), CASES)
def test_a_tensor_gives_the_bits_of_the_number(op: str, kind: str) -> None:
    scales = {"grad_scale": SCALE} if STEPS[op][2] else {}
    words = {"grad_scale": word(SCALE)} if STEPS[op][2] else {}
    wanted = step_calls.call(op, step_calls.tensors_of(op, kind), **scales)
    found = step_calls.call(op, step_calls.tensors_of(op, kind), **words, skip=word(0, torch.int32))
    assert equal(wanted, found)
    if STEPS[op][2]:
        assert not equal(found, step_calls.call(op, step_calls.tensors_of(op, kind)))


@pytest.mark.parametrize(("op", "kind"), CASES)
def test_a_skipped_step_writes_nothing(op: str, kind: str) -> None:
    before = [tensor for tensors in step_calls.tensors_of(op, kind).values() for tensor in tensors]
    found = step_calls.call(op, step_calls.tensors_of(op, kind), skip=word(1, torch.int32))
    assert equal(before, found[: len(before)])
    assert all(not result.any() for result in found[len(before) :])  # lamb_moments_: sums


def test_words_of_the_wrong_kind_are_refused() -> None:
    lists = step_calls.tensors_of("lion_step_", "fp32")
    with pytest.raises(ValueError, match="lion_step_: grad_scales is float64, wanted float32"):
        step_calls.call("lion_step_", lists, grad_scale=word(1.0, torch.float64))
    with pytest.raises(ValueError, match="lion_step_: skips has 2 elements, wanted 1: one for all parameters"):
        step_calls.call("lion_step_", lists, skip=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"lion_step_: skip\[0\] is a bool, wanted a tensor"):
        step_calls.call("lion_step_", lists, skip=True)
