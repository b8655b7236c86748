# SPDX-License-Identifier: Apache-2.0
"""Lion (Chen et al. 2023) and LAMB (You et al. 2020) as torch optimizers, whose kernels update a parameter group in one call."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeropp.ops import lamb_step_, lion_step_

__all__ = ["LAMB", "GroupedOptimizer", "Lion", "check_rates", "moment"]


class GroupedOptimizer(Optimizer):
    """An optimizer whose kernel updates all parameters of a group in one call."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return the closure's loss, if there is one.

        Raises:
            ValueError: a parameter is not fp32, not on the CPU or not contiguous, or its gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params: list[Tensor] = [param for param in group["params"] if param.grad is not None]
            self._step_group(group, params, [self._gradient(param) for param in params])
        return loss

    def _step_group(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        raise NotImplementedError

    def _gradient(self, param: Tensor) -> Tensor:
        grad = param.grad
        assert grad is not None
        if grad.is_sparse:
            name = f"zeropp.optim.{type(self).__name__}"
            raise ValueError(f"{name}: a gradient is sparse, wanted dense; give sparse embeddings SparseAdam")
        return grad.contiguous()  # autograd may leave the layout of an expanded or transposed result


def moment(param: Tensor) -> Tensor:
    """Return a first moment: zeros of the parameter's shape in fp32, contiguous whatever the parameter's layout is."""
    return torch.zeros_like(param, dtype=torch.float32, memory_format=torch.contiguous_format)


def check_rates(optimizer: str, betas: tuple[float, float], **rates: float) -> None:
    """Rates are finite and >= 0, betas in [0, 1).

    Raises:
        ValueError: one that is not.
    """
    for name, value in rates.items():
        if not (value >= 0.0 and math.isfinite(value)):
            raise ValueError(f"zeropp.optim.{optimizer}: {name} is {value}, wanted {name} >= 0 and finite")
    for name, beta in zip(("betas[0]", "betas[1]"), betas, strict=True):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"zeropp.optim.{optimizer}: {name} is {beta}, wanted 0 <= beta < 1")


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


class LAMB(GroupedOptimizer):
    """LAMB: AdamW's update, scaled for each tensor to a share of the tensor's own norm; for large batches.

    A parameter group is one call of the C kernel (csrc/ops/lamb), norms included: 40 bytes a parameter in fp32.

    Parameters are whole fp32 tensors on the CPU; gradients fp32, bf16 or fp16. State: ``step``, ``exp_avg`` and
    ``exp_avg_sq``, fp32. After ``zeropp.prepare``, at every stage, shards are stepped and norms summed over ranks.
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
