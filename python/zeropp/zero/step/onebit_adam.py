# SPDX-License-Identifier: Apache-2.0
"""1-bit Adam (Tang et al. 2021) and 0/1 Adam (Lu et al. 2022) on shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zeropp.errors import ConfigError
from zeropp.ops import zero_one_adam_step_
from zeropp.zero.step.onebit import CollectiveStep, Slot


class Adam(CollectiveStep):
    """The base of both: Adam's step with a given momentum and variance."""

    def variance_steps(self) -> int:
        """Return how often the variance was updated."""
        raise NotImplementedError

    def rates(self, slot: Slot, steps: list[int]) -> Any:
        """Return the key for :meth:`Slot.runs`: what the step of one parameter depends on."""

        def key(param: int) -> tuple[float, float, float, int]:
            group = self.group(slot, param)
            return float(group["lr"]), float(group["eps"]), float(group["weight_decay"]), steps[param]

        return key

    def of_variance(self, rates: list[tuple[float, float, float, int]]) -> dict[str, Any]:
        """Arguments of the kernels, from what :meth:`rates` said of each piece."""
        return {
            "variance_step": [min(step, self.variance_steps()) for _, _, _, step in rates],
            "eps": [eps for _, eps, _, _ in rates],
            "decay": [lr * decay for lr, _, decay, _ in rates],
        }

    def step_shards(self, slot: Slot, steps: list[int]) -> None:
        """``p = p (1 - lr weight_decay) - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)``."""
        beta1, _ = self.betas()
        sizes = [float(self.group(slot, param)["lr"]) / (1 - beta1 ** max(step, 1)) for param, step in enumerate(steps)]
        self.walk(slot, steps, slot.state("exp_avg"), sizes)

    def walk(self, slot: Slot, steps: list[int], along: Tensor, sizes: list[float], *, decays: bool = True) -> None:
        """``values = values (1 - lr weight_decay) - size along / (sqrt(v / (1 - beta2^t)) + eps)``, then out.

        Where nothing was ever seen, ``v = 0``, there is no movement.
        """
        rates = self.rates(slot, steps)
        found = list(slot.runs(lambda param: (*rates(param), sizes[param])))
        how = self.of_variance([key[:4] for key, _ in found])
        if not decays:
            how["decay"] = [0.0] * len(found)
        self.step_frozen(slot, [run for _, run in found], along, step_size=[size for (*_, size), _ in found], **how)


class OneBitAdam(Adam):
    """AdamW for ``freeze_step`` steps, bit for bit; then the variance is frozen, and the momentum goes at one bit."""

    def freeze_step(self) -> int:
        return int(self._groups[0]["freeze_step"])

    def wants_local(self) -> bool:
        return int(self.progress["step"]) >= self.freeze_step()

    def variance_steps(self) -> int:
        return min(int(self.progress["step"]), self.freeze_step())

    def update(self, optimizer: Any, scale: float) -> None:
        compressed = self.wants_local()
        self.progress["step"] += 1
        if not compressed:
            self._kernel.step(optimizer, scale, [])
            return
        beta1, _ = self.betas()
        for slot in self.slots:
            if not any(slot.present):
                continue
            mine = self.scratch(slot.unit)
            slot.take(mine, scale * (1 - beta1))
            self.add_momentum(slot, mine, beta1)
            self.average(slot, mine, slot.state("exp_avg"))
            slot.packed = slot.unit.ranks > 1
            self.step_shards(slot, slot.count_step())


class ZeroOneAdam(Adam):
    """Adaptive variance freezing, then local steps: two schedules in one counter (docs/design/0013)."""

    def begin(self) -> dict[str, Any]:
        return {
            "step": 0, "variance_steps": 0, "variance_interval": 1, "variance_counter": 0, "local_interval": 1,
            "local_counter": 0, "since": 0, "rate": 0.0,
        }  # fmt: skip

    def option(self, name: str) -> int:
        return int(self._groups[0][name])

    def variance_steps(self) -> int:
        return int(self.progress["variance_steps"])

    def frozen(self) -> bool:
        return int(self.progress["step"]) >= self.option("var_freeze_step")

    def learns_variance(self) -> bool:
        """True if the next step learns the variance."""
        return not self.frozen() and (self.progress["step"] + 1) % self.progress["variance_interval"] == 0

    def wants_local(self) -> bool:
        return not self.learns_variance()

    def update(self, optimizer: Any, scale: float) -> None:
        progress = self.progress
        if self.frozen():
            self._local(scale)
            progress["step"] += 1
            progress["local_counter"] += 1
            if progress["local_counter"] == self.option("local_step_scaler"):
                progress["local_counter"] = 0
                progress["local_interval"] = min(self.option("local_step_clipper"), 2 * progress["local_interval"])
            return
        if not self.learns_variance():
            self._one_bit_gradient(scale)
            progress["step"] += 1
        else:
            self._learn(optimizer, scale)
            progress["step"] += 1
            progress["variance_counter"] += 1
            if progress["variance_counter"] == self.option("var_update_scaler"):
                progress["variance_counter"] = 0
                progress["variance_interval"] *= 2
        if self.frozen():  # what was owed was a gradient's, and from now on it is a movement's
            for slot in self.slots:
                slot.forget()

    # -- while the variance is learned ---------------------------------------------------------------------------------

    def _learn(self, optimizer: Any, scale: float) -> None:
        """Step as AdamW does, with reduced gradients; as long as every step was one of AdamW, by its kernel."""
        self.progress["variance_steps"] += 1
        if self.progress["variance_steps"] == self.progress["step"] + 1:
            self._kernel.step(optimizer, scale, [])
            return
        beta1, beta2 = self.betas()
        for slot in self.slots:
            if not any(slot.present):
                continue
            gradient = self.reduced(slot, scale)
            moments = slot.state("exp_avg"), slot.state("exp_avg_sq")
            for _, run in slot.runs(lambda param: None):
                g = slot.own(gradient, run)
                slot.own(moments[0], run).lerp_(g, 1 - beta1)
                slot.own(moments[1], run).mul_(beta2).addcmul_(g, g, value=1 - beta2)
            self.step_shards(slot, slot.count_step())

    def _one_bit_gradient(self, scale: float) -> None:
        beta1, beta2 = self.betas()
        for slot in self.slots:
            if not any(slot.present):
                continue
            mine = self.scratch(slot.unit)
            slot.take(mine, scale)
            mean = self.scratch(slot.unit, "mean")[: slot.unit.shard.numel()]
            self.average(slot, mine, mean, gather=False)
            unit, found = slot.unit, list(slot.runs(self.rates(slot, slot.count_step())))
            own = unit.own, mean, slot.state("exp_avg"), slot.state("exp_avg_sq")
            zero_one_adam_step_(
                *([slot.own(values, run) for _, run in found] for values in own),
                step_size=[lr / (1 - beta1**step) for (lr, _, _, step), _ in found],
                beta1=beta1,
                beta2=beta2,
                param_outs=slot.outs([run for _, run in found]),
                **self.of_variance([key for key, _ in found]),
            )

    # -- while the variance is frozen ----------------------------------------------------------------------------------

    def _rate(self) -> float:
        """Return the learning rate of all groups, which has to be equal, because movements of a whole unit are added
        up."""
        first = float(self._groups[0]["lr"])
        for index, group in enumerate(self._groups):
            if float(group["lr"]) != first:
                raise ConfigError(
                    f"optimizer.step: lr of parameter group {index} is {float(group['lr'])}, that of group 0 {first}; "
                    "ZeroOneAdam wants the same in every group once its variance is frozen"
                )
        return first

    def _local(self, scale: float) -> None:
        """Step with this rank's own momentum; where it is due, average over the ranks what was moved."""
        progress, lr = self.progress, self._rate()
        if lr == 0:
            return
        beta1, _ = self.betas()
        due = (progress["step"] + 1) % progress["local_interval"] == 0 or self.engine.ranks == 1
        rate = lr / (1 - beta1 ** (progress["step"] + 1))
        total = progress["rate"] + rate
        for slot in self.slots:
            if any(slot.present):
                self._move(slot, scale, beta1, rate, due, total)
        progress["rate"] = 0.0 if due else total
        progress["since"] = 0 if due else progress["since"] + 1

    def _move(self, slot: Slot, scale: float, beta1: float, rate: float, due: bool, total: float) -> None:
        momentum = slot.state("exp_avg")
        alone = not self.progress["since"] and due  # a synchronisation every step: nothing is local
        if alone:
            moved = self.scratch(slot.unit)
            slot.take(moved, scale * (1 - beta1))
            self.add_momentum(slot, moved, beta1)
            moved.mul_(rate)
            steps = slot.count_step()
        else:
            steps = slot.count_step()
            moved = self._step_locally(slot, steps, scale, rate)
            slot.packed = False
        if not due:
            return
        here, shares = slot.present, [1.0] * len(steps)
        if not alone:  # what was stepped since the ranks last agreed moves by that, with a gradient now or without
            shares = (slot.extra["stepped"] / total).tolist()
            slot.present = [share > 0 for share in shares]
            slot.unit.own.copy_(slot.extra["anchor"])
            slot.write_out()
        self.average(slot, moved, momentum)
        slot.packed = slot.unit.ranks > 1
        self.walk(slot, steps, momentum, shares, decays=alone)  # an anchor decayed with every step
        slot.present = here
        momentum.mul_(1 / total)
        if slot.packed:
            slot.reducer.scale_(1 / total)
        slot.extra.clear()

    def _step_locally(self, slot: Slot, steps: list[int], scale: float, rate: float) -> Tensor:
        """Step along this rank's own momentum. Return what was moved since the ranks had equal parameters."""
        assert self.engine.local, "local steps are for stage 0"
        unit, momentum, variance = slot.unit, slot.state("exp_avg"), slot.state("exp_avg_sq")
        self._begin_locally(slot)
        slot.extra["stepped"] += rate * torch.tensor(slot.present, dtype=torch.float64, device="cpu")
        whole = {
            "params": unit.own, "exp_avgs": momentum, "exp_avg_sqs": variance, "moved": slot.extra["moved"],
            "anchors": slot.extra["anchor"], **({} if unit.master is None else {"param_outs": unit.shard}),
        }  # fmt: skip
        spans = {name: slot.spans(values) for name, values in whole.items()}
        here = [param for param, there in enumerate(slot.present) if there]
        lists: dict[str, Any] = {name: [of[param] for param in here] for name, of in spans.items()}
        rates, gradients, (beta1, beta2) = self.rates(slot, steps), slot.gradients(), self.betas()
        zero_one_adam_step_(
            **lists,
            grads=[torch.zeros_like(spans["moved"][p]) if (one := gradients[p]) is None else one for p in here],
            step_size=rate,
            beta1=beta1,
            beta2=beta2,
            grad_scale=scale * slot.share,
            **self.of_variance([rates(param) for param in here]),
        )
        for param, there in enumerate(slot.present):
            if not there:  # its momentum stands as it is, and goes on as such when the ranks agree
                spans["moved"][param].add_(spans["exp_avgs"][param], alpha=rate)
        return slot.extra["moved"]

    @staticmethod
    def _begin_locally(slot: Slot) -> None:
        if "moved" not in slot.extra:
            slot.extra |= {
                "moved": torch.zeros(slot.unit.elems, device=slot.unit.device),
                "anchor": slot.unit.own.clone(),
            }
            # The sum of the rates of each parameter's steps.
            slot.extra["stepped"] = torch.zeros(len(slot.unit.params), dtype=torch.float64, device="cpu")

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def private(self) -> dict[str, Tensor]:
        """Between synchronisations the parameters and the momentum are this rank's own, too."""
        found = super().private()
        if self.progress["since"]:
            for slot in self.slots:
                found[f"{slot.unit.index}.values"] = slot.unit.own
                found[f"{slot.unit.index}.exp_avg"] = slot.state("exp_avg")
        return found

    def restore(self, private: dict[str, Tensor] | None) -> None:
        if self.engine.stage > 0 and self.option("local_step_clipper") > 1:
            raise ConfigError(
                f"load: the checkpoint's ZeroOneAdam has local_step_clipper={self.option('local_step_clipper')}, which "
                f"stage {self.engine.stage} cannot; load it at stage 0"
            )
        private = self.fitting(private)
        super().restore(private)
        for slot in self.slots:
            for name, to in (("values", slot.unit.own), ("exp_avg", slot.state("exp_avg"))):
                if name in slot.extra:
                    to.copy_(slot.extra.pop(name))
            slot.write_out()
        if private is None:  # what rank 0 had is where all go on
            self.progress.update(since=0, rate=0.0)
