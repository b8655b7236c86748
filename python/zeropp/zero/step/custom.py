# SPDX-License-Identifier: Apache-2.0
"""Optimizers by class: which of those that zeropp knows one is, and how one that it does not know steps shards.

A subclass that leaves ``step`` alone is what it is derived from. Any other class runs its own ``step`` over this rank's pieces, as it
would in DeepSpeed under ``zero_allow_untested_optimizer``: 1-D, so that it has to be element-wise; at stage 0 in the parameters' shapes.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import optim

from zeropp import compat
from zeropp.compat import Named
from zeropp.optim import LAMB, Lion, Muon, OneBitAdam, OneBitLamb, ZeroOneAdam

ADAMS = (optim.AdamW, optim.Adam)
ELEMENTWISE = (
    optim.SGD, optim.Adagrad, optim.RMSprop, optim.Adadelta, optim.Adamax, optim.NAdam, optim.RAdam, optim.ASGD, optim.Rprop,
    Lion,
)  # fmt: skip
WHOLE = (LAMB, OneBitAdam, ZeroOneAdam, OneBitLamb, Muon, optim.Muon)
_KNOWN = (*ADAMS, *ELEMENTWISE, *WHOLE)


def kind_of(optimizer: optim.Optimizer | type) -> type:
    """Return the class whose ``step`` it has, where zeropp knows that class; else its own."""
    own: type = optimizer if isinstance(optimizer, type) else type(optimizer)
    if own in _KNOWN:
        return own
    known = (base for base in own.__mro__ if base in _KNOWN and _step_of(own) is _step_of(base))
    return next(known, own)


def _step_of(kind: Any) -> Any:
    return inspect.unwrap(kind.step)  # torch wraps it when the first optimizer of a class is made


def is_known(optimizer: optim.Optimizer | type) -> bool:
    return kind_of(optimizer) in _KNOWN


def facts_of(optimizer: optim.Optimizer) -> dict[str, Any]:
    """Return what an optimizer is, adopted or not, for :mod:`zeropp.compat`."""
    own: type = getattr(type(optimizer), "_adopted", type(optimizer))
    kind = kind_of(own)
    facts: dict[str, Any] = {compat.OPTIMIZER: Named(_word_of(kind), f"optimizer {own.__name__}")}
    if kind is optim.SGD:
        with_momentum = any(group["momentum"] for group in optimizer.param_groups)
        facts["SGD.momentum"] = int(with_momentum) or Named(0, "SGD without momentum")
    if kind is ZeroOneAdam:
        facts["ZeroOneAdam.local_step_clipper"] = optimizer.param_groups[0]["local_step_clipper"]
    return facts


def _word_of(kind: type) -> str:
    """Return what the table of compatibility calls a class of optimizers."""
    if kind in _KNOWN:
        return kind.__name__
    closure = inspect.signature(_step_of(kind)).parameters.get("closure")
    return compat.CLOSURE if closure is not None and closure.default is inspect.Parameter.empty else compat.UNKNOWN
