# SPDX-License-Identifier: Apache-2.0
"""LAMB (You et al. 2020, "Large Batch Optimization for Deep Learning") as a torch optimizer."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from zeropp.ops import lamb_step_
from zeropp.optim.grouped import GroupedOptimizer, check_rates, moment

__all__ = ["LAMB"]


class LAMB(GroupedOptimizer):
    """LAMB: AdamW's update, scaled for each tensor to a share of the tensor's own norm; for large batches.

    A parameter group is one call of the C kernel (csrc/ops/lamb), norms included: 40 bytes a parameter in fp32.

    Parameters are whole fp32 tensors on the CPU; gradients fp32, bf16 or fp16. State: ``step``, ``exp_avg`` and
    ``exp_avg_sq``, fp32. After ``zeropp.prepare``, at every stage, slices are stepped and norms summed over ranks.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        trust: tuple[float, float] = (0.0, 10.0),
        maximize: bool = False,
    ) -> None:
        """Make the optimizer; it allocates its state in the first step.

        Args:
            params: parameters, or groups of them, as every torch optimizer takes them.
            lr: learning rate.
            betas: decays of the two moments; 0 <= beta < 1.
            eps: added to the denominator.
            weight_decay: strength of the decay, which is part of the update that is scaled.
            trust: least and greatest ratio of the norms of parameter and update.
            maximize: climb instead of descend.

        Raises:
            ValueError: a rate out of range.
        """
        check_rates("LAMB", betas, lr=lr, eps=eps, weight_decay=weight_decay)
        if not 0.0 <= trust[0] <= trust[1] < math.inf:
            raise ValueError(f"zeropp.optim.LAMB: trust is {trust}, wanted 0 <= least <= greatest, finite")
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "trust": trust, "maximize": maximize,
        }  # fmt: skip
        super().__init__(params, defaults)

    def _step_group(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        states = [self._state(param) for param in params]
        steps = [int(state["step"]) + 1 for state in states]
        beta1, beta2 = group["betas"]
        lamb_step_(
            params, grads, [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states],
            step=steps, lr=group["lr"], beta1=beta1, beta2=beta2, eps=group["eps"],
            weight_decay=group["weight_decay"], trust=group["trust"], maximize=group["maximize"],
        )  # fmt: skip
        for state, step in zip(states, steps, strict=True):
            state["step"] = step

    def _state(self, param: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if "step" not in state:
            state["step"] = 0
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = moment(param)
        return state
