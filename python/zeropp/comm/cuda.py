# SPDX-License-Identifier: Apache-2.0
"""The calls of a process group on CUDA tensors: NCCL over the group's communicator (csrc/comm/nccl/nccl.h).

A collective runs on a stream of its own, after what torch's current stream holds when it is called; ``wait`` makes the current
stream wait, not the host. Each is compared between ranks through the group's communicator while the GPU works, so that a rank
that died, is late, or calls something else is named as for CPU tensors; then the waiting kernels are aborted, and every later
call raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from zeropp import _C

__all__ = ["GpuGroup", "GpuWork"]

Call = tuple[int, int, int, int, int, int, int]  # coll, dtype, op, root, dst, src, elems


def _current_stream(device: torch.device) -> int:
    """Return the address of torch's current stream there."""
    return int(torch.cuda.current_stream(device).cuda_stream)


class GpuWork:
    """A call on a GPU; as asynchronous calls on CPU tensors are, to :mod:`zeropp.process_group`."""

    def __init__(self, group: GpuGroup) -> None:
        self._group = group
        self._core: Any = None  # until it is submitted, where several calls are one
        self._source: int | None = None

    def submitted(self, core: Any) -> GpuWork:
        self._core = core
        return self

    def wait(self, timeout_s: float = 0.0) -> bool:
        """Make later work of the current stream run after this one. With `timeout_s` > 0 the host waits, too, for at most that time."""
        self._core.order(_current_stream(self._group.device))
        if timeout_s > 0:
            self._core.wait(timeout_s)
        return True

    def done(self) -> bool:
        return bool(self._core.done())

    def source_rank(self) -> int:
        if self._source is None:
            raise ValueError("zeropp: only a receive has a source")
        return self._source

    def future(self, pending: Any, tensors: list[torch.Tensor]) -> Any:
        """Return a future whose users' streams wait for the work, while the current stream goes on."""
        finished: Any = torch.futures.Future(devices=[self._group.device])
        if pending.has_more_to_do():  # copies, which a later wait() of the current stream must come after
            pending.wait()
            finished.set_result(tensors)
            return finished
        stream = torch.cuda.ExternalStream(self._group.core.stream, device=self._group.device)
        with torch.cuda.stream(stream):
            pending.wait()
            finished.set_result(tensors)
        return finished


class GpuGroup:
    """One group's calls on one GPU. Made at the first call on its tensors, which is for all ranks of the group.

    Raises:
        zeropp.NotBuiltError: no NCCL, or no driver, on this rank or another, which is named.
    """

    def __init__(self, comm: Any, device: torch.device) -> None:
        self.device = device
        self.core = _C.Nccl(comm, device.index or 0)
        self._held: deque[tuple[Any, Any]] = deque()  # works and what they use, until they are finished
        self._batch: list[tuple[Call, Any]] | None = None
        self._batch_work: GpuWork | None = None

    def close(self) -> None:
        """Wait for what was submitted, as long as the group stands."""
        self.core.close()
        self._held.clear()

    def _hold(self, core: Any, keep: Any) -> GpuWork:
        while self._held and self._held[0][0].done():
            self._held.popleft()
        self._held.append((core, keep))
        return GpuWork(self).submitted(core)

    def submit(self, coll: int, dtype: int, op: int, root: int, dst: int, src: int, elems: int, keep: Any) -> GpuWork:
        call = (coll, dtype, op, root, dst, src, elems)
        if self._batch is not None:
            assert self._batch_work is not None
            self._batch.append((call, keep))
            return self._batch_work
        return self._hold(self.core.submit([call], keep, _current_stream(self.device)), keep)

    def submit_gather(self, dsts: Sequence[int], src: int, elems: int, dtype: int, keep: Any) -> GpuWork:
        return self._hold(self.core.submit_gather(dsts, src, elems, dtype, keep, _current_stream(self.device)), keep)

    def submit_exchange(
        self,
        coll: int,
        dtype: int,
        root: int,
        dsts: Sequence[tuple[int, int]],
        srcs: Sequence[tuple[int, int]],
        keep: Any,
    ) -> GpuWork:
        stream = _current_stream(self.device)
        return self._hold(self.core.submit_exchange(coll, dtype, root, dsts, srcs, keep, stream), keep)

    def send(self, data: int, size_bytes: int, to: int, tag: int, keep: Any) -> GpuWork:
        """`tag` pairs nothing here: NCCL pairs by order."""
        return self._hold(self.core.send(data, size_bytes, to, keep, _current_stream(self.device)), keep)

    def recv(self, data: int, size_bytes: int, source: int, tag: int, keep: Any) -> GpuWork:
        work = self._hold(self.core.recv(data, size_bytes, source, keep, _current_stream(self.device)), keep)
        work._source = source
        return work

    # -- several calls as one ------------------------------------------------------------------------------------------

    @property
    def gathers(self) -> bool:
        """Calls are being gathered: their works cannot be waited for yet."""
        return self._batch is not None

    def __enter__(self) -> GpuGroup:
        self._batch, self._batch_work = [], GpuWork(self)
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        batch, work = self._batch, self._batch_work
        self._batch = self._batch_work = None
        if kind is None and batch:
            assert work is not None
            keep = [kept for _, kept in batch]
            core = self.core.submit([call for call, _ in batch], keep, _current_stream(self.device))
            self._held.append((core, keep))
            work.submitted(core)
