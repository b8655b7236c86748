# SPDX-License-Identifier: Apache-2.0
"""Tensors to files and back at the disk's limit, beside the computation (DeepNVMe of ZeRO-Infinity, arXiv:2104.07857).

    with zeropp.aio.Engine() as engine:
        tensor = engine.empty((1024, 1024), torch.bfloat16)      # aligned and locked: moves without a copy
        engine.write(tensor, "shard.bin").wait()
        future = engine.read(tensor, "shard.bin")
        ...                                                      # compute
        future.wait()

The engine is csrc/aio: io_uring with registered buffers and files and O_DIRECT; a few threads with pread and pwrite
where io_uring is refused (containers) or not built. Depth and block size default to what ``python -m zeropp bench-io
PATH`` measured for the device of ``paths``, else to 32 operations of 1 MiB.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from zeropp import _C
from zeropp.errors import Error
from zeropp.files import io_settings

__all__ = ["CancelledError", "Engine", "Future"]

DEFAULT_DEPTH = 32
DEFAULT_BLOCK_BYTES = 1 << 20
DEFAULT_THREADS = 8

Path = str | os.PathLike[str]
Priority = Literal["auto", "urgent", "background"]
_BACKENDS = {"auto": 0, "io_uring": 1, "threads": 2}
_PRIORITIES = {"auto": 0, "urgent": 1, "background": 2}


class CancelledError(Error):
    """The request was cancelled before it was done."""


class Future(Protocol):
    """A read or write that goes on. The tensor must not be used (read) or changed (write) before it is done.

    Dropping a future does not end its request; a write that fails unseen is raised by the next ``flush``.
    """

    def done(self) -> bool:
        """Return whether the request is over: done, failed or cancelled."""
        ...

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end, in a way that Ctrl-C interrupts.

        Raises:
            TierError: it failed; ``path``, ``offset_bytes``, ``bytes_wanted``, ``bytes_free``, ``errno`` say why.
            CancelledError: it was cancelled.
            TimeoutError: ``timeout`` seconds passed; the request goes on.
        """
        ...

    def cancel(self) -> bool:
        """Drop what has not begun; False if the request was over already."""
        ...


_told: set[str] = set()


def warn_once(line: str) -> None:
    """To the logger "zeropp.aio", unless this process has said it before: a model may have an engine for each kind of state."""
    if line not in _told:
        _told.add(line)
        logging.getLogger("zeropp.aio").warning(line)


def _address(tensor: Tensor) -> tuple[int, int]:
    """Address and bytes of a tensor that can be moved as it lies."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"aio: wanted a tensor, not {type(tensor).__name__}")
    if tensor.device.type != "cpu":
        raise ValueError(f"aio: tensor is on {tensor.device}, wanted cpu; copy it to a tensor of engine.empty() first")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"aio: tensor of shape {tuple(tensor.shape)} is a view that conjugates or negates when it is read; its bytes are other "
            "values: pass tensor.resolve_conj().resolve_neg()"
        )
    if not tensor.is_contiguous():
        raise ValueError(
            f"aio: tensor of shape {tuple(tensor.shape)} and stride {tensor.stride()} is not contiguous; "
            "pass tensor.contiguous(), or a contiguous view"
        )
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


class Engine:
    """Reads and writes between CPU tensors and files, many at once.

    Args:
        depth: operations in flight; None: measured by ``bench-io`` for the device of ``paths``, else 32.
        block_bytes: size of one operation, a multiple of 4096; None: measured, else 1 MiB.
        direct: O_DIRECT, past the page cache, where the file system has it.
        paths: folders of relative paths, one for each device. With several, each file is striped over them; every
            engine that reads such a file needs the same folders in the same order, and the same ``stripe_bytes``.
        stripe_bytes: bytes of a stripe; None: 1 MiB.
        sqpoll: a kernel thread submits (fewer system calls; a core polls).
        checksums: keep a CRC-32 of every page (4 KiB) that this engine writes, in memory, and raise TierError where a
            read gives something else. Costs 8 bytes a page, one pass over the bytes each way in the engine's thread, and
            whole pages read at a request's edges. What others wrote to a file is not checked, and overwriting what this
            engine wrote is an error then: `forget` the file first.
        backend: ``"io_uring"`` or ``"threads"`` insist; ``"auto"`` falls back to threads with one warning.
        threads: number of threads of the fallback; None: 8.
        arena_bytes: bound of the memory behind ``empty``; None: no bound.
        log: receives warnings; None: the logger "zeropp.aio", once a process what every engine of it would say.

    Every method may be called from any thread. Requests on the same bytes of one file, one of them a write, run in the
    order of submission; reads go before other writes. The engine does not survive ``fork``: make one in the child.

    Raises:
        NotBuiltError: ``backend="io_uring"`` where there is none.
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        depth: int | None = None,
        block_bytes: int | None = None,
        direct: bool = True,
        *,
        paths: Path | Sequence[Path] = (),
        stripe_bytes: int | None = None,
        sqpoll: bool = False,
        checksums: bool = False,
        backend: Literal["auto", "io_uring", "threads"] = "auto",
        threads: int | None = None,
        arena_bytes: int | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        folders = (paths,) if isinstance(paths, (str, os.PathLike)) else tuple(paths)
        for name, flag in (("direct", direct), ("sqpoll", sqpoll), ("checksums", checksums)):
            if not isinstance(flag, bool):
                raise TypeError(f"aio: {name} is {flag!r}, wanted True or False")
        stripe = _count("stripe_bytes", stripe_bytes, DEFAULT_BLOCK_BYTES)
        unset = depth is None or block_bytes is None
        default_depth, default_block_bytes = _defaults(folders if unset else (), stripe)
        self._log = log or warn_once
        self._core = _C.AioEngine(
            depth=_count("depth", depth, default_depth),
            block_bytes=_count("block_bytes", block_bytes, default_block_bytes),
            direct=direct,
            sqpoll=sqpoll,
            checksums=checksums,
            backend=_one_of("backend", backend, _BACKENDS),
            threads=_count("threads", threads, DEFAULT_THREADS),
            arena_bytes=_count("arena_bytes", arena_bytes, 0),
            stripes=tuple(os.fsencode(folder) for folder in folders),
            stripe_bytes=stripe,
        )
        self._tell()

    def _tell(self) -> None:
        for line in self._core.take_log():
            self._log(line)

    def read(self, tensor: Tensor, path: Path, offset_bytes: int = 0, *, priority: Priority = "auto") -> Future:
        """Begin to fill ``tensor`` (contiguous, on CPU) from the file, starting at ``offset_bytes``.

        Raises:
            TierError: the file cannot be opened. What goes wrong later is raised by ``wait``.
        """
        return self._submit(False, tensor, path, offset_bytes, priority)

    def write(self, tensor: Tensor, path: Path, offset_bytes: int = 0, *, priority: Priority = "auto") -> Future:
        """Begin to write ``tensor`` (contiguous, on CPU) into the file, which is created or grown as needed.

        The data are with the file when ``wait`` returns, and survive a power cut after ``flush(durable=True)``. Growth
        by a megabyte or more is reserved at once, so a full disk is found before anything is written.

        Raises:
            TierError: the file cannot be opened, or the disk has no room.
        """
        return self._submit(True, tensor, path, offset_bytes, priority)

    def _submit(self, write: bool, tensor: Tensor, path: Path, offset_bytes: int, priority: str) -> Future:
        address, size_bytes = _address(tensor)
        number = _one_of("priority", priority, _PRIORITIES)
        if not write and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
        future: Future = self._core.submit(write, os.fsencode(path), address, size_bytes, offset_bytes, number, tensor)
        return future

    def flush(self, durable: bool = False, timeout: float | None = None) -> None:
        """Wait for everything submitted before; the first write that failed since the last flush is raised.

        Args:
            durable: fdatasync every file written, too.
            timeout: seconds, or None.
        """
        try:
            self._core.flush(durable, timeout)
        finally:
            self._tell()

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a tensor in the engine's arena: aligned for O_DIRECT, locked, of exact size (rounded up to whole pages).

        Its contents are undefined. The memory goes back when the tensor and its views die, also after ``close``.

        Raises:
            MemoryError: ``arena_bytes`` would be exceeded.
        """
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        size_bytes = math.prod(sizes) * dtype.itemsize
        if any(size < 0 for size in sizes) or size_bytes == 0:
            return torch.empty(sizes, dtype=dtype)  # nothing to lock, or torch's own error
        capsule = self._core.alloc(size_bytes)
        tensor = torch.utils.dlpack.from_dlpack(capsule)
        self._tell()
        return tensor.view(dtype).view(sizes)

    def forget(self, path: Path) -> None:
        """Close the descriptors kept for a file, so that the space of one that was removed comes free, and drop its checksums."""
        self._core.forget(os.fsencode(path))

    def figures(self) -> dict[str, Any]:
        """Totals and sizes.

        ``read_bytes``, ``written_bytes``, ``operations``, ``bounced_bytes`` (copied for alignment), ``retries``,
        ``checked_bytes`` (of those read: their checksums were right), ``sums_bytes`` (memory of the checksums),
        ``outstanding``, ``registered_bytes``, ``arena_held_bytes``, ``arena_used_bytes``, ``open_files``, ``depth``,
        ``block_bytes``, ``backend``.
        """
        seen: dict[str, Any] = self._core.figures()
        seen["backend"] = "io_uring" if seen.pop("uring") else "threads"
        return seen

    @property
    def backend(self) -> str:
        """``"io_uring"`` or ``"threads"``."""
        return str(self.figures()["backend"])

    def close(self) -> None:
        """Flush, then end the engine. Tensors of ``empty`` stay good. Closing twice is fine."""
        if self._closed:
            return
        try:
            self.flush()
        finally:
            self.abort()

    def abort(self) -> None:
        """End the engine without waiting for what has not begun; those futures raise CancelledError."""
        self._core.close()
        self._tell()
        self._closed = True

    _closed = False

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


def _one_of(name: str, value: str, known: dict[str, int]) -> int:
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"aio: {name} is {value!r}, wanted one of {', '.join(map(repr, known))}")
    return known[value]


def _count(name: str, value: int | None, default: int) -> int:
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"aio: {name} is {value!r}, wanted a whole number")
    if not 1 <= value < 2**62:
        raise ValueError(f"aio: {name} is {value}, wanted at least 1")
    return value


def _defaults(folders: Sequence[Path], stripe_bytes: int) -> tuple[int, int]:
    """Return the depth and block size that were measured for the devices of these folders, or else fixed ones."""
    return io_settings.shape(folders, stripe_bytes) or (DEFAULT_DEPTH, DEFAULT_BLOCK_BYTES)
