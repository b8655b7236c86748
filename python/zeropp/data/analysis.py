# SPDX-License-Identifier: Apache-2.0
"""``zeropp.data.analyse``: an index of a dataset (index.py) out of one or two passes over it.

What is finished is kept beside the index, in ``.NAME.partial``, a few seconds at a time. A run that was killed, or that
found the disk full, goes on there. Where several processes analyse to one path, the first one works and the others wait for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset
from tqdm import tqdm  # type: ignore[import-untyped]

from zeropp.data import metrics as measures
from zeropp.data.index import (
    MANIFEST,
    MOST_SAMPLES,
    NAME,
    Index,
    fingerprint_of,
    locked,
    open_index,
    require_free,
    write_index,
    write_tensor,
)
from zeropp.data.metrics import Metric
from zeropp.errors import CheckpointError, ConfigError, counted, shown, what_it_is
from zeropp.files.disk import disk, storage_errors, write_text
from zeropp.files.heap_trim import byte_view

BLOCK = 4096
"""Samples between two places where a run that was killed can go on."""
SAVE_S = 3.0
_STATE = "state.json"
_log = logging.getLogger(__name__)


def analyse(
    dataset: Any,
    metrics: Mapping[str, Metric],
    path: str | os.PathLike[str],
    *,
    workers: int = 0,
    tokens: str = "input_ids",
    progress: bool = False,
) -> Index:
    """Measure the difficulty of every sample, and write the index that :class:`zeropp.data.CurriculumSampler` reads.

    Args:
        dataset: of torch or of the package ``datasets``: ``len(dataset)`` and ``dataset[i]``. ``__getitems__`` is used where there
            is one, and a ``TensorDataset`` is read by slices.
        metrics: by name: ``"seqlen"``, ``"vocab_rarity"``, ``"seqlen_vocab_rarity"`` (metrics.py has the formulas), or a
            function that takes one sample and returns a number.
        path: folder of the index. An index of the same dataset and metrics that is there is returned as it is, another
            index is replaced. All ranks of a job may call this: one works, the others wait.
        workers: processes that read and measure; 0: this one.
        tokens: the key of the tokens in samples that are mappings; ``attention_mask`` says which of them are padding. Of a
            tuple the first part counts, and any other sample is a row of tokens.
        progress: show a bar on standard error.

    Returns:
        The index. Two files a metric: 12 bytes a sample.

    Raises:
        zeropp.ConfigError: a metric that is not known, a value that is not finite, no samples. The sample is named.
        zeropp.TierError: storage is full or failed; what is finished stays, and the next call goes on from there.

    Cost: one pass over the dataset, two with a rarity (the first one counts tokens). Memory: 40 bytes a sample at the end.
    """
    if not metrics:
        raise ConfigError("analyse: there is no metric; give one, such as {'length': 'seqlen'}")
    for name, metric in metrics.items():
        if not NAME.fullmatch(name):
            raise ConfigError(f"analyse: metric {name!r} cannot name a file; wanted letters, digits, '_', '-' and '.'")
        measures.check_metric(name, metric)
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 0:
        raise ConfigError(f"analyse: workers {workers!r} is not allowed; wanted a whole number >= 0")
    _check_dataset(dataset)
    work = _Work(dataset, dict(metrics), Path(path), workers, tokens, progress)
    require_free(work.path)
    with locked(work.partial):
        return work.existing() or work.run()


def _check_dataset(dataset: Any) -> None:
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"analyse: the dataset is {what_it_is(dataset)}; wanted __len__ and __getitem__, so not a stream"
        )
    if not 1 <= len(dataset) <= MOST_SAMPLES:
        raise ConfigError(f"analyse: the dataset has {counted(len(dataset), 'sample')}; wanted 1 to {MOST_SAMPLES:,}")


def _read(dataset: Any, numbers: range) -> list[Any]:
    """Return samples: by one call where the dataset has one for many, or is nothing but tensors."""
    many = getattr(dataset, "__getitems__", None)
    if many is not None:
        return list(many(list(numbers)))
    if type(dataset) is TensorDataset:
        return list(zip(*(one[numbers.start : numbers.stop].unbind() for one in dataset.tensors), strict=True))
    return [dataset[number] for number in numbers]


@dataclass
class _Blocks(Dataset[Any]):
    """The dataset in blocks: what a worker gives for one is the counts of tokens, or the columns' values."""

    dataset: Any
    metrics: dict[str, Any]
    columns: list[str]
    tokens: str
    information: Tensor | None = None
    """None while tokens are counted."""

    def __len__(self) -> int:
        return -(-len(self.dataset) // BLOCK)

    def __getitem__(self, block: int) -> Any:
        numbers = range(block * BLOCK, min((block + 1) * BLOCK, len(self.dataset)))
        few = measures.samples_at_a_time(self.metrics, BLOCK)
        try:
            made = [self._measure(numbers[first : first + few]) for first in range(0, len(numbers), few)]
        except ConfigError as error:  # as a value: from a worker, an exception would arrive as the text of a traceback
            return str(error)
        if self.information is None:
            return measures.sum_of_counts(made)
        return [torch.cat(parts) for parts in zip(*made, strict=True)]

    def _measure(self, numbers: range) -> Any:
        samples = _read(self.dataset, numbers)
        if self.information is None:
            return measures.count_tokens(samples, numbers.start, self.tokens)
        return measures.of_block(samples, numbers.start, self.metrics, self.columns, self.information, self.tokens)


@dataclass
class _Work:
    """One analysis."""

    dataset: Any
    metrics: dict[str, Any]
    path: Path
    workers: int
    tokens: str
    progress: bool
    identity: dict[str, Any] = field(init=False)
    columns: list[str] = field(init=False)
    partial: Path = field(init=False)

    def __post_init__(self) -> None:
        self.path = self.path.absolute()
        self.partial = self.path.with_name(f".{self.path.name}.partial")
        self.columns = measures.columns_of(self.metrics)
        functions = {name: measures.describe(metric) for name, metric in self.metrics.items()}
        self.identity = {
            "samples": len(self.dataset),
            "fingerprint": fingerprint_of(self.dataset),
            "metrics": {name: hashlib.sha256(text.encode()).hexdigest() for name, text in functions.items()},
            "tokens": self.tokens,
            "block": BLOCK,
        }

    def existing(self) -> Index | None:
        """Return the index that is there, if it is of this dataset and these metrics."""
        if not (self.path / MANIFEST).exists():
            return None
        try:
            index = open_index(self.path)
        except CheckpointError:
            return None
        if index.source != self.identity:
            return None
        disk.remove_tree(self.partial)
        return index

    def run(self) -> Index:
        state = self._state()
        counts = torch.zeros(0, dtype=torch.int64)
        if "vocab_rarity" in self.columns:
            counts = self._count(state)
        blocks = self._blocks(measures.information_of(counts))
        with contextlib.ExitStack() as files:
            descriptors = [files.enter_context(self._open_column(number)) for number in range(len(self.columns))]
            for block, values in self._each(blocks, state, "measured", lambda: self._sync(descriptors)):
                for column, descriptor, one in zip(self.columns, descriptors, values, strict=True):
                    self._check_finite(column, one, block * BLOCK)
                    with storage_errors(self._column(self.columns.index(column)), 8 * len(self.dataset)):
                        disk.write(descriptor, byte_view(one), 8 * block * BLOCK)
        return self._finish()

    def _finish(self) -> Index:
        samples = len(self.dataset)
        columns = {
            name: torch.from_file(str(self._column(number)), shared=False, size=samples, dtype=torch.float64)
            for number, name in enumerate(self.columns)
        }
        values = {name: measures.finished(metric, name, columns) for name, metric in self.metrics.items()}
        index = write_index(
            self.path, values, samples, fingerprint=self.identity["fingerprint"], source=self.identity, work=self.partial / "index"
        )  # fmt: skip
        disk.remove_tree(self.partial)
        return index

    # -- the passes ---------------------------------------------------------------------------------------------------------------

    def _blocks(self, information: Tensor | None) -> _Blocks:
        return _Blocks(self.dataset, self.metrics, self.columns, self.tokens, information)

    def _count(self, state: dict[str, Any]) -> Tensor:
        """Count the tokens of all samples, or go on with counts that were saved."""
        counts = torch.zeros(0, dtype=torch.int64)
        if state["tokens"]:
            file = self.partial / state["counts"]
            counts = torch.from_file(str(file), shared=False, size=file.stat().st_size // 8, dtype=torch.int64).clone()

        def save() -> None:
            old, state["counts"] = state.get("counts"), f"counts-{state['tokens']}"
            write_tensor(self.partial / state["counts"], counts)
            if old not in (None, state["counts"]):
                disk.remove_tree(self.partial / str(old))

        for _, more in self._each(self._blocks(None), state, "tokens", save):
            if len(more) > len(counts):
                counts = torch.nn.functional.pad(counts, (0, len(more) - len(counts)))
            counts[: len(more)] += more
        return counts

    def _each(self, blocks: _Blocks, state: dict[str, Any], key: str, save: Any) -> Iterator[tuple[int, Any]]:
        """Yield (block, what a worker made of it) from the first block that is not finished on; save what is finished."""
        left = range(state[key], len(blocks))
        loader = DataLoader(blocks, batch_size=None, sampler=left, num_workers=self.workers if left else 0)
        bar = tqdm(
            total=len(self.dataset), initial=min(left.start * BLOCK, len(self.dataset)), unit=" samples", unit_scale=True,
            desc="counting tokens" if key == "tokens" else "measuring", disable=not self.progress,
        )  # fmt: skip
        saved = time.monotonic()
        with bar:
            for block, made in zip(left, loader, strict=True):
                if isinstance(made, str):
                    raise ConfigError(made)
                yield block, made
                state[key] = block + 1
                bar.update(min(BLOCK, len(self.dataset) - block * BLOCK))
                if time.monotonic() - saved > SAVE_S or block + 1 == len(blocks):
                    save()
                    write_text(self.partial / _STATE, json.dumps(state))
                    saved = time.monotonic()

    def _check_finite(self, column: str, values: Tensor, first: int) -> None:
        bad = (~torch.isfinite(values)).nonzero()
        if len(bad):
            place = int(bad[0])
            raise ConfigError(
                f"analyse: metric '{column.removeprefix('=')}' of sample {first + place} is {float(values[place])}; wanted a finite "
                "number: leave that sample out, or return a number for it"
            )

    # -- what a killed run left ---------------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        """Return how far an earlier run came: blocks whose tokens are counted, and blocks that are measured."""
        fresh: dict[str, Any] = {"identity": self.identity, "tokens": 0, "measured": 0}
        try:
            state = json.loads((self.partial / _STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            state = fresh
        if not isinstance(state, dict) or state.get("identity") != self.identity:
            state = fresh
        if state is fresh:
            for file in self.partial.iterdir():
                disk.remove_tree(file)
        else:
            _log.info("zeropp.data.analyse: goes on in %s: %s", self.partial, shown({**state, "identity": ...}))
        found: dict[str, Any] = state
        return found

    def _column(self, number: int) -> Path:
        return self.partial / f"column-{number}"

    @contextlib.contextmanager
    def _open_column(self, number: int) -> Iterator[int]:
        with storage_errors(self._column(number), 8 * len(self.dataset)):
            descriptor = os.open(self._column(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _sync(self, descriptors: list[int]) -> None:
        with storage_errors(self.partial, 8 * len(self.dataset) * len(descriptors)):
            for descriptor in descriptors:
                disk.sync(descriptor)
