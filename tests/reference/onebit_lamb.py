# SPDX-License-Identifier: Apache-2.0
"""1-bit LAMB with all ranks in one process, in float64: written to be read, not to be fast.

Li et al. 2021, "1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's Convergence Speed",
algorithm 1. After a warm-up of LAMB that keeps a moving average c of every tensor's ratio of norms, per tensor:

    m_i    = beta1 m + (1 - beta1) g_i;   m = 1-bit mean of (s m_i) / s,   s = mean over tensors of rms(m) / rms(m of this one)
    g'     = (m - beta1 m before) / (1 - beta1),   v' = beta2 v' + (1 - beta2) g'^2                    (v' = v at the freeze)
    r      = max of (sqrt(v) + eps) / (sqrt(v') + eps), within [factor_min, factor_max] and (1 +- threshold) of the one before
    update = m / (sqrt(v) + eps) + weight_decay x,    x = x - lr c r update

With weight decay r is mixed with 1 by the share of the norms of update without and with it (DeepSpeed's form). Adam's
corrections of the moments throughout, and of the moving average; elements whose v is 0 do not move.
"""

from __future__ import annotations

import math

import torch
from reference import lamb
from reference.onebit_adam import Mean
from torch import Tensor


class OneBitLamb:
    """``spans``: (first, last) element of every tensor in the flat array ``x``; what is between them stays 0."""

    def __init__(
        self, x: Tensor, spans: list[tuple[int, int]], ranks: int, chunk_elems: int, *, freeze_step: int, lr: float,
        beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0, max_coeff: float = 10.0,
        min_coeff: float = 0.01, coeff_beta: float = 0.9, factor_max: float = 4.0, factor_min: float = 0.5,
        factor_threshold: float = 0.1,
    ) -> None:  # fmt: skip
        self.x, self.spans = x.double(), [slice(*span) for span in spans]
        self.m, self.v, self.fresh = (torch.zeros_like(self.x) for _ in range(3))
        real = torch.zeros_like(self.x)
        for at in self.spans:
            real[at] = 1
        self.mean = Mean(real, ranks, chunk_elems)
        self.t, self.freeze_step = 0, freeze_step
        self.lr, self.beta1, self.beta2, self.eps, self.decay = lr, beta1, beta2, eps, weight_decay
        self.trust, self.coeff_beta = (min_coeff, max_coeff), coeff_beta
        self.bounds, self.threshold = (factor_min, factor_max), factor_threshold
        self.c, self.factor = [0.0] * len(spans), [1.0] * len(spans)
        self.scaling = torch.ones_like(self.x)

    def step(self, gradients: list[Tensor]) -> None:
        self.t += 1
        if self.t <= self.freeze_step:
            self._warm(torch.stack(gradients).mean(0))
        else:
            self._compressed(gradients)

    def _warm(self, g: Tensor) -> None:
        for i, at in enumerate(self.spans):
            self.x[at], self.m[at], self.v[at], _, ratio = lamb.step(
                self.x[at], self.m[at], self.v[at], g[at], t=self.t, lr=self.lr, beta1=self.beta1, beta2=self.beta2,
                eps=self.eps, weight_decay=self.decay, trust=self.trust,
            )  # fmt: skip
            self.c[i] = self.coeff_beta * self.c[i] + (1 - self.coeff_beta) * ratio
        if self.t == self.freeze_step:
            sizes = [self.m[at].square().mean().sqrt().item() for at in self.spans]
            for at, size in zip(self.spans, sizes, strict=True):
                self.scaling[at] = sum(sizes) / len(sizes) / size
            self.fresh = self.v.clone()

    def _compressed(self, gradients: list[Tensor]) -> None:
        before = self.m
        own = [(self.beta1 * self.m + (1 - self.beta1) * g) * self.scaling for g in gradients]
        self.m = self.mean(own) / self.scaling
        g = (self.m - self.beta1 * before) / (1 - self.beta1)
        self.fresh = self.beta2 * self.fresh + (1 - self.beta2) * g * g
        below = (self.v / (1 - self.beta2**self.freeze_step)).sqrt() + self.eps
        real = (self.fresh / (1 - self.beta2**self.t)).sqrt() + self.eps
        for i, at in enumerate(self.spans):
            alone = self.m[at] / (1 - self.beta1**self.t) / below[at] * (self.v[at] != 0)
            update = alone + self.decay * self.x[at]
            factor = (below[at] / real[at] * (self.v[at] != 0)).max().item()
            if self.decay:
                share = min(1.0, math.sqrt(alone.square().sum().item() / update.square().sum().item()))
                factor = factor * share + (1 - share)
            factor = min(max(factor, self.bounds[0]), self.bounds[1])
            factor = min(max(factor, self.factor[i] * (1 - self.threshold)), self.factor[i] * (1 + self.threshold))
            self.factor[i] = factor
            c = self.c[i] / (1 - self.coeff_beta**self.freeze_step)
            self.x[at] = self.x[at] - self.lr * c * factor * update
