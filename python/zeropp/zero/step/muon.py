# SPDX-License-Identifier: Apache-2.0
"""Muon (Jordan et al. 2024) on shards: whole matrices are orthogonalised by one rank each, in turn.

Momentum is element by element, so it stays in shards. What is to be orthogonalised is gathered unit by unit in bf16,
which is what the iteration computes in; each rank takes its share of the unit's matrices, the largest first; and the
results go back to shards, in bf16 again: 4 bytes a parameter on the wire, times (N - 1) / N, beside ZeRO's own.
"""

from __future__ import annotations

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
        self._owner: dict[tuple[int, int], int] = {}
        load = [0] * engine.ranks
        matrices = [(slot, i) for slot in self.slots for i in range(len(slot.unit.params)) if self.orthogonal(slot, i)]
        for slot, index in sorted(matrices, key=lambda one: (one[0].unit.index, -one[0].unit.params[one[1]].numel)):
            rank = load.index(min(load))
            rows, columns = slot.unit.params[index].shape
            load[rank] += rows * columns * min(rows, columns)
            self._owner[slot.unit.index, index] = rank

    def wants_local(self) -> bool:
        return False

    def check_group(self, group: dict[str, Any]) -> None:
        shapes = [tuple(p.shape) for p in group["params"] if p.ndim != 2 or p.is_complex()]
        if group.get("use_muon", True) and shapes:
            raise ConfigError(
                f"optimizer.add_param_group: a parameter of shape {shapes[0]} for Muon, wanted real matrices; put the others in a group "
                "with use_muon=False of zeropp.optim.Muon"
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
            group, shape = self.group(slot, piece.param), slot.unit.params[piece.param].shape
            lr, values = float(group["lr"]), slot.own(slot.unit.own, piece)
            values.mul_(1 - lr * float(group["weight_decay"]))
            values.add_(slot.own(made, piece), alpha=-torch_muon._adjust_lr(lr, group["adjust_lr_fn"], shape))

    def _orthogonalised(self, slot: Slot, mine: Tensor) -> Tensor:
        """Collective: of this rank's part of all matrices of the unit, its part of the results."""
        engine, unit = self.engine, slot.unit
        whole = mine
        if not engine.local:
            whole = torch.empty(unit.elems, dtype=torch.bfloat16, device=mine.device)
            all_gather(engine.comm, whole, mine)
        made = torch.zeros_like(whole)
        for index, entry in enumerate(unit.params):
            if not slot.present[index] or self._owner.get((unit.index, index)) != engine.rank:
                continue
            group, span = self.group(slot, index), slice(entry.offset_elems, entry.offset_elems + entry.numel)
            made[span].view(entry.shape).copy_(
                torch_muon._zeropower_via_newtonschulz(
                    whole[span].view(entry.shape), tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"]
                )
            )
        if engine.ranks == 1:
            return made
        code, add = dtype_code(torch.bfloat16), OP_CODES["sum"]  # every element has one owner, so sums are exact
        parts = made.cpu()  # the same tensors, if they are there
        if engine.local:
            engine.comm.all_reduce(parts.data_ptr(), parts.numel(), code, add)
            return parts.to(mine.device)
        own = mine.cpu()
        engine.comm.reduce_scatter(own.data_ptr(), parts.data_ptr(), own.numel(), code, add)
        return own.to(mine.device)
