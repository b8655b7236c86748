# SPDX-License-Identifier: Apache-2.0
"""``deepspeed.utils.z3_leaf_module``: marks on modules. zeropp chooses its units by itself, and gathers what is used out of order, so
a mark changes nothing; scripts set it, and ask for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn


def z3_leaf_module(model: nn.Module) -> bool:
    """True if this module is marked."""
    return bool(getattr(model, "_z3_leaf", False))


def z3_leaf_parameter(model: Any) -> bool:
    """True if this parameter belongs to a marked module. Parameters are not marked themselves here."""
    return hasattr(model, "ds_z3_leaf_module")


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    return [one for one in model.modules() if z3_leaf_module(one)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    model.__dict__["_z3_leaf"] = bool(flag)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark every module of these classes, each given as a class, by its name, or as ``"module.Class"``; and return them.

    Raises:
        ValueError: the model has none, unless ``raise_if_not_found`` is false.
    """
    return _set(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the marks off again; arguments, result and errors as those of :func:`set_z3_leaf_modules`."""
    return _set(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """By names as in ``named_modules()``: the modules, and the names that none has."""
    known = dict(model.named_modules())
    found = {name: [known[name]] if name in known else [] for name in module_names}
    return _mark(model, found, flag, raise_if_not_found, "named")


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """By the ends of their names: the modules, and the ends that no name has."""
    known = list(model.named_modules())
    found = {end: [one for name, one in known if name.endswith(end)] for end in module_name_suffixes}
    return _mark(model, found, flag, raise_if_not_found, "whose names end in")


def _mark(
    model: nn.Module, found: dict[str, list[nn.Module]], flag: bool, required: bool, how: str
) -> tuple[list[nn.Module], list[str]]:
    missing = [name for name, modules in found.items() if not modules]
    if missing and required:
        raise ValueError(f"No modules {how} {missing} found in model {type(model).__name__}")
    chosen = list({id(one): one for modules in found.values() for one in modules}.values())
    for one in chosen:
        set_z3_leaf_module(one, flag)
    return chosen, missing


def _set(model: nn.Module, classes: Iterable[type | str], flag: bool, required: bool) -> list[nn.Module]:
    wanted = list(classes)
    odd = [one for one in wanted if not isinstance(one, (type, str))]
    if odd:
        raise ValueError(f"set_z3_leaf_modules: {odd[0]!r} is not allowed; wanted classes of modules, or their names")
    chosen = [one for one in _children_first(model) if _is_one_of(one, wanted)]
    if not chosen and required:
        raise ValueError(
            f"No modules of type {wanted} found in model {type(model).__name__}; wanted classes, their names, or 'module.Class'"
        )
    for one in chosen:
        set_z3_leaf_module(one, flag)
    return chosen


def _children_first(model: nn.Module) -> Iterator[nn.Module]:
    for child in model.children():
        yield from _children_first(child)
    yield model


def _is_one_of(module: nn.Module, wanted: list[type | str]) -> bool:
    own = type(module)
    names = (own.__name__, f"{own.__module__}.{own.__qualname__}")
    return any(one in names if isinstance(one, str) else isinstance(module, one) for one in wanted)
