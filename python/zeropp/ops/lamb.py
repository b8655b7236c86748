# SPDX-License-Identifier: Apache-2.0
"""A step of LAMB over lists of tensors; the formula is in csrc/ops/lamb/lamb.h."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zeropp.ops import checks
from zeropp.ops import moments as _moments
from zeropp.ops.optimizers import fake_step

__all__ = ["lamb_moments_", "lamb_step_"]

_NAME = "zeropp.ops.lamb_step_"
_MOMENTS = "zeropp.ops.lamb_moments_"


def lamb_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    step: int | Sequence[int],
    lr: float | Sequence[float],
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float | Sequence[float] = 0.0,
    trust: tuple[float, float] = (0.0, 10.0),
    maximize: bool = False,
    grad_scale: float | Tensor = 1.0,
    skip: Tensor | None = None,
    param_outs: Sequence[Tensor] = (),
    scales: Sequence[Tensor] = (),
    seed: int = 0,
) -> None:
    """Take one step of LAMB (You et al. 2020, algorithm 2) over lists of tensors, norms included: 40 bytes a parameter.

    ``u`` is AdamW's update with its decay inside; ``p = p - lr r u`` with ``r = |p| / |u|`` of each whole tensor, held
    within ``trust``, and 1 where either norm is 0 or not finite.

    Args:
        params: fp32 tensors, updated in place; each is a whole layer's tensor: its norm is taken.
        grads: as many, with the same numbers of elements; fp32, bf16 or fp16.
        exp_avgs: fp32, bfloat16, or uint8 (codes of 8 bits), first moments, updated in place.
        exp_avg_sqs: of the same type, second moments, updated in place.
        step: t of this update, counted from 1; one number, or one a tensor.
        lr: learning rate; one number, or one a tensor.
        beta1: decay of the first moment, 0 <= beta1 < 1.
        beta2: decay of the second moment, 0 <= beta2 < 1.
        eps: added to the denominator.
        weight_decay: strength of the decay, which is part of u; one number, or one a tensor.
        trust: least and greatest r, 0 <= least <= greatest.
        maximize: climb instead of descend.
        grad_scale: multiplies every gradient first: clip factor, or 1 / loss scale. A number, or an fp32 tensor of one
            element where the parameters are, whose value is read when the step runs there.
        skip: int32 tensor of one element where the parameters are. If it is not 0 when the step runs there, nothing is written.
        param_outs: fp32, bf16 or fp16 tensors that receive a copy of the new parameters. Empty: none.
        scales: of moments in uint8 only: fp32, ``moments_scales(elems)`` for each of ``exp_avgs``, then for each of
            ``exp_avg_sqs``; updated in place.
        seed: of the stochastic rounding of moments that are not fp32.

    Raises:
        TypeError, ValueError: as ``lion_step_``; nothing was written.
    """
    least, most = trust
    rates = {"beta1": beta1, "beta2": beta2, "eps": eps, "trust_least": least, "trust_most": most}
    checks.check_numbers(_NAME, rates)
    lrs, decays = checks.rates_of(_NAME, {"lr": lr, "weight_decay": weight_decay})
    low = _moments.are_codes(exp_avgs, scales)
    lists = {
        "params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs,
        **({"scales": scales} if low else {}), "param_outs": param_outs,
    }  # fmt: skip
    for argument, tensors in lists.items():
        checks.check_tensors(_NAME, argument, tensors, checks.BOTH)
    steps = checks.steps_of(_NAME, step, params)
    if not any(lists.values()):
        return  # without a tensor there is no device to dispatch on
    numbers = [lrs, beta1, beta2, eps, decays, least, most, maximize, *checks.scale_of(_NAME, grad_scale, skip)]
    written = [*params, *exp_avgs, *exp_avg_sqs, *scales, *param_outs]
    tensors_of = list(map(list, lists.values()))
    if low:
        checks.check_whole(_NAME, "seed", seed)
        checks.call(_NAME, torch.ops.zeropp.lamb_step_low_.default, [*tensors_of, steps, seed, *numbers], written)
    else:
        checks.call(_NAME, torch.ops.zeropp.lamb_step_.default, [*tensors_of, steps, *numbers], written)


def lamb_moments_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    step: int | Sequence[int],
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float | Sequence[float] = 0.0,
    maximize: bool = False,
    grad_scale: float | Tensor = 1.0,
    skip: Tensor | None = None,
) -> Tensor:
    """Take the first half of a step of LAMB, for tensors in pieces, whose norms are sums over pieces: 24 bytes a parameter.

    Moments, and the squares of p and of ``u`` as ``lamb_step_`` has them. The other half is ``frozen_adam_step_`` with
    ``step_size = rate / (1 - beta1^t)`` and ``decay = rate weight_decay``, once all pieces' sums give the rate.

    Args:
        params: fp32 tensors, or pieces of them; read.
        grads: as many, with the same numbers of elements; fp32, bf16 or fp16.
        exp_avgs: fp32, first moments, updated in place.
        exp_avg_sqs: fp32, second moments, updated in place.
        step, beta1, beta2, eps, weight_decay, maximize, grad_scale, skip: as ``lamb_step_`` has them.

    Returns:
        float64 ``[tensors, 2]``, where the tensors are: sums of squares of p, and of u; zeros if the step is skipped.

    Raises:
        TypeError, ValueError: as ``lion_step_``; nothing was written.
    """
    checks.check_numbers(_MOMENTS, {"beta1": beta1, "beta2": beta2, "eps": eps})
    (decays,) = checks.rates_of(_MOMENTS, {"weight_decay": weight_decay})
    lists = {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    for argument, tensors in lists.items():
        checks.check_tensors(_MOMENTS, argument, tensors, checks.BOTH)
    steps = checks.steps_of(_MOMENTS, step, params)
    if not any(lists.values()):
        return _sums([])  # without a tensor there is no device to dispatch on
    arguments = [
        *map(list, lists.values()),
        steps,
        beta1,
        beta2,
        eps,
        decays,
        maximize,
        *checks.scale_of(_MOMENTS, grad_scale, skip),
    ]
    sums: Tensor = checks.call(_MOMENTS, torch.ops.zeropp.lamb_moments_.default, arguments, [*exp_avgs, *exp_avg_sqs])
    return sums


def _sums(params: Sequence[Tensor]) -> Tensor:
    device = params[0].device if params else torch.device("cpu")
    return torch.empty(len(params), 2, dtype=torch.float64, device=device)


def _fake_moments(params: list[Tensor], *rest: Any) -> Tensor:
    fake_step("lamb_moments_", params, *rest)
    return _sums(params)


_STEPS = ("lamb_step_", "lamb_step_low_")
FAKES = {"lamb_moments_": _fake_moments, **{op: functools.partial(fake_step, op) for op in _STEPS}}
