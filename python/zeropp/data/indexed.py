# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's files of rows, ``PREFIX.idx`` and ``PREFIX.bin`` (its MMapIndexedDataset, which is Megatron's), read and written.

    PREFIX.idx   'MMIDIDX' 0 0, version 1 (8 bytes), type (1 byte), rows (8), documents (8),
                 int32 [rows] lengths, int64 [rows] offsets in bytes, int64 [documents]; all little-endian
    PREFIX.bin   the rows, one after the other

An analysis has three pairs a metric: ``NAME_index_to_metric``, the values, rising, one a row; ``NAME_index_to_sample``, the samples
that have that value; ``NAME_sample_to_metric``, the value of each sample.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import torch
from torch import Tensor

from zeropp.data.index import write_tensor
from zeropp.errors import CheckpointError, ConfigError, counted
from zeropp.files.disk import disk

_HEAD = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
_TYPES = {
    1: torch.uint8, 2: torch.int8, 3: torch.int16, 4: torch.int32, 5: torch.int64,
    6: torch.uint16, 7: torch.uint32, 8: torch.uint64,
}  # fmt: skip


def read_rows(prefix: str | os.PathLike[str]) -> tuple[Tensor, Tensor]:
    """Return (the length of each row, int64; all rows one after the other, int64).

    Raises:
        zeropp.CheckpointError: a file is missing, damaged, or cut short.
    """
    index, data = Path(f"{os.fspath(prefix)}.idx"), Path(f"{os.fspath(prefix)}.bin")
    try:
        head, size = index.read_bytes(), data.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read: {error.strerror}") from error
    if len(head) < _HEAD.size:
        raise CheckpointError(f"{index}: has {len(head)} bytes; wanted a header of {_HEAD.size}")
    magic, version, code, rows, documents = _HEAD.unpack_from(head)
    if magic != _MAGIC or version != 1 or code not in _TYPES:
        raise CheckpointError(
            f"{index}: begins with {magic!r}, version {version}, type {code}; wanted {_MAGIC!r}, version 1, a type of 1 to 8"
        )
    wanted = _HEAD.size + 12 * rows + 8 * documents
    if len(head) != wanted:
        raise CheckpointError(
            f"{index}: has {len(head)} bytes, and {wanted} by its header of {counted(rows, 'row')}: cut short?"
        )
    lengths, offsets = _of_bytes(head, torch.int32, rows, 34), _of_bytes(head, torch.int64, rows, 34 + 4 * rows)
    item = _TYPES[code].itemsize
    if rows and int(lengths.min()) < 0:
        raise CheckpointError(
            f"{index}: row {int(lengths.argmin())} has {int(lengths.min())} elements; wanted 0 or more"
        )
    if not torch.equal(offsets, (lengths.cumsum(0) - lengths) * item):
        raise CheckpointError(f"{index}: its rows do not follow each other in {data.name}")
    if size != int(lengths.sum()) * item:
        raise CheckpointError(f"{data}: has {size} bytes, and {int(lengths.sum()) * item} by {index.name}: cut short?")
    values = torch.from_file(str(data), shared=False, size=size // item, dtype=_TYPES[code]) if size else torch.zeros(0)
    return lengths, values.to(torch.int64)


def _of_bytes(data: bytes, dtype: torch.dtype, count: int, offset: int) -> Tensor:
    if not count:
        return torch.zeros(0, dtype=torch.int64)
    return torch.frombuffer(bytearray(data[offset : offset + count * dtype.itemsize]), dtype=dtype).to(torch.int64)


def write_rows(prefix: str | os.PathLike[str], lengths: Tensor, values: Tensor) -> None:
    """Write rows of whole numbers, in the smallest type that DeepSpeed chooses for them. The index comes last.

    Raises:
        zeropp.TierError: storage is full or failed.
    """
    index, data = Path(f"{os.fspath(prefix)}.idx"), Path(f"{os.fspath(prefix)}.bin")
    code = _code_for(int(values.min()), int(values.max()))
    if len(lengths) and int(lengths.max()) > 0x7FFFFFFF:
        raise ConfigError(
            f"{data}: a row of {int(lengths.max())} elements does not fit the format; wanted less than 2^31"
        )
    offsets = (lengths.cumsum(0) - lengths) * _TYPES[code].itemsize
    head = _HEAD.pack(_MAGIC, 1, code, len(lengths), 1)
    parts = (lengths.to(torch.int32), offsets.to(torch.int64), torch.zeros(1, dtype=torch.int64))
    whole = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    whole = torch.cat([whole, *(part.view(torch.uint8) for part in parts)])
    for file, content in ((data, values.to(_TYPES[code])), (index, whole)):
        new = file.with_name(file.name + ".new")
        write_tensor(new, content)
        disk.rename(new, file)
    disk.sync_folder(index.parent)


def _code_for(least: int, most: int) -> int:
    codes = (1, 6, 7, 8) if least >= 0 else (2, 3, 4, 5)
    for code in codes:
        bits = 8 * _TYPES[code].itemsize
        if (least >= 0 and most < 1 << bits) or (least < 0 and -(1 << bits - 1) <= least and most < 1 << bits - 1):
            return code
    raise ConfigError(f"values from {least} to {most} do not fit 64 bits")


def values_of_samples(
    sample_path: str | os.PathLike[str], metric_path: str | os.PathLike[str] | None, samples: int
) -> Tensor:
    """Return each sample's value of a metric that DeepSpeed analysed, float64 ``[samples]``.

    Args:
        sample_path, metric_path: prefixes of ``index_to_sample`` and ``index_to_metric``; without the second one the value is the
            row's number.
        samples: of the dataset.

    Raises:
        zeropp.CheckpointError: a file is damaged. ConfigError: the index does not have each sample once.
    """
    lengths, order = read_rows(sample_path)
    values = torch.arange(len(lengths))
    if metric_path is not None:
        ones, values = read_rows(metric_path)
        if len(ones) != len(lengths) or not bool((ones == 1).all()):
            raise ConfigError(
                f"{metric_path}: has {counted(len(ones), 'row')}, {sample_path} has {len(lengths)}; wanted as many, of one value each"
            )
    if len(order) and not 0 <= int(order.min()) <= int(order.max()) < samples:
        raise ConfigError(
            f"{sample_path}: names samples {int(order.min())} to {int(order.max())}, the dataset has {samples:,}; it is of another "
            "dataset: analyse this one (zeropp.data.analyse)"
        )
    found = len(order.unique())
    if found != samples or len(order) != samples:
        raise ConfigError(
            f"{sample_path}: has {found:,} of the dataset's {counted(samples, 'sample')} in {len(order):,} entries; wanted each once. "
            "DeepSpeed's DataAnalyzer loses samples where a batch is a mapping; analyse again with zeropp.data.analyse"
        )
    result = torch.empty(samples, dtype=torch.float64)
    result[order] = values.repeat_interleave(lengths).to(torch.float64)
    return result


def write_analysis(folder: Path, name: str, values: Tensor, order: Tensor, numbers: Tensor) -> None:
    """Write a metric as DeepSpeed's DataAnalyzer does: its four pairs of files in ``folder/NAME``.

    Args:
        folder: holds one folder a metric.
        name: of the metric.
        values: of each sample, float64 ``[samples]``.
        order: the samples by rising value.
        numbers: what each sample of ``order`` is called in the files.

    Raises:
        zeropp.ConfigError: a value that is no whole number, which the format cannot hold.
    """
    if not bool((values == values.trunc()).all()):
        place = int((values != values.trunc()).nonzero()[0])
        raise ConfigError(
            f"metric '{name}' of sample {place} is {float(values[place])}; DeepSpeed's files hold whole numbers: round it, or use "
            "zeropp.data.analyse"
        )
    whole = values.to(torch.int64)
    found, lengths = whole[order].unique_consecutive(return_counts=True)
    prefix = folder / name / name
    merged = max(1, len(found) // 100)
    groups = torch.tensor([int(part.sum()) for part in lengths.split(merged)])
    write_rows(f"{prefix}_sample_to_metric", torch.ones(len(whole), dtype=torch.int64), whole)
    write_rows(f"{prefix}_index_to_sample_percentile_merged", groups, numbers)
    write_rows(f"{prefix}_index_to_metric", torch.ones(len(found), dtype=torch.int64), found)
    write_rows(f"{prefix}_index_to_sample", lengths, numbers)
