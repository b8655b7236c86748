# SPDX-License-Identifier: Apache-2.0
"""1-bit Adam, 0/1 Adam and 1-bit LAMB: optimizers that send one bit a parameter where others send a gradient.

They live inside ``zeropp.prepare``, which gives them the local gradients; what they compute stands in
zeropp/zero/step/onebit_adam.py and zeropp/zero/step/lamb.py, how they share out states in docs/design/0013.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from zeropp.errors import Error
from zeropp.optim.grouped import check_rates

__all__ = ["OneBitAdam", "OneBitLamb", "ZeroOneAdam"]


class _OneBit(Optimizer):
    """Their constructors, and a step that says where they work."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        name = type(self).__name__
        raise Error(
            f"zeropp.optim.{name}.step: it sends local gradients itself, so it works inside zeropp.prepare only: model, "
            f"optimizer = zeropp.prepare(model, optimizer, zeropp.Config(stage=2))"
        )


def _check_counts(optimizer: str, least: int, **counts: int) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"zeropp.optim.{optimizer}: {name} is {value!r}, wanted a whole number >= {least}")


class OneBitAdam(_OneBit):
    """1-bit Adam (Tang et al. 2021): AdamW, then a frozen variance and a momentum that is averaged at one bit.

    The first ``freeze_step`` steps are AdamW's, bit for bit. From then on every rank updates the momentum with its own
    gradient, and the mean over ranks of these momenta travels at one bit an element, errors fed back on both sides:
    1/32 of fp32's bytes. Stages 0, 1 and 2; stages 1 and 2 still gather the parameters that they step.

    The weight decay is AdamW's. The paper's advice for ``freeze_step``: 15 to 20% of all steps, and past the learning
    rate's warm-up.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int = 100_000,
    ) -> None:
        """Make the optimizer.

        Args:
            params: parameters, or groups of them, as every torch optimizer takes them.
            lr: learning rate.
            betas: decays of the two moments; 0 <= beta < 1, the same in every group.
            eps: added to the denominator.
            weight_decay: strength of the decoupled decay.
            freeze_step: steps of the warm-up, at least 1.

        Raises:
            ValueError: a number out of range.
        """
        check_rates("OneBitAdam", betas, lr=lr, eps=eps, weight_decay=weight_decay)
        _check_counts("OneBitAdam", 1, freeze_step=freeze_step)
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "freeze_step": freeze_step,
            "decoupled_weight_decay": True,
        }  # fmt: skip
        super().__init__(params, defaults)


class ZeroOneAdam(_OneBit):
    """0/1 Adam (Lu et al. 2022): the variance is learned ever more rarely, then ranks agree ever more rarely.

    While the variance is learned, a step with a reduced gradient comes every so often, at a distance that doubles after
    every ``var_update_scaler`` of them; the steps between send their gradient at one bit. After ``var_freeze_step``
    steps the variance is frozen, and ranks agree at one bit on what they moved: at first every step, then at a distance
    that doubles every ``local_step_scaler`` steps, up to ``local_step_clipper``. In between they send nothing.

    Stages 0, 1 and 2; local steps at stage 0 only, so stages 1 and 2 want ``local_step_clipper=1``. A step at ``lr``
    0 with frozen variance moves nothing and leaves the momentum as it is.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        var_freeze_step: int = 100_000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32_678,
        local_step_clipper: int = 16,
    ) -> None:
        """Make the optimizer.

        Args:
            params, lr, betas, eps, weight_decay: as for :class:`OneBitAdam`.
            var_freeze_step: steps until the variance is frozen.
            var_update_scaler: updates of the variance until their distance doubles.
            local_step_scaler: steps until the distance of synchronisations doubles.
            local_step_clipper: greatest distance of synchronisations; 1: every step.

        Raises:
            ValueError: a number out of range.
        """
        check_rates("ZeroOneAdam", betas, lr=lr, eps=eps, weight_decay=weight_decay)
        counts = {
            "var_freeze_step": var_freeze_step, "var_update_scaler": var_update_scaler,
            "local_step_scaler": local_step_scaler, "local_step_clipper": local_step_clipper,
        }  # fmt: skip
        _check_counts("ZeroOneAdam", 1, **counts)
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "decoupled_weight_decay": True, **counts,
        }  # fmt: skip
        super().__init__(params, defaults)


class OneBitLamb(_OneBit):
    """1-bit LAMB (Li et al. 2021): LAMB, then frozen ratios times a bounded factor, and a momentum at one bit.

    The first ``freeze_step`` steps are LAMB's, norms summed over ranks. Then variance and the moving average of each
    tensor's ratio are frozen; the ratio is multiplied by a factor from a fresh estimate of the variance, within bounds.
    Stages 0, 1 and 2.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int = 100_000,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
    ) -> None:
        """Make the optimizer.

        Args:
            params, lr, betas, eps: as for :class:`OneBitAdam`.
            weight_decay: strength of the decay, which is part of the update that is scaled.
            freeze_step: steps of the warm-up, at least 1.
            max_coeff, min_coeff: greatest and least ratio of the norms of parameter and update.
            coeff_beta: decay of the moving average of the ratio.
            factor_max, factor_min: bounds of the factor after the warm-up.
            factor_threshold: share by which the factor may change from one step to the next.

        Raises:
            ValueError: a number out of range.
        """
        name = "zeropp.optim.OneBitLamb"
        check_rates("OneBitLamb", betas, lr=lr, eps=eps, weight_decay=weight_decay)
        _check_counts("OneBitLamb", 1, freeze_step=freeze_step)
        for low_name, low, high_name, high in (
            ("min_coeff", min_coeff, "max_coeff", max_coeff), ("factor_min", factor_min, "factor_max", factor_max),
        ):  # fmt: skip
            if not 0.0 <= low <= high < math.inf:
                raise ValueError(
                    f"{name}: {low_name} is {low}, {high_name} {high}, wanted 0 <= least <= greatest, finite"
                )
        if not 0.0 <= coeff_beta < 1.0:
            raise ValueError(f"{name}: coeff_beta is {coeff_beta}, wanted 0 <= coeff_beta < 1")
        if not 0.0 <= factor_threshold <= 1.0:
            raise ValueError(f"{name}: factor_threshold is {factor_threshold}, wanted 0 <= factor_threshold <= 1")
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "freeze_step": freeze_step,
            "max_coeff": max_coeff, "min_coeff": min_coeff, "coeff_beta": coeff_beta, "factor_max": factor_max,
            "factor_min": factor_min, "factor_threshold": factor_threshold,
        }  # fmt: skip
        super().__init__(params, defaults)
