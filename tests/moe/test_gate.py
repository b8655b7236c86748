# SPDX-License-Identifier: Apache-2.0
"""The gate against loops over tokens in float64 (tests/reference/moe_gate.py), and its noise against what it should be distributed as.

Bounds: a weight is a score, each within (8 + 2 |x|max + E) u of the exact one (u = 2^-24; tests/ops/test_moe.py), divided by a sum
of k such; the loss is a mean of them. The logits are rounded in the product: H u |x| |w| more each, which moves a score by as much.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import moe_gate as reference
from torch import Tensor
from zeropp import ConfigError
from zeropp.moe import Gate
from zeropp.moe.gate import Router

U = 2.0**-24
HIDDEN = 12
QUIET = settings(deadline=None, max_examples=25)


def router(experts: int, k: int, seed: int, **rule: Any) -> Router:
    torch.manual_seed(seed)
    made = Router(HIDDEN, experts, k, Gate(**rule))
    with torch.no_grad():
        made.weight.mul_(4)
    return made


def by_expert(made: Router, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights by expert, (T, E), the balance loss and the counts."""
    routes = made(tokens)
    spread = torch.zeros(len(tokens), made.num_experts + 1)
    return (
        spread.scatter(1, routes.chosen.long() % (made.num_experts + 1), routes.weights)[:, :-1],
        routes.balance_loss,
        routes.counts,
    )


def wanted(made: Router, tokens: Tensor, **rule: Any) -> tuple[Tensor, Tensor, list[int]]:
    logits = tokens.double() @ made.weight.double().t()
    weights, balance, counts = reference.route(logits, made.top_k, **rule)
    spread = [[row.get(e, logits.new_zeros(())) for e in range(made.num_experts)] for row in weights]
    return torch.stack([torch.stack(row) for row in spread]), balance, counts


@QUIET
@given(
    experts=st.integers(1, 9), k=st.integers(1, 5), tokens=st.integers(1, 30), seed=st.integers(0, 99), sigmoid=st.booleans(),
    capacity=st.sampled_from([None, 0.5, 1.0, 1.5]), drop=st.sampled_from(["order", "score"]), first_only=st.booleans(),
)  # fmt: skip
def test_the_gate_follows_the_papers(
    experts: int, k: int, tokens: int, seed: int, sigmoid: bool, capacity: float | None, drop: Any, first_only: bool
) -> None:
    k = min(k, experts)
    rule: dict[str, Any] = {"capacity": capacity, "least": 2}
    made = router(
        experts, k, seed, scoring="sigmoid" if sigmoid else "softmax", balance="gshard" if first_only else "switch",
        drop=drop if capacity else "order", **rule,
    )  # fmt: skip
    x = torch.randn(tokens, HIDDEN)
    got = by_expert(made, x)
    want = wanted(made, x, sigmoid=sigmoid, by_score=drop == "score", first_only=first_only, **rule)
    reach = (x.abs() @ made.weight.abs().t()).max().item()
    off = 4 * (8 + (2 + HIDDEN) * reach + experts) * U
    assert got[2].tolist() == want[2]
    assert (got[0].double() - want[0]).abs().max().item() <= off
    assert abs(got[1].item() - want[1].item()) <= off * experts

    by = torch.randn(tokens, experts)
    mine = torch.autograd.grad((got[0] * by).sum() + got[1], made.weight)[0]
    theirs = torch.autograd.grad((want[0] * by).sum() + want[1], made.weight)[0]
    scale = 4 * x.abs().max().item() * (by.abs().max().item() + experts) * tokens
    assert (mine - theirs).abs().max().item() <= off * scale * (1 if not sigmoid else 1 / U**0.25)


def test_only_open_groups_are_chosen_and_the_bias_only_chooses() -> None:
    made = router(8, 3, 1, scoring="sigmoid", groups=(4, 2), bias_rate=0.1)
    made.e_score_correction_bias.copy_(torch.linspace(-0.3, 0.3, 8))
    x = torch.randn(40, HIDDEN)
    got, want = (
        by_expert(made, x),
        wanted(made, x, sigmoid=True, groups=(4, 2), bias=made.e_score_correction_bias.double()),
    )
    assert got[2].tolist() == want[2]
    assert (got[0].double() - want[0]).abs().max().item() <= 1e-5
    assert bool((((got[0] > 0).view(40, 4, 2).sum(2) > 0).sum(1) <= 2).all())


def test_the_second_choice_is_drawn_as_the_softmax_without_the_first() -> None:
    made = router(5, 2, 3, second="sample")
    x = torch.randn(1, HIDDEN).expand(20_000, -1)
    chosen = made(x).chosen
    scores = torch.softmax((x[:1] @ made.weight.t())[0], 0)
    first = int(scores.argmax())
    assert bool((chosen[:, 0] == first).all())
    share = torch.bincount(chosen[:, 1].long(), minlength=5) / len(x)
    exact = scores.detach().index_fill(0, torch.tensor(first), 0) / (1 - scores[first].detach())
    # Five standard deviations of a share of 20,000 draws: at most 5 sqrt(1/4 / 20,000).
    assert (share - exact).abs().max().item() <= 0.0177
    made.eval()
    assert bool((made(x).chosen[:, 1] == int(scores.index_fill(0, torch.tensor(first), 0).argmax())).all())


def test_noise_chooses_and_does_not_weigh() -> None:
    made = router(5, 1, 3, noise="gumbel")
    x = torch.randn(1, HIDDEN).expand(20_000, -1)
    routes = made(x)
    scores = torch.softmax((x[:1] @ made.weight.t())[0], 0).detach()
    share = torch.bincount(routes.chosen[:, 0].long(), minlength=5) / len(x)
    assert (share - scores).abs().max().item() <= 0.0177
    assert torch.allclose(routes.weights[:, 0], scores[routes.chosen[:, 0].long()], rtol=1e-5)
    jittered = router(5, 2, 3, noise="jitter")
    plain = jittered.eval()(x[:50]).weights
    noisy = jittered.train()(x[:50]).weights
    assert not torch.equal(plain, noisy) and torch.allclose(plain, noisy, atol=0.2)


def test_random_drops_are_as_many_and_others() -> None:
    x = torch.randn(200, HIDDEN)
    kept = []
    for drop in ("order", "random", "random"):
        made = router(4, 1, 5, drop=drop, capacity=0.5)
        torch.manual_seed(len(kept))
        kept.append(made(x).chosen[:, 0])
    counts = [torch.bincount(one.long() % 5, minlength=5).tolist() for one in kept]
    assert counts[0] == counts[1] == counts[2] and counts[0][4] > 0
    assert not torch.equal(kept[0], kept[1]) and not torch.equal(kept[1], kept[2])


def test_capacity_of_evaluation() -> None:
    made = router(4, 1, 5, capacity=0.5, eval_capacity=None)
    x = torch.randn(200, HIDDEN)
    assert bool((made(x).chosen < 0).any()) and not bool((made.eval()(x).chosen < 0).any())


@pytest.mark.parametrize(
    ("rule", "experts", "k", "sentence"),
    [
        ({}, 4, 5, r"MoE.k: 5 is not allowed; wanted at most 4 of 4 experts"),
        ({}, 0, 1, r"MoE.experts: 0 is not allowed"),
        ({}, 1024, 1, r"MoE.experts: 1024 is not allowed; wanted at most 1023"),
        ({"second": "sample"}, 4, 1, r"Gate.second: 'sample' is not allowed; wanted 'best' with k = 1"),
        ({"groups": (3, 1)}, 8, 1, r"Gate.groups: \(3, 1\) is not allowed; wanted a divisor of 8"),
        ({"groups": (4, 1)}, 8, 3, r"wanted open groups that have at least k = 3"),
        ({"groups": (2, 3)}, 8, 1, r"wanted at most 2 open groups"),
        ({"groups": 2}, 8, 1, r"Gate.groups: 2 is not allowed"),
        ({"scoring": "max"}, 4, 1, r"Gate.scoring: 'max' is not allowed; wanted one of 'softmax', 'sigmoid'"),
        ({"noise": "Jitter"}, 4, 1, r"Gate.noise: 'Jitter' is not allowed.*did you mean 'jitter'"),
        ({"second": "worst"}, 4, 2, r"Gate.second: 'worst'"),
        ({"drop": "random"}, 4, 2, r"Gate.drop: 'random' is not allowed; wanted 'order' where no capacity"),
        ({"drop": "first", "capacity": 1.0}, 4, 2, r"Gate.drop: 'first'"),
        ({"balance": "even"}, 4, 2, r"Gate.balance: 'even'"),
        ({"capacity": 0.0}, 4, 2, r"Gate.capacity: 0.0 is not allowed; wanted None or a finite number above 0"),
        ({"eval_capacity": -1}, 4, 2, r"Gate.eval_capacity: -1"),
        ({"least": 0}, 4, 2, r"Gate.least: 0"),
        ({"bias_rate": float("inf")}, 4, 2, r"Gate.bias_rate: inf"),
        ({"capacities": 1}, 4, 2, r"Gate.capacities: unknown key .*did you mean 'capacity'"),
    ],
)  # fmt: skip
def test_misuse_is_refused(rule: dict[str, Any], experts: int, k: int, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Router(HIDDEN, experts, k, Gate(**rule))
