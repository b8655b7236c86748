# SPDX-License-Identifier: Apache-2.0
"""``Config.efficiency.curriculum``, which DeepSpeed's JSON describes, as a :class:`zeropp.data.CurriculumSampler`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import Sampler

from zeropp.config.deepspeed_efficiency import SAMPLING, Custom
from zeropp.config.efficiency import Curriculum, Metric, Schedule
from zeropp.data.curriculum import CurriculumSampler, Percentile, Value
from zeropp.data.index import MANIFEST, Index, fingerprint_of, locked, open_index, write_index
from zeropp.data.indexed import values_of_samples
from zeropp.errors import CheckpointError, ConfigError, shown
from zeropp.files.disk import disk

_METRICS = f"{SAMPLING}.curriculum_learning.curriculum_metrics"
Function = Callable[[int], float]


@dataclass(frozen=True)
class FromOne:
    """A schedule whose function counts steps from 1, as DeepSpeed's curriculum does."""

    function: Function

    def __call__(self, step: int) -> float:
        return self.function(step + 1)


def sampler_of(
    curriculum: Curriculum,
    dataset: Any,
    *,
    batch: int,
    micro_batch: int | None = None,
    seed: int = 1234,
    rank: int | None = None,
    ranks: int | None = None,
    schedules: Mapping[str, Function] | None = None,
) -> CurriculumSampler:
    """Return the sampler of a curriculum, which ends after ``epochs`` times the dataset.

    The index that DataAnalyzer wrote is converted once, into ``order_path/zeropp-index``. Metrics without an index do not act on the
    choice of samples.

    Args:
        curriculum: what DeepSpeed's JSON says.
        dataset: what is sampled.
        batch: samples a step, over all ranks.
        micro_batch, seed, rank, ranks: as for :class:`zeropp.data.CurriculumSampler`.
        schedules: by metric, the functions of schedules of the type "custom"; they get the step, counted from 1.

    Raises:
        zeropp.ConfigError: no folder for the order, a custom schedule without its function, an index of another dataset.
        CheckpointError: a damaged index.
    """
    if curriculum.order_path is None:
        raise ConfigError(
            f"{SAMPLING}.curriculum_learning.data_cluster_path: is missing; wanted a folder for the samples' order"
        )
    indexed = {name: metric for name, metric in curriculum.metrics.items() if metric.samples_path is not None}
    bounds: dict[str, Percentile | Value] = {}
    for name, metric in indexed.items():
        schedule: Schedule = metric.schedule
        if isinstance(schedule, Custom) and schedules and name in schedules:
            schedule = FromOne(schedules[name])
        bounds[name] = Value(schedule) if metric.by == "value" else Percentile(schedule, of=metric.of)
    index = _converted(Path(curriculum.order_path) / "zeropp-index", indexed, dataset)
    steps = max(1, len(dataset) * curriculum.epochs // batch)
    return CurriculumSampler(
        index,
        bounds,
        batch=batch,
        micro_batch=micro_batch,
        seed=seed,
        steps=steps,
        dataset=dataset,
        rank=rank,
        ranks=ranks,
    )


class LaterSampler(Sampler[list[int]]):
    """The sampler of a curriculum, made when it is first used: until then a script may give functions for custom schedules."""

    state_is_global = True

    def __init__(self, curriculum: Curriculum, dataset: Any, *, batch: int, micro_batch: int, seed: int) -> None:
        self._arguments = (curriculum, dataset)
        self._options: dict[str, Any] = {"batch": batch, "micro_batch": micro_batch, "seed": seed}
        self._schedules: dict[str, Function] = {}
        self._made: CurriculumSampler | None = None
        if not any(isinstance(metric.schedule, Custom) for metric in curriculum.metrics.values()):
            _ = self.sampler

    @property
    def sampler(self) -> CurriculumSampler:
        if self._made is None:
            self._made = sampler_of(*self._arguments, **self._options, schedules=self._schedules)
        return self._made

    def set_schedules(self, functions: Mapping[str, Function]) -> None:
        """Give the functions of custom schedules, by metric.

        Raises:
            zeropp.ConfigError: batches were drawn already, or a metric's schedule is not custom.
        """
        for name in functions:
            metric = self._arguments[0].metrics.get(name)
            if metric is None or not isinstance(metric.schedule, Custom):
                raise ConfigError(f"{_METRICS}: {shown(name)} has no schedule_type 'custom', and gets no function")
        if self._made is not None:
            raise ConfigError(
                "set_custom_curriculum_learning_schedule: batches were drawn already; call it before the first one"
            )
        self._schedules.update(functions)

    def difficulties(self, step: int) -> dict[str, float]:
        """Return the value of each metric's schedule at a step, counted from 0."""
        given = {name: FromOne(function) for name, function in self._schedules.items()}
        return {name: given.get(name, metric.schedule)(step) for name, metric in self._arguments[0].metrics.items()}

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)

    def state_dict(self) -> dict[str, Any]:
        """Return where the sampler stands."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a sampler stood."""
        self.sampler.load_state_dict(state)


def _converted(folder: Path, metrics: Mapping[str, Metric], dataset: Any) -> Index:
    """Return an index out of DeepSpeed's files, made anew where these changed."""
    source = {
        name: [metric.by, _stamp(metric.samples_path), _stamp(metric.values_path)] for name, metric in metrics.items()
    }
    about = {"deepspeed": source, "samples": len(dataset)}
    folder = folder.absolute()
    partial = folder.with_name(f".{folder.name}.partial")
    with locked(partial):
        with contextlib.suppress(CheckpointError):
            if (folder / MANIFEST).exists() and (index := open_index(folder)).source == about:
                disk.remove_tree(partial)
                return index
        values = {}
        for name, metric in metrics.items():
            by_value = metric.values_path if metric.by == "value" else None
            values[name] = values_of_samples(str(metric.samples_path), by_value, len(dataset))
        made = write_index(
            folder, values, len(dataset), fingerprint=fingerprint_of(dataset), source=about, work=partial / "index"
        )
        disk.remove_tree(partial)
        return made


def _stamp(prefix: str | None) -> list[Any]:
    """Return what changes when a pair of files does."""
    with contextlib.suppress(OSError):
        found = Path(f"{prefix}.bin").stat()
        return [prefix, found.st_size, found.st_mtime_ns]
    return [prefix]
