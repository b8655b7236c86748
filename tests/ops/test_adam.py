# SPDX-License-Identifier: Apache-2.0
"""Adam against torch's optimizers and against the papers' formula, element by element.

The bound. u = 2^-24 is fp32's unit roundoff. From the same p, m, v, g, one update of ours and of the exact formula
differ by at most (first order in u; constants such as 1 - beta1 and lr / (1 - beta1^t) are rounded once, one u each):

    m' = m + w (g - m)            d_m <= u |m'| + 3u |w (g - m)|
                                  (last addition; difference, product and w)
    v' = b v + w g g              all terms are positive: 4u relative (b or w, two products, addition: at most 4)
    D  = sqrt(v') r + eps         2u (half of v's) + u (sqrt) + u (r) + u (product) + u (addition) = 6u relative
    q  = s m' / D                 u (s) + u (product) + u (division) + 6u (D) = 9u relative, and d_m s / D
    p' = k p - q                  u |p'| + 2u |k p| (k, product) + 9u |q| + d_m s / D

torch rounds the same operations in another order, or fused, and at most as often; so two fp32 versions differ by at
most twice that. With weight decay as an L2 penalty, g itself is off by 3u (|g| + |wd p|), entering m by w and v by 2w|g|.
Subnormal v is left out of the relative bound (its unit is absolute): test_extremes covers it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import zeropp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import adam as reference
from torch import Tensor

U = 2.0**-24
RATES = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
QUIET = settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


def bounds(
    p: Tensor, m: Tensor, v: Tensor, g: Tensor, t: int, decay: float, decoupled: bool, rates: dict[str, float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Largest distance of (p', m', v') from the exact update, per element: see the top of the file."""
    p, m, v, g = p.double(), m.double(), v.double(), g.double()
    w, beta2 = 1 - rates["beta1"], rates["beta2"]
    off_g = torch.zeros_like(g)
    keep = 1.0
    if decoupled:
        keep = 1 - rates["lr"] * decay
    elif decay:
        off_g = 3 * U * (g.abs() + (decay * p).abs())
        g = g + decay * p
    new_m = m + w * (g - m)
    off_m = U * new_m.abs() + 3 * U * (w * (g - m)).abs() + w * off_g
    new_v = beta2 * v + (1 - beta2) * g * g
    off_v = 4 * U * new_v + 2 * (1 - beta2) * g.abs() * off_g
    denominator = (new_v / (1 - beta2**t)).sqrt() + rates["eps"]
    size = rates["lr"] / (1 - rates["beta1"] ** t)
    q = size * new_m / denominator
    from_v = torch.where(new_v > 0, off_v / (2 * new_v), 0.0)  # relative error of sqrt(v')
    off_q = q.abs() * (7 * U + from_v) + size * off_m / denominator
    off_p = U * (keep * p - q).abs() + 2 * U * (keep * p).abs() + off_q
    return off_p, off_m, off_v


def tensors(elems: int, seed: int, offset: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """p, m, v, g of a run that goes on, at an address that is offset by some elements."""
    rng = torch.Generator().manual_seed(seed)

    def one(scale: float) -> Tensor:
        return (torch.randn(elems + offset, generator=rng) * scale)[offset:]

    return one(0.1), one(1e-2), one(1e-2).square(), one(1e-2)


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("peer", ["single", "fused", "papers"])
@QUIET
@given(elems=st.integers(0, 4097), offset=st.integers(0, 17), t=st.integers(1, 1000), seed=st.integers(0, 99))
def test_one_step_agrees(peer: str, decay: float, decoupled: bool, elems: int, offset: int, t: int, seed: int) -> None:
    p, m, v, g = tensors(elems, seed, offset)
    off_p, off_m, off_v = bounds(p, m, v, g, t, decay, decoupled, RATES)
    want = peer_step(peer, p, m, v, g, t, decay, decoupled)
    zeropp.ops.adam_step_([p], [g], [m], [v], step=t, weight_decay=decay, decoupled_decay=decoupled, **RATES)
    sides = 1 if peer == "papers" else 2
    for got, wanted, off, name in zip((p, m, v), want, (off_p, off_m, off_v), "pmv", strict=True):
        over = (got.double() - wanted.double()).abs() - sides * off * 1.0001
        assert elems == 0 or over.max().item() <= 0, f"{name} differs from {peer} by {over.max().item()} over the bound"


def peer_step(
    peer: str, p: Tensor, m: Tensor, v: Tensor, g: Tensor, t: int, decay: float, decoupled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the same update by torch, or by the papers' formula in float64."""
    if peer == "papers":
        state = reference.State(p.double(), m.double(), v.double(), v.double())
        after = reference.step(state, g, t, weight_decay=decay, decoupled=decoupled, **RATES)
        return after.theta, after.m, after.v
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    param = p.clone().requires_grad_()
    param.grad = g.clone()
    how = {"fused": True} if peer == "fused" else {"foreach": False}
    betas = (RATES["beta1"], RATES["beta2"])
    optimizer = kind([param], lr=RATES["lr"], betas=betas, eps=RATES["eps"], weight_decay=decay, **how)
    optimizer.state[param] = {"step": torch.tensor(float(t - 1)), "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
    optimizer.step()
    state = optimizer.state[param]
    return param.detach(), state["exp_avg"], state["exp_avg_sq"]


def test_fifty_steps_follow_the_papers() -> None:
    """Errors of single steps add up: after n steps p is within n times one step's bound (steps of m and v decay)."""
    p, _, _, _ = tensors(1000, 5)
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    state, allowed = reference.start(p), torch.zeros(1000, dtype=torch.float64)
    for t in range(1, 51):
        g = torch.randn(1000, generator=torch.Generator().manual_seed(t))
        off_p, _, _ = bounds(p, m, v, g, t, 0.1, True, RATES)
        allowed += 4 * off_p  # 4: m and v carry errors of earlier steps, which shrink by beta a step
        zeropp.ops.adam_step_([p], [g], [m], [v], step=t, weight_decay=0.1, **RATES)
        state = reference.step(state, g, t, weight_decay=0.1, **RATES)
        assert bool(((p.double() - state.theta).abs() <= allowed).all()), f"step {t}"


@pytest.mark.parametrize("maximize", [False, True])
def test_amsgrad_and_maximize_follow_torch(maximize: bool) -> None:
    p, m, v, g = tensors(777, 1)
    top = v * 2 * (torch.arange(777) % 2)
    param = p.clone().requires_grad_()
    param.grad = g.clone()
    optimizer = torch.optim.AdamW([param], lr=3e-3, amsgrad=True, maximize=maximize, foreach=False, weight_decay=0.1)
    optimizer.state[param] = {
        "step": torch.tensor(6.0), "exp_avg": m.clone(), "exp_avg_sq": v.clone(), "max_exp_avg_sq": top.clone(),
    }  # fmt: skip
    optimizer.step()
    zeropp.ops.adam_step_(
        [p], [g], [m], [v], max_exp_avg_sqs=[top], step=7, weight_decay=0.1, maximize=maximize, **RATES
    )
    state = optimizer.state[param]
    torch.testing.assert_close(top, state["max_exp_avg_sq"], rtol=8 * U, atol=0)
    torch.testing.assert_close(p, param.detach(), rtol=16 * U, atol=1e-3 * 18 * U)  # |q| < 1e-3 here


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@QUIET
@given(elems=st.integers(1, 4097), offset=st.integers(0, 33), seed=st.integers(0, 99))
def test_low_precision_in_and_out_is_the_fp32_step_between_casts(
    dtype: torch.dtype, elems: int, offset: int, seed: int
) -> None:
    """The casts round to nearest even and nothing else is different, so the bits are equal."""
    p, m, v, g = tensors(elems, seed)
    low, out = torch.zeros(elems + offset, dtype=dtype), torch.full((elems + offset + 5,), 7.0, dtype=dtype)
    low[offset:] = g.to(dtype)
    p2, m2, v2 = p.clone(), m.clone(), v.clone()
    zeropp.ops.adam_step_([p], [low[offset:].float()], [m], [v], step=3, **RATES)
    zeropp.ops.adam_step_([p2], [low[offset:]], [m2], [v2], param_outs=[out[offset : offset + elems]], step=3, **RATES)
    assert torch.equal(p, p2) and torch.equal(m, m2) and torch.equal(v, v2)
    assert torch.equal(out[offset : offset + elems], p.to(dtype))
    assert bool((out[:offset] == 7).all()) and bool((out[offset + elems :] == 7).all()), "wrote beside its part"


def test_a_copy_out_in_fp32_is_the_parameter() -> None:
    p, m, v, g = tensors(100, 3)
    out = torch.empty(100)
    zeropp.ops.adam_step_([p], [g], [m], [v], param_outs=[out], step=1, **RATES)
    assert torch.equal(out, p)


def test_grad_scale_scales_the_gradient() -> None:
    p, m, v, g = tensors(100, 3)
    p2, m2, v2 = p.clone(), m.clone(), v.clone()
    zeropp.ops.adam_step_([p], [g * 0.25], [m], [v], step=1, **RATES)
    zeropp.ops.adam_step_([p2], [g], [m2], [v2], step=1, grad_scale=0.25, **RATES)
    assert torch.equal(p, p2) and torch.equal(v, v2)


def test_each_tensor_has_its_own_step() -> None:
    kept = [tensors(50, seed) for seed in (1, 2)]
    apart = [tuple(x.clone() for x in four) for four in kept]
    p, m, v, g = ([four[k] for four in kept] for k in range(4))
    zeropp.ops.adam_step_(p, g, m, v, step=[1, 9], **RATES)
    for (p1, m1, v1, g1), t, got in zip(apart, (1, 9), p, strict=True):
        zeropp.ops.adam_step_([p1], [g1], [m1], [v1], step=t, **RATES)
        assert torch.equal(p1, got)


def test_extremes() -> None:
    """Zeros, subnormals and huge gradients against the papers; NaN and infinity stay where they are."""
    g = torch.tensor([0.0, 1e-30, -1e-22, 1e-45, 1e15, float("nan"), float("inf"), 1.0])
    p, m, v = torch.ones(8), torch.zeros(8), torch.zeros(8)
    state = reference.step(reference.start(p), g, 1, **RATES)
    zeropp.ops.adam_step_([p], [g], [m], [v], step=1, **RATES)
    finite = [0, 1, 2, 3, 4, 7]
    assert p.isnan().tolist() == [False] * 5 + [True, True, False]
    torch.testing.assert_close(p[finite].double(), state.theta[finite], rtol=4 * U, atol=RATES["lr"] * 16 * U)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_do_not_show(threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        p, m, v, g = tensors(200_003, 8)
        out = torch.zeros(200_003, dtype=torch.bfloat16)
        zeropp.ops.adam_step_([p], [g.bfloat16()], [m], [v], param_outs=[out], step=2, **RATES)
    finally:
        torch.set_num_threads(before)
    p1, m1, v1, g1 = tensors(200_003, 8)
    lengths = [64, 1, 100_000, 99_938]
    zeropp.ops.adam_step_(
        p1.split(lengths), g1.bfloat16().split(lengths), m1.split(lengths), v1.split(lengths), step=2, **RATES
    )
    assert torch.equal(p, p1) and torch.equal(m, m1) and torch.equal(v, v1) and torch.equal(out, p1.bfloat16())


def state_hash() -> dict[str, Any]:
    """Return a hash of what this process computes at its CPU level; run below in processes with other levels."""
    p, m, v, g = tensors(4097, 4)
    out = torch.zeros(4097, dtype=torch.float16)
    zeropp.ops.adam_step_([p], [g.bfloat16()], [m], [v], param_outs=[out], step=5, weight_decay=0.1, **RATES)
    sums, bad = zeropp.ops.norm_squares([g, g.bfloat16(), g.half()])
    bits = {
        name: hash(tuple(x.view(torch.int32 if x.itemsize == 4 else torch.int16).tolist()))
        for name, x in (("g", g), ("p", p), ("m", m), ("v", v), ("out", out))
    }
    return {"level": zeropp._C.cpu_level(), "bits": bits, "sums": [x.hex() for x in sums.tolist()], "bad": bad.tolist()}


@pytest.mark.parametrize("level", ["scalar", "avx2", "avx512", "neon"])
def test_cpu_levels_give_the_same_bits(level: str) -> None:
    """The whole path, with ZEROPP_CPU; tests/c/test_ops_adam.c compares the versions over all kinds and options."""
    if level not in {name for _, name, usable in zeropp._C.kernels() if usable}:
        pytest.skip(f"{level}: this machine lacks it")
    environment = {**os.environ, "ZEROPP_CPU": level, "PYTHONHASHSEED": "0"}
    code = (
        "import importlib.util, json, sys\n"
        f"spec = importlib.util.spec_from_file_location('t', {str(Path(__file__))!r})\n"
        "t = importlib.util.module_from_spec(spec); sys.modules['t'] = t; spec.loader.exec_module(t)\n"
        "print(json.dumps(t.state_hash()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"the process at level {level} ended with {done.returncode}:\n{done.stderr}"
    got = json.loads(done.stdout)
    want = state_hash()
    assert got["level"] == level
    assert got["bits"] == want["bits"]  # g: was the input the same?
    assert got["sums"] == want["sums"]
    assert got["bad"] == want["bad"] == [0, 0, 0]
