# SPDX-License-Identifier: Apache-2.0
"""Random token dropping (random-LTD): sampling, gathering and scattering; csrc/ops/tokens/tokens.h says what each is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zeropp.ops import checks

__all__ = ["token_gather", "token_sample", "token_scatter"]

_INT32 = (torch.int32,)


def token_sample(
    batch: int, seq: int, keep: int, *, seed: int, layer: int = 0, first: int = 0, device: torch.device | str = "cpu"
) -> Tensor:
    """Choose which ``keep`` of ``seq`` tokens of each sample a layer works on: random, rising, the same for the same numbers.

    Every subset is equally likely. Samples, layers and seeds draw apart from each other; on every machine, and with any
    number of threads, the same seed, layer and sample give the same tokens. Take another seed each step. Let each rank pass the
    place of its samples in the global batch as ``first``: then ranks draw apart, and another number of ranks draws the same.

    Args:
        batch: samples.
        seq: tokens of each.
        keep: how many to keep, 1 <= keep <= seq.
        seed: 0 <= seed < 2^63.
        layer: the layer's number, 0 <= layer < 2^63.
        first: the number of the first sample, 0 <= first < 2^63: samples first .. first + batch - 1 are drawn.
        device: where the result is to be: "cpu" or "cuda"; the same tokens on both.

    Returns:
        (batch, keep) int32, for ``token_gather`` and ``token_scatter``. Positions rise, so a causal mask of ``keep``
        tokens is causal among them.

    Raises:
        TypeError, ValueError: a number is of the wrong type or out of range.
    """
    name = "zeropp.ops.token_sample"
    given = {"batch": batch, "seq": seq, "keep": keep, "seed": seed, "layer": layer, "first": first}
    for label, value in given.items():
        least = int(label in ("seq", "keep"))
        checks.check_whole(name, label, value)
        if not least <= value < 2**63:
            raise ValueError(f"{name}: {label} is {value}, wanted {least} to 2^63 - 1")
    if keep > seq:  # the tensor's size follows from it
        raise ValueError(f"{name}: keep is {keep}, wanted at most seq, {seq}")
    kept = torch.empty(batch, keep, dtype=torch.int32, device=device)
    checks.call(f"{name}_", torch.ops.zeropp.token_sample_.default, [kept, seq, keep, seed, layer, first], [kept])
    return kept


def token_gather(full: Tensor, kept: Tensor) -> Tensor:
    """Return the kept tokens of each sample, in their order. Differentiable.

    Args:
        full: (B, S, W) of any dtype that zeropp knows: hidden states, or positions with W = 1.
        kept: (B, K) int32, rising within a sample: what ``token_sample`` gives.

    Returns:
        (B, K, W).

    Raises:
        TypeError, ValueError: wrong shape, dtype or device; on the CPU also a position out of range or out of order. On
            CUDA positions are not looked at, which would wait: one out of range gives zeros.
    """
    name = "zeropp.ops.token_gather"
    _check_rows(name, "full", full, kept)
    seq, width = full.shape[1:]
    op = torch.ops.zeropp.token_gather.default
    return _tensor(checks.ask(name, op, [full.contiguous(), kept.contiguous(), seq, kept.shape[1], width]))


def token_scatter(full: Tensor, part: Tensor, kept: Tensor) -> Tensor:
    """Return ``full`` with the tokens at ``kept`` replaced by ``part``, as a new tensor. Differentiable by both.

    Args:
        full: (B, S, W): what all tokens were before the layer.
        part: (B, K, W) of the same dtype: what the layer made of those it worked on.
        kept: (B, K) int32, rising within a sample.

    Returns:
        (B, S, W).

    Raises:
        TypeError, ValueError: as ``token_gather``.
    """
    name = "zeropp.ops.token_scatter"
    _check_rows(name, "full", full, kept)
    checks.check_readable(name, "part", part, checks.BOTH)
    batch, seq, width = full.shape
    if part.shape != (batch, kept.shape[1], width) or part.dtype != full.dtype:
        raise ValueError(
            f"{name}: part is {part.dtype} {tuple(part.shape)}, wanted {full.dtype} {(batch, kept.shape[1], width)}"
        )
    op = torch.ops.zeropp.token_scatter.default
    arguments = [full.contiguous(), part.contiguous(), kept.contiguous(), seq, kept.shape[1], width]
    return _tensor(checks.ask(name, op, arguments))


def _check_rows(name: str, label: str, full: Tensor, kept: Tensor) -> None:
    checks.check_readable(name, label, full, checks.BOTH)
    checks.check_readable(name, "kept", kept, checks.BOTH)
    if full.dim() != 3 or full.shape[1] < 1 or full.shape[2] < 1:
        raise ValueError(f"{name}: {label} has shape {tuple(full.shape)}, wanted (B, S, W) with S and W at least 1")
    if kept.dtype != torch.int32 or kept.dim() != 2 or kept.shape[0] != full.shape[0] or kept.shape[1] < 1:
        raise ValueError(
            f"{name}: kept is {kept.dtype} {tuple(kept.shape)}, wanted torch.int32 ({full.shape[0]}, K) with K at least 1"
        )


def _tensor(value: Any) -> Tensor:
    assert isinstance(value, Tensor)
    return value


# --- what torch has to know ------------------------------------------------------------------------------------------
def _gather_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, kept, *ctx.sizes = inputs
    ctx.save_for_backward(kept)


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (kept,) = ctx.saved_tensors
    zeros = grad.new_empty(0)
    return torch.ops.zeropp.token_scatter.default(zeros, grad.contiguous(), kept, *ctx.sizes), None, None, None, None


def _scatter_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    full, part, kept, *ctx.sizes = inputs
    ctx.empty = (full.numel() == 0, part.numel() == 0)
    ctx.save_for_backward(kept)


def _scatter_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (kept,) = ctx.saved_tensors
    grad = grad.contiguous()
    zeros = grad.new_empty(0)
    by_full = by_part = None
    if ctx.needs_input_grad[0]:
        by_full = zeros if ctx.empty[0] else torch.ops.zeropp.token_scatter.default(grad, zeros, kept, *ctx.sizes)
    if ctx.needs_input_grad[1]:
        by_part = zeros if ctx.empty[1] else torch.ops.zeropp.token_gather.default(grad, kept, *ctx.sizes)
    return by_full, by_part, None, None, None, None


def _fake_sample(kept: Tensor, seq: int, keep: int, seed: int, layer: int, first: int) -> None:
    checks.fake_check("zeropp.ops.token_sample_", "kept", kept, _INT32)


def _fake_gather(full: Tensor, kept: Tensor, seq: int, keep: int, width: int) -> Tensor:
    checks.fake_check("zeropp.ops.token_gather", "kept", kept, _INT32)
    return full.new_empty((kept.numel() // keep, keep, width))


def _fake_scatter(full: Tensor, part: Tensor, kept: Tensor, seq: int, keep: int, width: int) -> Tensor:
    checks.fake_check("zeropp.ops.token_scatter", "kept", kept, _INT32)
    checks.fake_check("zeropp.ops.token_scatter", "part", part, (full.dtype,))
    return full.new_empty((kept.numel() // keep, seq, width))


FAKES = {"token_sample_": _fake_sample, "token_gather": _fake_gather, "token_scatter": _fake_scatter}
GRADIENTS: checks.Gradients = {
    "token_gather": (_gather_backward, _gather_context),
    "token_scatter": (_scatter_backward, _scatter_context),
}
