# SPDX-License-Identifier: Apache-2.0
"""DTensors as parameters: units lie over their local tensors, gradients come to the parameter's placement, and what is not
cut over the mesh is one value on all of its ranks. Parts of experts (part.py) are cut over the mesh as well.

A unit holds either DTensors that are cut over the mesh, or DTensors that are whole on each of its ranks, or plain
parameters. The last two are copies: the ranks of the mesh hold the same values, and one of them counts in the norm.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from zeropp.comm.collective import exchange
from zeropp.comm.job import JobRanks, sub_communicator
from zeropp.errors import ConfigError
from zeropp.files.heap_trim import byte_view
from zeropp.zero.model.boxes import Box, Boxes
from zeropp.zero.model.init import is_sharded, own_shard
from zeropp.zero.model.parameter import is_dtensor, local_of
from zeropp.zero.model.part import parts_of, shown
from zeropp.zero.model.units import UnitPlan, kind_of

COPIES = (0, 2)
"""Kinds of parameters that are equal on all ranks of the mesh."""


def mesh_of(named: Iterable[tuple[str, torch.Tensor]], ranks: JobRanks) -> Any:
    """Return the mesh of the DTensors among parameters; None: there are none.

    Raises:
        zeropp.ConfigError: a DTensor that cannot be a parameter of a unit, or that is cut over ranks which ``prepare`` takes
            for data ranks; names the parameter and the way out.
    """
    found: Any = None
    for name, parameter in named:
        if not is_dtensor(parameter):
            continue
        problem = _problem_of(parameter, found)
        if problem:
            raise ConfigError(f"prepare: parameter '{name}' is a DTensor {problem}")
        if found is None:
            found = parameter.device_mesh  # type: ignore[attr-defined]
            _check_ranks(name, ranks_of(found), ranks)
    return found


def _problem_of(parameter: Any, mesh: Any) -> str:
    rows = (
        (parameter.device_mesh.ndim != 1, "over a mesh of several dimensions; give its module one dimension, such as mesh['tp']"),
        (mesh is not None and parameter.device_mesh != mesh, "over another mesh than the DTensors before it; use one mesh"),
        (parameter._spec.placements[0].is_partial(), "that is Partial; redistribute it to Shard or Replicate"),
        (parameter.is_complex(), "of complex numbers, which is not supported; hold it as pairs of real numbers"),
        (parameter.is_meta, "on meta, where nothing draws its values; build the model on the CPU, then cut it"),
    )  # fmt: skip
    return next((words for wrong, words in rows if wrong), "")


def _check_ranks(name: str, members: list[int], ranks: JobRanks) -> None:
    data = [] if ranks.data is None else list(ranks.data.job_ranks)
    shared = sorted(set(members) & set(data))
    if len(members) > 1 and (len(shared) > 1 or ranks.job is None):
        raise ConfigError(
            f"prepare: parameter '{name}' is a DTensor over ranks {members}, and ZeRO would cut it over ranks {data} as well; give "
            "prepare the mesh of the job, prepare(..., mesh=mesh), whose data dimensions are then those of ZeRO"
        )


def ranks_of(mesh: Any) -> list[int]:
    """Return the ranks of a mesh of one dimension, as the job numbers them."""
    return [int(rank) for rank in mesh.mesh.flatten().tolist()]


def boxes_of_dtensor(parameter: Any) -> Boxes | None:
    """Return which boxes of the whole tensor a DTensor's local tensor is; None: all of it.

    torch's own placement cuts a range of indices, so that uneven shards and ``_StridedShard`` need no other case.
    """
    placement, mesh = parameter._spec.placements[0], parameter.device_mesh
    whole, shape = tuple(parameter.shape), tuple(parameter._local_tensor.shape)
    if not placement.is_shard():
        strided = getattr(placement, "dim", None)
        if strided is None:
            return None
    dim = placement.dim % len(whole)
    indices = torch.arange(whole[dim], device="cpu")
    cut = type(placement)(0, **_split(placement))
    parts, _ = cut._split_tensor(indices, mesh.size(), with_padding=False, contiguous=True)
    mine = parts[mesh.get_local_rank()].tolist()
    if len(mine) != shape[dim]:
        raise ConfigError(
            f"prepare: a DTensor of shape {whole} has a local tensor of shape {shape}, where {placement} cuts dimension {dim} to "
            f"{len(mine)}; cut it with distribute_tensor"
        )

    def box(first: int, at: int, count: int) -> Box:
        offset = tuple(first if d == dim else 0 for d in range(len(whole)))
        size = tuple(count if d == dim else n for d, n in enumerate(whole))
        return Box(offset, size, tuple(at if d == dim else 0 for d in range(len(whole))))

    found = tuple(box(first, at, count) for first, at, count in _runs(mine)) if math.prod(shape) else ()
    return Boxes(whole, shape, found)


def _split(placement: Any) -> dict[str, int]:
    factor = getattr(placement, "split_factor", None)
    return {} if factor is None else {"split_factor": factor}


def _runs(indices: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (first index, its place, how many) of indices that follow each other."""
    begin = 0
    for at in range(1, len(indices) + 1):
        if at == len(indices) or indices[at] != indices[at - 1] + 1:
            yield indices[begin], begin, at - begin
            begin = at


def place(parameter: torch.Tensor, view: torch.Tensor) -> None:
    """Make a parameter, or the local tensor of a DTensor, a view of a unit's memory."""
    if is_dtensor(parameter):
        parameter._local_tensor = view  # type: ignore[attr-defined]
    else:
        parameter.data = view


def like(parameter: Any, local: torch.Tensor) -> torch.Tensor:
    """Return a tensor of this rank as the parameter is one: a DTensor with its placement, or the tensor itself."""
    if not is_dtensor(parameter):
        return local
    spec = parameter._spec
    base: Any = sys.modules["torch.distributed.tensor"].DTensor
    meta = spec.tensor_meta._replace(dtype=local.dtype)
    made: torch.Tensor = base(local, type(spec)(spec.mesh, spec.placements, tensor_meta=meta), requires_grad=False)
    return made


# -- copies --------------------------------------------------------------------------------------------------------------


def check_copies(plans: Sequence[UnitPlan], mesh: Any) -> None:
    """Check that parameters that are not cut are equal on all ranks of the mesh, if there is one. Collective over them.

    Raises:
        zeropp.ConfigError: names the first that differs, and the ranks.
    """
    if mesh is None:
        return
    members = ranks_of(mesh)
    every = exchange(sub_communicator(members), dict(_digests(plans)))
    for rank, one in zip(members, every, strict=True):
        name = next((name for name, digest in one.items() if every[0].get(name) != digest), None)
        if name is not None:
            raise ConfigError(
                f"prepare: plain parameter '{name}' has other values on rank {rank} than on rank {members[0]} of the same tensor-parallel "
                "mesh, and nothing says that it is a part of a larger tensor; wrap a part with DTensor.from_local(part, mesh, [Shard(dim)]), "
                "or set the same seed on all ranks for a copy"
            )


def _digests(plans: Sequence[UnitPlan]) -> Iterator[tuple[str, str]]:
    for plan in (one for one in plans if kind_of(one.params[0]) in COPIES):
        for names, parameter in zip(plan.names, map(shown, plan.params), strict=True):
            if parts_of(plan.params[0]) is not None and is_sharded(parameter):
                continue  # its ranks have parts of it, and none has values to compare
            own = own_shard(parameter) if is_sharded(parameter) else local_of(parameter.detach())
            values = own.cpu().contiguous().view(-1)
            yield names[0], f"{tuple(parameter.shape)} {hashlib.sha256(byte_view(values)).hexdigest()}"


def note_copies(units: Iterable[Any], mesh: Any) -> None:
    """Let one rank of the mesh count each copy in the norm."""
    if mesh is not None and mesh.get_local_rank() > 0:
        for unit in units:
            if kind_of(unit.params[0].param) in COPIES and parts_of(unit.params[0].param) is None:
                unit.is_copy = True
                unit.core.set_copy()
