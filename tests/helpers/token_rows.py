# SPDX-License-Identifier: Apache-2.0
"""Small datasets of token rows."""

from __future__ import annotations

import random
from typing import Any

import torch


class Rows(torch.utils.data.Dataset[Any]):
    """Samples with 'input_ids' of 1 to ``longest`` tokens, and, padded, with an attention_mask."""

    def __init__(
        self, samples: int, *, longest: int = 12, vocabulary: int = 50, seed: int = 0, padded: bool = False
    ) -> None:
        made = random.Random(seed)
        lengths = [made.randint(1, longest) for _ in range(samples)]
        self.rows = [[made.randrange(vocabulary) for _ in range(length)] for length in lengths]
        self.longest, self.padded = longest, padded

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Any:
        row = self.rows[number]
        if not self.padded:
            return {"input_ids": torch.tensor(row)}
        padding = self.longest - len(row)
        return {"input_ids": row + [0] * padding, "attention_mask": [1] * len(row) + [0] * padding}
