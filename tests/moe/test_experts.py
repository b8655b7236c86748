# SPDX-License-Identifier: Apache-2.0
"""``Config(experts=)``: losses and gradients of transformers' models against one process on the joined batch, in any layout."""

from __future__ import annotations

import re
import shutil
import tempfile
from typing import Any

import moe_models
import pytest
import torch
import zeropp
from expert_parity import BOUND, compare, parity, reference
from moe_models import batch, loss_of
from ranks import of_all_ranks, on_cpu_only, on_ranks, shards_tier
from tiny import refused_step
from torch import Tensor

MODELS = ("Mixtral", "Qwen3Moe", "GptOss", "DeepseekV3", "NemotronH")


@on_ranks(1, 2)
@pytest.mark.parametrize(
    "stage", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow), 3]
)
def test_slices_equal_one_process(stage: int, ranks: int) -> None:
    """Each expert in two slices, all of them on every rank."""
    parity("Mixtral", zeropp.Experts(parallel=1, slices=2), stage=stage)


@on_ranks(1)
@pytest.mark.parametrize("name", ["DeepseekV3", "NemotronH"])
@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_slices_of_other_models(name: str, implementation: str) -> None:
    parity(name, zeropp.Experts(parallel=1, slices=2), implementation)


@on_ranks(2)
def test_stock_expert_parallelism() -> None:
    """transformers' own expert parallelism over FSDP2, with zeropp's exchange: gradients of one process."""
    on_cpu_only("transformers makes its own group, which knows no simulated GPU")
    import transformers
    import zeropp.hf  # noqa: F401  registers the name
    from transformers.distributed import DistributedConfig

    rank = torch.distributed.get_rank()
    folders = of_all_ranks(tempfile.mkdtemp() if rank == 0 else None)
    if rank == 0:
        moe_models.build("Mixtral").save_pretrained(folders[0])
    torch.distributed.barrier()
    layout = DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation="zeropp")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folders[0], dtype=torch.float32, distributed_config=layout
    )
    torch.distributed.barrier()
    if rank == 0:
        shutil.rmtree(folders[0])
    losses, gradients, _ = reference("Mixtral", 2, steps=1)
    loss = loss_of(model.train(), batch(0, rank))
    loss.backward()
    assert abs(sum(of_all_ranks(loss.item())) / 2 - losses[0]) <= BOUND * losses[0]
    for path, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        compare(gradient.full_tensor(), gradients[0][path], path)


@on_ranks(2)
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_reads_and_writes(stage: int) -> None:
    """The model shows whole parameters without values; zeropp's functions have them whole."""
    plain = dict(moe_models.build("Mixtral").named_parameters())
    model = moe_models.build("Mixtral", "grouped_mm")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = zeropp.Config(stage=stage, experts=zeropp.Experts(parallel=1, slices=2))
    model, optimizer = zeropp.prepare(model, optimizer, config)
    path = "model.layers.0.mlp.experts.gate_up_proj"
    parameter = dict(model.named_parameters())[path]
    assert (
        parameter.shape == plain[path].shape and isinstance(parameter, torch.nn.Parameter) and path in repr(parameter)
    )
    for read in (
        lambda: parameter.sum(),
        lambda: parameter + 1,
        lambda: parameter.data,
        lambda: torch.cat([parameter]),
    ):
        with pytest.raises(zeropp.PartitionedParameterError, match=f"a part of parameter '{path}' alone"):
            read()
    with zeropp.gathered(parameter):
        assert torch.equal(parameter, plain[path])
    assert parameter.grad is None and zeropp.get_full(parameter, "grad") is None
    loss_of(model, batch(0, torch.distributed.get_rank())).backward()
    gradient = zeropp.get_full(parameter, "grad")
    with zeropp.gathered(parameter, grads=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0)
    optimizer.step()
    moment = zeropp.get_full(parameter, "exp_avg")
    assert moment is not None and gradient is not None
    torch.testing.assert_close(moment, gradient * 0.1)
    with zeropp.gathered(parameter, write=True):
        parameter.data.fill_(0.5)
    whole = zeropp.get_full(parameter)
    assert whole is not None and (whole == 0.5).all()
    zeropp.set_full(parameter, plain[path].detach())
    zeropp.load_full_state_dict(model, {name: one.detach() for name, one in plain.items()})
    for name, value in zeropp.full_state_dict(model).items():
        assert torch.equal(value, plain[name]), name


# -- experts on different ranks ------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("name", MODELS)
def test_models_equal_one_process(name: str) -> None:
    """Every model, two ranks with different experts."""
    parity(name, 2, stage=3)


LAYOUTS = {
    "4 of 4": 4, "2 of 4": 2, "1 of 4": 1, "more ranks than experts": zeropp.Experts(parallel=4, slices=2),
}  # fmt: skip


@on_ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_four_ranks(layout: str) -> None:
    parity("Mixtral", LAYOUTS[layout], "zeropp", stage=3)


@on_ranks(3)
@pytest.mark.parametrize("name", ["Mixtral", pytest.param("DeepseekV3", marks=pytest.mark.slow)])
def test_three_ranks(name: str) -> None:
    """No number of experts here divides by three; thirds of experts do where their width does."""
    if name == "Mixtral":
        parity(name, zeropp.Experts(parallel=3, slices=3), stage=2)
    parity(name, 1, stage=3)


PYRAMIDS = {
    "2 and 4": {"*.layers.0.*": 2, "*": 4}, "1 and 4": {"*.layers.0.*": 1, "*.layers.1.*": "auto"},
    "in one unit": {"model.layers.0.mlp.experts": 4, "*": 2},
}  # fmt: skip


@on_ranks(4)
@pytest.mark.parametrize("pyramid", PYRAMIDS)
def test_other_ranks_for_other_layers(pyramid: str) -> None:
    """PR-MoE: the ranks with the same experts are others in each layer, and still one step has one norm."""
    more: dict[str, Any] = {"units": 1 << 30} if pyramid == "in one unit" else {}
    for stage in (1, 3):
        parity("Mixtral", zeropp.Experts(parallel=PYRAMIDS[pyramid]), "zeropp", stage=stage, **more)


@pytest.mark.slow
@on_ranks(2, 4)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_every_stage(name: str, stage: int, implementation: str) -> None:
    parity(name, 2, implementation, stage=stage)


WAYS: dict[str, dict[str, Any]] = {
    "gather": {"host_copy": "off"}, "stage 0": {"stage": 0}, "stage 1": {"stage": 1}, "stage 2": {"stage": 2},
    "units": {"units": ("MixtralExperts",)},
}  # fmt: skip


@on_ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_ways(way: str) -> None:
    parity("Mixtral", 2, **WAYS[way])


def train(model: Any, batches: Any, **config: Any) -> tuple[Any, Any, float]:
    """Prepare a model, and take a backward on this rank's batch."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, optimizer = zeropp.prepare(model, optimizer, zeropp.Config(experts=2, **config))
    loss = batches(model)
    loss.backward()
    return model, optimizer, loss.item()


@on_ranks(2)
def test_experts_without_a_token() -> None:
    """The router sends all tokens to the experts of rank 1: rank 0's have gradients of zeros, as in one process."""
    rank = torch.distributed.get_rank()

    def build() -> Any:
        model = moe_models.build("GptOss", "grouped_mm")
        for layer in model.model.layers:
            layer.mlp.router.bias.data.copy_(torch.tensor([-50.0, -50.0, 50.0, 50.0]))
        return model

    plain = build()
    loss_of(plain, torch.cat([batch(0, r) for r in range(2)])).backward()
    model, _, _ = train(build(), lambda model: loss_of(model, batch(0, rank)))
    for (path, parameter), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert theirs.grad is not None
        compare(zeropp.get_full(parameter, "grad"), theirs.grad, path)
        if path.endswith("experts.down_proj"):
            assert not theirs.grad[:2].any()


@on_ranks(2)
def test_frozen_experts_padding_and_clipping() -> None:
    """Experts are frozen, ranks have batches of different lengths with padding, and the step is clipped."""
    rank = torch.distributed.get_rank()
    rows = [batch(0, 0, length=9), batch(0, 1, rows=1, length=5)]
    masks = [torch.ones_like(ids) for ids in rows]
    masks[0][0, :3] = 0

    def loss(model: Any, r: int) -> Tensor:
        logits = model(input_ids=rows[r], attention_mask=masks[r], use_cache=False).logits
        return (logits.float() * masks[r].unsqueeze(-1)).square().mean()

    def build() -> Any:
        model = moe_models.build("Mixtral", "grouped_mm")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("experts" not in name)
        return model

    plain = build()
    (sum(loss(plain, r) for r in range(2)) / 2).backward()  # type: ignore[attr-defined]
    wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
    model, optimizer, _ = train(build(), lambda model: loss(model, rank))
    assert abs(optimizer.clip_grad_norm_(1e-3) - wanted) <= BOUND * wanted
    for (path, parameter), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        gradient = zeropp.get_full(parameter, "grad")
        if theirs.grad is None:
            assert gradient is None, path
        else:
            compare(gradient, theirs.grad, path)


@on_ranks(2)
def test_generate_and_evaluate() -> None:
    """Ranks with prompts of their own generate together, what one process generates."""
    rank = torch.distributed.get_rank()
    prompt = batch(0, rank, rows=1, length=6)
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    wanted = moe_models.build("Mixtral").eval().generate(prompt, **how)
    model, _ = zeropp.prepare(moe_models.build("Mixtral", "grouped_mm").eval(), None, zeropp.Config(experts="auto"))
    assert torch.equal(model.generate(prompt, **how, synced_gpus=True), wanted)


@on_ranks(2)
def test_checkpoints_go_to_any_layout() -> None:
    """Saved by ranks with different experts, loaded with all experts in slices on every rank, and the other way round."""
    folder = of_all_ranks(tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else None)[0]
    pyramid = zeropp.Experts(parallel={"*.layers.1.*": 2, "*": 1})
    layouts: list[Any] = [
        2,
        zeropp.Experts(parallel=1, slices=2),
        None,
        zeropp.Experts(parallel=2, slices=2),
        pyramid,
        2,
    ]
    want: dict[str, Tensor] = {}
    for number, layout in enumerate(layouts):
        model = moe_models.build("Mixtral", "grouped_mm")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        config = zeropp.Config(stage=(3, 1, 0, 2, 3, 1)[number], experts=layout)
        model, optimizer = zeropp.prepare(model, optimizer, config)
        path = "model.layers.1.mlp.experts.down_proj"
        parameter = dict(model.named_parameters())[path]
        if number:
            zeropp.load(folder, model, optimizer)
            whole = zeropp.full_state_dict(model)
            assert [name for name, value in whole.items() if not torch.equal(want[name], value)] == []
            moment = zeropp.get_full(parameter, "exp_avg")
            assert moment is not None and torch.equal(moment, want["moment"])
        loss_of(model, batch(number, torch.distributed.get_rank())).backward()
        optimizer.step()
        zeropp.save(folder, model, optimizer, step=number)
        moment = zeropp.get_full(parameter, "exp_avg")
        assert moment is not None
        want = {**zeropp.full_state_dict(model), "moment": moment}
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(folder)


@on_ranks(2)
def test_states_and_gradients_on_disk() -> None:
    """The ranks with the same experts stream their gradients and states through files."""
    folder = of_all_ranks(tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else None)[0]
    parity("Mixtral", 2, offload=zeropp.Offload(grads="nvme", optimizer="nvme", path=folder))
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(folder)


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 2])
def test_errors_name_the_expert(stage: int) -> None:
    """A gradient that is not finite is named with the number that its expert has in the model, whoever has that expert.

    Sums on GPUs tell neither the expert nor the rank.
    """
    path, rank = "model.layers.1.mlp.experts.gate_up_proj", torch.distributed.get_rank()

    def spoil(gradient: Tensor, first: int) -> Tensor:
        gradient = gradient.clone()
        if 0 <= 3 - first < len(gradient):
            gradient[3 - first, -1, -1] = float("nan")
        return gradient

    for experts, more, who in (
        (1, {}, "rank 0 and rank 1 before the sum"),
        (2, {}, "rank 1 before the sum"),
        (zeropp.Experts(parallel=2, slices=2), {}, "rank 1 before the sum"),
        (2, {"step_in_backward": True}, "rank 1 before the sum"),
    ):
        if more and (stage == 0 or shards_tier() == "device"):
            continue
        model = moe_models.build("Mixtral", "grouped_mm")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = zeropp.Config(experts=experts, stage=stage, **more)
        model, optimizer = zeropp.prepare(model, optimizer, config)
        entry = next(e for unit in optimizer._engine.units for e in unit.params if e.names[0] == path)
        per_expert = 2 if isinstance(experts, zeropp.Experts) else 1
        first = 0 if experts == 1 else 2 * rank
        entry.param.register_hook(
            lambda g, first=first, n=per_expert: spoil(g.unflatten(0, (-1, n)), first).flatten(0, 1)
        )
        expected = (
            rf"'{path}\[3\]' \({who}\)" if shards_tier() == "cpu" else rf"'{path}' \(on some rank, or in the sum\)"
        )
        if not more:
            loss_of(model, batch(0, rank)).backward()
            assert re.search(expected, refused_step(optimizer))
            continue
        loss_of(model, batch(0, rank)).backward()
        with pytest.raises(zeropp.Error, match=expected if rank == 1 else "rank 1: .*not finite"):
            optimizer.step()
