# SPDX-License-Identifier: Apache-2.0
"""Muon (Jordan et al. 2024) on shards: whole matrices are orthogonalised by one rank each, in turn.

Momentum is element by element, so it stays in shards. What is to be orthogonalised is gathered unit by unit in bf16,
which is what the iteration computes in; each rank takes its share of the unit's matrices, the largest first; and the
results go back to shards, in bf16 again: 4 bytes a parameter on the wire, times (N - 1) / N, beside ZeRO's own.

A parameter of three dimensions is a stack of matrices, as experts have: each is orthogonalised by itself. Experts that ranks share out
are orthogonalised by the N ranks that hold the same ones.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import _muon as torch_muon

from zeropp.comm.collective import all_gather
from zeropp.comm.group import OP_CODES, dtype_code
from zeropp.errors import ConfigError
from zeropp.ops import adam_step_
from zeropp.zero.step.onebit import CollectiveStep, Slot


class Muon(CollectiveStep):
    """torch.optim.Muon's arithmetic; groups with ``use_muon=False`` are AdamW's.

    ``exp_avg`` is Muon's momentum or AdamW's first moment, so no element has both.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, engine: Any) -> None:
        super().__init__(optimizer, engine)
        self._owners: dict[tuple[int, int], list[int]] = {}
        """By unit and parameter: of each matrix, the rank of the unit's that orthogonalises it."""
        load = [0] * engine.ranks
        params = [(slot, i) for slot in self.slots for i in range(len(slot.unit.params)) if self.orthogonal(slot, i)]
        for slot, index in sorted(params, key=lambda one: (one[0].unit.index, -one[0].unit.params[one[1]].numel)):
            self._owners[slot.unit.index, index] = self._share_out(slot, index, load)

    @staticmethod
    def _share_out(slot: Slot, param: int, load: list[int]) -> list[int]:
        """Return who orthogonalises each matrix of a parameter: of the unit's ranks the one with the least to do.

        Args:
            load: by data rank, what it has to do; grows. Where ranks have other matrices in this parameter's place, theirs are shared out
                in the same way, so all data ranks find the same loads.
        """
        unit = slot.unit
        parts = len(load) // unit.ranks
        loads = [sum(load[one * parts : (one + 1) * parts]) for one in range(unit.ranks)]
        *stack, rows, columns = unit.params[param].shape
        owners, work = [], rows * columns * min(rows, columns)
        for _ in range(math.prod(stack)):
            owner = loads.index(min(loads))
            loads[owner] += work * parts
            for rank in range(owner * parts, (owner + 1) * parts):
                load[rank] += work
            owners.append(owner)
        return owners

    def wants_local(self) -> bool:
        return False

    def check_group(self, group: dict[str, Any]) -> None:
        shapes = [tuple(p.shape) for p in group["params"] if p.ndim not in (2, 3) or p.is_complex()]
        if group.get("use_muon", True) and shapes:
            raise ConfigError(
                f"optimizer.add_param_group: a parameter of shape {shapes[0]} for Muon, wanted real matrices, or stacks of them; put the others "
                "in a group with use_muon=False of zeropp.optim.Muon"
            )

    def orthogonal(self, slot: Slot, param: int) -> bool:
        """True if Muon steps this parameter, not AdamW."""
        return slot.unit.groups[param] >= 0 and bool(self.group(slot, param).get("use_muon", True))

    def update(self, optimizer: Any, scale: float) -> None:
        self.progress["step"] += 1
        for slot in self.slots:
            if any(slot.present):
                gradient, steps = self.reduced(slot, scale), slot.count_step()
                self._adam(slot, gradient, steps)
                if any(there and self.orthogonal(slot, i) for i, there in enumerate(slot.present)):
                    self._muon(slot, gradient)
                slot.write_out()

    def _adam(self, slot: Slot, gradient: Tensor, steps: list[int]) -> None:
        for index, group in enumerate(self._groups):
            own = [
                piece for piece in slot.pieces
                if slot.present[piece.param] and slot.unit.groups[piece.param] == index
                and not self.orthogonal(slot, piece.param)
            ]  # fmt: skip
            if own:
                beta1, beta2 = group["betas"]
                values = (slot.unit.own, gradient, slot.state("exp_avg"), slot.state("exp_avg_sq"))
                adam_step_(
                    *([slot.own(one, piece) for piece in own] for one in values),
                    step=[steps[piece.param] for piece in own], lr=float(group["lr"]), beta1=beta1, beta2=beta2,
                    eps=group["adam_eps"], weight_decay=float(group["weight_decay"]),
                )  # fmt: skip

    def _muon(self, slot: Slot, gradient: Tensor) -> None:
        mine = torch.zeros(slot.unit.shard.numel(), dtype=torch.bfloat16, device=slot.unit.device)
        own = [piece for piece in slot.pieces if slot.present[piece.param] and self.orthogonal(slot, piece.param)]
        for piece in own:
            group = self.group(slot, piece.param)
            g, momentum = slot.own(gradient, piece), slot.own(slot.state("exp_avg"), piece)
            momentum.lerp_(g, 1 - float(group["momentum"]))
            ahead = g.lerp(momentum, float(group["momentum"])) if group["nesterov"] else momentum
            slot.own(mine, piece).copy_(ahead)
        made = self._orthogonalised(slot, mine)
        for piece in own:
            group, shape = self.group(slot, piece.param), slot.unit.params[piece.param].shape[-2:]
            lr, values = float(group["lr"]), slot.own(slot.unit.own, piece)
            values.mul_(1 - lr * float(group["weight_decay"]))
            values.add_(slot.own(made, piece), alpha=-torch_muon._adjust_lr(lr, group["adjust_lr_fn"], shape))

    def _orthogonalised(self, slot: Slot, mine: Tensor) -> Tensor:
        """Collective: of this rank's part of all matrices of the unit, its part of the results."""
        engine, unit = self.engine, slot.unit
        whole = mine
        if not engine.local:
            whole = torch.empty(unit.elems, dtype=torch.bfloat16, device=mine.device)
            all_gather(unit.comm, whole, mine)
        made = torch.zeros_like(whole)
        for index, entry in enumerate(unit.params):
            if slot.present[index] and self.orthogonal(slot, index):
                span = slice(entry.offset_elems, entry.offset_elems + entry.numel)
                self._orthogonalise(slot, index, whole[span], made[span])
        if unit.ranks == 1:
            return made
        code, add = dtype_code(torch.bfloat16), OP_CODES["sum"]  # every element has one owner, so sums are exact
        parts = made.cpu()  # the same tensors, if they are there
        if engine.local:
            unit.comm.all_reduce(parts.data_ptr(), parts.numel(), code, add)
            return parts.to(mine.device)
        own = mine.cpu()
        unit.comm.reduce_scatter(own.data_ptr(), parts.data_ptr(), own.numel(), code, add)
        return own.to(mine.device)

    def _orthogonalise(self, slot: Slot, param: int, values: Tensor, made: Tensor) -> None:
        """Put the results of those matrices of one parameter in ``made`` that this rank does."""
        group, shape = self.group(slot, param), slot.unit.params[param].shape
        owners = self._owners[slot.unit.index, param]
        stacks = (one.view(len(owners), *shape[-2:]) for one in (values, made))
        for owner, matrix, result in zip(owners, *stacks, strict=True):
            if owner == slot.unit.rank:
                result.copy_(
                    torch_muon._zeropower_via_newtonschulz(
                        matrix, tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"]
                    )
                )
