# SPDX-License-Identifier: Apache-2.0
"""Tokens by expert of any model, and the balancing bias of transformers' models (tally.py has the rule)."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from zeropp.config.values import finite, wrong
from zeropp.errors import ConfigError
from zeropp.moe.gate import Router
from zeropp.moe.layer import Experts
from zeropp.moe.tally import BIAS, Tally, move_bias, summed

_TALLY = "_zeropp_tally"  # of an experts' module: a copy of the model has counts of its own


def load(model: nn.Module, *, reset: bool = False, group: Any = None) -> dict[str, Tensor]:
    """Return how many tokens every expert was given, layer by layer, since the counts began.

    A :class:`zeropp.moe.MoE` counts from the start. The experts of transformers' models count from the first call of this function,
    which returns zeros for them.

    Args:
        model: any module.
        reset: let the counts begin anew after this call.
        group: a process group of torch.distributed over which the counts are summed; collective. None: this rank's tokens alone.

    Returns:
        For every layer, by the name of its experts' module, (E,) int64: tokens by expert, before any was dropped.

    Raises:
        zeropp.ConfigError: the model has no experts.
    """
    tallies = {name: _tally_of(model, name, module) for name, module in experts_of(model).items()}
    if not tallies:
        raise ConfigError(
            f"zeropp.moe.load: {type(model).__name__} has no layer of experts, of zeropp.moe.MoE or transformers"
        )
    found = dict(zip(tallies, summed([tally.seen for tally in tallies.values()], group), strict=True))
    if reset:
        for tally in tallies.values():
            tally.seen = torch.zeros_like(tally.seen)
    return found


def balance_bias(model: nn.Module, rate: float = 1e-3) -> list[str]:
    """Move ``e_score_correction_bias`` of a transformers' model after every step of an optimizer that has parameters of it.

    The bias is added to the scores for choosing only; with c_e tokens for expert e since the last step, on all data ranks together,
    b_e <- b_e + rate sign(mean(c) - c_e) (Wang et al. 2024, algorithm 1; DeepSeek-V3, section 2.1.2). A :class:`zeropp.moe.MoE` whose
    gate has a ``bias_rate`` needs no call. One collective of the counts of all layers belongs to a step.

    Args:
        model: with such biases, as DeepSeek-V3, GLM-4 MoE and their like have.
        rate: the amount of one move.

    Returns:
        The names of the biases.

    Raises:
        zeropp.ConfigError: the model has no such bias, or one that is a parameter, or the rate is not above 0.
    """
    if not (finite(rate) and rate > 0):
        raise wrong("zeropp.moe.balance_bias: rate", rate, "a finite number above 0")
    owners = {
        name: module for name, module in model.named_modules()
        if isinstance(getattr(module, BIAS, None), Tensor) and not isinstance(module, Router)
    }  # fmt: skip
    if not owners:
        raise ConfigError(f"zeropp.moe.balance_bias: no module of {type(model).__name__} has an {BIAS}")
    for name, module in owners.items():
        if BIAS not in module._buffers:
            raise ConfigError(
                f"zeropp.moe.balance_bias: '{name}.{BIAS}' is a parameter, which may be partitioned; wanted a buffer"
            )
    for name, module in owners.items():
        move_bias(module, model, _tally_beside(model, name), float(rate))
    return [f"{name}.{BIAS}" for name in owners]


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that hold experts, by name: those of :class:`zeropp.moe.MoE`, and those that transformers marks as such."""
    return {
        name: module for name, module in model.named_modules()
        if isinstance(module, Experts) or hasattr(module, "_is_expert_parallel")
    }  # fmt: skip


def _tally_beside(model: nn.Module, name: str) -> Tally:
    """Return the counts of the experts that are nearest to a router: its own, or those of the module around it."""
    found = experts_of(model)
    place = name
    while True:
        for one, module in found.items():
            if place == "" or one.startswith(f"{place}."):
                return _tally_of(model, one, module)
        if not place:
            raise ConfigError(f"zeropp.moe.balance_bias: no experts beside '{name}', whose tokens could be counted")
        place = place.rpartition(".")[0]


def _tally_of(model: nn.Module, name: str, experts: nn.Module) -> Tally:
    """Return the counts of a layer's experts, which begin with the first call where it is not our own layer."""
    if isinstance(experts, Experts):
        router = model.get_submodule(f"{name.removesuffix('experts')}gate")
        assert isinstance(router, Router)
        return router.tally
    if _TALLY not in experts.__dict__:
        experts.__dict__[_TALLY] = Tally(int(experts.num_experts))  # type: ignore[arg-type]
        experts.register_forward_pre_hook(_count, with_kwargs=True)
    tally: Tally = experts.__dict__[_TALLY]
    return tally


def _count(experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Count the choices of a forward; E stands for none."""
    tally = experts.__dict__[_TALLY]
    name = list(inspect.signature(type(experts).forward).parameters)[2]  # after self and the tokens
    chosen = kwargs[name] if name in kwargs else args[1]
    made = torch.bincount(chosen.flatten().long(), minlength=len(tally.seen) + 1)
    tally.add(made[: len(tally.seen)], experts.training)
