# SPDX-License-Identifier: Apache-2.0
"""A call of every operator that steps an optimizer, over tensors of odd lengths and several dtypes, for tests that compare calls."""

from __future__ import annotations

from typing import Any

import torch
import zeropp
from torch import Tensor
from zeropp.ops import moments_scales

LENGTHS = (0, 1, 300, 4097, 40_000)
KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
#: Operator: its lists of states, whether their dtype may vary, whether it has a gradient, and its rates.
STEPS: dict[str, tuple[tuple[str, ...], bool, bool, dict[str, Any]]] = {
    "adam_step_": (("exp_avgs", "exp_avg_sqs"), True, True, {"step": 3, "lr": 1e-2, "weight_decay": 0.1}),
    "lion_step_": (("exp_avgs",), True, True, {"step": 3, "lr": 1e-3, "weight_decay": 0.1}),
    "adagrad_step_": (("state_sums",), True, True, {"step": 3, "lr": 1e-2, "lr_decay": 0.1}),
    "sgd_step_": (("momentum_buffers",), True, True, {"step": 3, "lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "lamb_step_": (("exp_avgs", "exp_avg_sqs"), True, True, {"step": 3, "lr": 1e-2, "weight_decay": 0.1}),
    "lamb_moments_": (("exp_avgs", "exp_avg_sqs"), False, True, {"step": 3, "weight_decay": 0.1}),
    "frozen_adam_step_": (
        ("exp_avgs", "exp_avg_sqs"),
        False,
        False,
        {"step_size": 1e-2, "variance_step": 3, "decay": 0.1},
    ),
    "zero_one_adam_step_": (("exp_avgs", "exp_avg_sqs"), False, True, {"step_size": 1e-2, "variance_step": 3}),
}
CASES = [(op, kind) for op, (_, varies, _, _) in STEPS.items() for kind in KINDS if varies or kind == "fp32"]


def tensors_of(op: str, kind: str) -> dict[str, list[Tensor]]:
    """Return the lists that the operator takes, on the cpu; the same values each time."""
    states, _, has_grad, _ = STEPS[op]
    generator = torch.Generator().manual_seed(len(op))
    lists = {"params": [torch.randn(elems, generator=generator) for elems in LENGTHS]}
    if has_grad:
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        grads = [torch.randn(elems, generator=generator) for elems in LENGTHS]
        lists["grads"] = [grad.to(dtypes[i % 3]) for i, grad in enumerate(grads)]
    for state in states:
        values = [torch.rand(elems, generator=generator) for elems in LENGTHS]
        lists[state] = [(x * 200).to(torch.uint8) if kind == "int8" else x.to(KINDS[kind]) for x in values]
    if kind == "int8":
        lists["scales"] = [torch.rand(moments_scales(elems), generator=generator) for _ in states for elems in LENGTHS]
    if op != "lamb_moments_":
        lists["param_outs"] = [torch.zeros(elems, dtype=torch.bfloat16) for elems in LENGTHS]
    return lists


def call(op: str, lists: dict[str, list[Tensor]], **more: Any) -> list[Tensor]:
    """Call the operator with its rates, and return every tensor that it may have written, and its result."""
    own = dict(lists)
    first = [
        own.pop("params"),
        *([own.pop("grads")] if STEPS[op][2] else []),
        *(own.pop(name) for name in STEPS[op][0]),
    ]
    result = getattr(zeropp.ops, op)(*first, **own, **STEPS[op][3], **more)
    return [*(tensor for tensors in lists.values() for tensor in tensors), *([] if result is None else [result])]
