# SPDX-License-Identifier: Apache-2.0
"""deepspeed.moe.layer.MoE by zeropp against its formulas in float64 (tests/reference/moe_gate.py), and deepspeed.moe.utils."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from reference import moe_gate as reference
from torch import nn
from zeropp import ConfigError
from zeropp.deepspeed import moe

H, EXPERTS = 12, 4
U = 2.0**-24


def layer(**options: Any) -> moe.MoE:
    torch.manual_seed(0)
    made = moe.MoE(H, nn.Linear(H, H), EXPERTS, **options)
    with torch.no_grad():
        made.deepspeed_moe.experts.weight.add_(0.3 * torch.randn(EXPERTS, H, H))
    return made


# k, options, and the rule of DeepSpeed's gate for them (sharded_moe.py: top1gating, top2gating, topkgating).
GATES: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (1, {"use_rts": False}, {"capacity": 1.0}),
    (1, {"drop_tokens": False}, {}),
    (2, {"top2_2nd_expert_sampling": False, "capacity_factor": 0.5}, {"capacity": 0.5, "first_only": True}),
    (2, {"drop_tokens": False, "top2_2nd_expert_sampling": False}, {"first_only": True}),
    (3, {"capacity_factor": 0.5, "min_capacity": 1}, {"capacity": 0.5, "least": 1, "by_score": True}),
]


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("k", "options", "rule"), GATES)
def test_output_loss_and_counts(k: int, options: dict[str, Any], rule: dict[str, Any], residual: bool) -> None:
    made = layer(k=k, use_residual=residual, **options)
    x = torch.randn(3, 10, H, requires_grad=True)
    y, loss, counts = made(x)
    inner = copy.deepcopy(made.deepspeed_moe).double()
    tokens = x.detach().double().reshape(-1, H)
    weights, balance, wanted = reference.route(tokens @ inner.gate.weight.t(), k, **rule)
    w, b = inner.experts.weight, inner.experts.bias
    exact = reference.layer(tokens, weights, lambda e, row: w[e] @ row + b[e])
    if residual:
        share = torch.softmax(inner.coefficient(tokens), 1)
        exact = exact * share[:, :1] + inner.residual(tokens) * share[:, 1:]
    # Sums of H products in two layers, and the softmax of sums of H.
    assert (y.reshape(-1, H) - exact).abs().max().item() <= 32 * H * U * exact.abs().max().item()
    assert abs(loss.item() - balance.item()) <= 32 * H * U and counts.tolist() == wanted
    (y.sum() + loss).backward()
    assert all(one.grad is not None for one in made.parameters())


def test_used_tokens() -> None:
    made = layer(k=2, top2_2nd_expert_sampling=False)
    x, used = torch.randn(2, 8, H), torch.tensor([1.0] * 5 + [0.0] * 3).repeat(2)
    y, loss, counts = made(x, used)
    alone, same_loss, same_counts = made(x[:, :5])
    assert not y[:, 5:].any() and torch.equal(y[:, :5], alone)
    assert torch.equal(loss, same_loss) and torch.equal(counts, same_counts)


def test_a_state_dict_of_theirs_loads() -> None:
    made, fresh = layer(use_residual=True), layer(use_residual=True)
    theirs: dict[str, torch.Tensor] = {"deepspeed_moe.gate.wg.weight": torch.randn(EXPERTS, H)}
    for e in range(EXPERTS):
        theirs[f"deepspeed_moe.experts.deepspeed_experts.{e}.weight"] = torch.randn(H, H)
        theirs[f"deepspeed_moe.experts.deepspeed_experts.{e}.bias"] = torch.randn(H)
    theirs |= {f"mlp.{name}": torch.randn_like(value) for name, value in nn.Linear(H, H).state_dict().items()}
    theirs |= {f"coefficient.{name}": torch.randn_like(value) for name, value in nn.Linear(H, 2).state_dict().items()}
    nn.ModuleDict({"a": made}).load_state_dict({f"a.{name}": value for name, value in theirs.items()})
    assert torch.equal(made.deepspeed_moe.gate.weight, theirs["deepspeed_moe.gate.wg.weight"])
    assert torch.equal(made.deepspeed_moe.experts.weight[2], theirs["deepspeed_moe.experts.deepspeed_experts.2.weight"])
    fresh.load_state_dict(made.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), fresh.parameters(), strict=True))


def test_groups_for_optimizers() -> None:
    model = nn.Sequential(nn.Linear(H, H), layer(ep_size=2))
    assert moe.has_moe_layers(model) == (True, EXPERTS) and moe.has_moe_layers(nn.Linear(2, 2)) == (False, 0)
    dense, experts = moe.split_params_into_shared_and_expert_params(list(model.parameters()))
    assert [tuple(one.shape) for one in experts] == [(EXPERTS, H, H), (EXPERTS, H)] and len(dense) == 3
    groups = moe.configure_moe_param_groups(list(model.parameters()))
    assert [len(group["params"]) for group in groups] == [3, 2] and groups[1]["name"] == "ep_size_2"
    assert [moe.is_moe_param_group(group) for group in groups] == [False, True]
    small = {"params": list(model.parameters()), "name": "all", "lr": 0.1}
    parts = moe.split_params_into_different_moe_groups_for_optimizer(small, max_group_size=10)
    assert [len(group["params"]) for group in parts] == [3, 1, 1] and parts[2]["lr"] == 0.1
    torch.optim.SGD(parts).step()


def test_gradients_of_shared_and_expert_parameters() -> None:
    """Those of parameters that have one, in their order and type."""
    model = nn.Sequential(nn.Linear(H, H), layer(ep_size=2))
    assert moe.split_params_grads_into_shared_and_expert_params(list(model.parameters())) == ([], [])
    model(torch.randn(5, H))[0].sum().backward()
    model[0].bias.grad = None
    shared, experts = moe.split_params_grads_into_shared_and_expert_params(list(model.parameters()))
    assert [tuple(one.shape) for one in shared] == [(H, H), (EXPERTS, H)]
    assert [tuple(one.shape) for one in experts] == [(EXPERTS, H, H), (EXPERTS, H)]
    assert shared[0] is model[0].weight.grad
    names = {name for name in dir(moe) if name.startswith(("split_", "is_moe", "has_moe", "configure_moe"))}
    assert names == {
        "has_moe_layers", "is_moe_param", "split_params_into_shared_and_expert_params",
        "split_params_grads_into_shared_and_expert_params", "split_params_into_different_moe_groups_for_optimizer",
        "is_moe_param_group", "configure_moe_param_groups",
    }  # fmt: skip  # all of deepspeed.moe.utils in 0.19.8


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"ep_size": 3}, "MoE.ep_size: 3 is not allowed; wanted a divisor of num_experts = 4"),
        ({"k": 5}, "MoE.k: 5 is not allowed"),
        ({"noisy_gate_policy": "Gumbel"}, "MoE.noisy_gate_policy: 'Gumbel' is not allowed"),
        ({"enable_expert_tensor_parallelism": True}, "MoE.enable_expert_tensor_parallelism: True is not allowed"),
        ({"capacity_factor": 0.0}, "Gate.capacity: 0.0 is not allowed"),
    ],
)
def test_misuse_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        layer(**options)
