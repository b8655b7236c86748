# SPDX-License-Identifier: Apache-2.0
"""SwiGLU against torch's operators in fp64 (Shazeer 2020)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from zeropp import ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(0, 8), (1, 2), (7, 74), (3, 5, 512), (400, 1000)])
def test_forward_and_backward_are_the_formula(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype).mul_(3).requires_grad_()
    y = ops.swiglu(x)
    grad = torch.randn_like(y)
    (mine,) = torch.autograd.grad(y, x, grad)
    twin = x.detach().double().requires_grad_()
    gate, up = twin.chunk(2, -1)
    want = torch.nn.functional.silu(gate) * up
    (want_grad,) = torch.autograd.grad(want, twin, grad.double())
    # In fp32 the sigmoid has an error of a few roundings and the rest one each; the result is rounded once more to its dtype.
    bound = 16 * 2.0**-24 + torch.finfo(dtype).eps
    for seen, wanted in ((y, want), (mine, want_grad)):
        scale = float(wanted.detach().abs().max()) if wanted.numel() else 0.0
        torch.testing.assert_close(seen.double(), wanted, rtol=bound, atol=bound * 2.0**-4 * scale)
    out = torch.empty_like(y)
    assert torch.equal(ops.swiglu(x.detach(), out=out), y)


def test_backward_into_memory_that_is_there() -> None:
    torch.manual_seed(0)
    x, grad = torch.randn(33, 40), torch.randn(33, 20)
    want, made = torch.ops.zeropp.swiglu_backward(grad, x, 20)
    assert torch.equal(made, ops.swiglu(x))
    reused, over = x.clone(), grad.clone()  # what is read is written over
    torch.ops.zeropp.swiglu_backward_(over, reused, reused, over, 20)
    assert torch.equal(reused, want)
    assert torch.equal(over, made)


def test_large_numbers_do_not_overflow() -> None:
    x = torch.tensor([[-1e4, 2.0], [1e4, 2.0], [0.0, 3.0]])
    small, large, nothing = ops.swiglu(x).flatten().tolist()
    assert abs(small) < 1e-30
    assert (large, nothing) == (2e4, 0.0)


def test_opcheck() -> None:
    x, grad = torch.randn(5, 8), torch.randn(5, 4)
    z = torch.ops.zeropp
    torch.library.opcheck(z.swiglu.default, (x.clone().requires_grad_(), 4))
    torch.library.opcheck(z.swiglu_.default, (x, torch.zeros(5, 4), 4))
    torch.library.opcheck(z.swiglu_backward.default, (grad, x, 4))
    torch.library.opcheck(z.swiglu_backward_.default, (grad, x, torch.zeros(5, 8), torch.zeros(5, 4), 4))


@pytest.mark.parametrize(
    ("call", "kind", "sentence"),
    [
        (lambda: ops.swiglu([1]), TypeError, "gate_up is a list, wanted a tensor"),
        (lambda: ops.swiglu(torch.zeros(2, 3)), ValueError, r"gate_up has shape \(2, 3\), wanted \(..., 2 I\)"),
        (lambda: ops.swiglu(torch.zeros(2, 4).double()), ValueError, "gate_up"),
        (lambda: ops.swiglu(torch.zeros(2, 4), out=torch.zeros(3, 2)), ValueError, "wanted 4.* 2 rows of 2"),
        (lambda: ops.swiglu(torch.zeros(2, 4), out=torch.zeros(2, 2).half()), ValueError, "out"),
    ],
)
def test_misuse_is_refused(call: Any, kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        call()
