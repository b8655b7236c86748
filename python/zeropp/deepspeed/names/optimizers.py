# SPDX-License-Identifier: Apache-2.0
"""``deepspeed.ops.adam`` and its relatives: torch's and zeropp's optimizers under DeepSpeed's names and with its arguments. They are
classes, to be derived from and asked for; ``initialize`` gives each of them zeropp's kernel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from zeropp import optim
from zeropp.deepspeed.names.later import not_built

Betas = tuple[float, float]


def _only(name: str, **said: tuple[Any, Any, str]) -> None:
    """Arguments without a counterpart: (given, what they may be, the way out)."""
    for key, (value, wanted, way) in said.items():
        if value != wanted:
            raise not_built(f"{name}({key}={value!r})", way)


class _Adam(torch.optim.AdamW):
    """torch's AdamW, or its Adam where ``adam_w_mode`` is false."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
    ) -> None:
        _only(type(self).__name__, bias_correction=(bias_correction, True, "leave it at True"))
        super().__init__(params, lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)  # type: ignore[arg-type]
        for group in (self.defaults, *self.param_groups):  # torch's two differ in this alone
            group["decoupled_weight_decay"] = bool(adam_w_mode)


class FusedAdam(_Adam):
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant; torch.optim.AdamW(amsgrad=True) does")
        super().__init__(params, lr, bias_correction, betas, eps, weight_decay, False, adam_w_mode)


class DeepSpeedCPUAdam(_Adam):
    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        way = 'leave it at True, and give "bf16": {"bf16_optimizer_states": true} in the file'
        _only("DeepSpeedCPUAdam", fp32_optimizer_states=(fp32_optimizer_states, True, way))
        super().__init__(model_params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adamw_mode)


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _only(
            "DeepSpeedCPUAdagrad", amsgrad=(amsgrad, False, "leave it out"),
            fp32_optimizer_states=(fp32_optimizer_states, True, "leave it at True"),
        )  # fmt: skip
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


class FusedLion(optim.Lion):
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)


class DeepSpeedCPULion(optim.Lion):
    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _only("DeepSpeedCPULion", fp32_optimizer_states=(fp32_optimizer_states, True, "leave it at True"))
        super().__init__(model_params, lr=lr, betas=betas, weight_decay=weight_decay)


def _common(name: str, more: dict[str, Any]) -> None:
    """Check the further arguments of LAMB and the one-bit optimizers; DeepSpeed's transport has no effect."""
    usual = {"bias_correction": True, "eps_inside_sqrt": False, "max_grad_norm": 0.0, "amsgrad": False}
    for key in [key for key in more if key in usual]:
        _only(name, **{key: (more.pop(key), usual[key], "leave it out; gradient_clipping in the file clips")})
    more.pop("cuda_aware", None)
    more.pop("comm_backend_name", None)


class FusedLamb(optim.LAMB):
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        said = {"bias_correction": bias_correction, "eps_inside_sqrt": eps_inside_sqrt, "max_grad_norm": max_grad_norm}
        _common("FusedLamb", {**said, "amsgrad": amsgrad})
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, trust=(min_coeff, max_coeff))


class OnebitAdam(optim.OneBitAdam):
    """``deepspeed``, an engine there, is not needed."""

    def __init__(self, params: Iterable[Any], deepspeed: Any = None, lr: float = 1e-3, **more: Any) -> None:
        _common("OnebitAdam", more)
        super().__init__(params, lr=lr, **more)


class OnebitLamb(optim.OneBitLamb):
    """``deepspeed``, an engine there, is not needed."""

    def __init__(self, params: Iterable[Any], deepspeed: Any = None, lr: float = 1e-3, **more: Any) -> None:
        _common("OnebitLamb", more)
        super().__init__(params, lr=lr, **more)


class ZeroOneAdam(optim.ZeroOneAdam):
    """``deepspeed``, an engine there, is not needed."""

    def __init__(self, params: Iterable[Any], deepspeed: Any = None, lr: float = 1e-3, **more: Any) -> None:
        _common("ZeroOneAdam", more)
        super().__init__(params, lr=lr, **more)
