# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ``DataAnalyzer`` over :func:`zeropp.data.analyse`: the same arguments, the same files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp.data.analysis import analyse
from zeropp.data.indexed import write_analysis, write_rows
from zeropp.data.metrics import Batched
from zeropp.errors import ConfigError
from zeropp.files.disk import make_folders, storage_errors

_ONE, _SUM = "single_value_per_sample", "accumulate_value_over_samples"


class DataAnalyzer:
    """Measure metrics of a dataset, and write them as DeepSpeed's files (zeropp.data.indexed).

    Args:
        dataset: as for :func:`zeropp.data.analyse`.
        num_workers, worker_id: processes that analyse together: the first one works, the others wait for it.
        num_threads: processes that read and measure.
        batch_size: samples in a batch that a metric's function gets, collated.
        metric_names, metric_functions, metric_types, metric_dtypes: one of each a metric. A function returns a tensor or array: one
            value a sample, or, of the type "accumulate_value_over_samples", what is added up over batches. Files have the smallest type
            of whole numbers that fits, as DeepSpeed's do.
        save_path: folder of the files, ``save_path/NAME/NAME_index_to_sample`` and so on.
        collate_fn: makes a batch; default: torch's.
        sample_indices: numbers under which the samples are written, in place of their positions.
        num_threads_reduce, specific_threads, custom_map_init, custom_map_update, custom_map_finalize, custom_reduce: must keep their
            defaults, but for the first one, which nothing needs.

    Raises:
        zeropp.ConfigError: an argument that is not supported, or values that are no whole numbers.
    """

    def __init__(
        self,
        dataset: Any,
        num_workers: int = 1,
        worker_id: int = 0,
        num_threads: int = 1,
        num_threads_reduce: int = 1,
        specific_threads: Sequence[int] = (),
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], Any]] = (),
        metric_types: Sequence[str] = (),
        metric_dtypes: Sequence[Any] = (),
        save_path: str = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        custom_map_init: Any = None,
        custom_map_update: Any = None,
        custom_map_finalize: Any = None,
        custom_reduce: Any = None,
        sample_indices: Any = None,
    ) -> None:
        custom = (specific_threads, custom_map_init, custom_map_update, custom_map_finalize, custom_reduce)
        if any(one is not None and one != () and one != [] for one in custom):
            raise ConfigError(
                "DataAnalyzer: specific_threads and custom_* are not supported; give metric_functions alone"
            )
        if not len(metric_names) == len(metric_functions) == len(metric_types):
            raise ConfigError(
                f"DataAnalyzer: {len(metric_names)} metric_names, {len(metric_functions)} metric_functions and {len(metric_types)} "
                "metric_types; wanted as many of each"
            )
        for name, kind in zip(metric_names, metric_types, strict=True):
            if kind not in (_ONE, _SUM):
                raise ConfigError(f"DataAnalyzer: metric '{name}' has the type {kind!r}; wanted {_ONE!r} or {_SUM!r}")
        self.dataset, self.save_path, self.sample_indices = dataset, save_path, sample_indices
        self.worker_id, self._workers = worker_id, num_threads if num_threads > 1 else 0
        collate = collate_fn or torch.utils.data.default_collate
        self._batched = {
            name: (kind, Batched(function, collate, batch_size))
            for name, kind, function in zip(metric_names, metric_types, metric_functions, strict=True)
        }

    def run_map(self) -> None:
        """Measure the metrics of samples; a run that was killed goes on."""
        metrics = {name: one for name, (kind, one) in self._batched.items() if kind == _ONE}
        if metrics:
            analyse(self.dataset, metrics, self._index, workers=self._workers)

    def run_reduce(self) -> None:
        """Write DeepSpeed's files, after :meth:`run_map`."""
        for name, (kind, one) in self._batched.items():
            folder = Path(self.save_path) / name
            with storage_errors(folder, 0):
                make_folders(folder.absolute())
            if kind == _SUM:
                total = self._sum(one)
                write_rows(folder / f"{name}_metric_value", torch.tensor([total.numel()]), total.reshape(-1))
        metrics = {name: one for name, (kind, one) in self._batched.items() if kind == _ONE}
        if metrics:
            index = analyse(self.dataset, metrics, self._index, workers=self._workers)
            for name in metrics:
                numbers = None if self.sample_indices is None else torch.as_tensor(self.sample_indices)
                order = index.order(name).long()
                values = index.values(name)
                write_analysis(Path(self.save_path), name, values, order, order if numbers is None else numbers[order])

    def run_map_reduce(self, comm_group: Any = None) -> None:
        """Do both; collective where there is a process group: rank 0 writes the files."""
        self.run_map()
        together = dist.is_available() and dist.is_initialized()
        if self.worker_id == 0:
            self.run_reduce()
        if together:
            dist.barrier(group=comm_group)

    @property
    def _index(self) -> Path:
        return Path(self.save_path) / "zeropp-index"

    def _sum(self, metric: Batched) -> Tensor:
        total: Tensor | None = None
        for first in range(0, len(self.dataset), metric.batch):
            rows = [self.dataset[number] for number in range(first, min(first + metric.batch, len(self.dataset)))]
            part = torch.as_tensor(metric.function(metric.collate(rows)))
            total = part.clone() if total is None else total + part
        if total is None:
            raise ConfigError("DataAnalyzer: the dataset is empty")
        return total.to(torch.int64)
