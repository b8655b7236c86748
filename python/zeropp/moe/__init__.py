# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts, on one rank and spread over ranks: DeepSpeed-MoE (Rajbhandari et al. 2022) and its successors.

The row operators of one rank are in :mod:`zeropp.ops`; this package has the layer and its gate, what lies between ranks, and what is
done with whole models that have experts.
"""

from zeropp.moe.balance import balance_bias as balance_bias
from zeropp.moe.balance import load as load
from zeropp.moe.distill import Distill as Distill
from zeropp.moe.exchange import Exchange as Exchange
from zeropp.moe.exchange import RowPlan as RowPlan
from zeropp.moe.exchange import combine as combine
from zeropp.moe.exchange import dispatch as dispatch
from zeropp.moe.exchange import keep_exchanges as keep_exchanges
from zeropp.moe.gate import Gate as Gate
from zeropp.moe.layer import MoE as MoE
from zeropp.moe.prune import aggregate as aggregate
from zeropp.moe.prune import prune as prune
from zeropp.moe.shallower import shallower as shallower

__all__ = [
    "Distill", "Exchange", "Gate", "MoE", "RowPlan", "aggregate", "balance_bias", "combine", "dispatch", "keep_exchanges", "load", "prune", "shallower",
]  # fmt: skip
