# SPDX-License-Identifier: Apache-2.0
"""User data, scheduler states and random states as JSON plus tensors: no pickle, so loading a checkpoint runs no
code.

None, bools, numbers, strings, lists and dicts with string keys are JSON as they are. What JSON lacks is wrapped in an
object with one key: ``{"$tuple": [...]}``, ``{"$map": [[key, value], ...]}``, ``{"$counter": ...}``, ``{"$set":
[...]}``, ``{"$bytes": hex}``, and ``{"$tensor": name}``, which refers to a tensor in the same file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from zeropp.errors import CheckpointError


def to_plain(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    """``value`` as JSON can hold it; tensors found in it are added to ``tensors``.

    Args:
        where: the path to ``value``, for messages and tensor names.

    Raises:
        zeropp.CheckpointError: a value of another kind; with its path.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, torch.Tensor):
        tensors["/" + where] = value.detach().cpu().contiguous()  # no parameter or buffer is called so
        return {"$tensor": "/" + where}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": bytes(value).hex()}
    if isinstance(value, Counter):
        return {"$counter": _pairs(value, where, tensors)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: to_plain(item, f"{where}.{key}", tensors) for key, item in value.items()}
        return {"$map": _pairs(value, where, tensors)}
    if isinstance(value, (list, tuple)):
        items = [to_plain(item, f"{where}.{index}", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, (set, frozenset)):
        return {"$set": [to_plain(item, f"{where}.{index}", tensors) for index, item in enumerate(sorted(value))]}
    if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return to_plain(value.item(), where, tensors)
    raise CheckpointError(
        f"{where}: a {type(value).__name__} cannot be saved without pickle; give numbers, strings, bytes, lists, "
        "tuples, sets, dicts or tensors"
    )


def _pairs(value: Mapping[Any, Any], where: str, tensors: dict[str, torch.Tensor]) -> list[list[Any]]:
    return [
        [to_plain(key, f"{where}.{index}.key", tensors), to_plain(item, f"{where}.{index}", tensors)]
        for index, (key, item) in enumerate(value.items())
    ]


def from_plain(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of :func:`to_plain`."""
    if isinstance(value, list):
        return [from_plain(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((kind, held),) = value.items()
        if kind == "$tensor":
            return tensors[held]
        if kind == "$tuple":
            return tuple(from_plain(item, tensors) for item in held)
        if kind == "$set":
            return {from_plain(item, tensors) for item in held}
        if kind == "$bytes":
            return bytes.fromhex(held)
        if kind in ("$map", "$counter"):
            pairs = {from_plain(key, tensors): from_plain(item, tensors) for key, item in held}
            return Counter(pairs) if kind == "$counter" else pairs
    return {key: from_plain(item, tensors) for key, item in value.items()}
