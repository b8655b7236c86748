# SPDX-License-Identifier: Apache-2.0
"""Files of tensors in the safetensors format: written as a stream of pieces with checksums, durable on return,
verified, and read back piece by piece.

safetensors' own writer makes a copy of every tensor first, which a rank that holds a large shard has no room for, and
knows no checksums; the format is simple: 8 bytes little-endian length of a JSON header, the header, the tensors'
bytes. Formats: docs/checkpoint-format.md.

Memory: ``RING_BLOCKS`` blocks while a file is written, whatever its size. The bytes are summed in the same pass that
brings them to the ring (csrc/base/crc32.h), and a few threads write (read and compare) blocks, so that the disk always
has something to do.
"""

from __future__ import annotations

import collections
import json
import math
import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from zeropp import _C
from zeropp.errors import CheckpointError
from zeropp.files import disk as files
from zeropp.files.disk import storage_errors
from zeropp.files.heap_trim import byte_view

BLOCK_BYTES = 4 << 20
"""Bytes under one checksum: a damaged file is named to within one block."""
RING_BLOCKS = 4
"""Blocks in memory while a file is written or verified."""
READ_BYTES = 1 << 20
"""Bytes read at once while a block is compared: they stay in the cache for their sum."""
THREADS = 3
"""Threads that write, or read and compare, blocks."""

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL", torch.complex64: "C64",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class Piece:
    """One tensor of a file to be written. Its values are asked for when they are written, part by part and in order,
    so they may come from anywhere; they need not be in memory before."""

    name: str
    dtype: torch.dtype
    shape: Sequence[int]
    parts: Callable[[], Iterable[torch.Tensor]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def piece_of(name: str, tensor: torch.Tensor) -> Piece:
    """Return a tensor that is in memory: contiguous, of the host or of an accelerator. What is elsewhere brings its own
    ``parts`` (zeropp.zero.offload)."""
    parts = getattr(tensor, "parts", lambda: (tensor,))
    return Piece(name, tensor.dtype, tuple(tensor.shape), parts)


# --- writing
# -----------------------------------------------------------------------------------------------------------------


Block = tuple[memoryview, int | None]
"""Bytes of a file, and their sum where it is known."""


def write_pieces(
    path: Path, pieces: Sequence[Piece], metadata: Mapping[str, str], spare: Path | None = None
) -> dict[str, Any]:
    """Write and sync one file.

    Args:
        metadata: strings for the header.
        spare: an unused file, to be overwritten under the new name where that is possible.

    Returns:
        What the manifest holds of it: ``{"bytes": n, "block_bytes": n, "crc32": [one a block]}``.

    Raises:
        zeropp.TierError: the file cannot be written: path, bytes wanted, bytes free.
    """
    header = header_of(pieces, metadata)
    whole_bytes = len(header) + sum(piece.nbytes for piece in pieces)
    with storage_errors(path, whole_bytes):
        descriptor = create(path, whole_bytes, spare)
        try:
            return write_blocks(descriptor, whole_bytes, _assembled(_chunks(header, pieces)))
        finally:
            os.close(descriptor)


def create(path: Path, whole_bytes: int, spare: Path | None) -> int:
    """Open a file to be written: ``spare`` under its new name, or a new one."""
    descriptor = None if spare is None else files.disk.take_over(spare, path, whole_bytes)
    return files.disk.create(path) if descriptor is None else descriptor


def write_blocks(descriptor: int, whole_bytes: int, blocks: Iterable[Block]) -> dict[str, Any]:
    """Write the bytes of a file, in blocks of ``BLOCK_BYTES`` of which the last may be shorter; synced. Returns its
    entry.

    A block may be overwritten once ``RING_BLOCKS`` - 1 more were taken from ``blocks``.
    """
    sums: list[int] = []
    offset = 0

    def put(block: memoryview, known: int | None, index: int, at: int) -> None:
        sums[index] = _C.crc32(_address(block), len(block)) if known is None else known
        files.disk.write(descriptor, block, at)

    files.disk.reserve(descriptor, whole_bytes)
    with _Behind(RING_BLOCKS - 1) as behind:
        for index, (block, known) in enumerate(blocks):
            sums.append(0)
            behind.do(put, block, known, index, offset)
            offset += len(block)
    files.disk.sync(descriptor)
    return {"bytes": offset, "block_bytes": BLOCK_BYTES, "crc32": sums}


def header_of(pieces: Sequence[Piece], metadata: Mapping[str, str]) -> bytes:
    """Length and JSON header; the data begin at a multiple of 64 bytes."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for piece in pieces:
        if piece.dtype not in _NAMES:
            raise CheckpointError(f"'{piece.name}': tensors of {piece.dtype} are not saved yet; convert it first")
        if piece.name in entries:
            raise CheckpointError(f"'{piece.name}': two tensors of one file have this name; rename one")
        end = offset + piece.nbytes
        entries[piece.name] = {
            "dtype": _NAMES[piece.dtype], "shape": list(piece.shape), "data_offsets": [offset, end],
        }  # fmt: skip
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text


def image_of(pieces: Sequence[Piece], metadata: Mapping[str, str], memory: mmap.mmap | None) -> tuple[mmap.mmap, int]:
    """Return a whole file in memory, for :func:`image_blocks`: (memory, bytes used). ``memory`` is used again where
    it is enough; pages that are there already cost no page fault."""
    header = header_of(pieces, metadata)
    whole_bytes = len(header) + sum(piece.nbytes for piece in pieces)
    if memory is None or len(memory) < whole_bytes:
        # A little more, so that a header that grows by a digit does not mean new memory.
        memory = _memory(whole_bytes + (64 << 10))
    memory[: len(header)] = header
    image = torch.frombuffer(memory, dtype=torch.uint8)
    offset = len(header)
    for piece in pieces:
        for part in piece.parts():
            data = _bytes_of(part)
            image[offset : offset + data.numel()].copy_(data)
            offset += data.numel()
    return memory, whole_bytes


def image_blocks(image: mmap.mmap, whole_bytes: int) -> Iterator[Block]:
    """Yield the blocks of a file that lies in memory."""
    with memoryview(image) as view:
        for first in range(0, whole_bytes, BLOCK_BYTES):
            yield view[first : min(first + BLOCK_BYTES, whole_bytes)], None


def _memory(size_bytes: int) -> mmap.mmap:
    """Private, so that huge pages hold it: fewer faults, and fewer pages to pin for a direct write."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _address(view: memoryview) -> int:
    """Return the address of writable memory."""
    return torch.frombuffer(view, dtype=torch.uint8).data_ptr()


def _chunks(header: bytes, pieces: Iterable[Piece]) -> Iterator[torch.Tensor]:
    yield torch.frombuffer(bytearray(header), dtype=torch.uint8)
    for piece in pieces:
        for part in piece.parts():
            if part.numel():
                yield from _on_host(_bytes_of(part))
            del part  # the next one may be made only now, where there is memory for one


def _on_host(data: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield bytes in memory of the host: those of an accelerator in copies of a block each."""
    if data.is_cpu:
        yield data
        return
    for first in range(0, data.numel(), BLOCK_BYTES):
        yield data[first : first + BLOCK_BYTES].cpu()


def _assembled(chunks: Iterable[torch.Tensor]) -> Iterator[Block]:
    """Yield a stream that comes in pieces of any size, as blocks that lie aligned in a ring, with their sums."""
    size = BLOCK_BYTES
    ring = _memory(RING_BLOCKS * max(size, mmap.PAGESIZE))
    view = memoryview(ring)
    base = _address(view)
    slot = filled = total = 0
    for chunk in chunks:
        done, chunk_bytes, address = 0, chunk.numel(), chunk.data_ptr()
        while done < chunk_bytes:
            part_bytes = min(chunk_bytes - done, size - filled)
            total = _C.crc32_copy(base + slot * size + filled, address + done, part_bytes, total)
            filled, done = filled + part_bytes, done + part_bytes
            if filled == size:
                yield view[slot * size : (slot + 1) * size], total
                slot, filled, total = (slot + 1) % RING_BLOCKS, 0, 0
        del chunk  # as in _chunks
    if filled:
        yield view[slot * size : slot * size + filled], total


class _Behind:
    """A few threads that do calls, which are begun in order. A call begins only when all but ``capacity`` - 1 of those
    before it are over. The first error is raised by ``do`` or at the end; what was not begun then is left out."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._waiting: collections.deque[threading.Event] = collections.deque()
        self._calls: queue.SimpleQueue[tuple[threading.Event, Callable[..., object], tuple[Any, ...]] | None]
        self._calls = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._threads = [threading.Thread(target=self._work, name=f"zeropp-disk-{i}") for i in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def do(self, call: Callable[..., object], *args: Any) -> None:
        over = threading.Event()
        self._waiting.append(over)
        self._calls.put((over, call, args))
        while len(self._waiting) > self._capacity:  # the caller may now use again what older calls had
            self._waiting.popleft().wait()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while (one := self._calls.get()) is not None:
            over, call, args = one
            try:
                if self._error is None:
                    call(*args)
            except BaseException as error:  # whatever it is, the caller's thread raises it
                self._error = self._error or error
            del one, call, args  # they hold a view of the buffer
            over.set()

    def __enter__(self) -> _Behind:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join()
        if kind is None and self._error is not None:
            raise self._error


# --- reading
# -----------------------------------------------------------------------------------------------------------------


def verify(path: Path, entry: Mapping[str, Any]) -> None:
    """Compare a file with what the manifest holds of it.

    Raises:
        zeropp.CheckpointError: it is missing, too short, too long, or holds other bytes; with the offset.
    """
    wanted_bytes, block_bytes = int(entry["bytes"]), int(entry["block_bytes"])
    try:
        found_bytes = path.stat().st_size
        if found_bytes != wanted_bytes:
            offset = min(found_bytes, wanted_bytes)
            raise CheckpointError(
                f"{path}: has {found_bytes} bytes, the manifest says {wanted_bytes}; damaged from offset {offset} on"
            )
        stretch = -(-len(entry["crc32"]) // THREADS)
        with _Behind(THREADS) as behind:
            for first in range(0, len(entry["crc32"]), max(1, stretch)):
                wanted = entry["crc32"][first : first + stretch]
                behind.do(_compare_stretch, path, first * block_bytes, wanted_bytes, block_bytes, wanted)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: the manifest names this file, and it is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


_buffer = threading.local()


def _buffer_of_this_thread() -> tuple[memoryview, int]:
    """Return ``READ_BYTES`` of memory, and their address. Used again, because new memory costs a page fault a page."""
    if not hasattr(_buffer, "bytes"):
        _buffer.bytes = memoryview(mmap.mmap(-1, READ_BYTES))
        _buffer.address = _address(_buffer.bytes)
    return _buffer.bytes, _buffer.address


def _compare_stretch(path: Path, first: int, end: int, block_bytes: int, wanted: Sequence[int]) -> None:
    """Blocks that follow each other. Each stretch has a descriptor of its own: the kernel reads ahead by descriptor, and is
    twice as fast when it sees one stream in each."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        for index, one in enumerate(wanted):
            begin = first + index * block_bytes
            _compare(path, descriptor, begin, min(block_bytes, end - begin), one)
    finally:
        os.close(descriptor)


def _compare(path: Path, descriptor: int, first: int, size_bytes: int, wanted: int) -> None:
    buffer, address = _buffer_of_this_thread()
    found, left = 0, size_bytes
    while left:
        count = os.preadv(descriptor, [buffer[: min(READ_BYTES, left)]], first + size_bytes - left)
        if not count:
            raise CheckpointError(f"{path}: ended {left} bytes early; it changed while it was read")
        found = _C.crc32(address, count, found)
        left -= count
    if found != wanted:
        raise CheckpointError(
            f"{path}: damaged between offset {first} and {first + size_bytes}: "
            f"checksum {found:08x}, the manifest says {wanted:08x}"
        )


class Fills:
    """Ranges of files that are read into tensors by a few threads; all are there when the block ends. The caller keeps
    the tensors alive until then."""

    def __init__(self) -> None:
        self._behind = _Behind(2 * THREADS)

    def add(self, path: Path, descriptor: int, offset: int, values: torch.Tensor) -> None:
        """Read bytes from ``offset`` on, into a contiguous tensor."""
        if not values.numel():
            return
        if not values.is_cpu:
            self._add_device(path, descriptor, offset, _bytes_of(values))
            return
        view = byte_view(values)
        for first in range(0, len(view), BLOCK_BYTES):
            self._behind.do(_read_all, path, descriptor, offset + first, view[first : first + BLOCK_BYTES])

    def _add_device(self, path: Path, descriptor: int, offset: int, data: torch.Tensor) -> None:
        """Let each thread read a block to memory of the host, and copy it on the caller's current stream."""
        stream = torch.accelerator.current_stream(data.device)

        def fill(first: int) -> None:
            block = torch.empty(min(BLOCK_BYTES, data.numel() - first), dtype=torch.uint8, device="cpu")
            _read_all(path, descriptor, offset + first, byte_view(block))
            with stream:
                data[first : first + block.numel()].copy_(block)

        for first in range(0, data.numel(), BLOCK_BYTES):
            self._behind.do(fill, first)

    def __enter__(self) -> Fills:
        self._behind.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._behind.__exit__(kind, error, trace)


def _read_all(path: Path, descriptor: int, offset: int, view: memoryview) -> None:
    while len(view):
        count = os.preadv(descriptor, [view], offset)
        if not count:
            raise CheckpointError(f"{path}: ended {len(view)} bytes early; it changed while it was read")
        offset, view = offset + count, view[count:]


def _check_entry(name: str, entry: Any, data_bytes: int) -> None:
    """Raise ValueError unless a tensor of a header lies within the data, with the bytes of its shape and type."""
    try:
        begin, end = entry["data_offsets"]
        wanted = math.prod(entry["shape"]) * _DTYPES[entry["dtype"]].itemsize
        fits = 0 <= begin <= end <= data_bytes and end - begin == wanted and min(entry["shape"], default=0) >= 0
    except (KeyError, TypeError) as error:
        raise ValueError(f"'{name}' has {str(entry)[:60]} for shape, type and offsets") from error
    if not fits:
        raise ValueError(f"'{name}' does not lie within the file with the bytes of its shape")


class TensorFile:
    """A safetensors file, read range by range: nothing is mapped and nothing is read twice."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb", buffering=0)
        try:
            length = int.from_bytes(self._file.read(8), "little")
            if not 0 < length <= path.stat().st_size - 8:
                raise ValueError(f"its header is said to have {length} bytes")
            self._entries: dict[str, Any] = json.loads(self._file.read(length))
            self._entries.pop("__metadata__", None)
            for name, entry in self._entries.items():
                _check_entry(name, entry, path.stat().st_size - 8 - length)
        except (ValueError, UnicodeDecodeError, AttributeError) as error:
            self._file.close()
            raise CheckpointError(f"{path}: cannot be read as safetensors: {error}") from error
        self._begin = 8 + length

    def close(self) -> None:
        self._file.close()

    def names(self) -> list[str]:
        """Return the tensors in it."""
        return list(self._entries)

    def shape(self, name: str) -> list[int]:
        return list(self._entry(name)["shape"])

    def dtype(self, name: str) -> torch.dtype:
        return _DTYPES[self._entry(name)["dtype"]]

    def tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor."""
        shape = self.shape(name)
        return self.flat(name, 0, math.prod(shape)).view(shape)

    def flat(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Return elements ``begin`` to ``end`` of the flattened tensor."""
        dtype = self.dtype(name)
        values = torch.empty(end - begin, dtype=dtype, device="cpu")
        if end > begin:
            view = byte_view(values)
            _read_all(self.path, self._file.fileno(), self._offset(name, begin), view)
        return values

    def fill(self, fills: Fills, name: str, begin: int, values: torch.Tensor) -> None:
        """Read elements from ``begin`` on of the flattened tensor, into a contiguous tensor of the same type."""
        assert values.dtype == self.dtype(name)
        fills.add(self.path, self._file.fileno(), self._offset(name, begin), values)

    def _offset(self, name: str, begin: int) -> int:
        first: int = self._entry(name)["data_offsets"][0]
        return self._begin + first + begin * self.dtype(name).itemsize

    def _entry(self, name: str) -> dict[str, Any]:
        if name not in self._entries:
            raise CheckpointError(f"{self.path}: has no tensor '{name}', which the manifest expects there")
        entry: dict[str, Any] = self._entries[name]
        return entry
