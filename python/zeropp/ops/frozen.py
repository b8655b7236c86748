# SPDX-License-Identifier: Apache-2.0
"""Steps of Adam whose variance is frozen, over lists of tensors; the formula is in csrc/ops/optim/frozen.h."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeropp.ops import checks

__all__ = ["frozen_adam_step_"]

_NAME = "zeropp.ops.frozen_adam_step_"


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
) -> None:
    """One step of Adam with a momentum and a variance that are there, in one pass: 16 bytes a parameter.

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

    Raises:
        TypeError, ValueError: as ``lion_step_``; nothing was written.
    """
    checks.check_numbers(_NAME, {"beta2": beta2})
    sizes, decays, all_eps = checks.rates_of(_NAME, {"step_size": step_size, "decay": decay, "eps": eps})
    lists = {"params": params, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs, "param_outs": param_outs}
    for argument, tensors in lists.items():
        checks.check_tensors(_NAME, argument, tensors, checks.BOTH)
    steps = checks.steps_of(_NAME, variance_step, params)
    if not any(lists.values()):
        return  # without a tensor there is no device to dispatch on
    arguments = [*map(list, lists.values()), steps, sizes, decays, beta2, all_eps]
    checks.call(_NAME, torch.ops.zeropp.frozen_adam_step_.default, arguments, [*params, *param_outs])


def register() -> None:
    """Register the fake kernel."""
    torch.library.register_fake("zeropp::frozen_adam_step_", _fake)


def _fake(
    params: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    param_outs: list[Tensor],
    variance_steps: list[int],
    *rates: float,
) -> None:
    checks.fake_check_like(_NAME, "params", params, params, checks.FP32)
    checks.fake_check_like(_NAME, "exp_avgs", exp_avgs, params, checks.FP32)
    checks.fake_check_like(_NAME, "exp_avg_sqs", exp_avg_sqs, params, checks.FP32)
    if param_outs:
        checks.fake_check_like(_NAME, "param_outs", param_outs, params, checks.FLOATS)
