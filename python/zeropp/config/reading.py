# SPDX-License-Identifier: Apache-2.0
"""What a user may give as a configuration, at every door alike: a `Config`, a mapping, JSON text, or the path of a JSON file.

A mapping may have the fields of `Config`, DeepSpeed's keys, or both: each key of the first level belongs to one of the two.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from zeropp.config.config import MOST_NUMBER, Config, wrong
from zeropp.errors import ConfigError
from zeropp.wording import shown, what_it_is

__all__ = ["as_config", "check_json", "not_a_config"]

_DEPTH = 32
"""Of sections in a section. No configuration has more than five."""


def as_config(given: Any, door: str) -> Config:
    """Return the configuration that a user gave.

    Args:
        given: None (the defaults), a :class:`zeropp.Config`, or what ``Config.from_json`` reads.
        door: the function that was called, for the error.

    Raises:
        zeropp.ConfigError: `given` is something else, or a key of it is refused.
    """
    if given is None:
        return Config()
    if isinstance(given, Config):
        return given
    if isinstance(given, (Mapping, str, os.PathLike)):
        return Config.from_json(given)
    raise not_a_config(given, door)


def not_a_config(given: Any, door: str) -> ConfigError:
    """The error for what cannot be read as a configuration at all."""
    return ConfigError(
        f"{door}: config is {what_it_is(given)}; wanted a zeropp.Config(...), a dict of its fields or of DeepSpeed's keys, JSON text, "
        "or the path of a JSON file"
    )


def check_json(value: Any, path: str, depth: int = 0) -> None:
    """Refuse in a mapping with DeepSpeed's keys what no JSON file could hold, such as a tensor or a key that is a number.

    Raises:
        zeropp.ConfigError: names the key's path.
    """
    if value is None or isinstance(value, (bool, float, str)):
        return
    if isinstance(value, int):
        if abs(value) > MOST_NUMBER:
            raise wrong(path, value, "a number between -2**63 and 2**63")
        return
    if depth > _DEPTH:
        raise wrong(path, value, f"at most {_DEPTH} sections, each in the one before")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ConfigError(f"{path}: the key {shown(key)} is not allowed; wanted a string")
            check_json(inner, f"{path}.{key}", depth + 1)
    elif isinstance(value, (list, tuple)):
        for at, inner in enumerate(value):
            check_json(inner, f"{path}[{at}]", depth + 1)
    else:
        raise wrong(path, value, "what JSON has: null, true, false, a number, a string, a list or an object")
