# SPDX-License-Identifier: Apache-2.0
"""``experts_implementation="zeropp"``: transformers' gated experts one after the other, against its eager loop."""

from __future__ import annotations

import pytest
import torch
from transformers import GptOssConfig, MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from zeropp.moe import experts

TOKENS, WIDTH, INNER, EXPERTS, K = 40, 24, 16, 5, 2


def mixtral() -> torch.nn.Module:
    torch.manual_seed(0)
    config = MixtralConfig(hidden_size=WIDTH, intermediate_size=INNER, num_local_experts=EXPERTS, num_experts_per_tok=K)
    config._experts_implementation = "eager"
    module = MixtralExperts(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=WIDTH**-0.5)
    return module


@pytest.mark.parametrize("frozen", [False, True])
def test_outputs_and_gradients_are_those_of_the_eager_loop(frozen: bool) -> None:
    module = mixtral().requires_grad_(not frozen)
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    index = torch.rand(TOKENS, EXPERTS).topk(K, 1)[1]
    index[index == 3] = 4  # an expert without a token, and tokens that chose one twice
    weights = torch.rand(TOKENS, K, requires_grad=True)
    leaves = [x, weights, *(p for p in module.parameters() if p.requires_grad)]
    grad = torch.randn(TOKENS, WIDTH)
    assert experts._is_gated_silu(module, x)
    results = []
    for forward in (module.forward, lambda *given: experts.experts_forward(module, *given)):
        y = forward(x, index, weights)
        results.append([y.detach(), *torch.autograd.grad(y, leaves, grad, retain_graph=True)])
    for eager, mine in zip(*results, strict=True):
        # Both are fp32 sums of at most 80 products of sums of 24; they differ in the order of additions.
        torch.testing.assert_close(mine, eager, rtol=64 * 2.0**-24, atol=64 * 2.0**-24 * float(eager.abs().max()))


def test_other_experts_take_torchs_products() -> None:
    config = GptOssConfig(hidden_size=WIDTH, intermediate_size=INNER, num_local_experts=EXPERTS)
    module = mixtral()
    assert not experts._is_gated_silu(GptOssExperts(config), torch.zeros(2, WIDTH))
    assert not experts._is_gated_silu(module, torch.zeros(2, WIDTH, dtype=torch.bfloat16))
    module.act_fn = torch.nn.GELU()
    assert not experts._is_gated_silu(module, torch.zeros(2, WIDTH))
