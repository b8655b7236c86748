# SPDX-License-Identifier: Apache-2.0
"""Files of whole tensors, as other programs have them: read from safetensors, ``pytorch_model.bin`` or a mapping, each rank its own
part of a tensor; and written as safetensors in the Hugging Face layout.

Files are mapped, so that what is not asked for is not read, and ranks of one host share what the kernel keeps of them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from zeropp.errors import CheckpointError
from zeropp.files import disk
from zeropp.files.hub_names import converts, merges_of, rows_of
from zeropp.files.safefile import Piece, write_pieces
from zeropp.zero.model.boxes import slices

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
FILE_BYTES = 2 << 30
PATTERNS = ("*.safetensors", "pytorch_model*.bin")


class Source(ABC):
    """Tensors by name, whole or in part."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return all names."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor, without reading it."""

    @abstractmethod
    def whole(self, name: str) -> Any:
        """Return a tensor; from a mapping whatever stands there."""

    def flat(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Return elements ``begin`` to ``end`` of the flattened tensor."""
        values: torch.Tensor = self.whole(name)
        return values.detach().reshape(-1)[begin:end]

    def box(self, name: str, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        """Return a box of a tensor."""
        values: torch.Tensor = self.whole(name)
        return values.detach()[slices(offset, size)]


class _Mapped(Source):
    """A state dict, in memory or mapped from a file that torch wrote."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def names(self) -> list[str]:
        return list(self._values)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._values[name].shape)

    def whole(self, name: str) -> Any:
        return self._values[name]


class _Safetensors(Source):
    """One open safetensors file."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def names(self) -> list[str]:
        return list(self._file.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())

    def whole(self, name: str) -> Any:
        return self._file.get_tensor(name)

    def flat(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Read the rows that hold the elements, and return these."""
        shape = self.shape(name)
        row = math.prod(shape[1:])
        if not shape or not row:
            return super().flat(name, begin, end)
        first, last = begin // row, -(-end // row)
        rows: torch.Tensor = self._file.get_slice(name)[first:last]
        return rows.reshape(-1)[begin - first * row : end - first * row]

    def box(self, name: str, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        if not offset:
            return super().box(name, offset, size)
        values: torch.Tensor = self._file.get_slice(name)[slices(offset, size)]
        return values


class _Together(Source):
    """Several files as one."""

    def __init__(self, parts: list[Source]) -> None:
        self._where = {name: part for part in parts for name in part.names()}

    def names(self) -> list[str]:
        return list(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._where[name].shape(name)

    def whole(self, name: str) -> Any:
        return self._where[name].whole(name)

    def flat(self, name: str, begin: int, end: int) -> torch.Tensor:
        return self._where[name].flat(name, begin, end)

    def box(self, name: str, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        return self._where[name].box(name, offset, size)


class _Merged(Source):
    """Files of the Hub with the names that a model of transformers has. Rows of a tensor that is made of a list read their part of it."""

    def __init__(self, inner: Source, model: Any, known: Mapping[str, Any]) -> None:
        self._inner, self._model = inner, model
        self._merges = merges_of(model, inner.names(), known)
        self._of: dict[str, tuple[str, tuple[int, ...]]] = {}
        for first, merge in self._merges.items():
            made = merge.make(model, first, lambda name: torch.empty(inner.shape(name), device="meta"))
            self._of |= {name: (first, tuple(one.shape)) for name, one in made.items()}

    def names(self) -> list[str]:
        return list(self._of)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._of[name][1]

    def whole(self, name: str) -> Any:
        return self._made(name, slice(None))

    def _made(self, name: str, rows: slice) -> torch.Tensor:
        first = self._of[name][0]
        return self._merges[first].make(self._model, first, self._inner.whole, rows)[name]

    def _plain(self, name: str) -> str | None:
        """Return the name in the files of a tensor that is the same there."""
        merge = self._merges[self._of[name][0]]
        return None if merge.converter is not None else next(iter(merge.lists.values()))[0]

    def flat(self, name: str, begin: int, end: int) -> torch.Tensor:
        plain = self._plain(name)
        if plain is not None:
            return self._inner.flat(plain, begin, end)
        if not self._merges[self._of[name][0]].by_rows or begin == end:
            return super().flat(name, begin, end)
        shape = self.shape(name)
        first, last = rows_of(shape, begin, end)
        at = begin - first * math.prod(shape[1:])
        return self._made(name, slice(first, last)).reshape(-1)[at : at + end - begin]

    def box(self, name: str, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        plain = self._plain(name)
        if plain is not None:
            return self._inner.box(plain, offset, size)
        if not self._merges[self._of[name][0]].by_rows:
            return super().box(name, offset, size)
        rows = slice(offset[0], offset[0] + size[0])
        return self._made(name, rows)[slices((0, *offset[1:]), size)]


def as_model_has(source: Source, model: Any, known: Mapping[str, Any]) -> Source:
    """Return files with the names of a model: of files that have the Hub's names for it, one that converts them.

    Args:
        known: by name, what the model has.
    """
    if not converts(model) or known.keys() <= set(source.names()):
        return source
    return _Merged(source, model, known)


@contextlib.contextmanager
def opened(source: Mapping[str, Any] | str | os.PathLike[str]) -> Iterator[Source]:
    """Open a state dict, a file (``.safetensors``, or else one of ``torch.save``), or a folder as Hugging Face writes it.

    Raises:
        zeropp.CheckpointError: there is no such file, or it cannot be read without running code out of it.
    """
    if isinstance(source, Mapping):
        yield _Mapped(source)
        return
    with contextlib.ExitStack() as stack:
        yield _Together([_open(path, stack) for path in _files(Path(source))])


def _files(path: Path) -> list[Path]:
    """Return the files of a checkpoint: safetensors where there are both kinds."""
    if not path.is_dir():
        return [path]
    for name in INDEXES:
        if (path / name).exists():
            return _indexed(path / name)
    for pattern in PATTERNS:
        if files := sorted(path.glob(pattern)):
            return files
    raise CheckpointError(f"{path}: neither *.safetensors nor pytorch_model*.bin is there")


def _indexed(index: Path) -> list[Path]:
    try:
        members = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return sorted({index.parent / member for member in members})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: no index with a weight_map of name: file: {error!r}") from error


def _open(path: Path, stack: contextlib.ExitStack) -> Source:
    if path.suffix == ".safetensors":
        try:
            return _Safetensors(stack.enter_context(safe_open(str(path), "pt")))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: cannot be read as safetensors: {error}") from error
    try:
        values = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{path}: cannot be mapped as a file of torch.save that holds tensors only: {error}; "
            "load it where you trust it, and save its state dict again, best as safetensors"
        ) from error
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{path}: holds a {type(values).__name__}; a state dict (name: tensor) is wanted")
    return _Mapped(values)


# -- files for other programs ------------------------------------------------------------------------------------------


def plan_files(sizes: Iterable[tuple[str, int]], file_bytes: int) -> dict[str, list[str]]:
    """Return the tensors of each file, by its name in the Hugging Face layout: in order, up to ``file_bytes`` or one tensor a file.

    Args:
        sizes: (name, bytes) of each tensor.
    """
    groups: list[list[str]] = [[]]
    held = 0
    for name, size in sizes:
        if groups[-1] and held + size > file_bytes:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def write_file(path: Path, pieces: Sequence[Piece]) -> None:
    """Write a file under another name first: a reader never sees half of it."""
    new = path.with_name(path.name + ".new")
    write_pieces(new, pieces, {"format": "pt"})
    with disk.storage_errors(path, 0):
        disk.disk.rename(new, path)
        disk.disk.sync_folder(path.parent)


def write_index(folder: Path, plan: Mapping[str, Sequence[str]], total_bytes: int) -> None:
    """Write the index that says which file has a tensor, where there are several."""
    if len(plan) > 1:
        weight_map = {name: file for file, members in plan.items() for name in members}
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        disk.write_text(folder / INDEXES[0], json.dumps(index, indent=1))
