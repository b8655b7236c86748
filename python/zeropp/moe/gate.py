# SPDX-License-Identifier: Apache-2.0
"""The gate of a mixture of experts: which experts each token goes to, with what weights, and the losses that keep them even.

For the logits x_te of token t and expert e, with scores s = softmax_e(x) or sigmoid(x):

    first choice     argmax_e of x (or of s + b with a balancing bias b)
    later choices    the next best; with second="sample" by x + Gumbel noise (GShard, Lepikhin et al. 2021, algorithm 1)
    noise            "jitter": the router's input times U(0.99, 1.01) (Switch, Fedus et al. 2022, section 2.2);
                     "gumbel": x + Gumbel noise for choosing (DeepSpeed's RSample)
    groups (G, g)    the experts form G groups of equal size, and only the g groups with the greatest sums of their two
                     best scores are open to a token (DeepSeek-V3, section 2.1.2)
    capacity c       an expert takes at most max(least, ceil(c k T / E)) of a rank's T tokens; the others are dropped
    weights          s of the chosen, for k > 1 divided by their sum over those that were not dropped
    balance loss     E sum_e f_e P_e, P_e = mean_t of the scores; f_e: share of all choices ("switch", equation 4 there),
                     or of the first choices alone ("gshard", which DeepSpeed's top-2 gate has)
    z loss           mean_t (log sum_e exp x_te)^2 (ST-MoE, Zoph et al. 2022, equation 5)

With k 1, 2 and more these are DeepSpeed's top-1, top-2 and top-k gates (Rajbhandari et al. 2022).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeropp.config.values import finite, flag, one_of, refuses_unknown, whole, wrong
from zeropp.moe.tally import BIAS, Tally, move_bias
from zeropp.ops.moe import MAX_CHOICES, MAX_EXPERTS, MoeGate, moe_capacity, moe_gate, moe_plan

JITTER = 1e-2
MOST = MAX_EXPERTS - 1  # one more stands for none
_FIRST = 1e30  # added to a logit, it exceeds every other one


@refuses_unknown
@dataclass(frozen=True, kw_only=True)
class Gate:
    """How tokens choose experts. Without arguments: the k best by softmax, and no token is dropped."""

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Scores of the experts: a softmax over them, or the sigmoid of each logit (DeepSeek-V3)."""
    normalise: bool | None = None
    """Divide a token's weights by their sum. None: where k > 1."""
    noise: Literal["jitter", "gumbel"] | None = None
    """Noise while training: on the router's input, or on the logits that choose."""
    second: Literal["best", "sample"] = "best"
    """The choices after the first one while training: the best, or drawn by Gumbel noise."""
    groups: tuple[int, int] | None = None
    """(groups of experts, groups open to a token). None: every expert is open."""
    capacity: float | None = None
    """Tokens that an expert takes while training, as a multiple of an even share. None: all of them."""
    eval_capacity: float | Literal["same"] | None = "same"
    """The same where the module is in evaluation. "same": as ``capacity``."""
    least: int = 4
    """Tokens that an expert takes at least, where there is a capacity."""
    drop: Literal["score", "order", "random"] = "order"
    """What is dropped above the capacity: the assignments with the least scores; later choices, then later tokens; or later choices,
    then tokens at random (random token selection)."""
    balance: Literal["switch", "gshard"] = "switch"
    """Whether the balance loss counts all choices or the first ones."""
    bias_rate: float | None = None
    """After each step of an optimizer, a bias that only chooses moves by this much towards the experts with fewer tokens than the
    mean (Wang et al. 2024, algorithm 1; DeepSeek-V3). None: no bias."""

    def __post_init__(self) -> None:
        one_of("Gate.scoring", self.scoring, ("softmax", "sigmoid"))
        one_of("Gate.second", self.second, ("best", "sample"))
        one_of("Gate.drop", self.drop, ("score", "order", "random"))
        one_of("Gate.balance", self.balance, ("switch", "gshard"))
        if self.noise is not None:
            one_of("Gate.noise", self.noise, ("jitter", "gumbel"))
        if self.normalise is not None:
            flag("Gate.normalise", self.normalise)
        whole("Gate.least", self.least, 1, "tokens of an expert")
        for name in ("capacity", "bias_rate"):
            _check_positive(f"Gate.{name}", getattr(self, name))
        if self.eval_capacity != "same":
            _check_positive("Gate.eval_capacity", self.eval_capacity)
        if self.drop != "order" and self.capacity is None and self.eval_capacity in (None, "same"):
            raise wrong("Gate.drop", self.drop, "'order' where no capacity is given: without one nothing is dropped")
        self._check_groups()

    def _check_groups(self) -> None:
        if self.groups is None:
            return
        given = self.groups
        if not isinstance(given, (tuple, list)) or len(given) != 2:
            raise wrong("Gate.groups", given, "None or (groups of experts, groups open to a token)")
        for number in given:
            whole("Gate.groups", number, 1, "groups")
        if given[1] > given[0]:
            raise wrong("Gate.groups", given, f"at most {given[0]} open groups of {given[0]}")

    def check(self, experts: int, k: int) -> None:
        """Raise zeropp.ConfigError if this gate cannot choose k of so many experts."""
        whole("MoE.experts", experts, 1, "experts")
        whole("MoE.k", k, 1, "experts a token")
        if experts > MOST:
            raise wrong("MoE.experts", experts, f"at most {MOST}")
        if k > min(experts, MAX_CHOICES):
            raise wrong("MoE.k", k, f"at most {min(experts, MAX_CHOICES)} of {experts} experts")
        if k == 1 and self.second == "sample":
            raise wrong("Gate.second", self.second, "'best' with k = 1, which has no second choice")
        if self.groups is None:
            return
        groups, open_groups = self.groups
        if experts % groups or experts < 2 * groups:
            raise wrong("Gate.groups", self.groups, f"a divisor of {experts} experts with at least two in a group")
        if k > open_groups * (experts // groups):
            raise wrong("Gate.groups", self.groups, f"open groups that have at least k = {k} experts together")

    def capacity_in(self, training: bool) -> float | None:
        """Return the capacity factor of a pass; None: dropless."""
        return self.capacity if training or self.eval_capacity == "same" else self.eval_capacity


def _check_positive(path: str, value: object) -> None:
    if value is not None and not (finite(value) and float(value) > 0):  # type: ignore[arg-type]
        raise wrong(path, value, "None or a finite number above 0")


class Routes(NamedTuple):
    """Decisions for T tokens, E experts and k choices."""

    weights: Tensor
    """(T, k) fp32, differentiable; 0 where the assignment was dropped."""
    chosen: Tensor
    """(T, k) int32: the experts, best first; -1 where the assignment was dropped."""
    counts: Tensor
    """(E,) int64: assignments of each expert, before any is dropped."""
    balance_loss: Tensor
    """Scalar, differentiable."""
    z_loss: Tensor
    """Scalar, differentiable."""


class Router(nn.Module):
    """A linear layer without bias, computed in fp32, and the choice that a :class:`Gate` describes.

    Args:
        hidden: width H of a token.
        experts: E.
        k: experts a token.
        gate: how they are chosen.
    """

    e_score_correction_bias: Tensor

    def __init__(self, hidden: int, experts: int, k: int, gate: Gate) -> None:
        super().__init__()
        gate.check(experts, k)
        self.num_experts, self.top_k, self.rule = experts, k, gate
        self.weight = nn.Parameter(torch.empty(experts, hidden))
        if gate.bias_rate is not None:
            self.register_buffer(BIAS, torch.zeros(experts))
        self.tally = Tally(experts)
        self._follow()
        self.reset_parameters()

    def _follow(self) -> None:
        if self.rule.bias_rate is not None:
            move_bias(self, self, self.tally, self.rule.bias_rate)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._follow()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)  # as torch.nn.Linear

    def extra_repr(self) -> str:
        return f"experts={self.num_experts}, k={self.top_k}, {self.rule}"

    def forward(self, tokens: Tensor) -> Routes:
        """Route tokens (T, H)."""
        with torch.autocast(tokens.device.type, enabled=False):
            routes = self._route(tokens.float())
        self.tally.add(routes.counts, self.training)
        return routes

    def _route(self, tokens: Tensor) -> Routes:
        rule, noisy = self.rule, self.rule.noise if self.training else None
        if noisy == "jitter":
            tokens = tokens * torch.empty_like(tokens).uniform_(1.0 - JITTER, 1.0 + JITTER)
        logits = F.linear(tokens, self.weight.float())
        factor = rule.capacity_in(self.training)
        normalise = self.top_k > 1 if rule.normalise is None else rule.normalise
        order = self._order(logits.detach())
        made = moe_gate(logits, self.top_k, scoring=rule.scoring, normalise=normalise and factor is None, bias=order)
        balance = made.balance_loss
        if rule.balance == "gshard" and self.top_k > 1:
            balance = moe_gate(logits, 1, scoring=rule.scoring, bias=order).balance_loss
        if factor is None:
            return Routes(made.weights, made.chosen, made.counts, balance, made.z_loss)
        kept = self._kept(made, logits.detach(), factor)
        weights = made.weights * kept
        if normalise:
            weights = weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float32).eps)
        chosen = made.chosen.masked_fill(~kept, -1)
        return Routes(weights, chosen, made.counts, balance, made.z_loss)

    @torch.no_grad()
    def _order(self, logits: Tensor) -> Tensor | None:
        """Return what is added to the logits for choosing, (T, E) fp32; None where the logits themselves choose."""
        rule = self.rule
        noise = self.training and rule.noise == "gumbel"
        sample = self.training and rule.second == "sample"
        if not (noise or sample or rule.groups or rule.bias_rate is not None):
            return None
        first = self._preference(logits + _gumbel(logits) if noise else logits)
        if not sample:
            return _by_rank(first, self.top_k)
        best = first.argmax(1, keepdim=True)
        later = self._preference(logits + _gumbel(logits)).scatter(1, best, torch.inf)
        return _by_rank(later, self.top_k)

    def _preference(self, logits: Tensor) -> Tensor:
        """Return by what the experts are compared: (T, E), -inf for experts that are not open to a token."""
        rule = self.rule
        if rule.groups is None and rule.bias_rate is None:
            return logits
        scores = logits.sigmoid() if rule.scoring == "sigmoid" else logits.softmax(1)
        if rule.bias_rate is not None:
            scores = scores + self.e_score_correction_bias
        if rule.groups is None:
            return scores
        groups, open_groups = rule.groups
        parts = scores.view(len(scores), groups, self.num_experts // groups)
        best = parts.topk(2, dim=2).values.sum(2).topk(open_groups, dim=1).indices
        shut = torch.ones_like(parts[..., 0], dtype=torch.bool).scatter(1, best, False)
        return parts.masked_fill(shut[..., None], -torch.inf).flatten(1)

    @torch.no_grad()
    def _kept(self, made: MoeGate, logits: Tensor, factor: float) -> Tensor:
        """Return which assignments the capacity leaves, (T, k) bool."""
        capacity = moe_capacity(len(logits), self.num_experts, self.top_k, factor, self.rule.least)
        if self.rule.drop != "score":
            seed = int(torch.randint(1 << 62, ())) if self.rule.drop == "random" and self.training else None
            return moe_plan(made, self.num_experts, capacity=capacity, seed=seed).slots >= 0
        return _best_of_each(made, self.num_experts, capacity)


def _gumbel(logits: Tensor) -> Tensor:
    """Return Gumbel(0, 1) noise: the greatest of x + noise is distributed as softmax(x)."""
    return -torch.empty_like(logits).exponential_().log()


def _by_rank(preference: Tensor, k: int) -> Tensor:
    """Return what makes the k preferred experts the k greatest logits, in their order."""
    chosen = preference.topk(k, dim=1).indices
    steps = torch.arange(k, 0, -1, dtype=preference.dtype, device=preference.device) * _FIRST
    return torch.zeros_like(preference).scatter(1, chosen, steps.expand_as(chosen))


def _best_of_each(made: MoeGate, experts: int, capacity: int) -> Tensor:
    """Return the assignments of greatest weight of each expert, (T, k) bool; ties to the earlier token."""
    chosen = made.chosen.flatten().long()
    by_score = made.weights.detach().flatten().argsort(descending=True, stable=True)
    order = by_score[chosen[by_score].argsort(stable=True)]
    counts = made.counts
    place = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[chosen[order]]
    return torch.empty_like(place, dtype=torch.bool).scatter(0, order, place < capacity).view_as(made.chosen)
