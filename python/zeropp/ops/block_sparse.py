# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention; the formulas are in csrc/ops/sparse_attention/sparse_attention.h."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from zeropp.ops import checks

__all__ = ["SparseLayout", "sparse_attention"]

BLOCKS = (16, 32, 64, 128)
MAX_DIM = 512
MOST_SEED = (1 << 63) - 1
_INT32 = (torch.int32,)
_BOOL = (torch.bool,)
_INT64 = (torch.int64,)


class SparseLayout:
    """Which blocks of a matrix of scores are looked at: rows of a compressed sparse matrix, for each head or for all.

    Made by :meth:`from_mask`, or by a pattern of :mod:`zeropp.nn` (``pattern.layout(heads, seq)``).
    """

    def __init__(self, starts: Tensor, columns: Tensor, block: int) -> None:
        """Take ``starts`` (heads or 1, blocks + 1) and ``columns`` (entries,), both int32 on the CPU, as they are.

        Row r of head h has ``columns[starts[h, r]:starts[h, r + 1]]``, in rising order; each head goes on where the one
        before ended. The operator checks that whenever it is called.
        """
        name = "zeropp.ops.SparseLayout"
        checks.check_whole(name, "block", block)
        if block not in BLOCKS:
            raise ValueError(f"{name}: block is {block}, wanted 16, 32, 64 or 128")
        for label, tensor, dims in (("starts", starts, 2), ("columns", columns, 1)):
            checks.check_readable(name, label, tensor)
            if tensor.dtype != torch.int32 or tensor.dim() != dims:
                raise ValueError(
                    f"{name}: {label} is {tensor.dtype} with {tensor.dim()} dimensions, wanted torch.int32 with {dims}"
                )
        if starts.shape[0] < 1 or starts.shape[1] < 2:
            raise ValueError(
                f"{name}: starts has shape {tuple(starts.shape)}, wanted at least one head of at least one block"
            )
        self.starts = starts.contiguous()
        """(heads or 1, blocks + 1) int32."""
        self.columns = columns.contiguous()
        """(entries,) int32."""
        self.block = block
        """Queries, and keys, of a block."""
        self._elsewhere: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return ``starts`` and ``columns`` on a device other than theirs: copied there once, and kept."""
        if device not in self._elsewhere:
            self._elsewhere[device] = (self.starts.to(device), self.columns.to(device))
        return self._elsewhere[device]

    @classmethod
    def from_mask(cls, mask: Tensor, block: int) -> SparseLayout:
        """Return the blocks where ``mask`` (blocks, blocks) or (heads, blocks, blocks) is not zero."""
        name = "zeropp.ops.SparseLayout.from_mask"
        checks.check_readable(name, "mask", mask)
        if mask.dim() == 2:
            mask = mask[None]
        if mask.dim() != 3 or mask.shape[1] != mask.shape[2] or mask.shape[0] < 1 or mask.shape[1] < 1:
            raise ValueError(
                f"{name}: mask has shape {tuple(mask.shape)}, wanted (heads, blocks, blocks) or (blocks, blocks)"
            )
        at = mask.ne(0)
        heads, blocks = at.shape[:2]
        ends = at.sum(2).flatten().cumsum(0)
        starts = torch.zeros(heads, blocks + 1, dtype=torch.int32)
        starts[:, 1:] = ends.view(heads, blocks)
        starts[1:, 0] = starts[:-1, -1]
        return cls(starts, at.nonzero()[:, 2].int(), block)

    @property
    def heads(self) -> int:
        """Heads with a layout of their own, or 1: the same for all."""
        return self.starts.shape[0]

    @property
    def blocks(self) -> int:
        """Blocks of a row or column."""
        return self.starts.shape[1] - 1

    @property
    def density(self) -> float:
        """Blocks looked at, of all."""
        return self.columns.numel() / (self.heads * self.blocks**2)

    def mask(self) -> Tensor:
        """Return (heads or 1, blocks, blocks) bool: the blocks that are looked at."""
        counts = self.starts.long().diff(dim=1).flatten()
        rows = torch.repeat_interleave(torch.arange(counts.numel()), counts)
        at = torch.zeros(counts.numel(), self.blocks, dtype=torch.bool)
        at[rows, self.columns.long()] = True
        return at.view(self.heads, self.blocks, self.blocks)

    def dense_mask(self, seq: int, *, causal: bool = False) -> Tensor:
        """Return (heads or 1, seq, seq) bool, element by element: what ``scaled_dot_product_attention`` takes as its mask."""
        wide = self.mask().repeat_interleave(self.block, 1).repeat_interleave(self.block, 2)[:, :seq, :seq]
        return wide.tril() if causal else wide

    def __repr__(self) -> str:
        return f"SparseLayout(heads={self.heads}, blocks={self.blocks}, block={self.block}, density={self.density:.3f})"


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SparseLayout,
    *,
    causal: bool = False,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    first: int | None = None,
) -> Tensor:
    """Softmax attention over the blocks of ``layout`` only: time and memory are linear in their number.

    Equal, but for rounding, to ``scaled_dot_product_attention`` with ``layout.dense_mask(...)``, where that is not NaN: a
    query that sees nothing gives zeros. Differentiable by q, k and v; deterministic, whatever the threads and the CPU.

    Args:
        q: (B, H, Q, D), fp32, bf16 or fp16, D at most 512; sums are taken in fp32.
        k: (B, G, S, D), of the same dtype. G divides H: heads ``h`` that share ``h // (H // G)`` look at one head of keys
            (grouped heads, Ainslie et al. 2023), which is not repeated in memory.
        v: the same.
        layout: for sequences of ``ceil(S / layout.block)`` blocks, with 1 or H heads.
        causal: a query sees no key after itself.
        scale: of the scores. Default: 1 / sqrt(D).
        key_mask: (B, S) bool, False for keys that no query sees (padding). None: all are seen.
        dropout: the share of weights that become 0, 0 to less than 1, in steps of 1/65536; the others grow to make up for
            them. The backward draws the same weights again from ``seed``; nothing is stored.
        seed: one int64 number on q's device that the dropout is drawn from. Default: drawn from torch's generator, so
            ``torch.manual_seed`` determines it and activation checkpointing repeats it.
        first: the position of the first query in the sequence of keys, at most S - Q. Default: S - Q, as in decoding with a
            cache. Each query has the same bits as in a call with all queries.

    Returns:
        (B, H, Q, D) of the dtype of q.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: wrong shape, dtype or device, or a layout for another sequence or number of heads.
    """
    name = "zeropp.ops.sparse_attention"
    _check_qkv(name, q, k, v)
    if not isinstance(layout, SparseLayout):
        raise TypeError(f"{name}: layout is a {type(layout).__name__}, wanted a zeropp.ops.SparseLayout")
    _, heads, queries, dim = q.shape
    kv_heads, seq = k.shape[1:3]
    if scale is None:
        scale = 1.0 / math.sqrt(dim) if dim else 1.0
    checks.check_numbers(name, {"scale": scale, "dropout": dropout})
    if key_mask is None:
        key_mask = q.new_empty(0, dtype=torch.bool)
    else:
        checks.check_readable(name, "key_mask", key_mask, checks.BOTH)
        if key_mask.shape != (q.shape[0], seq) or key_mask.dtype != torch.bool:
            raise ValueError(
                f"{name}: key_mask is {key_mask.dtype} {tuple(key_mask.shape)}, wanted torch.bool "
                f"{(q.shape[0], seq)}: one for each key of each sample"
            )
        key_mask = key_mask.contiguous()
    if seed is None:
        seed = torch.randint(MOST_SEED, (1 if dropout > 0 else 0,), device=q.device)
    starts, columns = (layout.starts, layout.columns) if q.is_cpu else layout.on(q.device)
    numbers = [heads, kv_heads, queries, seq - queries if first is None else first, seq, dim, layout.block]
    arguments = [key_mask, starts, columns, seed, *numbers, float(scale), bool(causal), float(dropout)]
    op = torch.ops.zeropp.sparse_attention.default
    out, _ = checks.ask(name, op, [q.contiguous(), k.contiguous(), v.contiguous(), *arguments])
    result: Tensor = out.view(q.shape)
    return result


def _check_qkv(name: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    for label, tensor, like in (("q", q, q), ("k", k, q), ("v", v, k)):
        checks.check_readable(name, label, tensor, checks.BOTH)
        if tensor.dim() != 4 or like.dim() != 4 or tensor.dtype != q.dtype:
            fits = False
        elif label == "v":
            fits = tensor.shape == like.shape
        else:
            fits = tensor.shape[0] == like.shape[0] and tensor.shape[3] == like.shape[3]
        if not fits:
            raise ValueError(
                f"{name}: {label} is {tensor.dtype} {tuple(tensor.shape)}, wanted (B, H, S, D), alike in q, k and v but "
                "for fewer heads and more positions of k and v"
            )
    if k.shape[1] < 1 or q.shape[1] % k.shape[1] or q.shape[2] > k.shape[2]:
        raise ValueError(
            f"{name}: q has {q.shape[1]} heads of {q.shape[2]} positions and k {k.shape[1]} of {k.shape[2]}; wanted a "
            "multiple of k's heads, and at most k's positions"
        )


# --- what torch has to know ------------------------------------------------------------------------------------------
def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, key_mask, starts, columns, seed, *ctx.numbers = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, key_mask, starts, columns, seed)


def _backward(ctx: Any, grad_out: Tensor, _lse: Any) -> tuple[Any, ...]:
    q, k, v, *others = ctx.saved_tensors
    grads = torch.ops.zeropp.sparse_attention_backward.default(grad_out.contiguous(), q, k, v, *others, *ctx.numbers)
    views = (grad.view_as(of) for grad, of in zip(grads, (q, k, v), strict=True))
    return (*views, *(None,) * 14)


def _fake_check(
    name: str, q: Tensor, keys: dict[str, Tensor], tables: tuple[Tensor, ...], rows: int, dim: int, block: int
) -> None:
    checks.fake_check(name, "q", q, checks.FLOATS)
    for label, tensor in keys.items():
        checks.fake_check(name, label, tensor, (q.dtype,), rows * dim)
    labels = ("key_mask", "starts", "columns", "seed")
    for label, tensor, dtypes in zip(labels, tables, (_BOOL, _INT32, _INT32, _INT64), strict=True):
        checks.fake_check(name, label, tensor, dtypes)
    if block not in BLOCKS or not 1 <= dim <= MAX_DIM:
        raise ValueError(
            f"{name}: block is {block} and dim {dim}, wanted 16, 32, 64 or 128 and a dim of 1 to {MAX_DIM}"
        )


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor, starts: Tensor, columns: Tensor, seed: Tensor,
    heads: int, kv_heads: int, queries: int, first: int, seq: int, dim: int, block: int, scale: float, causal: bool,
    dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows = q.numel() // (queries * dim)
    kv_rows = rows // heads * kv_heads * seq
    tables = (key_mask, starts, columns, seed)
    _fake_check("zeropp.ops.sparse_attention", q, {"k": k, "v": v}, tables, kv_rows, dim, block)
    return q.new_empty((rows, queries, dim)), q.new_empty((rows, queries), dtype=torch.float32)


def _fake_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, key_mask: Tensor, starts: Tensor,
    columns: Tensor, seed: Tensor, heads: int, kv_heads: int, queries: int, first: int, seq: int, dim: int, block: int,
    scale: float, causal: bool, dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    name = "zeropp.ops.sparse_attention_backward"
    rows = q.numel() // (queries * dim)
    kv_rows = rows // heads * kv_heads
    _fake_check(name, q, {"k": k, "v": v}, (key_mask, starts, columns, seed), kv_rows * seq, dim, block)
    for label, tensor in (("grad_out", grad_out), ("out", out)):
        checks.fake_check(name, label, tensor, (q.dtype,), q.numel())
    checks.fake_check(name, "lse", lse, checks.FP32, q.numel() // dim)
    shape = (kv_rows, seq, dim)
    return q.new_empty((rows, queries, dim)), q.new_empty(shape), q.new_empty(shape)


FAKES = {"sparse_attention": _fake_forward, "sparse_attention_backward": _fake_backward}
GRADIENTS: checks.Gradients = {"sparse_attention": (_backward, _context)}
