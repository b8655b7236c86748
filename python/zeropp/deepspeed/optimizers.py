# SPDX-License-Identifier: Apache-2.0
"""The ``optimizer`` section of a DeepSpeed file (names and defaults of DeepSpeed 0.19, and of the last release that had
the one-bit optimizers): built here for ``zeropp.initialize``, and explained by ``python -m zeropp config``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from zeropp import compat
from zeropp.config import Config, facts_of, nearest
from zeropp.errors import ConfigError
from zeropp.optim import LAMB, Lion, OneBitAdam, OneBitLamb, ZeroOneAdam
from zeropp.zero.step import custom

# DeepSpeed compares names without case.
_TYPES: dict[str, type[torch.optim.Optimizer]] = {
    "Adam": torch.optim.AdamW,  # DeepSpeed's Adam is AdamW unless adam_w_mode is false
    "AdamW": torch.optim.AdamW,
    "Adagrad": torch.optim.Adagrad,
    "SGD": torch.optim.SGD,
    "Lion": Lion,
    "Lamb": LAMB,
    "OneBitAdam": OneBitAdam,
    "ZeroOneAdam": ZeroOneAdam,
    "OneBitLamb": OneBitLamb,
}
# Parameters that have no counterpart: the values that ask for what zeropp does; None: any, it is about DeepSpeed's transport.
_ALWAYS: dict[str, tuple[object, ...] | None] = {
    "bias_correction": (True,),
    "eps_inside_sqrt": (False,),
    "max_grad_norm": (0, 0.0),
    "amsgrad": (False,),
    "cuda_aware": None,
    "comm_backend_name": None,
}
_NAMES = {name.lower(): name for name in _TYPES}


def section_of(section: Any, name: str) -> tuple[str, dict[str, Any]]:
    """Return ``type`` and ``params`` of a section.

    Raises:
        zeropp.ConfigError: not such a section, an unknown key, or a value that only a Trainer fills.
    """
    if not isinstance(section, Mapping) or not isinstance(section.get("type"), str):
        raise ConfigError(f'{name}: {section!r} is not allowed; wanted {{"type": ..., "params": {{...}}}}')
    for key in section:
        if key not in ("type", "params", "legacy_fusion"):
            raise ConfigError(f"{name}.{key}: unknown key{nearest(key, ('type', 'params'))}")
    given = section.get("params")
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f'{name}.params: {given!r} is not allowed; wanted an object, as in {{"lr": 1e-3}}')
    parameters = dict(given or {})
    auto = [key for key, value in parameters.items() if value == "auto"]
    if auto:
        raise ConfigError(f'{name}.params.{auto[0]}: "auto" is filled by a Trainer; give a number to zeropp.initialize')
    return section["type"], parameters


def build(section: Any, parameters: Iterable[Any]) -> torch.optim.Optimizer | None:
    """Return the optimizer that the section asks for; None without one.

    Raises:
        zeropp.ConfigError: an unknown type or parameter, or a value that cannot work; with its path.
    """
    if section is None:
        return None
    kind, values = section_of(section, "optimizer")
    name = _NAMES.get(kind.lower(), kind)
    cls = _fit(name, values, _class_of(name, kind))
    if isinstance(values.get("betas"), list):
        values["betas"] = tuple(values["betas"])
    try:
        made: torch.optim.Optimizer = cls(list(parameters), **values)
    except (TypeError, ValueError) as error:
        where = "torch's" if cls.__module__.startswith("torch.") else "zeropp.optim's"
        raise ConfigError(f"optimizer.params: {values!r} do not fit {where} {cls.__name__}: {error}") from error
    return made


def _class_of(name: str, kind: str) -> Any:
    """Return the class of a name in DeepSpeed's file: one of ours, or any of torch's by its own name, as DeepSpeed has it."""
    if name in _TYPES:
        return _TYPES[name]
    found = getattr(torch.optim, kind, None)
    if isinstance(found, type) and kind not in ("Muon", "Optimizer"):
        return found
    raise ConfigError(
        f"optimizer.type: {kind!r} is not supported; wanted one of {', '.join(_TYPES)}, or optimizer= with any of "
        "torch's or of zeropp.optim"
    )


def _fit(name: str, values: dict[str, Any], cls: Any) -> Any:
    """Turn DeepSpeed's parameters and defaults into those of the class. Return the class, which ``adam_w_mode`` can change."""
    if name in ("Adam", "AdamW"):
        for unused in ("torch_adam", "fused"):
            values.pop(unused, None)
        if values.pop("adam_w_mode", True) is False:
            cls = torch.optim.Adam
        values.setdefault("weight_decay", 0.0)  # DeepSpeed's default; torch's AdamW has 0.01
    if name in ("Lamb", "OneBitAdam", "ZeroOneAdam", "OneBitLamb"):
        _drop_always(values)
    if name == "Lamb":
        values.setdefault("eps", 1e-8)
        values["trust"] = (values.pop("min_coeff", 0.01), values.pop("max_coeff", 10.0))
    if name == "Lion":
        values.setdefault("lr", 1e-3)
    return cls


def _drop_always(values: dict[str, Any]) -> None:
    for name, allowed in _ALWAYS.items():
        if name not in values:
            continue
        value = values.pop(name)
        if allowed is not None and value not in allowed:
            raise ConfigError(
                f"optimizer.params.{name}: {value!r} is not supported; wanted {allowed[0]!r}, or leave it out"
            )


def explain(section: Any, stage: Any) -> str:
    """Return what the section makes at this stage, in words.

    Raises:
        zeropp.ConfigError: what ``zeropp.initialize`` would raise for it.
    """
    if isinstance(section, Mapping) and isinstance(section.get("params"), Mapping):
        given = {key: value for key, value in section["params"].items() if value != "auto"}
        section = {**section, "params": given}
    made = build(section, [torch.nn.Parameter(torch.zeros(1))])
    if made is None:
        return "none"
    if stage in (0, 1, 2, 3):  # else the stage's own line says what is wrong
        compat.check({**facts_of(Config(stage=stage)), **custom.facts_of(made)})
    place = "torch.optim" if type(made).__module__.startswith("torch.") else "zeropp.optim"
    return f"{place}.{type(made).__name__}"
