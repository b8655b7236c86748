# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ``expert_parallel`` section as ``Config.experts``: what it means, what changes nothing, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import zeropp

# DeepSpeed's defaults, each of which leaves the model as it is.
DEFAULTS: dict[str, Any] = {
    "expert_tensor_parallel_size": 1, "validate_folding_routing": False, "async_split_plan": False, "preset_model": None,
    "moe_layer_pattern": None, "expert_pattern": None, "router_pattern": None, "use_grouped_mm": True,
    "disable_triton_grouped_mm": False, "route_norm": None, "route_scale": 1.0, "score_apply": "auto", "combine_impl": "auto",
    "row_weighting_impl": "auto", "gate_up_impl": "separate", "comm_backend": "comm", "comm_num_sm": 12, "comm_qp_margin": 4,
    "comm_max_tokens_per_rank": 0, "num_expert_groups": None, "num_limited_groups": None, "score_func": "auto", "top_k": "auto",
    "load_balance_coeff": None, "routed_scaling_factor": "auto", "expert_w1": None, "expert_w2": None, "expert_w3": None,
    "num_experts_attr": None, "top_k_attr": None, "has_shared_experts": None, "shared_experts_pattern": None,
    "shared_experts_gate_pattern": None, "expert_activation": None,
}  # fmt: skip


def parallel(section: Any) -> Any:
    experts = zeropp.Config.from_json({"zero_optimization": {"stage": 3}, "expert_parallel": section}).experts
    return None if experts is None else experts.parallel  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("section", "wanted"),
    [
        ({"enabled": True, "autoep_size": 4}, 4), ({"enabled": True, "autoep_size": "auto"}, "auto"), ({"enabled": True}, 1),
        ({"enabled": True, "autoep_size": 2, **DEFAULTS}, 2), ({"enabled": False, "autoep_size": 4}, None), ({"autoep_size": 4}, None),
        ({}, None), (None, None), (False, None),
    ],
)  # fmt: skip
def test_what_it_means(section: Any, wanted: Any) -> None:
    assert parallel(section) == wanted


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("preset_model", "mixtral"),
        ("comm_backend", "deepep"),
        ("use_grouped_mm", False),
        ("combine_impl", "weighted_sum"),
    ],
)
def test_other_ways_to_the_same_numbers_warn(key: str, value: Any) -> None:
    with pytest.warns(UserWarning, match=f"expert_parallel.{key}: {value!r} changes nothing in zeropp: "):
        assert parallel({"enabled": True, "autoep_size": 2, key: value}) == 2


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"autoep_size": 0}, "expert_parallel.autoep_size: 0 is not allowed; wanted a number of ranks, or 'auto'"),
        ({"autoep_size": True}, "expert_parallel.autoep_size: True is not allowed"),
        ({"autoep_sise": 2}, "expert_parallel.autoep_sise: unknown key (value 2); did you mean 'autoep_size'?"),
        ({"enabled": "yes"}, "expert_parallel.enabled: 'yes' is not allowed"),
        ({"expert_tensor_parallel_size": 2}, 'slices of experts are "experts": {"parallel": N, "slices": S}'),
        ({"load_balance_coeff": 1e-3}, "zeropp.moe.balance_bias(model, rate) moves the bias of a router"),
        ({"router_pattern": "gate"}, "experts are found by the model's own ep_plan"),
        ({"top_k": 1}, "expert_parallel.top_k: 1"),
        ({"score_func": "sigmoid"}, "the model's own router runs"),
    ],
)
def test_what_is_refused(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(zeropp.ConfigError) as error:
        parallel({"enabled": True, **keys})
    assert sentence in str(error.value), str(error.value)


def test_it_cannot_be_said_twice() -> None:
    with pytest.raises(zeropp.ConfigError, match=r"expert_parallel.autoep_size: says again what 'experts' says"):
        zeropp.Config.from_json({"experts": 2, "expert_parallel": {"enabled": True, "autoep_size": 2}})
