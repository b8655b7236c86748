# SPDX-License-Identifier: Apache-2.0
"""Parameters that are not whole on this rank: true shape, dtype and device, and no silent reads.

A released parameter's class is :class:`PartitionedParameter` (stage 3) or :class:`ShardedGradParameter` (stages 1 and 2, where
only the gradient is split). The class swap costs 0.2 us a pair; hooks in C do it. What a read does:

* metadata (shape, dtype, device, stride, ...) answers;
* inside a forward or backward of its model, and in a differentiable operation while a loss is being built, the unit is
  gathered, stays whole until the next step, and the operation goes on;
* anything else raises :class:`zeropp.PartitionedParameterError`, naming the parameter and ``zeropp.gathered``.

A stray read is one of a view of a unit's values, which was kept until the unit was released. The signal handler of
csrc/base/stray.c lets it return NaN; the next call of a model, of ``optimizer.step`` or of zeropp raises. See
docs/design/0007-reads-of-released-memory.md.
"""

from __future__ import annotations

import functools
import sys
import weakref
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import nn

from zeropp import _C
from zeropp.errors import PartitionedParameterError

_T: Any = torch.Tensor  # Any: its descriptors are read here, not its values
_GETTERS = (
    "shape dtype device requires_grad is_leaf grad_fn layout ndim is_cuda is_cpu is_meta is_sparse is_quantized is_nested "
    "_version itemsize nbytes retains_grad _backward_hooks is_xpu is_mps names output_nr _post_accumulate_grad_hooks is_mkldnn"
)
_METHODS = (
    "size numel dim ndimension nelement stride element_size is_floating_point is_complex storage_offset is_contiguous get_device "
    "__len__ __hash__ register_hook register_post_accumulate_grad_hook is_signed is_inference"
)
METADATA = {getattr(_T, name).__get__ for name in _GETTERS.split() if hasattr(_T, name)} | {
    getattr(_T, name) for name in _METHODS.split() if hasattr(_T, name)
}
METADATA |= {torch.numel, torch.is_floating_point, torch.is_complex, torch.is_signed}
_PRINTS = (_T.__repr__, _T.__format__)
_GRAD_GET = _T.grad.__get__
_GRAD_SET = {_T.grad.__set__, _T.grad.__delete__}
# Operations that give values away outside of any graph: never a part of a loss.
_NEVER_GATHER = {_T.detach, _T.data.__get__, _T.numpy, _T.tolist, _T.item, _T.__deepcopy__, _T.__array__, _T.copy_}
_HOOKS = _T.register_post_accumulate_grad_hook
_DATA_SET = _T.data.__set__
_REQUIRES_GRAD_SET = (_T.requires_grad.__set__, _T.requires_grad_)
_MODULE_ZERO_GRAD = nn.Module.zero_grad.__code__
_MODULE_APPLY = nn.Module._apply.__code__
_CONVERSIONS = {_T.to, _T.float, _T.double, _T.half, _T.bfloat16, _T.cpu}


def is_dtensor(tensor: torch.Tensor) -> bool:
    """True for torch's DTensor; its module is not imported for the question."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor; any other tensor itself."""
    local: torch.Tensor = tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return local


@dataclass(frozen=True)
class Ref:
    """The reference from a parameter to its engine, kept in its ``_zeropp`` attribute."""

    engine: Any  # the Engine, and the Unit in it: both know this class
    unit: Any
    index: int
    name: str


def ref_of(parameter: torch.Tensor) -> Ref | None:
    """Return the parameter's place in a prepared model, or None."""
    return getattr(parameter, "_zeropp", None)


def leaves_of(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves_of(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves_of(item)]
    return [value]


def _refuse_gradient(ref: Ref) -> PartitionedParameterError:
    return PartitionedParameterError(
        f"the gradient of parameter '{ref.name}' is not in p.grad: after backward it lives in this rank's shard; "
        "use optimizer.clip_grad_norm_(max_norm) for the norm, or zeropp.gathered(parameter, grads=True) for its values"
    )


def _reader() -> CodeType | None:
    """Return the code that reads an attribute: the first above the functions through which torch passes every read, those of
    ``torch.set_default_device`` among them."""
    frame = sys._getframe(3)  # of the class that calls _manage
    while frame.f_back is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return frame.f_code


def _read_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    ref = ref_of(parameter)
    with torch._C.DisableTorchFunctionSubclass():
        local = parameter.grad
    if ref is None or (local is not None and (ref.engine.shows_gradients or _comes(ref))):
        return local  # a hook of somebody else reads it before ours takes it
    if local is None and not ref.engine.has_gradient(ref):
        return None
    reader = _reader()
    if reader is _MODULE_ZERO_GRAD:  # model.zero_grad() asks before it clears
        ref.engine.clear_gradient(ref)
        return None
    if reader is _MODULE_APPLY:  # module.to(...): a gradient of the same dtype needs no conversion
        return None
    raise _refuse_gradient(ref)


def _comes(ref: Ref) -> bool:
    """Return True while p.grad is not None because autograd accumulates it, or has just done so."""
    return not ref.engine.local_grads or torch._C._current_graph_task_id() != -1


def _write_gradient(func: Any, args: tuple[Any, ...]) -> None:
    ref = ref_of(args[0])
    with torch._C.DisableTorchFunctionSubclass():
        comes = ref is not None and _comes(ref) and args[0].grad is not None
    if ref is not None and len(args) > 1 and args[1] is not None and not comes:
        raise PartitionedParameterError(
            f"p.grad of parameter '{ref.name}' cannot be set: its gradient lives in shards; scale the loss instead, "
            "or clip with optimizer.clip_grad_norm_"
        )
    if ref is not None and not comes:
        ref.engine.clear_gradient(ref)
    with torch._C.DisableTorchFunctionSubclass():
        func(*args)


def _set_requires_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Freezing and unfreezing. A frozen parameter has no gradient, as one that a step did not use; its room stays. What was frozen
    at ``prepare`` gets room now (unfreeze.py)."""
    wanted = bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True))
    ref = ref_of(args[0])
    unfreezes = ref if wanted and ref is not None and not ref.unit.trainable else None
    if unfreezes is not None:
        unfreezes.engine.unfreezing.require_possible(unfreezes.unit, unfreezes.name)
    with torch._C.DisableTorchFunctionSubclass():
        answer = func(*args, **kwargs)
    if not wanted and ref is not None:
        ref.engine.unfreezing.note_frozen()
    if unfreezes is not None and not unfreezes.engine.core.depth and not unfreezes.engine.core.in_backward:
        unfreezes.engine.unfreezing.unfreeze(unfreezes.unit)  # else before the next forward
    return answer


def _keeps_memory(parameter: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether ``parameter.data = value`` changes nothing. ``module.to`` assigns so where the dtype is right already."""
    with torch._C.DisableTorchFunctionSubclass():
        return value is parameter or (
            (value.layout, value.dtype, value.device, value.shape)
            == (parameter.layout, parameter.dtype, parameter.device, parameter.shape)
            and value.stride() == parameter.stride()
            and value.data_ptr() == parameter.data_ptr()
        )


def converts_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether this conversion would return the parameter itself. It is tried on an empty tensor of the same dtype."""
    if func not in _CONVERSIONS or "memory_format" in kwargs or kwargs.get("copy"):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        probe = torch.empty((0,) * args[0].dim(), dtype=args[0].dtype, device=args[0].device)
        return func(probe, *args[1:], **kwargs) is probe


def _manage(operate: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer what concerns the gradient of a released parameter and its memory; ``operate`` does the rest."""
    if func == _GRAD_GET:
        return _read_gradient(args[0])
    if func in _GRAD_SET:
        return _write_gradient(func, args)
    if func in _REQUIRES_GRAD_SET:
        return _set_requires_grad(func, args, kwargs)
    if func == _HOOKS:
        answer = _operate_whole(func, args, kwargs)
        _living(args[0]).engine.hook_order()
        return answer
    ref = ref_of(args[0]) if func == _DATA_SET else None
    if ref is not None:
        if _keeps_memory(args[0], args[1]):
            return None
        raise PartitionedParameterError(
            f"p.data of parameter '{ref.name}' cannot be replaced: it is a view of its unit's buffer (as model.to, half and cuda "
            "would do); convert the model before zeropp.prepare, or write values inside zeropp.gathered(parameter, write=True)"
        )
    return operate(func, args, kwargs)


def _operate_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _operate_partitioned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func in METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if converts_nothing(func, args, kwargs):
        return args[0]
    refs = [_living(leaf) for leaf in leaves_of((args, kwargs)) if type(leaf) in _partitioned]
    if func in _PRINTS:
        ref = refs[0]
        return f"{type(args[0]).__name__}('{ref.name}', shape={tuple(args[0].shape)}, dtype={args[0].dtype})"
    _gather(func, refs)
    # Plain parameters now, unless another thread's read raced with this one: then it raises above, next time.
    return func(*args, **kwargs)


def _gather(func: Any, refs: list[Ref]) -> None:
    """Make parameters whole for an operation, or raise zeropp.PartitionedParameterError where it may not read them."""
    for unit, ref in {id(ref.unit): ref for ref in refs}.items():
        if not _may_gather(func, ref):
            raise _refuse(func, ref)
        del unit
        ref.unit.core.auto()


class Managed(nn.Parameter):
    """Common to the classes of released parameters: gradients."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _manage(cls._operate, func, args, kwargs or {})

    @classmethod
    def _operate(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError  # the subclasses answer


class ShardedGradParameter(Managed):
    """A parameter that is whole on every rank, while its gradient and optimizer state are split (ZeRO stages 1 and 2)."""

    @classmethod
    def _operate(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _operate_whole(func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        with torch._C.DisableTorchFunctionSubclass():
            copy = nn.Parameter(self.data.clone(memory_format=torch.preserve_format), self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)


class PartitionedParameter(Managed):
    """A parameter of which this rank holds 1/N, or which must not be written here (ZeRO stage 3)."""

    @classmethod
    def _operate(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _operate_partitioned(func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        raise _refuse(_T.__deepcopy__, _living(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refuse(_T.__reduce_ex__, _living(self))

    def __array__(self, dtype: Any = None) -> Any:
        raise _refuse(_T.__array__, _living(self))


_partitioned: set[type] = {PartitionedParameter}


@functools.cache
def released_dtensors() -> tuple[Any, ...]:
    """Return, by stage, the class of released parameters that are DTensors, as the two classes above for plain ones."""
    base: Any = sys.modules["torch.distributed.tensor"].DTensor

    class ShardedGradDTensor(base):  # type: ignore[misc]
        """A DTensor whose local tensor is whole, while its gradient and optimizer state are split (ZeRO stages 1 and 2)."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
            return _manage(_operate_whole, func, args, kwargs or {})

    class PartitionedDTensor(base):  # type: ignore[misc]
        """A DTensor of whose local tensor this rank holds 1/N (ZeRO stage 3)."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
            return _manage(_operate_partitioned, func, args, kwargs or {})

        def __repr__(self, *, tensor_contents: Any = None) -> str:
            return (
                f"PartitionedDTensor('{_living(self).name}', shape={tuple(self.shape)}, placements={self.placements})"
            )

        def to_local(self, **options: Any) -> Any:
            return _whole_first(base.to_local, self, options)

        def full_tensor(self, **options: Any) -> Any:
            return _whole_first(base.full_tensor, self, options)

        def redistribute(self, *args: Any, **options: Any) -> Any:
            return _whole_first(functools.partial(_redistribute, base, args), self, options)

    _partitioned.add(PartitionedDTensor)
    return (None, ShardedGradDTensor, ShardedGradDTensor, PartitionedDTensor)


def _redistribute(base: Any, args: tuple[Any, ...], tensor: torch.Tensor, **options: Any) -> Any:
    return base.redistribute(tensor, *args, **options)


def _whole_first(function: Any, tensor: torch.Tensor, options: dict[str, Any]) -> Any:
    """Call a method of DTensor that reads the local tensor without asking ``__torch_function__``."""
    _gather(function, [_living(tensor)])
    return function(tensor, **options)


def _living(parameter: torch.Tensor) -> Ref:
    ref = ref_of(parameter)
    if ref is None:
        raise PartitionedParameterError(
            "the model of this partitioned parameter is gone, and its values with it; keep the model alive"
        )
    return ref


def _may_gather(func: Any, ref: Ref) -> bool:
    core = ref.engine.core
    if core.depth or core.in_backward:
        return True
    return func not in _NEVER_GATHER and torch.is_grad_enabled() and ref.engine.builds_loss


def _refuse(func: Any, ref: Ref) -> PartitionedParameterError:
    name = getattr(func, "__name__", str(func))
    owner = getattr(func, "__self__", None)
    if name in ("__get__", "__set__") and owner is not None:
        name = getattr(owner, "__name__", name)
    where = f"parameter '{ref.name}' is partitioned over {ref.engine.ranks} rank{'s' if ref.engine.ranks > 1 else ''}"
    writes = name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__"))
    if writes:
        return PartitionedParameterError(
            f"{where}, and `{name}` writes its values; use `with zeropp.gathered(parameter, write=True):`, which keeps rank 0's, or "
            "zeropp.load_full_state_dict(model, values)"
        )
    return PartitionedParameterError(
        f"{where}, and `{name}` reads its values outside of the model's forward and backward; use `with zeropp.gathered(parameter):`, "
        "or zeropp.full_state_dict(model) for a whole copy"
    )


# -- stray reads -------------------------------------------------------------------------------------------------------

engines: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
"""The engine of each prepared model that lives."""


def _name_at(address: int) -> str | None:
    """Return the name of the parameter at this address; None if no living model has one there."""
    for engine in list(engines.values()):
        for unit in engine.units:
            at = (address - unit.whole.data_ptr()) // unit.dtype.itemsize
            if 0 <= at < unit.elems and unit.params:
                name: str = next(entry.names[0] for entry in reversed(unit.params) if entry.offset_elems <= at)
                return name
    return None


def raise_strays() -> None:
    """Raise an error that names the parameters if there was a stray read since the last call. Costs one call otherwise."""
    if not _C.stray_seen():
        return
    names = dict.fromkeys(_name_at(address) for address in _C.stray_take())
    living = ", ".join(f"'{name}'" for name in names if name is not None) or "of a model that is gone"
    raise PartitionedParameterError(
        f"a view of parameter {living} was kept and used after the parameter was released, so it had NaN for values: detach(), .data, "
        "an index, view(), .T and numpy() give views without memory of their own; clone the view inside the hook or module that makes "
        "it, or read the parameter in `with zeropp.gathered(parameter):`"
    )
