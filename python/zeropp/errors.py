# SPDX-License-Identifier: Apache-2.0
"""Exceptions of zeropp: one base, one class for each kind of failure, so that callers can tell them apart.

Some also derive from the builtin that a caller without zeropp would catch. The C core raises them by name: the table is
csrc/base/status.def.
"""

from __future__ import annotations

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
    """A configuration that cannot be. The sentence has the key's path, the value, what is allowed, the nearest name."""


class CommError(Error):
    """A peer died, left or diverged.

    Args:
        message: the sentence.
        rank: the guilty rank, where known.
    """

    def __init__(self, message: str = "", rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class CommTimeoutError(CommError, TimeoutError):
    """A peer did not come in time."""


class PartitionedParameterError(Error):
    """A partitioned parameter was read outside of a forward or backward of its model."""


class CheckpointError(Error):
    """A checkpoint is damaged or does not fit. The sentence has file and offset."""


class TierError(Error, OSError):
    """Storage failed or is full.

    Args:
        message: the sentence.
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
    """This build or machine lacks something. The sentence names it, and how to get it."""
