# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's other dimensions than data: what asks for them, and the groups of ranks that scripts ask for.

    "sequence_parallel_size": 2                  neighbouring ranks share each sequence (zeropp.parallel.ulysses)
    "tensor_parallel": {"autotp_size": 2}        they share each matrix (zeropp.parallel.tensor)
    a PipelineModule                             the first ranks have the first stage (zeropp.deepspeed.pipeline)

The mesh of the latest of them is the one that ``deepspeed.utils.groups`` answers from, as in DeepSpeed.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zeropp.comm.job import world
from zeropp.config.deepspeed_json import refuse_unknown, section_of
from zeropp.config.values import not_yet, whole
from zeropp.efficiency.attention import models_of
from zeropp.errors import ConfigError, what_it_is
from zeropp.parallel.loader import part_of
from zeropp.parallel.tensor import tensor
from zeropp.parallel.ulysses import ulysses, ulysses_attention

_meshes: dict[tuple[Any, ...], DeviceMesh] = {}
_current: list[DeviceMesh] = []


def job_mesh(**sizes: int) -> DeviceMesh:
    """Return the mesh of all ranks whose dimensions have these sizes, the last one of neighbours; ``dp`` takes the ranks that are left.
    Collective where it is new. It is the current one from now on.

    Raises:
        zeropp.ConfigError: the ranks of the job are no multiple of the sizes.
    """
    world()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    product = math.prod(sizes.values())
    if ranks % product:
        asked = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise ConfigError(f"{asked}, of a job of {ranks} ranks; wanted a divisor of these")
    order = {"pp": sizes.get("pp", 1), "dp": ranks // product, "sp": sizes.get("sp", 1), "tp": sizes.get("tp", 1)}
    shape = {name: size for name, size in order.items() if name == "dp" or name in sizes}
    key = (id(dist.group.WORLD), *shape.items())
    if key not in _meshes:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        _meshes[key] = init_device_mesh(device, tuple(shape.values()), mesh_dim_names=tuple(shape))
    _current[:] = [_meshes[key]]
    return _meshes[key]


class Dimensions:
    """The dimensions of one engine, from its file and its model.

    Attributes:
        mesh: all ranks, with names; None: they are data ranks.
        batches: how many different batches the ranks have at one time; 0: as many as ranks.
    """

    def __init__(self, sizes: Mapping[str, int], mesh: DeviceMesh | None = None) -> None:
        self.mesh = mesh if mesh is not None or not sizes else job_mesh(**sizes)

    @property
    def batches(self) -> int | None:
        return None if self.mesh is None else int(self.mesh["dp"].size())

    def cut(self, model: nn.Module) -> dict[int, nn.Parameter]:
        """Cut the model's matrices where the file says so. Return the new parameters, by the ``id`` of those that they replace."""
        if self.mesh is None or "tp" not in (self.mesh.mesh_dim_names or ()):
            return {}
        before = dict(model.named_parameters())
        tensor(model, self.mesh["tp"])
        return {id(one): model.get_parameter(name) for name, one in before.items()}

    def attach(self, model: nn.Module) -> None:
        """Let a transformers model see whole sequences where the file says so. A model of another kind asks
        ``deepspeed.sequence.layer.DistributedAttention`` itself."""
        if self.mesh is None or "sp" not in (self.mesh.mesh_dim_names or ()):
            return
        models = models_of(model)
        if models and not any(hasattr(one, "_zeropp_ulysses") for one in models):
            model.__dict__["_zeropp_sp"] = ulysses(model, self.mesh["sp"])
            model.__dict__["_zeropp_sp"].whole_in_eval = _registered.get("disable_in_eval", False)


_registered: dict[str, Any] = {}
"""What was said to ``register_with_transformers`` last."""


def take(keys: dict[str, Any], model: nn.Module, mpu: Any = None) -> Dimensions:
    """Take the keys that ask for dimensions out of a file.

    Raises:
        zeropp.ConfigError: a size that the ranks do not allow, or a key that has no counterpart.
    """
    mesh = getattr(model, "mesh", None)
    if isinstance(mesh, DeviceMesh):  # a PipelineModule
        for name in ("sequence_parallel_size", "tensor_parallel"):
            if keys.get(name) not in (None, 1, {}, "auto"):
                raise not_yet(name, keys[name], "a PipelineModule has stages and copies of them alone; leave it out")
        keys.pop("pipeline", None)  # the engine reads it
        return Dimensions({}, mesh)
    sizes = {}
    sequences = keys.get("sequence_parallel_size", 1)
    whole("sequence_parallel_size", sequences, 1, "ranks that share a sequence")
    if sequences > 1:
        sizes["sp"] = keys.pop("sequence_parallel_size")
        keys.pop("seq_parallel_communication_data_type", None)  # heads travel in the type that they have
    elif mpu is not None and is_sequences(mpu) and _current:
        sizes["sp"] = size("sp")
    section = section_of(keys, "tensor_parallel")
    if section.get("autotp_size", 0) not in (0, 1, "auto"):
        refuse_unknown(section, ("autotp_size",), "tensor_parallel")
        whole("tensor_parallel.autotp_size", section["autotp_size"], 1, "ranks that share a matrix")
        sizes["tp"] = keys.pop("tensor_parallel")["autotp_size"]
    return Dimensions(sizes)


def replace(optimizer: Any, parameters: Any, new: Mapping[int, nn.Parameter]) -> Any:
    """Give an optimizer that was built before the model was cut, or a list of parameters or groups, the parameters that there are now.

    Raises:
        zeropp.ConfigError: the optimizer has states already.
    """
    if not new:
        return parameters
    if optimizer is not None:
        if optimizer.state:
            raise ConfigError(
                f'tensor_parallel.autotp_size: {type(optimizer).__name__} has states of whole parameters; build it anew, or give "optimizer" in '
                "the file"
            )
        for group in optimizer.param_groups:
            group["params"] = [new.get(id(one), one) for one in group["params"]]
    if parameters is None:
        return None
    listed = list(parameters)
    if listed and isinstance(listed[0], dict):
        return [{**group, "params": [new.get(id(one), one) for one in group["params"]]} for group in listed]
    return [new.get(id(one), one) for one in listed]


# -- groups of ranks -------------------------------------------------------------------------------------------------------


def _dimension(name: str) -> DeviceMesh | None:
    names = _current[0].mesh_dim_names if _current else None
    return _current[0][name] if names is not None and name in names else None


def size(name: str) -> int:
    """Return how many ranks a dimension has; without the dimension 1, and for ``dp`` all ranks."""
    found = _dimension(name)
    return found.size() if found is not None else dist.get_world_size() if name == "dp" else 1


def rank(name: str) -> int:
    """Return this rank's place in a dimension."""
    found = _dimension(name)
    return found.get_local_rank() if found is not None else dist.get_rank() if name == "dp" else 0


def group(name: str) -> Any:
    """Return the torch.distributed group of a dimension; that of all ranks for ``dp`` where there is no other one.

    Raises:
        zeropp.ConfigError: nothing has asked for the dimension.
    """
    found = _dimension(name)
    if found is not None:
        return found.get_group()
    if name == "dp":
        return dist.group.WORLD
    raise ConfigError(
        f"deepspeed's group of the dimension '{name}' is not there: nothing asked for it; wanted \"sequence_parallel_size\" or "
        '"tensor_parallel" in the file, UlyssesSPAttentionHF.register_with_transformers(...), or a PipelineModule, before'
    )


_FOR = (
    ("data_parallel", "dp"),
    ("sequence_parallel", "sp"),
    ("tensor_model_parallel", "tp"),
    ("pipe_parallel", "pp"),
)
GROUPS: dict[str, Callable[[], Any]] = {
    f"get_{said}_{what}": functools.partial(function, name)
    for said, name in _FOR
    for what, function in (("group", group), ("world_size", size), ("rank", rank))
}
"""By DeepSpeed's names: ``get_sequence_parallel_rank`` and their like."""
GROUPS.update(
    {
        "get_sequence_data_parallel_group": lambda: dist.group.WORLD,
        "get_sequence_data_parallel_world_size": lambda: dist.get_world_size(),
        "get_sequence_data_parallel_rank": lambda: dist.get_rank(),
        "get_data_parallel_group_ranks": lambda: dist.get_process_group_ranks(group("dp")),
    }
)


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Make groups of so many neighbouring ranks that share sequences. Collective."""
    whole("sequence_parallel_size", sequence_parallel_size, 2, "ranks that share a sequence")
    job_mesh(sp=sequence_parallel_size)


def is_sequences(mpu: Any) -> bool:
    """Return True if these groups are those that :func:`initialize_sequence_parallel` makes."""
    return hasattr(mpu, "initialize_sequence_parallel")


# -- names of DeepSpeed ----------------------------------------------------------------------------------------------------


class UlyssesSPAttentionHF:
    """DeepSpeed's switch of sequence parallelism. :func:`zeropp.parallel.ulysses` does the work, for the model that ``initialize`` is
    given with the groups that come back, and for that model alone."""

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> Any:
        """Make the groups. Collective.

        Args:
            model_name_or_path: a model, or the name or folder of one.
            core_attn_implementation: what the model is built with; any, ``eager`` too.
            sequence_parallel_size: ranks that share a sequence.
            micro_batch_size, seq_length, seq_length_is_variable, max_length: of no meaning here, where batches and lengths may differ.
            disable_in_eval: an evaluated model is given whole sequences.

        Returns:
            The groups, for ``initialize(mpu=)``; None for one rank.

        Raises:
            zeropp.ConfigError: the model has another attention, or the ranks are no multiple of ``sequence_parallel_size``.
        """
        if sequence_parallel_size == 1:
            return None
        built = getattr(getattr(model_name_or_path, "config", None), "_attn_implementation", None)
        if built is not None and built != core_attn_implementation:
            raise ConfigError(
                f"core_attn_implementation: {core_attn_implementation!r} does not match model config attn_implementation={built!r}; wanted "
                "the same in both"
            )
        initialize_sequence_parallel(sequence_parallel_size)
        _registered["disable_in_eval"] = bool(disable_in_eval)
        return importlib.import_module("zeropp.deepspeed.dimensions")


class UlyssesSPDataLoaderAdapter:
    """Let ranks that share sequences work on the batches of each of them in turn, part by part.

    Args:
        dl: gives this rank's own batches: mappings with ``input_ids`` (batch, tokens) and ``labels``. Those of the ranks may be of
            different lengths, which the ranks need not divide; ``position_ids`` are made where they are missing.
        sp_rank, sp_group, sp_world_size: which ranks share sequences.
        device: where parts are put.
    """

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        self.dl, self.sp_rank, self.sp_group, self.sp_world_size, self.device = (
            dl,
            sp_rank,
            sp_group,
            sp_world_size,
            device,
        )
        self.iter = iter(dl)
        self.micro_batches: list[dict[str, Any]] = []

    rank = property(lambda self: self.sp_rank)
    ranks = property(lambda self: self.sp_world_size)

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size

    def __iter__(self) -> UlyssesSPDataLoaderAdapter:
        return self

    def __next__(self) -> dict[str, Any]:
        if not self.micro_batches:
            self._refill()
        return self.micro_batches.pop(0)

    def _refill(self) -> None:
        """Tell the group this rank's batch; take the own part of each."""
        batch = next(self.iter, None)
        if batch is None:
            self.iter = iter(self.dl)
        every: list[Any] = [None] * self.sp_world_size
        dist.all_gather_object(every, _on_cpu(batch), group=self.sp_group)
        empty = [at for at, one in enumerate(every) if one is None]
        if empty and len(empty) < len(every):
            raise ConfigError(
                f"UlyssesSPDataLoaderAdapter: rank {empty[0]} of the group has no batch left, and others have; wanted loaders of one length: a "
                "DistributedSampler over all ranks, or drop_last=True"
            )
        if empty:
            raise StopIteration
        for one in every:
            part = part_of(self, one)
            part.pop("labels", None)
            self.micro_batches.append(
                {name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in part.items()}
            )


def _on_cpu(batch: Any) -> Any:
    if batch is None:
        return None
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"UlyssesSPDataLoaderAdapter: a batch is {what_it_is(batch)}; wanted a mapping with input_ids"
        )
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in batch.items()}


class DistributedAttention(nn.Module):
    """Attention of sequences that are cut over a group (DeepSpeed-Ulysses, arXiv 2309.14509), for a model of one's own.

    Args:
        local_attention: takes (query, key, value, ...) of whole sequences and some of the heads, in the layout that it is called with,
            and returns (..., heads, width) or (..., heads * width) in that layout.
        sequence_process_group: the ranks, in the order of their parts.
        scatter_idx: the dimension of heads; 2.
        gather_idx: the dimension of tokens: 0 for (tokens, batch, heads, width), 1 for (batch, tokens, heads, width).
    """

    def __init__(
        self,
        local_attention: Callable[..., Tensor],
        sequence_process_group: Any,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
    ) -> None:
        super().__init__()
        if scatter_idx != 2 or gather_idx not in (0, 1):
            raise ConfigError(
                f"DistributedAttention: scatter_idx {scatter_idx} and gather_idx {gather_idx}; wanted 2, and 0 or 1, of (tokens, batch, heads, "
                "width) or (batch, tokens, heads, width)"
            )
        self.local_attn, self.spg, self.gather_idx = local_attention, sequence_process_group, gather_idx

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, batch_dim_idx: int | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Return (tokens, batch, heads * width), or with the batch first as the inputs are; differentiable."""
        if batch_dim_idx not in (None, 1 - self.gather_idx):
            raise ConfigError(
                f"DistributedAttention: batch_dim_idx {batch_dim_idx}, and gather_idx {self.gather_idx}; wanted {1 - self.gather_idx}"
            )
        order = (1, 2, 0, 3) if self.gather_idx == 0 else (0, 2, 1, 3)  # to (batch, heads, tokens, width)
        back = tuple(order.index(at) for at in range(4))

        def whole_sequence(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = self.local_attn(*(one.permute(back) for one in (q, k, v)), *args, **kwargs)
            return out.unflatten(-1, (q.shape[1], -1)).permute(order) if out.dim() == 3 else out.permute(order)

        q, k, v = (one.permute(order) for one in (query, key, value))
        return ulysses_attention(whole_sequence, q, k, v, group=self.spg).permute(back).flatten(2)


globals().update(GROUPS)
