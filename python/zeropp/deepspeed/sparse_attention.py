# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's sparse attention (its last release with it: 0.18.9) over :func:`zeropp.ops.sparse_attention`.

The classes take the same arguments and make the same layouts, but for three things. Random blocks follow a seed, so that all ranks
draw alike and nothing is sent; a causal layout has no block above its diagonal, where some of DeepSpeed's do; and ``unidirectional``
hides later keys inside of the diagonal's blocks too, where DeepSpeed needs an ``attn_mask`` for it. Any dtype and device that
``zeropp.ops.sparse_attention`` takes will do, where DeepSpeed's needs fp16 on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeropp.config.attention import read_section
from zeropp.errors import ConfigError
from zeropp.ops.block_sparse import SparseLayout, sparse_attention
from zeropp.ops.patterns import Local, Pattern, from_section

HIDDEN = -1e4
"""What a mask that is added has at least for keys that are not to be seen; fp16's masks have it."""


class SparsityConfig:
    """Which blocks each head looks at. A subclass may have a ``make_layout`` of its own."""

    def __init__(self, num_heads: int, block: int = 16, different_layout_per_head: bool = False) -> None:
        self.num_heads, self.block = num_heads, block
        self.different_layout_per_head = different_layout_per_head
        self.num_layout_heads = num_heads if different_layout_per_head else 1
        self.seed = 0
        """What random blocks are drawn from."""
        self._section: dict[str, Any] = {}

    def _read(self, mode: str, **keys: Any) -> None:
        """Check what a mode takes; keep each key as an attribute."""
        shared = {"block": self.block, "different_layout_per_head": self.different_layout_per_head}
        self._section = read_section({"mode": mode, **shared, **keys}, type(self).__name__)
        for name, value in keys.items():
            setattr(self, name, value)

    def _pattern(self) -> Pattern:
        if not self._section:
            raise ConfigError(
                f"{type(self).__name__}: it has no layout; wanted a class such as FixedSparsityConfig, or make_layout"
            )
        return from_section(self._section, self.seed)

    def setup_layout(self, seq_len: int) -> Tensor:
        """Return zeros (heads, blocks, blocks), int64; raise ValueError for a length that is no multiple of the block."""
        if seq_len % self.block:
            raise ValueError(f"the sequence is {seq_len} long, wanted a multiple of the block, {self.block}: pad it")
        blocks = seq_len // self.block
        return torch.zeros(self.num_heads, blocks, blocks, dtype=torch.int64)

    def make_layout(self, seq_len: int) -> Tensor:
        """Return (heads, blocks, blocks) int64, 1 for the blocks that are looked at."""
        layout = self.setup_layout(seq_len)
        return layout + self._pattern().mask(self.num_heads, layout.shape[1])

    def check_and_propagate_first_head_layout(self, layout: Tensor) -> Tensor:
        """Give all heads the first one's layout, unless each is to have its own."""
        if not self.different_layout_per_head:
            layout[1:] = layout[0]
        return layout


class DenseSparsityConfig(SparsityConfig):
    """Every block."""

    def __init__(self, num_heads: int, block: int = 16, different_layout_per_head: bool = False) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        self._read("dense")


class FixedSparsityConfig(SparsityConfig):
    """Windows side by side, with global blocks in each (Child et al. 2019): :class:`zeropp.nn.Fixed`."""

    def __init__(
        self, num_heads: int, block: int = 16, different_layout_per_head: bool = False, num_local_blocks: int = 4,
        num_global_blocks: int = 1, attention: str = "bidirectional", horizontal_global_attention: bool = False,
        num_different_global_patterns: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(num_heads, block, different_layout_per_head)
        self._read(
            "fixed", num_local_blocks=num_local_blocks, num_global_blocks=num_global_blocks, attention=attention,
            horizontal_global_attention=horizontal_global_attention,
            num_different_global_patterns=num_different_global_patterns,
        )  # fmt: skip


class VariableSparsityConfig(SparsityConfig):
    """Windows of several sizes, global and random blocks: :class:`zeropp.nn.Variable`."""

    def __init__(
        self, num_heads: int, block: int = 16, different_layout_per_head: bool = False, num_random_blocks: int = 0,
        local_window_blocks: Sequence[int] = (4,), global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None, attention: str = "bidirectional",
        horizontal_global_attention: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(num_heads, block, different_layout_per_head)
        self._read(
            "variable", num_random_blocks=num_random_blocks, local_window_blocks=list(local_window_blocks),
            global_block_indices=list(global_block_indices), global_block_end_indices=global_block_end_indices,
            attention=attention, horizontal_global_attention=horizontal_global_attention,
        )  # fmt: skip


class BigBirdSparsityConfig(SparsityConfig):
    """A sliding window, the first blocks global, random blocks (Zaheer et al. 2020): :class:`zeropp.nn.BigBird`."""

    def __init__(
        self, num_heads: int, block: int = 16, different_layout_per_head: bool = False, num_random_blocks: int = 1,
        num_sliding_window_blocks: int = 3, num_global_blocks: int = 1, attention: str = "bidirectional",
    ) -> None:  # fmt: skip
        super().__init__(num_heads, block, different_layout_per_head)
        self._read(
            "bigbird", num_random_blocks=num_random_blocks, num_sliding_window_blocks=num_sliding_window_blocks,
            num_global_blocks=num_global_blocks, attention=attention,
        )  # fmt: skip


class BSLongformerSparsityConfig(SparsityConfig):
    """A sliding window and global blocks (Beltagy et al. 2020): :class:`zeropp.nn.Longformer`."""

    def __init__(
        self, num_heads: int, block: int = 16, different_layout_per_head: bool = False, num_sliding_window_blocks: int = 3,
        global_block_indices: Sequence[int] = (0,), global_block_end_indices: Sequence[int] | None = None,
        attention: str = "bidirectional",
    ) -> None:  # fmt: skip
        super().__init__(num_heads, block, different_layout_per_head)
        self._read(
            "bslongformer", num_sliding_window_blocks=num_sliding_window_blocks, attention=attention,
            global_block_indices=list(global_block_indices), global_block_end_indices=global_block_end_indices,
        )  # fmt: skip


class LocalSlidingWindowSparsityConfig(SparsityConfig):
    """A sliding window: :class:`zeropp.nn.Local`."""

    def __init__(
        self, num_heads: int, block: int = 16, num_sliding_window_blocks: int = 3, attention: str = "unidirectional"
    ) -> None:
        super().__init__(num_heads, block)
        self._read("bslongformer", num_sliding_window_blocks=num_sliding_window_blocks, attention=attention)

    def _pattern(self) -> Pattern:
        return Local(
            block=self.block, causal=self._section["attention"] == "unidirectional",
            window=self._section["num_sliding_window_blocks"],
        )  # fmt: skip


class SparseSelfAttention(nn.Module):
    """Attention over the blocks of a layout. It has no parameters; its buffer ``master_layout`` is in checkpoints, as in DeepSpeed.

    Shorter sequences than ``max_seq_length`` see the first rows and columns of that length's layout.
    """

    def __init__(
        self, sparsity_config: SparsityConfig, key_padding_mask_mode: str = "add", attn_mask_mode: str = "mul",
        max_seq_length: int = 2048,
    ) -> None:  # fmt: skip
        super().__init__()
        for name, mode in (("key_padding_mask_mode", key_padding_mask_mode), ("attn_mask_mode", attn_mask_mode)):
            if mode not in ("add", "mul"):
                raise ConfigError(f"SparseSelfAttention: {name} is {mode!r}; wanted 'add' or 'mul'")
        self.sparsity_config = sparsity_config
        self.key_padding_mask_mode, self.attn_mask_mode = key_padding_mask_mode, attn_mask_mode
        self.master_layout: Tensor
        self.register_buffer("master_layout", sparsity_config.make_layout(max_seq_length))
        self._layouts: dict[int, SparseLayout] = {}

    def get_layout(self, length: int) -> Tensor:
        """Return (heads, blocks, blocks) int64 for sequences of ``length``; raise ValueError where none fits."""
        block, most = self.sparsity_config.block, self.master_layout.shape[1]
        if length % block or length > most * block:
            raise ValueError(
                f"the sequence is {length} long, wanted a multiple of the block, {block}, of at most {most * block} "
                "(max_seq_length): pad it, or zeropp.nn.SparseAttention, which takes any length"
            )
        return self.master_layout[..., : length // block, : length // block].cpu()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, rpe: Tensor | None = None, key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the attention (batch, heads, sequence, dim) of tensors of that shape; the key may be transposed.

        Args:
            query: (batch, heads, sequence, dim).
            key: the same, or (batch, heads, dim, sequence).
            value: as the query.
            rpe: must be None: scores cannot be changed.
            key_padding_mask: (batch, sequence). In the mode "mul": 0 for keys that are not seen. In "add": 0 for the others, and at most
                -1e4 for those.
            attn_mask: (sequence, sequence), in the same way; it may hide later keys, and nothing else.

        Raises:
            ConfigError: a mask that says more than which keys are padding, and what is later.
            ValueError: a sequence that is no multiple of the block.
        """
        length = query.shape[2]
        if key.shape[2] != length:
            key = key.transpose(2, 3)
        if rpe is not None:
            raise ConfigError(
                "SparseSelfAttention: rpe is not supported; add positions to the hidden states, or rotate q and k"
            )
        causal = getattr(self.sparsity_config, "attention", "") == "unidirectional"
        if attn_mask is not None:
            causal = self._is_causal(attn_mask.reshape(length, length)) or causal
        keys = None
        if key_padding_mask is not None:
            keys = self._seen(
                key_padding_mask.reshape(query.shape[0], length), self.key_padding_mask_mode, "key_padding_mask"
            )
        if length not in self._layouts:
            self._layouts[length] = SparseLayout.from_mask(self.get_layout(length), self.sparsity_config.block)
        return sparse_attention(query, key, value, self._layouts[length], causal=causal, key_mask=keys)

    def _seen(self, mask: Tensor, mode: str, name: str) -> Tensor:
        seen = mask.bool() if mode == "mul" else mask > HIDDEN
        plain = mask.eq(seen.to(mask.dtype)) if mode == "mul" else mask.eq(0) | ~seen
        if not plain.all():
            raise ConfigError(
                f"SparseSelfAttention: {name} in the mode {mode!r} changes scores; wanted "
                f"{'0 and 1' if mode == 'mul' else f'0, and {HIDDEN:g} or less'} alone"
            )
        return seen

    def _is_causal(self, mask: Tensor) -> bool:
        seen = self._seen(mask, self.attn_mask_mode, "attn_mask")
        if not torch.equal(seen, seen.new_ones(seen.shape).tril()) and not seen.all():
            raise ConfigError(
                "SparseSelfAttention: attn_mask hides more than later keys; say it in the layout, or by key_padding_mask"
            )
        return not bool(seen.all())
