# SPDX-License-Identifier: Apache-2.0
"""One module, several optimizers: each optimizer's parameters are a partitioned model of their own, in place.

A generator and a discriminator in one LightningModule step at different times, so neither may be held up by the gradients of
the other. A part is a module that holds some of the module's submodules (and parameters of its own) under their names there;
the module itself stays as it is, and remembers its parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import zeropp
from zeropp.checkpoint.full_state import _extra_states, _keys
from zeropp.config import Config
from zeropp.errors import CheckpointError, ConfigError
from zeropp.zero.engine import engine_of
from zeropp.zero.model import buffers
from zeropp.zero.model.buffers import persistent_buffers
from zeropp.zero.prepare import attach, is_prepared

_PARTS = "_zeropp_parts"


def parts_of(module: nn.Module) -> list[nn.Module]:
    """Return the models that were prepared: the module itself, or its parts, or none."""
    if is_prepared(module):
        return [module]
    found: list[nn.Module] = module.__dict__.get(_PARTS, [])
    return found


def partition(module: nn.Module, optimizers: list[Any], config: Config, mesh: Any = None) -> None:
    """Prepare a module, or give a prepared one the optimizers of this run.

    Raises:
        zeropp.ConfigError: two optimizers have the same parameter; or the module was prepared for other optimizers.
    """
    there = parts_of(module)
    if len(optimizers) <= 1 and len(there) <= 1:
        optimizer = optimizers[0] if optimizers else None
        if not there:
            zeropp.prepare(module, optimizer, config, mesh=mesh)
        elif optimizer is not None and getattr(optimizer, "_engine", None) is None:
            attach(module, optimizer)
        return
    if not there:
        there = _split(module, optimizers)
        for part, optimizer in zip(there, [*optimizers, None], strict=False):
            zeropp.prepare(part, optimizer, config, mesh=mesh)
        module.__dict__[_PARTS] = there
        buffers.hand_over(module, engine_of(there[0]).comm)  # those that are in no part
        return
    for optimizer in optimizers:
        if getattr(optimizer, "_engine", None) is None:
            attach(_part_for(there, optimizer), optimizer)


def no_sync(module: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Enter ``zeropp.no_sync`` of all parts."""
    stack = contextlib.ExitStack()
    for part in parts_of(module):
        stack.enter_context(zeropp.no_sync(part))
    return stack


def _part_for(parts: list[nn.Module], optimizer: Any) -> nn.Module:
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for part in parts:
        if wanted <= {id(p) for p in part.parameters()} and (len(parts) > 1):
            return part
    raise ConfigError(
        "the module was partitioned by an earlier run for other optimizers; give each optimizer the parameters that it had then, or "
        "fit a new module"
    )


def _split(module: nn.Module, optimizers: list[Any]) -> list[nn.Module]:
    """Make a part for each optimizer, in their order, and one for what no optimizer has, if there is such a thing."""
    owner: dict[int, int] = {}
    for index, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if owner.setdefault(id(parameter), index) != index:
                    raise ConfigError(
                        f"optimizers {owner[id(parameter)]} and {index} have a parameter of shape {tuple(parameter.shape)} in common; "
                        "with zeropp each parameter belongs to one optimizer"
                    )
    parts = [nn.Module() for _ in range(len(optimizers) + 1)]
    _share_out(module, "", owner, parts)
    return parts if any(True for _ in parts[-1].parameters()) else parts[:-1]


def _share_out(module: nn.Module, path: str, owner: Mapping[int, int], parts: list[nn.Module]) -> None:
    rest = len(parts) - 1
    for name, parameter in module.named_parameters(recurse=False):
        _place(parts[owner.get(id(parameter), rest)], path).register_parameter(name, parameter)
    for name, child in module.named_children():
        owners = {owner.get(id(p), rest) for p in child.parameters()}
        below = f"{path}.{name}" if path else name
        if len(owners) == 1:
            _place(parts[owners.pop()], path).add_module(name, child)
        elif owners:
            _share_out(child, below, owner, parts)


def _place(part: nn.Module, path: str) -> nn.Module:
    for name in path.split(".") if path else []:
        if name not in part._modules:
            part.add_module(name, nn.Module())
        part = part.get_submodule(name)
    return part


# -- whole values ----------------------------------------------------------------------------------------------------------


def full_state(module: nn.Module) -> dict[str, Any]:
    """Return ``module.state_dict()`` as of the plain module on rank 0, and an empty dict elsewhere; collective. A module that was
    not prepared yet is plain."""
    parts = parts_of(module)
    if not parts:
        return module.state_dict()
    if parts == [module]:
        return zeropp.full_state_dict(module, rank_0_only=True)
    found: dict[str, Any] = {}
    for part in parts:
        found.update(zeropp.full_state_dict(part, rank_0_only=True))
    if not found:
        return {}
    found.update({name: buffer.detach().clone() for name, buffer in persistent_buffers(module) if name not in found})
    found.update({key: one.get_extra_state() for key, one in _extra_states(module)})
    return {key: found[key] for key in _keys(module) if key in found}


def load_full_state(module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """The inverse; collective, with the same state on every rank."""
    parts = parts_of(module)
    if not parts:
        module.load_state_dict(state, strict=strict)
        return
    if parts == [module]:
        zeropp.load_full_state_dict(module, state, strict=strict)
        return
    known = set(_keys(module))
    if strict and (foreign := sorted(set(state) - known)):
        raise CheckpointError(
            f"'{foreign[0]}' is unknown to the module (and {len(foreign) - 1} more); strict=False leaves those alone"
        )
    for part in parts:
        own = set(_keys(part))
        zeropp.load_full_state_dict(part, {k: v for k, v in state.items() if k in own}, strict=strict)
    with torch.no_grad():
        for name, buffer in persistent_buffers(module):
            if name in state:
                buffer.copy_(state[name])
    for key, one in _extra_states(module):
        if key in state:
            one.set_extra_state(state[key])


__all__ = ["full_state", "load_full_state", "no_sync", "partition", "parts_of"]
