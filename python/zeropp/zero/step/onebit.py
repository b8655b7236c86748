# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the one-bit optimizers on shards (docs/design/0013): local gradients, the momentum at one bit, and the
state that belongs to one rank alone.

The arithmetic of each paper stands in onebit_adam.py and lamb.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeropp.comm.collective import all_gather
from zeropp.comm.onebit import OneBitAllReduce
from zeropp.errors import ConfigError, Error
from zeropp.ops import frozen_adam_step_, norm_squares
from zeropp.zero.engine import Engine, StepStrategy
from zeropp.zero.model_state import Bytes, ModelState, Unit, tensor_over
from zeropp.zero.step.updates import ADAMS, KernelStep

#: Elements that share a scale.
CHUNK_ELEMS = 4096
#: Which tensors of :attr:`Slot.extra` have a number for each parameter. They are on the host, the others on the unit's device.
NUMBERS = ("stepped",)


@dataclass(frozen=True)
class Piece:
    """A parameter's part in one shard: elements ``begin`` to ``end`` of the unit's flat buffer."""

    param: int
    shard: int
    begin: int
    end: int


def pieces_of(engine: Engine, unit: Unit) -> list[Piece]:
    """Return the pieces that this rank steps: those of its shard, or of all shards where it holds everything.

    Cut at the borders of shards in both cases, so that sums and kernels see the same lengths at every stage.
    """
    found = []
    for at in range(unit.ranks) if engine.local else (unit.rank,):
        low, high = at * unit.shard_elems, (at + 1) * unit.shard_elems
        for index, entry in enumerate(unit.params):
            begin, end = max(low, entry.offset_elems), min(high, entry.offset_elems + entry.numel)
            if begin < end:
                found.append(Piece(index, at, begin, end))
    return found


class Slot:
    """One unit under a one-bit optimizer."""

    def __init__(self, engine: Engine, unit: Unit) -> None:
        self.engine, self.unit = engine, unit
        self.pieces = pieces_of(engine, unit)
        ends = [0, *(entry.offset_elems + entry.numel for entry in unit.params)]
        begins = [*(entry.offset_elems for entry in unit.params), unit.elems]
        self.gaps = [(end, begin) for end, begin in zip(ends, begins, strict=True) if end < begin]
        """What lies between the parameters."""
        self.present = [False] * len(unit.params)
        """Which parameters had a gradient on any rank, in the step under way."""
        self.packed = False
        """True if ``reducer`` holds the whole momentum."""
        self.extra: dict[str, Tensor] = {}
        """Tensors of this rank alone, by name: part of the checkpoint where ranks differ."""
        self._reducer: OneBitAllReduce | None = None

    @property
    def reducer(self) -> OneBitAllReduce:
        """Made when first used: until the warm-up ends nothing is owed."""
        if self._reducer is None:
            self._reducer = OneBitAllReduce(
                self.unit.elems, chunk_elems=CHUNK_ELEMS, group=self.unit.comm, device=self.unit.device
            )
            assert self._reducer.slice_elems == self.unit.shard_elems, "the shards of ZeRO are the servers' parts"
        return self._reducer

    def state(self, name: str) -> Tensor:
        """Return a state of ``shard`` length, made on first use."""
        if name not in self.unit.state:
            self.unit.state[name] = torch.zeros(self.unit.shard.numel(), device=self.unit.device)
        return self.unit.state[name]

    def own(self, values: Tensor, piece: Piece) -> Tensor:
        """Return the elements of a piece in a tensor of ``shard`` length."""
        return values[piece.begin - self.unit.begin_elems : piece.end - self.unit.begin_elems]

    def outs(self, pieces: list[Piece]) -> list[Tensor]:
        """Return where the parameters of these pieces go in their own dtype; empty where they are the master."""
        return [] if self.unit.master is None else [self.own(self.unit.shard, piece) for piece in pieces]

    def spans(self, values: Tensor) -> list[Tensor]:
        """Return each parameter's elements in a tensor of the unit's length."""
        return [values[e.offset_elems : e.offset_elems + e.numel] for e in self.unit.params]

    def gradients(self) -> list[Tensor | None]:
        """Return this rank's own gradients, flat, in the unit's grad_dtype."""
        if self.engine.local:
            with torch._C.DisableTorchFunctionSubclass():
                own = [entry.param.grad for entry in self.unit.params]
            return [None if one is None else one.reshape(-1) for one in own]
        held = self.unit.core.held()
        if held is None:
            return [None] * len(self.unit.params)
        bucket = tensor_over(self.unit.core, held[0], self.unit.elems, self.unit.grad_dtype, self.engine.shard_device)
        return [one if touched else None for one, touched in zip(self.spans(bucket), held[1], strict=True)]

    @property
    def share(self) -> float:
        """Return the factor of this rank's own gradient, of which the mean over the unit's ranks is the gradient."""
        return self.unit.ranks / self.unit.divisor

    def take(self, into: Tensor, factor: float) -> None:
        """Fill ``into`` with this rank's share of the gradients times ``factor``, and with zeros elsewhere."""
        into.zero_()
        found = [(to, one) for to, one in zip(self.spans(into), self.gradients(), strict=True) if one is not None]
        if found:
            torch._foreach_copy_([to for to, _ in found], [one for _, one in found])
            into.mul_(factor * self.share)

    def clear_gaps(self, values: Tensor) -> None:
        """Put zeros between the parameters, in a tensor of the unit's length."""
        for begin, end in self.gaps:
            values[begin:end] = 0

    def runs(self, key: Callable[[int], Any]) -> Iterator[tuple[Any, Piece]]:
        """Yield neighbouring pieces of present parameters with one key, as one; never over the border of a shard."""
        run: Piece | None = None
        of: Any = None
        for piece in self.pieces:
            if not self.present[piece.param]:
                continue
            mine = key(piece.param)
            if run is not None and mine == of and run.end == piece.begin and run.shard == piece.shard:
                run = Piece(run.param, run.shard, run.begin, piece.end)
                continue
            if run is not None:
                yield of, run
            run, of = piece, mine
        if run is not None:
            yield of, run

    def count_step(self) -> list[int]:
        """Count a step of every parameter that is present; return the steps of all."""
        assert self.unit.steps is not None
        self.unit.steps += torch.tensor(self.present, dtype=torch.int64, device="cpu")
        return [int(step) for step in self.unit.steps.tolist()]

    def write_out(self) -> None:
        """Copy the fp32 master to the parameters, where there is one."""
        if self.unit.master is not None:
            self.unit.shard.copy_(self.unit.master)

    def forget(self) -> None:
        """Forget the compression errors and the other ranks' momentum."""
        self._reducer, self.packed = None, False
        self.extra.clear()

    def compresses(self) -> bool:
        """True if there are compression errors."""
        return self._reducer is not None

    def held_bytes(self) -> int:
        """Beside ``unit.state``."""
        tensors = list(self.extra.values())
        if self._reducer is not None:
            tensors += self._reducer.tensors()
        return sum(tensor.nbytes for tensor in tensors)

    def layout(self) -> Tensor:
        """Return a number, int64, that says which elements of the model the unit has on this rank, and in which order."""
        held = [(entry.names[0], entry.held) for entry in self.unit.params]
        return torch.tensor([zlib.crc32(repr((held, self.unit.ranks)).encode())], device="cpu")


def _measured(gradients: Sequence[Tensor | None]) -> tuple[float, float, float]:
    """Return (sum of squares, first gradient with a value that is not finite or -1, its first such element or -1)."""
    found = [(index, one) for index, one in enumerate(gradients) if one is not None]
    sums, bad = norm_squares([one for _, one in found])
    bad_ones = (pair for pair, count in zip(found, bad.tolist(), strict=True) if count)
    worst, values = next(bad_ones, (-1, None))
    elem = -1 if values is None else int((~values.isfinite()).nonzero()[0])
    return sum(sums.tolist()), float(worst), float(elem)


class CollectiveStep(StepStrategy):
    """A step that sends or sums something of its own: LAMB, Muon and the one-bit optimizers.

    ``progress`` lies in the first parameter group, so checkpoints keep it.

    Subclasses say in :meth:`update` what a step is, and call :meth:`hold` when local gradients are wanted from the next
    backward on.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, engine: Engine) -> None:
        self.engine = engine
        self.slots = [Slot(engine, unit) for unit in engine.units if unit.trainable]
        self._scratch: dict[str, Tensor] = {}
        self._kernel = KernelStep(ADAMS, 2)  # a one-bit optimizer begins with steps of Adam
        self._groups = optimizer.param_groups
        self._groups[0]["progress"] = self.begin()

    # -- what a subclass says ------------------------------------------------------------------------------------------

    def begin(self) -> dict[str, Any]:
        """Plain numbers that the steps count in."""
        return {"step": 0}

    def wants_local(self) -> bool:
        """True if the next step needs local gradients."""
        raise NotImplementedError

    def update(self, optimizer: Any, scale: float) -> None:
        """Step all units with gradients times ``scale``."""
        raise NotImplementedError

    # -- what the optimizer and the engine call ------------------------------------------------------------------------

    @property
    def progress(self) -> dict[str, Any]:
        found: dict[str, Any] = self._groups[0]["progress"]
        return found

    def adopt_unit(self, optimizer: Any, unit: Unit) -> None:
        self.add_group(optimizer, {})

    def add_group(self, optimizer: Any, group: dict[str, Any]) -> None:
        """Go on with another object, which knows the units that are trained now."""
        progress = self.progress
        self.engine.strategy = type(self)(optimizer, self.engine)
        optimizer.param_groups[0]["progress"] = progress

    def step(self, optimizer: Any, scale: float, units: list[Unit]) -> None:
        if not self.engine.core.hold:
            self._note_present()
        with torch.no_grad():
            self.update(optimizer, scale)
        self.hold()

    def hold(self) -> None:
        """Let gradients stay on this rank or be reduced, from the next backward on, as the next step needs."""
        self.engine.core.hold = self.engine.ranks > 1 and self.wants_local()

    def gradients_pending(self, engine: Engine) -> bool:
        pending = super().gradients_pending(engine)
        return not engine.core.at_boundary and self._has_gradients() if engine.core.hold else pending

    def collect_gradients(self, engine: Engine) -> bool:
        found = super().collect_gradients(engine)
        if not engine.core.hold:
            return found
        self._refuse_leftovers()
        return self._has_gradients()

    def _has_gradients(self) -> bool:
        """Collective: return True if any rank has local gradients."""
        self.engine.measure()
        return any(any(slot.present) for slot in self.slots)

    def _refuse_leftovers(self) -> None:
        """Raise zeropp.Error for reduced gradients from before this phase, which would be lost in silence."""
        if not self.engine.local and any(slot.unit.core.grad() is not None for slot in self.slots):
            raise Error(
                "optimizer.step: reduced gradients of the phase before are left, and this step takes local ones; call "
                "optimizer.zero_grad() after every step"
            )

    def measure(self, engine: Engine) -> tuple[float, list[str]]:
        """Collective: return (mean over ranks of the squared norms of local gradients, parameters with values that are not finite).

        By convexity never less than the squared norm of the mean gradient, which no rank has. Reduced gradients are measured as usual.
        """
        if not engine.core.hold:
            return super().measure(engine)
        rows, flags = [], []
        for slot in self.slots:
            gradients = slot.gradients()
            square, worst, elem = _measured(gradients)
            weight = slot.share * self.engine.ranks / slot.unit.divisor  # 1 where all data ranks have the unit
            rows.append([square * weight, worst, elem])
            flags += [one is not None for one in gradients]
        numbers = torch.tensor(rows, dtype=torch.float64, device="cpu")
        mine = torch.cat([numbers.view(-1).view(torch.uint8), torch.tensor(flags, dtype=torch.uint8, device="cpu")])
        every = torch.empty(self.engine.ranks, mine.numel(), dtype=torch.uint8, device="cpu")
        all_gather(self.engine.comm, every, mine)
        all_rows = every[:, : 24 * len(rows)].contiguous().view(torch.float64).view(self.engine.ranks, -1, 3)
        self._keep_present(every[:, 24 * len(rows) :].amax(0).tolist())
        squares, who = 0.0, []
        for at, slot in enumerate(self.slots):
            for rank in range(self.engine.ranks):
                square, bad_param, elem = all_rows[rank, at].tolist()
                squares += square
                if bad_param >= 0:
                    who.append(f"'{slot.unit.params[int(bad_param)].name_at(int(elem), rank)}' (rank {rank})")
        return squares / self.engine.ranks, who

    # -- for subclasses ------------------------------------------------------------------------------------------------

    def scratch(self, unit: Unit, name: str = "mine") -> Tensor:
        """Return fp32 memory of the unit's length, which is used again for every unit."""
        if name not in self._scratch or self._scratch[name].numel() < unit.elems:
            longest = max(slot.unit.elems for slot in self.slots)
            self._scratch[name] = torch.empty(longest, device=unit.device)
        return self._scratch[name][: unit.elems]

    def betas(self) -> tuple[float, float]:
        """Return the betas, which have to be equal in all groups, because one momentum is made for a whole unit."""
        first = tuple(self._groups[0]["betas"])
        for index, group in enumerate(self._groups):
            if tuple(group["betas"]) != first:
                raise ConfigError(
                    f"optimizer.step: betas of parameter group {index} are {tuple(group['betas'])}, those of group 0 "
                    f"{first}; a one-bit optimizer wants the same in every group"
                )
        return float(first[0]), float(first[1])

    def group(self, slot: Slot, param: int) -> dict[str, Any]:
        found: dict[str, Any] = self._groups[slot.unit.groups[param]]
        return found

    def reduced(self, slot: Slot, scale: float) -> Tensor:
        """Return this rank's shard of the reduced gradient, times ``scale``, in fp32."""
        if self.engine.local:
            whole = self.scratch(slot.unit)
            slot.take(whole, scale / slot.share)  # it is the sum over the ranks already
            return whole
        found = self.engine.gradient_shard(slot.unit)
        assert found is not None
        return found[0].float() * scale

    def whole(self, slot: Slot, name: str) -> Tensor:
        """Return all elements of a sharded state, exactly; collective where it is sharded. The scratch memory
        "whole"."""
        whole = self.scratch(slot.unit, "whole")
        if self.engine.local:
            whole.copy_(slot.state(name))
        else:
            mine = slot.state(name)
            all_gather(slot.unit.comm, whole, mine)
        return whole

    def add_momentum(self, slot: Slot, mine: Tensor, beta: float) -> None:
        """``mine += beta m`` with every rank's shard of the momentum; that of absent parameters stands as it is.

        Between parameters it is 0: what compression puts there is not a momentum, and no checkpoint keeps it.
        """
        if slot.packed:
            slot.reducer.decode_(mine, scale=beta, accumulate=True)
        else:
            mine.add_(self.whole(slot, "exp_avg").mul_(beta))
        slot.clear_gaps(mine)
        if all(slot.present):
            return
        plain = slot.reducer.decode_(self.scratch(slot.unit, "whole")) if slot.packed else self.whole(slot, "exp_avg")
        for there, to, values in zip(slot.present, slot.spans(mine), slot.spans(plain), strict=True):
            if not there:
                to.copy_(values)

    def average(self, slot: Slot, mine: Tensor, into: Tensor, *, gather: bool = True) -> None:
        """Fill ``into``, of ``shard`` length, with the one-bit mean over the unit's ranks of ``mine``; of one rank
        with ``mine``, exactly."""
        if slot.unit.ranks == 1:
            into.copy_(mine)
            return
        slot.reducer.reduce(mine, gather=gather or self.engine.local)
        if self.engine.local:
            slot.reducer.decode_(into)
        else:
            slot.reducer.decode_slice_(into)

    def step_frozen(self, slot: Slot, pieces: list[Piece], along: Tensor, **rates: Any) -> None:
        """Step these pieces ``along`` a tensor of ``shard`` length, by the variance as it is; and the copy-out.

        ``rates``: of ``frozen_adam_step_``, one number a piece.
        """
        unit, variance = slot.unit, slot.state("exp_avg_sq")
        frozen_adam_step_(
            [slot.own(unit.own, piece) for piece in pieces],
            [slot.own(along, piece) for piece in pieces],
            [slot.own(variance, piece) for piece in pieces],
            beta2=self.betas()[1],
            param_outs=slot.outs(pieces),
            **rates,
        )

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def private(self) -> dict[str, Tensor]:
        """Return the tensors of this rank alone. Empty in the warm-up."""
        found: dict[str, Tensor] = {}
        for slot in self.slots:
            own = dict(slot.extra)
            if slot._reducer is not None:
                own |= {"worker_error": slot.reducer.worker_error, "server_error": slot.reducer.server_error}
            if own:
                own["layout"] = slot.layout()
            found |= {f"{slot.unit.index}.{name}": tensor for name, tensor in own.items()}
        return found

    def restore(self, private: dict[str, Tensor] | None) -> None:
        """Take :meth:`private` after a load of states and groups. None: saved by another number of ranks; the errors
        are 0 then. So they are where the experts were shared out in another way."""
        private = self.fitting(private)
        for slot in self.slots:
            slot.forget()
            for key, tensor in (private or {}).items():
                index, _, name = key.partition(".")
                if int(index) != slot.unit.index or name == "layout":
                    continue
                if name in ("worker_error", "server_error"):
                    getattr(slot.reducer, name).copy_(tensor)
                else:
                    slot.extra[name] = tensor.to("cpu" if name in NUMBERS else slot.unit.device, copy=True)
        self.hold()

    def fitting(self, private: dict[str, Tensor] | None) -> dict[str, Tensor] | None:
        """Return what :meth:`restore` is given, or None where it is of units with other elements."""
        layouts = {f"{slot.unit.index}.layout": slot.layout() for slot in self.slots}
        same = all(torch.equal(one, layouts[key]) for key, one in (private or {}).items() if key.endswith(".layout"))
        return private if same else None

    def held_bytes(self, engine: ModelState) -> Bytes:
        """Return the bytes beside the sharded states: errors, packed momentum, messages, what a rank has whole while ranks differ."""
        return {
            ("cpu", "optimizer"): sum(slot.held_bytes() for slot in self.slots),
            ("cpu", "scratch"): sum(one.nbytes for one in self._scratch.values()),
        }

    def planned_moments(self, held: int) -> int:
        return held or 2

    def planned_extra_bytes(self) -> float:
        """Return the same once something is compressed, by the formula: errors 4 + 4/N, three messages of 1/8 and a scale."""
        compressing = (slot.unit for slot in self.slots if slot.compresses())
        return sum(e.numel * (4 + 4 / u.ranks + 3 * (1 / 8 + 4 / CHUNK_ELEMS)) for u in compressing for e in u.params)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _note_present(self) -> None:
        """Record which parameters have gradients: the rank's own with one rank, else the reduced ones."""
        for slot in self.slots:
            if self.engine.ranks == 1:
                slot.present = [one is not None for one in slot.gradients()]
            else:
                found = slot.unit.core.grad()
                slot.present = [False] * len(slot.present) if found is None else [bool(b) for b in found[2]]

    def _keep_present(self, flags: Sequence[int]) -> None:
        at = 0
        for slot in self.slots:
            count = len(slot.present)
            slot.present = [bool(flag) for flag in flags[at : at + count]]
            at += count
