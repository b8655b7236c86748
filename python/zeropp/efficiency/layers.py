# SPDX-License-Identifier: Apache-2.0
"""The layers of a model, as dropping tokens or layers counts them, and what a layer is given and returns."""

from __future__ import annotations

import hashlib
import inspect
import struct
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from zeropp.errors import ConfigError

Named = tuple[str, nn.Module]


def stacks(model: nn.Module) -> list[list[Named]]:
    """Return the layers of a model with their names: the children of each outermost ``ModuleList`` or ``Sequential`` that repeats
    one class of modules with modules of their own. An encoder and a decoder are two stacks."""
    return list(_stacks(model, "", set()))


def _stacks(module: nn.Module, path: str, seen: set[nn.Module]) -> Iterator[list[Named]]:
    if module in seen:
        return
    seen.add(module)
    children = [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
    layers = _repeated(children) if isinstance(module, (nn.ModuleList, nn.Sequential)) else []
    if layers:
        yield layers
    for name, child in children:
        if (name, child) not in layers:
            yield from _stacks(child, name, seen)


def _repeated(children: list[Named]) -> list[Named]:
    kinds = [type(child) for _, child in children]
    return [(name, child) for name, child in children if kinds.count(type(child)) > 1 and _is_block(child)]


def _is_block(module: nn.Module) -> bool:
    return next(module.children(), None) is not None and next(module.parameters(), None) is not None


def require_layers(model: nn.Module, what: str) -> list[list[Named]]:
    """Return :func:`stacks`, or raise zeropp.ConfigError where the model has none; ``what``: the field that wants them."""
    found = stacks(model)
    if not found:
        raise ConfigError(
            f"{what}: {type(model).__name__} has no layers; wanted a ModuleList or Sequential that repeats one class of blocks, as "
            f"transformers' models have; leave out {what}"
        )
    return found


def first_name(module: nn.Module) -> str:
    """Return the name of the first parameter of the module's forward: of the hidden states, for a layer."""
    names = list(inspect.signature(type(module).forward).parameters)
    return names[1] if len(names) > 1 else ""


def hidden_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the hidden states that a layer was given, by position or by ``name``."""
    return args[0] if args else kwargs.get(name)


def uniform(seed: int, step: int, micro_step: int, layer: int) -> float:
    """Return a number in [0, 1), the same on every machine for the same arguments, as good as independent for others."""
    digest = hashlib.blake2b(struct.pack("<4q", seed, step, micro_step, layer), digest_size=8, person=b"zeropp layer")
    return (int.from_bytes(digest.digest(), "little") >> 11) / 2**53


def one_tensor(output: Any) -> bool:
    """Return True for a tensor, and for a tuple of one."""
    return isinstance(output, torch.Tensor) or (
        type(output) is tuple and len(output) == 1 and isinstance(output[0], torch.Tensor)
    )
