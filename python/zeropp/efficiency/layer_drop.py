# SPDX-License-Identifier: Apache-2.0
"""Progressive layer dropping (Zhang and He 2020): each pass of a step leaves out random layers.

Layer l of L is kept with probability p = 1 - (l / L) (1 - theta(t)), so the first layer always is. A layer that is left out is an
identity. What a kept layer adds to its input is scaled by 1 / p: the output of each of its two residual children, where it has them,
else the whole layer's, as x + (y - x) / p. The core in C (csrc/bind/py_layer_drop.c) skips what the units of such layers would need:
gathers, reads ahead, and waits for their gradients.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from zeropp.config import Config, LayerDrop
from zeropp.efficiency import layers
from zeropp.errors import Error
from zeropp.zero.model.forward import trigger_of

#: A layer is h = x + a(norm(x)), y = h + m(norm(h)) where it has one child of each of these names and no norm after them.
_ATTENTION = ("self_attn", "attn", "self_attention", "attention")
_FEED_FORWARD = ("mlp", "feed_forward", "block_sparse_moe")
_NORMS_AFTER = (
    "post_feedforward_layernorm",
    "post_self_attn_layernorm",
    "post_mlp_layernorm",
    "crossattention",
    "cross_attn",
)


def residual_children(layer: nn.Module) -> tuple[nn.Module, ...]:
    """Return the two children whose outputs a layer adds to its hidden states as they are; empty where it has none such."""
    children = dict(layer.named_children())
    found = [
        next((children[name] for name in names if name in children), None) for names in (_ATTENTION, _FEED_FORWARD)
    ]
    if None in found or any(name in children for name in _NORMS_AFTER):
        return ()
    return tuple(one for one in found if one is not None)


def keep_rates(theta: float, count: int) -> list[float]:
    """Return the probability of each of ``count`` layers to be kept, at a value of theta."""
    return [1.0 - at / count * (1.0 - theta) for at in range(count)]


def dropped(drop: LayerDrop, seed: int, step: int, micro_step: int, counts: list[int]) -> list[bool]:
    """Return which layers a pass leaves out; ``counts``: layers of each stack. A pure function, so equal on all ranks."""
    rates = [rate for count in counts for rate in keep_rates(drop.at(step), count)]
    return [layers.uniform(seed, step, micro_step, layer) >= rate for layer, rate in enumerate(rates)]


class _Scale:
    """A forward hook that multiplies what a kept layer adds by 1 / p."""

    value: torch.Tensor | None = None
    """1 / p, as a tensor so that a compiled layer need not be compiled anew; None: do nothing."""

    def on_child(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.value is None:
            return None
        if isinstance(output, torch.Tensor):
            return output * self.value
        return (output[0] * self.value, *output[1:])

    def __deepcopy__(self, memo: dict[int, Any]) -> _Scale:
        return type(self)()  # a copy of a prepared model is a plain module


class _LayerScale(_Scale):
    """A hook on a whole layer, x + (y - x) / p."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    def on_layer(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if self.value is None:
            return None
        x = layers.hidden_of(self.name, args, kwargs)
        if isinstance(output, torch.Tensor):
            return x + (output - x) * self.value
        return (x + (output[0] - x) * self.value,)


class _Layer:
    """One layer that may be left out."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, weakref.ref(module)
        self.first = layers.first_name(module)
        self.in_tuple = False
        children = residual_children(module)
        self.scale = _Scale() if children else _LayerScale(self.first)
        for child in children:
            child.register_forward_hook(self.scale.on_child, prepend=True)
        if isinstance(self.scale, _LayerScale):
            module.register_forward_hook(self.scale.on_layer, prepend=True, with_kwargs=True)

    def skipped(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with an identity in the place of its forward, so that all hooks of it run."""
        module = self.module()
        assert module is not None
        own = module.__dict__
        before, scale, self.scale.value = own.get("forward"), self.scale.value, None
        own["forward"] = self._identity
        try:
            return module._call_impl(*args, **kwargs)
        finally:
            self.scale.value = scale
            if before is None:
                del own["forward"]
            else:
                own["forward"] = before

    def _identity(self, *args: Any, **kwargs: Any) -> Any:
        x = layers.hidden_of(self.first, args, kwargs)
        return (x,) if self.in_tuple else x

    def check(self, args: Any, kwargs: Any, output: Any) -> bool:
        """Return True if the layer returns a tuple of its hidden states; raise zeropp.Error where an identity cannot stand for it."""
        x = layers.hidden_of(self.first, args, kwargs or {})
        if not layers.one_tensor(output):
            told = (
                f"{type(output).__name__} of {len(output)}"
                if isinstance(output, (tuple, list, dict))
                else type(output).__name__
            )
            self._refuse(f"returns a {told}", "hidden states alone")
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        if not isinstance(x, torch.Tensor) or hidden.shape != x.shape:
            given = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            self._refuse(f"makes {tuple(hidden.shape)} of {given}", "hidden states of one shape in and out")
        return not isinstance(output, torch.Tensor)

    def _refuse(self, seen: str, wanted: str) -> None:
        raise Error(
            f"layer_drop: layer '{self.name}' {seen}, wanted {wanted}, or nothing can stand for it where it is left out; "
            "leave out Efficiency(layer_drop=)"
        )


class LayerDropping:
    """The layers of one prepared model, and what its passes leave out."""

    def __init__(self, model: nn.Module, engine: Any) -> None:
        efficiency = engine.config.efficiency
        self.drop, self.seed, self.clock = efficiency.layer_drop, efficiency.seed, engine.clock
        self.core, self.accumulate, self.model = engine.core, engine.accumulate, weakref.ref(model)
        found = layers.require_layers(model, "layer_drop")
        self.counts = [len(stack) for stack in found]
        self.layers = [_Layer(*named) for stack in found for named in stack]
        self.needed_by = _needed_by(model, engine, [module for stack in found for _, module in stack])
        self.rates = [1.0] * len(self.layers)

    def attach(self) -> None:
        """Let passes leave out layers from now on."""
        for number, layer in enumerate(self.layers):
            module = layer.module()
            assert module is not None
            trigger_of(module, self.core).may_skip(number, layer.skipped, self._checks(number))
        self.core.set_layer_drop(self.begin, self.turn)

    def _checks(self, number: int) -> Any:
        def check(args: Any, kwargs: Any, output: Any) -> None:
            in_tuple = self.layers[number].check(args, kwargs, output)
            for layer in self._stack_of(number):
                layer.in_tuple = in_tuple

        return check

    def _stack_of(self, number: int) -> list[_Layer]:
        first = 0
        for count in self.counts:
            if number < first + count:
                return self.layers[first : first + count]
            first += count
        raise IndexError(number)

    def choose(self, step: int, micro_step: int) -> list[bool]:
        """Return which layers a pass leaves out."""
        return dropped(self.drop, self.seed, step, micro_step, self.counts)

    def begin(self) -> None:
        """Choose for a forward that builds a graph; called by the core. A model in evaluation mode leaves out nothing."""
        model = self.model()
        step, micro = self.clock.step, self.clock.micro_step
        trains = model is not None and model.training
        count = max(self.accumulate, micro + 1) if trains else 1
        passes = [self.choose(step, at) if trains else [False] * len(self.layers) for at in range(count)]
        now = passes[micro if trains else 0]
        units = bytes(_left_out(needed, now) for needed in self.needed_by)
        unstepped = bytes(all(_left_out(needed, one) for one in passes) for needed in self.needed_by)
        self.core.drop_layers(bytes(now), units, unstepped)
        theta = self.drop.at(step) if trains else 1.0
        self.rates = [rate for count in self.counts for rate in keep_rates(theta, count)]
        self.turn(True)

    def turn(self, trains: bool) -> None:
        """Set the factors of the pass that began, or none for an evaluation beside it."""
        for layer, rate in zip(self.layers, self.rates, strict=True):
            layer.scale.value = torch.tensor(1.0 / rate, dtype=torch.float64) if trains and rate < 1.0 else None


def _left_out(needed_by: frozenset[int], out: list[bool]) -> bool:
    return bool(needed_by) and all(out[layer] for layer in needed_by)


def _needed_by(model: nn.Module, engine: Any, blocks: list[nn.Module]) -> list[frozenset[int]]:
    """Return for each unit the numbers of the layers that need it; empty where something outside of layers needs it, too."""
    layer_of = {inner: number for number, block in enumerate(blocks) for inner in block.modules()}
    needed: list[set[int]] = [set() for _ in engine.units]
    outside: set[int] = set()
    index_of = {id(unit.core): unit.index for unit in engine.units}
    for module in model.modules():
        trigger = trigger_of(module, None)
        for core in trigger.units if trigger is not None else ():
            if module in layer_of:
                needed[index_of[id(core)]].add(layer_of[module])
            else:
                outside.add(index_of[id(core)])
    return [frozenset() if at in outside else frozenset(one) for at, one in enumerate(needed)]


def check(model: nn.Module, config: Config) -> None:
    """Raise zeropp.ConfigError for a model without layers."""
    layers.require_layers(model, "layer_drop")


def attach(model: nn.Module, engine: Any) -> None:
    """Let the passes of a prepared model leave out layers."""
    LayerDropping(model, engine).attach()
