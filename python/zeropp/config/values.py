# SPDX-License-Identifier: Apache-2.0
"""Single values of a configuration: what each may be, and the error that names path, value, what is wanted and the nearest name."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from zeropp.errors import ConfigError, shown, what_it_is

T = TypeVar("T")

DTYPES = ("fp32", "bf16", "fp16")
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TIERS = ("device", "cpu", "nvme")
WIRE_FORMATS = ("exact", "int8", "int4")
GATHER_WAYS = ("auto", "copy", "nccl")  # enum zpp_gather of csrc/zero/zero.h
STATES = ("fp32", "bf16", "int8")
STORED = ("int8", "int4")
Folders = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""One, or several, one for each disk."""
MOST_FOLDERS = 16
"""Of one tier (ZPP_AIO_PARTS of csrc/aio/file.h)."""


MOST_NUMBER = (1 << 63) - 1
"""Whole numbers of the C core have 64 bits."""


def nearest(name: object, known: Iterable[str]) -> str:
    """`; did you mean 'stage'` when a known name is close to `name`, else nothing."""
    if not isinstance(name, str):
        return ""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def wrong(path: str, value: object, wanted: str) -> ConfigError:
    """Return the error for a value that cannot be: path, value seen, what is wanted."""
    return ConfigError(f"{path}: {shown(value)} is not allowed; wanted {wanted}")


def not_yet(path: str, value: object, instead: str) -> ConfigError:
    """Return the error for a value that others know and zeropp does not have."""
    return ConfigError(f"{path}: {shown(value)} is not supported; {instead}")


def not_a_config(given: Any, caller: str) -> ConfigError:
    """Return the error for an argument that cannot be read as a configuration at all."""
    return ConfigError(
        f"{caller}: config is {what_it_is(given)}; wanted a zeropp.Config(...), a dict of its fields or of DeepSpeed's keys, JSON text, "
        "or the path of a JSON file"
    )


def refuses_unknown(cls: type[T]) -> type[T]:
    """Class decorator: an unknown keyword is a ConfigError with the nearest name, where a dataclass raises a bare
    TypeError."""
    plain_init: Callable[..., None] = cls.__init__
    known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]

    @functools.wraps(plain_init)
    def init(self: T, *args: Any, **keywords: Any) -> None:
        for name, value in keywords.items():
            if name not in known:
                raise ConfigError(
                    f"{cls.__name__}.{name}: unknown key (value {shown(value)}); "
                    f"known are {', '.join(known)}{nearest(name, known)}"
                )
        plain_init(self, *args, **keywords)

    cls.__init__ = init  # type: ignore[method-assign, assignment]
    return cls


def one_of(path: str, value: object, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        close = nearest(value, allowed) if isinstance(value, str) else ""
        raise wrong(path, value, f"one of {', '.join(map(repr, allowed))}{close}")


def flag(path: str, value: object) -> None:
    if not isinstance(value, bool):
        raise wrong(path, value, "True or False")


def whole(path: str, value: object, least: int, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise wrong(path, value, f"a whole number >= {least} ({what})")
    if value > MOST_NUMBER:
        raise wrong(path, value, f"a whole number below 2**63 ({what})")


def finite(value: object) -> bool:
    """True if `value` is a number that a float can hold, and finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def folders(path: str, value: object) -> str | tuple[str, ...]:
    """Return a folder's name, or those of several: a tuple, each once. One alone is a name, however it was given."""
    wanted = "a folder's name, or a list of up to 16, one for each disk"
    several = isinstance(value, (list, tuple))
    names: list[str] = []
    for one in value if isinstance(value, (list, tuple)) else (value,):
        name = os.fspath(one) if isinstance(one, os.PathLike) else one
        if not isinstance(name, str) or not name or not _can_be_a_path(name):
            raise wrong(path, value, wanted)
        names.append(os.path.expanduser(name))  # noqa: PTH111  Path's raises where there is no such user
    if several and not 1 <= len(names) <= MOST_FOLDERS:
        raise wrong(path, value, f"{wanted}; there are {len(names)}")
    if len(names) == 1:
        return names[0]
    where: dict[str, str] = {}
    for name in names:
        real = os.path.realpath(name)
        if real in where:
            raise wrong(path, value, f"each folder once; {where[real]!r} and {name!r} are the same one")
        where[real] = name
    return tuple(names)


def _can_be_a_path(name: str) -> bool:
    """False for a name that the operating system cannot be given: with a NUL, or with half of a surrogate pair."""
    try:
        return b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        return False


def instance(path: str, value: object, cls: type) -> None:
    if not isinstance(value, cls):
        raise wrong(path, value, f"a zeropp.{cls.__name__}(...)")
