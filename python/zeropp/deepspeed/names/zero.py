# SPDX-License-Identifier: Apache-2.0
"""``deepspeed.zero``: models built in shards, and gathered for a while before and after ``deepspeed.initialize``; and what a
parameter says of itself there (``ds_id`` and its relatives)."""

from __future__ import annotations

import contextlib
import enum
import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

import zeropp
from zeropp.config.reading import read_json
from zeropp.deepspeed.names.comm import init_distributed
from zeropp.errors import ConfigError
from zeropp.zero.model import init as building
from zeropp.zero.model.init import ShardedParameter, construction, is_sharded
from zeropp.zero.model.parameter import PartitionedParameter, ref_of
from zeropp.zero.model_state import FILE

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16}
# Groups of ranks, and compression, that zeropp has no counterpart of: refused unless left at None or False.
_NOT_BUILT = (
    "data_parallel_group", "sequence_data_parallel_group", "zero_param_parallel_group", "mpu", "param_swapper",
    "zero_quantized_weights", "zero_quantized_nontrainable_weights",
)  # fmt: skip


class ZeroParamType(enum.Enum):
    """How a parameter is held: whole everywhere, or in shards; none is held by one rank alone."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(enum.Enum):
    """Whether this rank has the whole values now. Nothing is ever seen on its way."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class PartitionedParamStatus(enum.Enum):
    """The status of a shard, which may be on a disk."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class Init(contextlib.ContextDecorator):
    """``deepspeed.zero.Init``: what is built inside is never whole in memory on any rank (:func:`zeropp.sharded_init`). Rank 0's
    values count. Until ``initialize`` takes it, such a model names its parameters in ``state_dict()`` on meta, and refuses
    other reads outside of :func:`GatheredParameters`.

    Args:
        module: a finished model; ``initialize`` partitions it.
        config_dict_or_path: with ``fp16`` or ``bf16`` enabled, parameters are built in that type.
        dtype: the same, said directly.
        mem_efficient_linear, remote_device, pin_memory: without effect; the configuration of ``initialize`` says where memory is taken.
        enabled: False: nothing happens.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: Any = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        **more: Any,
    ) -> None:
        for name, value in {"data_parallel_group": data_parallel_group, "mpu": mpu, **more}.items():
            if name not in _NOT_BUILT:
                raise TypeError(f"deepspeed.zero.Init: unknown argument {name!r}")
            if value not in (None, False):
                raise ConfigError(f"deepspeed.zero.Init({name}=) is not supported by zeropp; leave it out")
        source = config_dict_or_path if config_dict_or_path is not None else config
        self.enabled = enabled and module is None
        self.dtype = dtype if dtype is not None else _low(source)
        self._stack: list[contextlib.ExitStack] = []

    def __enter__(self) -> Init:
        stack = contextlib.ExitStack()
        self._stack.append(stack)
        _open.append(stack)
        if self.enabled:
            init_distributed()
            if self.dtype is not None:  # before the hook of the construction, which takes what is registered as it is
                stack.enter_context(contextlib.closing(_Cast(self.dtype)))
            stack.enter_context(construction(from_rank_0=True))
            if building._active is None:  # one rank has nothing to shard, but its parameters say what they are
                stack.enter_context(contextlib.closing(_MarkWhole()))
        return self

    def __exit__(self, *error: Any) -> None:
        stack = self._stack.pop()
        if stack in _open:  # else `initialize` has ended it
            _end(stack, *error)


_open: list[contextlib.ExitStack] = []
"""Of the contexts that are entered now."""


def _end(stack: contextlib.ExitStack, *error: Any) -> None:
    _open.remove(stack)
    built = [] if building._active is None else list(building._active.followed)
    stack.__exit__(*(error or (None, None, None)))
    for parameter in (one() for one in built):
        if parameter is not None and is_sharded(parameter):
            _mark(parameter, None)


def end_open_contexts() -> None:
    """``initialize`` inside of ``with zero.Init():`` takes what was built so far; the rest of the block builds as ever."""
    for stack in reversed(_open.copy()):
        _end(stack)


def _low(source: Any) -> torch.dtype | None:
    """The type that a configuration asks for."""
    keys = {} if source is None else read_json(source)
    for name, dtype in _DTYPES.items():
        section = keys.get(name)
        if isinstance(section, Mapping) and section.get("enabled") is True:
            return dtype
    return None


class _Cast:
    """Parameters of floating point take one type as they are registered."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._hook = register_module_parameter_registration_hook(self._on_parameter)

    def _on_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None or is_sharded(parameter) or not parameter.is_floating_point():
            return
        if parameter.dtype != self._dtype:
            parameter.data = parameter.data.to(self._dtype)

    def close(self) -> None:
        self._hook.remove()


class _MarkWhole:
    """Parameters as they are registered on one rank: as those that are split, with all of their values in ``ds_tensor``."""

    def __init__(self) -> None:
        self._seen: list[weakref.ref[nn.Parameter]] = []
        self._hook = register_module_parameter_registration_hook(self._on_parameter)

    def _on_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if type(parameter) is nn.Parameter:
            self._seen.append(weakref.ref(parameter))

    def close(self) -> None:
        self._hook.remove()
        for parameter in (one() for one in self._seen):
            if parameter is not None and "ds_id" not in parameter.__dict__ and ref_of(parameter) is None:
                _mark(parameter, _described(parameter.detach().reshape(-1), False))
                parameter.__dict__["ds_status"] = ZeroParamStatus.NOT_AVAILABLE


@contextlib.contextmanager
def GatheredParameters(
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    """``zeropp.gathered``; with ``modifier_rank=0`` rank 0's changes are kept. As there, parameters that are not partitioned
    are left alone."""
    if not enabled:
        yield
        return
    if modifier_rank not in (None, 0):
        raise ConfigError(
            f"deepspeed's GatheredParameters(modifier_rank={modifier_rank}) is not supported by zeropp; change the values on rank 0"
        )
    every = _parameters(params)
    chosen = [one for one in every if is_sharded(one) or ref_of(one) is not None]
    with _said_to_be_available(every), zeropp.gathered(chosen, write=modifier_rank == 0):
        yield


@contextlib.contextmanager
def _said_to_be_available(parameters: list[Any]) -> Iterator[None]:
    """Let the parameters that ``_MarkWhole`` marked, which are whole anyway, say that they are available."""
    marked = [
        one.__dict__
        for one in parameters
        if type(one) is nn.Parameter and "ds_id" in one.__dict__ and ref_of(one) is None
    ]
    for known in marked:
        known["ds_status"] = ZeroParamStatus.AVAILABLE
    try:
        yield
    finally:
        for known in marked:
            known["ds_status"] = ZeroParamStatus.NOT_AVAILABLE


def _parameters(what: Any) -> list[Any]:
    """In one list; a bias that is None is passed over."""
    if isinstance(what, nn.Module):
        return list(what.parameters())
    if what is None:
        return []
    return [what] if isinstance(what, torch.Tensor) else [one for item in what for one in _parameters(item)]


def register_external_parameter(module: nn.Module, parameter: Any) -> None:
    """Not needed: a parameter read outside its module is gathered when it is read."""


def unregister_external_parameter(module: nn.Module, parameter: Any) -> None:
    """Not needed either."""


# -- what a parameter says of itself ----------------------------------------------------------------------------------------
#
# A partitioned parameter changes its class when it is gathered and released. What never changes is an attribute of its own, and so is
# what it says while it is whole; a property of the class that it has while it is split goes before that. So no hook does anything.


_ids = itertools.count()
_FIELDS = (
    "is_external_param",
    "ds_id",
    "ds_numel",
    "ds_shape",
    "ds_tensor",
    "ds_status",
    "ds_param_type",
    "ds_persist",
    "ds_active_sub_modules",
)


def mark(model: nn.Module) -> None:
    """``ds_id``, ``ds_numel``, ``ds_shape``, ``ds_tensor`` and ``ds_status`` for every parameter that is split: at stage 3, as there."""
    for parameter in model.parameters():
        ref = ref_of(parameter)
        if ref is not None and ref.engine.stage == 3:
            _mark(parameter, _slice(parameter))
        elif not is_sharded(parameter):
            for name in _FIELDS:  # of zero.Init
                parameter.__dict__.pop(name, None)


def _mark(parameter: Any, values: torch.Tensor | None) -> None:
    """``ds_id`` is drawn in an order that is that of every rank."""
    known = parameter.__dict__
    known.setdefault("ds_id", next(_ids))
    known.setdefault("ds_active_sub_modules", set())
    known.update(
        ds_numel=parameter.numel(), ds_shape=torch.Size(parameter.shape), ds_tensor=values, ds_persist=False, is_external_param=False,
        ds_status=ZeroParamStatus.AVAILABLE, ds_param_type=ZeroParamType.PARTITIONED,
    )  # fmt: skip


def _slice(parameter: Any) -> torch.Tensor:
    """Return this rank's values, 1-D: a view of its part of the unit's shard. It may be empty, because a unit is cut into equal shards;
    DeepSpeed cuts each parameter. On meta where they lie in a file."""
    ref = ref_of(parameter)
    assert ref is not None, "of a prepared model"
    unit = ref.unit
    first, elems = next(((first, elems) for index, first, elems in unit.pieces() if index == ref.index), (0, 0))
    return _described(unit.shard[first : first + elems].detach(), unit.place == FILE)


def _described(values: Any, in_file: bool) -> torch.Tensor:
    values.ds_numel, values.final_location = values.numel(), None
    values.status = PartitionedParamStatus.NOT_AVAILABLE if in_file else PartitionedParamStatus.AVAILABLE
    whole: torch.Tensor = values
    return whole


def _status_while_split(parameter: Any) -> ZeroParamStatus:
    if "ds_id" not in parameter.__dict__:  # of a model that only zeropp.prepare has seen
        raise AttributeError(f"{type(parameter).__name__} has no attribute 'ds_status'")
    return ZeroParamStatus.NOT_AVAILABLE


def _built_slice(parameter: Any) -> torch.Tensor:
    return _described(building.own_shard(parameter).detach(), False)


for _kind in (PartitionedParameter, ShardedParameter):
    _kind.ds_status = property(_status_while_split)  # type: ignore[union-attr]
ShardedParameter.ds_tensor = property(_built_slice)  # type: ignore[attr-defined]


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
    return _mark_leaf(model, found, flag, raise_if_not_found, "named")


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """By the ends of their names: the modules, and the ends that no name has."""
    known = list(model.named_modules())
    found = {end: [one for name, one in known if name.endswith(end)] for end in module_name_suffixes}
    return _mark_leaf(model, found, flag, raise_if_not_found, "whose names end in")


def _mark_leaf(
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


__all__ = [
    "GatheredParameters",
    "Init",
    "PartitionedParamStatus",
    "ZeroParamStatus",
    "ZeroParamType",
    "mark",
    "register_external_parameter",
    "unregister_external_parameter",
]
