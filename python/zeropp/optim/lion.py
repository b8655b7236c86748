# SPDX-License-Identifier: Apache-2.0
"""Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms") as a torch optimizer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zeropp.ops import lion_step_
from zeropp.optim.grouped import GroupedOptimizer, check_rates, moment

__all__ = ["Lion"]


class Lion(GroupedOptimizer):
    """Lion: the step is the sign of an interpolation of gradient and momentum; half of Adam's state.

    ``p = p (1 - lr weight_decay) - lr sign(beta1 m + (1 - beta1) g)``, then ``m = beta2 m + (1 - beta2) g``. A
    parameter group is one call of the C kernel (csrc/ops/optim/lion.h): 20 bytes a parameter in fp32, memory touched once.

    Parameters are fp32 on the CPU; gradients fp32, bf16 or fp16. State: ``exp_avg``, fp32.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        """Make the optimizer; it allocates its state in the first step.

        Args:
            params: parameters, or groups of them, as every torch optimizer takes them.
            lr: learning rate; the paper's advice is 3 to 10 times less than AdamW's.
            betas: share of the momentum in the step, and decay of the momentum; 0 <= beta < 1.
            weight_decay: strength of the decoupled decay; the paper's advice is 3 to 10 times AdamW's.
            maximize: climb instead of descend.

        Raises:
            ValueError: a rate out of range.
        """
        check_rates("Lion", betas, lr=lr, weight_decay=weight_decay)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    def _step_group(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        beta1, beta2 = group["betas"]
        lion_step_(
            params, grads, [self._momentum(param) for param in params], lr=group["lr"], beta1=beta1, beta2=beta2,
            weight_decay=group["weight_decay"], maximize=group["maximize"],
        )  # fmt: skip

    def _momentum(self, param: Tensor) -> Tensor:
        state = self.state[param]
        if "exp_avg" not in state:
            state["exp_avg"] = moment(param)
        momentum: Tensor = state["exp_avg"]
        return momentum
