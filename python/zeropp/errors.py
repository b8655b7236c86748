# SPDX-License-Identifier: Apache-2.0
"""Exceptions of zeropp: one base, one class for each kind of failure, so that callers can tell them apart.

Some also derive from the builtin that a caller without zeropp would catch. The C core raises them by name: the table is
csrc/base/status.def. Below them stand the pieces that messages are made of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "CheckpointError",
    "CommError",
    "CommTimeoutError",
    "ConfigError",
    "Error",
    "NotBuiltError",
    "PartitionedParameterError",
    "TierError",
]


class Error(RuntimeError):
    """Base of every exception that zeropp defines."""


class ConfigError(Error, ValueError):
    """A configuration that cannot be. The message has the key's path, the value, what is allowed, the nearest name."""


class CommError(Error):
    """A peer died, left or diverged.

    Args:
        message: what went wrong.
        rank: the rank that caused it, where known.
    """

    _places: ClassVar[dict[int, str]] = {}
    """What ranks of the job are besides, such as ``rank 1 of the pipeline``; ``prepare`` notes it."""

    def __init__(self, message: str = "", rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank

    def __str__(self) -> str:
        place = None if self.rank is None else self._places.get(self.rank)
        said = super().__str__()
        return said if place is None else f"{said} (rank {self.rank} of the job is {place})"


class CommTimeoutError(CommError, TimeoutError):
    """A peer did not come in time."""


class PartitionedParameterError(Error):
    """A partitioned parameter was read outside of a forward or backward of its model."""


class CheckpointError(Error):
    """A checkpoint is damaged or does not fit. The message has file and offset."""


class TierError(Error, OSError):
    """Storage failed or is full.

    Args:
        message: what went wrong.
        path: the file or folder.
        bytes_wanted: what was to be stored.
        bytes_free: what the file system had left.
        errno: the operating system's number, where it was involved.
        offset_bytes: where in the file.
    """

    def __init__(
        self,
        message: str = "",
        *,
        path: str | None = None,
        bytes_wanted: int | None = None,
        bytes_free: int | None = None,
        errno: int | None = None,
        offset_bytes: int | None = None,
    ) -> None:
        super().__init__(message)
        self.path = path
        self.bytes_wanted = bytes_wanted
        self.bytes_free = bytes_free
        self.errno = errno
        self.offset_bytes = offset_bytes


class NotBuiltError(Error, NotImplementedError):
    """This build or machine lacks something. The message names it, and how to get it."""


# -- pieces of messages: a value, a count, a time, some ranks; each is one line, and none raises -----------------------------------------

_MOST_CHARACTERS = 200
_LONG_CHARACTERS = 60
_MOST_RANKS = 8


def shown(value: object) -> str:
    """Return `repr(value)`, shortened.

    An int of more than 4300 digits has no `repr`, and a user's class may raise in its own.
    """
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__} without a repr>"
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def what_it_is(value: object) -> str:
    """Describe an argument of a wrong type: `3, an int`, `the class Linear`, `None`; the type alone where the value is long."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text, kind = shown(value), type(value).__name__
    kind = f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"
    return kind if len(text) > _LONG_CHARACTERS or "\n" in text else f"{text}, {kind}"


def counted(count: int, thing: str) -> str:
    """Return `1 unit`, `2 units`."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def are(count: int) -> str:
    """Return `is` after one thing, else `are`."""
    return "is" if count == 1 else "are"


def seconds(value: float) -> str:
    """Return `0.35 s`, `12.5 s`, `1800 s`."""
    return f"{value:.3g} s" if value < 100 else f"{value:.0f} s"


def ranks_named(ranks: Sequence[int]) -> str:
    """Return `rank 3`, or `ranks 3, 5 and 7`; of many the first ones, and how many more."""
    first = [str(rank) for rank in ranks[:_MOST_RANKS]]
    if len(ranks) > _MOST_RANKS:
        return f"ranks {', '.join(first)} and {len(ranks) - _MOST_RANKS} more"
    if len(first) == 1:
        return f"rank {first[0]}"
    return f"ranks {', '.join(first[:-1])} and {first[-1]}"


def one_line(error: BaseException) -> str:
    """Return the first line of an error's message that is not empty, with the next where it ends in a colon; the name of its class where it
    says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
