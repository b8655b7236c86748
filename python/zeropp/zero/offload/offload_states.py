# SPDX-License-Identifier: Apache-2.0
"""The states of an optimizer out of memory for a while, and back: ``zeropp.offload_states``.

For loops that do something else between their steps, such as generating with the policy that they train: the fp32 master
weights and the moments of this rank's shards go to a scratch file, and their memory is free until they are called back.
(States that should never be in memory whole: ``Config(offload=Offload(optimizer="nvme"))``.)
"""

from __future__ import annotations

import os
import weakref
from typing import Any, NoReturn

import torch

from zeropp import aio, compat
from zeropp.comm.collective import Ranks
from zeropp.compat import Named
from zeropp.config import Folders, facts_of, folders
from zeropp.errors import ConfigError, Error
from zeropp.files.scratch import STRIPE_BYTES, Scratch
from zeropp.zero.engine import Engine
from zeropp.zero.formulas import in_pages
from zeropp.zero.model_state import Bytes, ModelState, StateStore, Unit, shards_on_device
from zeropp.zero.step import custom

PLACES = ("device", "cpu", "nvme")


def offload_states(*, optimizer: Any, to: str = "cpu", path: Folders | None = None) -> int:
    """Move the states of a prepared optimizer (moments, fp32 master weights). Collective.

    Args:
        optimizer: one that ``prepare`` adopted.
        to: ``"nvme"``: to a scratch file, and their memory is freed. ``"cpu"`` or ``"device"``: back; without an accelerator
            the two are one.
        path: for ``"nvme"``: a folder on a local disk, or several, one for each, over which the file is striped.

    Returns:
        Bytes that moved on this rank; 0 where they were there already.

    While they are offloaded the model computes, generates, and is read as ever; a step, a checkpoint and what else
    needs them raises ``zeropp.Error``. Offloaded states are lost with the process: they are no checkpoint.

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
        return engine.states.reload()
    if engine.states.in_file:
        return 0  # there already
    if shards_on_device(engine.config, engine.device):
        raise ConfigError(
            f"offload_states: the states of the optimizer are on {engine.device}, and to='nvme' of states there is not supported yet; keep "
            "them on the host with Offload(params='cpu', optimizer='cpu')"
        )
    called = {"offload_states()": Named(True, "offload_states()")}
    compat.check({**called, **facts_of(engine.config), **custom.facts_of(optimizer)})
    assert path is not None
    engine.states = states = OffloadedStates(engine, folders("offload_states.path", path))
    return states.size_bytes


class _Refusal:
    """Placeholder for offloaded states; any access raises an error that says how to reload them."""

    def _refuse(self, *args: Any) -> NoReturn:
        raise Error(
            "the optimizer's states are on disk since zeropp.offload_states(optimizer=..., to='nvme'); bring them back with "
            "zeropp.offload_states(optimizer=..., to='cpu') first"
        )

    __getattr__ = __getitem__ = __setitem__ = __iter__ = __len__ = __contains__ = __bool__ = _refuse


REFUSAL: Any = _Refusal()


class OffloadedStates(StateStore):
    """The states of one engine on this rank, in a scratch file until they are reloaded. Construction is collective: all ranks have written before
    any frees what it wrote.

    Raises:
        zeropp.TierError: on every rank; nothing changed then.
    """

    in_file = True

    def __init__(self, engine: Engine, path: str | tuple[str, ...]) -> None:
        self._engine, self._before = weakref.ref(engine), engine.states
        self._states = {unit.index: dict(unit.state) for unit in engine.units}
        self._masters = {unit.index: unit.master for unit in engine.units}
        own = [one for unit in engine.units for one in unit.scales.values()] + engine.strategy.state_tensors()
        self._tensors = self._found(own)
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
        self._kept_by_step = engine.strategy.replace_states(REFUSAL)
        for one in self._tensors:
            one.untyped_storage().resize_(0)

    def _found(self, more: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return every tensor of more than one element, each storage once."""
        found = [*more, *(t for states in self._states.values() for t in states.values()), *self._masters.values()]
        several = [one for one in found if isinstance(one, torch.Tensor) and one.numel() > 1]
        return list({one.untyped_storage().data_ptr(): one for one in several}.values())

    def count(self, unit: Unit) -> int:
        return len(self._states[unit.index])

    def require_loaded(self) -> None:
        REFUSAL._refuse()

    def held_bytes(self, engine: ModelState) -> Bytes:
        return {("cpu", "master"): 0, ("cpu", "optimizer"): 0, ("nvme", "away"): self.size_bytes}

    def _move(self, scratch: Scratch, write: bool) -> None:
        """Write or read one file, each tensor from an aligned offset on. The end of the block waits for all writes."""
        with aio.Engine(paths=scratch.folders, stripe_bytes=STRIPE_BYTES) as files:
            at = 0
            for one in self._tensors:
                values = one.detach().reshape(-1)
                if write:
                    files.write(values, "states", at)
                else:
                    files.read(values, "states", at).wait()
                at += in_pages(one.nbytes)

    def reload(self) -> int:
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
        engine.strategy.replace_states(self._kept_by_step)
        engine.states = self._before
        self._end()
        return self.size_bytes


def _end(scratch: Scratch, owner: int) -> None:
    if os.getpid() == owner:  # a forked child leaves its parent's files alone
        scratch.remove()
