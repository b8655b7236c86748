# SPDX-License-Identifier: Apache-2.0
"""The parts that surround the forward of a module: triggers that gather units, casts of inputs, and calls wrapped around it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import weakref
from typing import Any

import torch
from torch import nn

from zeropp import _C
from zeropp.zero.model.units import UnitPlan, entries_of
from zeropp.zero.model_state import ModelState

# -- triggers ------------------------------------------------------------------------------------------------------------


def install_triggers(model: nn.Module, engine: ModelState, plans: list[UnitPlan]) -> None:
    """Put a trigger around each module that needs units: in ``_compiled_call_impl``, which ``nn.Module.__call__`` calls outside of all
    hooks."""
    units_of: dict[nn.Module, list[Any]] = {entry: [] for entry in entries_of(model)}
    for plan, unit in zip(plans, engine.units, strict=True):
        for module in plan.triggers:
            units_of.setdefault(module, []).append(unit.core)
    for module, units in units_of.items():
        _put_trigger(module, engine.core, tuple(units))


def _put_trigger(module: nn.Module, core: Any, units: tuple[Any, ...]) -> Any:
    inner = module._compiled_call_impl or module._call_impl
    trigger: Any = _C.Trigger(core, units, inner, _leaf(module))
    module._compiled_call_impl = trigger
    module.compile = _CompileInside(module)  # type: ignore[method-assign]
    return trigger


def trigger_of(module: nn.Module, core: Any) -> Any:
    """Return the trigger of a module. Where it has none, put one there that needs no units, or return None if ``core`` is None."""
    call: Any = module._compiled_call_impl
    while isinstance(call, WrappedCall):
        call = call.inner
    if isinstance(call, _C.Trigger):
        return call
    return None if core is None else _put_trigger(module, core, ())


def is_compiled(module: nn.Module) -> bool:
    """True if torch.compile made what runs the module's forward, before or after it was prepared."""
    call: Any = module._compiled_call_impl
    while isinstance(call, (WrappedCall, _C.Trigger)):
        call = call.inner if isinstance(call, WrappedCall) else call.call
    return hasattr(call, "_torchdynamo_orig_callable") or type(module).__name__ == "OptimizedModule"


#: torch's own modules that return one tensor and let nothing else out: all that autograd saves in them lies behind it.
_LEAVES = (
    nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.Conv1d, nn.Conv2d, nn.Conv3d,
)  # fmt: skip


def _leaf(module: nn.Module) -> tuple[dict[Any, Any], ...] | None:
    """Return, for one of torch's leaf modules, its dict and every dict of hooks that could run in it; None for other modules."""
    if type(module) not in _LEAVES or module._compiled_call_impl is not None:
        return None
    kinds = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    own = [getattr(module, f"_{kind}") for kind in kinds]
    of_all = [getattr(nn.modules.module, f"_global_{kind}") for kind in kinds]
    return (module.__dict__, *own, *of_all)


class _CompileInside:
    """``module.compile()`` of a module with a trigger: compiles what the trigger surrounds, and leaves the trigger."""

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        module = self.module()
        if module is not None:
            trigger: Any = module._compiled_call_impl
            trigger.call = torch.compile(module._call_impl, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = memo.get(id(self.module()))
        return functools.partial(nn.Module.compile, copy) if copy is not None else self


# -- casts -----------------------------------------------------------------------------------------------------------------


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return a value with its floating-point tensors in ``dtype``: a tensor, or lists, tuples, dicts and dataclasses of them."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value  # the same tensor where it is in `dtype`
    if type(value) in (list, tuple):
        return type(value)(_cast(v, dtype) for v in value)
    if type(value) is dict:
        return {k: _cast(v, dtype) for k, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast(v, dtype) for v in value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _cast_fields(value, dtype)
    return value


def _cast_fields(value: Any, dtype: torch.dtype) -> Any:
    new = copy.copy(value)
    for field in dataclasses.fields(value):
        object.__setattr__(new, field.name, _cast(getattr(value, field.name), dtype))
    return new


def cast_inputs(dtype: torch.dtype | None, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Cast what a forward is given; None: leave it. ``functools.partial`` of it is a forward pre-hook with keywords."""
    return (args, kwargs) if dtype is None else (_cast(args, dtype), _cast(kwargs, dtype))


# -- calls wrapped around a forward --------------------------------------------------------------------------------------


class WrappedCall:
    """A call around a module's forward. ``inner`` is what was called before; ``module.compile()`` sets ``call``, which is the trigger's."""

    def __init__(self, model: nn.Module) -> None:
        self.inner: Any = model._compiled_call_impl
        assert self.inner is not None

    @property
    def call(self) -> Any:
        """Return what the trigger calls."""
        return self.inner.call

    @call.setter
    def call(self, value: Any) -> None:
        self.inner.call = value


class AutocastCall(WrappedCall):
    """Run a forward under ``torch.autocast``: ``Precision(param="fp32", compute="bf16")`` (docs/design/0028).

    Autocast's cache of weights in 16 bits is off: it would keep a copy of every weight until the forward ends, also where
    blocks are checkpointed and their units released.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__(model)
        self._device_type, self._dtype = next(model.parameters()).device.type, dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self._device_type, dtype=self._dtype, cache_enabled=False):
            return self.inner(*args, **kwargs)
