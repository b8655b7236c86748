# SPDX-License-Identifier: Apache-2.0
"""The products of gated experts over rows that are grouped by expert, in memory that is used again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from zeropp.moe.exchange import Exchange

Empty = Callable[[int, int], Tensor]


def swiglu_experts(
    rows: Tensor, ends: Tensor, gate_up: Tensor, down: Tensor, *, exchange: Exchange | None = None
) -> Tensor:
    """Return ``(silu(x G_e) * (x U_e)) D_e`` of the rows x of each expert e. Differentiable, once.

    Each expert's rows go through both products and the activation between them while they are in the cache, and what lies between
    the products is held for one expert at a time; the forward keeps ``rows [G | U]`` for the backward, (N, 2 I), and nothing else.

    Args:
        rows: (N, W), grouped by expert, as :func:`zeropp.moe.dispatch` returns them.
        ends: (E,) int32: the row after the last one of each expert.
        gate_up: (E, 2 I, W), of the dtype of ``rows``.
        down: (E, W, I).
        exchange: whose ``combine`` takes the result, which then lies where peers read it without a copy.

    Raises:
        ValueError: shapes or dtypes do not fit each other.
    """
    experts, inner2, width = gate_up.shape
    fits = rows.dim() == 2 and rows.shape[1] == width and down.shape == (experts, width, inner2 // 2)
    if not fits or inner2 % 2 or ends.shape != (experts,) or {rows.dtype, down.dtype} != {gate_up.dtype}:
        raise ValueError(
            f"zeropp.moe.swiglu_experts: rows {tuple(rows.shape)} {rows.dtype}, ends {tuple(ends.shape)}, gate_up {tuple(gate_up.shape)} "
            f"{gate_up.dtype}, down {tuple(down.shape)} {down.dtype}; wanted (N, W), (E,), (E, 2 I, W) and (E, W, I) of one dtype"
        )
    result = _SwigluExperts.apply(rows, ends, gate_up, down, exchange)
    assert isinstance(result, Tensor)
    return result


def swiglu_expert(rows: Tensor, gate_up: Tensor, down: Tensor, outputs: Tensor) -> None:
    """Write ``(silu(x G) * (x U)) D`` of the rows x of one expert to ``outputs``, (N, W). Not differentiable.

    Args:
        rows: (N, W), N >= 1.
        gate_up: (2 I, W).
        down: (W, I).
        outputs: (N, W), contiguous.
    """
    between = torch.mm(rows, gate_up.t())
    if rows.is_cpu:
        active = rows.new_empty(rows.shape[0], gate_up.shape[0] // 2)
        torch.ops.zeropp.swiglu_(between, active, active.shape[1])
    else:
        gate, up = between.chunk(2, 1)
        active = torch.nn.functional.silu(gate) * up
    torch.mm(active, down.t(), out=outputs)


def _parts(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield the experts and their rows."""
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        yield expert, slice(begin, end)
        begin = end


def _empty_of(exchange: Exchange | None, dtype: torch.dtype) -> Empty:
    if exchange is None:
        return lambda count, width: torch.empty(count, width, dtype=dtype, device="cpu")
    return lambda count, width: exchange.empty(count, width, dtype)


def _most(ends: Tensor) -> int:
    """Return the rows of the expert that has the most."""
    return int(ends.diff(prepend=ends.new_zeros(1)).max())


class _SwigluExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, ends: Tensor, gate_up: Tensor, down: Tensor, exchange: Exchange | None
    ) -> Tensor:
        inner = gate_up.shape[1] // 2
        between = rows.new_empty(rows.shape[0], 2 * inner)
        active = rows.new_empty(_most(ends), inner)
        outputs = _empty_of(exchange, rows.dtype)(rows.shape[0], rows.shape[1])
        for expert, part in _parts(ends):
            count = part.stop - part.start
            if not count:
                continue
            torch.mm(rows[part], gate_up[expert].t(), out=between[part])
            torch.ops.zeropp.swiglu_(between[part], active[:count], inner)
            torch.mm(active[:count], down[expert].t(), out=outputs[part])
        ctx.save_for_backward(rows, ends, gate_up, down, between)
        ctx.exchange = exchange
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows, ends, gate_up, down, between = ctx.saved_tensors
        of_rows, _, of_gate_up, of_down, _ = ctx.needs_input_grad
        inner, most, grad = gate_up.shape[1] // 2, _most(ends), grad.contiguous()
        grad_rows = _empty_of(ctx.exchange, rows.dtype)(*rows.shape) if of_rows else None
        grad_gate_up = torch.empty_like(gate_up) if of_gate_up else None
        grad_down = torch.empty_like(down) if of_down else None
        grad_active, active = rows.new_empty(most, inner), rows.new_empty(most, inner)
        grad_between = rows.new_empty(most, 2 * inner)
        for expert, part in _parts(ends):
            count = part.stop - part.start
            here, inside = grad_between[:count], active[:count]
            if count:
                torch.mm(grad[part], down[expert], out=grad_active[:count])
                torch.ops.zeropp.swiglu_backward_(grad_active[:count], between[part], here, inside, inner)
            # Without a row both are zeros, which the product of nothing is.
            if grad_down is not None:
                torch.mm(grad[part].t(), inside, out=grad_down[expert])
            if grad_gate_up is not None:
                torch.mm(here.t(), rows[part], out=grad_gate_up[expert])
            if grad_rows is not None and count:
                torch.mm(here, gate_up[expert], out=grad_rows[part])
        return grad_rows, None, grad_gate_up, grad_down, None
