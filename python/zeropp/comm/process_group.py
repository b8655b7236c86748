# SPDX-License-Identifier: Apache-2.0
"""The torch.distributed backend ``"zeropp"``: a process group over the C communicator, for CPU tensors, and over NCCL beside it for
CUDA tensors (:mod:`zeropp.comm.cuda`).

    dist.init_process_group("zeropp")

What is blocking runs in the calling thread; what is asynchronous (``async_op=True``, DDP, functional collectives) runs on one progress
thread of the group, in the order of the calls. DDP, FSDP2, DTensor, DeviceMesh, distributed checkpoints, object collectives and functional
collectives work on it.

torch calls a process group by two spellings (``_allgather_base`` and ``all_gather_single``, ...), with ``opts`` by position or keyword;
both stand here.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ReduceOp, Store
from torch._C._distributed_c10d import ProcessGroup as _ProcessGroup
from torch._C._distributed_c10d import Work as _Work

from zeropp import _C
from zeropp.comm import sparse
from zeropp.comm.cuda import GpuGroup
from zeropp.comm.group import BYTES, DTYPE_CODES, OP_CODES, close, create, dtype_code, rows_of
from zeropp.errors import counted

__all__ = ["ProcessGroup"]

_COLL = _C.COMM_COLLECTIVES
# torch hashes an operation to its number.
_OP_OF_HASH = {hash(getattr(ReduceOp, name.upper())): code for name, code in OP_CODES.items()}
_PREMUL_SUM = -1  # scaled by this rank's factor, then summed: the core never sees it
_OP_OF_HASH[hash(ReduceOp.PREMUL_SUM)] = _PREMUL_SUM
_NO_TIMEOUT = timedelta(0)
_NOTHING = (0, 0)
_STRIDED = torch.strided
_on_cpu = operator.attrgetter("is_cpu")

Tensors = Sequence[torch.Tensor]


# -- work ------------------------------------------------------------------------------------------------------------------


class _Done(_Work):
    """The finished work that a blocking call returns."""

    def __init__(self, tensors: list[torch.Tensor] | None = None) -> None:
        super().__init__()
        self._tensors = tensors if tensors is not None else []

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> Any:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class _Pending(_Work):
    """Asynchronous calls in the C core, one or several, and what is left to do in Python when they are finished."""

    def __init__(
        self, works: Sequence[Any], tensors: list[torch.Tensor], after: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self._works = works
        self._tensors = tensors
        self._after = after
        self._once = threading.Lock()
        self._future: Any = None

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        for work in self._works:
            work.wait(timeout.total_seconds())
        self._finish()
        return True

    def _finish(self) -> None:
        with self._once:
            after, self._after = self._after, None
            if after is not None:
                after()

    def has_more_to_do(self) -> bool:
        """Something is left for after the calls."""
        return self._after is not None

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.done() for work in self._works)

    def exception(self) -> Any:
        if not self.is_completed():
            return None
        try:
            self.wait()
        except Exception as error:
            return error
        return None

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._tensors

    def source_rank(self) -> int:
        return int(self._works[-1].source_rank())

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> Any:
        """Return a future of the tensors. A failure becomes an error in C++, too: DDP reads the value there, and Future.set_exception would
        only put a Python object in its place. That is why the value comes out of a ``then``.
        """
        if self._future is None:
            last = self._works[-1]  # collectives of one group finish in order
            if hasattr(last, "future"):
                self._future = last.future(self, self._tensors)
                return self._future
            finished: Any = torch.futures.Future()
            self._future = finished.then(lambda _: self.result())
            if hasattr(last, "on_done"):
                last.on_done(lambda: finished.set_result(None))
            else:
                threading.Thread(target=self._settle, args=(finished,), daemon=True).start()
        return self._future

    def _settle(self, finished: Any) -> None:
        with contextlib.suppress(Exception):  # result() raises it again
            self.wait()
        finished.set_result(None)


# -- tensors ---------------------------------------------------------------------------------------------------------------


def _check(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cpu and not tensor.is_cuda:
        raise ValueError(f"zeropp: a collective on {tensor.device}, wanted cpu or cuda tensors")
    if tensor.layout is not torch.strided:
        raise ValueError(f"zeropp: a collective on a {tensor.layout} tensor is not supported; use .to_dense()")
    if type(tensor) is not torch.Tensor and tensor.numel() and not tensor.data_ptr():
        raise ValueError(
            f"zeropp: a collective on a {type(tensor).__name__}, whose elements lie in other tensors, is not supported; call it on those"
        )
    return tensor


def _numbers(tensor: torch.Tensor, op: int) -> torch.Tensor:
    """Return the tensor as reductions see it: complex numbers are pairs, which may only be added."""
    if not tensor.is_complex():
        return tensor
    if op not in (OP_CODES["sum"], OP_CODES["avg"]):
        raise ValueError(f"zeropp: {_C.COMM_OPS[op]} of {tensor.dtype}; complex tensors can only be summed or averaged")
    return torch.view_as_real(tensor)


def _op_code(opts: Any) -> int:
    """`opts` is an options object, or the operation itself, as in ``group.allreduce(tensor, ReduceOp.MAX)``."""
    op = ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
    code = _OP_OF_HASH.get(hash(op))  # a third of the cost of comparing operations
    if code is None:
        raise ValueError(f"zeropp: reduce operation {op} is not supported")
    return code


def _scaled(tensor: torch.Tensor, opts: Any) -> tuple[torch.Tensor, int]:
    """PREMUL_SUM: this rank's factor times the tensor, and the operation that is left."""
    op = getattr(opts, "reduceOp", opts)
    if not isinstance(op, ReduceOp):
        raise ValueError(
            "zeropp: PREMUL_SUM without a factor; make the operation with torch.distributed._make_nccl_premul_sum(factor)"
        )
    pickled: Any = op  # what torch pickles of an operation: its number and its factor; its stubs do not know
    state = pickled.__getstate__()
    with torch.no_grad():
        return (tensor * state[1]).to(tensor.dtype), OP_CODES["sum"]


def _root(opts: Any) -> int:
    """`opts` is an options object, or the rank itself, as in ``group.broadcast(tensor, 1)``."""
    return 0 if opts is None else int(getattr(opts, "rootRank", opts))


def _blocking(opts: Any) -> bool:
    return not getattr(opts, "asyncOp", True)


def _pieces_at_hand(tensors: Sequence[torch.Tensor | None]) -> list[tuple[int, int]] | None:
    """Return (address, bytes) of each tensor, (0, 0) of None; None where one of them must be looked at closely, or
    copied."""
    pieces = []
    for tensor in tensors:
        if tensor is None:
            pieces.append(_NOTHING)
        elif tensor.is_cpu and type(tensor) is torch.Tensor and tensor.layout is _STRIDED and tensor.is_contiguous():
            pieces.append((tensor.data_ptr(), tensor.nbytes))
        else:
            return None
    return pieces


def _contiguous(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [None if tensor is None else _check(tensor).contiguous() for tensor in tensors]


def _pieces(tensors: Sequence[torch.Tensor | None]) -> list[tuple[int, int]]:
    """Return (address, bytes) of contiguous tensors, (0, 0) of None."""
    return [_NOTHING if tensor is None else (tensor.data_ptr(), _bytes(tensor)) for tensor in tensors]


def _only(what: str, tensors: Tensors | torch.Tensor) -> torch.Tensor:
    """Return the tensor of a call that takes one. Several were once one a GPU of a process; they are refused."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(
            f"zeropp: {what} of a list of {counted(len(tensors), 'tensor')}, wanted one; call it once for each"
        )
    return tensors[0]


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _moved(tensor: torch.Tensor) -> tuple[int, int]:
    """Return (dtype code, elements) of a tensor that is moved as it is. Dtypes that the core does not know go as
    bytes."""
    code = DTYPE_CODES.get(tensor.dtype)
    return (BYTES, _bytes(tensor)) if code is None else (code, tensor.numel())


def _same_sizes(what: str, tensors: Tensors, like: torch.Tensor) -> None:
    for i, tensor in enumerate(tensors):
        if tensor.dtype != like.dtype or tensor.numel() != like.numel():
            raise ValueError(
                f"zeropp: {what}: tensor {i} is {tensor.dtype} with {tensor.numel()} elements, wanted {like.dtype} with {like.numel()}"
            )


def _copy_back(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None] | None:
    """Return a function that copies results from contiguous copies to the caller's tensors; None where nothing was copied."""
    for to, at in pairs:
        if to is not at:
            break
    else:
        return None
    moved = [(to, at) for to, at in pairs if to is not at]

    def copy() -> None:
        with torch.no_grad():
            for to, at in moved:
                to.copy_(at.view(to.shape))

    return copy


# -- the group -------------------------------------------------------------------------------------------------------------


class ProcessGroup(_ProcessGroup):
    """See the module. ``group.comm`` is the C communicator."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.comm = create(store, rank, size, timeout, "default")
        self._store = store
        self._me, self._size = rank, size
        self._name = self._desc = ""
        self._timeout = timeout
        self._done = _Done()
        self._gpus: dict[int, GpuGroup] = {}
        self._all_reduce = self.comm.all_reduce  # a bound method at hand: a call of some us feels a look-up

    # Names: torch calls some from C++ and some from Python.
    def getBackendName(self) -> str:
        return "zeropp"

    name = _get_backend_name = getBackendName

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name
        self.comm.set_name(name)

    @property
    def group_desc(self) -> str:
        return self._desc

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc
        if desc not in ("", "undefined"):
            self.comm.set_name(desc)

    def getSize(self) -> int:
        return self._size

    def getRank(self) -> int:
        return self._me

    def get_group_store(self) -> Store:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        self.comm.set_timeout(timeout.total_seconds())

    setTimeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """torch asks backends for a common starting point; this one counts from the group's beginning."""

    setSequenceNumberForGroup = _set_sequence_number_for_group

    def _get_sequence_number_for_group(self) -> int:
        return sum(row["calls"] for row in self.comm.traffic().values())

    getSequenceNumberForGroup = _get_sequence_number_for_group

    def shutdown(self) -> None:
        for gpu in self._gpus.values():
            gpu.close()
        self._gpus.clear()
        close(self.comm)

    def abort(self) -> None:
        if not self.comm.closed:
            self.comm.abort("torch.distributed asked for it")

    # -- running a call ----------------------------------------------------------------------------------------------------

    def _run(
        self,
        coll: str,
        opts: Any,
        dtype: int,
        op: int,
        root: int,
        dst: torch.Tensor | None,
        src: torch.Tensor | None,
        elems: int,
        results: list[torch.Tensor],
        after: Callable[[], None] | None = None,
    ) -> _Work:
        dst_ptr = dst.data_ptr() if dst is not None else 0
        src_ptr = src.data_ptr() if src is not None else 0
        work = self._engine(dst, src).submit(_COLL[coll], dtype, op, root, dst_ptr, src_ptr, elems, (dst, src))
        return self._handed_out(work, opts, results, after)

    def _handed_out(self, work: Any, opts: Any, results: list[torch.Tensor], after: Callable[[], None] | None) -> _Work:
        pending = _Pending([work], results, after)
        if _blocking(opts) and not any(gpu.gathers for gpu in self._gpus.values()):
            pending.wait()
        return pending

    def _engine(self, *tensors: torch.Tensor | None) -> Any:
        """Return what runs a call on these tensors, all on one device: the communicator, or NCCL beside it."""
        for tensor in tensors:
            if tensor is not None and not _on_cpu(tensor):
                break
        else:
            return self.comm
        on = {tensor.device for tensor in tensors if tensor is not None}
        if len(on) > 1:
            raise ValueError(
                f"zeropp: a collective on tensors of {' and '.join(sorted(map(str, on)))}, wanted one device"
            )
        (device,) = on
        gpu = self._gpus.get(device.index or 0)
        if gpu is None:
            gpu = self._gpus[device.index or 0] = GpuGroup(self.comm, device)
        return gpu

    def _as_one(self, tensors: Tensors) -> contextlib.AbstractContextManager[Any]:
        """Calls on these tensors become one of NCCL's groups, where they are on one GPU."""
        if not tensors or any(_on_cpu(tensor) for tensor in tensors) or len({tensor.device for tensor in tensors}) > 1:
            return contextlib.nullcontext()
        gpu: GpuGroup = self._engine(tensors[0])
        return gpu

    def _waited(self, work: _Work, opts: Any) -> _Work:
        if _blocking(opts) and isinstance(work, _Pending):
            work.wait()
        return work

    def _finished(self, after: Callable[[], None] | None) -> _Work:
        if after is not None:
            after()
        return self._done

    # -- reductions --------------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors | torch.Tensor, opts: Any = None) -> _Work:
        """Combine over all ranks, in place."""
        tensor, op = _only("all_reduce", tensors), _op_code(opts)
        if tensor.layout is torch.sparse_coo and tensor.is_cpu:
            return _Done([sparse.all_reduce_sparse(self.comm, tensor, op)])
        _check(tensor)
        at = tensor if tensor.is_contiguous() else tensor.contiguous()
        if op == _PREMUL_SUM:
            at, op = _scaled(at, opts)
        numbers = at if not at.is_complex() else _numbers(at, op)
        dtype, elems = dtype_code(numbers.dtype), numbers.numel()
        after = None if at is tensor else _copy_back([(tensor, at)])
        if _blocking(opts) and _on_cpu(numbers):
            self._all_reduce(numbers.data_ptr(), elems, dtype, op)
            return self._done if after is None else self._finished(after)
        return self._run("all_reduce", opts, dtype, op, 0, numbers, None, elems, [tensor], after)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> _Work:
        each = {id(tensor): tensor for tensor in tensors}  # one that is there twice is combined once
        with self._as_one(list(each.values())):
            works = [self.allreduce([tensor], opts) for tensor in each.values()]
        if len(each) < len(tensors):
            works.append(self._done)  # so that what comes out of it is the list, not a work of one tensor
        return self._waited(self._all(works, list(tensors)), opts)

    def reduce(self, tensors: Tensors | torch.Tensor, opts: Any = None) -> _Work:
        tensor, op, root = _check(_only("reduce", tensors)), _op_code(opts), _root(opts)
        at = tensor.contiguous()
        if op == _PREMUL_SUM:
            at, op = _scaled(at, opts)
        numbers = _numbers(at, op)
        dtype, elems = dtype_code(numbers.dtype), numbers.numel()
        after = _copy_back([(tensor, at)]) if root == self._me else None
        if _blocking(opts) and _on_cpu(numbers):
            self.comm.reduce(numbers.data_ptr(), elems, dtype, op, root)
            return self._finished(after)
        return self._run("reduce", opts, dtype, op, root, numbers, None, elems, [tensor], after)

    def _reduce_scatter_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> _Work:
        op = _op_code(opts)
        if source.numel() != output.numel() * self._size or source.dtype != output.dtype:
            raise ValueError(
                f"zeropp: reduce_scatter from {source.dtype} with {source.numel()} elements to {output.dtype} with {output.numel()}, wanted "
                f"one dtype and {output.numel()} x {self._size} elements"
            )
        to, at = _check(output).contiguous(), _check(source).contiguous()
        if op == _PREMUL_SUM:
            at, op = _scaled(at, opts)
        numbers_to, numbers_at = _numbers(to, op), _numbers(at, op)
        dtype, elems = dtype_code(numbers_to.dtype), numbers_to.numel()
        after = _copy_back([(output, to)])
        if _blocking(opts) and _on_cpu(numbers_to) and _on_cpu(numbers_at):
            self.comm.reduce_scatter(numbers_to.data_ptr(), numbers_at.data_ptr(), elems, dtype, op)
            return self._finished(after)
        return self._run("reduce_scatter", opts, dtype, op, 0, numbers_to, numbers_at, elems, [output], after)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter(self, outputs: Tensors, sources: Sequence[Tensors], opts: Any = None) -> _Work:
        works = []
        for output, pieces in zip(outputs, sources, strict=True):
            if len(pieces) != self._size:
                raise ValueError(f"zeropp: reduce_scatter from {len(pieces)} tensors, wanted one a rank, {self._size}")
            _same_sizes("reduce_scatter", pieces, output)
            works.append(self._reduce_scatter_base(output, torch.cat([piece.reshape(-1) for piece in pieces]), opts))
        return self._all(works, list(outputs))

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, sources: Tensors, opts: Any = None) -> _Work:
        return self._coalesced(self._reduce_scatter_base, outputs, sources, opts)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    # -- gathers -----------------------------------------------------------------------------------------------------------

    def _allgather_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> _Work:
        if output.numel() != source.numel() * self._size or source.dtype != output.dtype:
            raise ValueError(
                f"zeropp: all_gather from {source.dtype} with {source.numel()} elements to {output.dtype} with {output.numel()}, wanted one "
                f"dtype and {source.numel()} x {self._size} elements"
            )
        to, at = _check(output).contiguous(), _check(source).contiguous()
        dtype, elems = _moved(at)
        after = _copy_back([(output, to)])
        if _blocking(opts) and _on_cpu(to) and _on_cpu(at):
            self.comm.all_gather(to.data_ptr(), at.data_ptr(), elems, dtype)
            return self._finished(after)
        return self._run("all_gather", opts, dtype, 0, 0, to, at, elems, [output], after)

    all_gather_single = _allgather_base

    def allgather(self, outputs: Sequence[Tensors], sources: Tensors, opts: Any = None) -> _Work:
        works = [self._allgather_list(pieces, source, opts) for pieces, source in zip(outputs, sources, strict=True)]
        return self._all(works, [piece for pieces in outputs for piece in pieces])

    def _allgather_list(self, pieces: Tensors, source: torch.Tensor, opts: Any) -> _Work:
        if len(pieces) != self._size:
            raise ValueError(f"zeropp: all_gather into {len(pieces)} tensors, wanted one a rank, {self._size}")
        _same_sizes("all_gather", pieces, _check(source))
        at = source.contiguous()
        to = [_check(piece).contiguous() for piece in pieces]
        dtype, elems = _moved(at)
        after = _copy_back(list(zip(pieces, to, strict=True)))
        pointers = [piece.data_ptr() for piece in to]
        engine = self._engine(at, *to)
        if _blocking(opts) and engine is self.comm:
            self.comm.all_gather_into(pointers, at.data_ptr(), elems, dtype)
            return self._finished(after)
        work = engine.submit_gather(pointers, at.data_ptr(), elems, dtype, (to, at))
        return self._handed_out(work, opts, list(pieces), after)

    def allgather_coalesced(self, outputs: Sequence[Tensors], sources: Tensors, opts: Any = None) -> _Work:
        """`outputs` is a list a rank here, each with one tensor a source."""
        works = [
            self._allgather_list([pieces[i] for pieces in outputs], source, opts) for i, source in enumerate(sources)
        ]
        return self._all(works, [piece for pieces in outputs for piece in pieces])

    def allgather_into_tensor_coalesced(self, outputs: Tensors, sources: Tensors, opts: Any = None) -> _Work:
        return self._coalesced(self._allgather_base, outputs, sources, opts)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    # -- one to all, all to one, all to all --------------------------------------------------------------------------------

    def broadcast(self, tensors: Tensors | torch.Tensor, opts: Any = None) -> _Work:
        tensor, root = _check(_only("broadcast", tensors)), _root(opts)
        at = tensor.contiguous()
        dtype, elems = _moved(at)
        after = _copy_back([(tensor, at)]) if root != self._me else None
        if _blocking(opts) and _on_cpu(at):
            self.comm.broadcast(at.data_ptr(), elems, root, dtype)
            return self._finished(after)
        return self._run("broadcast", opts, dtype, 0, root, at, None, elems, [tensor], after)

    def _exchange(
        self,
        coll: str,
        opts: Any,
        root: int,
        dsts: Sequence[torch.Tensor | None],
        srcs: Sequence[torch.Tensor | None],
        dtype: int,
    ) -> _Work:
        """All-to-all, gather or scatter of whole tensors; None where nothing comes or goes."""
        if _blocking(opts):
            there, here = _pieces_at_hand(dsts), _pieces_at_hand(srcs)
            if there is not None and here is not None:
                self.comm.exchange(_COLL[coll], dtype, root, there, here)
                return self._done
        to, at = _contiguous(dsts), _contiguous(srcs)
        after = _copy_back(
            [(dst, copy) for dst, copy in zip(dsts, to, strict=True) if dst is not None and copy is not None]
        )
        engine = self._engine(*to, *at)
        if _blocking(opts) and engine is self.comm:
            self.comm.exchange(_COLL[coll], dtype, root, _pieces(to), _pieces(at))
            return self._finished(after)
        work = engine.submit_exchange(_COLL[coll], dtype, root, _pieces(to), _pieces(at), (to, at))
        return self._handed_out(work, opts, [dst for dst in dsts if dst is not None], after)

    def gather(self, outputs: Sequence[Tensors], sources: Tensors, opts: Any = None) -> _Work:
        root, source = _root(opts), sources[0]
        dsts = self._one_a_rank("gather", root, outputs, source)
        return self._exchange("gather", opts, root, dsts, self._only_for(root, source), _moved(source)[0])

    def scatter(self, outputs: Tensors, sources: Sequence[Tensors], opts: Any = None) -> _Work:
        root, output = _root(opts), outputs[0]
        srcs = self._one_a_rank("scatter", root, sources, output)
        return self._exchange("scatter", opts, root, self._only_for(root, output), srcs, _moved(output)[0])

    def _one_a_rank(
        self, what: str, root: int, lists: Sequence[Tensors], like: torch.Tensor
    ) -> Sequence[torch.Tensor | None]:
        """Return the root's tensors for all ranks; on other ranks nothing."""
        if root != self._me:
            return [None] * self._size
        if len(lists) != 1 or len(lists[0]) != self._size:
            raise ValueError(f"zeropp: {what} on the root wants one list of {self._size} tensors, one a rank")
        _same_sizes(what, lists[0], like)
        return lists[0]

    def _only_for(self, root: int, tensor: torch.Tensor) -> list[torch.Tensor | None]:
        return [tensor if rank == root else None for rank in range(self._size)]

    def alltoall(self, outputs: Tensors, sources: Tensors, opts: Any = None) -> _Work:
        if len(outputs) != self._size or len(sources) != self._size:
            raise ValueError(
                f"zeropp: all_to_all of {len(sources)} and {len(outputs)} tensors, wanted one a rank, {self._size}"
            )
        return self._exchange("all_to_all", opts, 0, list(outputs), list(sources), _moved(sources[0])[0])

    def alltoall_base(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: Sequence[int],
        source_splits: Sequence[int],
        opts: Any = None,
    ) -> _Work:
        to, at = _check(output).contiguous(), _check(source).contiguous()
        dsts = self._split("output", to, output_splits)
        srcs = self._split("input", at, source_splits)
        after = _copy_back([(output, to)])
        dtype = _moved(at)[0]
        engine = self._engine(to, at)
        if _blocking(opts) and engine is self.comm:
            self.comm.exchange(_COLL["all_to_all"], dtype, 0, dsts, srcs)
            return self._finished(after)
        work = engine.submit_exchange(_COLL["all_to_all"], dtype, 0, dsts, srcs, (to, at))
        return self._handed_out(work, opts, [output], after)

    all_to_all_single = alltoall_base

    def _split(self, what: str, tensor: torch.Tensor, splits: Sequence[int]) -> list[tuple[int, int]]:
        """Return (address, bytes) of each rank's rows; no splits: equal ones."""
        rows = tensor.shape[0] if tensor.dim() else 1
        if not splits:
            if rows % self._size:
                raise ValueError(
                    f"zeropp: all_to_all: {what} has {rows} rows, wanted a multiple of {self._size}, or split sizes"
                )
            splits = [rows // self._size] * self._size
        if len(splits) != self._size or sum(splits) != rows:
            raise ValueError(
                f"zeropp: all_to_all: {what} split sizes {list(splits)} are for {sum(splits)} rows and {len(splits)} ranks, wanted {rows} and {self._size}"
            )
        return rows_of(tensor, splits)

    # -- point to point ----------------------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> _Work:
        at = _check(tensors[0]).contiguous()
        work = self._engine(at).send(at.data_ptr(), _bytes(at), dst, tag, at)
        return _Pending([work], [tensors[0]])

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> _Work:
        to = _check(tensors[0]).contiguous()
        work = self._engine(to).recv(to.data_ptr(), _bytes(to), src, tag, to)
        return _Pending([work], [tensors[0]], _copy_back([(tensors[0], to)]))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> _Work:
        return self.recv(tensors, -1, tag)

    # -- barriers ----------------------------------------------------------------------------------------------------------

    def barrier(self, opts: Any = None) -> _Work:
        if _blocking(opts):
            self.comm.barrier()
            return self._done
        return self._run("barrier", opts, 0, 0, 0, None, None, 0, [])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks, and, like every wait of this backend, name the absent ranks when `timeout` is over."""
        self.comm.barrier_within((timeout or self._timeout).total_seconds())

    # -- several calls as one ----------------------------------------------------------------------------------------------

    def _coalesced(self, call: Callable[..., _Work], outputs: Tensors, sources: Tensors, opts: Any) -> _Work:
        with self._as_one(outputs):
            works = [call(output, source, opts) for output, source in zip(outputs, sources, strict=True)]
        return self._waited(self._all(works, list(outputs)), opts)

    def _all(self, works: Sequence[_Work], results: list[torch.Tensor]) -> _Work:
        if len(works) == 1:
            return works[0]
        pending = [work for work in works if isinstance(work, _Pending)]
        if not pending:
            return self._done

        def after() -> None:
            for work in pending:
                work._finish()

        return _Pending([core for work in pending for core in work._works], results, after)

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> ProcessGroup | None:
        """Make a group of some of this one's ranks; None on the others. Called by the ranks of `ranks` alone, or by all."""
        if self._me not in ranks:
            return None
        name = group_name or ":".join(map(str, ranks))
        group = ProcessGroup(
            PrefixStore(f"split/{name}", self._store),
            list(ranks).index(self._me),
            len(ranks),
            timeout or self._timeout,
        )
        group._set_group_name(name)
        group._set_group_desc(group_desc or "")
        return group
