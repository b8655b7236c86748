# SPDX-License-Identifier: Apache-2.0
"""1-bit LAMB's fresh variance and norms over lists of tensors; the formula is in csrc/ops/onebit_lamb/onebit_lamb.h."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeropp.ops import checks

__all__ = ["onebit_lamb_fresh_"]

_NAME = "zeropp.ops.onebit_lamb_fresh_"


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
    checks.check_numbers(_NAME, {"beta1": beta1, "beta2": beta2})
    checks.check_whole(_NAME, "freeze_step", freeze_step)
    rates = {"coefficient": coefficient, "eps": eps, "weight_decay": weight_decay}
    coefficients, all_eps, decays = checks.rates_of(_NAME, rates)
    lists = {
        "params": params, "exp_avgs": exp_avgs, "befores": befores, "exp_avg_sqs": exp_avg_sqs, "fresh_sqs": fresh_sqs,
    }  # fmt: skip
    for argument, tensors in lists.items():
        checks.check_tensors(_NAME, argument, tensors, checks.BOTH)
    steps = checks.steps_of(_NAME, step, params)
    if not any(lists.values()):
        return _results([])  # without a tensor there is no device to dispatch on
    numbers = [steps, freeze_step, coefficients, beta1, beta2, all_eps, decays]
    op = torch.ops.zeropp.onebit_lamb_fresh_.default
    sums, largest = checks.call(_NAME, op, [*map(list, lists.values()), *numbers], fresh_sqs)
    return sums, largest


def register() -> None:
    """Register the fake kernel."""
    torch.library.register_fake("zeropp::onebit_lamb_fresh_", _fake)


def _results(params: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    device, count = params[0].device if params else torch.device("cpu"), len(params)
    sums = torch.empty(count, 2, dtype=torch.float64, device=device)
    return sums, torch.empty(count, dtype=torch.float32, device=device)


def _fake(
    params: list[Tensor],
    exp_avgs: list[Tensor],
    befores: list[Tensor],
    exp_avg_sqs: list[Tensor],
    fresh_sqs: list[Tensor],
    *numbers: object,
) -> tuple[Tensor, Tensor]:
    lists = {"exp_avgs": exp_avgs, "befores": befores, "exp_avg_sqs": exp_avg_sqs, "fresh_sqs": fresh_sqs}
    for argument, tensors in {"params": params, **lists}.items():
        checks.fake_check_like(_NAME, argument, tensors, params, checks.FP32)
    return _results(params)
