# SPDX-License-Identifier: Apache-2.0
"""The step of 0/1 Adam over lists of tensors; the formula is in csrc/ops/optim/zero_one.h."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeropp.ops import checks

__all__ = ["zero_one_adam_step_"]

_NAME = "zeropp.ops.zero_one_adam_step_"


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
    grad_scale: float = 1.0,
    moved: Sequence[Tensor] = (),
    anchors: Sequence[Tensor] = (),
    param_outs: Sequence[Tensor] = (),
) -> None:
    """One step of 0/1 Adam (Lu et al. 2022, algorithm 1) by a rank's own momentum, in one pass: 24 to 40 bytes an element.

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
        grad_scale: multiplies every gradient first: clip factor, or 1 / loss scale.
        moved: fp32, u, what was moved since the ranks last agreed, updated in place. Empty: not kept.
        anchors: fp32, the parameters as the ranks last agreed on them, updated in place. Empty: not kept.
        param_outs: fp32, bf16 or fp16 tensors that receive a copy of the new parameters. Empty: none.

    Raises:
        TypeError, ValueError: as ``lion_step_``; nothing was written.
    """
    checks.check_numbers(_NAME, {"beta1": beta1, "beta2": beta2, "grad_scale": grad_scale})
    sizes, decays, all_eps = checks.rates_of(_NAME, {"step_size": step_size, "decay": decay, "eps": eps})
    lists = {
        "params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs, "moved": moved,
        "anchors": anchors, "param_outs": param_outs,
    }  # fmt: skip
    for argument, tensors in lists.items():
        checks.check_tensors(_NAME, argument, tensors, checks.BOTH)
    steps = checks.steps_of(_NAME, variance_step, params)
    if not any(lists.values()):
        return  # without a tensor there is no device to dispatch on
    arguments = [*map(list, lists.values()), steps, sizes, decays, beta1, beta2, all_eps, grad_scale]
    written = [*params, *exp_avgs, *moved, *anchors, *param_outs]
    checks.call(_NAME, torch.ops.zeropp.zero_one_adam_step_.default, arguments, written)


def register() -> None:
    """Register the fake kernel."""
    torch.library.register_fake("zeropp::zero_one_adam_step_", _fake)


def _fake(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    moved: list[Tensor],
    anchors: list[Tensor],
    param_outs: list[Tensor],
    variance_steps: list[int],
    *rates: float,
) -> None:
    checks.fake_check_step(_NAME, params, grads, param_outs)
    checks.fake_check_like(_NAME, "exp_avgs", exp_avgs, params, checks.FP32)
    checks.fake_check_like(_NAME, "exp_avg_sqs", exp_avg_sqs, params, checks.FP32)
    for argument, tensors in (("moved", moved), ("anchors", anchors)):
        if tensors:
            checks.fake_check_like(_NAME, argument, tensors, params, checks.FP32)
