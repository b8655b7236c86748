# SPDX-License-Identifier: Apache-2.0
"""Values for a model that was built on the meta device, where tensors have a shape and no memory.

Module after module, children first, gets memory and draws its values by its own ``reset_parameters()``, and by the
``_init_weights(module)`` of the nearest model around it that has one (Hugging Face's convention, and many others').
Each rank keeps its shards (init.py), so the whole model is never in memory. Parameters stay the same objects: an
optimizer may hold them already.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from zeropp.comm.job import JobRanks
from zeropp.config import Folders
from zeropp.errors import ConfigError
from zeropp.zero.model import init

Draw = Callable[[], Any]
Follow = Callable[[nn.Module, str, nn.Parameter], None]

_DRAWS = ("reset_parameters", "_reset_parameters")  # the second one is torch's own MultiheadAttention's
_HF_DONE = "_is_hf_initialized"  # transformers leaves alone what has it, and sets it on meta, too


def check_draws(model: nn.Module) -> None:
    """Check that everything on meta can get values.

    Raises:
        zeropp.ConfigError: a module has no way to draw its own; named.
    """
    for path, module in model.named_modules():
        names = _meta_names(module)
        if names and not _draws_of(model, path):
            raise _no_values(module, path, names[0], "has no reset_parameters(), nor a model around it _init_weights()")


def give_values(model: nn.Module, path: Folders | None, ranks: JobRanks | None = None) -> None:
    """Draw what is on meta, on a model that :func:`check_draws` let pass; do nothing where all has values. Collective; rank 0's values
    count.

    Args:
        path: a folder where shards wait, or several, see ``sharded_init``; None: in memory.
        ranks: those that partition the model; None: all.

    Raises:
        zeropp.ConfigError: a module leaves some of its values out; named.
    """
    if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return
    with _sharded(model, path, ranks) as follow, torch.no_grad():
        for name, module in _children_first(model):
            if _meta_names(module):
                _draw(module, name, _draws_of(model, name), follow)


def _meta_names(module: nn.Module) -> list[str]:
    own = (*module._parameters.items(), *module._buffers.items())
    return [name for name, tensor in own if tensor is not None and tensor.is_meta]


def _children_first(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module once, with its path, in the order in which constructors finish."""
    seen: set[nn.Module] = set()

    def visit(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if module in seen:
            return
        seen.add(module)
        for name, child in module._modules.items():
            if child is not None:
                yield from visit(f"{path}.{name}" if path else name, child)
        yield path, module

    yield from visit("", model)


def _draws_of(model: nn.Module, path: str) -> list[Draw]:
    """Return the functions that give a module its values, in the order of their calls."""
    module = model.get_submodule(path)
    draws: list[Draw] = [getattr(module, name) for name in _DRAWS if callable(getattr(module, name, None))][:1]
    while True:
        around = model.get_submodule(path)
        initialise = getattr(around, "_init_weights", None)
        if callable(initialise):
            return [*draws, functools.partial(initialise, module)]
        if not path:
            return draws
        path = path.rpartition(".")[0]


@contextlib.contextmanager
def _sharded(model: nn.Module, path: Folders | None, ranks: JobRanks | None) -> Iterator[Follow]:
    """Yield a function to give parameters to; inside, those are sharded when newer ones need their memory."""
    with init.construction(path=path, from_rank_0=True, sharers=init.data_sharers(ranks)):
        active = init._active
        if active is None:
            yield lambda module, name, parameter: None
            return
        for module in model.modules():
            for name, child in module._modules.items():
                active.on_module(module, name, child)
        yield active.on_parameter


def _draw(module: nn.Module, path: str, draws: list[Draw], follow: Follow) -> None:
    names = _meta_names(module)
    # What has values keeps them: loaded ones, and those of a tied weight that its first owner drew.
    kept = [(one, one.detach().clone()) for one in module._parameters.values() if one is not None and not one.is_meta]
    for name in names:
        if name in module._parameters:
            parameter: Any = module._parameters[name]
            _give_memory(parameter)
            follow(module, name, parameter)
        else:
            module._buffers[name] = _unset(module._buffers[name])
    for draw in draws:
        draw()
    for parameter, values in kept:
        parameter.copy_(values)
    for name in names:
        if _has_unset(getattr(module, name)):
            raise _no_values(module, path, name, "draws others only")


def _give_memory(parameter: nn.Parameter) -> None:
    new = nn.Parameter(_unset(parameter), requires_grad=parameter.requires_grad)
    new.__dict__.update({name: value for name, value in parameter.__dict__.items() if name != _HF_DONE})
    torch.utils.swap_tensors(parameter, new)


def _unset(tensor: Any) -> torch.Tensor:
    """Return memory for it, filled with a mark that no initialisation draws."""
    values = torch.empty_like(tensor, device="cpu", requires_grad=False)
    return values.fill_(_mark(tensor.dtype))


def _mark(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else int(torch.iinfo(dtype).min)


def _has_unset(tensor: torch.Tensor) -> bool:
    if tensor.dtype in (torch.bool, torch.uint8):
        return False  # every value may be meant
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return bool((tensor == _mark(tensor.dtype)).any())


def _no_values(module: nn.Module, path: str, name: str, why: str) -> ConfigError:
    full_name = f"{path}.{name}" if path else name
    return ConfigError(
        f"prepare: '{full_name}' is on the meta device and has no values, and {type(module).__name__} {why}; give the class "
        "a reset_parameters() that draws all of its own, or build the model inside zeropp.sharded_init()"
    )
