# SPDX-License-Identifier: Apache-2.0
"""A checkpoint without its model: checked, or written as safetensors files for other programs.

No ranks, no GPU, and no more memory than a few blocks, whatever the size of the model.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zeropp.checkpoint.content import numbers_of
from zeropp.checkpoint.manifest import LATEST, MANIFEST, candidates, none_good, read_manifest, steps_in
from zeropp.checkpoint.pieces import Files
from zeropp.checkpoint.sources import FILE_BYTES, plan_files, write_file, write_index
from zeropp.errors import CheckpointError, ConfigError
from zeropp.files import disk as files
from zeropp.files import safefile
from zeropp.files.safefile import Piece
from zeropp.zero.model.boxes import whole_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Finding:
    """The finding of :func:`verify` about one checkpoint."""

    folder: Path
    wrong: str | None
    """None: every byte of it is as it was saved. Otherwise file, offset and what was found."""
    step: int | None = None
    ranks: int | None = None
    stage: int | None = None
    file_bytes: int | None = None
    latest: bool = False


def verify(path: str | os.PathLike[str]) -> list[Finding]:
    """Compare every byte of a checkpoint, or of all in a folder, with its checksum; newest first.

    Raises:
        zeropp.CheckpointError: there is none.
    """
    root = Path(path)
    steps = [] if (root / MANIFEST).exists() else [folder for _, folder in reversed(steps_in(root))]
    folders = steps or candidates(root)
    named = None
    with contextlib.suppress(OSError, ValueError):
        named = (folders[0].parent / LATEST).read_text(encoding="utf-8").strip()
    return [_examine(folder, folder.name == named) for folder in folders]


def _examine(folder: Path, latest: bool) -> Finding:
    try:
        content = read_manifest(folder)
    except CheckpointError as error:
        return Finding(folder, str(error), latest=latest)
    wrong = None
    try:
        for name, entry in content["files"].items():
            safefile.verify(folder / name, entry)
    except CheckpointError as error:
        wrong = str(error)
    whole_bytes = sum(int(entry["bytes"]) for entry in content["files"].values())
    return Finding(folder, wrong, content["step"], content["ranks"], content["stage"], whole_bytes, latest)


def export(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    file_bytes: int = FILE_BYTES,
) -> dict[str, Any]:
    """Write the weights and buffers of a checkpoint as safetensors files in the Hugging Face layout.

    ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` with an index where they are larger than
    ``file_bytes``. Tied parameters are written once, under their first name. Every byte that is read is verified first.

    Args:
        path: the folder given to :func:`zeropp.save` (the newest good checkpoint), or one checkpoint in it.
        target: the folder to write to; made where missing. Files of these names are replaced, each in one step.
        dtype: "fp32", "bf16" or "fp16" for all parameters of floating point; None: what each computes in.
        file_bytes: largest file, unless one tensor is larger.

    Returns:
        ``{"path": checkpoint, "step": n, "files": names, "tensors": n, "bytes": n, "damaged": {folder: what}}``.

    Memory: a few blocks of 4 MiB.

    Raises:
        zeropp.CheckpointError: no good checkpoint there. zeropp.TierError: ``target`` is full or failed.
    """  # fmt: skip
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"export: dtype {dtype!r} is not allowed; wanted one of {', '.join(DTYPES)}, or None")
    if isinstance(file_bytes, bool) or not isinstance(file_bytes, int) or file_bytes < 1:
        raise ConfigError(f"export: file_bytes {file_bytes!r} is not allowed; wanted a whole number of bytes above 0")
    damaged: dict[str, str] = {}
    for folder in candidates(Path(path)):
        finding = _examine(folder, False)
        if finding.wrong is None:
            return {**_export(folder, Path(target), dtype, file_bytes), "damaged": damaged}
        damaged[str(folder)] = finding.wrong
    raise none_good({Path(folder): wrong for folder, wrong in damaged.items()})


def whole_state(path: Path, dtype: str | None) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers of the newest checkpoint in a folder, whole; tied ones share a tensor under
    all their names.

    Raises:
        zeropp.CheckpointError: there is none, or something in it is not as it was saved.
    """
    folder = candidates(path)[0]
    finding = _examine(folder, False)
    if finding.wrong is not None:
        raise CheckpointError(finding.wrong)
    content = read_manifest(folder)
    found: dict[str, torch.Tensor] = {}
    with Files(folder, content) as parts:
        for piece in [*_parameters(content, parts, dtype), *_buffers(content, parts)]:
            blocks = list(piece.parts())
            flat = torch.cat(blocks) if blocks else torch.empty(0, dtype=piece.dtype)
            found[piece.name] = flat.view(piece.dtype).view(piece.shape)
    for name, one in content["parameters"].items():
        for alias in one["names"]:
            found[alias] = found[name]
    return found


def _export(folder: Path, target: Path, dtype: str | None, file_bytes: int) -> dict[str, Any]:
    content = read_manifest(folder)
    with Files(folder, content) as parts:
        pieces = [*_parameters(content, parts, dtype), *_buffers(content, parts)]
        plan = plan_files([(piece.name, piece.nbytes) for piece in pieces], file_bytes)
        with files.storage_errors(target, 0):
            files.make_folders(target)
        by_name = {piece.name: piece for piece in pieces}
        for name, members in plan.items():
            write_file(target / name, [by_name[member] for member in members])
    total = sum(piece.nbytes for piece in pieces)
    write_index(target, plan, total)
    return {"path": folder, "step": content["step"], "files": list(plan), "tensors": len(pieces), "bytes": total}


def _parameters(content: Mapping[str, Any], parts: Files, dtype: str | None) -> Iterator[Piece]:
    for name, one in content["parameters"].items():
        own: torch.dtype = getattr(torch, one["dtype"])
        kind = DTYPES[dtype] if dtype is not None and own.is_floating_point else own
        if one.get("complex"):
            kind = torch.complex64 if own == torch.float32 else torch.complex128
        yield Piece(name, kind, one["shape"], functools.partial(_values, parts, name, one, kind))


def _values(parts: Files, name: str, one: Mapping[str, Any], kind: torch.dtype) -> Iterator[torch.Tensor]:
    whole = whole_of(one["shape"])
    number = kind.to_real() if one.get("complex") else kind
    for _, values in parts.read(name, "", whole, 0, numbers_of(one, whole), one):
        yield values.to(number)


def _buffers(content: Mapping[str, Any], parts: Files) -> Iterator[Piece]:
    for name, rank in content["buffers"].items():
        source = parts.tensors(rank)
        shape = source.shape(name)
        yield Piece(name, source.dtype(name), shape, functools.partial(_parts, source, name, math.prod(shape)))


def _parts(source: safefile.TensorFile, name: str, elems: int) -> Iterator[torch.Tensor]:
    step = max(1, safefile.BLOCK_BYTES // 4)
    for first in range(0, elems, step):
        yield source.flat(name, first, min(first + step, elems))


__all__ = ["Finding", "export", "verify"]
