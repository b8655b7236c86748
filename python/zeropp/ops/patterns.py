# SPDX-License-Identifier: Apache-2.0
"""Patterns of block-sparse attention: which blocks a query looks at. Users know them as those of :mod:`zeropp.nn`.

With l, g and r for local, global and random blocks, rows are queries:

    Fixed       Variable     BigBird      Longformer   Local (causal)
    l l . g     g l . .      g g g g      g g g g      l . . .
    l l . g     g l . .      g l l r      g l l .      l l . .
    . . l g     g . l l      g l l l      g l l l      . l l .
    . . l g     g . l l      g r l l      g . l l      . . l l

Fixed and Variable follow Child et al. 2019 (as DeepSpeed's Sparse Attention has them), BigBird Zaheer et al. 2020,
Longformer Beltagy et al. 2020 in blocks. Sizes are numbers of blocks. In a causal pattern no block above the diagonal is
looked at, and within the diagonal ones attention hides what comes later.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from zeropp.ops.block_sparse import BLOCKS, SparseLayout

__all__ = ["BigBird", "Dense", "Fixed", "Local", "Longformer", "Pattern", "Variable"]


@dataclass(frozen=True, kw_only=True)
class Pattern(ABC):
    """The base of all patterns. Equal patterns give the same layout, on every machine."""

    block: int = 64
    """Queries, and keys, of a block: 16, 32, 64 or 128. Larger ones are faster for each score, smaller ones finer."""
    causal: bool = False
    """No query looks at a key after itself."""

    def __post_init__(self) -> None:
        if self.block not in BLOCKS:
            raise ValueError(f"{self._name}: block is {self.block!r}, wanted 16, 32, 64 or 128")

    def layout(self, heads: int, seq: int, *, growing: bool = False) -> SparseLayout:
        """Return the blocks for sequences of ``seq``; one layout for all heads where they do not differ. Kept for the next call.

        With ``growing``, for a causal pattern, a row's blocks do not depend on ``seq``: a sequence that decoding makes longer
        token by token sees what it would see in one pass. (``Fixed`` treats a last window that is cut short in its own way.)
        """
        if heads < 1 or seq < 1:
            raise ValueError(f"{self._name}.layout: heads is {heads} and seq {seq}, wanted at least 1 each")
        return _layout(self, heads if self._heads_differ else 1, -(-seq // self.block), growing and self.causal)

    def mask(self, heads: int, blocks: int) -> Tensor:
        """Return (heads, blocks, blocks) bool, computed anew."""
        mask = torch.stack([self._head(head if self._heads_differ else 0, blocks) for head in range(heads)])
        return mask.tril() if self.causal else mask

    @property
    def _name(self) -> str:
        return f"zeropp.nn.{type(self).__name__}"

    @property
    def _heads_differ(self) -> bool:
        return False

    @property
    def _period(self) -> int:
        """Layouts of a multiple of so many blocks agree in the rows that they share."""
        return 1

    @abstractmethod
    def _head(self, head: int, blocks: int) -> Tensor:
        """Return (blocks, blocks) bool of one head; what a causal pattern has above the diagonal is dropped later."""

    def _require(self, **least: int) -> None:
        for field, bound in least.items():
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < bound:
                raise ValueError(f"{self._name}: {field} is {value!r}, wanted a whole number of at least {bound}")


@lru_cache(maxsize=64)
def _layout(pattern: Pattern, heads: int, blocks: int, growing: bool) -> SparseLayout:
    whole = -(-blocks // pattern._period) * pattern._period if growing else blocks
    return SparseLayout.from_mask(pattern.mask(heads, whole)[:, :blocks, :blocks], pattern.block)


def _band(blocks: int, reach: int) -> Tensor:
    """Blocks at most ``reach`` from the diagonal."""
    at = torch.arange(blocks)
    return (at[:, None] - at[None, :]).abs() <= reach


def _add_globals(mask: Tensor, columns: Iterable[int], *, rows: bool) -> None:
    """Let every query look at these blocks; with ``rows`` they look at everything, too."""
    here = [column for column in columns if column < mask.shape[0]]
    mask[:, here] = True
    if rows:
        mask[here, :] = True


@dataclass(frozen=True, kw_only=True)
class _WithRandom(Pattern):
    """The base of patterns that have random blocks beyond the others."""

    random: int = 0
    """Random blocks of each row, beyond the others; of a causal pattern among the earlier ones."""
    seed: int = 0
    """What the random blocks are drawn from."""
    per_head: bool = False
    """Draw anew for each head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(random=0)

    @property
    def _heads_differ(self) -> bool:
        return self.per_head and self.random > 0

    def _add_random(self, mask: Tensor, head: int) -> None:
        """For each row add blocks that it does not look at yet, as far as there are; drawn from ``seed`` and head."""
        draw = random.Random(f"zeropp sparse attention {self.seed} {head}")
        for row in range(mask.shape[0]):
            free = (~mask[row, : row + 1 if self.causal else mask.shape[0]]).nonzero().flatten().tolist()
            mask[row, draw.sample(free, min(self.random, len(free)))] = True


@dataclass(frozen=True, kw_only=True)
class Dense(Pattern):
    """Every block: for comparison, and for layers that are to stay as they were."""

    def _head(self, head: int, blocks: int) -> Tensor:
        return torch.ones(blocks, blocks, dtype=torch.bool)


@dataclass(frozen=True, kw_only=True)
class Local(Pattern):
    """A window that slides along the diagonal."""

    window: int = 3
    """Blocks of the window, odd: ``window // 2`` to each side. A causal pattern keeps the earlier side."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(window=1)

    def _head(self, head: int, blocks: int) -> Tensor:
        return _band(blocks, self.window // 2)


@dataclass(frozen=True, kw_only=True)
class Longformer(Pattern):
    """A sliding window, and global blocks that look at all and that all look at (Beltagy et al. 2020)."""

    window: int = 3
    """Blocks of the sliding window, odd."""
    global_blocks: tuple[int, ...] = (0,)
    """Which blocks are global; those beyond the end of a short sequence are left out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(window=1)
        _check_blocks(self._name, "global_blocks", self.global_blocks)

    def _head(self, head: int, blocks: int) -> Tensor:
        mask = _band(blocks, self.window // 2)
        _add_globals(mask, self.global_blocks, rows=True)
        return mask


@dataclass(frozen=True, kw_only=True)
class BigBird(_WithRandom):
    """A sliding window, the first blocks global, and random blocks for each query (Zaheer et al. 2020)."""

    window: int = 3
    """Blocks of the sliding window, odd."""
    global_first: int = 1
    """How many blocks at the beginning are global."""
    random: int = 1
    """Random blocks of each row, beyond the others; of a causal pattern among the earlier ones."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(window=1, global_first=0)

    def _head(self, head: int, blocks: int) -> Tensor:
        mask = _band(blocks, self.window // 2)
        _add_globals(mask, range(self.global_first), rows=True)
        self._add_random(mask, head)
        return mask


@dataclass(frozen=True, kw_only=True)
class Fixed(Pattern):
    """Windows side by side, and of each the last blocks global (Child et al. 2019, "fixed")."""

    window: int = 4
    """Blocks of a window; a query looks at all of its own window."""
    global_last: int = 1
    """Blocks at the end of each window that all queries look at, 0 to ``window``."""
    patterns: int = 1
    """Heads take turns: head h's global blocks end ``(h mod patterns) global_last`` blocks before the window's end."""
    global_rows: bool = False
    """Global blocks look at everything, too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(window=1, global_last=0, patterns=1)
        if self.global_last * self.patterns > self.window:
            raise ValueError(
                f"{self._name}: {self.patterns} patterns of {self.global_last} global blocks do not fit a window of "
                f"{self.window}; wanted patterns * global_last <= window"
            )

    @property
    def _heads_differ(self) -> bool:
        return self.patterns > 1 and self.global_last > 0

    def _head(self, head: int, blocks: int) -> Tensor:
        of = torch.arange(blocks) // self.window
        mask = of[:, None] == of[None, :]
        before = self.window - (1 + head % self.patterns) * self.global_last
        for start in range(0, blocks, self.window):
            # Of a last window that is cut short: where they would be, or else the sequence's last blocks, as in DeepSpeed.
            first = max(0, min(start + before, blocks - self.global_last))
            _add_globals(mask, range(first, first + self.global_last), rows=self.global_rows)
        return mask

    @property
    def _period(self) -> int:
        return self.window


@dataclass(frozen=True, kw_only=True)
class Variable(_WithRandom):
    """Windows of different sizes side by side, chosen global blocks, and random ones."""

    windows: tuple[int, ...] = (4,)
    """Blocks of the first windows; the last size is repeated."""
    global_blocks: tuple[int, ...] = (0,)
    """Blocks that all queries look at; those beyond the end of a short sequence are left out."""
    global_rows: bool = False
    """Global blocks look at everything, too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_blocks(self._name, "global_blocks", self.global_blocks)
        _check_blocks(self._name, "windows", self.windows, least=1)
        if not self.windows:
            raise ValueError(f"{self._name}: windows is empty, wanted at least one size")

    def _head(self, head: int, blocks: int) -> Tensor:
        mask = torch.zeros(blocks, blocks, dtype=torch.bool)
        start, index = 0, 0
        while start < blocks:
            end = start + self.windows[min(index, len(self.windows) - 1)]
            mask[start:end, start:end] = True
            start, index = end, index + 1
        _add_globals(mask, self.global_blocks, rows=self.global_rows)
        self._add_random(mask, head)
        return mask


def from_section(section: Mapping[str, Any], seed: int = 0) -> Pattern:
    """Return the pattern of a section that zeropp.config.attention has read. Random blocks are drawn from ``seed``."""
    mode, block = section["mode"], section["block"]
    causal = section.get("attention") == "unidirectional"
    if mode == "dense":
        return Dense(block=block)
    if mode == "fixed":
        return Fixed(
            block=block, causal=causal, window=section["num_local_blocks"], global_last=section["num_global_blocks"],
            patterns=section["num_different_global_patterns"], global_rows=section["horizontal_global_attention"],
        )  # fmt: skip
    per_head = section["different_layout_per_head"]
    if mode == "bigbird":
        return BigBird(
            block=block, causal=causal, window=section["num_sliding_window_blocks"], random=section["num_random_blocks"],
            global_first=section["num_global_blocks"], seed=seed, per_head=per_head,
        )  # fmt: skip
    begins, ends = section["global_block_indices"], section["global_block_end_indices"]
    ends = ends or [begin + 1 for begin in begins]
    blocks = tuple(at for begin, end in zip(begins, ends, strict=True) for at in range(begin, end))
    if mode == "bslongformer":
        return Longformer(block=block, causal=causal, window=section["num_sliding_window_blocks"], global_blocks=blocks)
    return Variable(
        block=block, causal=causal, windows=tuple(section["local_window_blocks"]), global_blocks=blocks, seed=seed,
        global_rows=section["horizontal_global_attention"], random=section["num_random_blocks"], per_head=per_head,
    )  # fmt: skip


def _check_blocks(name: str, field: str, values: object, least: int = 0) -> None:
    whole = isinstance(values, tuple) and all(isinstance(v, int) and not isinstance(v, bool) for v in values)
    if not whole or any(v < least for v in values):  # type: ignore[attr-defined]
        raise ValueError(f"{name}: {field} is {values!r}, wanted a tuple of whole numbers of at least {least}")
