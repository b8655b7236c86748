# SPDX-License-Identifier: Apache-2.0
"""The index of a dataset: each metric's value by sample, and the samples in the order of that value. Two files a metric.

    folder/manifest.json    what the folder holds; written last
    folder/NAME.values      float64 [samples], little-endian: the value of each sample
    folder/NAME.order       int32 [samples], little-endian: the samples by rising value, equal ones by rising number

The files are mapped when they are used, so that ranks of one host share their pages.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeropp import _C
from zeropp.errors import CheckpointError, ConfigError, counted
from zeropp.files.disk import disk, make_folders, replace_folder, storage_errors, write_text
from zeropp.files.heap_trim import byte_view

MANIFEST = "manifest.json"
FORMAT = "zeropp dataset index"
VERSION = 1
MOST_SAMPLES = (1 << 31) - 1
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_WRITE_BYTES = 16 << 20
_PROBES = 64
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Index:
    """An index that was opened: sizes are checked, bytes are mapped when they are asked for."""

    path: Path
    samples: int
    fingerprint: str
    """Of the dataset: :func:`fingerprint_of`."""
    digest: str
    """Of the index's content; equal on ranks that have the same index."""
    metrics: tuple[str, ...]
    source: Any = None
    """What the index was made from, as its writer describes it."""

    def values(self, metric: str) -> Tensor:
        """Return the metric's value of each sample, float64 ``[samples]``, mapped."""
        return _mapped(self.path / f"{self._known(metric)}.values", self.samples, torch.float64)

    def order(self, metric: str) -> Tensor:
        """Return the samples by rising value, int32 ``[samples]``, mapped."""
        return _mapped(self.path / f"{self._known(metric)}.order", self.samples, torch.int32)

    def check_dataset(self, dataset: Any) -> None:
        """Refuse a dataset that is not the one that was analysed.

        Raises:
            zeropp.ConfigError: the number of samples, or one of the samples that are compared, differs.
        """
        if len(dataset) != self.samples:
            raise ConfigError(
                f"{self.path}: the index is of {counted(self.samples, 'sample')}, the dataset has {len(dataset):,}; "
                "analyse this dataset (zeropp.data.analyse) into another folder"
            )
        found = fingerprint_of(dataset)
        if self.fingerprint and found and found != self.fingerprint:
            raise ConfigError(
                f"{self.path}: the index is of another dataset: its fingerprint is {self.fingerprint[:16]}, that of the dataset "
                f"{found[:16]}; analyse this dataset (zeropp.data.analyse) into another folder"
            )

    def _known(self, metric: str) -> str:
        if metric not in self.metrics:
            raise ConfigError(
                f"{self.path}: the index has no metric {metric!r}; it has {', '.join(self.metrics) or 'none'}; analyse the dataset "
                "with that metric (zeropp.data.analyse)"
            )
        return metric


def open_index(path: str | os.PathLike[str]) -> Index:
    """Open an index that :func:`zeropp.data.analyse` wrote.

    Raises:
        zeropp.CheckpointError: there is none, or a file of it is damaged or cut short, which is named.
    """
    folder = Path(path)
    content = _read_manifest(folder)
    index = Index(
        path=folder,
        samples=content["samples"],
        fingerprint=content["fingerprint"],
        digest=content["digest"],
        metrics=tuple(content["metrics"]),
        source=content["source"],
    )
    for name in index.metrics:
        for file, item_bytes in ((f"{name}.values", 8), (f"{name}.order", 4)):
            _check_size(folder / file, index.samples * item_bytes)
    return index


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder}: holds no index of a dataset; make one: zeropp.data.analyse(dataset, metrics, path)"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / MANIFEST}: cannot be read: {error}; analyse the dataset again") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or content.get("version") != VERSION:
        raise CheckpointError(f"{folder / MANIFEST}: is not the manifest of an index of version {VERSION}")
    if content.get("digest") != _digest(content):
        raise CheckpointError(f"{folder / MANIFEST}: damaged: its digest does not fit; analyse the dataset again")
    return content


def _check_size(file: Path, wanted_bytes: int) -> None:
    try:
        found = file.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}; analyse the dataset again") from error
    if found != wanted_bytes:
        raise CheckpointError(
            f"{file}: has {found:,} bytes, the manifest says {wanted_bytes:,}: it was cut short or changed; analyse the dataset again"
        )


def _mapped(file: Path, elems: int, dtype: torch.dtype) -> Tensor:
    _check_size(file, elems * dtype.itemsize)
    return torch.from_file(str(file), shared=False, size=elems, dtype=dtype)


def _digest(content: Mapping[str, Any]) -> str:
    plain = {key: value for key, value in content.items() if key != "digest"}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def write_index(
    folder: Path, values: Mapping[str, Tensor], samples: int, *, fingerprint: str, source: Any = None, work: Path
) -> Index:
    """Write an index: into ``work`` first, which then takes the folder's name in one step.

    Args:
        folder: of the index; an older index there is replaced.
        values: float64 ``[samples]`` by metric.
        samples: of the dataset.
        fingerprint: of the dataset.
        source: what the index is made from, plain data.
        work: a folder beside it that holds nothing of value.

    Raises:
        zeropp.TierError: storage is full or failed. ConfigError: the folder holds something that is no index.
    """
    require_free(folder)
    disk.remove_tree(work)
    with storage_errors(work, 0):
        make_folders(work)
    metrics = {}
    for name, one in values.items():
        order = torch.argsort(one, stable=True).to(torch.int32)
        crcs = [write_tensor(work / f"{name}.values", one), write_tensor(work / f"{name}.order", order)]
        metrics[name] = {"crc32": crcs, "least": float(one.min()), "most": float(one.max())}
    content = {
        "format": FORMAT, "version": VERSION, "samples": samples, "fingerprint": fingerprint, "source": source, "metrics": metrics,
    }  # fmt: skip
    write_text(work / MANIFEST, json.dumps({**content, "digest": _digest(content)}, indent=1) + "\n")
    old = replace_folder(work, folder)
    if old is not None:
        disk.remove_tree(old)
    return open_index(folder)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock on a folder, which is made; the one that held it before may have removed it."""
    while True:
        with storage_errors(folder, 0):
            make_folders(folder)
            try:
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                continue
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _log.info("zeropp.data: waits for the process that works in %s", folder)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(folder.stat(), os.fstat(descriptor)):
                    yield
                    return
        finally:
            os.close(descriptor)


def require_free(folder: Path) -> None:
    """Refuse a folder, or a file, that holds something else than an index."""
    if folder.exists() and not (folder / MANIFEST).exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{folder}: holds something that is no index of a dataset; give a folder that is new or empty"
        )


def write_tensor(file: Path, values: Tensor) -> int:
    """Write the bytes of a contiguous CPU tensor to a new file, durably; return their checksum."""
    view = byte_view(values)
    with storage_errors(file, len(view)):
        descriptor = disk.create(file)
        try:
            disk.reserve(descriptor, len(view))
            for first in range(0, len(view), _WRITE_BYTES):
                disk.write(descriptor, view[first : first + _WRITE_BYTES], first)
            disk.sync(descriptor)
        finally:
            os.close(descriptor)
    return _C.crc32(values.data_ptr(), len(view))


def fingerprint_of(dataset: Any) -> str:
    """Return a number that tells two datasets apart: of the length, and of up to 64 samples at even distances.

    Empty where a sample differs each time that it is read, as with random masking: then only the length can be compared.
    """
    samples = len(dataset)
    places = [place * (samples - 1) // max(1, _PROBES - 1) for place in range(_PROBES)] if samples else []
    state = hashlib.sha256(f"{samples}".encode())
    for place in sorted(set(places)):
        state.update(_bytes_of(dataset[place]))
    if samples and _bytes_of(dataset[0]) != _bytes_of(dataset[0]):
        return ""
    return state.hexdigest()


def _bytes_of(sample: Any) -> bytes:
    """Describe a sample: tensors and arrays by their bytes, containers by their parts, numbers and text by themselves, the rest by its type."""
    if isinstance(sample, Mapping):
        return b"{" + b"".join(str(key).encode() + _bytes_of(value) for key, value in sample.items()) + b"}"
    if isinstance(sample, (list, tuple)) and not all(isinstance(one, (int, float, str)) for one in sample):
        return b"[" + b"".join(map(_bytes_of, sample)) + b"]"
    if isinstance(sample, Tensor):
        return str(sample.shape).encode() + bytes(byte_view(sample.detach().cpu().contiguous()))
    if hasattr(sample, "tobytes"):
        return bytes(sample.tobytes())
    is_plain = sample is None or isinstance(sample, (bool, int, float, str, bytes, list, tuple))
    return repr(sample).encode() if is_plain else type(sample).__name__.encode()
