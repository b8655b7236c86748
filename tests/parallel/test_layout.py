# SPDX-License-Identifier: Apache-2.0
"""Bytes that a mesh will hold, against what it holds; and layouts of clusters, by arithmetic alone."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import zeropp
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B
from zeropp.cli import main

WITHIN = 0.03
H100 = {
    "memory": 80e9,
    "tflops": 500.0,
    "links": {"host": 400.0, "network": 400.0, "nvme": 20.0},
    "host_memory": 2000e9,
}


def llama(layers: int = 4, vocabulary: int = 65) -> Any:
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=False, use_cache=False,
        )
    )  # fmt: skip


MESHES = [
    ({"dp": 2, "tp": 2}, 3),
    ({"pp": 2, "dp": 2}, 2),
    pytest.param({"pp": 2, "dp": 2}, 3, marks=pytest.mark.slow),
    pytest.param({"dp": 2, "tp": 2}, 1, marks=pytest.mark.slow),
    pytest.param({"pp": 2, "tp": 2}, 1, marks=pytest.mark.slow),
    pytest.param({"pp": 2, "dp": 2}, 1, marks=pytest.mark.slow),
    pytest.param({"dp": 2, "sp": 2}, 3, marks=pytest.mark.slow),
]


def check_bytes(sizes: dict[str, int], stage: int) -> None:
    """Two steps on a mesh: the ranks hold what the estimate said, within three percent."""
    config, micro = zeropp.Config(stage=stage, host_copy="off"), 4
    with torch.device("meta"):
        said = zeropp.estimate(llama(), config, mesh=sizes, micro_batches=micro if "pp" in sizes else 1)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model: Any = llama()
    if "tp" in sizes:
        zeropp.parallel.tensor(model, mesh["tp"])
    if "pp" in sizes:
        model = zeropp.parallel.cut(model, mesh["pp"], Schedule1F1B)
    model, optimizer = zeropp.prepare(model, torch.optim.AdamW(model.parameters()), config, mesh=mesh)
    ids = torch.arange(4 * micro * 4).view(4 * micro, 4) % 65
    for _ in range(2):
        optimizer.zero_grad()
        if "pp" in sizes:
            loss_of = lambda logits, labels: nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())  # noqa: E731
            stage_here = zeropp.parallel.stages(model, mesh["pp"])[0]
            schedule = zeropp.parallel.pipeline(Schedule1F1B(stage_here, micro, loss_fn=loss_of))
            schedule.step(
                *([ids] if stage_here.is_first else []), target=ids if stage_here.is_last else None, losses=[]
            )
        else:
            model(input_ids=ids).logits.float().pow(2).mean().backward()
        optimizer.step()
    held = {kind: sizes["held"] for kind, sizes in zeropp.memory(model, optimizer)["cpu"].items()}
    kinds = ("params", "grads", "master", "optimizer")
    here, wanted = sum(held.get(kind, 0) for kind in kinds), sum(said["cpu"][kind] for kind in kinds)
    place = mesh.get_local_rank("pp") if "pp" in sizes else 0
    assert here <= wanted * (1 + WITHIN), (held, said)
    others = said["stages"][place] - max(said["stages"])  # the fullest stage is the one that is described
    if others == 0 and (0 if "tp" not in sizes else mesh.get_local_rank("tp")) == 0:
        assert here == pytest.approx(wanted, rel=WITHIN), (held, said)


@pytest.mark.parametrize(("sizes", "stage"), MESHES)
@on_ranks(4)
def test_within_three_percent_of_what_a_mesh_holds(sizes: dict[str, int], stage: int) -> None:
    check_bytes(sizes, stage)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "sizes", [{"pp": 2, "dp": 2, "tp": 2}, {"pp": 4, "dp": 2}, {"pp": 2, "dp": 4}, {"dp": 4, "tp": 2}]
)
@on_ranks(8)
def test_within_three_percent_of_what_eight_ranks_hold(sizes: dict[str, int], stage: int) -> None:
    check_bytes(sizes, stage)


def layouts_of_eight() -> list[dict[str, int]]:
    """Every way to write 8 as pp x dp x sp x tp for a model with two heads of keys."""
    powers = (1, 2, 4, 8)
    found = [
        {"pp": pp, "dp": dp, "sp": sp, "tp": tp} for pp in powers for dp in powers for sp in powers for tp in (1, 2)
    ]
    return [sizes for sizes in found if math.prod(sizes.values()) == 8]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_layout_of_eight_ranks_has_the_bytes_of_the_formulas(stage: int) -> None:
    """In fp32 with Adam, own parameters Psi / (p t) and N = dp sp data ranks: parameters 4, gradients 4, moments 8 bytes, of
    which stage 1 partitions the moments, stage 2 the gradients too, and stage 3 everything (Rajbhandari et al. 2020)."""
    with torch.device("meta"):
        model = llama(8)
    for sizes in layouts_of_eight():
        said = zeropp.estimate(model, zeropp.Config(stage=stage, host_copy="off"), mesh=sizes, micro_batches=8)
        own, data = said["parameters"], sizes["dp"] * sizes["sp"]
        partitioned = {"optimizer": 8, "grads": 4 * (stage >= 2), "params": 4 * (stage == 3)}
        replicated = {"grads": 4 * (stage == 1), "params": 4 * (stage < 3)}
        wanted = sum(partitioned.values()) * own / data + sum(replicated.values()) * own
        if data == 1 and sizes["pp"] > 1:
            wanted += 4 * own  # what autograd adds up lies beside what the step reads
        held = sum(said["cpu"][kind] for kind in ("params", "grads", "master", "optimizer"))
        in_use = said["largest_unit"] if stage == 3 and data > 1 else 0  # gathered, or small parameters that stay whole
        assert wanted * (1 - WITHIN) <= held <= wanted * (1 + WITHIN) + in_use, (sizes, said)


def test_every_layout_of_eight_ranks_adds_up() -> None:
    """The parts of all ranks are the whole, for each way to write 8 as dp x tp x pp."""
    with torch.device("meta"):
        model = llama(8)
    whole = sum(one.numel() for one in model.parameters())
    for tp in (1, 2):
        for pp in (1, 2, 4, 8 // tp):
            mesh = {"pp": pp, "dp": 8 // pp // tp, "tp": tp}
            said = zeropp.estimate(model, zeropp.Config(stage=1), mesh=mesh, micro_batches=8, sequence=32)
            assert len(said["stages"]) == pp
            assert whole / pp / tp <= said["parameters"] * 1.3 and said["parameters"] * pp * tp <= whole * 2.5
            assert ("tensor" in said["traffic"], "pipeline" in said["traffic"]) == (tp > 1, pp > 1)
    assert said["traffic"]["tensor"] == 8 * 8 // pp * 4 * 2 * 32 * 64 * 4 // 2


@pytest.mark.parametrize(
    ("keywords", "sentence"),
    [
        ({"mesh": {"dp": 2, "rows": 2}}, "dimension 'rows' of the mesh is not known"),
        ({"mesh": {"dp": 0}}, "mesh['dp'] is 0; wanted a whole number"),
        ({"mesh": {"dp": 4}, "ranks": 2}, "ranks 2, and the mesh {'dp': 4} has 4"),
        (
            {"mesh": {"tp": 2}},
            "estimate: transformers has no tensor-parallel plan for Linear; estimate a Hugging Face model",
        ),
        ({"ranks": 2, "sequence": 8}, "belong to a mesh"),
        ({}, "neither ranks nor mesh"),
        ({"mesh": {"dp": 2, "pp": 2}, "schedule": "Ring"}, "schedule 'Ring' is not one of torch's"),
    ],
)
def test_refusals_of_estimate(keywords: dict[str, Any], sentence: str) -> None:
    with pytest.raises(zeropp.ConfigError, match=re.escape(sentence)):
        zeropp.estimate(nn.Linear(2, 2), **keywords)


def test_a_plan_that_transformers_refuses_is_named() -> None:
    """transformers raises ValueError where a model has no plan, and where its plan has a style that it does not know."""
    transformers = pytest.importorskip("transformers")
    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=2))
    with pytest.raises(
        zeropp.ConfigError, match="no tensor-parallel plan for GPT2LMHeadModel; estimate a Hugging Face"
    ):
        zeropp.estimate(gpt, mesh={"tp": 2})
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    config.base_model_tp_plan = {"layers.*.mlp.up_proj": "diagonal"}
    with pytest.raises(
        zeropp.ConfigError,
        match=r"refuses the tensor-parallel plan of LlamaForCausalLM.*up_proj.*diagonal.*or estimate a",
    ):
        zeropp.estimate(transformers.LlamaForCausalLM(config), mesh={"tp": 2})


def big(layers: int, width: int, heads: int, inner: int) -> Any:
    import transformers

    return transformers.LlamaConfig(
        vocab_size=128256, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=8,
    )  # fmt: skip


def test_what_fits_with_fewest_dimensions_wins() -> None:
    """8B parameters on one host of 8 GPUs need no other dimension than data; 70B on 8 hosts neither, with so fast a network."""
    chosen, *others = zeropp.layout(big(32, 4096, 32, 14336), ranks=8, sequence=8192, batch=64, **H100)
    assert chosen.mesh == {"dp": 8} and chosen.lost_by == ""
    assert chosen.bytes < H100["memory"] and len(others) == 5
    assert all(one.lost_by and one.seconds >= chosen.seconds / 1.02 for one in others)
    assert [one.seconds for one in others] == sorted(one.seconds for one in others)
    every = zeropp.layout(big(32, 4096, 32, 14336), ranks=8, sequence=8192, batch=64, most=40, **H100)
    tensors = next(one for one in every if one.tp > 1)
    assert tensors.lost_by.startswith("tp +")


def test_long_sequences_and_slow_networks_want_dimensions() -> None:
    long, *_ = zeropp.layout(big(32, 4096, 32, 14336), ranks=8, sequence=524288, batch=2, **H100)
    assert long.sp > 1 or long.tp > 1
    slow = {**H100, "links": {"host": 400.0, "network": 3.0, "nvme": 20.0}}
    split, *_ = zeropp.layout(big(80, 8192, 64, 28672), ranks=64, hosts=8, sequence=8192, batch=512, **slow)
    assert split.tp > 1 or split.pp > 1
    assert split.dp * split.sp * split.tp * split.pp == 64 and split.tp <= 8


def with_experts() -> Any:
    """Qwen3-30B-A3B: 128 experts of 768 in 48 layers, of which a token passes 8."""
    import transformers

    return transformers.Qwen3MoeConfig(
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, hidden_size=2048, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=151936, intermediate_size=6144,
    )  # fmt: skip


def every_layout(**more: Any) -> list[Any]:
    given = {**H100, "ranks": 64, "hosts": 8, "sequence": 8192, "batch": 512, "most": 400, **more}
    return zeropp.layout(with_experts(), **given)


def test_experts_of_different_ranks_are_compared() -> None:
    """On one host a rank with a part of the experts need not recompute, which data parallelism alone has to, and loses by."""
    chosen, *others = every_layout(ranks=8, hosts=1, batch=8)
    assert chosen.ep == 8 and f"ep {chosen.ep}" in str(chosen) and "ep" not in chosen.mesh
    data_alone = next(one for one in others if one.ep == 1 and one.mesh == {"dp": 8})
    assert data_alone.lost_by.startswith("compute +"), data_alone
    sent = [one for one in (chosen, *others) if one.ep > 1]
    assert all(one.parts["ep"] > 0 and one.pp == 1 and one.ep % one.tp == 0 for one in sent)
    assert all(128 % one.ep == 0 and one.dp * one.sp * one.tp % one.ep == 0 for one in sent)
    assert {one.parts["ep"] for one in others if one.ep == 1} == {0.0}


def test_experts_that_cost_more_to_reach_say_so() -> None:
    """Rows over a slow network take longer than anything else. Over a fast one experts are one more thing that can go wrong."""
    chosen, *others = every_layout(batch=64, links={"host": 400.0, "network": 10.0, "nvme": 20.0})
    assert chosen.ep == 1
    assert next(one for one in others if one.ep > 1 and one.ep > 8).lost_by.startswith("ep +")
    fast = {"links": {"host": 4000.0, "network": 40000.0, "nvme": 20.0}, "sequence": 65536, "batch": 64}
    chosen, *others = every_layout(**fast)
    assert chosen.ep == 1
    assert re.fullmatch(r"[+-][\d.]+%, 3 dimensions to 2", next(one for one in others if one.ep > 1).lost_by)


def test_bytes_of_experts_are_those_of_estimate() -> None:
    """The states of a layout, by its formulas, are those of ``zeropp.estimate`` for as many ranks with different experts."""
    import transformers
    from zeropp.parallel import layout

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(with_experts())
    facts = layout._facts_of(model)
    assert facts.experts == (layout.ExpertFacts(48, 128, 8, 128 * 3 * 768 * 2048),)
    assert layout._facts_of(with_experts()) == facts
    for stage, tp, ep in ((1, 1, 8), (2, 1, 16), (3, 1, 8), (1, 2, 8), (3, 2, 4)):
        one = layout.Layout(16 // tp, 1, tp, 1, ep, stage, "none", False, 1, 1)
        held = layout._bytes(one, facts, 0.0)
        shared = "tp" if tp > 1 else None
        config = zeropp.Config(stage=stage, precision="bf16", experts=zeropp.Experts(parallel=ep, shared_by=shared))
        said = zeropp.estimate(model, config, mesh={"dp": 16 // tp, "tp": tp})["cpu"]
        states = sum(said[kind] for kind in ("params", "grads", "master", "optimizer"))
        in_use = 2 * (facts.parameters - facts.of_experts) / tp / 48 + 2 * facts.of_experts / ep / 48  # of a layer
        formula = sum(held.values()) - (0 if stage == 1 else 2 * in_use) - (3 * in_use if stage == 3 else 0)
        assert formula == pytest.approx(states, rel=WITHIN), (stage, tp, ep)


@pytest.mark.parametrize(
    ("model", "keywords", "sentence"),
    [
        (big(80, 8192, 64, 28672), {"memory": 8e9}, "nothing fits on 8 ranks; the nearest is"),
        (nn.Linear(2, 2), {}, "Linear has no num_hidden_layers"),
        (big(32, 4096, 32, 14336), {"links": {"wire": 3.0}}, "links has 'wire'; wanted host, network"),
        (big(32, 4096, 32, 14336), {"links": {"netwrk": 3.0}}, "did you mean 'network'"),
        (
            big(32, 4096, 32, 14336),
            {"links": {"network": "fast"}},
            "links['network'] 'fast' is not allowed; wanted a number",
        ),
        (big(32, 4096, 32, 14336), {"links": 3.0}, "links 3.0 is not allowed; wanted numbers by name"),
        (big(32, 4096, 32, 14336), {"memory": "80GB"}, "memory '80GB' is not allowed; wanted a number above 0"),
        (big(32, 4096, 32, 14336), {"host_memory": 0}, "host_memory 0 is not allowed; wanted a number above 0"),
        (big(32, 4096, 32, 14336), {"hosts": 3}, "8 ranks on 3 hosts; wanted as many on each"),
    ],
)
def test_refusals_of_layout(model: Any, keywords: dict[str, Any], sentence: str) -> None:
    with pytest.raises(zeropp.ConfigError, match=re.escape(sentence)):
        zeropp.layout(model, **{"ranks": 8, "sequence": 8192, "batch": 64, **H100, **keywords})


def test_the_command_line(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    big(4, 1024, 16, 4096).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["LlamaForCausalLM"]}))
    given = ["--ranks", "8", "--memory", "16", "--sequence", "4096", "--batch", "64", "--tflops", "100"]
    assert main(["layout", str(folder), *given]) == 0
    assert "chosen: compute" in capsys.readouterr().out
    assert main(["layout", str(folder), *given, "--json", "--links", "network=50"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["mesh"] == {"dp": 8}
    assert main(["layout", str(folder), *given, "--links", "network=fast"]) == 2
    assert "wanted 10^9 bytes a second" in capsys.readouterr().err
    assert main(["estimate", str(folder), "--mesh", "pp=2", "dp=4", "--micro-batches", "4"]) == 0
    assert "on 8 ranks; bytes of the fullest rank" in capsys.readouterr().out


def test_the_example_of_the_documentation() -> None:
    """The block of docs/parallel.md runs as it stands, and prints a mesh, a stage and what the second layout lost by."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "parallel.md").read_text(encoding="utf-8")
    block = next(found for found in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "zeropp.layout(" in found)
    names: dict[str, Any] = {"zeropp": zeropp, "model": big(80, 8192, 64, 28672)}
    exec(block, names)
    chosen, second, *_ = names["found"]
    assert chosen.dp * chosen.sp * chosen.tp * chosen.pp == 64 and chosen.lost_by == ""
    assert re.search(r"[+-]", second.lost_by)
