# SPDX-License-Identifier: Apache-2.0
"""Try on one GPU what training needs of it: memory, events, counters, and each kernel against the CPU's bits.

Every kernel gets the same few thousand numbers on the CPU and on the GPU. All but attention promise the CPU's bits;
attention promises a bound. What fails is named, with what to use in its place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zeropp import _C, ops
from zeropp.errors import one_line

At = Callable[[Tensor], Tensor]
"""Bring a tensor to the device that is tried."""

_CPU = "train on the CPU with zeropp.Config(device='cpu')"
_STEP = "step on the CPU with zeropp.Config(offload=Offload(optimizer='cpu'))"
_BOUND = 2e-5
"""Of attention: sums of at most 64 products in fp32, each rounded to 2^-24, in another order."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was tried."""

    name: str
    """Kernel, or part of the driver."""
    why: str = ""
    """What went wrong; empty: nothing."""
    instead: str = ""
    """What to use where it does not work."""
    seconds: float = 0.0
    """How long it took, the CPU's part included."""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, and whether it passed."""
        return {**asdict(self), "passed": not self.why}


def check_device(device: torch.device, quick: bool = False) -> list[Finding]:
    """Try one GPU, in a second or less. Nothing of what is asked for is left there.

    Args:
        device: with its index; a CUDA device, or the simulated one.
        quick: only what every training asks for: parts of the driver, the norm and the steps of optimizers.

    Raises:
        zeropp.NotBuiltError: there is no such device, driver, or torch for it.
    """
    findings = [Finding(name=name, why=why or "", instead=_CPU if why else "") for name, why in
                _C.probe_device(device.type, device.index or 0)]  # fmt: skip
    return [*findings, *(_compare(name, case, instead, device) for name, case, instead in _cases(quick))]


def faults(findings: list[Finding]) -> str:
    """Return what failed, for one sentence; empty: nothing did."""
    return "; ".join(f"{one.name} ({one.why}): {one.instead}" for one in findings if one.why)


def _compare(name: str, case: Callable[[At], list[Tensor]], instead: str, device: torch.device) -> Finding:
    began = time.perf_counter()
    try:
        with torch.no_grad():
            wanted = case(lambda tensor: tensor)
            found = [tensor.cpu() for tensor in case(lambda tensor: tensor.to(device))]
        why = _difference(wanted, found, _BOUND if name.startswith("sparse_attention") else 0.0)
    except (RuntimeError, ValueError) as error:  # of a launch, or of torch
        why = one_line(error)
    return Finding(name=name, why=why, instead=instead if why else "", seconds=time.perf_counter() - began)


def _difference(wanted: list[Tensor], found: list[Tensor], bound: float) -> str:
    for number, (one, other) in enumerate(zip(wanted, found, strict=True)):
        if bound and not torch.allclose(one, other, rtol=bound, atol=bound):
            return f"result {number} differs by {(one - other).abs().max():.3g}, wanted at most {bound}"
        if not bound and not torch.equal(_bits(one), _bits(other)):
            return f"result {number} has other bits than the CPU's in {int((_bits(one) != _bits(other)).sum())} bytes"
    return ""


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


# -- what is tried -----------------------------------------------------------------------------------------------------


def _cases(quick: bool) -> Iterator[tuple[str, Callable[[At], list[Tensor]], str]]:
    yield "norm_squares", _norm, _STEP
    for name, (call, states, more) in _STEPS.items():
        for kind in _DTYPES if name in _LOW else ("fp32",):
            yield f"{name}, states in {kind}", _step_case(call, states, kind, more), _STEP
    if quick:
        return
    exact = "use zeropp.Comm(params='exact', grads='exact')"
    yield "quantise, dequantise and their sum", _quantised, exact
    yield "onebit_compress, onebit_decode", _onebit, "use an optimizer that sends exact values"
    yield "fp8_quantise, fp8_dequantise", _fp8, "leave out blocks of 8-bit floats"
    yield "moe_gate, moe_plan, moe_dispatch, moe_combine", _experts, "keep experts on the CPU"
    yield "token_sample, token_gather, token_scatter", _tokens, "leave out Random-LTD"
    yield "sparse_attention", _attention, "use torch.nn.functional.scaled_dot_product_attention"


_RATES: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "step": 3}
_FROZEN: dict[str, Any] = {"step_size": 1e-2, "variance_step": 3, "decay": 0.1}
_STEPS: dict[str, tuple[Callable[..., Any], tuple[str, ...], dict[str, Any]]] = {
    "adam_step_": (ops.adam_step_, ("exp_avg", "exp_avg_sq"), _RATES),
    "lion_step_": (ops.lion_step_, ("exp_avg",), _RATES),
    "adagrad_step_": (ops.adagrad_step_, ("sum",), _RATES),
    "sgd_step_": (ops.sgd_step_, ("momentum_buffer",), {**_RATES, "momentum": 0.9}),
    "lamb_step_": (ops.lamb_step_, ("exp_avg", "exp_avg_sq"), _RATES),
    "frozen_adam_step_": (ops.frozen_adam_step_, ("exp_avg", "exp_avg_sq"), _FROZEN),
    "zero_one_adam_step_": (ops.zero_one_adam_step_, ("exp_avg", "exp_avg_sq"), _FROZEN),
}
_LOW = ("adam_step_", "lion_step_", "adagrad_step_", "sgd_step_", "lamb_step_")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
_LENGTHS = (1, 300, 4097)


def _random(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def _each_length(at: At, make: Callable[[int], Tensor]) -> list[Tensor]:
    return [at(make(elems)) for elems in _LENGTHS]


def _step_case(
    call: Callable[..., Any], states: tuple[str, ...], kind: str, rates: dict[str, Any]
) -> Callable[[At], list[Tensor]]:
    """Return a step of an optimizer with states of one kind; it returns all tensors that it wrote."""

    def held(elems: int, seed: int) -> Tensor:
        values = _random(elems, seed=seed).abs()
        return (values * 60).clamp(max=255).to(torch.uint8) if kind == "int8" else values.to(_DTYPES[kind])

    def scale(elems: int) -> Tensor:
        return _random(ops.moments_scales(elems), seed=5).abs()

    def case(at: At) -> list[Tensor]:
        params = _each_length(at, _random)
        outs = _each_length(at, partial(torch.zeros, dtype=torch.bfloat16))
        moments = [_each_length(at, partial(held, seed=2 + k)) for k in range(len(states))]
        scales = [one for _ in states for one in _each_length(at, scale)] if kind == "int8" else []
        given: dict[str, Any] = {"skip": at(torch.zeros(1, dtype=torch.int32)), "param_outs": outs}
        if scales:
            given["scales"] = scales
        if call is ops.frozen_adam_step_:  # its gradients are in the averaged moment
            call(params, *moments, **rates, **given)
        else:
            grads = _each_length(at, lambda elems: _random(elems, seed=1).bfloat16())
            call(params, grads, *moments, **rates, **given, grad_scale=at(torch.tensor([0.5])))
        return [*params, *(tensor for list_ in moments for tensor in list_), *outs, *scales]

    return case


def _norm(at: At) -> list[Tensor]:
    tensors = [
        at(_random(elems).to(dtype)) for elems in _LENGTHS for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ]
    return list(ops.norm_squares(tensors))


def _quantised(at: At) -> list[Tensor]:
    results = []
    for bits in (8, 4):
        codes = ops.quantise(at(_random(5000)), bits=bits)
        total = at(torch.zeros(5000))
        ops.quant_sum_([codes, codes], total, factor=0.5)
        results += [codes.codes, codes.scales, codes.dequantise(), total]
    return results


def _onebit(at: At) -> list[Tensor]:
    error = at(torch.zeros(5000))
    to = ops.OneBit.empty(5000, chunk_elems=4096, device=error.device)
    ops.onebit_compress_(at(_random(5000)), error, to)
    return [to.bits, to.scales, error, to.decode()]


def _fp8(at: At) -> list[Tensor]:
    made = ops.fp8_quantise(at(_random(5000)))
    return [made.codes, made.scales, made.dequantise()]


def _experts(at: At) -> list[Tensor]:
    gate = ops.moe_gate(at(_random(64, 8)), 2)
    plan = ops.moe_plan(gate, 8, capacity=20)
    rows = ops.moe_dispatch(at(_random(64, 32, seed=1)), plan)
    return [gate.weights, gate.chosen, plan.slots, rows, ops.moe_combine(rows, plan, gate.weights)]


def _tokens(at: At) -> list[Tensor]:
    full = at(_random(2, 64, 16))
    kept = ops.token_sample(2, 64, 40, seed=3, device=full.device)
    part = ops.token_gather(full, kept)
    return [kept, part, ops.token_scatter(at(_random(2, 64, 16, seed=1)), part, kept)]


def _attention(at: At) -> list[Tensor]:
    q, k, v = (at(_random(1, 2, 64, 32, seed=seed)) for seed in range(3))
    layout = ops.SparseLayout.from_mask(torch.tril(torch.ones(4, 4, dtype=torch.bool)), 16)
    return [ops.sparse_attention(q, k, v, layout, causal=True)]
