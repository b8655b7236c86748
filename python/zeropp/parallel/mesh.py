# SPDX-License-Identifier: Apache-2.0
"""Which ranks share what, by the dimensions of a ``torch.distributed.device_mesh.DeviceMesh``.

    data dimensions     dp, dp_replicate, dp_shard, fsdp, data_parallel, cp, sp     the same parameters; ZeRO partitions them over these ranks
    model dimensions    tp, tensor_parallel, pp                                     other parameters, or other slices of them

Ranks that differ in data dimensions alone partition one model; all ranks vote, clip and step together (zeropp/comm/job.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zeropp.comm.group import link_to_job
from zeropp.comm.job import JobRanks, over, world
from zeropp.errors import ConfigError, what_it_is

DATA_DIMS = ("dp", "dp_replicate", "dp_shard", "fsdp", "data_parallel", "cp", "sp")
"""Names of dimensions whose ranks hold the same parameters, so that ZeRO partitions over them."""
MODEL_DIMS = ("tp", "tensor_parallel", "pp")
"""Names of dimensions whose ranks hold different parameters."""


def ranks_of(mesh: DeviceMesh | None, data_dims: Sequence[str] | None, caller: str) -> JobRanks:
    """Return the communicators over a mesh, or over the world; start the process group that torchrun wants where none runs. Collective.

    Args:
        mesh: all ranks of the job, with a name for each dimension; None: the world is one data dimension.
        data_dims: the data dimensions, in place of :data:`DATA_DIMS`; all others hold different parameters.
        caller: a word for messages.

    Raises:
        zeropp.ConfigError: a mesh without names, of some ranks of the job only, or with a dimension of an unknown name.
    """
    if mesh is None:
        if data_dims is not None:
            raise ConfigError(f"{caller}: data_dims {tuple(data_dims)} come without a mesh; pass mesh= too")
        return world()
    data = data_names(_names_of(mesh, caller), data_dims, caller)
    _require_whole_job(mesh, caller)
    ranks = over(ranks_along(mesh, data))
    _link_groups(mesh)
    return dataclasses.replace(ranks, stages=mesh["pp"].size()) if is_pipelined(mesh) else ranks


def _link_groups(mesh: DeviceMesh) -> None:
    """Let the groups of the mesh end together with the job, where they are zeropp's: activations of a pipeline go over one of them."""
    for name in mesh.mesh_dim_names or ():
        group = mesh.get_group(name)
        comm = getattr(group, "comm", None)
        if comm is not None and group is not dist.group.WORLD:
            link_to_job(comm, dist.get_process_group_ranks(group))


def tensor_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the dimension of tensor parallelism; None: there is none, or one rank in it."""
    names = mesh.mesh_dim_names or ()
    found = next((name for name in names if name in ("tp", "tensor_parallel")), None)
    return None if found is None or mesh[found].size() == 1 else mesh[found]


def is_pipelined(mesh: DeviceMesh) -> bool:
    """Return True if a dimension of the mesh is a pipeline of several ranks."""
    names = mesh.mesh_dim_names or ()
    return "pp" in names and int(mesh.mesh.shape[names.index("pp")]) > 1


def places_in_pipeline(mesh: DeviceMesh) -> dict[int, str]:
    """Return what each rank of the job is in the pipeline, for messages."""
    names = mesh.mesh_dim_names or ()
    by_stage = mesh.mesh.movedim(names.index("pp"), 0)
    stages = by_stage.reshape(len(by_stage), -1).tolist()
    return {int(rank): f"rank {stage} of the pipeline" for stage, ranks in enumerate(stages) for rank in ranks}


def data_names(names: Iterable[str], data_dims: Sequence[str] | None, caller: str) -> tuple[str, ...]:
    """Return those of a mesh's dimensions that are data dimensions, in the order of the mesh.

    Raises:
        zeropp.ConfigError: a dimension of an unknown name, or a name in ``data_dims`` that the mesh lacks.
    """
    names = tuple(names)
    if isinstance(data_dims, str):
        raise ConfigError(f"{caller}: data_dims is the text {data_dims!r}; wanted a sequence, such as ({data_dims!r},)")
    if data_dims is None:
        _refuse_unknown(names, caller)
        return tuple(name for name in names if name in DATA_DIMS)
    missing = [name for name in data_dims if name not in names]
    if missing:
        raise ConfigError(f"{caller}: data_dims names '{missing[0]}', and the mesh has {names}; name its dimensions")
    return tuple(name for name in names if name in data_dims)


def _refuse_unknown(names: tuple[str, ...], caller: str) -> None:
    strange = [name for name in names if name not in DATA_DIMS + MODEL_DIMS]
    if strange:
        raise ConfigError(
            f"{caller}: dimension '{strange[0]}' of the mesh {names} is not known; data dimensions are called "
            f"{', '.join(DATA_DIMS)}, those of other parameters {', '.join(MODEL_DIMS)}; rename it, or say with "
            "data_dims=(...) over which dimensions the parameters are the same"
        )


def ranks_along(mesh: DeviceMesh, names: Iterable[str]) -> list[int]:
    """Return the job's ranks that differ from this one in these dimensions alone, in the order of the mesh."""
    wanted = set(names)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None and mesh.mesh_dim_names is not None, "a mesh of the whole job with names"
    place = tuple(
        slice(None) if name in wanted else at for name, at in zip(mesh.mesh_dim_names, coordinate, strict=True)
    )
    return [int(rank) for rank in mesh.mesh[place].flatten().tolist()]


def _names_of(mesh: Any, caller: str) -> tuple[str, ...]:
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"{caller}: mesh is {what_it_is(mesh)}; wanted a DeviceMesh, such as "
            'init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))'
        )
    if mesh.mesh_dim_names is None:
        raise ConfigError(
            f"{caller}: the dimensions of the mesh {tuple(mesh.mesh.shape)} have no names, so nothing says over which of them the "
            'parameters are the same; build it with init_device_mesh(..., mesh_dim_names=("pp", "dp"))'
        )
    return tuple(mesh.mesh_dim_names)


def _require_whole_job(mesh: DeviceMesh, caller: str) -> None:
    ranks = dist.get_world_size()
    if sorted(mesh.mesh.flatten().tolist()) != list(range(ranks)):
        raise ConfigError(
            f"{caller}: the mesh {mesh.mesh_dim_names} has {mesh.mesh.numel()} ranks, and the job has {ranks}; pass the whole mesh, with a "
            'dimension for each thing that ranks differ in, and not a part of it such as mesh["dp"]'
        )
