# SPDX-License-Identifier: Apache-2.0
"""The states of an optimizer out of memory for a while, and back: ``zeropp.offload_states``.

For loops that do something else between their steps, such as generating with the policy that they train: the fp32 master
weights and the moments of this rank's shards go to a scratch file, and their memory is free until they are called back.
(States that should never be in memory whole: ``Config(offload=Offload(optimizer="nvme"))``.)
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch

from zeropp import compat
from zeropp.comm.collective import Ranks
from zeropp.compat import Named
from zeropp.config import Folders, facts_of, folders
from zeropp.errors import ConfigError, Error
from zeropp.files.scratch import STRIPE_BYTES, Scratch
from zeropp.zero.step import custom

if TYPE_CHECKING:
    from zeropp.zero.engine import Engine

PLACES = ("device", "cpu", "nvme")
ALIGNED_BYTES = 4096


def offload_states(*, optimizer: Any, to: str = "cpu", path: Folders | None = None) -> int:
    """Move the states of a prepared optimizer (moments, fp32 master weights). Collective.

    Args:
        optimizer: one that ``prepare`` adopted.
        to: ``"nvme"``: to a scratch file, and their memory is freed. ``"cpu"`` or ``"device"``: back; without an accelerator
            the two are one.
        path: for ``"nvme"``: a folder on a local disk, or several, one for each, over which the file is striped.

    Returns:
        Bytes that moved on this rank; 0 where they were there already.

    While they are away the model computes, generates, and is read as ever; a step, a checkpoint and what else needs them raises
    ``zeropp.Error``. What is away is lost with the process: it is no checkpoint.

    Raises:
        zeropp.TierError: the disk is full or failed; nothing moved then. On every rank.
    """
    engine: Engine | None = getattr(optimizer, "_engine", None)
    if engine is None:
        raise ConfigError(f"offload_states: {type(optimizer).__name__} is not an optimizer that zeropp.prepare adopted")
    if to not in PLACES:
        raise ConfigError(f"offload_states: to={to!r} is not allowed; wanted one of {', '.join(map(repr, PLACES))}")
    if path is None and to == "nvme":
        raise ConfigError("offload_states: to='nvme' needs path=, a folder on a local disk")
    compat.check({"offload_states.path": path, "offload_states.to": to})
    if to != "nvme":
        return 0 if engine.away is None else engine.away.back()
    if engine.away is not None or engine.states is not None:
        return 0  # there already
    called = {"offload_states()": Named(True, "offload_states()")}
    compat.check({**called, **facts_of(engine.config), **custom.facts_of(optimizer)})
    assert path is not None
    engine.away = away = Away(engine, folders("offload_states.path", path))
    return away.size_bytes


class _Refusal:
    """Stands where states were: whoever looks at them hears where they are."""

    def _refuse(self, *args: Any) -> NoReturn:
        raise Error(
            "the optimizer's states are on disk since zeropp.offload_states(optimizer=..., to='nvme'); bring them back with "
            "zeropp.offload_states(optimizer=..., to='cpu') first"
        )

    __getattr__ = __getitem__ = __setitem__ = __iter__ = __len__ = __contains__ = __bool__ = _refuse


REFUSAL: Any = _Refusal()


class Away:
    """The states of one engine on this rank, in a scratch file. Construction is collective: all ranks have written before
    any frees what it wrote.

    Raises:
        zeropp.TierError: on every rank; nothing changed then.
    """

    def __init__(self, engine: Engine, path: str | tuple[str, ...]) -> None:
        self._engine = weakref.ref(engine)
        self._states = {unit.index: dict(unit.state) for unit in engine.units}
        self._masters = {unit.index: unit.master for unit in engine.units}
        self._inner = engine.inner
        self._tensors = self._found([one for unit in engine.units for one in unit.scales.values()])
        self.size_bytes = sum(one.nbytes for one in self._tensors)
        scratch = Scratch(path, Ranks(engine))
        try:
            Ranks(engine).all_do(lambda: self._move(scratch, write=True))
        except BaseException:
            scratch.remove()
            raise
        self._scratch = scratch
        self._end = weakref.finalize(self, _end, scratch, os.getpid())
        for unit in engine.units:
            unit.state, unit.bound = REFUSAL, ()  # addresses change
            if unit.master is not None:
                unit.master = REFUSAL
        if engine.inner is not None:
            engine.inner = REFUSAL
        for one in self._tensors:
            one.untyped_storage().resize_(0)

    def _found(self, scales: list[torch.Tensor]) -> list[torch.Tensor]:
        """Every tensor of more than one element, each storage once."""
        found = [*scales, *(t for states in self._states.values() for t in states.values()), *self._masters.values()]
        if self._inner is not None:
            found += [value for states in self._inner.state.values() for value in states.values()]
        several = [one for one in found if isinstance(one, torch.Tensor) and one.numel() > 1]
        return list({one.untyped_storage().data_ptr(): one for one in several}.values())

    def state_of(self, index: int) -> dict[str, torch.Tensor]:
        """Of one unit, by name: sizes are true, and there are no values."""
        return self._states[index]

    def _move(self, scratch: Scratch, write: bool) -> None:
        """One file, each tensor from an aligned offset on. The block's end waits for all writes."""
        from zeropp.aio import Engine as Files

        with Files(paths=scratch.folders, stripe_bytes=STRIPE_BYTES) as files:
            at = 0
            for one in self._tensors:
                values = one.detach().reshape(-1)
                if write:
                    files.write(values, "states", at)
                else:
                    files.read(values, "states", at).wait()
                at += -(-one.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES

    def back(self) -> int:
        """Collective: into memory again, and the file goes."""
        engine = self._engine()
        assert engine is not None
        for one in self._tensors:
            storage = one.untyped_storage()
            if storage.size() == 0:
                storage.resize_(one.nbytes)
        Ranks(engine).all_do(lambda: self._move(self._scratch, write=False))
        for unit in engine.units:
            unit.state = self._states[unit.index]
            unit.master = self._masters[unit.index]
        engine.inner, engine.away = self._inner, None
        self._end()
        return self.size_bytes


def _end(scratch: Scratch, owner: int) -> None:
    if os.getpid() == owner:  # a forked child leaves its parent's files alone
        scratch.remove()


def require_here(engine: Engine) -> None:
    """Raises zeropp.Error while the states are away."""
    if engine.away is not None:
        cast(Any, REFUSAL)._refuse()


__all__ = ["Away", "offload_states", "require_here"]
