# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: gate, plan, dispatch and combine; the formulas are in csrc/ops/moe/moe.h."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from zeropp.ops import checks

__all__ = [
    "MoeGate",
    "MoePlan",
    "moe_capacity",
    "moe_combine",
    "moe_dispatch",
    "moe_gate",
    "moe_plan",
    "moe_share",
    "swiglu",
]

_INT32 = (torch.int32,)
_INT64 = (torch.int64,)
MAX_EXPERTS = 1024
MAX_CHOICES = 64


class MoeGate(NamedTuple):
    """Decisions of ``moe_gate`` for T tokens, E experts and k choices."""

    weights: Tensor
    """(T, k) fp32, differentiable."""
    chosen: Tensor
    """(T, k) int32: the experts, best first."""
    counts: Tensor
    """(E,) int64: assignments of each expert, before any is dropped."""
    balance_loss: Tensor
    """Scalar, differentiable: E times the sum over experts of share of assignments times mean score (Switch, eq. 4)."""
    z_loss: Tensor
    """Scalar, differentiable: mean square of the logits' log-sum-exp (ST-MoE, eq. 5)."""


class MoePlan(NamedTuple):
    """Places to which ``moe_dispatch`` puts each assignment, and where ``moe_combine`` finds it."""

    slots: Tensor
    """(T, k) int32: row of the buffer, -1 where the assignment was dropped."""
    kept: Tensor
    """(E,) int64: rows used of each expert."""
    capacity: int
    """Rows of each expert, or 0: dropless."""

    @property
    def rows(self) -> int:
        """Rows of the buffer: E capacity, or T k."""
        return self.kept.numel() * self.capacity if self.capacity else self.slots.numel()


def moe_capacity(tokens: int, experts: int, k: int, factor: float = 1.0, least: int = 4) -> int:
    """Rows for each expert: ``ceil(factor * k * tokens / experts)``, at least ``least`` (GShard, section 2.2)."""
    for label, value in (("tokens", tokens), ("experts", experts), ("k", k), ("least", least)):
        checks.check_whole("zeropp.ops.moe_capacity", label, value)
    checks.check_numbers("zeropp.ops.moe_capacity", {"factor": factor})
    if tokens < 0 or experts < 1 or k < 1 or least < 1 or not (factor > 0 and math.isfinite(factor)):
        raise ValueError(
            f"zeropp.ops.moe_capacity: tokens {tokens}, experts {experts}, k {k}, factor {factor}, least {least}; wanted "
            "tokens >= 0, experts, k and least >= 1, and a finite factor > 0"
        )
    return max(least, math.ceil(factor * k * tokens / experts))


def moe_gate(
    logits: Tensor,
    k: int,
    *,
    scoring: Literal["softmax", "sigmoid"] = "softmax",
    normalise: bool | None = None,
    bias: Tensor | None = None,
) -> MoeGate:
    """Return the k best experts of every token, their weights, and the two losses; differentiable, deterministic.

    Args:
        logits: (T, E), fp32; other floating dtypes are cast to it first.
        k: experts a token, 1 <= k <= min(E, 64); E is at most 1024.
        scoring: ``"softmax"`` over the experts, or ``"sigmoid"`` of each logit.
        normalise: divide the weights by their sum over the chosen. Default: where k > 1.
        bias: (E,) or (T, E) fp32, added to the logits for choosing only: noise (GShard, Gumbel), or the balancing
            bias of loss-free routing. It gets no gradient.

    Returns:
        A :class:`MoeGate`. A token whose logits have a NaN has NaN weights, and is still routed.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: wrong shape, device or layout, k out of range, or a bias that requires grad.
    """
    name = "zeropp.ops.moe_gate"
    checks.check_readable(name, "logits", logits, checks.BOTH)
    checks.check_whole(name, "k", k)
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(f"{name}: logits is {logits.dtype} {tuple(logits.shape)}, wanted floating numbers (T, E)")
    if scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"{name}: scoring is {scoring!r}, wanted 'softmax' or 'sigmoid'")
    if bias is None:
        bias = logits.new_empty(0, dtype=torch.float32)
    else:
        checks.check_tensor(name, "bias", bias, checks.BOTH)
        if bias.shape != logits.shape and bias.shape != logits.shape[1:]:
            raise ValueError(
                f"{name}: bias has shape {tuple(bias.shape)}, wanted {tuple(logits.shape[1:])} or {tuple(logits.shape)}"
            )
    numbers = [logits.shape[1], k, scoring == "sigmoid", k > 1 if normalise is None else bool(normalise)]
    op = torch.ops.zeropp.moe_gate.default
    weights, chosen, counts, losses = checks.ask(name, op, [logits.float().contiguous(), bias, *numbers])
    return MoeGate(weights, chosen, counts, losses[0], losses[1])


def moe_plan(gate: MoeGate | Tensor, experts: int, *, capacity: int | None = None, seed: int | None = None) -> MoePlan:
    """Rows for all assignments in a buffer grouped by expert: a counting sort.

    Without a capacity the buffer has T k rows, expert after expert, in order of tokens. With one it has ``experts *
    capacity`` rows, a fixed shape; what does not fit is dropped: later choices first, then later tokens, or, with a
    seed, tokens picked at random (random token selection, DeepSpeed-MoE): the same ones for the same seed.

    Args:
        gate: what ``moe_gate`` gave, or (T, k) int32 experts.
        experts: how many there are.
        capacity: rows of each expert (see ``moe_capacity``). None: dropless.
        seed: 0 <= seed < 2^63, random token selection. None: in order.

    Raises:
        TypeError, ValueError: a wrong argument; an expert out of range.
    """
    name = "zeropp.ops.moe_plan"
    chosen = gate.chosen if isinstance(gate, MoeGate) else gate
    checks.check_tensor(name, "chosen", chosen, checks.BOTH)
    if chosen.dim() != 2:
        raise ValueError(f"{name}: chosen has shape {tuple(chosen.shape)}, wanted (T, k)")
    checks.check_whole(name, "experts", experts)
    for label, value, least in (("capacity", capacity, 1), ("seed", seed, 0)):
        if value is not None:
            checks.check_whole(name, label, value)
            if value < least:
                raise ValueError(f"{name}: {label} is {value}, wanted None or at least {least}")
    rows = 0 if capacity is None else capacity
    numbers = [experts, chosen.shape[1], rows, -1 if seed is None else seed]
    slots, kept = checks.ask(name, torch.ops.zeropp.moe_plan.default, [chosen.contiguous(), *numbers])
    return MoePlan(slots, kept, rows)


def moe_dispatch(x: Tensor, plan: MoePlan, *, out: Tensor | None = None) -> Tensor:
    """Copy tokens into the buffer grouped by expert; empty rows are zero. Differentiable without ``out``.

    Moves (1 + k) rows a token. A large buffer should be used again (``out=``): fresh memory costs several times the
    copy in page faults.

    Args:
        x: (T, W), fp32, bf16 or fp16.
        plan: what ``moe_plan`` gave.
        out: (rows, W) of x's dtype to write to, or None for a new tensor.

    Raises:
        TypeError, ValueError: a wrong argument, a plan for other tokens, ``out`` sharing memory with ``x``.
    """
    name = "zeropp.ops.moe_dispatch"
    k, width = _check_moved(name, "x", x, plan)
    if out is None:
        return _tensor(checks.ask(name, torch.ops.zeropp.moe_dispatch.default,
                                 [x.contiguous(), plan.slots, plan.kept, k, plan.capacity, width]))  # fmt: skip
    _check_out(name, x, out, (plan.rows, width))
    checks.call(
        f"{name}_", torch.ops.zeropp.moe_dispatch_.default,
        [x.contiguous(), plan.slots, plan.kept, out, k, plan.capacity, width], [out],
    )  # fmt: skip
    return out


def moe_combine(rows: Tensor, plan: MoePlan, weights: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """Return the weighted sum of each token's rows, in fp32, rounded once. Differentiable without ``out``.

    Args:
        rows: (plan.rows, W), fp32, bf16 or fp16: what the experts made of the buffer.
        plan: what ``moe_plan`` gave.
        weights: (T, k) fp32. None: a plain sum.
        out: (T, W) of the dtype of ``rows`` to write to, or None for a new tensor.

    Returns:
        (T, W); zero for a token of which all assignments were dropped.

    Raises:
        TypeError, ValueError: as ``moe_dispatch``.
    """
    name = "zeropp.ops.moe_combine"
    k, width = _check_moved(name, "rows", rows, plan)
    if weights is None:
        weights = rows.new_empty(0, dtype=torch.float32)
    else:
        checks.check_readable(name, "weights", weights, checks.BOTH)
        if weights.shape != plan.slots.shape:
            raise ValueError(
                f"{name}: weights has shape {tuple(weights.shape)}, wanted {tuple(plan.slots.shape)} as plan.slots"
            )
    weights = weights.float().contiguous()
    if out is None:
        return _tensor(checks.ask(name, torch.ops.zeropp.moe_combine.default,
                                 [rows.contiguous(), plan.slots, plan.kept, weights, k, plan.capacity, width]))  # fmt: skip
    _check_out(name, rows, out, (plan.slots.shape[0], width))
    checks.check_tensor(name, "weights", weights, checks.BOTH)
    checks.call(
        f"{name}_", torch.ops.zeropp.moe_combine_.default,
        [rows.contiguous(), plan.slots, plan.kept, weights, out, k, plan.capacity, width], [out],
    )  # fmt: skip
    return out


def swiglu(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return ``silu(gate) * up`` of rows ``[gate | up]`` in one pass (SwiGLU, Shazeer 2020). Differentiable without ``out``.

    Reads 2 and writes 1 element a result; the backward reads 3 and writes 3, where torch's operators do so several times.

    Args:
        gate_up: (..., 2 I), fp32, bf16 or fp16, on the cpu.
        out: (..., I) of gate_up's dtype to write to, or None for a new tensor.

    Raises:
        TypeError, ValueError: a wrong argument.
    """
    name = "zeropp.ops.swiglu"
    checks.check_readable(name, "gate_up", gate_up)
    if gate_up.dim() < 1 or gate_up.shape[-1] % 2 or not gate_up.shape[-1]:
        raise ValueError(f"{name}: gate_up has shape {tuple(gate_up.shape)}, wanted (..., 2 I) with I >= 1")
    inner = gate_up.shape[-1] // 2
    shape = (*gate_up.shape[:-1], inner)
    if out is None:
        return _tensor(checks.ask(name, torch.ops.zeropp.swiglu.default, [gate_up.contiguous(), inner])).view(shape)
    checks.check_tensor(name, "gate_up", gate_up)
    checks.check_tensor(name, "out", out)
    checks.call(f"{name}_", torch.ops.zeropp.swiglu_.default, [gate_up.contiguous(), out, inner], [out])
    return out


def _tensor(value: Any) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def _check_moved(name: str, label: str, tensor: Tensor, plan: MoePlan) -> tuple[int, int]:
    checks.check_readable(name, label, tensor, checks.BOTH)
    if not isinstance(plan, MoePlan):
        raise TypeError(f"{name}: plan is a {type(plan).__name__}, wanted what zeropp.ops.moe_plan gives")
    if tensor.dim() != 2 or tensor.shape[1] == 0:
        raise ValueError(f"{name}: {label} has shape {tuple(tensor.shape)}, wanted rows (N, W) with W >= 1")
    return plan.slots.shape[1], tensor.shape[1]


def _check_out(name: str, tensor: Tensor, out: Tensor, shape: tuple[int, int]) -> None:
    checks.check_tensor(name, "the tensor moved to out", tensor, checks.BOTH)
    checks.check_tensor(name, "out", out, checks.BOTH)
    if out.shape != shape or out.dtype != tensor.dtype:
        raise ValueError(f"{name}: out is {out.dtype} {tuple(out.shape)}, wanted {tensor.dtype} {shape}")


# --- what torch has to know ------------------------------------------------------------------------------------------
def _gate_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, _, _, ctx.k, ctx.sigmoid, ctx.normalise = inputs
    _, chosen, counts, _ = output
    ctx.mark_non_differentiable(chosen, counts)
    ctx.save_for_backward(logits, chosen, counts)


def _gate_backward(ctx: Any, grad_weights: Tensor, _chosen: Any, _counts: Any, grad_losses: Tensor) -> tuple[Any, ...]:
    logits, chosen, counts = ctx.saved_tensors
    grad = torch.ops.zeropp.moe_gate_backward.default(
        grad_weights.contiguous(), grad_losses.contiguous(), logits, chosen, counts, ctx.k, ctx.sigmoid, ctx.normalise
    )
    return grad.view_as(logits), None, None, None, None, None


def _dispatch_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, slots, kept, ctx.k, ctx.capacity, ctx.width = inputs
    ctx.save_for_backward(slots, kept)


def _dispatch_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    slots, kept = ctx.saved_tensors
    ones = grad.new_empty(0, dtype=torch.float32)
    op = torch.ops.zeropp.moe_combine.default
    return op(grad.contiguous(), slots, kept, ones, ctx.k, ctx.capacity, ctx.width), None, None, None, None, None


def _combine_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, slots, kept, weights, ctx.k, ctx.capacity, ctx.width = inputs
    ctx.save_for_backward(rows, slots, kept, weights)


def _combine_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rows, slots, kept, weights = ctx.saved_tensors
    numbers = (ctx.k, ctx.capacity, ctx.width)
    grad = grad.contiguous()
    none = (None, None)
    if weights.numel() == 0:
        return torch.ops.zeropp.moe_dispatch.default(grad, slots, kept, *numbers), *none, None, None, None, None
    op = torch.ops.zeropp.moe_combine_backward.default
    grad_rows, grad_weights = op(grad, rows, slots, kept, weights, *numbers)
    return grad_rows, *none, grad_weights.view_as(weights), None, None, None


def _swiglu_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate_up, ctx.inner = inputs
    ctx.save_for_backward(gate_up)


def _swiglu_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (gate_up,) = ctx.saved_tensors
    grad_gate_up, _ = torch.ops.zeropp.swiglu_backward.default(grad.contiguous(), gate_up, ctx.inner)
    return grad_gate_up.view_as(gate_up), None


def _fake_swiglu(gate_up: Tensor, inner: int) -> Tensor:
    checks.fake_check("zeropp.ops.swiglu", "gate_up", gate_up, checks.FLOATS)
    return gate_up.new_empty((gate_up.numel() // (2 * inner), inner))


def _fake_swiglu_into(gate_up: Tensor, out: Tensor, inner: int) -> None:
    checks.fake_check("zeropp.ops.swiglu_", "out", out, (gate_up.dtype,))


def _fake_swiglu_backward(grad: Tensor, gate_up: Tensor, inner: int) -> tuple[Tensor, Tensor]:
    checks.fake_check("zeropp.ops.swiglu_backward", "grad", grad, (gate_up.dtype,))
    rows = gate_up.numel() // (2 * inner)
    return gate_up.new_empty((rows, 2 * inner)), gate_up.new_empty((rows, inner))


def _fake_swiglu_backward_into(grad: Tensor, gate_up: Tensor, grad_gate_up: Tensor, out: Tensor, inner: int) -> None:
    checks.fake_check("zeropp.ops.swiglu_backward_", "grad", grad, (gate_up.dtype,))


def _fake_gate(
    logits: Tensor, bias: Tensor, experts: int, k: int, sigmoid: bool, normalise: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    checks.fake_check("zeropp.ops.moe_gate", "logits", logits, checks.FP32)
    checks.fake_check("zeropp.ops.moe_gate", "bias", bias, checks.FP32)
    _fake_sizes("zeropp.ops.moe_gate", experts, k)
    tokens = logits.numel() // experts
    return (
        logits.new_empty((tokens, k)),
        logits.new_empty((tokens, k), dtype=torch.int32),
        logits.new_empty((experts,), dtype=torch.int64),
        logits.new_empty((2,)),
    )


def _fake_gate_backward(
    grad_weights: Tensor, grad_losses: Tensor, logits: Tensor, chosen: Tensor, counts: Tensor, *numbers: Any
) -> Tensor:
    checks.fake_check("zeropp.ops.moe_gate_backward", "logits", logits, checks.FP32)
    experts = counts.numel()
    return logits.new_empty((logits.numel() // experts, experts))


def _fake_plan(chosen: Tensor, experts: int, k: int, capacity: int, seed: int) -> tuple[Tensor, Tensor]:
    checks.fake_check("zeropp.ops.moe_plan", "chosen", chosen, _INT32)
    _fake_sizes("zeropp.ops.moe_plan", experts, k)
    return chosen.new_empty((chosen.numel() // k, k)), chosen.new_empty((experts,), dtype=torch.int64)


def _fake_sizes(name: str, experts: int, k: int) -> None:
    if not (1 <= experts <= MAX_EXPERTS and 1 <= k <= min(experts, MAX_CHOICES)):
        raise ValueError(
            f"{name}: experts is {experts} and k {k}, wanted 1 to {MAX_EXPERTS} experts and k 1 to "
            f"{min(experts, MAX_CHOICES)}"
        )


def _fake_checked(name: str, label: str, tensor: Tensor, slots: Tensor, kept: Tensor, width: int) -> None:
    checks.fake_check(name, label, tensor, checks.FLOATS)
    checks.fake_check(name, "slots", slots, _INT32)
    checks.fake_check(name, "kept", kept, _INT64)
    if width < 1:
        raise ValueError(f"{name}: width is {width}, wanted at least 1")


def _buffer_rows(slots: Tensor, kept: Tensor, capacity: int) -> Any:
    return kept.numel() * capacity if capacity else slots.numel()


def _fake_dispatch(x: Tensor, slots: Tensor, kept: Tensor, k: int, capacity: int, width: int) -> Tensor:
    _fake_checked("zeropp.ops.moe_dispatch", "x", x, slots, kept, width)
    return x.new_empty((_buffer_rows(slots, kept, capacity), width))


def _fake_dispatch_into(x: Tensor, slots: Tensor, kept: Tensor, out: Tensor, k: int, capacity: int, width: int) -> None:
    _fake_checked("zeropp.ops.moe_dispatch_", "x", x, slots, kept, width)
    checks.fake_check("zeropp.ops.moe_dispatch_", "out", out, (x.dtype,))


def _fake_combine(
    rows: Tensor, slots: Tensor, kept: Tensor, weights: Tensor, k: int, capacity: int, width: int
) -> Tensor:
    _fake_checked("zeropp.ops.moe_combine", "rows", rows, slots, kept, width)
    checks.fake_check("zeropp.ops.moe_combine", "weights", weights, checks.FP32)
    return rows.new_empty((slots.numel() // k, width))


def _fake_combine_into(
    rows: Tensor, slots: Tensor, kept: Tensor, weights: Tensor, out: Tensor, k: int, capacity: int, width: int
) -> None:
    _fake_checked("zeropp.ops.moe_combine_", "rows", rows, slots, kept, width)
    checks.fake_check("zeropp.ops.moe_combine_", "out", out, (rows.dtype,))


def _fake_combine_backward(
    grad: Tensor, rows: Tensor, slots: Tensor, kept: Tensor, weights: Tensor, k: int, capacity: int, width: int
) -> tuple[Tensor, Tensor]:
    _fake_checked("zeropp.ops.moe_combine_backward", "rows", rows, slots, kept, width)
    return (
        rows.new_empty((_buffer_rows(slots, kept, capacity), width)),
        weights.new_empty((slots.numel() // k, k)),
    )


FAKES: dict[str, Any] = {
    "moe_gate": _fake_gate,
    "moe_gate_backward": _fake_gate_backward,
    "moe_plan": _fake_plan,
    "moe_dispatch": _fake_dispatch,
    "moe_dispatch_": _fake_dispatch_into,
    "moe_combine": _fake_combine,
    "moe_combine_": _fake_combine_into,
    "moe_combine_backward": _fake_combine_backward,
    "swiglu": _fake_swiglu,
    "swiglu_": _fake_swiglu_into,
    "swiglu_backward": _fake_swiglu_backward,
    "swiglu_backward_": _fake_swiglu_backward_into,
}
GRADIENTS: checks.Gradients = {
    "moe_gate": (_gate_backward, _gate_context),
    "moe_dispatch": (_dispatch_backward, _dispatch_context),
    "moe_combine": (_combine_backward, _combine_context),
    "swiglu": (_swiglu_backward, _swiglu_context),
}


def moe_share(tokens: int, rank: int, ranks: int) -> slice:
    """Return the tokens that one rank routes where a tensor-parallel group holds the same ones: duplicate-token dropping.

    Each rank of the group gates, sends and combines ``x[share]`` only, so that the all-to-all moves every token once, and an
    all-gather over the group makes the output whole (TED, Singh et al. 2023, section 5).

    Args:
        tokens: how many the group has; shares differ by at most one.
        rank: in the group, 0 <= rank < ranks.
        ranks: of the group.

    Raises:
        TypeError, ValueError: a wrong argument.
    """
    name = "zeropp.ops.moe_share"
    for label, value in (("tokens", tokens), ("rank", rank), ("ranks", ranks)):
        checks.check_whole(name, label, value)
    if tokens < 0 or not 0 <= rank < ranks:
        raise ValueError(f"{name}: tokens {tokens}, rank {rank} of {ranks}; wanted tokens >= 0 and 0 <= rank < ranks")
    return slice(tokens * rank // ranks, tokens * (rank + 1) // ranks)
