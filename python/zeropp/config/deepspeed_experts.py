# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ``expert_parallel`` section (AutoEP) as ``Config.experts``.

DeepSpeed learns from the section which modules of a model are experts, and how its router works. Here the model itself says both: its
``ep_plan`` names the experts, and its own router runs. So keys that repeat what the model says are taken where they leave it to the model,
and keys that choose between kernels or transports change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeropp.config.deepspeed_json import Field, accept_only, flag_of, refuse_unknown, section_of, warn
from zeropp.config.values import MOST_NUMBER, wrong

_NAME = "expert_parallel"
_OF_THE_PLAN = "experts are found by the model's own ep_plan"
_OF_THE_ROUTER = "the model's own router runs"
_ALWAYS: dict[str, tuple[tuple[object, ...], str]] = {
    "expert_tensor_parallel_size": ((1,), 'slices of experts are "experts": {"parallel": N, "slices": S}'),
    "load_balance_coeff": ((None,), "zeropp.moe.balance_bias(model, rate) moves the bias of a router"),
    "validate_folding_routing": ((False,), "ranks of tensor parallelism have experts of their own"),
    **dict.fromkeys(
        (
            "moe_layer_pattern", "router_pattern", "expert_pattern", "expert_w1", "expert_w2", "expert_w3", "num_experts_attr", "top_k_attr",
            "has_shared_experts", "shared_experts_pattern", "shared_experts_gate_pattern", "expert_activation",
        ),
        ((None,), _OF_THE_PLAN),
    ),
    **dict.fromkeys(("route_norm", "num_expert_groups", "num_limited_groups"), ((None,), _OF_THE_ROUTER)),
    "route_scale": ((1, 1.0), _OF_THE_ROUTER),
    **dict.fromkeys(("score_func", "score_apply", "top_k", "routed_scaling_factor"), (("auto",), _OF_THE_ROUTER)),
}  # fmt: skip
"""Keys whose value has to leave the choice to the model: what is accepted, and why."""
_HINTS: dict[str, tuple[object, str]] = {
    "preset_model": (None, _OF_THE_PLAN),
    "use_grouped_mm": (True, "the model's experts_implementation chooses the products"),
    "disable_triton_grouped_mm": (False, "the model's experts_implementation chooses the products"),
    "comm_backend": ("comm", "rows are read where they lie, and packed between hosts"),
    "comm_num_sm": (12, "no processor of a GPU is set aside for the exchange"),
    "comm_qp_margin": (4, "no processor of a GPU is set aside for the exchange"),
    "comm_max_tokens_per_rank": (0, "buffers grow with the tokens"),
    "async_split_plan": (False, "no counts are exchanged"),
    "combine_impl": ("auto", "a token's owner sums the outputs in fp32, in order of ranks"),
    "row_weighting_impl": ("auto", "a token's owner applies the weights"),
    "gate_up_impl": ("separate", "the model's own parameters are used"),
}
"""Keys that choose between ways to the same numbers: the usual value, and why another one changes nothing."""


def experts_from_deepspeed(keys: Mapping[str, Any]) -> dict[str, Field]:
    """Return the field ``experts`` with the path of the key, {} where the section asks for nothing.

    Raises:
        zeropp.ConfigError: a key is unknown, or asks for what the model does not do by itself; it names the key's path.
    """
    if keys.get(_NAME) in (False, "auto"):
        return {}
    section = section_of(keys, _NAME)
    refuse_unknown(section, ("enabled", "autoep_size", *_ALWAYS, *_HINTS), _NAME)
    if not flag_of(section, "enabled", f"{_NAME}."):
        return {}
    accept_only(section, _ALWAYS, f"{_NAME}.")
    for name, (usual, why) in _HINTS.items():
        value = section.get(name, usual)
        if value != usual and value != "auto":
            warn(f"{_NAME}.{name}: {value!r} changes nothing in zeropp: {why}")
    ranks = section.get("autoep_size", 1)
    if ranks != "auto" and (isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= MOST_NUMBER):
        raise wrong(f"{_NAME}.autoep_size", ranks, "a number of ranks, or 'auto'")
    return {"experts": (f"{_NAME}.autoep_size", ranks)}
