# SPDX-License-Identifier: Apache-2.0
"""Pieces of messages: a value, a count, a time, some ranks. Each is one line, and none raises."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["are", "counted", "one_line", "ranks_named", "seconds", "shown", "what_it_is"]

_MOST_CHARACTERS = 200
_LONG_CHARACTERS = 60
_MOST_RANKS = 8


def shown(value: object) -> str:
    """`repr(value)`, shortened.

    An int of more than 4300 digits has no `repr`, and a user's class may raise in its own.
    """
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__} without a repr>"
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def what_it_is(value: object) -> str:
    """An argument of a wrong type: `3, an int`, `the class Linear`, `None`; the type alone where the value is long."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text, kind = shown(value), type(value).__name__
    kind = f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"
    return kind if len(text) > _LONG_CHARACTERS or "\n" in text else f"{text}, {kind}"


def counted(count: int, thing: str) -> str:
    """`1 unit`, `2 units`."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def are(count: int) -> str:
    """`is` after one thing, else `are`."""
    return "is" if count == 1 else "are"


def seconds(value: float) -> str:
    """`0.35 s`, `12.5 s`, `1800 s`."""
    return f"{value:.3g} s" if value < 100 else f"{value:.0f} s"


def ranks_named(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 3, 5 and 7`; of many the first ones, and how many more."""
    first = [str(rank) for rank in ranks[:_MOST_RANKS]]
    if len(ranks) > _MOST_RANKS:
        return f"ranks {', '.join(first)} and {len(ranks) - _MOST_RANKS} more"
    if len(first) == 1:
        return f"rank {first[0]}"
    return f"ranks {', '.join(first[:-1])} and {first[-1]}"


def one_line(error: BaseException) -> str:
    """The first line of an error's message that is not empty, with the next where it ends in a colon; the name of its class where it
    says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
