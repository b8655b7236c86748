# SPDX-License-Identifier: Apache-2.0
"""User data, scheduler states and random states as JSON plus tensors: no pickle, so loading a checkpoint runs no
code.

None, bools, numbers, strings, lists and dicts with string keys are JSON as they are. What JSON lacks is wrapped in an
object with one key: ``{"$tuple": [...]}``, ``{"$map": [[key, value], ...]}``, ``{"$counter": ...}``, ``{"$set":
[...]}``, ``{"$bytes": hex}``, and ``{"$tensor": name}``, which refers to a tensor in the same file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from zeropp.errors import CheckpointError

Tensors = dict[str, torch.Tensor]


def to_plain(value: Any, where: str, tensors: Tensors) -> Any:
    """Return ``value`` as JSON can hold it; tensors found in it are added to ``tensors``.

    Args:
        where: the path to ``value``, for messages and tensor names.

    Raises:
        zeropp.CheckpointError: a value of another kind; with its path.
    """
    if value is None:
        return value
    encode = next((encode for kinds, encode in _ENCODERS if isinstance(value, kinds)), None)
    if encode is not None:
        return encode(value, where, tensors)
    if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return to_plain(value.item(), where, tensors)
    raise CheckpointError(
        f"{where}: a {type(value).__name__} cannot be saved without pickle; give numbers, strings, bytes, lists, "
        "tuples, sets, dicts or tensors"
    )


def _tensor(value: torch.Tensor, where: str, tensors: Tensors) -> dict[str, str]:
    tensors["/" + where] = value.detach().cpu().contiguous()  # no parameter or buffer is called so
    return {"$tensor": "/" + where}


def _mapping(value: Mapping[Any, Any], where: str, tensors: Tensors) -> dict[str, Any]:
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: to_plain(item, f"{where}.{key}", tensors) for key, item in value.items()}
    return {"$map": _pairs(value, where, tensors)}


def _items(value: Iterable[Any], where: str, tensors: Tensors) -> list[Any]:
    return [to_plain(item, f"{where}.{index}", tensors) for index, item in enumerate(value)]


#: The first row that fits a value encodes it: a subclass of a number becomes the number itself.
_ENCODERS: tuple[tuple[Any, Callable[[Any, str, Tensors], Any]], ...] = (
    ((bool, str), lambda value, where, tensors: value),
    (int, lambda value, where, tensors: int(value)),
    (float, lambda value, where, tensors: float(value)),
    (torch.Tensor, _tensor),
    ((bytes, bytearray), lambda value, where, tensors: {"$bytes": bytes(value).hex()}),
    (Counter, lambda value, where, tensors: {"$counter": _pairs(value, where, tensors)}),
    (Mapping, _mapping),
    (list, _items),
    (tuple, lambda value, where, tensors: {"$tuple": _items(value, where, tensors)}),
    ((set, frozenset), lambda value, where, tensors: {"$set": _items(sorted(value), where, tensors)}),
)


def _pairs(value: Mapping[Any, Any], where: str, tensors: Tensors) -> list[list[Any]]:
    return [
        [to_plain(key, f"{where}.{index}.key", tensors), to_plain(item, f"{where}.{index}", tensors)]
        for index, (key, item) in enumerate(value.items())
    ]


def from_plain(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return what :func:`to_plain` was given."""
    if isinstance(value, list):
        return [from_plain(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((kind, held),) = value.items()
        if kind in _DECODERS:
            return _DECODERS[kind](held, tensors)
    return {key: from_plain(item, tensors) for key, item in value.items()}


def _map(held: list[Any], tensors: Mapping[str, torch.Tensor]) -> dict[Any, Any]:
    return {from_plain(key, tensors): from_plain(item, tensors) for key, item in held}


_DECODERS: dict[str, Callable[[Any, Mapping[str, torch.Tensor]], Any]] = {
    "$tensor": lambda held, tensors: tensors[held],
    "$tuple": lambda held, tensors: tuple(from_plain(item, tensors) for item in held),
    "$set": lambda held, tensors: {from_plain(item, tensors) for item in held},
    "$bytes": lambda held, tensors: bytes.fromhex(held),
    "$map": _map,
    "$counter": lambda held, tensors: Counter(_map(held, tensors)),
}
