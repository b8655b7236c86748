# SPDX-License-Identifier: Apache-2.0
"""Attention over the blocks of a pattern, as a module."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import Tensor

from zeropp.ops.block_sparse import SparseLayout, sparse_attention
from zeropp.ops.patterns import Pattern

__all__ = ["SparseAttention"]


def _make_layout(pattern: Pattern, heads: int, seq: int) -> SparseLayout:
    return pattern.layout(heads, seq)


_layout_of_call: Callable[[Pattern, int, int], SparseLayout] = torch.compiler.assume_constant_result(_make_layout)


class SparseAttention(torch.nn.Module):
    """Attention over the blocks of a pattern, in place of ``scaled_dot_product_attention``; it has no parameters.

        attention = zeropp.nn.SparseAttention(zeropp.nn.BigBird(block=64, random=2))
        y = attention(q, k, v)                  # (B, H, S, D) each; any S

    The layout for a sequence length is made once; under ``torch.compile`` it is a constant of the graph.
    """

    def __init__(self, pattern: Pattern, *, scale: float | None = None) -> None:
        """Take a pattern, such as :class:`zeropp.nn.Longformer`, and the scale of scores (default 1 / sqrt(D))."""
        super().__init__()
        if not isinstance(pattern, Pattern):
            raise TypeError(
                f"zeropp.nn.SparseAttention: pattern is a {type(pattern).__name__}, wanted one of zeropp.nn's, such as "
                "zeropp.nn.BigBird(block=64)"
            )
        self.pattern = pattern
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Attend: see :func:`zeropp.ops.sparse_attention`."""
        if q.dim() != 4:
            raise ValueError(f"zeropp.nn.SparseAttention: q has shape {tuple(q.shape)}, wanted (B, H, S, D)")
        layout = _layout_of_call(self.pattern, operator.index(q.shape[1]), operator.index(q.shape[2]))
        return sparse_attention(q, k, v, layout, causal=self.pattern.causal, scale=self.scale, key_mask=key_mask)

    def extra_repr(self) -> str:
        """Return the pattern, for ``print(model)``."""
        return repr(self.pattern)
