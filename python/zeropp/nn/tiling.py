# SPDX-License-Identifier: Apache-2.0
"""Functions of each token alone, computed tile by tile over the sequence: the single-process pieces of ALST (Bekman et al. 2025,
arXiv:2506.13996, section 3.1): MLP, and logits with their loss.

A tile's intermediate values live for that tile only: forward keeps the input, backward computes a tile anew and takes its
gradients at once. So the largest tensors of a long sequence (of T tokens: T x 4D in the MLP, T x V logits in fp32, V the
vocabulary) become tile x 4D and tile x V, at the cost of one more forward of that part.

Exact: every token's value is computed by the same operations. The gradients of parameters are sums over tokens, added
tile after tile in fp32, so they agree with the plain ones within the rounding of a sum in another order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import get_device_states, set_device_states

__all__ = ["tiled_call", "tiled_cross_entropy"]

LOGITS_BYTES = 64 << 20
"""fp32 logits of one tile, unless a tile is given."""


@dataclass
class _Plan:
    """Data that the backward needs to recompute a tile."""

    call: Callable[..., Tensor]
    tile: int
    dim: int
    summed: bool
    autocast: tuple[str, bool, torch.dtype]
    random: tuple[Tensor, Any, Any] | None

    def part(self, tensor: Tensor, first: int, size: int) -> Tensor:
        """Return one tile, laid out as a tensor of its own: models call `view` on what they are given."""
        return tensor.narrow(self.dim, first, size).contiguous()

    def parts(self, length: int) -> Iterator[tuple[int, int]]:
        for first in range(0, length, self.tile):
            yield first, min(self.tile, length - first)

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        """Autocast as in the forward; no cache, which would keep copies of weights that know no gradient."""
        kind, enabled, dtype = self.autocast
        with torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False):
            yield


class _Tiled(torch.autograd.Function):
    """(tokens, beside, *parameters) -> the call's value over all tiles: joined along ``dim``, or summed."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, tokens: Tensor, beside: tuple[Tensor, ...], *params: Tensor) -> Tensor:
        ctx.plan, ctx.beside_count, ctx.params = plan, len(beside), params
        # Parameters are saved though `call` has them: their memory may be released meanwhile, and hooks on saved
        # tensors gather them again.
        ctx.save_for_backward(tokens, *beside, *params)
        return _run(plan, tokens, beside)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        plan: _Plan = ctx.plan
        tokens, *saved = ctx.saved_tensors
        beside = saved[: ctx.beside_count]
        wanted = {i: param for i, param in enumerate(ctx.params) if ctx.needs_input_grad[3 + i]}
        sums: dict[int, Tensor | None] = {}
        of_tokens = torch.empty_like(tokens) if ctx.needs_input_grad[1] else None
        with _random_again(plan, tokens), plan.as_before():
            for first, size in plan.parts(tokens.shape[plan.dim]):
                part = plan.part(tokens, first, size).detach().requires_grad_(of_tokens is not None)
                with torch.enable_grad():
                    value = plan.call(part, *(plan.part(one, first, size) for one in beside))
                upstream = gradient if plan.summed else gradient.narrow(plan.dim, first, size)
                of_part, *found = _gradients(value, part, wanted.values(), upstream)
                if of_tokens is not None:
                    of_tokens.narrow(plan.dim, first, size).copy_(
                        torch.zeros_like(part) if of_part is None else of_part
                    )
                for i, one in zip(wanted, found, strict=True):
                    sums[i] = _add(sums.get(i), one)
        return None, of_tokens, None, *(_like(sums.get(i), param) for i, param in enumerate(ctx.params))


def _gradients(value: Tensor, part: Tensor, params: Iterable[Tensor], upstream: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of a tile's tokens, None where nothing asks for them, and of each parameter."""
    if part.requires_grad:
        return torch.autograd.grad(value, [part, *params], upstream, allow_unused=True)
    return None, *torch.autograd.grad(value, [*params], upstream, allow_unused=True)


def _like(total: Tensor | None, param: Tensor) -> Tensor | None:
    return None if total is None else total.to(param.dtype)


def _add(total: Tensor | None, one: Tensor | None) -> Tensor | None:
    if one is None:
        return total
    if total is None:
        return one.float() if one.dtype in (torch.bfloat16, torch.float16) else one.clone()
    return total.add_(one)


@contextlib.contextmanager
def _random_again(plan: _Plan, tokens: Tensor) -> Iterator[None]:
    """Dropout draws what it drew in the forward, and the generators go on from where they are."""
    if plan.random is None:
        yield
        return
    state, devices, states = plan.random
    with torch.random.fork_rng(devices=devices, device_type=tokens.device.type if devices else "cuda"):
        torch.set_rng_state(state)
        if devices:
            set_device_states(devices, states, device_type=tokens.device.type)
        yield


def _run(plan: _Plan, tokens: Tensor, beside: tuple[Tensor, ...]) -> Tensor:
    whole: Tensor | None = None
    length = tokens.shape[plan.dim]
    with plan.as_before():
        for first, size in plan.parts(length):
            value = plan.call(plan.part(tokens, first, size), *(plan.part(one, first, size) for one in beside))
            if plan.summed:
                whole = value if whole is None else whole + value
                continue
            if whole is None:
                shape = list(value.shape)
                if len(shape) <= plan.dim or shape[plan.dim] != size:
                    raise ValueError(
                        f"tiled_call: {size} tokens went in along dimension {plan.dim}, and a value of shape {tuple(shape)} "
                        "came out; the call must keep that dimension"
                    )
                shape[plan.dim] = length
                whole = value.new_empty(shape)
            whole.narrow(plan.dim, first, size).copy_(value)
    assert whole is not None
    return whole


def tiled_call(
    call: Callable[..., Tensor],
    tokens: Tensor,
    *beside: Tensor,
    tile: int,
    dim: int = -2,
    params: Iterable[Tensor] = (),
    summed: bool = False,
    random: bool = True,
) -> Tensor:
    """Return ``call(tokens, *beside)``, computed in tiles of ``tile`` tokens, with the memory of one tile.

    Args:
        call: works on every token alone: ``call(tile of tokens, *tiles of beside)``. Computed once in forward, once more in
            backward.
        tokens: ``(..., T, D)`` with the defaults; gradients flow to it.
        beside: more tensors with the same tokens along ``dim``, such as targets; no gradient flows to them.
        tile: tokens of a tile.
        dim: which dimension the tokens are.
        params: every tensor that requires a gradient and that ``call`` uses, such as ``mlp.parameters()``. One that is left
            out gets none.
        summed: the call gives a sum over its tokens (a loss): the tiles' values are added, not joined.
        random: keep the generators' states, so that dropout in backward is that of forward.

    Raises:
        ValueError: ``tile`` is below 1, or the lengths differ.
    """
    if isinstance(tile, bool) or not isinstance(tile, int) or tile < 1:
        raise ValueError(f"tiled_call: tile is {tile!r}, wanted a whole number of tokens, at least 1")
    dim = dim % tokens.dim()
    _check_beside(tokens, beside, dim)
    if tokens.shape[dim] == 0:
        return call(tokens, *beside)
    kind = tokens.device.type
    autocast = (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
    own = [one for one in params if one.requires_grad]
    needs = torch.is_grad_enabled() and (tokens.requires_grad or bool(own))
    plan = _Plan(call, tile, dim, summed, autocast, None)
    if not needs:
        return _run(plan, tokens, beside)
    if random:
        plan.random = (torch.get_rng_state(), *get_device_states(tokens))
    value: Tensor = _Tiled.apply(plan, tokens, beside, *own)
    return value


def _check_beside(tokens: Tensor, beside: tuple[Tensor, ...], dim: int) -> None:
    for one in beside:
        if one.dim() <= dim or one.shape[dim] != tokens.shape[dim]:
            raise ValueError(
                f"tiled_call: a tensor of shape {tuple(one.shape)} stands beside tokens of shape {tuple(tokens.shape)}; "
                f"wanted {tokens.shape[dim]} along dimension {dim}"
            )


def tiled_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    tile: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return ``cross_entropy(linear(hidden, weight, bias).float(), targets)`` without the logits ever being whole.

    Args:
        hidden: ``(..., D)``.
        weight: ``(V, D)``, the head; ``bias`` ``(V,)``.
        targets: ``(...)``, classes; ``ignore_index`` counts for nothing.
        tile: tokens of a tile; None: as many as give 64 MiB of logits.
        reduction: "mean" over the tokens that count (NaN where there are none, as in torch) or "sum".

    Returns:
        A scalar, fp32 (or fp64 for fp64).
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"tiled_cross_entropy: reduction is {reduction!r}, wanted 'mean' or 'sum'")
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"tiled_cross_entropy: targets have shape {tuple(targets.shape)}, wanted {tuple(hidden.shape[:-1])}, as hidden"
        )
    weight = weight.view_as(weight)  # a parameter that is partitioned is gathered by an operation, and is itself again
    flat, classes = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    tile = max(16, LOGITS_BYTES // (4 * weight.shape[0])) if tile is None else tile

    def of_tile(rows: Tensor, wanted: Tensor) -> Tensor:
        logits = F.linear(rows, weight, bias)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(
            logits, wanted, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing
        )

    params = [one for one in (weight, bias) if one is not None]
    total = tiled_call(of_tile, flat, classes, tile=tile, dim=0, params=params, summed=True, random=False)
    return total if reduction == "sum" else total / (classes != ignore_index).sum()
