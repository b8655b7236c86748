# SPDX-License-Identifier: Apache-2.0
"""Optimizers by class: which of those that zeropp knows one is, and how one that it does not know steps shards.

A subclass that leaves ``step`` alone is what it is derived from. Any other class runs its own ``step`` over this rank's pieces, as it
would in DeepSpeed under ``zero_allow_untested_optimizer``: 1-D, so that it has to be element-wise; at stage 0 in the parameters' shapes.
"""

from __future__ import annotations

import collections
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import optim

from zeropp import compat
from zeropp.compat import Named
from zeropp.errors import CheckpointError
from zeropp.optim import LAMB, Lion, Muon, OneBitAdam, OneBitLamb, ZeroOneAdam

if TYPE_CHECKING:
    from zeropp.zero.engine import Engine, Entry

ADAMS = (optim.AdamW, optim.Adam)
ELEMENTWISE = (
    optim.SGD, optim.Adagrad, optim.RMSprop, optim.Adadelta, optim.Adamax, optim.NAdam, optim.RAdam, optim.ASGD, optim.Rprop,
    Lion,
)  # fmt: skip
WHOLE = (LAMB, OneBitAdam, ZeroOneAdam, OneBitLamb, Muon, optim.Muon)
_KNOWN = (*ADAMS, *ELEMENTWISE, *WHOLE)


def kind_of(optimizer: optim.Optimizer | type) -> type:
    """The class whose ``step`` it has, where zeropp knows that class; else its own."""
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


def over_pieces(optimizer: optim.Optimizer, groups: list[dict[str, Any]]) -> optim.Optimizer:
    """A twin with the same attributes and no states, over other tensors."""
    twin: Any = object.__new__(type(optimizer))
    twin.__dict__.update({name: value for name, value in optimizer.__dict__.items() if name != "step"})
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):  # they run once, around the step of all
        if name in twin.__dict__:
            twin.__dict__[name] = collections.OrderedDict()
    twin.param_groups, twin.state = groups, collections.defaultdict(dict)
    return twin  # type: ignore[no-any-return]


def piece_of(engine: Engine, entry: Entry, flat: torch.Tensor) -> torch.Tensor:
    """Return the piece of a parameter that an unknown optimizer sees."""
    return entry.of(flat) if engine.stage == 0 else flat


def check_saved(engine: Engine) -> None:
    """The states of an unknown optimizer are saved element by element, with the parameter; others have no place in a checkpoint.

    Raises:
        zeropp.CheckpointError: a state of another size.
    """
    if engine.inner is None or is_known(engine.inner):
        return
    for unit in engine.units:
        for index, piece in unit.grad_pool.items():
            for name, value in engine.inner.state.get(piece, {}).items():
                if name != "step" and not (isinstance(value, torch.Tensor) and value.numel() == piece.numel()):
                    size = f"{value.numel()} elements" if isinstance(value, torch.Tensor) else repr(value)
                    raise CheckpointError(
                        f"save: the state '{name}' ({size}) that {type(engine.inner).__name__} has of '{unit.params[index].names[0]}' is not of "
                        f"the size of its parameter, {piece.numel()} elements, so it is not saved yet; save weights alone: zeropp.save(path, model)"
                    )


__all__ = ["ADAMS", "ELEMENTWISE", "check_saved", "facts_of", "is_known", "kind_of", "over_pieces", "piece_of"]
