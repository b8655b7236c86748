# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's pipelines, Ulysses and AutoTP by their names there, against one process on the joined batch."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from ranks import of_all_ranks, on_ranks
from torch import Tensor, nn
from zeropp import ConfigError
from zeropp.deepspeed import dimensions, pipeline
from zeropp.deepspeed.names.modules import initialize
from zeropp.deepspeed.pipeline import DualPipeVModule, LayerSpec, PipelineModule, TiedLayerSpec

WIDTH, MICRO, ROWS, STEPS = 16, 4, 3, 3
BOUND = 4e-6
"""Weights near 1 after three steps of lr 1e-2, whose gradients were added in another order: a few roundings of fp32, 2**-23 each."""


def settings(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": MICRO, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 1e-2}}, "gradient_clipping": 1.0, **more,
    }  # fmt: skip


def specs() -> list[Any]:
    blocks = [one for _ in range(3) for one in (LayerSpec(nn.Linear, WIDTH, WIDTH), torch.relu)]
    return [LayerSpec(nn.Linear, WIDTH, WIDTH), nn.LayerNorm(WIDTH), *blocks, LayerSpec(nn.Linear, WIDTH, 5)]


def batches(step: int, data_rank: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(10 * step + data_rank)
    one = lambda: (torch.randn(ROWS, WIDTH, generator=draw), torch.randint(0, 5, (ROWS,), generator=draw))  # noqa: E731
    return [one() for _ in range(MICRO)]


def one_process(copies: int) -> tuple[dict[str, Tensor], list[float]]:
    """Train all layers on the batches of all copies."""
    layers: list[Any] = []
    for index, layer in enumerate(specs()):
        torch.manual_seed(1234 + index)
        layers.append(layer.build() if isinstance(layer, LayerSpec) else layer)
    model = nn.ModuleDict({str(at): layer for at, layer in enumerate(layers) if isinstance(layer, nn.Module)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        every = [micro for place in range(copies) for micro in batches(step, place)]
        total = torch.zeros(())
        for x, label in every:
            for layer in layers:
                x = layer(x)
            total = total + nn.functional.cross_entropy(x, label) / len(every)
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return model.state_dict(), losses


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (3, {}),
        pytest.param(
            2, {"activation_checkpoint_interval": 2, "partition_method": "type:Linear"}, marks=pytest.mark.slow
        ),
        pytest.param(1, {"partition_method": "uniform"}, marks=pytest.mark.slow),
    ],
)
@on_ranks(4)
def test_a_pipeline_trains_as_one_process(stage: int, options: dict[str, Any]) -> None:
    model = PipelineModule(specs(), 2, loss_fn=nn.functional.cross_entropy, seed_layers=True, **options)
    assert 0 < len(model.forward_funcs) < len(specs()), "a rank builds its own stage"
    engine, *_ = initialize(model=model, config=settings(stage))
    assert engine.train_batch_size() == ROWS * MICRO * 2 and engine.dp_world_size == 2
    want, losses = one_process(2)
    place = dimensions.rank("dp")
    for step in range(STEPS):
        loss = engine.train_batch(iter(batches(step, place)))
        assert abs(loss.item() - losses[step]) < 1e-6 * losses[step]
    for name, value in zeropp.full_state_dict(model).items():
        assert float((value - want[name]).abs().max()) < BOUND, name
    loss = engine.eval_batch(iter(batches(7, place)))
    outputs, last = engine.eval_batch(
        iter(batches(7, place)), compute_loss=False, return_logits=True, reduce_output=None
    )
    assert len(set(of_all_ranks(loss.item()))) == 1
    assert (
        (len(outputs), tuple(last.shape)) == (MICRO, (ROWS, 5)) if engine.is_last_stage() else outputs is last is None
    )
    assert engine.global_steps == STEPS and not torch.is_inference(loss)
    with pytest.raises(ConfigError, match=re.escape("engine.train_batch(iterator)")):
        engine(torch.zeros(1, WIDTH))


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (3, {}),
        (2, {"activation_checkpoint_interval": 1}),
        pytest.param(1, {"partition_method": "uniform"}, marks=pytest.mark.slow),
    ],
)
@on_ranks(4)
def test_dual_pipe_v_trains_as_one_process(stage: int, options: dict[str, Any]) -> None:
    """Each of two ranks has a part from the front and one from the end; the first one has batches, labels and losses."""
    model = DualPipeVModule(specs(), 2, loss_fn=nn.functional.cross_entropy, seed_layers=True, **options)
    engine, *_ = initialize(model=model, config=settings(stage))
    first = dimensions.rank("pp") == 0
    assert (engine.is_first_stage(), engine.is_last_stage()) == (first, first)
    assert model.parts[0] == 0 and model.parts[-1] == len(specs()) and len(model.parts) == 5
    assert [model.stage_owner(layer) for layer in (0, len(specs()) - 1, model.parts[1], model.parts[2])] == [0, 0, 1, 1]
    want, losses = one_process(2)
    place = dimensions.rank("dp")
    for step in range(STEPS):
        loss = engine.train_batch(iter(batches(step, place)))
        assert abs(loss.item() - losses[step]) < 1e-6 * losses[step]
    found = zeropp.full_state_dict(model)
    assert {name for names in of_all_ranks(list(found)) for name in names} == set(want)
    for name, value in found.items():
        assert float((value - want[name]).abs().max()) < BOUND, name
    loss = engine.eval_batch(iter(batches(7, place)))
    outputs, last = engine.eval_batch(
        iter(batches(7, place)), compute_loss=False, return_logits=True, reduce_output=None
    )
    assert len(set(of_all_ranks(loss.item()))) == 1
    assert (len(outputs), tuple(last.shape)) == (MICRO, (ROWS, 5)) if first else outputs is last is None
    assert engine.global_steps == STEPS
    with pytest.raises(ConfigError, match=re.escape("engine.train_batch(iterator)")):
        engine(torch.zeros(1, WIDTH))
    with pytest.raises(ConfigError, match="3 micro-batches a step on 2 ranks of the pipeline; wanted at least 4"):
        engine.eval_batch(iter(batches(7, place)), num_micro_batches=3)


@on_ranks(2)
def test_dual_pipe_v_ties_the_first_part_to_the_last() -> None:
    """Both are on the first rank, which has one module for them, so their gradients add up there."""
    layers: list[Any] = [TiedLayerSpec("e", nn.Linear, WIDTH, WIDTH), nn.Tanh(), LayerSpec(nn.Linear, WIDTH, WIDTH),
                         TiedLayerSpec("e", nn.Linear, WIDTH, WIDTH)]  # fmt: skip
    options: dict[str, Any] = {"partition_method": "uniform", "loss_fn": nn.functional.mse_loss, "seed_layers": True}
    model = DualPipeVModule(layers, 2, **options)
    engine, *_ = initialize(model=model, config=settings(2))
    draw = torch.Generator().manual_seed(0)
    rows = [(torch.randn(ROWS, WIDTH, generator=draw), torch.randn(ROWS, WIDTH, generator=draw)) for _ in range(MICRO)]
    torch.manual_seed(1234)
    ends = nn.Linear(WIDTH, WIDTH)
    torch.manual_seed(1236)
    middle = nn.Linear(WIDTH, WIDTH)
    whole = nn.ModuleList([ends, middle])
    optimizer = torch.optim.SGD(whole.parameters(), lr=1e-2)
    loss = sum(nn.functional.mse_loss(ends(middle(torch.tanh(ends(x)))), y) for x, y in rows) / MICRO
    loss.backward()
    torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
    optimizer.step()
    assert engine.train_batch(iter(rows)).item() == pytest.approx(loss.item(), rel=1e-6)
    found = zeropp.full_state_dict(model)
    if engine.is_first_stage():
        torch.testing.assert_close(found["tied_modules.e.weight"], ends.weight.detach(), rtol=0, atol=BOUND)
    else:
        torch.testing.assert_close(found["2.weight"], middle.weight.detach(), rtol=0, atol=BOUND)


@pytest.mark.parametrize("case", ["a tied key", "too many stages", "an axis", "a method", "a section", "a shape"])
@on_ranks(2)
def test_what_a_pipeline_refuses(case: str) -> None:
    several = PipelineModule if case != "an axis" else None
    layers: list[Any] = specs()
    options: dict[str, Any] = {"num_stages": 2}
    if case == "a tied key":
        layers = [TiedLayerSpec("e", nn.Linear, WIDTH, WIDTH), torch.relu, TiedLayerSpec("e", nn.Linear, WIDTH, WIDTH)]
        model = PipelineModule(layers, 2, partition_method="uniform")
        assert list(model.state_dict()) == ["tied_modules.e.weight", "tied_modules.e.bias"]
        return
    sentence, options = {
        "too many stages": ("1 layer for 2 stages", {"num_stages": 2, "layers": layers[:1]}),
        "an axis": ("wanted PipeDataParallelTopology", {"topology": pipeline.PipeModelDataParallelTopology(1, 2, 1)}),
        "a method": ("'parameters', 'uniform' or 'type:REGEX'", {"num_stages": 2, "partition_method": "profile"}),
        "a section": ("pipeline.stages: 4 is not supported", {"num_stages": 2}),
        "a shape": ("dynamic_shape is not supported", {"num_stages": 2, "dynamic_shape": True}),
    }[case]
    assert several is None or several is PipelineModule
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        model = PipelineModule(**{"layers": layers, **options})
        initialize(model=model, config=settings(2, pipeline={"stages": 4}))


def _reference(family: str, whole: dict[str, Any]) -> tuple[Any, float]:
    import cut_models

    model = cut_models.model(family, 4, 2, "sdpa")
    loss = model(**whole).loss
    loss.backward()
    return model, loss.item()


@pytest.mark.parametrize("how", ["registered", pytest.param("in the file", marks=pytest.mark.slow)])
@on_ranks(2)
def test_ulysses_by_deepspeeds_names(how: str) -> None:
    """The recipe of DeepSpeed's documentation: an adapter of the loader, and a loss that is weighted over the ranks by the script."""
    import cut_models
    from torch.distributed.nn.functional import all_gather

    samples = [cut_models.batch("packed" if at else "plain", seed=at, rows=1) for at in range(2)]
    want, loss_of_one = _reference("llama", samples[0])
    mpu = None
    keys = settings(3, gradient_accumulation_steps=1, gradient_clipping=0.0)
    if how == "registered":
        mpu = dimensions.UlyssesSPAttentionHF.register_with_transformers("any", "sdpa", 2, 1, disable_in_eval=True)
    else:
        keys["sequence_parallel_size"] = 2
    model = cut_models.model("llama", 4, 2, "sdpa")
    engine, *_ = initialize(model=model, config=keys, mpu=mpu)
    assert (dimensions.size("sp"), dimensions.size("dp"), engine.train_batch_size()) == (2, 1, ROWS)
    own = [samples[dist.get_rank()]]
    loader = dimensions.UlyssesSPDataLoaderAdapter(own, dimensions.rank("sp"), dimensions.group("sp"), 2, "cpu")
    parts = list(loader)
    assert len(loader) == len(parts) == 2 and "labels" not in parts[0]
    assert torch.equal(parts[1]["position_ids"], samples[1]["position_ids"][:, dimensions_slice(cut_models.TOKENS)])
    part = parts[0]
    logits = engine(**part).logits
    counted = part["shift_labels"] != -100
    loss = nn.functional.cross_entropy(logits[counted].float(), part["shift_labels"][counted], reduction="sum")
    loss = loss / max(int(counted.sum()), 1)  # the mean of this rank's tokens, as a model gives it
    tokens = all_gather(counted.sum().float())
    weighted = sum(one * count for one, count in zip(all_gather(loss), tokens, strict=True)) / sum(tokens)
    engine.backward(weighted)
    assert abs(weighted.item() - loss_of_one) < 2e-6 * loss_of_one
    for (name, ours), (_, theirs) in zip(model.named_parameters(), want.named_parameters(), strict=True):
        gradient = zeropp.get_full(ours, "grad")
        assert float((gradient - theirs.grad).abs().max()) < 1e-6, name
    if how == "registered":
        model.eval()
        with torch.no_grad():
            logits = model(input_ids=samples[0]["input_ids"]).logits
        assert logits.shape[1] == cut_models.TOKENS


def dimensions_slice(tokens: int) -> slice:
    rank = dist.get_rank()
    return slice(tokens * rank // 2, tokens * (rank + 1) // 2)


@pytest.mark.parametrize("gather_idx", [0, 1])
@on_ranks(2)
def test_attention_of_ones_own(gather_idx: int) -> None:
    dimensions.initialize_sequence_parallel(2)
    draw = torch.Generator().manual_seed(3)
    whole = [torch.randn(2, 12, 4, 8, generator=draw) for _ in range(3)]  # (batch, tokens, heads, width)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        order = (1, 2, 0, 3) if gather_idx == 0 else (0, 2, 1, 3)
        q, k, v = (one.permute(order) for one in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.permute(2, 0, 1, 3).flatten(2) if gather_idx == 0 else out.permute(0, 2, 1, 3)

    laid = [one.transpose(0, 1) if gather_idx == 0 else one for one in whole]
    want = attention(*laid)
    rank = dist.get_rank()
    own = [one.narrow(gather_idx, 6 * rank, 6) for one in laid]
    found = dimensions.DistributedAttention(attention, dimensions.group("sp"), 2, gather_idx)(*own, 1 - gather_idx)
    want = want.flatten(2).narrow(gather_idx, 6 * rank, 6)
    assert torch.equal(found, want)


@pytest.mark.parametrize(("stage", "given"), [(3, "the file"), pytest.param(2, "an optimizer", marks=pytest.mark.slow)])
@on_ranks(4)
def test_tensor_parallelism_in_the_file(stage: int, given: str) -> None:
    import cut_models

    keys = settings(stage, gradient_accumulation_steps=1, gradient_clipping=0.0, tensor_parallel={"autotp_size": 2})
    model = cut_models.model("llama", 4, 2, "sdpa")
    single = copy.deepcopy(model)
    optimizer = None
    if given == "an optimizer":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        del keys["optimizer"]
    engine, *_ = initialize(model=model, optimizer=optimizer, config=keys)
    place = dimensions.rank("dp")
    assert (engine.autotp_size(), engine.dp_world_size, engine.get_data_parallel_rank()) == (2, 2, place)
    engine.backward(engine(**cut_models.batch("plain", seed=place)).loss)
    engine.step()
    sgd = torch.optim.SGD(single.parameters(), lr=1e-2)
    for seed in range(2):
        (single(**cut_models.batch("plain", seed=seed)).loss / 2).backward()
    sgd.step()
    want = single.state_dict()
    for name, value in zeropp.full_state_dict(model).items():
        assert float((value - want[name]).abs().max()) < BOUND, name


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"sequence_parallel_size": 3}, "sp 3, of a job of 2 ranks; wanted a divisor"),
        ({"tensor_parallel": {"autotp_size": 2, "tp_grain_size": 8}}, "tensor_parallel.tp_grain_size: unknown key"),
        ({"sequence_parallel_size": "two"}, "wanted a whole number"),
    ],
)
@on_ranks(2)
def test_sizes_that_cannot_be(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        initialize(model=nn.Linear(4, 4), config=settings(3, **keys))
