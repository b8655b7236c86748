# SPDX-License-Identifier: Apache-2.0
"""Read what a user may give as a configuration: a `Config`, a mapping, JSON text, or the path of a JSON file.

A mapping may have the fields of `Config`, DeepSpeed's keys, or both: each key of the first level belongs to one of the two.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from zeropp.config.deepspeed_efficiency import efficiency_from_deepspeed
from zeropp.config.deepspeed_experts import experts_from_deepspeed
from zeropp.config.deepspeed_json import DEEPSPEED_KEYS, fields_from_deepspeed, is_deepspeed_key
from zeropp.config.efficiency import Efficiency, Growth, LayerDrop, TokenDrop
from zeropp.config.experts import Experts
from zeropp.config.sections import Comm, LossScale, Offload, Precision, Tier
from zeropp.config.values import MOST_NUMBER, T, nearest, not_a_config, wrong
from zeropp.errors import ConfigError, shown

Source = str | os.PathLike[str] | Mapping[str, Any]
Fields = dict[str, Any]

_DEPTH = 32
"""Most sections inside one another. No configuration has more than five."""
_TIER_KEYS = ("params", "grads", "optimizer", "activations")


def read_json(source: Source) -> Mapping[str, Any]:
    """Return the keys of a mapping, of JSON text (it starts with `{`), or of a file.

    Raises:
        ConfigError: the source cannot be read, is no JSON object, or has a key twice.
    """
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, (str, os.PathLike)):
        raise not_a_config(source, "Config.from_json")
    where = "JSON text"
    text = os.fsdecode(source)
    if not text.lstrip().startswith("{"):
        where = text
        try:
            text = Path(where).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # a ValueError: no text, or a name with a NUL
            raise ConfigError(f"{where}: cannot be read as a configuration: {error}") from error
    try:
        keys = json.loads(text, object_pairs_hook=_no_key_twice)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: line {error.lineno}, column {error.colno}: not JSON: {error.msg}") from error
    except ConfigError:
        raise
    except (RecursionError, ValueError) as error:  # a ValueError: a number of more than 4300 digits
        raise ConfigError(f"{where}: cannot be read as a configuration: {error}") from error
    if not isinstance(keys, dict):
        raise ConfigError(f"{where}: holds a {type(keys).__name__}; wanted one JSON object")
    return keys


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{twice}: stands twice in one JSON object; keep one")
    return keys


def fields_of(source: Source, ranks: int | None, known: Iterable[str]) -> tuple[Fields, dict[str, str]]:
    """Return the fields of `Config` that a source gives, and for those that DeepSpeed's keys give the path of the key.

    Args:
        known: names of the fields.
    """
    keys = read_json(source)
    fields = _own_fields({k: v for k, v in keys.items() if not is_deepspeed_key(k)}, list(known), DEEPSPEED_KEYS)
    foreign = {k: v for k, v in keys.items() if is_deepspeed_key(k)}
    for name, value in foreign.items():
        check_json(value, name)
    paths: dict[str, str] = {}
    found = fields_from_deepspeed(foreign, ranks) | efficiency_from_deepspeed(foreign) | experts_from_deepspeed(foreign)
    for name, (path, value) in found.items():
        if name in fields:
            raise ConfigError(f"{path}: says again what {name!r} says; give one of the two")
        fields[name], paths[name] = value, path
    return fields, paths


def _own_fields(native: Mapping[str, Any], known: list[str], others: Iterable[str]) -> Fields:
    fields: Fields = {}
    for name, value in native.items():
        if name not in known:
            raise ConfigError(
                f"{name if isinstance(name, str) else shown(name)}: unknown key (value {shown(value)}); known are {', '.join(known)}, "
                f"and DeepSpeed's{nearest(name, [*known, *others])}"
            )
        fields[name] = _READERS[name](value) if name in _READERS and isinstance(value, Mapping) else value
    return fields


def _offload(keys: Mapping[str, Any], path: str = "offload") -> Offload:
    tiers = {
        k: build(Tier, v, f"{path}.{k}") if isinstance(v, Mapping) and k in _TIER_KEYS else v for k, v in keys.items()
    }
    return build(Offload, tiers, path)


def _experts(keys: Mapping[str, Any]) -> Experts:
    fields = {
        k: _offload(v, "experts.offload") if k == "offload" and isinstance(v, Mapping) else v for k, v in keys.items()
    }
    return build(Experts, fields, "experts")


def _efficiency(keys: Mapping[str, Any]) -> Efficiency:
    """Read ``Config.efficiency`` from JSON: a schedule is an object of `Growth`'s fields, or of steps and values for ``Growth.at``."""
    fields: Fields = {}
    for name, value in keys.items():
        path = f"efficiency.{name}"
        if name in ("token_drop", "layer_drop") and isinstance(value, Mapping):
            inner = {key: _schedule(one, f"{path}.{key}") if key == "keep" else one for key, one in value.items()}
            fields[name] = build(TokenDrop if name == "token_drop" else LayerDrop, inner, path)
        else:
            fields[name] = _schedule(value, path) if name == "seq_length" else value
    return build(Efficiency, fields, "efficiency")


def _schedule(value: Any, path: str) -> Any:
    if not isinstance(value, Mapping):
        return value
    if value and all(isinstance(key, str) and key.isdecimal() for key in value):
        return Growth.at({int(step): one for step, one in value.items()})
    return build(Growth, value, path)


#: How a section is read, by its name.
_READERS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "offload": _offload,
    "efficiency": _efficiency,
    "comm": lambda keys: build(Comm, keys, "comm"),
    "precision": lambda keys: build(Precision, keys, "precision"),
    "experts": _experts,
    "loss_scale": lambda keys: build(LossScale, keys, "loss_scale"),
}


def build(cls: type[T], fields: Mapping[str, Any], path: str) -> T:
    """Return ``cls(**fields)``; its errors name the path in the file in place of the class."""
    for key in fields:
        if not isinstance(key, str):
            raise ConfigError(f"{path}: the key {shown(key)} is not allowed; wanted a string")
    try:
        return cls(**fields)
    except ConfigError as error:
        prefix = f"{cls.__name__}."
        text = str(error)
        if not text.startswith(prefix):
            raise
        raise ConfigError((path + "." if path else "") + text[len(prefix) :]) from None


def check_json(value: Any, path: str, depth: int = 0) -> None:
    """Refuse what no JSON file could hold, such as a tensor or a key that is a number, in a mapping with DeepSpeed's keys.

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
