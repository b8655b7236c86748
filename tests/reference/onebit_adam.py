# SPDX-License-Identifier: Apache-2.0
"""1-bit Adam and 0/1 Adam with all ranks in one process, in float64: written to be read, not to be fast.

1-bit Adam (Tang et al. 2021, algorithm 1), after a warm-up of AdamW, with C[] of onebit.py:

    m_i = beta1 m + (1 - beta1) g_i,    m = 1-bit mean of m_i,    x = x - lr m / (sqrt(v) + eps)

0/1 Adam (Lu et al. 2022, algorithm 1; while the variance is learned, as DeepSpeed has it):

    steps of the variance:  m, v, x as in Adam, of the exact mean gradient
    steps between:          m = beta1 m + (1 - beta1) 1-bit mean of g_i,    x as in Adam
    v frozen:               m_i = beta1 m_i + (1 - beta1) g_i,   u_i += lr m_i,   x_i = x_i - lr m_i / (sqrt(v) + eps)
    and at an agreement:    u = 1-bit mean of u_i,  x = x of the last agreement - u / (sqrt(v) + eps),  m = u / sum of lr

Both with Adam's corrections of the two moments (of v: for as often as it was updated), decoupled weight decay, and no
movement where v is 0.
"""

from __future__ import annotations

import math

import torch
from reference import onebit
from torch import Tensor


class Mean:
    """The one-bit mean of one array over `ranks` ranks, each the server of a shard.

    ``real``: 1 where an element belongs to a tensor, 0 where it is padding, which counts as 0.
    """

    def __init__(self, real: Tensor, ranks: int, chunk_elems: int) -> None:
        elems = real.numel()
        self.real, self.ranks, self.chunk_elems, self.slice_elems = real, ranks, chunk_elems, elems // ranks
        assert elems % ranks == 0
        self.worker = [torch.zeros(elems, dtype=torch.float64) for _ in range(ranks)]
        self.server = torch.zeros(elems, dtype=torch.float64)

    def __call__(self, values: list[Tensor]) -> Tensor:
        out = torch.zeros_like(values[0])
        for rank in range(self.ranks):
            part = slice(rank * self.slice_elems, (rank + 1) * self.slice_elems)
            sent = []
            for i, value in enumerate(value * self.real for value in values):
                to, self.worker[i][part], _ = onebit.compress(value[part], self.worker[i][part], self.chunk_elems)
                sent.append(to)
            out[part], self.server[part], _ = onebit.server(sent, self.server[part], self.chunk_elems)
        return out


class OneBitAdam:
    """``step(gradients of all ranks)``; ``x`` are the parameters."""

    def __init__(
        self, x: Tensor, real: Tensor, ranks: int, chunk_elems: int, *, freeze_step: int, lr: float, beta1: float = 0.9,
        beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0,
    ) -> None:  # fmt: skip
        self.x = x.double()
        self.m, self.v = torch.zeros_like(self.x), torch.zeros_like(self.x)
        self.mean = Mean(real, ranks, chunk_elems)
        self.t, self.seen, self.freeze_step = 0, 0, freeze_step
        self.lr, self.beta1, self.beta2, self.eps, self.decay = lr, beta1, beta2, eps, weight_decay

    def denominator(self) -> Tensor:
        found = (self.v / (1 - self.beta2**self.seen)).sqrt() + self.eps
        return torch.where(self.v == 0, math.inf, found)

    def learn(self, gradient: Tensor) -> None:
        self.m = self.beta1 * self.m + (1 - self.beta1) * gradient
        self.v = self.beta2 * self.v + (1 - self.beta2) * gradient**2
        self.seen += 1

    def move(self) -> None:
        self.x = self.x * (1 - self.lr * self.decay)
        self.x = self.x - self.lr * self.m / (1 - self.beta1**self.t) / self.denominator()

    def step(self, gradients: list[Tensor]) -> None:
        self.t += 1
        if self.t <= self.freeze_step:
            self.learn(torch.stack(gradients).mean(0))
        else:
            self.m = self.mean([self.beta1 * self.m + (1 - self.beta1) * g for g in gradients])
        self.move()


class ZeroOneAdam(OneBitAdam):
    """As OneBitAdam, with the two schedules; ``own_x`` are the ranks' parameters between agreements."""

    def __init__(
        self, x: Tensor, real: Tensor, ranks: int, chunk_elems: int, *, var_freeze_step: int, var_update_scaler: int,
        local_step_scaler: int, local_step_clipper: int, **rates: float,
    ) -> None:  # fmt: skip
        super().__init__(x, real, ranks, chunk_elems, freeze_step=var_freeze_step, **rates)  # type: ignore[arg-type]
        self.var_update_scaler, self.local_step_scaler = var_update_scaler, local_step_scaler
        self.clipper = local_step_clipper
        self.var_interval, self.var_counter, self.local_interval, self.local_counter = 1, 0, 1, 0
        self.real, self.ranks, self.chunk_elems = real, ranks, chunk_elems
        self.own_x: list[Tensor] = []

    def step(self, gradients: list[Tensor]) -> None:
        self.t += 1
        if self.t <= self.freeze_step:
            self._before(gradients)
            if self.t == self.freeze_step:
                self.mean = Mean(self.real, self.ranks, self.chunk_elems)
                self._agreed()
            return
        self._after(gradients)

    def _before(self, gradients: list[Tensor]) -> None:
        if self.t % self.var_interval == 0:
            self.learn(torch.stack(gradients).mean(0))
            self.var_counter += 1
            if self.var_counter == self.var_update_scaler:
                self.var_counter, self.var_interval = 0, 2 * self.var_interval
        else:
            self.m = self.beta1 * self.m + (1 - self.beta1) * self.mean(list(gradients))
        self.move()

    def _agreed(self) -> None:
        self.own_x = [self.x.clone() for _ in range(self.ranks)]
        self.own_m = [self.m.clone() for _ in range(self.ranks)]
        self.u = [torch.zeros_like(self.x) for _ in range(self.ranks)]
        self.rates = 0.0

    def _after(self, gradients: list[Tensor]) -> None:
        rate = self.lr / (1 - self.beta1**self.t)
        self.rates += rate
        self.x = self.x * (1 - self.lr * self.decay)
        for i, g in enumerate(gradients):
            self.own_m[i] = self.beta1 * self.own_m[i] + (1 - self.beta1) * g
            self.u[i] += rate * self.own_m[i]
            self.own_x[i] = self.own_x[i] * (1 - self.lr * self.decay) - rate * self.own_m[i] / self.denominator()
        if self.t % self.local_interval == 0:
            u = self.mean(self.u)
            self.x = self.x - u / self.denominator()
            self.m = u / self.rates
            self._agreed()
        self.local_counter += 1
        if self.local_counter == self.local_step_scaler:
            self.local_counter, self.local_interval = 0, min(self.clipper, 2 * self.local_interval)
