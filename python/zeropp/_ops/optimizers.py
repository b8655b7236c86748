# SPDX-License-Identifier: Apache-2.0
"""Steps of Lion, Adagrad and SGD over lists of tensors; the formulas are in csrc/ops/{lion,adagrad,sgd}/."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeropp._ops import doors

__all__ = ["adagrad_step_", "lion_step_", "sgd_step_"]


def lion_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.99,
    weight_decay: float = 0.0,
    maximize: bool = False,
    grad_scale: float = 1.0,
    param_outs: Sequence[Tensor] = (),
) -> None:
    """One step of Lion (Chen et al. 2023, algorithm 2) over lists of tensors, in one pass: 20 bytes a parameter.

    ``p = p (1 - lr weight_decay) - lr sign(beta1 m + (1 - beta1) g)``, then ``m = beta2 m + (1 - beta2) g``.

    Args:
        params: fp32 tensors, updated in place.
        grads: as many, with the same numbers of elements; fp32, bf16 or fp16.
        exp_avgs: fp32, the momentum, updated in place.
        lr: learning rate, lr >= 0.
        beta1: share of the momentum in the step, 0 <= beta1 < 1.
        beta2: decay of the momentum, 0 <= beta2 < 1.
        weight_decay: strength of the decoupled decay.
        maximize: climb instead of descend.
        grad_scale: multiplies every gradient first: clip factor, or 1 / loss scale.
        param_outs: fp32, bf16 or fp16 tensors that receive a copy of the new parameters. Empty: none.

    Raises:
        TypeError: an argument is no list of tensors, or no number.
        ValueError: wrong device, dtype, layout, number of elements or number of tensors; tensors that share memory; a
            tensor that requires grad while grad mode is on; a rate out of range. Nothing was written.
    """
    rates = {"lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay, "grad_scale": grad_scale}
    doors.check_numbers("zeropp.ops.lion_step_", rates)
    numbers = [lr, beta1, beta2, weight_decay, maximize, grad_scale]
    _step("lion_step_", params, grads, "exp_avgs", exp_avgs, param_outs, numbers)


def adagrad_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    state_sums: Sequence[Tensor],
    *,
    step: int | Sequence[int],
    lr: float,
    lr_decay: float = 0.0,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    maximize: bool = False,
    grad_scale: float = 1.0,
    param_outs: Sequence[Tensor] = (),
) -> None:
    """One step of Adagrad (Duchi, Hazan & Singer 2011) over lists of tensors, in one pass: 20 bytes a parameter.

    ``s = s + g g``, then ``p = p - lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps)``; decay is an L2 penalty.

    Args:
        params: fp32 tensors, updated in place.
        grads: as many, with the same numbers of elements; fp32, bf16 or fp16.
        state_sums: fp32, the sums of squares, updated in place.
        step: t of this update, counted from 1; one number, or one a tensor.
        lr: learning rate.
        lr_decay: how fast the learning rate falls, lr_decay >= 0.
        eps: added to the denominator.
        weight_decay: strength of the L2 penalty.
        maximize: climb instead of descend.
        grad_scale: multiplies every gradient first: clip factor, or 1 / loss scale.
        param_outs: fp32, bf16 or fp16 tensors that receive a copy of the new parameters. Empty: none.

    Raises:
        TypeError, ValueError: as ``lion_step_``.
    """
    name = "zeropp.ops.adagrad_step_"
    rates = {"lr": lr, "lr_decay": lr_decay, "eps": eps, "weight_decay": weight_decay, "grad_scale": grad_scale}
    doors.check_numbers(name, rates)
    numbers = [doors.steps_of(name, step, params), lr, lr_decay, eps, weight_decay, maximize, grad_scale]
    _step("adagrad_step_", params, grads, "state_sums", state_sums, param_outs, numbers)


def sgd_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor] = (),
    *,
    step: int | Sequence[int],
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    grad_scale: float = 1.0,
    param_outs: Sequence[Tensor] = (),
) -> None:
    """One step of SGD, with momentum where there are buffers, over lists of tensors: 20 bytes a parameter, 12 without.

    ``b = momentum b + (1 - dampening) g`` (``b = g`` where t is 1), then ``p = p - lr b``; Nesterov's form steps by
    ``g + momentum b``. Decay is an L2 penalty.

    Args:
        params: fp32 tensors, updated in place.
        grads: as many, with the same numbers of elements; fp32, bf16 or fp16.
        momentum_buffers: fp32, updated in place (only written where t is 1). Empty: no momentum.
        step: t of this update, counted from 1; one number, or one a tensor.
        lr: learning rate.
        momentum: share of the buffer that stays, momentum >= 0.
        dampening: 1 - dampening is the gradient's share.
        weight_decay: strength of the L2 penalty.
        nesterov: Nesterov's form; wants momentum > 0 and dampening 0.
        maximize: climb instead of descend.
        grad_scale: multiplies every gradient first: clip factor, or 1 / loss scale.
        param_outs: fp32, bf16 or fp16 tensors that receive a copy of the new parameters. Empty: none.

    Raises:
        TypeError, ValueError: as ``lion_step_``.
    """
    name = "zeropp.ops.sgd_step_"
    rates = {
        "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "grad_scale": grad_scale,
    }  # fmt: skip
    doors.check_numbers(name, rates)
    numbers = [
        doors.steps_of(name, step, params), lr, momentum, dampening, weight_decay, nesterov, maximize, grad_scale,
    ]  # fmt: skip
    _step("sgd_step_", params, grads, "momentum_buffers", momentum_buffers, param_outs, numbers)


def _step(
    op: str,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states_name: str,
    states: Sequence[Tensor],
    param_outs: Sequence[Tensor],
    numbers: Sequence[object],
) -> None:
    name = f"zeropp.ops.{op}"
    lists = {"params": params, "grads": grads, states_name: states, "param_outs": param_outs}
    for argument, tensors in lists.items():
        doors.check_tensors(name, argument, tensors, ("cpu", "cuda"))
    if not any(lists.values()):
        return  # without a tensor there is no device to dispatch on
    arguments = [*map(list, lists.values()), *numbers]
    doors.call(name, getattr(torch.ops.zeropp, op).default, arguments, [*params, *states, *param_outs])


def register() -> None:
    """Register the fake kernels."""
    torch.library.register_fake("zeropp::lion_step_", _fake_lion)
    torch.library.register_fake("zeropp::adagrad_step_", _fake_adagrad)
    torch.library.register_fake("zeropp::sgd_step_", _fake_sgd)


def _fake_step(
    name: str, params: list[Tensor], grads: list[Tensor], states: list[Tensor], states_name: str, outs: list[Tensor]
) -> None:
    doors.fake_check_like(name, "params", params, params, doors.FP32)
    doors.fake_check_like(name, "grads", grads, params, doors.FLOATS)
    if states or states_name != "momentum_buffers":
        doors.fake_check_like(name, states_name, states, params, doors.FP32)
    if outs:
        doors.fake_check_like(name, "param_outs", outs, params, doors.FLOATS)


def _fake_lion(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], param_outs: list[Tensor], *rates: float
) -> None:
    _fake_step("zeropp.ops.lion_step_", params, grads, exp_avgs, "exp_avgs", param_outs)


def _fake_adagrad(
    params: list[Tensor],
    grads: list[Tensor],
    state_sums: list[Tensor],
    param_outs: list[Tensor],
    steps: list[int],
    *rates: float,
) -> None:
    _fake_step("zeropp.ops.adagrad_step_", params, grads, state_sums, "state_sums", param_outs)


def _fake_sgd(
    params: list[Tensor],
    grads: list[Tensor],
    momentum_buffers: list[Tensor],
    param_outs: list[Tensor],
    steps: list[int],
    *rates: float,
) -> None:
    _fake_step("zeropp.ops.sgd_step_", params, grads, momentum_buffers, "momentum_buffers", param_outs)
