# SPDX-License-Identifier: Apache-2.0
"""A model of fewer layers with the values of a deep one: the student of a mixture of students (MoS, Rajbhandari et al. 2022, section
4.2), which is then trained with :class:`zeropp.moe.Distill`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TypeVar

from torch import nn

from zeropp.config.values import whole, wrong
from zeropp.efficiency.layers import Named, require_layers
from zeropp.errors import ConfigError
from zeropp.moe.plain import check_config, refuse_prepared, text_config

M = TypeVar("M", bound=nn.Module)


def shallower(model: M, layers: int | Sequence[int]) -> M:
    """Return a copy of a model with some of its layers; the model stays as it is.

    Args:
        model: with one stack of layers (a ``ModuleList`` or ``Sequential`` of one class of blocks), not prepared. The config of a
            transformers' model is cut, too, so that ``save_pretrained`` and ``from_pretrained`` work.
        layers: how many are kept, spread evenly with the first and the last among them, or the numbers of those that are kept,
            ascending.

    Raises:
        zeropp.ConfigError: numbers that cannot be, a model with no stack or several, or that is prepared, or whose config does not
            describe the layers that are left.
    """
    stack = _stack(model)
    kept = _kept(len(stack), layers)
    path = stack[0][0].rpartition(".")[0]
    before = model.get_submodule(path)
    dropped = {layer for number, (_, layer) in enumerate(stack) if number not in kept}
    rest = [layer for layer in before.children() if layer not in dropped]
    made = _copy_with(model, path, nn.Sequential(*rest) if isinstance(before, nn.Sequential) else nn.ModuleList(rest))
    places = [rest.index(stack[number][1]) for number in kept]
    _renumber([list(made.get_submodule(path).children())[place] for place in places], kept)
    _cut_config(made, len(stack), kept)
    return made


def _copy_with(model: M, path: str, layers: nn.Module) -> M:
    """Return a copy of a model with other layers; those that are left out are never copied."""
    if not path:
        return copy.deepcopy(layers)  # type: ignore[return-value]
    parent, _, name = path.rpartition(".")
    owner, before = model.get_submodule(parent), model.get_submodule(path)
    setattr(owner, name, layers)
    try:
        return copy.deepcopy(model)
    finally:
        setattr(owner, name, before)


def _stack(model: nn.Module) -> list[Named]:
    refuse_prepared(model, "zeropp.moe.shallower")
    found = require_layers(model, "zeropp.moe.shallower")
    if len(found) > 1:
        names = ", ".join(f"'{stack[0][0].rpartition('.')[0]}'" for stack in found)
        raise ConfigError(
            f"zeropp.moe.shallower: {type(model).__name__} has several stacks of layers ({names}); wanted one"
        )
    return found[0]


def _kept(count: int, layers: int | Sequence[int]) -> list[int]:
    path = "zeropp.moe.shallower: layers"
    if isinstance(layers, Sequence) and not isinstance(layers, str):
        kept = list(layers)
        for number in kept:
            whole(path, number, 0, f"a layer below {count}")
        if not kept or kept != sorted(set(kept)) or kept[-1] >= count:
            raise wrong(path, kept, f"numbers of layers 0 to {count - 1}, ascending, each once")
        return kept
    whole(path, layers, 1, f"layers that are kept, of {count}")
    assert isinstance(layers, int)
    if layers > count:
        raise wrong(path, layers, f"at most {count}, the layers of the model")
    return [0] if layers == 1 else [round(i * (count - 1) / (layers - 1)) for i in range(layers)]


def _renumber(layers: list[nn.Module], kept: list[int]) -> None:
    """Let every layer know its new place: transformers' caches go by it."""
    for place, (old, layer) in enumerate(zip(kept, layers, strict=True)):
        for module in layer.modules():
            if getattr(module, "layer_idx", None) == old:
                module.layer_idx = place  # type: ignore[assignment]


def _cut_config(model: nn.Module, count: int, kept: list[int]) -> None:
    """Let a transformers' config describe the layers that are left: their number, and every list with an entry a layer."""
    config = text_config(model)
    if config is None or getattr(config, "num_hidden_layers", None) != count:
        return
    for name, value in list(vars(config).items()):
        if isinstance(value, (list, tuple)) and len(value) == count:
            setattr(config, name, type(value)(value[i] for i in kept))
    config.num_hidden_layers = len(kept)
    check_config(model, f"zeropp.moe.shallower: layers {kept}")
