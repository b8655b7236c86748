# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts whose experts are spread over ranks: DeepSpeed-MoE (Rajbhandari et al. 2022) and its successors.

The row operators of one rank are in :mod:`zeropp.ops`; this package has what lies between ranks.
"""

from zeropp.moe.exchange import Exchange, RowPlan, combine, dispatch

__all__ = ["Exchange", "RowPlan", "combine", "dispatch"]
