# SPDX-License-Identifier: Apache-2.0
"""Optimizers that torch lacks, over the C kernels: ordinary ``torch.optim.Optimizer`` objects."""

from __future__ import annotations

from zeropp.optim.grouped import LAMB, Lion
from zeropp.optim.muon import Muon
from zeropp.optim.onebit import OneBitAdam, OneBitLamb, ZeroOneAdam

__all__ = ["LAMB", "Lion", "Muon", "OneBitAdam", "OneBitLamb", "ZeroOneAdam"]
