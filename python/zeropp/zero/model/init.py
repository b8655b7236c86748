# SPDX-License-Identifier: Apache-2.0
"""``zeropp.sharded_init``: build a model that is never whole in memory.

Inside the context each rank holds 1/N of every parameter, but for a small window of recent ones. A parameter is seen
when its module registers it (torch's public registration hook), and leaves the window when newer ones need the room:
its rank keeps a shard, and its class becomes :class:`ShardedParameter`, which has the true shape. Any operation on it
inside the context brings it back whole first, so that ``reset_parameters``, ``model.apply(init)``,
``p.data.normal_()``, deep copies and tied weights work as ever, with the same random stream, hence the same values,
as plain construction. An operation that overwrites all of it gathers nothing.

Outside of the context such a parameter refuses reads until ``zeropp.prepare`` takes the shards over, unit by unit.
All ranks must build the same model from the same seed; the end of the context compares what they drew.

Cost: peak memory is the shards plus ``window_bytes`` or 9/8 of the largest parameter; one gather for each partial
    write. With ``path`` the shards are pages of files, which the system writes and takes back as it needs memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import mmap
import os
import secrets
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from zeropp.comm.collective import all_gather, broadcast, exchange
from zeropp.comm.job import JobRanks, sub_communicator, world
from zeropp.comm.rendezvous import all_come
from zeropp.config import Folders, folders
from zeropp.errors import ConfigError, PartitionedParameterError
from zeropp.files.disk import storage_errors
from zeropp.files.heap_trim import HeapTrim, byte_view, give_back
from zeropp.files.hub_names import reading_rows, rows_of
from zeropp.parallel.mesh import ranks_of
from zeropp.zero.model.parameter import is_dtensor, local_of

WINDOW_BYTES = 16 << 20
OWN_PAGES_BYTES = 64 << 10
# transformers' from_pretrained else has threads that read ahead, up to all of the model.
_READ_ALONE = "HF_DEACTIVATE_ASYNC_LOAD"
DIGEST_ELEMS = 1 << 18  # torch copies what it sums in a wider type; so much of it stays in the cache

_T: Any = torch.Tensor  # Any: its descriptors are read here, not its values
# What a sharded parameter answers, inside and outside of the context. Strides are not among them: while sharded they
# are not true.
_GETTERS = """
    shape dtype device requires_grad is_leaf grad grad_fn layout ndim is_cuda is_cpu is_meta is_sparse is_quantized
    is_nested is_mkldnn is_xpu is_mps itemsize nbytes retains_grad output_nr names _backward_hooks
    _post_accumulate_grad_hooks
"""
_METHODS = """
    size numel dim ndimension nelement element_size is_floating_point is_complex is_signed get_device is_inference
    __len__ __hash__ register_hook register_post_accumulate_grad_hook requires_grad_
"""
_ANSWERED = {
    *(getattr(_T, name).__get__ for name in _GETTERS.split() if hasattr(_T, name)),
    *(getattr(_T, name) for name in _METHODS.split() if hasattr(_T, name)),
    *(_T.grad.__set__, _T.grad.__delete__, _T.requires_grad.__set__),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}
_DATA_SET = _T.data.__set__
# Operations that write every element of their first argument without reading it.
_OVERWRITING_METHODS = """
    normal_ uniform_ zero_ fill_ random_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_ copy_
"""
_OVERWRITING_INITS = """
    uniform_ normal_ trunc_normal_ constant_ ones_ zeros_ eye_ dirac_ xavier_uniform_ xavier_normal_ kaiming_uniform_
    kaiming_normal_ orthogonal_ sparse_
"""
_OVERWRITES = {getattr(_T, name) for name in _OVERWRITING_METHODS.split()} | {
    getattr(nn.init, name) for name in _OVERWRITING_INITS.split()
}


@dataclass
class _Record:
    """The record of one parameter, kept in its ``_zeropp_built``, so that both live equally long."""

    name: str
    owner: weakref.ref[nn.Module] | None = None
    values: torch.Tensor | None = None
    """While sharded: 1-D, ceil(numel / ranks) elements, this rank's; the last rank's end is padding."""
    digest: int = 0
    """Of the whole values, at the last time they were whole."""
    number: int = field(default_factory=itertools.count().__next__)
    """In the order of construction, which is that of every rank."""
    sharers: Sharers = field(default_factory=lambda: Sharers())
    """The ranks that have a shard each."""
    listed: str = ""
    """A nonce of all ranks where it may stand in a state dict, on meta, before ``prepare``."""
    reads: int = 0
    """How often it was read from there."""
    folders: _ShardFolders | None = None
    """Where its shard waits for ``prepare``; None: in memory."""


@dataclass(frozen=True)
class Sharers:
    """The ranks that each hold a part of a parameter."""

    numbers: tuple[int, ...] | None = None
    """Their numbers in the job, in the order of the parts; None: all ranks of the job."""

    @property
    def ranks(self) -> int:
        return _ranks() if self.numbers is None else len(self.numbers)

    @property
    def rank(self) -> int:
        mine = dist.get_rank() if dist.is_initialized() else 0
        return mine if self.numbers is None else self.numbers.index(mine)

    @property
    def comm(self) -> Any:
        return world().data if self.numbers is None else sub_communicator(self.numbers)

    def of_equal(self, place: int) -> Sharers:
        """Return those of these ranks that give the same number as this one; collective."""
        places = exchange(self.comm, place)
        members = range(self.ranks) if self.numbers is None else self.numbers
        return sharers_of([rank for rank, there in zip(members, places, strict=True) if there == place])

    def all_gather(self, whole: torch.Tensor, mine: torch.Tensor) -> None:
        all_gather(self.comm, whole, mine)

    def broadcast(self, values: torch.Tensor) -> None:
        broadcast(self.comm, values)


def sharers_of(numbers: Sequence[int]) -> Sharers:
    """Return the ranks with these numbers in the job, this one among them."""
    return Sharers(None if len(numbers) == _ranks() else tuple(numbers))


def data_sharers(ranks: JobRanks | None) -> Sharers:
    """Return the data ranks of a job; None: all ranks are such."""
    if ranks is None or ranks.job is None:
        return Sharers()
    return sharers_of([dist.get_rank()] if ranks.data is None else list(ranks.data.job_ranks))


class LiveParameter(nn.Parameter):
    """A parameter that is whole, inside the context: plain, but for deep copies, which are followed too."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copy = nn.Parameter(self.data.clone(memory_format=torch.preserve_format), self.requires_grad)
        memo[id(self)] = copy
        if _active is not None:
            _active.follow(copy, "a copy")
        return copy


class ShardedParameter(nn.Parameter):
    """A parameter of which this rank holds a shard, between its construction and ``zeropp.prepare``."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ANSWERED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func == _DATA_SET:
            return _replace_values(args[0], args[1])
        parameters = _sharded_among((args, kwargs))
        if _active is None:
            if func is _T.detach and _record_of(args[0]).listed:
                listed: Any = torch.empty(args[0].shape, dtype=args[0].dtype, device="meta").as_subclass(_Listed)
                listed.parameter = args[0]
                return listed
            raise _refusal(parameters[0], func)
        with _active.whole_meanwhile():
            for parameter in parameters:
                _active.make_whole(parameter, gather=not _overwrites(func, args, kwargs, parameter))
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if _active is None:
            raise _refusal(self, _T.__deepcopy__)
        with _active.whole_meanwhile():
            _active.make_whole(self, gather=True)
            copy: nn.Parameter = self.__deepcopy__(memo)  # the class is LiveParameter's now
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refusal(self, _T.__reduce_ex__)

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"ShardedParameter('{_record_of(self).name}', shape={tuple(self.shape)}, dtype={self.dtype})"


@functools.cache
def _sharded_dtensor() -> Any:
    """Return the class of a DTensor of whose local tensor this rank holds a shard, between ``parallel.tensor`` and ``prepare``."""
    base: Any = sys.modules["torch.distributed.tensor"].DTensor

    class ShardedDTensor(base):  # type: ignore[misc]
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
            if func not in _ANSWERED:
                raise _refusal(_sharded_among((args, kwargs or {}))[0], func)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

        def to_local(self, **options: Any) -> Any:
            raise _refusal(self, base.to_local)

        def full_tensor(self, **options: Any) -> Any:
            raise _refusal(self, base.full_tensor)

        def redistribute(self, *args: Any, **options: Any) -> Any:
            raise _refusal(self, base.redistribute)

        def __reduce_ex__(self, protocol: Any) -> Any:
            raise _refusal(self, _T.__reduce_ex__)

        def __repr__(self, *, tensor_contents: Any = None) -> str:
            return f"ShardedDTensor('{_record_of(self).name}', shape={tuple(self.shape)}, placements={self.placements})"

    _sharded_types.add(ShardedDTensor)
    return ShardedDTensor


_sharded_types: set[type] = {ShardedParameter}


class _Listed(torch.Tensor):
    """Stands for such a parameter in a state dict, on meta. ``cpu()`` brings its values where every rank asks for them (TRL
    hashes a model so); any other read raises an error that says why there are none."""

    parameter: ShardedParameter

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in (_T.cpu, _T.numpy, _T.tolist, _T.item, _T.to, _T.clone):
            parameter = args[0].parameter
            if not is_sharded(parameter):
                raise PartitionedParameterError(
                    f"`{func.__name__}` of a state dict that was made before its model was prepared; call zeropp.full_state_dict(model)"
                )
            if func is _T.cpu:
                return _read_together(parameter)
            raise _refusal(parameter, func)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _read_together(parameter: ShardedParameter) -> torch.Tensor:
    """Collective: whole values on the CPU. A rank that comes alone does not wait for ever."""
    record = _record_of(parameter)
    record.reads += 1
    if not all_come(f"zeropp/{record.listed}/{record.number}/{record.reads}", f"read parameter '{record.name}'"):
        raise PartitionedParameterError(
            f"parameter '{record.name}' was built in shards, and not every rank came to read its whole values; call state_dict()[...].cpu() "
            "on all ranks, or read them inside deepspeed.zero.GatheredParameters (zeropp.gathered), on all ranks too"
        )
    return materialise(parameter).cpu()


def is_sharded(parameter: torch.Tensor) -> bool:
    """True if this parameter was built inside ``sharded_init`` and not yet taken over by ``prepare``."""
    return type(parameter) in _sharded_types


def materialise(parameter: torch.Tensor) -> torch.Tensor:
    """Collective: the whole values of a sharded parameter, as a new tensor. The parameter stays sharded."""
    with torch._C.DisableTorchFunctionSubclass():
        return _gather(parameter).view(local_of(parameter).shape)


def copy_own_part(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy this rank's shard of a sharded parameter into its place among all values: 1-D, of the parameter's length."""
    with torch._C.DisableTorchFunctionSubclass():
        mine = own_shard(parameter)
        part = whole[_record_of(parameter).sharers.rank * mine.numel() :][: mine.numel()]
        part.copy_(mine[: part.numel()])


@contextlib.contextmanager
def sharded_init(
    *,
    window_bytes: int = WINDOW_BYTES,
    path: Folders | None = None,
    mesh: DeviceMesh | None = None,
    data_dims: Sequence[str] | None = None,
) -> Iterator[None]:
    """Build models inside: each rank keeps 1/N of every parameter right after its construction.

    Args:
        window_bytes: how much of the newest parameters stays whole meanwhile; at least the largest one does.
        path: a folder on a local disk: shards wait there for ``zeropp.prepare``, in files without a name, for models
            whose parameters do not fit into memory (``Offload(params="nvme")``). Several folders: each shard in the one that
            has had the fewest bytes. None: in memory.
        mesh, data_dims: as :func:`zeropp.prepare` takes them. All ranks build the same whole model, N is their number, and
            :func:`zeropp.parallel.tensor`, :func:`zeropp.parallel.cut` and ``prepare`` leave to each rank what it needs.

    Raises:
        zeropp.ConfigError: the ranks drew different values; set the same seed on every rank. Or ``path`` is no folder's name.
        zeropp.TierError: the disk under ``path`` is full.

    With one rank and no ``path`` there is nothing to shard, and nothing is changed.
    """
    if mesh is not None or data_dims is not None:
        ranks_of(mesh, data_dims, "sharded_init")  # for its errors
    with construction(window_bytes, path=path):
        yield


@contextlib.contextmanager
def construction(
    window_bytes: int = WINDOW_BYTES,
    *,
    path: Folders | None = None,
    from_rank_0: bool = False,
    sharers: Sharers | None = None,
) -> Iterator[None]:
    """Do as :func:`sharded_init`, with one more option for code that was written for DeepSpeed.

    Args:
        sharers: the ranks over which parameters are cut; None: all.
        from_rank_0: ranks may draw different values, or none; rank 0's are taken, at the price of a broadcast of every
            parameter. And ``state_dict()`` names the parameters before ``prepare``, as tensors on meta.
    """
    global _active
    sharers = sharers or Sharers()
    if _active is not None or (sharers.ranks == 1 and path is None):
        yield
        return
    _active = _Construction(window_bytes, from_rank_0, None if path is None else _ShardFolders(path), sharers)
    threads = os.environ.get(_READ_ALONE)
    os.environ[_READ_ALONE] = "1"
    hooks = [
        register_module_parameter_registration_hook(_active.on_parameter),
        register_module_module_registration_hook(_active.on_module),
    ]
    # Rank 0's values are sent whole, so it has to have them.
    rows = contextlib.nullcontext() if from_rank_0 else reading_rows(_active.own_rows, _active.on_rows)
    try:
        with rows:
            yield
        _active.finish()
    finally:
        for hook in hooks:
            hook.remove()
        if threads is None:
            del os.environ[_READ_ALONE]
        else:
            os.environ[_READ_ALONE] = threads
        give_back()
        for parameter in _active.live.values():  # some are left when the block raised
            parameter.__class__ = nn.Parameter
            del parameter.__dict__["_zeropp_built"]
        _active = None


class _ShardFolders:
    """Files of shards before ``prepare``: each shard in its own file, so that none is striped, and the folders have about equal shares."""

    def __init__(self, path: Folders) -> None:
        chosen = folders("sharded_init.path", path)
        self._used_bytes = {Path(one): 0 for one in ((chosen,) if isinstance(chosen, str) else chosen)}

    def take(self, size_bytes: int) -> Path:
        """Return a folder for so many bytes."""
        folder = min(self._used_bytes, key=self._used_bytes.__getitem__)
        self._used_bytes[folder] += size_bytes
        return folder


class _Construction:
    """The parameters of one context: which are whole, the modules that own them, what they held."""

    def __init__(self, window_bytes: int, from_rank_0: bool, folders: _ShardFolders | None, sharers: Sharers) -> None:
        self.window_bytes, self.folders, self.sharers = window_bytes, folders, sharers
        self.from_rank_0 = from_rank_0
        self.largest_bytes = 0
        self.heap_trim = HeapTrim()
        self.operations = 0  # that run now, one inside the other
        self.live: dict[int, nn.Parameter] = {}  # by id, oldest use first
        self.followed: list[weakref.ref[nn.Parameter]] = []  # in the order of their registration
        self.parents: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[nn.Module], str]] = (
            weakref.WeakKeyDictionary()
        )
        self.partly: set[int] = set()
        """Addresses of values of which this rank read its own rows alone."""

    # --- hooks of torch ---------------------------------------------------------------------------------------------

    def on_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None:
            return
        self.follow(parameter, name)
        record = parameter.__dict__.get("_zeropp_built")
        if record is not None and record.owner is None:
            record.name, record.owner = name, weakref.ref(module)

    def on_module(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None and child not in self.parents:
            self.parents[child] = (weakref.ref(module), name)

    def own_rows(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return which rows of a parameter, one at least, hold this rank's shard: the first, and the one after the last."""
        numel = math.prod(shape)
        per_rank = -(-numel // self.sharers.ranks)
        begin = min(self.sharers.rank * per_rank, numel - 1)
        return rows_of(shape, begin, min(begin + per_rank, numel))

    def on_rows(self, values: torch.Tensor) -> None:
        self.partly.add(values.data_ptr())

    # --- the window -------------------------------------------------------------------------------------------------

    def follow(self, parameter: nn.Parameter, name: str) -> None:
        """Take a new parameter, which is whole. Classes of their own, and values on meta, are left alone."""
        if "_zeropp_built" in parameter.__dict__ or type(parameter) is not nn.Parameter or parameter.is_meta:
            return
        parameter.__class__ = LiveParameter
        parameter._zeropp_built = _Record(name, sharers=self.sharers)  # type: ignore[attr-defined]
        self.followed.append(weakref.ref(parameter))
        if parameter.data_ptr() in self.partly:  # a read gathers what other ranks have
            self.partly.discard(parameter.data_ptr())
            self.largest_bytes = max(self.largest_bytes, parameter.nbytes)
            self._cut(parameter, 0)
            return
        self._use(parameter)

    @contextlib.contextmanager
    def whole_meanwhile(self) -> Iterator[None]:
        """Keep whole what an operation was given, until it is done."""
        self.operations += 1
        try:
            yield
        finally:
            self.operations -= 1
            if not self.operations:
                self._evict()

    def make_whole(self, parameter: nn.Parameter, gather: bool) -> None:
        record = _record_of(parameter)
        with torch._C.DisableTorchFunctionSubclass():
            values = (
                _gather(parameter)
                if gather
                else torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            )
            parameter.__class__ = LiveParameter
            parameter.data = values.view(parameter.shape)
        record.values = None
        self._use(parameter)

    def _use(self, parameter: nn.Parameter) -> None:
        self.live.pop(id(parameter), None)
        self.live[id(parameter)] = parameter
        self.largest_bytes = max(self.largest_bytes, parameter.nbytes)
        if not self.operations:
            self._evict()

    def _evict(self) -> None:
        capacity = max(self.window_bytes, self.largest_bytes * 9 // 8)
        held = sum(one.nbytes for one in self.live.values())
        for oldest in list(self.live.values())[:-1]:
            if held <= capacity:
                break
            if _is_alone(oldest):
                held -= oldest.nbytes
                self._shard(oldest)

    def _shard(self, parameter: nn.Parameter) -> None:
        del self.live[id(parameter)]
        values = parameter.detach().contiguous().view(-1)
        if self.from_rank_0 and values.numel():
            self.sharers.broadcast(values)
        digest = _digest(values)
        del values  # _cut gives the memory back
        self._cut(parameter, digest)

    def _cut(self, parameter: nn.Parameter, digest: int) -> None:
        """Keep this rank's shard of the values. ``digest``: of all of them; 0 on every rank where none has them all."""
        record, size_bytes = _record_of(parameter), parameter.nbytes
        values = parameter.detach().contiguous().view(-1)
        record.digest, record.folders = digest, self.folders
        _share(record, values, self.sharers)
        del values
        _become_sharded(parameter)
        self.heap_trim.freed(size_bytes)

    def name_of(self, parameter: nn.Parameter) -> str:
        """Return the name that ``named_parameters`` of the outermost module will give."""
        record = _record_of(parameter)
        module = record.owner() if record.owner is not None else None
        parts = [record.name]
        while module is not None and module in self.parents:
            parent, name = self.parents[module]
            parts.append(name)
            module = parent()
        return ".".join(reversed(parts))

    # --- the end ----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        for parameter in list(self.live.values()):
            self._shard(parameter)
        there = [p for p in (ref() for ref in self.followed) if p is not None]
        listed = _common_nonce(self.sharers) if self.from_rank_0 else ""
        for parameter in there:
            record = _record_of(parameter)
            record.name, record.listed = self.name_of(parameter), listed  # all parents are known now
        _compare([(_record_of(p).name, _record_of(p).digest) for p in there], self.sharers)


_active: _Construction | None = None


@contextlib.contextmanager
def whole_built(parameters: Iterable[torch.Tensor], write: bool) -> Iterator[None]:
    """Collective: parameters that were built in shards, and not prepared yet, whole inside the block, as plain ones.

    Args:
        parameters: those that are not sharded are left alone. Any order; ranks may give different ones.
        write: rank 0's changes are kept, on every rank. Otherwise changes are lost.
    """
    chosen: list[Any] = sorted({one for one in parameters if is_sharded(one)}, key=lambda one: _record_of(one).number)
    if _active is not None:  # inside of the construction they come back by themselves
        chosen = []
    for one in chosen:
        whole = materialise(one)
        become_plain(one)
        with torch._C.DisableTorchFunctionSubclass():
            if is_dtensor(one):
                one._local_tensor = whole
            else:
                one.data = whole
    kept = False
    try:
        yield
        kept = write
    finally:
        for one in chosen:
            if kept and one.numel():
                values, record = local_of(one).detach().contiguous().view(-1), _record_of(one)
                record.sharers.broadcast(values)
                _share(record, values, record.sharers)
            _become_sharded(one)


def _shard_of(values: torch.Tensor, sharers: Sharers, waiting: _ShardFolders | None = None) -> torch.Tensor:
    """Return this rank's part of all values, in memory of its own."""
    rank, per_rank = sharers.rank, -(-values.numel() // sharers.ranks)
    mine = _apart(per_rank, values.dtype, values.device, waiting)
    piece = values[rank * per_rank : (rank + 1) * per_rank]
    mine[: piece.numel()] = piece
    return mine


def _share(record: _Record, values: torch.Tensor, sharers: Sharers) -> None:
    """Keep this rank's part of all values, 1-D, as one of these ranks."""
    record.sharers, record.values = sharers, _shard_of(values, sharers, record.folders)


def _become_sharded(parameter: Any) -> None:
    if is_dtensor(parameter):
        parameter._local_tensor = _placeholder(local_of(parameter))
        parameter.__class__ = _sharded_dtensor()
    else:
        parameter.data = _placeholder(parameter)
        parameter.__class__ = ShardedParameter


def plain_class(parameter: torch.Tensor) -> Any:
    """Return the class of a parameter when its values are whole."""
    kind = type(parameter)
    return nn.Parameter if not is_dtensor(parameter) else kind.__base__ if kind in _sharded_types else kind


def become_plain(parameter: torch.Tensor) -> None:
    """Let a parameter that got its whole values be an ordinary one of its kind."""
    parameter.__class__ = plain_class(parameter)


def drop_shard(parameter: torch.Tensor) -> None:
    """Free this rank's shard of a parameter whose values live elsewhere from now on; do nothing where there is none."""
    parameter.__dict__.pop("_zeropp_built", None)


# --- other ranks share ---------------------------------------------------------------------------------------------------
Kept = tuple[torch.Tensor, torch.Tensor]


def share_at_place(
    parameters: Iterable[torch.Tensor], mesh: DeviceMesh, keep: Callable[[torch.Tensor, torch.Tensor], Kept | None]
) -> None:
    """Let the ranks at one place of a mesh alone share parameters that were built in shards. Collective over those that share them now,
    which all give them in the same order.

    Args:
        mesh: of one dimension.
        keep: from a parameter and its whole values to what this rank keeps: a parameter, and its values. None: nothing of it.
    """
    found: dict[Sharers, Sharers] = {}
    for one in {id(one): one for one in parameters if is_sharded(one)}.values():
        before = _record_of(one)
        if before.sharers not in found:
            found[before.sharers] = before.sharers.of_equal(mesh.get_local_rank())
        kept = keep(one, materialise(one))
        if kept is None:
            continue
        parameter, values = kept
        if not is_sharded(parameter):
            parameter.__dict__["_zeropp_built"] = dataclasses.replace(before, values=None)
            _become_sharded(parameter)
        _share(_record_of(parameter), values.reshape(-1), found[before.sharers])


def share_among(named: Iterable[tuple[str, torch.Tensor]], sharers: Sharers) -> None:
    """Let these ranks alone share parameters that were built in shards. Collective over those that share them now.

    Raises:
        zeropp.ConfigError: those have other parameters.
    """
    chosen = [(name, one) for name, one in named if is_sharded(one) and _record_of(one).sharers != sharers]
    if not chosen:
        return
    before = _record_of(chosen[0][1]).sharers
    digest = hashlib.sha256(json.dumps([name for name, _ in chosen]).encode()).hexdigest()
    strange = next((rank for rank, other in enumerate(exchange(before.comm, digest)) if other != digest), None)
    if strange is not None:
        raise ConfigError(
            f"prepare: parameter '{chosen[0][0]}' is shared by {before.ranks} ranks since sharded_init, and they prepare different ones; cut "
            "the model with zeropp.parallel.cut(model, mesh['pp'], ...), or build each stage outside of sharded_init"
        )
    for _, one in chosen:
        _share(_record_of(one), materialise(one).view(-1), sharers)


def _ranks() -> int:
    comm = world().data
    return 1 if comm is None else int(comm.ranks)


def _record_of(parameter: torch.Tensor) -> _Record:
    record: _Record = parameter.__dict__["_zeropp_built"]
    return record


def own_shard(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded parameter's values, 1-D."""
    values = _record_of(parameter).values
    assert values is not None, "a sharded parameter has a shard"
    return values


def _placeholder(parameter: torch.Tensor) -> torch.Tensor:
    """Return one element that looks like the whole: a read that bypasses the class sees NaN, not freed memory."""
    one = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
    if one.is_floating_point() or one.is_complex():
        one.fill_(float("nan"))
    return one.expand(parameter.shape)


def _apart(elems: int, dtype: torch.dtype, device: torch.device, waiting: _ShardFolders | None) -> torch.Tensor:
    """Return zeros in pages of their own: shards that stay, between whole parameters that go, would leave holes in
    malloc's heap. With ``waiting`` they are pages of a file."""
    size_bytes = elems * dtype.itemsize
    if device.type != "cpu" or size_bytes < OWN_PAGES_BYTES:
        return torch.zeros(elems, dtype=dtype, device=device)
    if waiting is not None:
        path = waiting.take(size_bytes)
        with storage_errors(path, size_bytes):
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path) as file:  # the mapping keeps it
                os.posix_fallocate(file.fileno(), 0, size_bytes)
                return torch.frombuffer(mmap.mmap(file.fileno(), size_bytes), dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=dtype)


def _is_alone(parameter: torch.Tensor) -> bool:
    """True if no other tensor shares these values. A view such as ``p.data`` may still be written to."""
    storage = parameter.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) <= 2  # the parameter's own, and `storage` here


def _gather(parameter: torch.Tensor) -> torch.Tensor:
    mine, numel, sharers = own_shard(parameter), local_of(parameter).numel(), _record_of(parameter).sharers
    if sharers.ranks == 1:
        return mine[:numel].clone()
    whole = torch.empty(mine.numel() * sharers.ranks, dtype=mine.dtype, device=mine.device)
    if whole.numel():
        sharers.all_gather(whole, mine)
    return whole[:numel]


def _digest(values: torch.Tensor) -> int:
    """Return the sum of the bits as integers: as fast as memory, and different for two draws of a random stream."""
    if not values.numel():
        return 0
    as_integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}[values.element_size()]
    pieces = values.view(as_integer).reshape(-1).split(DIGEST_ELEMS)
    total = sum(int(piece.sum(dtype=torch.int64)) for piece in pieces)
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)  # it travels as an int64


def _common_nonce(sharers: Sharers) -> str:
    """Return a new random nonce of all ranks; collective."""
    nonce = torch.frombuffer(bytearray(secrets.token_bytes(8)), dtype=torch.uint8)
    sharers.broadcast(nonce)
    return byte_view(nonce).hex()


def _compare(drawn: list[tuple[str, int]], sharers: Sharers) -> None:
    """Collective: every rank built the same parameters with the same values, or all of them raise."""
    ranks = sharers.ranks
    if ranks == 1:
        return
    counts = torch.zeros(ranks, dtype=torch.int64, device="cpu")
    sharers.all_gather(counts, torch.tensor([len(drawn)], dtype=torch.int64, device="cpu"))
    numbers = counts.tolist()
    if len(set(numbers)) > 1:
        raise ConfigError(
            f"sharded_init: ranks built {numbers} parameters (rank 0 first); build the same model on every rank"
        )
    if not drawn:
        return
    mine = torch.tensor([digest for _, digest in drawn], dtype=torch.int64, device="cpu")
    every = torch.zeros(ranks, len(drawn), dtype=torch.int64, device="cpu")
    sharers.all_gather(every.view(-1), mine)
    for rank, theirs in enumerate(every):
        differs = (theirs != every[0]).nonzero()
        if len(differs):
            raise ConfigError(
                f"sharded_init: rank {rank} drew other values than rank 0 for {len(differs)} of {len(drawn)} "
                f"parameters, first '{drawn[int(differs[0])][0]}'; call torch.manual_seed with the same seed on every "
                "rank before it"
            )


def _sharded_among(value: Any) -> list[Any]:
    if type(value) in _sharded_types:
        return [value]
    if isinstance(value, (list, tuple)):
        return [one for item in value for one in _sharded_among(item)]
    if isinstance(value, dict):
        return [one for item in value.values() for one in _sharded_among(item)]
    return []


def _overwrites(func: Any, args: Any, kwargs: Any, parameter: nn.Parameter) -> bool:
    """True if all of `parameter` is written, and nothing of it read."""
    if func not in _OVERWRITES:
        return False
    target = args[0] if args else kwargs.get("tensor")
    return target is parameter and len(_sharded_among((args, kwargs))) == 1


def _replace_values(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """``parameter.data = values``: the shard is dropped. Inside the context it is followed on, outside it is plain
    from now on."""
    with torch._C.DisableTorchFunctionSubclass():
        parameter.__class__ = LiveParameter if _active is not None else nn.Parameter
        parameter.data = values
    if _active is not None:
        _record_of(parameter).values = None
        _active._use(parameter)
    else:
        del parameter.__dict__["_zeropp_built"]


def _refusal(parameter: nn.Parameter, func: Any) -> PartitionedParameterError:
    name = getattr(func, "__name__", str(func))
    owner = getattr(func, "__self__", None)
    if name in ("__get__", "__set__") and owner is not None:
        name = getattr(owner, "__name__", name)
    return PartitionedParameterError(
        f"parameter '{_record_of(parameter).name}' was built inside zeropp.sharded_init(), this rank holds "
        f"1/{_record_of(parameter).sharers.ranks} of it, and `{name}` reads its values; call zeropp.prepare(model, ...) first (it also moves the "
        "model to its device), or do it inside the context"
    )
