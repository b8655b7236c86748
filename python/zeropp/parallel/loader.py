# SPDX-License-Identifier: Apache-2.0
"""Batches for ranks that share each sequence, as Arctic long-sequence training does (ALST, arXiv 2506.13996).

The ranks of sp take one batch and cut its tokens. What depends on a token's neighbours is made before the cut: labels are shifted, and
tokens get their positions. A rank's loss is (its sum) * N * A / (all tokens of the step), with N ranks of the job and A micro-batches, so
that the mean over ranks and micro-batches, which ZeRO takes, is the mean over the tokens of the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from zeropp import _C
from zeropp.comm.group import DTYPE_CODES, OP_CODES, communicator
from zeropp.comm.heads import Cut, gather_tokens
from zeropp.errors import ConfigError

IGNORED = -100
"""The label of a token that does not count."""
_SAME_BATCH = ("sp", "cp", "tp", "tensor_parallel", "pp")
"""Dimensions of a mesh whose ranks work on one batch."""


class Place(Protocol):
    """This rank's number among the ranks that share a sequence."""

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...


class Sharing(Place, Protocol):
    """Ranks that share sequences: a handle of :func:`zeropp.parallel.ulysses`."""

    group: Any
    mesh: Any
    core: Any


def shift(labels: Tensor) -> Tensor:
    """Return what each token of whole sequences is to predict, (batch, tokens): the next one's label."""
    return nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def shard(handle: Sharing, batches: Sequence[Any], accumulate: int | None = None) -> list[dict[str, Any]]:
    """Return this rank's parts of the micro-batches of a step. Collective over the job.

    Args:
        handle: of :func:`zeropp.parallel.ulysses`.
        batches: each a mapping with ``input_ids`` or ``inputs_embeds``, (batch, tokens, ...), the same on every rank of the handle's
            group; other tensors of as many tokens are cut, too.
        accumulate: over how many micro-steps ZeRO takes the mean; None: so many as there are batches.

    Returns:
        The parts, with ``position_ids``; and where there are labels with ``shift_labels``, ``labels`` (the same), and
        ``num_items_in_batch``, by which a model divides its sum.

    Raises:
        zeropp.ConfigError: the ranks of the group have different batches, or a sequence has fewer tokens than there are ranks.
    """
    _check_same(handle, batches)
    parts = [part_of(handle, batch) for batch in batches]
    counts = torch.tensor([sum(int((one["shift_labels"] != IGNORED).sum()) for one in parts if "shift_labels" in one)])
    if any("shift_labels" in one for one in parts):
        communicator().all_reduce(counts.data_ptr(), 1, DTYPE_CODES[torch.int64], OP_CODES["sum"])
        micro_steps = len(parts) if accumulate is None else accumulate
        for one in parts:
            one["num_items_in_batch"] = max(int(counts), 1) / (dist.get_world_size() * micro_steps)
    return parts


def _tokens_of(batch: Mapping[str, Any]) -> Tensor:
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(batch.get(name), Tensor):
            return batch[name]  # type: ignore[no-any-return]
    raise ConfigError(f"ulysses: a batch of {sorted(batch)}; wanted input_ids or inputs_embeds")


def part_of(handle: Place, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a batch that is this rank's, with shifted labels and with positions; no rank asks another."""
    tokens = _tokens_of(batch)
    rows, length = tokens.shape[:2]
    if length < handle.ranks:
        raise ConfigError(
            f"ulysses: a sequence of {length} tokens for {handle.ranks} ranks; wanted one for each rank at least: pad it, or lower sp"
        )
    whole = dict(batch)
    if whole.get("position_ids") is None:
        whole["position_ids"] = torch.arange(length, device=tokens.device).expand(rows, -1)
    if whole.get("shift_labels") is None and whole.get("labels") is not None:
        whole["shift_labels"] = shift(whole["labels"])
    if whole.get("shift_labels") is not None:
        whole["labels"] = whole["shift_labels"]
    part = slice(length * handle.rank // handle.ranks, length * (handle.rank + 1) // handle.ranks)
    is_cut = {
        name: isinstance(one, Tensor) and one.dim() >= 2 and one.shape[1] == length for name, one in whole.items()
    }
    return {name: one[:, part].contiguous() if is_cut[name] else one for name, one in whole.items()}


def _check_same(handle: Sharing, batches: Sequence[Any]) -> None:
    """Compare the batches of the ranks of the group."""
    found = [[len(batches), 0, 0]]
    for batch in batches:
        tokens = _tokens_of(batch).detach()
        data = tokens.to("cpu").contiguous().view(torch.uint8)
        found.append([*tokens.shape[:2], int(_C.crc32(data.data_ptr(), data.numel()))])
    width = 3 * len(found)
    lengths = gather_tokens(Cut(handle.group, (1,) * handle.ranks, handle.core), torch.tensor([[width]]))[0].tolist()
    rows = gather_tokens(
        Cut(handle.group, tuple(lengths), handle.core), torch.tensor([list(itertools.chain(*found))])
    )[0].split(lengths)  # fmt: skip
    ranks = dist.get_process_group_ranks(handle.group)
    for rank, row in enumerate(rows):
        if not torch.equal(row, rows[0]):
            raise ConfigError(
                f"ulysses: rank {ranks[rank]} and rank {ranks[0]} of the job share their sequences, but have different batches; wanted one batch "
                "on all ranks of sp: sample over the data ranks alone, as handle.loader(loader) does, with one seed"
            )


def data_place(handle: Sharing) -> tuple[int, int]:
    """Return which of the job's different batches this rank works on, and how many there are."""
    root = handle.mesh._get_root_mesh() if isinstance(handle.mesh, dist.device_mesh.DeviceMesh) else None
    if root is not None and root.mesh_dim_names is not None and root.ndim > 1:
        place, count = 0, 1
        for at, name in enumerate(root.mesh_dim_names):
            if name not in _SAME_BATCH:
                place, count = place * root.size(at) + root.get_local_rank(at), count * root.size(at)
        return place, count
    first = min(dist.get_process_group_ranks(handle.group))
    world = Cut(dist.group.WORLD, (1,) * dist.get_world_size())
    firsts = sorted(set(gather_tokens(world, torch.tensor([[first]]))[0].tolist()))
    return firsts.index(first), len(firsts)


class SequenceLoader:
    """A loader whose batches are this rank's parts of what another loader gives.

    A torch DataLoader over a dataset with a length is made anew with a sampler over the data coordinates, because one that samples over all
    ranks would give each rank of sp a sequence of its own. A loader of another kind has to give all ranks of sp the same batches.

    Args:
        handle: of :func:`zeropp.parallel.ulysses`.
        loader: gives mappings; see :func:`shard`.
        accumulate: as in ``Config(accumulate=)``; losses are weighted over so many batches.
    """

    def __init__(self, handle: Sharing, loader: Any, accumulate: int = 1) -> None:
        if accumulate < 1:
            raise ConfigError(f"ulysses: accumulate is {accumulate}; wanted 1 or more")
        self.handle, self.accumulate = handle, accumulate
        self.sampler: Any = None
        self.loader = self._sampled(loader)
        self._epoch = 0

    def _sampled(self, loader: Any) -> Any:
        if (
            not isinstance(loader, DataLoader)
            or isinstance(loader.dataset, IterableDataset)
            or loader.batch_size is None
        ):
            return loader
        place, count = data_place(self.handle)
        theirs = loader.sampler
        if isinstance(theirs, DistributedSampler):
            if theirs.num_replicas == count and theirs.rank == place:
                return loader
            how: dict[str, Any] = {"shuffle": theirs.shuffle, "seed": theirs.seed, "drop_last": theirs.drop_last}
        elif type(theirs) in (RandomSampler, SequentialSampler):
            how = {"shuffle": isinstance(theirs, RandomSampler), "seed": 0, "drop_last": loader.drop_last}
        elif count == 1:
            return loader
        else:
            raise ConfigError(
                f"ulysses: the loader samples with {type(theirs).__name__}, which cannot be shared out over {count} data coordinates; wanted "
                "torch's RandomSampler, SequentialSampler or DistributedSampler"
            )
        self.sampler = DistributedSampler(loader.dataset, num_replicas=count, rank=place, **how)
        names = ("num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn", "prefetch_factor",
                 "persistent_workers", "batch_size")  # fmt: skip
        kept = {name: getattr(loader, name) for name in names}
        return DataLoader(loader.dataset, sampler=self.sampler, **kept)

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of this epoch; without a call each pass over the loader is the next one."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self.sampler is not None:
            self.sampler.set_epoch(self._epoch)
        elif hasattr(getattr(self.loader, "sampler", None), "set_epoch"):
            self.loader.sampler.set_epoch(self._epoch)
        self._epoch += 1
        batches = iter(self.loader)
        while step := list(itertools.islice(batches, self.accumulate)):
            yield from shard(self.handle, step, self.accumulate)
