# SPDX-License-Identifier: Apache-2.0
"""Which part of a model each rank of a mesh has, by numbers alone: for estimates, before any rank runs and before a mesh exists."""

from __future__ import annotations

import copy
import importlib
import itertools
import math
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeropp.errors import ConfigError, counted, shown
from zeropp.parallel.cut import Chunks, chunks_of
from zeropp.parallel.tensor import own_plan

_DATA = ("dp", "dp_replicate", "dp_shard", "fsdp", "data_parallel", "cp", "sp")
_TENSOR = ("tp", "tensor_parallel")
_CUTS = {
    "colwise": 0, "colwise_rep": 0, "colwise_gather_output": 0, "packed_colwise": 0, "embedding_rowwise": 0, "rowwise": 1, "rowwise_rep": 1,
    "rowwise_split_input": 1, "packed_rowwise": 1, "embedding_colwise": 1,
}  # fmt: skip
"""By transformers' style: the dimension of a matrix that is cut. A bias is cut with dimension 0, and whole otherwise."""
_WHOLE = ("replicate", "sequence_parallel", "replicated_with_grad_allreduce", "all_reduce")


@dataclass(frozen=True)
class MeshSizes:
    """The sizes of a mesh, by name; neighbouring ranks differ in the last dimension."""

    sizes: dict[str, int]

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def data(self) -> int:
        """How many ranks partition one part of the model."""
        return math.prod(size for name, size in self.sizes.items() if name in _DATA)

    def size(self, *names: str) -> int:
        return math.prod(self.sizes.get(name, 1) for name in names)

    def data_hosts(self, per_host: int) -> int:
        """Return on how many hosts those ranks are that partition the part of rank 0."""
        ranges = [range(size if name in _DATA else 1) for name, size in self.sizes.items()]
        strides = [math.prod(list(self.sizes.values())[at + 1 :]) for at in range(len(self.sizes))]
        return len({sum(map(int.__mul__, at, strides)) // per_host for at in itertools.product(*ranges)})


def mesh_sizes(mesh: Any, caller: str) -> MeshSizes:
    """Return the sizes of a mesh that is a mapping such as ``{"dp": 4, "tp": 2}``, or a DeviceMesh.

    Raises:
        zeropp.ConfigError: a dimension of an unknown name, or a size that is no number of ranks.
    """
    names = getattr(mesh, "mesh_dim_names", None)
    if names is not None:
        mesh = dict(zip(names, mesh.mesh.shape, strict=True))
    if not isinstance(mesh, Mapping) or not mesh:
        raise ConfigError(
            f'{caller}: mesh is {shown(mesh)}; wanted a mapping of names and ranks, such as {{"dp": 4, "tp": 2}}'
        )
    for name, size in mesh.items():
        if name not in (*_DATA, *_TENSOR, "pp"):
            raise ConfigError(
                f"{caller}: dimension {name!r} of the mesh is not known; wanted {', '.join(_DATA)}, tp, tensor_parallel or pp"
            )
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"{caller}: mesh[{name!r}] is {shown(size)}; wanted a whole number of ranks above 0")
    return MeshSizes({str(name): int(size) for name, size in mesh.items()})


def sharers_in(sizes: MeshSizes | None, shared_by: Any) -> tuple[int, int]:
    """Return how many ranks hold the same tokens, by ``Experts.shared_by``, and how many of these are one data rank.

    Raises:
        zeropp.ConfigError: they are no dimension of the mesh.
    """
    if shared_by is None:
        return 1, 1
    if sizes is None and not isinstance(shared_by, str):
        return int(shared_by.size()), 1
    there = {} if sizes is None else sizes.sizes
    name = _dimension_of(shared_by, there)
    size = there.get(name, 0)
    ranks = size if isinstance(shared_by, str) else int(shared_by.size())
    if size == 0 or ranks != size:
        what = repr(shared_by) if isinstance(shared_by, str) else counted(ranks, "rank")
        raise ConfigError(
            f"estimate: Experts.shared_by {what} is no dimension of the mesh {there}; name one of it, such as 'tp', with as many ranks"
        )
    return ranks, 1 if name in _DATA else ranks


def _dimension_of(shared_by: Any, there: Mapping[str, int]) -> str:
    """Return the name of a dimension, of a mesh of one, or of a group, which is that of tensor parallelism; empty: there is none."""
    if isinstance(shared_by, str):
        return shared_by
    names = [*(getattr(shared_by, "mesh_dim_names", None) or ()), *_TENSOR]
    return next((name for name in names if name in there), "")


def stage_of(model: nn.Module, stage: int, sizes: MeshSizes, schedule: Any) -> nn.Module:
    """Return what rank ``stage`` of the pipeline has of a model, which stays whole; the model itself without a pipeline.

    Raises:
        zeropp.ConfigError: as :func:`zeropp.parallel.cut`.
    """
    ranks = sizes.size("pp")
    if ranks == 1:
        return model
    apart = copy.deepcopy(model, {id(one): one for one in model.parameters()})
    return chunks_of(apart, stage, ranks, _schedule_of(schedule))


def _schedule_of(schedule: Any) -> type:
    """Return the class of a schedule, by its name or itself; torch's 1F1B without one."""
    if isinstance(schedule, type):
        return schedule
    name = "Schedule1F1B" if schedule is None else str(schedule)
    schedules = importlib.import_module("torch.distributed.pipelining.schedules")
    found = getattr(schedules, name, None) or getattr(schedules, f"Schedule{name}", None)
    if not isinstance(found, type):
        raise ConfigError(
            f"estimate: schedule {name!r} is not one of torch's; wanted a name such as '1F1B' or 'ScheduleGPipe'"
        )
    return found


def slices_of(
    model: nn.Module, sizes: MeshSizes, apart: Container[nn.Parameter] = ()
) -> dict[nn.Parameter, nn.Parameter]:
    """Return, by parameter, the slice of it that the first rank of tensor parallelism has, which is the largest; on meta.

    Args:
        apart: parameters that the plan of tensor parallelism leaves alone, such as experts that ranks have parts of.

    Raises:
        zeropp.ConfigError: the model has no plan of transformers, or its plan has a style whose slices are not known here.
    """
    ranks = sizes.size(*_TENSOR)
    if ranks == 1:
        return {}
    found: dict[nn.Parameter, nn.Parameter] = {}
    for part in model if isinstance(model, Chunks) else [model]:
        plan = own_plan(part, ranks, "estimate", "estimate a Hugging Face model with a plan, or a mesh without tp")
        for name, parameter in part.named_parameters():
            style = plan.get(name) or plan.get(name.rpartition(".")[0])
            if style is None or style in _WHOLE or parameter in apart:
                continue
            if style not in _CUTS:
                raise ConfigError(
                    f"estimate: parameter '{name}' has the style {style!r} of tensor parallelism, whose slices are not estimated yet"
                )
            shape = _cut(parameter, _CUTS[style], ranks)
            if shape is not None:
                found[parameter] = nn.Parameter(
                    torch.empty(shape, dtype=parameter.dtype, device="meta"), parameter.requires_grad
                )
    return found


def _cut(parameter: nn.Parameter, dimension: int, ranks: int) -> tuple[int, ...] | None:
    """Return the shape of the largest slice; None: the parameter stays whole."""
    if dimension >= parameter.dim():
        return None
    shape = list(parameter.shape)
    shape[dimension] = -(-shape[dimension] // ranks)
    return tuple(shape)


def between_ranks(
    model: nn.Module, sizes: MeshSizes, sequence: int, micro_batches: int, itemsize: int
) -> dict[str, int]:
    """Return the bytes that a rank receives in a step for what cuts a sample, by dimension: ``pipeline``, ``tensor``, ``sequence``.

    Args:
        sequence: tokens of a micro-batch, of all ranks of sp.
        itemsize: bytes of an element of the activations.

    A rank receives T D elements from each neighbour stage and micro-batch; 4 all-reduces of 2 (t-1)/t T D a layer; and 2 (P-1)/P T/P
    (2 query heads + 2 key heads) widths a layer (docs/parallel.md). T are the tokens of the rank.
    """
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(config, "hidden_size", None) is None:
        raise ConfigError(
            f"estimate: sequence {sequence} needs the width of {type(model).__name__}, whose config has no hidden_size; leave sequence out"
        )
    pp, tp, sp = sizes.size("pp"), sizes.size(*_TENSOR), sizes.size("sp", "cp")
    own, hidden = sequence / sp, config.hidden_size
    heads = getattr(config, "num_attention_heads", 1)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or hidden // heads
    layers = micro_batches * config.num_hidden_layers / pp
    stages = 2 if pp > 2 else 1 if pp == 2 else 0
    found = {
        "pipeline": micro_batches * stages * own * hidden,
        "tensor": layers * 4 * 2 * (tp - 1) / tp * own * hidden,
        "sequence": layers * 2 * (sp - 1) / sp * own * width * (2 * heads + 2 * kv_heads) / tp,
    }
    return {name: round(value * itemsize) for name, value in found.items() if value}
