# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ``dynamic_batching``: loaders of micro-batches with at most so many tokens, and rates that follow their samples.

DeepSpeed's engine does nothing with the section: a script calls the function here, and gives the engine what it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from zeropp.config.deepspeed_efficiency import SAMPLING
from zeropp.data.indexed import read_rows
from zeropp.data.token_batches import TokenBatchSampler
from zeropp.deepspeed.data_analyzer import DataAnalyzer
from zeropp.errors import ConfigError

_PATH = f"{SAMPLING}.dynamic_batching"


class Lists(Dataset[Any]):
    """A dataset whose items are the samples of one list of a pass."""

    def __init__(self, dataset: Any, lists: Sequence[Sequence[int]]) -> None:
        self.dataset, self.lists = dataset, lists

    def __len__(self) -> int:
        return len(self.lists)

    def __getitem__(self, number: int) -> list[Any]:
        return [self.dataset[sample] for sample in self.lists[number]]


class Share(Sampler[int]):
    """The lists of one rank, in order."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)


class Joined:
    """A function that makes one batch of the samples of several lists."""

    def __init__(self, collate: Callable[[list[Any]], Any] | None) -> None:
        self.collate = collate

    def __call__(self, lists: list[list[Any]]) -> Any:
        samples = [sample for one in lists for sample in one]
        return samples if self.collate is None else self.collate(samples)


class VariableBatchSizeLR:
    """A scheduler of learning rates that scales those of another one, or constant ones, by the samples of each step.

    Args:
        inner: a scheduler, or an optimizer whose rates stay.
        sampler: has the factor of each step.
    """

    def __init__(self, inner: Any, sampler: TokenBatchSampler) -> None:
        self.base_lr_scheduler = None if isinstance(inner, torch.optim.Optimizer) else inner
        self.optimizer = inner if self.base_lr_scheduler is None else inner.optimizer
        self._factor, self.last_epoch = sampler.lr_factor, 0
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self._scale()

    def _scale(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * self._factor(self.last_epoch)

    def step(self, *arguments: Any, **keywords: Any) -> None:
        """Go on to the next step."""
        if self.base_lr_scheduler is not None:
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate
            self.base_lr_scheduler.step(*arguments, **keywords)
            self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self.last_epoch += 1
        self._scale()

    def get_lr(self) -> list[float]:
        """Return the rates that the next step has."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_last_lr(self) -> list[float]:
        """Return the rates before they are scaled, as DeepSpeed's class does."""
        return list(self._rates)

    def state_dict(self) -> dict[str, Any]:
        inner = None if self.base_lr_scheduler is None else self.base_lr_scheduler.state_dict()
        return {"base_lr_scheduler": inner, "rates": list(self._rates), "last_epoch": self.last_epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a scheduler over the same batches stood."""
        if self.base_lr_scheduler is not None:
            self.base_lr_scheduler.load_state_dict(state["base_lr_scheduler"])
        self._rates, self.last_epoch = list(state["rates"]), state["last_epoch"]
        self._scale()


def get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
    dataset: Any,
    engine: Any,
    dataset_seqlens: Any = None,
    dataset_filter_ids: Sequence[int] | None = None,
    dataloader_collate_fn: Callable[[list[Any]], Any] | None = None,
    sample_padding_fn: Any = None,
    batch_seqlens_fn: Callable[[Any], Any] | None = None,
) -> tuple[DataLoader[Any], VariableBatchSizeLR, dict[str, Any]]:
    """Return (loader, scheduler, arguments for ``engine.deepspeed_io``) by the section ``dynamic_batching``.

    A step has ``train_batch_size`` lists of at most ``max_tokens`` tokens, and a rank's batch joins
    ``train_micro_batch_size_per_gpu`` of them.

    Args:
        dataset: of samples.
        engine: of ``initialize``; its file has the section.
        dataset_seqlens: tokens of each sample; None: ``metrics_path/seqlen/seqlen_sample_to_metric``.
        dataset_filter_ids: the samples that are used; None: all.
        dataloader_collate_fn: makes a batch of samples; None: a batch is the list of them.
        sample_padding_fn: for pipelines, which zeropp has not; not called.
        batch_seqlens_fn: of a batch, tokens of each sample: writes the file where it is missing.

    Raises:
        zeropp.ConfigError: the section is missing or off, a value is not allowed, or nothing tells the lengths.
    """
    keys = _section(engine)
    lengths = (
        dataset_seqlens
        if dataset_seqlens is not None
        else _lengths(keys, dataset, dataloader_collate_fn, batch_seqlens_fn)
    )
    lengths = torch.as_tensor(lengths).reshape(-1)
    if len(lengths) != len(dataset):
        raise ConfigError(
            f"{_PATH}: lengths of {len(lengths)} samples, and the dataset has {len(dataset)}; remove metrics_path and analyse again"
        )
    numbers = torch.arange(len(dataset)) if dataset_filter_ids is None else torch.as_tensor(dataset_filter_ids)
    lists, micro = engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()
    sampler = TokenBatchSampler(
        lengths[numbers], max_tokens=keys["max_tokens"], micro_batches=lists, min_batch=keys.get("min_batch_size", 1),
        max_batch=keys.get("max_batch_size"), order=keys.get("sequence_picking_order", "dataloader"),
        scaling=str(keys.get("lr_scaling_method", "linear")).lower(), seed=engine.config["data_efficiency"].get("seed", 1234),
    )  # fmt: skip
    steps = range(sampler.steps_a_pass)
    everyone = Lists(dataset, [numbers[one].tolist() for step in steps for one in sampler.of_step(step)])
    share = Share([step * lists + place for step in steps for place in sampler.places])
    workers = engine.config["data_efficiency"]["data_sampling"].get("num_workers", 0)
    joined = Joined(dataloader_collate_fn)
    loader = DataLoader(everyone, micro, sampler=share, collate_fn=joined, num_workers=workers)
    arguments = {
        "dataset": everyone, "batch_size": micro, "pin_memory": False, "data_sampler": share, "collate_fn": joined,
        "num_local_io_workers": workers,
    }  # fmt: skip
    return loader, VariableBatchSizeLR(engine.lr_scheduler or engine.optimizer, sampler), arguments


def _section(engine: Any) -> Mapping[str, Any]:
    found = engine.config.get("data_efficiency", {}).get("data_sampling", {}).get("dynamic_batching", {})
    if found.get("enabled") is not True:
        raise ConfigError(f"{_PATH}: is missing, or not enabled; wanted enabled, max_tokens and so on")
    keys: Mapping[str, Any] = found
    return keys


def _lengths(
    keys: Mapping[str, Any],
    dataset: Any,
    collate: Callable[[list[Any]], Any] | None,
    batch_seqlens_fn: Callable[[Any], Any] | None,
) -> torch.Tensor:
    folder = keys.get("metrics_path")
    if not isinstance(folder, str):
        raise ConfigError(
            f"{_PATH}.metrics_path: {folder!r} is not allowed; wanted a folder, or dataset_seqlens in the call"
        )
    prefix = Path(folder) / "seqlen" / "seqlen_sample_to_metric"
    if not prefix.with_name(prefix.name + ".idx").exists():
        if batch_seqlens_fn is None:
            raise ConfigError(f"{prefix}.idx: is missing; give dataset_seqlens, or batch_seqlens_fn, which writes it")
        DataAnalyzer(
            dataset, batch_size=1024, metric_names=["seqlen"], metric_functions=[batch_seqlens_fn],
            metric_types=["single_value_per_sample"], save_path=folder, collate_fn=collate, worker_id=_rank(),
        ).run_map_reduce()  # fmt: skip
    return read_rows(prefix)[1]


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
