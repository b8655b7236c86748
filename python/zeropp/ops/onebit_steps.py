# SPDX-License-Identifier: Apache-2.0
"""Steps of the one-bit optimizers over lists of tensors; the formulas are in csrc/ops/optim/frozen.h and zero_one.h, and in
csrc/ops/onebit_lamb/onebit_lamb.h."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zeropp.ops import checks
from zeropp.ops.optimizers import fake_step

__all__ = ["frozen_adam_step_", "onebit_lamb_fresh_", "zero_one_adam_step_"]

_FROZEN = "zeropp.ops.frozen_adam_step_"
_ZERO_ONE = "zeropp.ops.zero_one_adam_step_"
_LAMB = "zeropp.ops.onebit_lamb_fresh_"


def frozen_adam_step_(
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    step_size: float | Sequence[float],
    variance_step: int | Sequence[int],
    beta2: float = 0.999,
    eps: float | Sequence[float] = 1e-8,
    decay: float | Sequence[float] = 0.0,
    param_outs: Sequence[Tensor] = (),
    skip: Tensor | None = None,
) -> None:
    """Take one step of Adam with a momentum and a variance that are there, in one pass: 16 bytes a parameter.

    ``p = p (1 - decay) - step_size m / (sqrt(v / (1 - beta2^variance_step)) + eps)``; where v is 0, p only decays. The
    step of 1-bit Adam (Tang et al. 2021, algorithm 1), whose variance is frozen and whose momentum was averaged before.

    Args:
        params: fp32 tensors, updated in place.
        exp_avgs: fp32, the momentum, or what else is the direction; as many, with the same numbers of elements.
        exp_avg_sqs: fp32, the variance.
        step_size: as a rule ``lr / (1 - beta1^t)``; one number, or one a tensor.
        variance_step: how often the variance was updated, counted from 1; one number, or one a tensor.
        beta2: decay of the variance while it was learned, 0 <= beta2 < 1.
        eps: added to the denominator, eps >= 0; one number, or one a tensor.
        decay: ``lr * weight_decay``, the share of p that goes; one number, or one a tensor.
        param_outs: fp32, bf16 or fp16 tensors that receive a copy of the new parameters. Empty: none.
        skip: int32 tensor of one element where the parameters are. If it is not 0 when the step runs there, nothing is written.

    Raises:
        TypeError, ValueError: as ``lion_step_``; nothing was written.
    """
    checks.check_numbers(_FROZEN, {"beta2": beta2})
    sizes, decays, all_eps = checks.rates_of(_FROZEN, {"step_size": step_size, "decay": decay, "eps": eps})
    lists = {"params": params, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs, "param_outs": param_outs}
    for argument, tensors in lists.items():
        checks.check_tensors(_FROZEN, argument, tensors, checks.BOTH)
    steps = checks.steps_of(_FROZEN, variance_step, params)
    if not any(lists.values()):
        return  # without a tensor there is no device to dispatch on
    arguments = [*map(list, lists.values()), steps, sizes, decays, beta2, all_eps, checks.skips_of(_FROZEN, skip)]
    checks.call(_FROZEN, torch.ops.zeropp.frozen_adam_step_.default, arguments, [*params, *param_outs])


def zero_one_adam_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    step_size: float | Sequence[float],
    variance_step: int | Sequence[int],
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float | Sequence[float] = 1e-8,
    decay: float | Sequence[float] = 0.0,
    grad_scale: float | Tensor = 1.0,
    skip: Tensor | None = None,
    moved: Sequence[Tensor] = (),
    anchors: Sequence[Tensor] = (),
    param_outs: Sequence[Tensor] = (),
) -> None:
    """Take one step of 0/1 Adam (Lu et al. 2022, algorithm 1) by a rank's own momentum, in one pass: 24 to 40 bytes an element.

    ``m = beta1 m + (1 - beta1) g``, ``u = u + step_size m``, and
    ``p = p (1 - decay) - step_size m / (sqrt(v / (1 - beta2^variance_step)) + eps)``; where v is 0, p only decays. The
    anchors decay as p does.

    Args:
        params: fp32 tensors, updated in place.
        grads: as many, with the same numbers of elements; fp32, bf16 or fp16.
        exp_avgs: fp32, the momentum m, updated in place.
        exp_avg_sqs: fp32, the variance v, as it is.
        step_size: as a rule ``lr / (1 - beta1^t)``; one number, or one a tensor.
        variance_step: how often the variance was updated, counted from 1; one number, or one a tensor.
        beta1: decay of the momentum, 0 <= beta1 < 1.
        beta2: decay of the variance while it was learned, 0 <= beta2 < 1.
        eps: added to the denominator, eps >= 0; one number, or one a tensor.
        decay: ``lr * weight_decay``, the share of p that goes; one number, or one a tensor.
        grad_scale: multiplies every gradient first: clip factor, or 1 / loss scale. A number, or an fp32 tensor of one
            element where the parameters are, whose value is read when the step runs there.
        skip: int32 tensor of one element where the parameters are. If it is not 0 when the step runs there, nothing is written.
        moved: fp32, u, what was moved since the ranks last agreed, updated in place. Empty: not kept.
        anchors: fp32, the parameters as the ranks last agreed on them, updated in place. Empty: not kept.
        param_outs: fp32, bf16 or fp16 tensors that receive a copy of the new parameters. Empty: none.

    Raises:
        TypeError, ValueError: as ``lion_step_``; nothing was written.
    """
    checks.check_numbers(_ZERO_ONE, {"beta1": beta1, "beta2": beta2})
    sizes, decays, all_eps = checks.rates_of(_ZERO_ONE, {"step_size": step_size, "decay": decay, "eps": eps})
    lists = {
        "params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs, "moved": moved,
        "anchors": anchors, "param_outs": param_outs,
    }  # fmt: skip
    for argument, tensors in lists.items():
        checks.check_tensors(_ZERO_ONE, argument, tensors, checks.BOTH)
    steps = checks.steps_of(_ZERO_ONE, variance_step, params)
    if not any(lists.values()):
        return  # without a tensor there is no device to dispatch on
    arguments = [*map(list, lists.values()), steps, sizes, decays, beta1, beta2, all_eps]
    arguments += checks.scale_of(_ZERO_ONE, grad_scale, skip)
    written = [*params, *exp_avgs, *moved, *anchors, *param_outs]
    checks.call(_ZERO_ONE, torch.ops.zeropp.zero_one_adam_step_.default, arguments, written)


def onebit_lamb_fresh_(
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    befores: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    fresh_sqs: Sequence[Tensor],
    *,
    step: int | Sequence[int],
    freeze_step: int,
    coefficient: float | Sequence[float] = 1.0,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float | Sequence[float] = 1e-8,
    weight_decay: float | Sequence[float] = 0.0,
) -> tuple[Tensor, Tensor]:
    """Compute the fresh variance and the norms of a step of 1-bit LAMB (Li et al. 2021, algorithm 1): 24 bytes a parameter, one pass.

    With ``c`` the coefficient, ``w`` the momentum before and ``b = sqrt(v / (1 - beta2^min(t, freeze_step))) + eps``:
    ``g = (m - beta1 w) / (c (1 - beta1))``, ``v' = beta2 v' + (1 - beta2) g^2``, and the update
    ``u = m / (c (1 - beta1^t)) / b + weight_decay p``. Where v is 0, the momentum has no part in u. The order of the
    additions is fixed: the same bits whatever the threads and the CPU.

    Args:
        params: fp32 tensors, or pieces of them.
        exp_avgs: fp32, c times the momentum; as many, with the same numbers of elements.
        befores: fp32, the same a step before.
        exp_avg_sqs: fp32, the frozen variance.
        fresh_sqs: fp32, the fresh variance, updated in place.
        step: t of this update, counted from 1; one number, or one a tensor.
        freeze_step: after how many updates the variance was frozen.
        coefficient: c > 0; one number, or one a tensor.
        beta1: decay of the momentum, 0 <= beta1 < 1.
        beta2: decay of both variances, 0 <= beta2 < 1.
        eps: added to the denominators, eps >= 0; one number, or one a tensor.
        weight_decay: strength of the decay; one number, or one a tensor.

    Returns:
        ``(sums, largest)``: float64 ``[tensors, 2]``, the sums of squares of u without its decay and of u; and float32
        ``[tensors]``, the largest ratio of b to the same of v' (0 where v is 0). Where the tensors are.

    Raises:
        TypeError, ValueError: as ``lion_step_``; nothing was written.
    """
    checks.check_numbers(_LAMB, {"beta1": beta1, "beta2": beta2})
    checks.check_whole(_LAMB, "freeze_step", freeze_step)
    rates = {"coefficient": coefficient, "eps": eps, "weight_decay": weight_decay}
    coefficients, all_eps, decays = checks.rates_of(_LAMB, rates)
    lists = {
        "params": params, "exp_avgs": exp_avgs, "befores": befores, "exp_avg_sqs": exp_avg_sqs, "fresh_sqs": fresh_sqs,
    }  # fmt: skip
    for argument, tensors in lists.items():
        checks.check_tensors(_LAMB, argument, tensors, checks.BOTH)
    steps = checks.steps_of(_LAMB, step, params)
    if not any(lists.values()):
        return _results([])  # without a tensor there is no device to dispatch on
    numbers = [steps, freeze_step, coefficients, beta1, beta2, all_eps, decays]
    op = torch.ops.zeropp.onebit_lamb_fresh_.default
    sums, largest = checks.call(_LAMB, op, [*map(list, lists.values()), *numbers], fresh_sqs)
    return sums, largest


def _results(params: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    device, count = params[0].device if params else torch.device("cpu"), len(params)
    sums = torch.empty(count, 2, dtype=torch.float64, device=device)
    return sums, torch.empty(count, dtype=torch.float32, device=device)


def _fake_lamb(params: list[Tensor], *rest: Any) -> tuple[Tensor, Tensor]:
    fake_step("onebit_lamb_fresh_", params, *rest)
    return _results(params)


_STEPS = ("frozen_adam_step_", "zero_one_adam_step_")
FAKES = {"onebit_lamb_fresh_": _fake_lamb, **{op: functools.partial(fake_step, op) for op in _STEPS}}
