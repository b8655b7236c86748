# SPDX-License-Identifier: Apache-2.0
"""Difficulty metrics of samples (Li et al. 2022, "DeepSpeed Data Efficiency", arXiv:2212.03597, section 3.1).

    seqlen               tokens that are no padding
    vocab_rarity         the integer part of the sum of -log p(token) over these tokens; p(token) is its share of all tokens
    seqlen_vocab_rarity  seqlen * 10^(ceil(log10(largest rarity)) + 1) + vocab_rarity

A user's metric is a function of one sample that returns a number. All are computed for many samples at a time.
"""

from __future__ import annotations

import array
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zeropp.errors import ConfigError, one_line, shown, what_it_is

NAMED = ("seqlen", "vocab_rarity", "seqlen_vocab_rarity")
_MOST_TOKEN = 1 << 24
_FEW = 128


class Batched:
    """A metric whose function takes a collated batch, as DeepSpeed's ``metric_functions`` do, and returns a value a sample."""

    def __init__(self, function: Callable[[Any], Any], collate: Callable[[list[Any]], Any], batch: int) -> None:
        self.function, self.collate, self.batch = function, collate, batch

    def values(self, samples: Sequence[Any], name: str) -> Tensor:
        parts = []
        for first in range(0, len(samples), self.batch):
            rows = list(samples[first : first + self.batch])
            made = self.collate(rows)
            if isinstance(made, Mapping) and "index" in made:
                raise ConfigError(
                    f"analyse: metric '{name}': batches with 'index', which number their samples, are not read; leave it out"
                )
            part = torch.as_tensor(self.function(made)).to(torch.float64).reshape(-1)
            if len(part) != len(rows):
                raise ConfigError(
                    f"analyse: metric '{name}' gave {len(part)} values for {len(rows)} samples; wanted one a sample"
                )
            parts.append(part)
        return torch.cat(parts)


Metric = str | Callable[[Any], float] | Batched


def columns_of(metrics: Mapping[str, Any]) -> list[str]:
    """Return what has to be computed for each sample: 'seqlen', 'vocab_rarity', and '=NAME' for a user's metric."""
    found: list[str] = []
    for name, metric in metrics.items():
        if metric == "seqlen_vocab_rarity":
            found += ["seqlen", "vocab_rarity"]
        else:
            found.append(metric if isinstance(metric, str) else f"={name}")
    return list(dict.fromkeys(found))


def check_metric(name: str, metric: Any) -> None:
    """Refuse what is neither the name of a metric nor a function.

    Raises:
        zeropp.ConfigError: as said.
    """
    if isinstance(metric, str) and metric not in NAMED:
        raise ConfigError(
            f"analyse: metric '{name}': {metric!r} is not known; wanted {', '.join(NAMED)} or a function of a sample"
        )
    if not isinstance(metric, (str, Batched)) and not callable(metric):
        raise ConfigError(
            f"analyse: metric '{name}' is {what_it_is(metric)}; wanted {', '.join(NAMED)} or a function of a sample"
        )


def samples_at_a_time(metrics: Mapping[str, Any], most: int) -> int:
    """Return how many samples to hold at a time: few, but whole batches of each function of a batch.

    Objects that live while some hundreds of others are made are what Python's garbage collector examines again and again.
    """
    batches = [metric.batch for metric in metrics.values() if isinstance(metric, Batched)]
    whole = math.lcm(*batches)
    return most if whole > most else whole * max(1, _FEW // whole)


def describe(metric: Any) -> str:
    """Return a text that changes when a metric's function changes."""
    if isinstance(metric, str):
        return metric
    if isinstance(metric, Batched):
        return f"{describe(metric.function)} of batches of {metric.batch}"
    name = f"{getattr(metric, '__module__', '')}.{getattr(metric, '__qualname__', type(metric).__name__)}"
    try:
        return f"{name}: {inspect.getsource(metric)}"
    except (OSError, TypeError):
        return name


def of_block(
    samples: Sequence[Any],
    first: int,
    metrics: Mapping[str, Any],
    columns: Sequence[str],
    information: Tensor,
    tokens: str,
) -> list[Tensor]:
    """Return each column's values of a block of samples.

    Args:
        samples: the block.
        first: the number of its first sample.
        metrics: all metrics, by name.
        columns: what to compute (:func:`columns_of`).
        information: float64 ``[tokens]``: -log p of each token; empty where no column needs it.
        tokens: the key of the tokens in samples that are mappings.
    """
    results = {}
    if {"seqlen", "vocab_rarity"} & set(columns):
        flat, lengths, counted = flat_tokens(samples, first, tokens)
        results["seqlen"] = _sums(counted.to(torch.float64), lengths)
        if "vocab_rarity" in columns:
            rarity = torch.zeros(len(flat), dtype=torch.float64)
            rarity[counted] = information[flat[counted]]  # padding may have any number, also one that was never counted
            results["vocab_rarity"] = _sums(rarity, lengths).trunc()
    for column in columns:
        if column.startswith("="):
            results[column] = _of_function(samples, first, column[1:], metrics[column[1:]])
    return [results[column] for column in columns]


def _of_function(samples: Sequence[Any], first: int, name: str, metric: Any) -> Tensor:
    if isinstance(metric, Batched):
        return metric.values(samples, name)
    values = torch.empty(len(samples), dtype=torch.float64)
    for place, sample in enumerate(samples):
        try:
            values[place] = float(metric(sample))
        except Exception as error:
            raise ConfigError(
                f"analyse: metric '{name}' of sample {first + place} raised {type(error).__name__}: {one_line(error)}; "
                "wanted a function that returns a number"
            ) from error
    return values


def flat_tokens(samples: Sequence[Any], first: int, tokens: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return (tokens of all samples one after the other, tokens in each sample, which of them are no padding)."""
    rows = [_row(sample, first + place, tokens) for place, sample in enumerate(samples)]
    flat, lengths = _flat(rows, first)
    if all(isinstance(sample, Mapping) and sample.get("attention_mask") is not None for sample in samples):
        mask, mask_lengths = _flat([sample["attention_mask"] for sample in samples], first)
        if not torch.equal(lengths, mask_lengths):
            place = int((lengths != mask_lengths).nonzero()[0])
            raise ConfigError(
                f"analyse: sample {first + place} has {int(lengths[place])} tokens, and an attention_mask of {int(mask_lengths[place])}"
            )
        return flat, lengths, mask != 0
    return flat, lengths, torch.ones(len(flat), dtype=torch.bool)


def _row(sample: Any, number: int, tokens: str) -> Any:
    if isinstance(sample, Mapping):
        if tokens not in sample:
            raise ConfigError(
                f"analyse: sample {number} has no {tokens!r}; it has {shown(list(sample))}; give tokens=, the key of the tokens"
            )
        return sample[tokens]
    return sample[0] if isinstance(sample, tuple) and sample else sample


def _flat(rows: list[Any], first: int) -> tuple[Tensor, Tensor]:
    try:
        return _flat_tensors(rows) if all(isinstance(row, Tensor) for row in rows) else _flat_lists(rows)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"analyse: samples {first} to {first + len(rows) - 1} have no rows of token numbers: {one_line(error)}; wanted samples that "
            "are mappings with 'input_ids', tensors, or lists of whole numbers, or metrics that are functions"
        ) from error


def _flat_tensors(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    shapes = [row.shape for row in rows]
    is_flat = all(len(shape) == 1 for shape in shapes)
    flat = torch.cat(rows if is_flat else [row.reshape(-1) for row in rows])
    if flat.is_floating_point():
        raise TypeError(f"values of {flat.dtype}")
    return flat.to(torch.int64), torch.tensor([shape.numel() for shape in shapes])


def _flat_lists(rows: list[Any]) -> tuple[Tensor, Tensor]:
    lists = [row.tolist() if hasattr(row, "tolist") else row for row in rows]
    flat = torch.tensor(array.array("q", itertools.chain.from_iterable(lists)), dtype=torch.int64)
    return flat, torch.tensor([len(row) for row in lists])


def _sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Return the sum of each row; the same whatever the rows beside it are."""
    return torch.segment_reduce(values, "sum", lengths=lengths, initial=0.0)


def count_tokens(samples: Sequence[Any], first: int, tokens: str) -> Tensor:
    """Return how often each token occurs in a block, int64 ``[largest token + 1]``."""
    flat, _, counted = flat_tokens(samples, first, tokens)
    kept = flat[counted]
    if len(kept) and (int(kept.min()) < 0 or int(kept.max()) >= _MOST_TOKEN):
        raise ConfigError(
            f"analyse: samples {first} to {first + len(samples) - 1} have tokens {int(kept.min())} to {int(kept.max())}; wanted 0 to "
            f"{_MOST_TOKEN - 1}: mark padding with an attention_mask"
        )
    return torch.bincount(kept)


def sum_of_counts(counts: Sequence[Tensor]) -> Tensor:
    """Return how often each token occurs, out of the counts of parts, which are as long as their largest token asks."""
    most = torch.zeros(max(map(len, counts), default=0), dtype=torch.int64)
    for one in counts:
        most[: len(one)] += one
    return most


def information_of(counts: Tensor) -> Tensor:
    """Return -log p(token), float64; a token that never occurred counts as one that occurred once."""
    total = max(1, int(counts.sum()))
    return -torch.log(counts.clamp(min=1).to(torch.float64) / total)


def finished(metric: Any, name: str, columns: Mapping[str, Tensor]) -> Tensor:
    """Return a metric's values of all samples out of the columns."""
    if not isinstance(metric, str):
        return columns[f"={name}"]
    if metric != "seqlen_vocab_rarity":
        return columns[metric]
    most = float(columns["vocab_rarity"].max())
    places = math.ceil(math.log10(most)) + 1 if most > 0 else 1
    return columns["seqlen"] * 10.0**places + columns["vocab_rarity"]
