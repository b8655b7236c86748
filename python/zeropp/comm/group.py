# SPDX-License-Identifier: Apache-2.0
"""Communicators over the C core: made over a group's store, with a class that takes tensors, and counted together."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.dlpack import from_dlpack

from zeropp import _C
from zeropp.comm.rendezvous import PatientStore, rendezvous
from zeropp.errors import CommError, Error

_log = logging.getLogger("zeropp")

#: Codes of the C core. Dtypes that are only moved, never added, go as bytes.
DTYPE_CODES: dict[torch.dtype, int] = {getattr(torch, name): code for code, name in enumerate(_C.COMM_DTYPES)}
OP_CODES: dict[str, int] = {name: code for code, name in enumerate(_C.COMM_OPS)}
BYTES = DTYPE_CODES[torch.uint8]
_DLPACK_CPU = 1
_GATHER, _SCATTER = _C.COMM_COLLECTIVES["gather"], _C.COMM_COLLECTIVES["scatter"]

_lock = threading.Lock()  # guards the five below
_open: list[Any] = []  # every _C.Comm that is not closed
_closed_traffic: dict[str, dict[str, int]] = {}
_of_group: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_parts: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()  # of a group, by what they are
_to_link: list[Any] = []  # made before the communicator of the default group


def dtype_code(dtype: torch.dtype) -> int:
    """Return the code of a dtype that reductions know.

    Raises:
        ValueError: naming the dtypes that they do.
    """
    code = DTYPE_CODES.get(dtype)
    if code is None:
        raise ValueError(f"comm: {dtype} is not a dtype that reductions know yet: {', '.join(_C.COMM_DTYPES)}")
    return code


def rows_of(tensor: torch.Tensor, counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return (address, bytes) of parts of a contiguous tensor, of so many rows of its first dimension each."""
    row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
    ends = itertools.accumulate(counts, initial=0)
    return [
        (tensor.data_ptr() + first * row_bytes, count * row_bytes) for first, count in zip(ends, counts, strict=False)
    ]


def create(store: Any, rank: int, ranks: int, timeout: timedelta, name: str) -> Any:
    """Make a ``_C.Comm`` whose ranks meet over `store`. Collective; may be repeated over the same store.

    Each repetition gets keys of its own, so endpoints of an earlier group with the same name, or of ranks that a
    restart replaced, are never read (rendezvous.py).
    """
    with PatientStore(store, timeout.total_seconds(), name) as patient:
        patient.prefix = f"{rendezvous(patient, rank, ranks, timeout, name)}/"
        comm = _C.Comm(patient, rank, ranks, timeout.total_seconds(), name, _log.warning)
    with _lock:
        if not _open:
            atexit.register(_close_all)
        _open.append(comm)
    return comm


def close(comm: Any) -> None:
    """Leave the group; peers that still wait for this rank are told that it left."""
    with _lock:
        if comm not in _open:
            return
        _open.remove(comm)
    comm.close()
    with _lock:
        _add(_closed_traffic, comm.traffic())


def _close_all() -> None:
    for comm in list(_open):
        close(comm)


def _add(total: dict[str, dict[str, int]], counts: dict[str, dict[str, int]]) -> None:
    for kind, row in counts.items():
        sums = total.setdefault(kind, {"bytes": 0, "calls": 0, "network_bytes": 0})
        for what, value in row.items():
            sums[what] = sums.get(what, 0) + value


def all_traffic() -> dict[str, dict[str, dict[str, int]]]:
    """Return what this rank read from its peers since the start: ``{"shm": {"all_gather": {"bytes": n, "calls": n}, ...}}``.

    Link classes: ``shm`` within a host, ``network`` between hosts (only where a group spans several). A collective that used both counts
    as a call of each.
    """
    total: dict[str, dict[str, int]] = {}
    with _lock:
        _add(total, _closed_traffic)
        for comm in _open:
            _add(total, comm.traffic())
    network = {
        kind: {"bytes": row["network_bytes"], "calls": row["calls"]}
        for kind, row in total.items()
        if row["network_bytes"]
    }
    inside = {
        kind: {
            what: n - row["network_bytes"] if what == "bytes" else n
            for what, n in row.items()
            if what != "network_bytes"
        }
        for kind, row in total.items()
    }
    return {"shm": inside, "network": network} if network else {"shm": inside}


def communicator(group: dist.ProcessGroup | None = None) -> Any:
    """Return the ``_C.Comm`` of a torch.distributed group: its own where the backend is zeropp, else one made over
    its store.

    Collective at the first call for a group; then kept for as long as the group lives.

    Raises:
        zeropp.Error: torch.distributed does not run.
    """
    if not dist.is_initialized():
        raise Error(
            "comm: torch.distributed does not run; call torch.distributed.init_process_group first (torchrun sets it up)"
        )
    group = dist.group.WORLD if group is None else group
    known = _known(group)
    if known is not None:
        return known
    c10d = dist.distributed_c10d
    assert group is not None
    comm = create(
        c10d._get_process_group_store(group), group.rank(), group.size(), timeout_of(group), group_name(group)
    )
    with _lock:
        _of_group[group] = comm
    weakref.finalize(group, close, comm)
    if group is dist.group.WORLD:
        _link_all(comm)
    return comm


def _known(group: Any) -> Any:
    """Return the communicator of a group if it has one; None: not yet."""
    own = getattr(group, "comm", None)
    if own is not None:
        return own
    with _lock:
        known = _of_group.get(group)
    return None if known is None or known.closed else known


def link_to_job(comm: Any, job_ranks: list[int]) -> None:
    """Let a communicator of some ranks of the default group end together with those of all others, and name ranks as the job does.

    A rank that dies is in some of a job's groups; those who wait in another one hear of it there (csrc/comm/linked.c).
    """
    comm.set_job_ranks(job_ranks)
    world = _known(dist.group.WORLD)
    if world is not None:
        comm.link(world)
        return
    with _lock:
        _to_link.append(comm)


def _link_all(world: Any) -> None:
    with _lock:
        waiting = [comm for comm in _to_link if not comm.closed]
        _to_link.clear()
    for comm in waiting:
        comm.link(world)


@contextlib.contextmanager
def named_dead(comm: Any) -> Iterator[None]:
    """Turn another library's error into one that names a rank of the job, where a rank died or the job ended: gloo only says
    that a connection was closed. The death of a process is seen up to some ms after its connections are closed, on another host after
    0.7 s (csrc/comm/tcp/net_links.c)."""
    try:
        yield
    except RuntimeError as error:
        patience_s = 0.0 if comm is None or isinstance(error, Error) else 0.1 if comm.hosts == 1 else 1.5
        until = time.monotonic() + patience_s
        while time.monotonic() < until:
            comm.look_for_dead()
            try:
                comm.check()
            except CommError as cause:
                raise cause from error
            time.sleep(0.02)
        raise


def own_communicator(group: dist.ProcessGroup, name: str) -> Any:
    """Make a ``_C.Comm`` of the ranks of a group for one user alone, whose collectives meet nobody else's. Collective; the caller
    closes it."""
    c10d = dist.distributed_c10d
    store = c10d.PrefixStore(f"zeropp/{name}", c10d._get_process_group_store(group))
    comm = create(store, group.rank(), group.size(), timeout_of(group), name)
    link_to_job(comm, dist.get_process_group_ranks(group))
    return comm


def host_communicator() -> Any:
    """Return the ``_C.Comm`` of the ranks of the default group that are on this host. Collective at the first call;
    then kept."""
    world, group = communicator(), dist.group.WORLD
    assert group is not None
    here = world.host_ranks
    what = f"host of rank {here[0]}"

    def make(store: Any) -> Any:
        comm = create(store, here.index(world.rank), len(here), timeout_of(group), f"{group_name(group)}, {what}")
        link_to_job(comm, here)
        return comm

    return keep_for_group(group, what, make)


def keep_for_group(group: Any, what: str, make: Callable[[Any], Any]) -> Any:
    """Return the communicator of a part of a group, from ``make(store)`` at the first call; then kept for as long as the group
    lives. ``what``: the part, in words."""
    with _lock:
        known = _parts.setdefault(group, {}).get(what)
    if known is not None and not known.closed:
        return known
    c10d = dist.distributed_c10d
    part = make(c10d.PrefixStore(f"zeropp/{what}", c10d._get_process_group_store(group)))
    with _lock:
        _parts[group][what] = part
    weakref.finalize(group, close, part)
    return part


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the time-out of a group, as far as its backend tells."""
    try:
        return group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return dist.distributed_c10d.default_pg_timeout


def group_name(group: dist.ProcessGroup) -> str:
    """Return the name of a group for messages."""
    return group.group_desc if group.group_desc not in ("", "undefined") else group.group_name


def _tensor_of(block: Any, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor over a block, which lives as long as the tensor's storage."""
    code = DTYPE_CODES.get(dtype)
    kind, itemsize = (BYTES, 1) if code is None else (code, dtype.itemsize)
    memory = _C.memory_capsule(block, block.address, block.bytes // itemsize, kind, _DLPACK_CPU, 0)
    elems: torch.Tensor = from_dlpack(memory)
    return (elems.view(dtype) if code is None else elems).view(shape)


def arena_tensor(comm: Any, shape: Sequence[int], dtype: torch.dtype, here: bool = False) -> torch.Tensor:
    """Return a tensor that the peers map; ``here``: the peers on this host, of a group over several."""
    elems = math.prod(shape)
    if elems == 0:
        return torch.empty(shape, dtype=dtype)
    return _tensor_of(comm.alloc(elems * dtype.itemsize, here), shape, dtype)


def empty(
    *shape: int | Sequence[int], dtype: torch.dtype | None = None, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return a tensor as ``torch.empty`` does, in memory that the peers map: collectives of the group read it in place where every rank's tensor is such.

    Local; the memory goes back when the tensor dies, which may be after the end of the group.
    """
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
    return arena_tensor(communicator(group), tuple(sizes), dtype or torch.get_default_dtype())  # type: ignore[arg-type]


class Communicator:
    """Collectives on contiguous CPU tensors, directly over the C engine, blocking.

    Args:
        group: a torch.distributed group of any backend; default: the world.

    Reductions add in rank order, 16-bit elements in fp32 with one rounding at the end: the same inputs give the same bits.
    Every method raises :class:`zeropp.CommError` with the guilty rank if a peer died, left or called something else.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.core = communicator(group)
        self.rank: int = self.core.rank
        self.ranks: int = self.core.ranks

    def empty(self, *shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """See :func:`zeropp.comm.empty`."""
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
        return arena_tensor(self.core, tuple(sizes), dtype or torch.get_default_dtype())  # type: ignore[arg-type]

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Combine over all ranks, in place. `op`: sum, avg, product, min, max, band, bor, bxor."""
        _check(tensor)
        self.core.all_reduce(tensor.data_ptr(), tensor.numel(), dtype_code(tensor.dtype), OP_CODES[op])
        return tensor

    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Fill output with every rank's source, one after the other."""
        _check(output)
        _check(source)
        _same(output, source, source.numel() * self.ranks, "all_gather")
        self.core.all_gather(output.data_ptr(), source.data_ptr(), source.numel() * source.element_size())
        return output

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Fill output with this rank's shard of source, combined over all ranks."""
        _check(output)
        _check(source)
        _same(source, output, output.numel() * self.ranks, "reduce_scatter")
        self.core.reduce_scatter(
            output.data_ptr(), source.data_ptr(), output.numel(), dtype_code(output.dtype), OP_CODES[op]
        )
        return output

    def all_gather_quantised(
        self, output: torch.Tensor, source: torch.Tensor, *, bits: int = 8, block_elems: int = 256
    ) -> torch.Tensor:
        """output = every rank's source, rounded to codes of 8 or 4 bits with an fp32 scale a block: what qwZ of ZeRO++ sends.

        Every rank, this one too, gets the value of the codes: all outputs have the same bits. float32, bfloat16, float16. With one
        rank nothing travels, and values are exact.
        """
        _check(output)
        _check(source)
        _same(output, source, source.numel() * self.ranks, "all_gather_quantised")
        self._quantised("all_gather_quant", "sum", output, source, source.numel(), bits, block_elems, 0)
        return output

    def reduce_scatter_quantised(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        op: str = "sum",
        *,
        bits: int = 8,
        block_elems: int = 256,
        node_ranks: int = 0,
    ) -> torch.Tensor:
        """Fill output with this rank's shard of source, summed ("avg": averaged) in fp32 over the quantised shards of
        all ranks: qgZ of ZeRO++.

        Args:
            node_ranks: consecutive ranks that share a node: then in two hops, with one more quantisation between, of which only the
                second leaves the node. 0: all ranks are on one node, one hop.
        """
        _check(output)
        _check(source)
        _same(source, output, output.numel() * self.ranks, "reduce_scatter_quantised")
        self._quantised("reduce_scatter_quant", op, output, source, output.numel(), bits, block_elems, node_ranks)
        return output

    def all_reduce_quantised(
        self, tensor: torch.Tensor, op: str = "sum", *, bits: int = 8, block_elems: int = 256
    ) -> torch.Tensor:
        """Sum or average over all ranks, in place, quantised on the way there and on the way back; the same bits on every rank."""
        _check(tensor)
        self._quantised("all_reduce_quant", op, tensor, tensor, tensor.numel(), bits, block_elems, 0)
        return tensor

    def _quantised(
        self,
        coll: str,
        op: str,
        output: torch.Tensor,
        source: torch.Tensor,
        elems: int,
        bits: int,
        block_elems: int,
        node_ranks: int,
    ) -> None:
        code, dtype = _C.COMM_COLLECTIVES[coll], dtype_code(output.dtype)
        to, at = output.data_ptr(), source.data_ptr()
        self.core.quant(code, dtype, OP_CODES[op], to, at, elems, bits, block_elems, node_ranks)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Give every rank the root's tensor."""
        _check(tensor)
        self.core.broadcast(tensor.data_ptr(), tensor.numel() * tensor.element_size(), root)
        return tensor

    def all_to_all(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_rows: Sequence[int] | None = None,
        source_rows: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Fill output with what every rank sends to this one, one after the other.

        Args:
            output_rows, source_rows: how many rows of the first dimension come from, and go to, each rank; None: equal parts.
        """
        dsts, srcs = self._rows("output", output, output_rows), self._rows("source", source, source_rows)
        if output.dtype != source.dtype:
            raise ValueError(f"comm: all_to_all of {source.dtype} and {output.dtype}, wanted one dtype")
        self.core.exchange(_C.COMM_COLLECTIVES["all_to_all"], DTYPE_CODES.get(source.dtype, BYTES), 0, dsts, srcs)
        return output

    def reduce(self, tensor: torch.Tensor, root: int = 0, op: str = "sum") -> torch.Tensor:
        """Combine over all ranks into the root's tensor; the others' stay as they are."""
        _check(tensor)
        self.core.reduce(tensor.data_ptr(), tensor.numel(), dtype_code(tensor.dtype), OP_CODES[op], root)
        return tensor

    def gather(self, output: torch.Tensor | None, source: torch.Tensor, root: int = 0) -> torch.Tensor | None:
        """Fill the root's output with every rank's source, one after the other. `output` of other ranks is not looked at."""
        _check(source)
        self._check_root("gather", root)
        size_bytes = source.numel() * source.element_size()
        pieces = [(0, 0)] * self.ranks
        if self.rank == root:
            pieces = self._parts("gather", "output", output, source, size_bytes)
        mine = [(0, 0)] * self.ranks
        mine[root] = source.data_ptr(), size_bytes
        self.core.exchange(_GATHER, DTYPE_CODES.get(source.dtype, BYTES), root, pieces, mine)
        return output

    def scatter(self, output: torch.Tensor, source: torch.Tensor | None, root: int = 0) -> torch.Tensor:
        """Fill output with this rank's shard of the root's source. `source` of other ranks is not looked at."""
        _check(output)
        self._check_root("scatter", root)
        size_bytes = output.numel() * output.element_size()
        pieces = [(0, 0)] * self.ranks
        if self.rank == root:
            pieces = self._parts("scatter", "source", source, output, size_bytes)
        mine = [(0, 0)] * self.ranks
        mine[root] = output.data_ptr(), size_bytes
        self.core.exchange(_SCATTER, DTYPE_CODES.get(output.dtype, BYTES), root, mine, pieces)
        return output

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> None:
        """Give the tensor to one rank, which receives it."""
        _check(tensor)
        self.core.send(tensor.data_ptr(), tensor.numel() * tensor.element_size(), to, tag, tensor).wait(0.0)

    def recv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> torch.Tensor:
        """Fill the tensor with what a rank (-1: any) sends with the same tag."""
        _check(tensor)
        self.core.recv(tensor.data_ptr(), tensor.numel() * tensor.element_size(), source, tag, tensor).wait(0.0)
        return tensor

    def _check_root(self, what: str, root: int) -> None:
        if not 0 <= root < self.ranks:
            raise ValueError(f"comm: {what}: root {root}, wanted a rank of the group, 0..{self.ranks - 1}")

    def _parts(
        self, what: str, argument: str, whole: torch.Tensor | None, part: torch.Tensor, size_bytes: int
    ) -> list[tuple[int, int]]:
        """Return (address, bytes) of each rank's part of the root's tensor."""
        if whole is None:
            raise ValueError(f"comm: {what}: {argument} is None on rank {self.rank}, the root, wanted a tensor")
        _check(whole)
        _same(whole, part, part.numel() * self.ranks, what)
        at = whole.data_ptr()
        return [(at + rank * size_bytes, size_bytes) for rank in range(self.ranks)]

    def _rows(self, what: str, tensor: torch.Tensor, rows: Sequence[int] | None) -> list[tuple[int, int]]:
        """Return (address, bytes) of each rank's rows."""
        _check(tensor)
        have = tensor.shape[0] if tensor.dim() else 1
        if rows is None:
            rows = [have // self.ranks] * self.ranks
        if len(rows) != self.ranks or sum(rows) != have or min(rows) < 0:
            raise ValueError(
                f"comm: all_to_all: {what} of {have} rows for {self.ranks} ranks cannot be parted as {list(rows)}; wanted one count a rank, "
                f"{have} in all"
            )
        return rows_of(tensor, rows)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.core.barrier()

    def traffic(self) -> dict[str, dict[str, int]]:
        """Return what this rank read from its peers: ``{kind: {"bytes", "calls", "network_bytes"}}``."""
        counts: dict[str, dict[str, int]] = self.core.traffic()
        return counts

    def abort(self, sentence: str) -> None:
        """End every wait of every rank with this sentence, naming this rank."""
        self.core.abort(sentence)


def _check(tensor: torch.Tensor) -> None:
    if tensor.is_cpu and tensor.is_contiguous():
        return
    if not tensor.is_cpu:
        raise ValueError(
            f"comm: a tensor on {tensor.device}, wanted cpu; collectives on accelerators are not supported"
        )
    raise ValueError(
        f"comm: a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()}, wanted a contiguous one"
    )


def _same(large: torch.Tensor, small: torch.Tensor, elems: int, what: str) -> None:
    if large.dtype != small.dtype:
        raise ValueError(f"comm: {what} of {small.dtype} and {large.dtype}, wanted one dtype")
    if large.numel() != elems:
        raise ValueError(
            f"comm: {what} with {small.numel()} and {large.numel()} elements, wanted {elems} in the larger one"
        )
