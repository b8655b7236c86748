# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the optimizers of this folder: closures, checked rates, and one kernel call for a parameter group."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class GroupedOptimizer(Optimizer):
    """An optimizer whose kernel updates all parameters of a group in one call."""

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
    """A first moment: zeros of the parameter's shape in fp32, contiguous whatever the parameter's layout is."""
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
