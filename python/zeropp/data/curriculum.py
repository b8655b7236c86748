# SPDX-License-Identifier: Apache-2.0
"""Curriculum sampling: from easy samples to all of them (Li et al. 2022, "DeepSpeed Data Efficiency", arXiv:2212.03597).

At each step the samples are admissible whose difficulty is within the step's bound in every metric. A batch is drawn at random
from them, and no sample comes again before every admissible one came (csrc/ops/draw). The order of the whole run is one
mapped file of 4 bytes a draw. So a batch is a slice of it, a resumed run needs its step alone, and ranks read the same file:
nothing is drawn by one rank for the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

from zeropp import _C, elastic
from zeropp.config.deepspeed_efficiency import FixedRoot
from zeropp.config.efficiency import Growth, Schedule, Steps
from zeropp.data.index import Index, locked, open_index
from zeropp.errors import ConfigError, what_it_is
from zeropp.files.disk import disk, storage_errors
from zeropp.files.heap_trim import byte_view

FIRST_DRAWS = 1 << 20
"""An order has so many draws at first, or one for each sample."""
_CHUNK_DRAWS = 4 << 20
_MOST_STEP = 1 << 31


@dataclass(frozen=True)
class Percentile:
    """A bound on the rank of samples: the first ``schedule(step) / of`` of them by rising difficulty, rounded up."""

    schedule: Schedule
    of: float = 100.0

    def first_steps(self, index: Index, metric: str, bounds: Tensor) -> Tensor:
        """Return the first step at which each sample is admissible, int32; ``len(bounds)`` where there is none."""
        if float(bounds[-1]) > self.of or float(bounds[0]) < 0:
            raise ConfigError(
                f"CurriculumSampler: metric '{metric}' reaches the percentile {float(bounds[-1]):g} from {float(bounds[0]):g}; wanted 0 to "
                f"{self.of:g}. For a bound on the metric's value: zeropp.data.Value(schedule)"
            )
        admitted = torch.ceil(bounds * index.samples / self.of).to(torch.int64).clamp(max=index.samples)
        by_rank = torch.searchsorted(admitted, torch.arange(index.samples), right=True, out_int32=True)
        result = torch.empty_like(by_rank)
        result[index.order(metric).to(torch.int64)] = by_rank
        return result


@dataclass(frozen=True)
class Value:
    """A bound on the metric itself: samples whose value is at most ``schedule(step)``."""

    schedule: Schedule

    def first_steps(self, index: Index, metric: str, bounds: Tensor) -> Tensor:
        """Return the first step at which each sample is admissible, int32; ``len(bounds)`` where there is none."""
        return torch.searchsorted(bounds, index.values(metric), out_int32=True)


class CurriculumSampler(Sampler[list[int]]):
    """Batches of sample numbers whose difficulty grows: a ``batch_sampler`` for torch's DataLoader.

        index = zeropp.data.analyse(dataset, {"rarity": "vocab_rarity"}, "index")
        sampler = zeropp.data.CurriculumSampler("index", {"rarity": zeropp.Growth(1, 100, steps=10_000)}, batch=256)
        loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler)

    Args:
        index: folder that :func:`zeropp.data.analyse` wrote, or what that returned.
        metrics: by name, the bound at each step, counted from 0: a :class:`Percentile`, a :class:`Value`, or a schedule
            (``zeropp.Growth``, or any function of the step), which is a percentile. Bounds must not shrink. A sample is
            admissible where it is within the bounds of all metrics. No metric: all samples are admissible.
        batch: samples a step, over all ranks.
        micro_batch: the most samples in one list; None: a rank's samples of a step are one list. ``micro_batches`` has their
            weights (:func:`zeropp.elastic.share`).
        seed: of the order.
        steps: of the run; the sampler ends there. None: it has no end. The file grows by doubling as steps are asked for.
        step: the first step that it gives; a resumed run gives the step at which it goes on.
        dataset: compared with the one that was analysed.
        order_path: folder of the order's file; default ``orders`` in the index.
        rank, ranks: default: of the process group, or 0 and 1 without one. Accelerate and Trainer share the lists of a batch sampler
            themselves: there give 0 and 1, and ``micro_batch``, on every rank.

    Attributes:
        step: of the next list; may be set.

    ``iter(sampler)`` goes on where the sampler stands. A DataLoader with workers asks ahead: after an interruption set
    ``step``, or use torchdata's StatefulDataLoader, which restores the sampler's state.

    Raises:
        zeropp.ConfigError: an argument that is not allowed, another dataset, ranks whose orders would differ (both are
            named), bounds that shrink, or a first bound that admits no sample. CheckpointError: a damaged index.
        zeropp.TierError: the order cannot be written.

    Cost: the order is made once, about 0.1 us a draw, and 24 bytes of memory a sample then. A batch afterwards: microseconds.
    """

    state_is_global = True
    """A checkpoint of any number of ranks restores it."""

    def __init__(
        self,
        index: str | os.PathLike[str] | Index,
        metrics: Mapping[str, Percentile | Value | Schedule],
        *,
        batch: int,
        micro_batch: int | None = None,
        seed: int = 1234,
        steps: int | None = None,
        step: int = 0,
        dataset: Any = None,
        order_path: str | os.PathLike[str] | None = None,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        self.index = index if isinstance(index, Index) else open_index(index)
        _check_counts(batch, micro_batch, seed, steps, step)
        self.batch, self.seed, self.steps = batch, seed, steps
        self._bounds = {name: _bound(name, one) for name, one in metrics.items()}
        if dataset is not None:
            self.index.check_dataset(dataset)
        self.micro_batches = elastic.share(batch, micro_batch or batch, rank=rank, ranks=ranks)
        self.batch_size, self.drop_last = len(self.micro_batches[0].sequences), True  # what Accelerate reads
        self._parts = [(one.sequences.start, one.sequences.stop) for one in self.micro_batches]
        folder = Path(order_path) if order_path is not None else self.index.path / "orders"
        self._file = folder / f"{self._key()}.order"
        if rank is None:
            self._check_ranks()
        self._order = torch.empty(0, dtype=torch.int32)
        self._steps_made = 0
        self._step, self._micro = step, 0
        if steps is None or step < steps:
            self._need(step)

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        step = self._step
        if self.steps is not None and step >= self.steps:
            raise StopIteration
        if step >= self._steps_made:
            self._need(step)
        begin, end = self._parts[self._micro]
        at = step * self.batch
        self._micro += 1
        if self._micro == len(self._parts):
            self._step, self._micro = step + 1, 0
        samples: list[int] = self._order[at + begin : at + end].tolist()
        return samples

    def __len__(self) -> int:
        """Return the lists that are left; TypeError without ``steps``."""
        if self.steps is None:
            raise TypeError("a CurriculumSampler without steps= has no end; give it the steps of the run")
        return max(0, self.steps - self._step) * len(self._parts) - self._micro

    @property
    def step(self) -> int:
        return self._step

    @step.setter
    def step(self, value: int) -> None:
        _check_whole("step", value, 0)
        self._step, self._micro = value, 0

    def of_step(self, step: int) -> list[int]:
        """Return the whole batch of a step, of all ranks."""
        if step >= self._steps_made:
            self._need(step)
        samples: list[int] = self._order[step * self.batch : (step + 1) * self.batch].tolist()
        return samples

    def state_dict(self) -> dict[str, Any]:
        """Return where the sampler stands."""
        return {"step": self._step, "micro": self._micro, "order": self._file.stem, "micro_batches": len(self._parts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a sampler with the same index, bounds, batch and seed stood.

        Raises:
            zeropp.ConfigError: the order is another one, or the state is inside a step that other micro-batches made.
        """
        if state["order"] != self._file.stem:
            raise ConfigError(
                f"CurriculumSampler: the state is of the order {state['order']}, this sampler has {self._file.stem}: index, metrics, "
                "batch and seed must be those of the saved run; to begin another order set step"
            )
        if state["micro"] and state["micro_batches"] != len(self._parts):
            raise ConfigError(
                f"CurriculumSampler: the state is inside step {state['step']}, of {state['micro_batches']} micro-batches, and this "
                f"sampler makes {len(self._parts)}; save between steps, or set step"
            )
        self._step, self._micro = state["step"], state["micro"]

    # -- the order ----------------------------------------------------------------------------------------------------------------

    def _key(self) -> str:
        """Return a name for the order: a hash of all that it depends on. Schedules count by their text and by samples of them."""
        last = self.steps - 1 if self.steps is not None else _MOST_STEP
        probes = [*range(16), *(1 << bit for bit in range(5, 32))]
        about = {
            "index": self.index.digest,
            "batch": self.batch,
            "seed": self.seed,
            "metrics": {
                name: [type(one).__name__, getattr(one, "of", 0.0), _text(one.schedule)]
                + [_difficulty(name, one.schedule, step) for step in probes if step <= last]
                for name, one in self._bounds.items()
            },
        }
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]

    def _check_ranks(self) -> None:
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        mine = (self._file.stem, str(self.index.path), self.index.digest[:16])
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        for rank, (key, path, digest) in enumerate(every):
            if digest != every[0][2]:
                raise ConfigError(
                    f"CurriculumSampler: ranks have different indexes: rank {rank} has {path} ({digest}), rank 0 has {every[0][1]} "
                    f"({every[0][2]}); analyse the dataset once, and give all ranks that folder or a copy of it"
                )
            if key != every[0][0]:
                raise ConfigError(
                    f"CurriculumSampler: rank {rank} would draw another order than rank 0, from equal indexes ({path}); give all ranks "
                    "the same metrics, schedules, batch and seed"
                )

    def _need(self, step: int) -> None:
        """Have an order that reaches beyond a step: map the file, and make it first where it is missing or shorter."""
        wanted = -(-max(FIRST_DRAWS, self.index.samples) // self.batch)
        while wanted <= step:
            wanted *= 2
        wanted = min(wanted, self.steps or wanted)
        if not self._map(step):
            with locked(self._file.parent):
                if not self._map(step):
                    self._make(wanted)
                    self._map(step)

    def _map(self, step: int) -> bool:
        try:
            steps = self._file.stat().st_size // (4 * self.batch)
        except FileNotFoundError:
            return False
        if steps <= step:
            return False
        self._order = torch.from_file(str(self._file), shared=False, size=steps * self.batch, dtype=torch.int32)
        self._steps_made = steps
        return True

    def _make(self, steps: int) -> None:
        """Write the order of the first ``steps`` steps. A longer one begins with the same draws."""
        pool, admitted = self._admission(steps)
        state = torch.tensor([self.seed & ((1 << 63) - 1), 0, 0])
        new = self._file.with_name(f".{self._file.stem}.new")  # the lock keeps others from it; it may be a killed run's
        a_time = max(1, _CHUNK_DRAWS // self.batch)
        order = torch.empty(min(a_time, steps) * self.batch, dtype=torch.int32)
        try:
            with storage_errors(self._file, 4 * steps * self.batch):
                descriptor = disk.create(new)
                try:
                    disk.reserve(descriptor, 4 * steps * self.batch)
                    for first in range(0, steps, a_time):
                        count = min(a_time, steps - first)
                        part = admitted[first : first + count]
                        _C.draw_order(
                            pool.data_ptr(),
                            len(pool),
                            state.data_ptr(),
                            part.data_ptr(),
                            count,
                            self.batch,
                            order.data_ptr(),
                        )
                        disk.write(descriptor, byte_view(order[: count * self.batch]), 4 * first * self.batch)
                    disk.sync(descriptor)
                finally:
                    os.close(descriptor)
                disk.rename(new, self._file)
                disk.sync_folder(self._file.parent)
        finally:
            with contextlib.suppress(OSError):
                disk.remove_tree(new)

    def _admission(self, steps: int) -> tuple[Tensor, Tensor]:
        """Return (samples in the order of their admission, int32; how many are admitted at each step, int64)."""
        first = torch.zeros(self.index.samples, dtype=torch.int32)
        alone = {}
        for name, one in self._bounds.items():
            by_step = [_difficulty(name, one.schedule, step) for step in range(_steps_of(one.schedule, steps))]
            bounds = torch.tensor(by_step, dtype=torch.float64)
            _check_growth(name, bounds)
            mine = one.first_steps(self.index, name, bounds)
            mine[mine == len(bounds)] = steps  # no bound of this run admits the sample
            alone[name] = int((mine == 0).sum())
            first = torch.maximum(first, mine)
        admitted = torch.bincount(first, minlength=steps)[:steps].cumsum(0)
        if int(admitted[0]) == 0:
            by_metric = ", ".join(f"'{name}' {count:,}" for name, count in alone.items())
            raise ConfigError(
                f"CurriculumSampler: no sample of {self.index.samples:,} is admissible at step 0; alone the metrics admit {by_metric}; "
                "begin with a higher bound"
            )
        return torch.argsort(first, stable=True).to(torch.int32), admitted


def _check_counts(batch: int, micro_batch: int | None, seed: int, steps: int | None, step: int) -> None:
    wanted = {"batch": (batch, 1), "seed": (seed, 0), "step": (step, 0)}
    if steps is not None:
        wanted["steps"] = (steps, 1)
    if micro_batch is not None:
        wanted["micro_batch"] = (micro_batch, 1)
    for name, (value, least) in wanted.items():
        _check_whole(name, value, least)


def _check_whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"CurriculumSampler: {name} {value!r} is not allowed; wanted a whole number >= {least}")


def _bound(name: str, said: Any) -> Percentile | Value:
    if isinstance(said, (Percentile, Value)):
        return said
    if not callable(said):
        raise ConfigError(
            f"CurriculumSampler: metric '{name}' is {what_it_is(said)}; wanted zeropp.Growth, a function of the step, or "
            "zeropp.data.Value or Percentile of one"
        )
    return Percentile(said)


def _difficulty(name: str, schedule: Schedule, step: int) -> float:
    found = float(schedule(step))
    if found != found:
        raise ConfigError(f"CurriculumSampler: the bound of metric '{name}' is NaN at step {step}; wanted a number")
    return found


def _check_growth(name: str, bounds: Tensor) -> None:
    shrinks = (bounds[1:] < bounds[:-1]).nonzero()
    if len(shrinks):
        step = int(shrinks[0]) + 1
        raise ConfigError(
            f"CurriculumSampler: the bound of metric '{name}' shrinks from {float(bounds[step - 1]):g} to {float(bounds[step]):g} at step "
            f"{step}; wanted one that never shrinks"
        )


def _steps_of(schedule: Schedule, steps: int) -> int:
    """Return how many steps of a schedule are evaluated: after its last step a Growth stays."""
    if isinstance(schedule, Steps):
        return min(steps, schedule.values[-1][0] + 1)
    return min(steps, schedule.steps + 1) if isinstance(schedule, (Growth, FixedRoot)) else steps


def _text(schedule: Schedule) -> str:
    """Describe a schedule: a dataclass by its fields, a function by its source."""
    if hasattr(schedule, "__dataclass_fields__"):
        return repr(schedule)
    try:
        return inspect.getsource(schedule)
    except (OSError, TypeError):
        return getattr(schedule, "__qualname__", type(schedule).__name__)
