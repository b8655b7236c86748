# SPDX-License-Identifier: Apache-2.0
"""LAMB (You et al. 2020, "Large Batch Optimization for Deep Learning") as a torch optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeropp.ops import lamb_step_

__all__ = ["LAMB"]


class LAMB(Optimizer):
    """LAMB: AdamW's update, scaled for each tensor to a share of the tensor's own norm; for large batches.

    A parameter group is one call of the C kernel (csrc/ops/lamb), norms included: 40 bytes a parameter in fp32.

    Parameters are whole fp32 tensors on the CPU (a shard of one has another norm: ZeRO with LAMB is not yet there);
    gradients fp32, bf16 or fp16. State: ``step``, ``exp_avg`` and ``exp_avg_sq``, fp32.
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
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not (value >= 0.0 and math.isfinite(value)):
                raise ValueError(f"zeropp.optim.LAMB: {name} is {value}, wanted {name} >= 0 and finite")
        for name, beta in zip(("betas[0]", "betas[1]"), betas, strict=True):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"zeropp.optim.LAMB: {name} is {beta}, wanted 0 <= beta < 1")
        if not 0.0 <= trust[0] <= trust[1] < math.inf:
            raise ValueError(f"zeropp.optim.LAMB: trust is {trust}, wanted 0 <= least <= greatest, finite")
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "trust": trust, "maximize": maximize,
        }  # fmt: skip
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
        return loss

    @staticmethod
    def _gradient(param: Tensor) -> Tensor:
        grad = param.grad
        assert grad is not None
        if grad.is_sparse:
            raise ValueError("zeropp.optim.LAMB: a gradient is sparse, wanted dense; give sparse embeddings SparseAdam")
        return grad.contiguous()  # autograd may leave the layout of an expanded or transposed result

    def _state(self, param: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if "step" not in state:
            state["step"] = 0
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.zeros_like(param, dtype=torch.float32, memory_format=torch.contiguous_format)
        return state
