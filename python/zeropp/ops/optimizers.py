# SPDX-License-Identifier: Apache-2.0
"""Steps of Lion, Adagrad and SGD over lists of tensors; the formulas are in csrc/ops/optim/."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeropp.ops import checks
from zeropp.ops import moments as _moments

__all__ = ["adagrad_step_", "lion_step_", "sgd_step_"]


def lion_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    *,
    lr: float | Sequence[float],
    beta1: float = 0.9,
    beta2: float = 0.99,
    weight_decay: float | Sequence[float] = 0.0,
    maximize: bool = False,
    grad_scale: float | Tensor = 1.0,
    skip: Tensor | None = None,
    param_outs: Sequence[Tensor] = (),
    step: int | Sequence[int] | None = None,
    scales: Sequence[Tensor] = (),
    seed: int = 0,
    streams: Sequence[int] | None = None,
    firsts: Sequence[int] | None = None,
) -> None:
    """Take one step of Lion (Chen et al. 2023, algorithm 2) over lists of tensors, in one pass: 20 bytes a parameter.

    ``p = p (1 - lr weight_decay) - lr sign(beta1 m + (1 - beta1) g)``, then ``m = beta2 m + (1 - beta2) g``. With the
    momentum in bf16 it moves 16 bytes, in 8 bits 14 (csrc/ops/moments/moments.h): the same arithmetic between decoding
    and encoding it.

    Args:
        params: fp32 tensors, updated in place.
        grads: as many, with the same numbers of elements; fp32, bf16 or fp16.
        exp_avgs: fp32, bfloat16, or uint8 (codes of 8 bits), the momentum, updated in place.
        lr: learning rate, lr >= 0; one number, or one a tensor.
        beta1: share of the momentum in the step, 0 <= beta1 < 1.
        beta2: decay of the momentum, 0 <= beta2 < 1.
        weight_decay: strength of the decoupled decay; one number, or one a tensor.
        maximize: climb instead of descend.
        grad_scale: multiplies every gradient first: clip factor, or 1 / loss scale. A number, or an fp32 tensor of one
            element where the parameters are, whose value is read when the step runs there.
        skip: int32 tensor of one element where the parameters are. If it is not 0 when the step runs there, nothing is written.
        param_outs: fp32, bf16 or fp16 tensors that receive a copy of the new parameters. Empty: none.
        step: of a momentum that is not fp32: t of this update, counted from 1; one number, or one a tensor.
        scales: of uint8 only: fp32, ``moments_scales(elems, first)`` for each tensor; updated in place.
        seed, streams: the stochastic rounding of a momentum that is not fp32 is made of the seed, the tensor's stream
            (None: its place in the list), step and place in the tensor alone.
        firsts: for pieces of tensors, the place of each one's first element in its tensor. None: whole tensors.

    Raises:
        TypeError: an argument is no list of tensors, or no number.
        ValueError: wrong device, dtype, layout, number of elements or number of tensors; tensors that share memory; a
            tensor that requires grad while grad mode is on; a rate out of range. Nothing was written.
    """
    name = "zeropp.ops.lion_step_"
    checks.check_numbers(name, {"beta1": beta1, "beta2": beta2})
    lrs, decays = checks.rates_of(name, {"lr": lr, "weight_decay": weight_decay})
    numbers = [lrs, beta1, beta2, decays, maximize, *checks.scale_of(name, grad_scale, skip)]
    low = _Low(step, scales, seed, streams, firsts)
    _step("lion_step_", params, grads, "exp_avgs", exp_avgs, param_outs, [], numbers, low)


def adagrad_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    state_sums: Sequence[Tensor],
    *,
    step: int | Sequence[int],
    lr: float | Sequence[float],
    lr_decay: float = 0.0,
    eps: float = 1e-10,
    weight_decay: float | Sequence[float] = 0.0,
    maximize: bool = False,
    grad_scale: float | Tensor = 1.0,
    skip: Tensor | None = None,
    param_outs: Sequence[Tensor] = (),
    scales: Sequence[Tensor] = (),
    seed: int = 0,
    streams: Sequence[int] | None = None,
    firsts: Sequence[int] | None = None,
) -> None:
    """Take one step of Adagrad (Duchi, Hazan & Singer 2011) over lists of tensors, in one pass: 20 bytes a parameter.

    ``s = s + g g``, then ``p = p - lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps)``; decay is an L2 penalty.

    Args:
        params: fp32 tensors, updated in place.
        grads: as many, with the same numbers of elements; fp32, bf16 or fp16.
        state_sums: fp32, bfloat16, or uint8 (codes of 8 bits), the sums of squares, updated in place.
        step: t of this update, counted from 1; one number, or one a tensor.
        lr: learning rate; one number, or one a tensor.
        lr_decay: how fast the learning rate falls, lr_decay >= 0.
        eps: added to the denominator.
        weight_decay: strength of the L2 penalty; one number, or one a tensor.
        maximize: climb instead of descend.
        grad_scale: multiplies every gradient first: clip factor, or 1 / loss scale. A number, or an fp32 tensor of one
            element where the parameters are, whose value is read when the step runs there.
        skip: int32 tensor of one element where the parameters are. If it is not 0 when the step runs there, nothing is written.
        param_outs: fp32, bf16 or fp16 tensors that receive a copy of the new parameters. Empty: none.
        scales, seed, streams, firsts: of states that are not fp32, as ``lion_step_`` has them.

    Raises:
        TypeError, ValueError: as ``lion_step_``.
    """
    name = "zeropp.ops.adagrad_step_"
    checks.check_numbers(name, {"lr_decay": lr_decay, "eps": eps})
    lrs, decays = checks.rates_of(name, {"lr": lr, "weight_decay": weight_decay})
    numbers = [lrs, lr_decay, eps, decays, maximize, *checks.scale_of(name, grad_scale, skip)]
    steps, low = [checks.steps_of(name, step, params)], _Low(step, scales, seed, streams, firsts)
    _step("adagrad_step_", params, grads, "state_sums", state_sums, param_outs, steps, numbers, low)


def sgd_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor] = (),
    *,
    step: int | Sequence[int],
    lr: float | Sequence[float],
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float | Sequence[float] = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    grad_scale: float | Tensor = 1.0,
    skip: Tensor | None = None,
    param_outs: Sequence[Tensor] = (),
    scales: Sequence[Tensor] = (),
    seed: int = 0,
    streams: Sequence[int] | None = None,
    firsts: Sequence[int] | None = None,
) -> None:
    """Take one step of SGD, with momentum where there are buffers, over lists of tensors: 20 bytes a parameter, 12 without.

    ``b = momentum b + (1 - dampening) g`` (``b = g`` where t is 1), then ``p = p - lr b``; Nesterov's form steps by
    ``g + momentum b``. Decay is an L2 penalty.

    Args:
        params: fp32 tensors, updated in place.
        grads: as many, with the same numbers of elements; fp32, bf16 or fp16.
        momentum_buffers: fp32, bfloat16, or uint8 (codes of 8 bits), updated in place (of no meaning before t is 1).
            Empty: no momentum.
        step: t of this update, counted from 1; one number, or one a tensor.
        lr: learning rate; one number, or one a tensor.
        momentum: share of the buffer that stays, momentum >= 0.
        dampening: 1 - dampening is the gradient's share.
        weight_decay: strength of the L2 penalty; one number, or one a tensor.
        nesterov: Nesterov's form; wants momentum > 0 and dampening 0.
        maximize: climb instead of descend.
        grad_scale: multiplies every gradient first: clip factor, or 1 / loss scale. A number, or an fp32 tensor of one
            element where the parameters are, whose value is read when the step runs there.
        skip: int32 tensor of one element where the parameters are. If it is not 0 when the step runs there, nothing is written.
        param_outs: fp32, bf16 or fp16 tensors that receive a copy of the new parameters. Empty: none.
        scales, seed, streams, firsts: of states that are not fp32, as ``lion_step_`` has them.

    Raises:
        TypeError, ValueError: as ``lion_step_``.
    """
    name = "zeropp.ops.sgd_step_"
    checks.check_numbers(name, {"momentum": momentum, "dampening": dampening})
    lrs, decays = checks.rates_of(name, {"lr": lr, "weight_decay": weight_decay})
    numbers = [lrs, momentum, dampening, decays, nesterov, maximize, *checks.scale_of(name, grad_scale, skip)]
    steps, low = [checks.steps_of(name, step, params)], _Low(step, scales, seed, streams, firsts)
    _step("sgd_step_", params, grads, "momentum_buffers", momentum_buffers, param_outs, steps, numbers, low)


class _Low(NamedTuple):
    """Arguments of states that are not fp32."""

    step: int | Sequence[int] | None
    scales: Sequence[Tensor]
    seed: int
    streams: Sequence[int] | None
    firsts: Sequence[int] | None


def _step(
    op: str,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states_name: str,
    states: Sequence[Tensor],
    param_outs: Sequence[Tensor],
    steps: Sequence[object],
    numbers: Sequence[object],
    low: _Low,
) -> None:
    name = f"zeropp.ops.{op}"
    lists = {"params": params, "grads": grads, states_name: states, "param_outs": param_outs}
    if _moments.are_codes(states, low.scales):
        lists = {"params": params, "grads": grads, states_name: states, "scales": low.scales, "param_outs": param_outs}
        checks.check_whole(name, "seed", low.seed)
        steps = [_moments.places_of(name, params, low.step, low.streams, low.firsts), low.seed]
        op = op.replace("step_", "step_low_")
    for argument, tensors in lists.items():
        checks.check_tensors(name, argument, tensors, checks.BOTH)
    if not any(lists.values()):
        return  # without a tensor there is no device to dispatch on
    arguments = [*map(list, lists.values()), *steps, *numbers]
    written = [*params, *states, *low.scales, *param_outs]
    checks.call(name, getattr(torch.ops.zeropp, op).default, arguments, written)


_OPTIONAL = ("max_exp_avg_sqs", "momentum_buffers", "moved", "anchors")
"""Lists of states that may be empty."""


@functools.cache
def _arguments_of(op: str) -> tuple[list[str], list[str]]:
    """Return the names of an operator's arguments, and of those that are lists of states, from its schema."""
    arguments = getattr(torch.ops.zeropp, op).default._schema.arguments
    lists = [argument.name for argument in arguments if str(argument.type) == "List[Tensor]"]
    others = ("params", "grads", "scales", "param_outs", "grad_scales", "skips")
    return [argument.name for argument in arguments], [name for name in lists if name not in others]


def fake_step(op: str, *arguments: Any) -> None:
    """Check the arguments of a step in a fake kernel, which finds them by the names of the schema, as C does."""
    name = "zeropp.ops." + op.replace("_low_", "_")
    names, states = _arguments_of(op)
    given = dict(zip(names, arguments, strict=True))
    params: list[Tensor] = given["params"]
    checks.fake_check_like(name, "params", params, params, checks.FP32)
    if "grads" in given:
        checks.fake_check_like(name, "grads", given["grads"], params, checks.FLOATS)
    if given.get("param_outs"):
        checks.fake_check_like(name, "param_outs", given["param_outs"], params, checks.FLOATS)
    if "scales" in given:
        firsts = _moments.fake_check_places(name, given["places"], params) if "places" in given else ()
        _moments.fake_check_low(name, {state: given[state] for state in states}, params, given["scales"], firsts)
    else:
        for state in states:
            if given[state] or state not in _OPTIONAL:
                checks.fake_check_like(name, state, given[state], params, checks.FP32)
    for steps in {"steps", "variance_steps"} & given.keys():
        if len(given[steps]) != len(params):
            raise ValueError(
                f"{name}: {steps} has {len(given[steps])} numbers, wanted {len(params)} as params has tensors"
            )


_STEPS = ("adam_step_", "lion_step_", "adagrad_step_", "sgd_step_")
FAKES = {op: functools.partial(fake_step, op) for op in (*_STEPS, *(f"{step}low_" for step in _STEPS))}
