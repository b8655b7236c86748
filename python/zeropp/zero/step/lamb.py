# SPDX-License-Identifier: Apache-2.0
"""LAMB (You et al. 2020) on shards, its norms summed over ranks, and 1-bit LAMB (Li et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zeropp.comm.collective import all_gather
from zeropp.ops import lamb_moments_, norm_squares, onebit_lamb_fresh_
from zeropp.zero.step import moments
from zeropp.zero.step.onebit import CollectiveStep, Piece, Slot

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Update:
    """The update of one piece, waiting for its tensor's norms."""

    def __init__(self, slot: Slot, piece: Piece, values: Tensor, row: int) -> None:
        self.slot, self.piece, self.values, self.row = slot, piece, values, row


class Lamb(CollectiveStep):
    """Exact: every tensor's norms are sums over its pieces, in the order of data ranks, at every stage.

    A parameter of experts has one ratio, as in one process: its norms are sums over all ranks' experts.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, engine: Any) -> None:
        super().__init__(optimizer, engine)
        self._first: dict[int, int] = {}  # unit -> row of its first parameter
        rows = 0
        for slot in self.slots:
            self._first[slot.unit.index] = rows
            rows += len(slot.unit.params)
        self._rows = rows

    def wants_local(self) -> bool:
        return False

    def update(self, optimizer: Any, scale: float) -> None:
        self.progress["step"] += 1
        self.lamb_step(scale)

    def trust(self, group: dict[str, Any]) -> tuple[float, float]:
        """Return least and greatest ratio of the norms."""
        least, most = group["trust"]
        return float(least), float(most)

    # -- numbers a tensor ----------------------------------------------------------------------------------------------

    def table(self, columns: int) -> Tensor:
        """Return zeros: [data ranks, tensors, columns], of which this rank fills what it steps (:meth:`place`)."""
        return torch.zeros(self.engine.ranks, self._rows, columns, dtype=torch.float64, device="cpu")

    @staticmethod
    def place(slot: Slot, piece: Piece) -> int:
        """Return the data rank that owns the shard of a piece."""
        return slot.unit.members[piece.shard]

    def gathered(self, table: Tensor) -> Tensor:
        """Return every rank's row; collective where states are sharded, or parameters differ between ranks.

        Rows of ranks that have another tensor in a parameter's place are zeros, unless both are parts of one tensor.
        """
        engine, apart = self.engine, [slot for slot in self.slots if slot.unit.ranks < self.engine.ranks]
        if not engine.local or apart:
            mine = table[engine.rank].contiguous()
            all_gather(engine.comm, table, mine)
        for slot in apart:
            others = [rank for rank in range(engine.ranks) if rank not in slot.unit.members]
            for param, entry in enumerate(slot.unit.params):
                if self.whole_elems(slot, param) == entry.numel:
                    table[others, self.row(slot, param)] = 0
        return table

    @staticmethod
    def whole_elems(slot: Slot, param: int) -> int:
        """Return the elements of the tensor that a parameter is, or that the ranks have parts of."""
        entry = slot.unit.params[param]
        return entry.numel * math.prod(entry.held.whole) // max(1, math.prod(entry.held.shape))

    def row(self, slot: Slot, param: int) -> int:
        return self._first[slot.unit.index] + param

    @staticmethod
    def summed(table: Tensor) -> Tensor:
        """Return the sum over data ranks, in their order."""
        total = table[0].clone()
        for one in table[1:]:
            total += one
        return total

    # -- the exact step ------------------------------------------------------------------------------------------------

    def lamb_step(self, scale: float) -> dict[int, float]:
        """Take a step of LAMB with reduced gradients. Return ``{row: ratio of the norms}`` where neither of them is
        0."""
        stepped: list[tuple[Slot, list[int]]] = []
        updates: list[Update] = []
        table = self.table(2)
        for slot in self.slots:
            if any(slot.present):
                stepped.append((slot, slot.count_step()))
                if slot.unit.state_name == "fp32":
                    self._directions(*stepped[-1], scale, table)
                else:
                    updates += self._quantised_directions(*stepped[-1], scale, table)
        ratios = self._ratios(self.summed(self.gathered(table)).sqrt().tolist())
        for slot, steps in stepped:
            if slot.unit.state_name == "fp32":
                self._move(slot, steps, lambda row: ratios.get(row, 1.0))
        for update in updates:
            lr = float(self.group(update.slot, update.piece.param)["lr"])
            own = update.slot.own(update.slot.unit.own, update.piece)
            own.add_(update.values, alpha=-lr * ratios.get(update.row, 1.0))
        for slot, _ in stepped:
            if slot.unit.state_name != "fp32":
                slot.write_out()
        return ratios

    def _ratios(self, sums: list[list[float]]) -> dict[int, float]:
        """Return the ratios of all stepped tensors, also of those of which this rank has no piece."""
        ratios: dict[int, float] = {}
        for slot in self.slots:
            for param, there in enumerate(slot.present):
                norm, size = sums[self.row(slot, param)]
                if there and 0 < norm < math.inf and 0 < size < math.inf:
                    least, most = self.trust(self.group(slot, param))
                    ratios[self.row(slot, param)] = min(max(norm / size, least), most)
        return ratios

    def _stepped(self, slot: Slot) -> list[Piece]:
        return [piece for piece in slot.pieces if slot.present[piece.param]]

    def _directions(self, slot: Slot, steps: list[int], scale: float, table: Tensor) -> None:
        """Update the moments of one unit; put the squares of its parameters and of their updates into the table."""
        beta1, beta2 = self.betas()
        own = slot.unit.own, self.reduced(slot, scale), slot.state("exp_avg"), slot.state("exp_avg_sq")
        for index, group in enumerate(self._groups):
            pieces = [piece for piece in self._stepped(slot) if slot.unit.groups[piece.param] == index]
            sums = lamb_moments_(
                *([slot.own(values, piece) for piece in pieces] for values in own),
                step=[steps[piece.param] for piece in pieces],
                beta1=beta1,
                beta2=beta2,
                eps=float(group["eps"]),
                weight_decay=float(group["weight_decay"]),
                maximize=bool(group.get("maximize", False)),
            )
            for piece, squares in zip(pieces, sums, strict=True):
                table[self.place(slot, piece), self.row(slot, piece.param)] = squares

    def _move(self, slot: Slot, steps: list[int], ratio: Callable[[int], float]) -> None:
        """``p = p - lr ratio(row) u`` with ``u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p``."""
        pieces, (beta1, _) = self._stepped(slot), self.betas()
        rates: dict[str, list[float]] = {"step_size": [], "variance_step": [], "eps": [], "decay": []}
        for piece in pieces:
            group, step = self.group(slot, piece.param), steps[piece.param]
            rate = float(group["lr"]) * ratio(self.row(slot, piece.param))
            rates["step_size"].append(rate / (self.coefficient(slot, piece.param) * (1 - beta1**step)))
            rates["variance_step"].append(self.learned(step))
            rates["eps"].append(float(group["eps"]))
            rates["decay"].append(rate * float(group["weight_decay"]))
        self.step_frozen(slot, pieces, slot.state("exp_avg"), **rates)

    def coefficient(self, slot: Slot, param: int) -> float:
        """Return the factor of the momentum in ``exp_avg``."""
        return 1.0

    def learned(self, step: int) -> int:
        """Return how often the variance was updated in so many steps of a tensor."""
        return step

    def _quantised_directions(self, slot: Slot, steps: list[int], scale: float, table: Tensor) -> list[Update]:
        """Compute updates from moments in fewer bits. The next unit reuses their scratch memory, so updates are kept until then."""
        beta1, beta2 = self.betas()
        gradient = self.reduced(slot, scale)
        copies = [self._moment(slot, name) for name in _MOMENTS]
        found = []
        for piece in self._stepped(slot):
            group, step = self.group(slot, piece.param), steps[piece.param]
            g = slot.own(gradient, piece)
            if group.get("maximize", False):
                g = -g
            m, v = (slot.own(moment, piece) for moment in copies)
            m.mul_(beta1).add_(g, alpha=1 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            values = m / (1 - beta1**step)
            values.div_((v / (1 - beta2**step)).sqrt_().add_(float(group["eps"])))
            own = slot.own(slot.unit.own, piece)
            if group["weight_decay"]:
                values.add_(own, alpha=float(group["weight_decay"]))
            row = self.row(slot, piece.param)
            sums, _ = norm_squares([own, values])
            table[self.place(slot, piece), row] = sums
            found.append(Update(slot, piece, values, row))
        for name, moment in zip(_MOMENTS, copies, strict=True):
            moments.store_all(slot.unit, name, moment, slot.present)
        return found

    def _moment(self, slot: Slot, name: str) -> Tensor:
        """Return a copy in fp32 of one in fewer bits."""
        moments.make(slot.unit, name)
        copy = self.scratch(slot.unit, name)[: slot.unit.shard.numel()]
        moments.load_all(slot.unit, name, copy)
        return copy


class OneBitLamb(Lamb):
    """LAMB for ``freeze_step`` steps; then variance and ratios are frozen, and the momentum goes at one bit.

    From then on ``exp_avg`` holds each tensor's momentum times its coefficient, which gives all tensors one magnitude
    (``progress["tensors"]`` has the coefficients).
    """

    def begin(self) -> dict[str, Any]:
        return {"step": 0, "tensors": {}}

    def trust(self, group: dict[str, Any]) -> tuple[float, float]:
        return float(group["min_coeff"]), float(group["max_coeff"])

    def wants_local(self) -> bool:
        return int(self.progress["step"]) >= int(self._groups[0]["freeze_step"])

    def numbers(self, slot: Slot, param: int) -> dict[str, float]:
        """Return the numbers of one tensor: ``ratio`` (moving average, ``seen`` times), ``coefficient`` of its momentum, last ``factor``."""
        name = slot.unit.params[param].names[0]
        found: dict[str, float] = self.progress["tensors"].setdefault(
            name, {"ratio": 0.0, "seen": 0, "coefficient": 1.0, "factor": 1.0}
        )
        return found

    def update(self, optimizer: Any, scale: float) -> None:
        compressed = self.wants_local()
        self.progress["step"] += 1
        if compressed:
            self._compressed(scale)
            return
        ratios = self.lamb_step(scale)
        for slot in self.slots:
            for param in range(len(slot.unit.params)):
                ratio = ratios.get(self.row(slot, param))
                if ratio is not None:
                    numbers, beta = self.numbers(slot, param), float(self.group(slot, param)["coeff_beta"])
                    numbers["ratio"] = beta * numbers["ratio"] + (1 - beta) * ratio
                    numbers["seen"] += 1
        if self.wants_local():
            self._freeze()

    def _freeze(self) -> None:
        """Coefficients that give the momentum of all tensors one magnitude; the fresh variance begins as the frozen."""
        table = self.table(1)
        for slot in self.slots:
            for piece in slot.pieces:
                own = slot.own(slot.state("exp_avg"), piece)
                table[self.place(slot, piece), self.row(slot, piece.param), 0] = norm_squares([own])[0][0]
        squares = self.summed(self.gathered(table)).flatten().tolist()
        entries = [(slot, param, entry) for slot in self.slots for param, entry in enumerate(slot.unit.params)]
        sizes = [
            math.sqrt(squares[self.row(slot, param)] / max(1, self.whole_elems(slot, param)))
            for slot, param, _ in entries
        ]
        united = sum(sizes) / len(sizes)
        for (slot, param, _), size in zip(entries, sizes, strict=True):
            self.numbers(slot, param)["coefficient"] = united / size if size > 0 else 1.0
        for slot in self.slots:
            slot.state("exp_avg_sq_fresh").copy_(slot.state("exp_avg_sq"))
            for piece in slot.pieces:
                slot.own(slot.state("exp_avg"), piece).mul_(self.numbers(slot, piece.param)["coefficient"])

    def _compressed(self, scale: float) -> None:
        sums, most = self.table(2), self.table(1)
        stepped: list[tuple[Slot, list[int]]] = []
        for slot in self.slots:
            if any(slot.present):
                before = self._average_momentum(slot, scale)
                stepped.append((slot, slot.count_step()))
                self._fresh(*stepped[-1], before, sums, most)
        table = self.gathered(torch.cat([sums, most], dim=2))
        norms = self.summed(table[:, :, :2]).sqrt().tolist()
        ratios = table[:, :, 2].amax(0).tolist()
        factors = self._factors(norms, ratios)
        held = {
            self.row(slot, param): self._held(slot, param) for slot, steps in stepped for param in range(len(steps))
        }
        for slot, steps in stepped:
            self._move(slot, steps, lambda row: held[row] * factors[row])

    def _held(self, slot: Slot, param: int) -> float:
        """Return the moving average of a tensor's ratio, which the freeze left."""
        numbers = self.numbers(slot, param)
        seen = 1 - float(self.group(slot, param)["coeff_beta"]) ** numbers["seen"]
        return numbers["ratio"] / seen if seen else 1.0

    def coefficient(self, slot: Slot, param: int) -> float:
        return self.numbers(slot, param)["coefficient"]

    def learned(self, step: int) -> int:
        return min(step, int(self._groups[0]["freeze_step"]))

    def _average_momentum(self, slot: Slot, scale: float) -> Tensor:
        """Put the new momentum of this rank's shard in ``exp_avg``; return the one before."""
        beta1, _ = self.betas()
        mine, momentum = self.scratch(slot.unit), slot.state("exp_avg")
        slot.take(mine, scale * (1 - beta1))
        coefficients = [self.numbers(slot, param)["coefficient"] for param in range(len(slot.unit.params))]
        torch._foreach_mul_(slot.spans(mine), coefficients)
        self.add_momentum(slot, mine, beta1)
        before = self.scratch(slot.unit, "before")[: momentum.numel()].copy_(momentum)
        self.average(slot, mine, momentum)
        slot.packed = slot.unit.ranks > 1
        return before

    def _fresh(self, slot: Slot, steps: list[int], before: Tensor, sums: Tensor, most: Tensor) -> None:
        """Update the fresh variance by the momentum's difference; take norms of updates and the largest ratio of
        denominators."""
        pieces = self._stepped(slot)
        groups = [self.group(slot, piece.param) for piece in pieces]
        beta1, beta2 = self.betas()
        own = slot.unit.own, slot.state("exp_avg"), before, slot.state("exp_avg_sq"), slot.state("exp_avg_sq_fresh")
        squares, largest = onebit_lamb_fresh_(
            *([slot.own(values, piece) for piece in pieces] for values in own),
            step=[steps[piece.param] for piece in pieces],
            freeze_step=int(self._groups[0]["freeze_step"]),
            coefficient=[self.coefficient(slot, piece.param) for piece in pieces],
            beta1=beta1,
            beta2=beta2,
            eps=[float(group["eps"]) for group in groups],
            weight_decay=[float(group["weight_decay"]) for group in groups],
        )
        for piece, square, ratio in zip(pieces, squares, largest, strict=True):
            row = self.row(slot, piece.param)
            place = self.place(slot, piece)
            sums[place, row], most[place, row, 0] = square, ratio

    def _factors(self, norms: list[list[float]], ratios: list[float]) -> dict[int, float]:
        """Return the bounded factor of every tensor that is stepped, the same on every rank."""
        factors = {}
        for slot in self.slots:
            for param, there in enumerate(slot.present):
                if not there:
                    continue
                row, group, numbers = self.row(slot, param), self.group(slot, param), self.numbers(slot, param)
                factor, (alone, size) = ratios[row], norms[row]
                if group["weight_decay"] and size > 0:
                    share = min(1.0, alone / size)
                    factor = factor * share + (1 - share)
                factor = min(max(factor, float(group["factor_min"])), float(group["factor_max"]))
                slack, last = float(group["factor_threshold"]), numbers["factor"]
                factor = min(max(factor, last * (1 - slack)), last * (1 + slack))
                factors[row] = numbers["factor"] = factor
        return factors
