# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: cut a model's matrices over the ranks of a mesh dimension, as torch's DTensors (Megatron-LM, Shoeybi
et al. 2019). The layers and their communication are torch's and transformers'; ZeRO then partitions each rank's part."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from zeropp.errors import ConfigError, shown, what_it_is
from zeropp.zero.model.dtensor import boxes_of_dtensor, like
from zeropp.zero.model.init import is_sharded, share_at_place
from zeropp.zero.model.parameter import is_dtensor, ref_of

M = TypeVar("M", bound=nn.Module)


def tensor(model: M, mesh: Any, plan: Mapping[str, Any] | None = None) -> M:
    """Cut a model's parameters over the ranks of a mesh, in place. Before the optimizer is built and before ``prepare``.

    Args:
        model: with the same values on every rank of the mesh; each rank keeps its part. Of a model that was built inside
            ``zeropp.sharded_init(mesh=)`` a rank has one parameter whole at a time.
        mesh: a DeviceMesh of one dimension, such as ``mesh["tp"]``.
        plan: names of modules, with torch's styles (``ColwiseParallel()``, ...) as for ``parallelize_module``, or with
            the names of styles of transformers (``"colwise"``, ...). None: the model's own plan, which transformers has.

    Returns:
        The model. Parameters that are tied stay tied.

    Raises:
        zeropp.ConfigError: the mesh has several dimensions, there is no plan, a parameter is partitioned already, or the plan cuts
            two tied names differently.

    Cost: each rank keeps 1/N of what the plan cuts. No communication, but for what was built in shards, which is gathered once.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise ConfigError(
            f"parallel.tensor: mesh is {what_it_is(mesh) if not isinstance(mesh, DeviceMesh) else f'of {mesh.ndim} dimensions'}; "
            "wanted a DeviceMesh of one dimension, such as mesh['tp']"
        )
    _refuse_prepared(model)
    tied = _tied_names(model)
    built = {name: one for name, one in model.named_parameters(remove_duplicate=False) if is_sharded(one)}
    with _on_meta(model, built):
        _apply(model, mesh, plan, tied)
        planned = {name: model.get_parameter(name) for name in built}
        _refuse_other_shapes(built, planned)
    _share_parts(model, mesh, built, planned)
    return model


def _apply(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, Any] | None, tied: list[list[str]]) -> None:
    for names in tied:  # each name is cut by its own row of the plan
        for name in names[1:]:
            _replace(model, name, nn.Parameter(model.get_parameter(name).data, model.get_parameter(name).requires_grad))
    if plan is not None and not all(isinstance(style, str) for style in plan.values()):
        parallelize_module(model, mesh, dict(plan))
    else:
        _apply_named(model, mesh, plan)
    for names in tied:
        _tie(model, names)


def _refuse_prepared(model: nn.Module) -> None:
    name = next((n for n, p in model.named_parameters() if ref_of(p) is not None), None)
    if name is not None:
        raise ConfigError(
            f"parallel.tensor: parameter '{name}' is partitioned already, by zeropp.prepare, and a part cannot be cut by a plan; cut the model "
            "first, then call prepare(..., mesh=mesh)"
        )


@contextlib.contextmanager
def _on_meta(model: nn.Module, built: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Let a plan see parameters without values in the place of those that were built in shards; put these back if it fails."""
    for name, one in built.items():
        _replace(model, name, nn.Parameter(torch.empty(one.shape, dtype=one.dtype, device="meta"), one.requires_grad))
    try:
        yield
    except BaseException:
        for name, one in built.items():
            _replace(model, name, one)
        raise


def _refuse_other_shapes(built: dict[str, nn.Parameter], planned: Mapping[str, nn.Parameter]) -> None:
    for name, one in planned.items():
        if one.shape != built[name].shape or not (one.is_meta or is_dtensor(one)):
            raise ConfigError(
                f"parallel.tensor: the plan makes of parameter '{name}' of shape {tuple(built[name].shape)} one of shape {tuple(one.shape)} that "
                "is no DTensor, which sharded_init does not know; build the model outside of sharded_init, then cut it"
            )


def _share_parts(
    model: nn.Module, mesh: DeviceMesh, built: dict[str, nn.Parameter], planned: Mapping[str, nn.Parameter]
) -> None:
    """Give this rank its shards of what the plan leaves to it, one parameter after the other; no rank has more than one whole."""
    plans = {id(one): planned[name] for name, one in reversed(built.items())}
    made: dict[int, nn.Parameter] = {}

    def keep(one: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
        cut = plans[id(one)]
        if not is_dtensor(cut):
            return one, whole
        part = boxes_of_dtensor(cut)
        local = whole if part is None else part.taken(whole)
        made[id(one)] = nn.Parameter(like(cut, local), cut.requires_grad)
        return made[id(one)], local

    share_at_place(built.values(), mesh, keep)
    for name, one in built.items():
        _replace(model, name, made.get(id(one), one))


def _apply_named(model: nn.Module, mesh: Any, plan: Mapping[str, str] | None) -> None:
    """Apply styles of transformers by their names; the model's own where there is no plan."""
    if not hasattr(model, "_resolve_parallel_plans"):
        raise ConfigError(
            f"parallel.tensor: {type(model).__name__} has no plan of its own; give plan={{'layers.*.up': ColwiseParallel(), ...}} "
            "with styles of torch.distributed.tensor.parallel"
        )
    apply = importlib.import_module("transformers.distributed.tensor_parallel").apply_tensor_parallelism
    if not plan:
        plan = own_plan(model, mesh.size(), "parallel.tensor", "give plan= with names of modules")
    with torch.no_grad():
        apply(model, mesh, plan)


def own_plan(model: Any, ranks: int, caller: str, way_out: str) -> dict[str, str]:
    """Return the styles of transformers by which a model of transformers is cut over so many ranks, by names of modules and parameters.

    Raises:
        zeropp.ConfigError: the model has no plan, or one that transformers refuses; it ends with ``way_out``.
    """
    named = type(model).__name__
    if not getattr(model, "tp_plan", None):
        raise ConfigError(f"{caller}: transformers has no tensor-parallel plan for {named}; {way_out}")
    distributed = importlib.import_module("transformers.distributed")
    try:
        plan, _, _ = model._resolve_parallel_plans(distributed.DistributedConfig(tp_size=ranks))
    except ValueError as error:
        raise ConfigError(
            f"{caller}: transformers refuses the tensor-parallel plan of {named}, {shown(model.tp_plan)}: {error}; correct "
            f"base_model_tp_plan of its config, or {way_out}"
        ) from error
    return dict(plan)


def _tied_names(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _tie(model: nn.Module, names: list[str]) -> None:
    """Let all names have the parameter of the first one again."""
    first = model.get_parameter(names[0])
    for name in names[1:]:
        other = model.get_parameter(name)
        if other is first:
            continue
        placed = [getattr(one, "placements", None) for one in (first, other)]
        if placed[0] != placed[1]:
            raise ConfigError(
                f"parallel.tensor: '{names[0]}' and '{name}' are one parameter, which the plan cuts as {placed[0]} and as {placed[1]}; "
                "give plan= with the same cut for both, or untie them"
            )
        _replace(model, name, first)


def _replace(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, key = name.rpartition(".")
    model.get_submodule(path)._parameters[key] = parameter
