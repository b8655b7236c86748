# SPDX-License-Identifier: Apache-2.0
"""Activations on NVMe: ``Config(offload=Offload(activations="nvme", path=...))`` (ZeRO-Infinity, arXiv:2104.07857, 5.1.2).

What autograd keeps for backward while the model's forward runs goes to a scratch file behind the computation, and comes
back ahead of backward, in the reverse of the order it went. With ``torch.utils.checkpoint`` that is the inputs of the
checkpointed blocks, and nothing of what is computed anew; without it, everything. So the memory that activations take
does not grow with the depth of the model, but by little: what was freed goes back to the system as it is freed (`holes`).

    forward    saved:  write begins -----> written: memory is given back
    backward   wanted: used from memory while it is being written; else it was read ahead, or is read now

The unit of moving is a whole storage: queries, keys and values that are views of one matrix move once and come back with
the strides they had, so that every kernel sees the same layout and gives the same bits. Parameters, buffers, the
arguments of the call and whatever is smaller than `MIN_BYTES` stay: keeping them costs nothing, or little.

From an accelerator they go to page-locked memory of the host (`zeropp.zero.offload.activations_device`), in the same order.

Every rank offloads its own. Ranks that hold the same activations share them out first (`zeropp.nn.partition_activations`).
"""

from __future__ import annotations

import abc
import collections
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from zeropp import aio
from zeropp.comm.collective import Ranks
from zeropp.config import Tier
from zeropp.errors import Error
from zeropp.files import io_settings
from zeropp.files.heap_trim import HeapTrim
from zeropp.files.scratch import STRIPE_BYTES, Scratch
from zeropp.zero.formulas import PAGE_BYTES, in_pages
from zeropp.zero.model.forward import WrappedCall
from zeropp.zero.model_state import ActivationStore, Bytes, ModelState
from zeropp.zero.offload.storage import disk_traffic, end_store

MIN_BYTES = 64 << 10
"""Storages below stay in memory."""
WAITING_BYTES = 64 << 20
"""Of storages that wait to be written, or were read ahead: at most this, or four of the largest, or one."""
FIGURES = ("read_bytes", "written_bytes", "checked_bytes", "sums_bytes", "backend")
DEPTH = 8
"""Operations in flight, of each folder; each has a buffer of a block, because autograd's tensors do not begin at pages."""


_running = threading.local()
open_partitions = threading.local()
"""``stack``: the partitions of activations that this thread has open (:mod:`zeropp.nn.partition`), outermost first."""


def innermost_partition() -> Any:
    """Return the innermost open partition of activations of this thread, or None."""
    stack = getattr(open_partitions, "stack", [])
    return stack[-1] if stack else None


def running() -> MovedActivations | None:
    """Return the tier of the model whose forward runs in this thread."""
    return getattr(_running, "tier", None)


class Place(weakref.ref["Saved"]):
    """A storage's place in the file, and what is to be given back when the storage dies.

    Storages die in the middle of a backward. Python's code run there (``__del__``) would be the first that a waiting Ctrl-C meets, and Python
    drops what such code raises: so the dead are only listed, by a method of deque, and the next call frees their
    places.
    """

    __slots__ = ("ahead", "ahead_bytes", "bytes", "future", "index", "offset_bytes")

    index: int
    bytes: int
    offset_bytes: int
    ahead_bytes: int  # read before they were wanted
    ahead: Tensor | None  # where they come to
    future: Future | None


class Future(Protocol):
    """A write or a read under way."""

    def done(self) -> bool:
        """Return True if :meth:`wait` would return at once."""

    def wait(self) -> object:
        """Return when what uses the bytes next may do so; raise zeropp.TierError where storage failed."""

    def cancel(self) -> object:
        """Note that nobody wants the bytes, whose memory may be used again when this returns."""


class Saved:
    """One storage on its way to its place, in it, or back. Dies with the last graph that needs it."""

    def __init__(self, tier: MovedActivations, index: int, source: Tensor, flat: Tensor, offset_bytes: int) -> None:
        self.tier, self.index, self.bytes = tier, index, flat.numel()
        self.place = place = Place(self, tier.dead.append)
        place.index, place.bytes, place.offset_bytes, place.ahead_bytes = index, flat.numel(), offset_bytes, 0
        place.future = place.ahead = None
        self.version = source._version
        self.source: Tensor | None = source  # shares its version counter; None once it is written
        self.flat: Tensor | None = flat  # the bytes: of the source until it is written, or read ahead
        self.read: StorageWeakRef | None = None  # what was read, while it is in use
        self.changed = False

    def check_unchanged(self) -> None:
        """Raise RuntimeError, as torch does in backward, where the tensor was changed in place after autograd saved
        it."""
        if self.changed or (self.source is not None and self.source._version != self.version):
            self.changed = True
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of {self.bytes} bytes, saved at version {self.version}, while offload.activations "
                f"{self.tier.doing}"
            )


class View:
    """The object that autograd holds in place of a tensor."""

    __slots__ = ("dtype", "offset", "saved", "size", "stride")

    def __init__(self, saved: Saved, tensor: Tensor) -> None:
        self.saved, self.dtype = saved, tensor.dtype
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()

    def over(self, flat: Tensor) -> Tensor:
        """Return the tensor again, over the bytes of its storage."""
        item = self.dtype.itemsize
        typed = flat[: flat.numel() // item * item].view(self.dtype)
        return typed.as_strided(self.size, self.stride, typed.storage_offset() + self.offset)


class Extents:
    """Free places of a file that grows at its end. Neighbours that come free become one."""

    def __init__(self) -> None:
        self.end = 0
        self._free: list[tuple[int, int]] = []  # (offset, bytes), ascending

    def fits(self, size: int, capacity: int) -> bool:
        """Return True if so much can be taken without going beyond ``capacity``."""
        return self.end + size <= capacity or any(free >= size for _, free in self._free)

    def take(self, size: int) -> int:
        for at, (offset, capacity) in enumerate(self._free):
            if capacity >= size:
                self._free[at : at + 1] = [(offset + size, capacity - size)] if capacity > size else []
                return offset
        self.end += size
        return self.end - size

    def give(self, offset: int, size: int) -> None:
        at = sum(1 for one in self._free if one[0] < offset)
        if at < len(self._free) and self._free[at][0] == offset + size:
            size += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == offset:
            offset, size = self._free[at - 1][0], size + self._free[at - 1][1]
            self._free.pop(at - 1)
            at -= 1
        if offset + size == self.end:
            self.end = offset  # the file keeps its length, and the place is taken again
        else:
            self._free.insert(at, (offset, size))


class MovedActivations(ActivationStore, abc.ABC):
    """Move what autograd saves to another tier, and back. A tier says what a write and a read are.

    Args:
        device: of the tensors that are moved; others stay.
        fraction: of all bytes that autograd saves.
    """

    in_file = True
    doing = ""
    """What happens to a tensor while it must not change, for messages."""

    def __init__(self, engine: ModelState, device: torch.device, fraction: float) -> None:
        self.device, self.fraction = device, fraction
        self._lock = threading.RLock()  # guards all that follows; a graph may die, or run, in any thread
        self._by_storage: dict[int, tuple[StorageWeakRef, weakref.ref[Saved]]] = {}
        self._alive: dict[int, Place] = {}  # by index, which counts up
        self.dead: collections.deque[weakref.ref[Saved]] = collections.deque()  # whose place is to be freed
        self._writing: collections.deque[tuple[weakref.ref[Saved], Future, int]] = collections.deque()
        self._next = self._largest_bytes = 0
        self._seen_bytes = self._put_bytes = 0  # of all passes: `fraction` of the first is the second
        self.waiting_bytes = self.waiting_peak_bytes = 0
        self.ahead_bytes = self.file_bytes = self.file_peak_bytes = 0
        self._waited = [0]  # ns
        self._closed, self._owner = False, os.getpid()
        self._stays: set[int] = set()
        self._units = [unit.whole.untyped_storage().data_ptr() for unit in engine.units]

    def install(self, model: nn.Module) -> None:
        model._compiled_call_impl = OffloadingCall(model, self)

    # -- what a tier does

    @abc.abstractmethod
    def _take_place(self, size: int) -> int:
        """Return where so many bytes are to be kept."""

    @abc.abstractmethod
    def _give_place(self, offset: int, size: int) -> None: ...

    @abc.abstractmethod
    def _start_write(self, flat: Tensor, place: Place) -> Future: ...

    @abc.abstractmethod
    def _start_read(self, flat: Tensor, place: Place) -> Future: ...

    def _memory_for(self, size: int) -> Tensor:
        """Return memory of the device for a storage that comes back."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def _over(self, storage: torch.UntypedStorage, size: int) -> Tensor:
        """Return the bytes that lie in such memory."""
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)[:size]

    def _note_freed(self, size: int) -> None:
        """Note that so many bytes of the device's memory were freed."""

    def _note_dead(self, place: Place) -> None:
        """Note that nobody wants a storage any more."""

    # -- forward -----------------------------------------------------------------------------------------------------------

    def forward(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return ``call(*args, **kwargs)``; what autograd saves in it is offloaded."""
        if self._closed or not torch.is_grad_enabled() or torch._C._functorch.peek_interpreter_stack() is not None:
            return call(*args, **kwargs)
        stays = _storages_kept_anyway(module, args, kwargs, self.device)
        with self._lock:
            self._stays = stays | set(self._units)
        before, _running.tier = running(), self
        try:
            with torch.autograd.graph.saved_tensors_hooks(*self._hooks()):
                return call(*args, **kwargs)
        finally:
            _running.tier = before

    def _hooks(self) -> Any:
        shared = innermost_partition()  # ranks that hold the same keep a part each, and that goes to the file
        hooks = (self._pack, self._unpack) if shared is None else (shared.pack, shared.unpack)
        if "torch._dynamo" in sys.modules:  # it compiles every frame that runs below a compiled module, hooks too
            return tuple(torch._dynamo.disable(hook) for hook in hooks)
        return hooks

    def _pack(self, tensor: Tensor) -> Any:
        if type(tensor) is not Tensor or tensor.device.type != self.device.type or tensor.layout != torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        if storage.nbytes() < MIN_BYTES or tensor.is_conj() or tensor.is_neg() or tensor.is_inference():
            return tensor
        with self._lock:
            if self._closed or storage.data_ptr() in self._stays:
                return tensor
            self._free_dead()
            self._reap()
            saved = self._known(storage, tensor._version) or self._begin(storage, tensor)
        return tensor if saved is None else View(saved, tensor)

    def _known(self, storage: torch.UntypedStorage, version: int) -> Saved | None:
        """Return the record of the same bytes if they were saved just before. Views share their version counter with their base."""
        found = self._by_storage.get(storage._cdata)
        if found is None or found[0].expired():
            return None
        saved = found[1]()
        return saved if saved is not None and saved.version == version else None

    def _begin(self, storage: torch.UntypedStorage, tensor: Tensor) -> Saved | None:
        size = storage.nbytes()
        self._seen_bytes += size
        if self._put_bytes + size > self.fraction * self._seen_bytes + 0.5:
            return None
        self._put_bytes += size
        self._largest_bytes = max(self._largest_bytes, size)
        while self._writing and self.waiting_bytes + size > self._capacity_bytes():
            self._reap(patiently=True)
        flat = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
        saved = Saved(self, self._next, tensor.detach(), flat, self._take_place(size))
        self._next += 1
        self._alive[saved.index] = saved.place
        self.file_bytes += size
        self.file_peak_bytes = max(self.file_peak_bytes, self.file_bytes)
        future = saved.place.future = self._start_write(flat, saved.place)
        self._by_storage[storage._cdata] = (StorageWeakRef(storage), saved.place)
        self._writing.append((saved.place, future, size))
        self.waiting_bytes += size
        self.waiting_peak_bytes = max(self.waiting_peak_bytes, self.waiting_bytes)
        return saved

    def _capacity_bytes(self) -> int:
        return min(WAITING_BYTES, 4 * self._largest_bytes)

    def _reap(self, patiently: bool = False) -> None:
        """Give back the memory of what is written; with ``patiently``, of one at least."""
        while self._writing:
            found, future, size = self._writing[0]
            if not patiently and not future.done():
                return
            patiently = False
            saved = found()
            try:
                self._wait(future)  # raises zeropp.TierError: file, offset, bytes; then the memory stays as it is
            except Error:
                if saved is not None:  # else its graph is gone, and the write does not matter
                    raise
            finally:
                self._writing.popleft()
                self.waiting_bytes -= size
            if saved is not None and saved.source is not None:
                saved.changed = saved.source._version != saved.version
                saved.source = saved.flat = saved.place.future = None
                self._note_freed(size)

    # -- backward ------------------------------------------------------------------------------------------------------------

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        saved: Saved = packed.saved
        with self._lock:
            saved.check_unchanged()
            flat = self._in_use(saved)
            if flat is None:
                flat = self._fetch(saved)
            tensor: Tensor = packed.over(flat)
            if saved.source is None:
                saved.read = StorageWeakRef(flat.untyped_storage())
            self._free_dead()
            self._reap()
            self._read_ahead(saved.index)
        return tensor

    def _in_use(self, saved: Saved) -> Tensor | None:
        """Return the tensor that was read for another view and still exists."""
        if saved.read is None:
            return None
        storage = torch.UntypedStorage._new_with_weak_ptr(saved.read.cdata)
        return None if storage is None else self._over(storage, saved.bytes)

    def _fetch(self, saved: Saved) -> Tensor:
        if saved.source is not None:  # not written yet, or it never will be
            assert saved.flat is not None
            return saved.flat
        if saved.flat is None:
            self._begin_read(saved)
        flat, future = saved.flat, saved.place.future
        assert flat is not None and future is not None
        saved.flat = saved.place.future = saved.place.ahead = None
        self.ahead_bytes -= saved.bytes
        saved.place.ahead_bytes = 0
        self._wait(future)
        return flat

    def _wait(self, future: Future) -> None:
        began = time.perf_counter_ns()
        try:
            future.wait()
        finally:
            self._waited[0] += time.perf_counter_ns() - began

    def _begin_read(self, saved: Saved) -> None:
        if self._closed:
            raise Error(
                "backward: the model was dropped, and with it its activations on another tier; keep the model alive"
            )
        saved.flat = saved.place.ahead = self._memory_for(saved.bytes)
        saved.place.future = self._start_read(saved.flat, saved.place)
        saved.place.ahead_bytes = saved.bytes
        self.ahead_bytes += saved.bytes

    def _read_ahead(self, index: int) -> None:
        """Read ahead, in the reverse of the order of saving."""
        for before in range(index - 1, -1, -1):
            found = self._alive.get(before)
            saved = found() if found is not None else None
            if saved is None:
                if not self._alive or before < next(iter(self._alive)):
                    return
                continue
            if saved.flat is not None or (saved.read is not None and not saved.read.expired()):
                continue
            if self._closed or (self.ahead_bytes and self.ahead_bytes + saved.bytes > self._capacity_bytes()):
                return
            self._begin_read(saved)

    def _free_dead(self) -> None:
        """Give back what the storages had whose graphs are gone."""
        while self.dead and os.getpid() == self._owner:
            place = self.dead.popleft()
            assert isinstance(place, Place)
            self._note_freed(place.bytes)
            self._alive.pop(place.index, None)
            self.file_bytes -= place.bytes
            self.ahead_bytes -= place.ahead_bytes
            if place.future is not None:
                place.future.cancel()  # requests on bytes that are taken again run in their order
                place.future = place.ahead = None
            self._note_dead(place)
            self._give_place(place.offset_bytes, place.bytes)
            if not self._alive:
                self._by_storage.clear()

    def figures(self) -> dict[str, Any]:
        """Return ``waiting_bytes`` to be written and their peak, ``ahead_bytes`` read before they were wanted, ``file_bytes`` at their
        places and their peak, and the total of ``waited_ns``."""
        with self._lock:
            self._free_dead()
            return {
                "waiting_bytes": self.waiting_bytes, "waiting_peak_bytes": self.waiting_peak_bytes,
                "ahead_bytes": self.ahead_bytes, "file_bytes": self.file_bytes, "file_peak_bytes": self.file_peak_bytes,
                "waited_ns": self._waited[0],
            }  # fmt: skip


class ActivationFile(MovedActivations):
    """The file of one prepared model's activations on this rank. Construction is collective.

    Args:
        tier: kind "nvme"; ``path``, ``fraction`` and ``checksums`` count.

    Raises:
        zeropp.TierError: the folder cannot be used. On every rank; nothing is left behind.
    """

    doing = "wrote it to the disk"

    def __init__(self, engine: ModelState, tier: Tier) -> None:
        super().__init__(engine, torch.device("cpu"), float(tier.fraction))
        self._checksums = tier.checksums
        ranks = Ranks(engine)
        scratch = Scratch(tier.folders, ranks)
        self.file = scratch.file("activations")
        self.path = self.file.parts[0]
        self._folders = scratch.folders
        self._extents = Extents()
        self._heap_trim = HeapTrim()
        try:
            ranks.all_do(self._open)
        except BaseException:
            scratch.remove()
            raise
        number = disk_traffic.add(functools.partial(_moved, self._io, self._waited))
        self._end = weakref.finalize(self, end_store, self._io.abort, number, scratch, os.getpid())

    def _open(self) -> None:
        depth, block_bytes = io_settings.shape(self._folders, STRIPE_BYTES) or (None, None)
        most = DEPTH * len(self._folders)
        self._io = aio.Engine(
            min(most, depth or most), block_bytes, checksums=self._checksums, paths=self.file.folders,
            stripe_bytes=STRIPE_BYTES,
        )  # fmt: skip

    def held_bytes(self, engine: ModelState) -> Bytes:
        seen = self.figures()
        return {
            ("cpu", "activations"): seen["waiting_bytes"] + seen["ahead_bytes"],
            ("nvme", "activations"): seen["file_bytes"],
            ("cpu", "checksums"): seen["sums_bytes"],
        }

    def close(self) -> None:
        """Remove the scratch file: the model is gone. A backward that needs it raises."""
        self._closed = True
        self._end()

    def _take_place(self, size: int) -> int:
        return self._extents.take(in_pages(size))

    def _give_place(self, offset: int, size: int) -> None:
        self._extents.give(offset, in_pages(size))

    def _start_write(self, flat: Tensor, place: Place) -> Future:
        return self._io.write(flat, self.file.name, place.offset_bytes)

    def _start_read(self, flat: Tensor, place: Place) -> Future:
        return self._io.read(flat, self.file.name, place.offset_bytes)

    def _memory_for(self, size: int) -> Tensor:
        return _page_aligned(torch.empty(size + PAGE_BYTES, dtype=torch.uint8, device="cpu"), size)

    def _over(self, storage: torch.UntypedStorage, size: int) -> Tensor:
        return _page_aligned(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage), size)

    def _note_freed(self, size: int) -> None:
        self._heap_trim.freed(size)

    def figures(self) -> dict[str, Any]:
        """Return ``waiting_bytes`` to be written and their peak, ``ahead_bytes`` read before they were wanted, ``file_bytes`` in use
        and their peak, ``sums_bytes`` of checksums in memory; totals of ``read_bytes``, ``checked_bytes``, ``written_bytes`` and
        ``waited_ns``; ``backend``."""
        seen = self._io.figures()
        return {**super().figures(), **{kind: seen[kind] for kind in FIGURES}}


def _storages_kept_anyway(module: nn.Module, args: Any, kwargs: Any, device: torch.device) -> set[int]:
    """Return the addresses of storages that live longer than the forward: of its arguments and of the module's buffers."""
    kept = [one for one in (*tree_leaves((args, kwargs)), *module.buffers()) if isinstance(one, Tensor)]
    plain = (one for one in kept if one.device.type == device.type and type(one) in (Tensor, nn.Parameter))
    return {one.untyped_storage().data_ptr() for one in plain}


def _page_aligned(memory: Tensor, size: int) -> Tensor:
    """Return ``size`` bytes that begin at a page, so that whole pages are read straight into them."""
    first = -memory.data_ptr() % PAGE_BYTES
    return memory[first : first + size]


def _moved(io: aio.Engine, waited: list[int]) -> dict[str, Any]:
    return {**io.figures(), "waited_ns": waited[0]}


class OffloadingCall(WrappedCall):
    """Send what autograd keeps while the model's forward runs to the tier."""

    def __init__(self, model: nn.Module, tier: MovedActivations) -> None:
        super().__init__(model)
        self._model, self._tier = weakref.ref(model), tier

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        assert model is not None
        return self._tier.forward(self.inner, model, args, kwargs)
