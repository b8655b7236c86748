# SPDX-License-Identifier: Apache-2.0
"""Pieces of messages (zeropp/errors.py): counts with their plural, ranks by name, values that cannot be shown."""

from __future__ import annotations

import torch
from zeropp.errors import are, counted, one_line, ranks_named, seconds, shown, what_it_is


class Mute:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def test_counts_ranks_and_times() -> None:
    assert [counted(count, "unit") for count in (0, 1, 2, 12345)] == ["0 units", "1 unit", "2 units", "12,345 units"]
    assert [are(count) for count in (0, 1, 2)] == ["are", "is", "are"]
    assert [ranks_named(ranks) for ranks in ([3], [1, 2], [0, 1, 5])] == ["rank 3", "ranks 1 and 2", "ranks 0, 1 and 5"]
    assert ranks_named(range(1, 64)) == "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 55 more"
    assert [seconds(value) for value in (0.3456, 12.34, 600, 1800)] == ["0.346 s", "12.3 s", "600 s", "1800 s"]


def test_values_that_are_long_or_cannot_be_shown() -> None:
    assert shown("x" * 500) == "'" + "x" * 199 + "..." and shown(Mute()) == "<Mute without a repr>"
    assert shown(10**5000) == "<int without a repr>"
    said = [what_it_is(value) for value in (None, 3, "adam", torch.nn.Linear, torch.ones(9, 9))]
    assert said == ["None", "3, an int", "'adam', a str", "the class Linear", "a Tensor"]
    assert one_line(ValueError("\n first \nsecond")) == "first" and one_line(KeyError()) == "KeyError"
    assert one_line(TypeError("field 'x':\n  expected int")) == "field 'x': expected int"
