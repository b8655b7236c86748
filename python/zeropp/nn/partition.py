# SPDX-License-Identifier: Apache-2.0
"""Activations that every rank of a group holds alike, shared out: each keeps 1/n (ZeRO-R's partitioned activation
checkpointing, arXiv:1910.02054, section 6.1).

    with zeropp.nn.partition_activations(group):
        loss = model(x)                             # autograd, and checkpoints in it, keep 1/n of every tensor
    loss.backward()                                 # gathered when they are needed, a little ahead

Ranks of a tensor-slicing group, or of any group that computes the same thing, hold the same activations n times. Here
each keeps its 1/n of what autograd saves: with ``torch.utils.checkpoint``, of either kind, the inputs of the checkpointed
blocks; without it, everything. Backward gathers them in the reverse of the order they were saved in, the next ones while
it computes, and computes with the same bits.

Bytes: of a tensor of b bytes b/n are kept, and b (n-1)/n received by each rank, once each time backward needs it.
"""

from __future__ import annotations

import collections
import contextlib
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from zeropp import _C
from zeropp.errors import Error
from zeropp.zero.offload.activations import MovedActivations, open_partitions, running

__all__ = ["Partition", "partition_activations"]

MIN_BYTES = 64 << 10
"""Storages below stay whole: a gather would cost more than they do."""
AHEAD_BYTES = 64 << 20
"""Gathered before they are wanted: at most this, or two of the largest."""
ALIGN_BYTES = 64


@contextlib.contextmanager
def partition_activations(
    group: dist.ProcessGroup | None = None,
    *,
    min_bytes: int = MIN_BYTES,
    keep: Callable[[Tensor], bool] | None = None,
    check: bool = True,
) -> Iterator[Partition]:
    """Partition what autograd saves inside over the ranks of ``group``, which must compute the same, in the same
    order, forward and backward.

    Parameters stay whole. What differs over the ranks cannot be shared out (activations *inside* of a sliced layer, drawn
    dropout masks): checkpoint such layers inside of the context, so that their inputs only are saved, or name it with
    ``keep``. With ``Offload(activations="nvme")`` each rank's part goes to its disk.

    Args:
        group: the ranks; None: all.
        min_bytes: smaller storages stay whole.
        keep: ``keep(tensor)`` is True for what is to stay whole.
        check: compare checksums: before the first gather of a backward, of what all ranks saved, and after each gather,
            of what came with what was saved. Two passes over the bytes. Without it, ranks that differ train on a mixture.

    Yields:
        The `Partition`, with ``kept_bytes`` and ``whole_bytes`` of what was shared out so far.

    Raises:
        zeropp.Error: from backward, on every rank: what was saved is not the same on all of them, and which tensor.
    """
    partition = Partition(group, min_bytes, keep, check)
    if partition.ranks == 1:
        yield partition
        return
    stack: list[Partition] = getattr(open_partitions, "stack", [])
    open_partitions.stack = [*stack, partition]
    try:
        with torch.autograd.graph.saved_tensors_hooks(partition.pack, partition.unpack):
            yield partition
    finally:
        open_partitions.stack = stack


class _Place(weakref.ref["_Part"]):
    """Clean-up of a part that is freed. A gather that is under way goes on, because the other ranks gather it, too.

    Parts are freed in the middle of a backward. A pending Ctrl-C would be raised in the first Python code there (``__del__``), and Python drops
    what such code raises. Freed parts are therefore only listed, by a method of deque, and a later call ends them (as in zero/offload/activations.py).
    """

    __slots__ = ("bytes", "flat", "index", "work")

    index: int
    bytes: int
    work: dist.Work | None  # the gather under way,
    flat: Tensor | None  # and what it writes to


class _Part:
    """This rank's part of one storage. Dies with the last graph that needs it."""

    def __init__(self, partition: Partition, index: int, whole_bytes: int, mine: Any, crc: int) -> None:
        self.partition, self.index, self.bytes = partition, index, whole_bytes
        self.mine = mine  # a flat tensor, or what the tier of activations gave for it
        self.crc = crc
        self.left = 0  # views that backward has not asked for
        self.flat: Tensor | None = None  # gathered, or being so
        self.place = place = _Place(self, partition._dead.append)
        place.index, place.bytes, place.work, place.flat = index, whole_bytes, None, None


class _View:
    """The object that autograd holds in place of a tensor."""

    __slots__ = ("dtype", "offset", "part", "size", "stride")

    def __init__(self, part: _Part, tensor: Tensor) -> None:
        self.part, self.dtype = part, tensor.dtype
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        part.left += 1

    def over(self, flat: Tensor) -> Tensor:
        item = self.dtype.itemsize
        return flat[: flat.numel() // item * item].view(self.dtype).as_strided(self.size, self.stride, self.offset)


class Partition:
    """One use of :func:`partition_activations`: what its ranks share out, and how much that is."""

    def __init__(
        self, group: dist.ProcessGroup | None, min_bytes: int, keep: Callable[[Tensor], bool] | None, check: bool
    ) -> None:
        self.group, self.min_bytes, self.keep, self.check = group, min_bytes, keep, check
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise Error("partition_activations: this rank is not in the group; only its ranks open the context")
        self.whole_bytes = 0
        """Of the storages that were shared out, so far."""
        self.kept_bytes = 0
        """Of this rank's parts of them."""
        self.gathered_bytes = 0
        """Of storages that backward asked for, so far."""
        self._lock = threading.RLock()  # a graph may run in any thread
        self._by_storage: dict[int, tuple[StorageWeakRef, int, _Place]] = {}
        self._alive: dict[int, _Place] = {}  # by index, which counts up
        self._dead: collections.deque[weakref.ref[_Part]] = collections.deque()  # to be buried
        self._sums: list[tuple[int, int]] = []  # (bytes, crc) of all parts
        self._agreed = 0  # parts whose sums were compared
        self._ahead_bytes = self._largest_bytes = 0
        self._orphans: collections.deque[tuple[dist.Work, Tensor]] = (
            collections.deque()
        )  # begun, and not needed any more

    # -- forward -------------------------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Any:
        """For autograd."""
        tier = running()
        if not self._shares(tensor):
            return tensor if tier is None else tier._pack(tensor)
        with self._lock:
            self._bury()
            storage = tensor.untyped_storage()
            part = self._known(storage, tensor._version) or self._begin(storage, tensor._version, tier)
            return _View(part, tensor)

    def _shares(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            return False  # parameters among them, and subclasses that know better
        if tensor.untyped_storage().nbytes() < max(1, self.min_bytes) or tensor.is_inference():
            return False
        base = tensor._base
        return not isinstance(base, nn.Parameter) and not (self.keep is not None and self.keep(tensor))

    def _known(self, storage: torch.UntypedStorage, version: int) -> _Part | None:
        """Return the part of the same bytes if they were saved just before. Views share their version counter with their base."""
        found = self._by_storage.get(storage._cdata)
        if found is None or found[0].expired() or found[1] != version:
            return None
        return found[2]()

    def _begin(self, storage: torch.UntypedStorage, version: int, tier: MovedActivations | None) -> _Part:
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        size, own = flat.numel(), self._own_bytes(flat.numel())
        first = min(size, self.rank * own)
        mine = torch.zeros(own, dtype=torch.uint8, device=flat.device)
        mine[: min(size - first, own)] = flat[first : first + own]
        crc = _sum(flat) if self.check else 0
        part = _Part(self, len(self._sums), size, mine if tier is None else tier._pack(mine), crc)
        self._sums.append((size, crc))
        self._alive[part.index] = part.place
        self._by_storage[storage._cdata] = (StorageWeakRef(storage), version, part.place)
        self.whole_bytes += size
        self.kept_bytes += own
        self._largest_bytes = max(self._largest_bytes, size)
        return part

    def _own_bytes(self, size: int) -> int:
        return -(-size // (self.ranks * ALIGN_BYTES)) * ALIGN_BYTES

    # -- backward --------------------------------------------------------------------------------------------------------

    def unpack(self, packed: Any) -> Tensor:
        """For autograd."""
        if isinstance(packed, Tensor):
            return packed
        if not isinstance(packed, _View):  # of the tier of activations
            return packed.saved.tier._unpack(packed)  # type: ignore[no-any-return]
        part = packed.part
        with self._lock:
            self._bury()
            self._agree(part.mine.device if isinstance(part.mine, Tensor) else torch.device("cpu"))
            if part.flat is None:
                self._gather(part)
            flat = part.flat
            assert flat is not None
            self._read_ahead(part.index)
            if part.place.work is not None:
                self._arrive(part, flat)
            part.left -= 1
            if part.left <= 0:
                part.flat = None  # asked for once more (a graph that is retained): gathered once more
        return packed.over(flat)

    def _agree(self, device: torch.device) -> None:
        """Once a backward: what was saved since the last time is the same on every rank."""
        new = self._sums[self._agreed :]
        if not self.check or not new:
            return
        packed = b"".join(struct.pack("<QQ", *one) for one in new)
        mine = torch.tensor([len(new), _sum(torch.frombuffer(bytearray(packed), dtype=torch.uint8))], device=device)
        every = torch.empty(2 * self.ranks, dtype=mine.dtype, device=device)
        dist.all_gather_into_tensor(every, mine, group=self.group)
        if not bool((every.view(self.ranks, 2) == mine).all()):
            self._tell(new)
        self._agreed = len(self._sums)

    def _tell(self, new: list[tuple[int, int]]) -> None:
        said: list[Any] = [None] * self.ranks
        dist.all_gather_object(said, new, group=self.group)
        for index in range(max(map(len, said))):
            ones = [one[index] if index < len(one) else None for one in said]
            other = next((rank for rank, one in enumerate(ones) if one != ones[0]), None)
            if other is not None:
                raise Error(
                    f"partition_activations: tensor {self._agreed + index} that autograd saved is not the same on all ranks of "
                    f"the group: rank 0 has {_words(ones[0])}, rank {other} {_words(ones[other])}. Only what every rank computes "
                    "alike can be shared out: checkpoint the layers that differ, so that their inputs only are saved, or name "
                    "such tensors with keep="
                )

    def _gather(self, part: _Part) -> None:
        mine = part.mine if isinstance(part.mine, Tensor) else part.mine.saved.tier._unpack(part.mine)
        part.flat = torch.empty(self.ranks * mine.numel(), dtype=torch.uint8, device=mine.device)
        part.place.work = dist.all_gather_into_tensor(part.flat, mine, group=self.group, async_op=True)
        part.place.flat = part.flat
        self._ahead_bytes += part.bytes
        self.gathered_bytes += part.bytes

    def _arrive(self, part: _Part, flat: Tensor) -> None:
        work, part.place.work, part.place.flat = part.place.work, None, None
        self._ahead_bytes -= part.bytes
        assert work is not None
        work.wait()
        while self._orphans and self._orphans[0][0].is_completed():
            self._orphans.popleft()
        if self.check and _sum(flat[: part.bytes]) != part.crc:
            raise Error(
                f"partition_activations: {part.bytes} bytes that were gathered for tensor {part.index} are not those that were "
                "saved: the ranks of the group run their backwards in different orders"
            )

    def _read_ahead(self, index: int) -> None:
        """Gather ahead, in the reverse of the order of saving. All ranks decide alike, because only sizes and order count."""
        room = min(AHEAD_BYTES, 2 * self._largest_bytes)
        for before in range(index - 1, -1, -1):
            found = self._alive.get(before)
            part = found() if found is not None else None
            if part is None:
                if not self._alive or before < next(iter(self._alive)):
                    return
                continue
            if part.flat is not None or part.left <= 0:
                continue
            if self._ahead_bytes + part.bytes > max(room, part.bytes):
                return
            self._gather(part)

    def _bury(self) -> None:
        """End what the parts had whose graphs are gone."""
        while self._dead:
            place = self._dead.popleft()
            assert isinstance(place, _Place)
            self._alive.pop(place.index, None)
            if place.work is not None and place.flat is not None:
                self._ahead_bytes -= place.bytes
                self._orphans.append((place.work, place.flat))
            place.work = place.flat = None
            if not self._alive:
                self._by_storage.clear()


def _sum(flat: Tensor) -> int:
    flat = flat if flat.device.type == "cpu" else flat.cpu()
    return int(_C.crc32(flat.data_ptr(), flat.numel()))


def _words(one: tuple[int, int] | None) -> str:
    return "none" if one is None else f"{one[0]} bytes with checksum {one[1]:08x}"
