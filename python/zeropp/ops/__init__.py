# SPDX-License-Identifier: Apache-2.0
"""The operators of zeropp: functions that check their arguments, and the fake kernels of ``torch.ops.zeropp.*``.

The kernels are C (csrc/ops), reached through libtorch's dispatcher, so they work in eager mode, under
``torch.compile`` (one graph, no break) and under fake tensors. Those of a mixture of experts, of sparse attention and of
tokens are differentiable. The others have no autograd: they change their arguments, or return what cannot be differentiated. That
is why their functions refuse tensors that require grad while grad mode is on, where calling ``torch.ops.zeropp`` directly
would drop gradients in silence.

C checks everything before it writes anything; the functions turn its message into a ValueError.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zeropp.ops import block_sparse as _sparse_attention
from zeropp.ops import checks
from zeropp.ops import fp8 as _fp8
from zeropp.ops import lamb as _lamb
from zeropp.ops import moe as _moe
from zeropp.ops import moments as _moments
from zeropp.ops import onebit as _onebit
from zeropp.ops import onebit_steps as _onebit_steps
from zeropp.ops import optimizers as _optimizers
from zeropp.ops import quant as _quant
from zeropp.ops import tokens as _tokens
from zeropp.ops.block_sparse import SparseLayout, sparse_attention
from zeropp.ops.fp8 import Fp8, fp8_dequantise_, fp8_quantise, fp8_quantise_
from zeropp.ops.lamb import lamb_moments_, lamb_step_
from zeropp.ops.moe import (
    MoeGate,
    MoePlan,
    moe_capacity,
    moe_combine,
    moe_dispatch,
    moe_gate,
    moe_plan,
    moe_share,
    swiglu,
)
from zeropp.ops.moments import moments_decode_, moments_encode_, moments_scales
from zeropp.ops.onebit import OneBit, onebit_compress_, onebit_decode_, onebit_reduce_
from zeropp.ops.onebit_steps import frozen_adam_step_, onebit_lamb_fresh_, zero_one_adam_step_
from zeropp.ops.optimizers import adagrad_step_, lion_step_, sgd_step_
from zeropp.ops.quant import Quantised, dequantise_, quant_reduce_, quant_sum_, quantise, quantise_
from zeropp.ops.tokens import token_gather, token_sample, token_scatter

__all__ = [
    "Fp8", "MoeGate", "MoePlan", "OneBit", "Quantised", "SparseLayout", "adagrad_step_", "adam_step_", "dequantise_",
    "fp8_dequantise_", "fp8_quantise", "fp8_quantise_", "frozen_adam_step_", "lamb_moments_", "lamb_step_", "lion_step_",
    "moe_capacity", "moe_combine", "moe_dispatch", "moe_gate", "moe_plan", "moe_share", "moments_decode_", "moments_encode_",
    "moments_scales", "norm_squares",
    "onebit_compress_", "onebit_decode_", "onebit_lamb_fresh_", "onebit_reduce_", "quant_reduce_", "quant_sum_", "quantise", "quantise_",
    "register", "sgd_step_", "sparse_attention", "swiglu", "token_gather",
    "token_sample", "token_scatter", "zero_one_adam_step_",
]  # fmt: skip

_registered = False


def adam_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    step: int | Sequence[int],
    lr: float | Sequence[float],
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float | Sequence[float] = 0.0,
    decoupled_decay: bool = True,
    maximize: bool = False,
    grad_scale: float | Tensor = 1.0,
    skip: Tensor | None = None,
    max_exp_avg_sqs: Sequence[Tensor] = (),
    param_outs: Sequence[Tensor] = (),
    scales: Sequence[Tensor] = (),
    seed: int = 0,
) -> None:
    """Take one step of Adam (Kingma & Ba 2015) or AdamW (Loshchilov & Hutter 2019) over lists of tensors, in one pass.

    The formula is in csrc/ops/optim/adam.h. One call moves 28 bytes a parameter in fp32, and as many with bf16 gradients
    and a bf16 copy-out (ZeRO-Offload, section 5.1), where cast, step and cast are three passes. With moments in bf16 it
    moves 20, in 8 bits 16 (csrc/ops/moments/moments.h): the same arithmetic between decoding and encoding them.

    Args:
        params: fp32 tensors, updated in place.
        grads: as many, with the same numbers of elements; fp32, bf16 or fp16.
        exp_avgs: fp32, bfloat16, or uint8 (codes of 8 bits), the first moments, updated in place.
        exp_avg_sqs: of the same type, the second moments, updated in place.
        step: t of this update, counted from 1; one number, or one a tensor.
        lr: learning rate; one number, or one a tensor.
        beta1: decay of the first moment, 0 <= beta1 < 1.
        beta2: decay of the second moment, 0 <= beta2 < 1.
        eps: added to the denominator.
        weight_decay: strength of the decay; one number, or one a tensor.
        decoupled_decay: True is AdamW, False is Adam with an L2 penalty.
        maximize: climb instead of descend.
        grad_scale: multiplies every gradient first: clip factor, or 1 / loss scale. A number, or an fp32 tensor of one
            element where the parameters are, whose value is read when the step runs there.
        skip: int32 tensor of one element where the parameters are. If it is not 0 when the step runs there, nothing is written.
        max_exp_avg_sqs: of the same type, for AMSGrad: running maxima of the second moments, updated in place. Empty:
            plain Adam.
        param_outs: fp32, bf16 or fp16 tensors that receive a copy of the new parameters. Empty: none.
        scales: of moments in uint8 only: fp32, ``moments_scales(elems)`` for each of ``exp_avgs``, then for each of
            ``exp_avg_sqs``, then of ``max_exp_avg_sqs``; updated in place. Zeros for moments of zeros.
        seed: of the stochastic rounding of moments that are not fp32. The same seed, step and place in the lists give
            the same bits, whatever the threads and the CPU.

    Raises:
        TypeError: an argument is no list of tensors, or no number.
        ValueError: wrong device, dtype, layout, number of elements or number of tensors; tensors that share memory; a
            tensor that requires grad while grad mode is on; a rate out of range. Nothing was written.
    """
    name = "zeropp.ops.adam_step_"
    written = {
        "params": params,
        "exp_avgs": exp_avgs,
        "exp_avg_sqs": exp_avg_sqs,
        "max_exp_avg_sqs": max_exp_avg_sqs,
        "param_outs": param_outs,
        "scales": scales,
    }
    for argument, tensors in {**written, "grads": grads}.items():
        checks.check_tensors(name, argument, tensors, checks.BOTH)
    checks.check_numbers(name, {"beta1": beta1, "beta2": beta2, "eps": eps})
    lrs, decays = checks.rates_of(name, {"lr": lr, "weight_decay": weight_decay})
    if not isinstance(step, (int, list, tuple)):
        raise TypeError(f"{name}: step is a {type(step).__name__}, wanted a whole number, or a list of them")
    steps = [step] * len(params) if isinstance(step, int) else list(step)
    if not any((params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, param_outs)):
        return  # without a tensor there is no device to dispatch on
    moments = [list(params), list(grads), list(exp_avgs), list(exp_avg_sqs), list(max_exp_avg_sqs)]
    numbers = [lrs, beta1, beta2, eps, decays, decoupled_decay, maximize, *checks.scale_of(name, grad_scale, skip)]
    changed = (tensor for tensors in written.values() for tensor in tensors)
    if _moments.are_codes(exp_avgs, scales):
        checks.check_whole(name, "seed", seed)
        arguments = [*moments, list(scales), list(param_outs), steps, seed, *numbers]
        checks.call(name, torch.ops.zeropp.adam_step_low_.default, arguments, changed)
    else:
        checks.call(name, torch.ops.zeropp.adam_step_.default, [*moments, list(param_outs), steps, *numbers], changed)


def norm_squares(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sum of squares and number of non-finite elements of each tensor, in one pass over memory.

    The order of the additions is fixed (csrc/ops/norm/norm.h): the same bits whatever the threads and the CPU.

    Args:
        tensors: fp32, bf16 or fp16 tensors of any shapes.

    Returns:
        ``(sums, nonfinite)``: float64 and int64 tensors with one element a tensor, where the tensors are. The global
        norm is ``sums.sum().sqrt()``.

    Raises:
        TypeError: ``tensors`` is no list of tensors.
        ValueError: wrong device, dtype or layout, or a tensor that requires grad while grad mode is on.
    """
    name = "zeropp.ops.norm_squares"
    checks.check_tensors(name, "tensors", tensors, checks.BOTH)
    if not tensors:  # no device to dispatch on
        return _fake_norm_squares([])
    sums, nonfinite = checks.call(name, torch.ops.zeropp.norm_squares.default, [list(tensors)], written=())
    return sums, nonfinite


def register() -> None:
    """Register fake kernels and gradients; ``import zeropp`` does it, after the C library registered the operators.

    All of them are registered from this file: torch reads the source of each file that registers one.
    """
    global _registered
    if _registered:
        return
    # torch asks inspect which module registers a fake kernel, and for the first answer inspect resolves the path of every module that
    # is loaded: beside transformers, that takes longer than all else of the import. Its cache is told the answer.
    getattr(inspect, "modulesbyfile", {}).setdefault(__file__, __name__)
    for op, fake in _FAKES.items():
        torch.library.register_fake(f"zeropp::{op}", fake)
    for op, (backward, context) in _GRADIENTS.items():
        torch.library.register_autograd(f"zeropp::{op}", backward, setup_context=context)
    _registered = True


def _fake_norm_squares(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    for index, tensor in enumerate(tensors):
        checks.fake_check("zeropp.ops.norm_squares", f"tensors[{index}]", tensor, checks.FLOATS)
    size, device = (len(tensors),), tensors[0].device if tensors else torch.device("cpu")
    return torch.empty(size, dtype=torch.float64, device=device), torch.empty(size, dtype=torch.int64, device=device)


_FAKES: dict[str, Callable[..., Any]] = {"norm_squares": _fake_norm_squares}
for _area in (_optimizers, _lamb, _quant, _onebit, _onebit_steps, _moe, _sparse_attention, _tokens, _fp8, _moments):
    _FAKES.update(_area.FAKES)
_GRADIENTS = {**_moe.GRADIENTS, **_sparse_attention.GRADIENTS, **_tokens.GRADIENTS}
