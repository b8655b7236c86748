# SPDX-License-Identifier: Apache-2.0
"""Files of tensors in the safetensors format, written as a stream with checksums, durable on return, and verified.

safetensors' own writer makes a copy of every tensor first, which a rank that holds a large slice has no room for, and
knows no checksums; the format is simple: 8 bytes little-endian length of a JSON header, the header, the tensors'
bytes. Everything is read back by the safetensors library. Formats: docs/checkpoint-format.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from zeropp.errors import CheckpointError, TierError

BLOCK_BYTES = 4 << 20
"""Bytes under one checksum: a damaged file is named to within one block."""

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> dict[str, Any]:
    """Write and fsync one file.

    Args:
        tensors: contiguous, on the CPU.
        metadata: strings for the header.

    Returns:
        What the manifest holds of it: ``{"bytes": n, "block_bytes": n, "crc32": [one a block]}``.

    Raises:
        zeropp.TierError: the file cannot be written: path, bytes wanted, bytes free.
    """
    header = _header(tensors, metadata)
    whole_bytes = len(header) + sum(t.numel() * t.element_size() for t in tensors.values())
    with storage_errors(path, whole_bytes), path.open("wb") as file:
        checksums = _Checksums()
        for chunk in (memoryview(header), *(piece for t in tensors.values() for piece in _blocks_of(t))):
            file.write(chunk)
            checksums.add(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": whole_bytes, "block_bytes": BLOCK_BYTES, "crc32": checksums.done()}


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
        with path.open("rb") as file:
            for index, wanted in enumerate(entry["crc32"]):
                block = file.read(block_bytes)
                found = zlib.crc32(block)
                if found != wanted:
                    first = index * block_bytes
                    raise CheckpointError(
                        f"{path}: damaged between offset {first} and {first + len(block)}: "
                        f"checksum {found:08x}, the manifest says {wanted:08x}"
                    )
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: the manifest names this file, and it is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def write_text(path: Path, text: str) -> None:
    """Replace a small file atomically: whoever reads it, after whatever crash, sees the old text or the new."""
    new = path.with_name(path.name + ".new")
    data = text.encode()
    with storage_errors(path, len(data)):
        with new.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_folder(new: Path, final: Path) -> None:
    """``new`` takes the name ``final`` in one step; what had that name is removed afterwards."""
    with storage_errors(final, 0):
        if not final.exists():
            new.rename(final)
        else:
            _exchange(new, final)
            shutil.rmtree(new)
        sync_folder(final.parent)


def _exchange(first: Path, second: Path) -> None:
    """Swap two names atomically (Linux's renameat2); where the file system cannot, by way of a third name."""
    at_cwd, exchange = -100, 2
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        answer = libc.renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), exchange)
        if answer == 0:
            return
        number = ctypes.get_errno()
        if number not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(number, os.strerror(number), str(second))
    aside = second.with_name(f".{second.name}.old")
    second.rename(aside)
    first.rename(second)
    aside.rename(first)


@contextlib.contextmanager
def storage_errors(path: Path, wanted_bytes: int) -> Iterator[None]:
    """An OSError inside becomes a TierError with path, bytes wanted and bytes free."""
    try:
        yield
    except TierError:
        raise
    except OSError as error:
        free = None
        with contextlib.suppress(OSError):
            existing = next(folder for folder in (path, *path.parents) if folder.exists())
            free = shutil.disk_usage(existing).free
        room = f"{wanted_bytes} bytes wanted, {free} free" if free is not None else f"{wanted_bytes} bytes wanted"
        raise TierError(
            f"{path}: cannot be written: {error.strerror or error} ({room}); free some space or save elsewhere",
            path=str(path), bytes_wanted=wanted_bytes, bytes_free=free, errno=error.errno,
        ) from error  # fmt: skip


def _header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise CheckpointError(f"'{name}': tensors of {tensor.dtype} are not saved yet; convert it first")
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)  # the tensors begin aligned
    return len(text).to_bytes(8, "little") + text


def _blocks_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """A tensor's bytes, without a copy, in pieces."""
    if not tensor.numel():
        return
    view = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
    for first in range(0, len(view), BLOCK_BYTES):
        yield view[first : first + BLOCK_BYTES]


class _Checksums:
    """CRC-32 of each block of a stream that comes in pieces of any size."""

    def __init__(self) -> None:
        self._blocks: list[int] = []
        self._crc = self._filled = 0

    def add(self, chunk: memoryview) -> None:
        while len(chunk):
            part = chunk[: BLOCK_BYTES - self._filled]
            self._crc = zlib.crc32(part, self._crc)
            self._filled += len(part)
            chunk = chunk[len(part) :]
            if self._filled == BLOCK_BYTES:
                self._end_block()

    def done(self) -> list[int]:
        if self._filled:
            self._end_block()
        return self._blocks

    def _end_block(self) -> None:
        self._blocks.append(self._crc)
        self._crc = self._filled = 0
