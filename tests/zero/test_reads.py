# SPDX-License-Identifier: Apache-2.0
"""A released parameter answers with metadata and refuses every read by name; p.grad is never wrong in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from reads_cases import CASES, METADATA, MODEL_READS, MODES, READS, SCALAR_READS

WRITES = ("in place add", "add_", "zero_", "assign an element", "copy_ into it", "init", "load_state_dict")


@pytest.fixture(scope="module")
def outcomes(run_ranks: Callable[..., Any]) -> Any:
    return run_ranks("reads_cases", CASES, ranks=2)


@pytest.fixture(scope="module")
def alone(run_ranks: Callable[..., Any]) -> Any:
    return run_ranks("reads_cases", CASES, ranks=1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("read", [*READS, *SCALAR_READS, *MODEL_READS])
def test_reads_are_refused(read: str, mode: str, outcomes: Any) -> None:
    for answer in outcomes[f"every read, {mode}"].check():
        for when, found in answer.items():
            result = found[read]
            refused(read, when, result, 2)


def refused(read: str, when: str, result: dict[str, str], ranks: int) -> None:
    """The sentence names the parameter and the way out. Changing p.data has one of its own."""
    text = result.get("text", f"read {result.get('value')}")
    assert "partitioned over" in text or read == "set data", f"{read} {when}: {text}"
    assert "zeropp.gathered(parameter" in text, f"{read} {when}: {text}"
    if read != "set data":
        assert f"is partitioned over {ranks} rank{'s' if ranks > 1 else ''}," in text, text
    if read in READS or read in SCALAR_READS:
        assert ("'scalar'" if read in SCALAR_READS else "'blocks.1.weight'") in text, text
    if read in WRITES:
        assert "writes its values" in text and "write=True" in text, text


@pytest.mark.parametrize("read", METADATA)
def test_metadata_answers(read: str, outcomes: Any) -> None:
    for mode in MODES:
        for answer in outcomes[f"metadata, {mode}"].check():
            ours, plain = answer[read]
            assert ours == plain and "value" in ours, (mode, ours, plain)


@pytest.mark.parametrize("mode", MODES)
def test_printing_is_safe(mode: str, outcomes: Any) -> None:
    for answer in outcomes[f"printing, {mode}"].check():
        wanted = "PartitionedParameter('blocks.1.weight', shape=(8, 8), dtype=torch.float32)"
        assert answer["repr"] == answer["str"] == f"Parameter containing:\n{wanted}"
        assert answer["format"] == wanted
        assert wanted in answer["print"]
        assert "Linear(in_features=8, out_features=8" in answer["model"]


def test_unasked_writes_raise_where_a_copy_is_shared(outcomes: Any) -> None:
    for answer in outcomes["writing unasked, host copy"].check():
        assert "'blocks.0.weight' was changed inside zeropp.gathered" in answer and "write=True" in answer


TOLD = ("every read", "metadata", "printing", "writing unasked, host copy")


@pytest.mark.parametrize("case", [c for c in CASES if not c.startswith(TOLD)])
def test_two_ranks(case: str, outcomes: Any) -> None:
    outcomes[case].check()


def test_one_rank_refuses_alike(alone: Any) -> None:
    """A script that works on one process must not fail on two."""
    for outcome in alone.values():
        outcome.check()
    (answer,) = alone["every read, host copy"].check()
    for when, found in answer.items():
        for read, result in found.items():
            refused(read, when, result, 1)
