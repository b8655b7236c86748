# SPDX-License-Identifier: Apache-2.0
"""What ``Config(experts=)`` takes and refuses, and how experts are found."""

from __future__ import annotations

from typing import Any

import moe_models
import pytest
import torch
import zeropp
from ranks import on_ranks
from zeropp.moe import experts

LAYERS = [("model.layers.0.mlp.experts", 8), ("model.layers.1.mlp.experts", 12)]


@pytest.mark.parametrize(
    ("given", "wanted"), [(4, 4), ("auto", "auto"), ({"parallel": 2}, 2), (zeropp.Experts(parallel=1), 1), (None, None)]
)
def test_what_is_taken(given: Any, wanted: Any) -> None:
    config = zeropp.Config.from_json({"experts": given})
    assert (config.experts and config.experts.parallel) == wanted  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (0, "experts: 0 is not allowed; wanted a number of ranks >= 1 (below 2**63), 'auto'"),
        (True, "experts: True is not allowed"),
        ("four", "experts: 'four' is not allowed"),
        ({"parallel": 0}, "experts.parallel: 0 is not allowed; wanted a whole number >= 1"),
        ({"slices": 0}, "experts.slices: 0 is not allowed; wanted a whole number >= 1 (slices of an expert)"),
        (
            {"parallel": {}},
            "experts.parallel: {} is not allowed; wanted a number of ranks, 'auto', or a dict from patterns",
        ),
        ({"parallel": {"*": 0}}, "experts.parallel['*']: 0 is not allowed; wanted a whole number >= 1"),
        (
            {"parallel": {"*": "all"}},
            "experts.parallel['*']: 'all' is not allowed; wanted a number of ranks, or 'auto'",
        ),
        ({"chunks": 0}, "experts.chunks: 0 is not allowed; wanted a whole number >= 1 (pieces of a layer's tokens"),
        ({"offload": "cpu"}, "experts.offload: 'cpu' is not allowed; wanted a zeropp.Offload(...)"),
    ],
)
def test_what_is_refused(given: Any, sentence: str) -> None:
    with pytest.raises(zeropp.ConfigError) as error:
        zeropp.Config.from_json({"experts": given})
    assert sentence in str(error.value)


@pytest.mark.parametrize(("ranks", "auto"), [(1, 1), (2, 2), (3, 1), (4, 4), (6, 2), (8, 4)])
def test_auto_is_the_largest_number_that_divides(ranks: int, auto: int) -> None:
    assert zeropp.Experts().ranks_of(ranks, LAYERS) == [auto, auto]


@pytest.mark.parametrize(
    ("parallel", "ranks", "reason"),
    [
        (4, 6, "it does not divide 6 ranks; the nearest number that fits is 2"),
        (8, 8, "it does not divide the 12 experts of 'model.layers.1.mlp.experts'; the nearest number that fits is 4"),
        (2, 1, "it does not divide 1 rank; the nearest number that fits is 1"),
    ],
)
def test_what_does_not_divide(parallel: int, ranks: int, reason: str) -> None:
    with pytest.raises(zeropp.ConfigError, match=f"{parallel} ranks with different experts: {reason}"):
        zeropp.Experts(parallel=parallel).ranks_of(ranks, LAYERS)


@pytest.mark.parametrize(("name", "count"), [("Mixtral", 2), ("GptOss", 2), ("DeepseekV3", 1), ("NemotronH", 2)])
def test_experts_are_found_by_the_plan(name: str, count: int) -> None:
    """Whatever stands around the model; DeepSeek-V3's first layer is dense."""
    model = torch.nn.ModuleDict({"policy": moe_models.build(name)})
    found = experts.expert_layers(model)
    assert len(found) == count and found[0].experts == 4
    for layer in found:
        assert model.get_submodule(layer.name) is layer.module
        assert set(layer.keys) == set(layer.module._parameters)


def test_ranks_by_layer() -> None:
    """The first pattern that fits counts, in JSON too."""
    config = zeropp.Config.from_json('{"experts": {"parallel": {"*.layers.0.*": 2, "*": "auto"}}}')
    assert isinstance(config.experts, zeropp.Experts)
    assert config.experts.ranks_of(12, LAYERS) == [2, 12]
    for parallel, sentence in (
        ({"*.layers.0.*": 2}, r"no pattern fits 'model.layers.1.mlp.experts'; there are '\*.layers.0.\*'; add '\*'"),
        ({"*.block.*": 2, "*": 2}, r"'\*.block.\*' fits no layer with experts; there are model.layers.0.mlp.experts, "),
        (
            {"*.layers.0.*": 3, "*": 4},
            "3 ranks with different experts: it does not divide the 8 experts of 'model.layers.0",
        ),
    ):
        with pytest.raises(zeropp.ConfigError, match=sentence):
            zeropp.Experts(parallel=parallel).ranks_of(12, LAYERS)


@on_ranks(4)
def test_a_model_on_some_ranks_of_a_job_is_refused() -> None:
    """Before groups are made over all ranks, so that the next prepare finds all of them at one place."""
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    with pytest.raises(
        zeropp.ConfigError,
        match=r"does not combine with a model on some of 4 ranks and .*name the ranks that hold the same tokens",
    ):
        zeropp.prepare(moe_models.build("Mixtral"), None, zeropp.Config(experts=2), mesh=mesh)
    zeropp.prepare(moe_models.build("Mixtral"), None, zeropp.Config(experts=2))


def test_models_without_a_plan_are_refused() -> None:
    import transformers

    text = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "intermediate_size_mlp": 16,
        "num_hidden_layers": 1,
        "vocab_size": 32,
    }
    config = transformers.Llama4TextConfig(
        **text, num_attention_heads=2, num_key_value_heads=1, num_local_experts=2, head_dim=8
    )
    with pytest.raises(zeropp.ConfigError, match="Llama4ForCausalLM has no module that its ep_plan names"):
        zeropp.prepare(transformers.Llama4ForCausalLM(config), None, zeropp.Config(experts=1))


@pytest.mark.parametrize(
    ("name", "flag", "reason"),
    [
        ("Mixtral", "has_post_expert_norm", "its experts end with a norm, which needs the sum of all slices; use slices=1"),
        ("GptOss", "has_bias", "its experts have biases, which slices would add several times; use slices=1"),
    ],
)  # fmt: skip
def test_experts_that_have_no_slices(name: str, flag: str, reason: str) -> None:
    model = moe_models.build(name)
    for layer in experts.expert_layers(model):
        setattr(layer.module, flag, True)
    sentence = rf"Experts.slices: 2 slices of the experts of 'model.layers.0.mlp.experts': {reason}"
    with pytest.raises(zeropp.ConfigError, match=sentence):
        zeropp.prepare(model, None, zeropp.Config(experts=zeropp.Experts(parallel=1, slices=2)))


def test_adapters_on_expert_parameters_are_refused() -> None:
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(target_modules=[], target_parameters=["experts.gate_up_proj"], r=2)
    model = peft.get_peft_model(moe_models.build("Mixtral"), adapter)
    with pytest.raises(zeropp.ConfigError, match="is a ParamWrapper around experts, as PEFT's target_parameters make"):
        zeropp.prepare(model, None, zeropp.Config(experts=1))


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "GptOss", "NemotronH"])
def test_the_implementation_of_transformers_registry(name: str) -> None:
    """``experts_implementation="zeropp"`` in one process: loss and gradients of eager."""
    import zeropp.hf  # noqa: F401  registers the name

    ids = moe_models.batch(0, 0)
    ours, eager = moe_models.build(name, "zeropp"), moe_models.build(name)
    losses = [moe_models.loss_of(model, ids) for model in (ours, eager)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1])
    for (path, mine), theirs in zip(ours.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=path)
