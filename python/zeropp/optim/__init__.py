# SPDX-License-Identifier: Apache-2.0
"""Optimizers that torch lacks, over the C kernels: ordinary ``torch.optim.Optimizer`` objects. Learning rates by consumed tokens."""

from __future__ import annotations

from zeropp.optim.grouped import LAMB, Lion
from zeropp.optim.muon import Muon
from zeropp.optim.onebit import OneBitAdam, OneBitLamb, ZeroOneAdam
from zeropp.optim.tokens import ByTokens, LayerTokenLR, by_tokens

__all__ = [
    "LAMB", "ByTokens", "LayerTokenLR", "Lion", "Muon", "OneBitAdam", "OneBitLamb", "ZeroOneAdam", "by_tokens",
]  # fmt: skip
