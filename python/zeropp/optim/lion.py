# SPDX-License-Identifier: Apache-2.0
"""Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms") as a torch optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeropp.ops import lion_step_

__all__ = ["Lion"]


class Lion(Optimizer):
    """Lion: the step is the sign of an interpolation of gradient and momentum; half of Adam's state.

    ``p = p (1 - lr weight_decay) - lr sign(beta1 m + (1 - beta1) g)``, then ``m = beta2 m + (1 - beta2) g``. A
    parameter group is one call of the C kernel (csrc/ops/lion): 20 bytes a parameter in fp32, memory touched once.

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
        if not (lr >= 0.0 and math.isfinite(lr)):
            raise ValueError(f"zeropp.optim.Lion: lr is {lr}, wanted lr >= 0 and finite")
        for name, beta in zip(("betas[0]", "betas[1]"), betas, strict=True):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"zeropp.optim.Lion: {name} is {beta}, wanted 0 <= beta < 1")
        if not (weight_decay >= 0.0 and math.isfinite(weight_decay)):
            raise ValueError(f"zeropp.optim.Lion: weight_decay is {weight_decay}, wanted weight_decay >= 0 and finite")
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; the closure's loss, if there is one.

        Raises:
            ValueError: a parameter is not fp32, not on the CPU or not contiguous, or its gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params: list[Tensor] = [param for param in group["params"] if param.grad is not None]
            grads = [self._gradient(param) for param in params]
            momenta = [self._momentum(param) for param in params]
            beta1, beta2 = group["betas"]
            lion_step_(
                params, grads, momenta, lr=group["lr"], beta1=beta1, beta2=beta2,
                weight_decay=group["weight_decay"], maximize=group["maximize"],
            )  # fmt: skip
        return loss

    @staticmethod
    def _gradient(param: Tensor) -> Tensor:
        grad = param.grad
        assert grad is not None
        if grad.is_sparse:
            raise ValueError("zeropp.optim.Lion: a gradient is sparse, wanted dense; give sparse embeddings SparseAdam")
        return grad.contiguous()  # autograd may leave the layout of an expanded or transposed result

    def _momentum(self, param: Tensor) -> Tensor:
        state = self.state[param]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(param, dtype=torch.float32, memory_format=torch.contiguous_format)
        momentum: Tensor = state["exp_avg"]
        return momentum
