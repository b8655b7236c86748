# SPDX-License-Identifier: Apache-2.0
"""Muon (Jordan et al. 2024) with AdamW for what is no matrix, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from zeropp.errors import Error
from zeropp.optim.grouped import check_rates

__all__ = ["Muon"]


class Muon(Optimizer):
    """Momentum, orthogonalised: ``torch.optim.Muon`` for matrices, AdamW for groups with ``use_muon=False``.

    A parameter of three dimensions is a stack of matrices, as mixture-of-experts models have them, ``(E, out, in)``: each expert is
    orthogonalised by itself. Convolutions are no such stacks, and better with AdamW.

    Works inside ``zeropp.prepare``, at every stage: each rank orthogonalises its share of the matrices. Embeddings and
    heads are matrices, too, but better with AdamW; so are vectors, which Muon refuses::

        hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
        others = [p for p in model.parameters() if all(p is not one for one in hidden)]
        zeropp.optim.Muon([{"params": hidden}, {"params": others, "use_muon": False, "lr": 3e-4}], lr=2e-2)
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        use_muon: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        adam_eps: float = 1e-8,
    ) -> None:
        """Make the optimizer. Every argument may be given for a group.

        Args:
            params: groups of parameters; matrices or stacks of them where ``use_muon`` holds.
            lr, weight_decay: of both kinds; the decay is decoupled.
            momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as ``torch.optim.Muon`` takes them.
            use_muon: False: AdamW, with ``betas`` and ``adam_eps``.

        Raises:
            ValueError: a number out of range, or a parameter of Muon's that is no matrix.
        """
        check_rates("Muon", betas, lr=lr, weight_decay=weight_decay, momentum=momentum, eps=eps, adam_eps=adam_eps)
        if isinstance(ns_steps, bool) or not isinstance(ns_steps, int) or not 0 < ns_steps < 100:
            raise ValueError(f"zeropp.optim.Muon: ns_steps is {ns_steps!r}, wanted a whole number from 1 to 99")
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise ValueError(
                f"zeropp.optim.Muon: adjust_lr_fn is {adjust_lr_fn!r}, wanted None, 'original' or 'match_rms_adamw'"
            )
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn,
            "use_muon": use_muon, "betas": betas, "adam_eps": adam_eps,
        }  # fmt: skip
        super().__init__(params, defaults)
        for index, group in enumerate(self.param_groups):
            for param in group["params"]:
                if group["use_muon"] and (param.ndim not in (2, 3) or param.is_complex()):
                    raise ValueError(
                        f"zeropp.optim.Muon: group {index} has a parameter of shape {tuple(param.shape)} and {param.dtype}, wanted real matrices, or "
                        "stacks of them; put the others in a group with use_muon=False"
                    )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        raise Error(
            "zeropp.optim.Muon.step: it works inside zeropp.prepare only: model, optimizer = zeropp.prepare(model, "
            "optimizer); torch.optim.Muon is its like without"
        )
