# SPDX-License-Identifier: Apache-2.0
"""torch's pipeline schedules over ZeRO: two stages of two data ranks, against data parallelism alone and against plain torch."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import re
import tempfile
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zeropp
from pipelines import (
    BOUND,
    CLASSES,
    CLIP,
    MICRO,
    ROWS,
    WIDTH,
    Block,
    Run,
    adam,
    alone,
    batch,
    loss_of,
    mesh_of,
    net,
    plain,
    require_close,
)
from ranks import of_all_ranks, on_ranks
from tiny import sentence
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import UNSHARD
from zeropp.files.timeline import _hidden
from zeropp.parallel.cut import balanced
from zeropp.zero.engine import engine_of
from zeropp.zero.model.parameter import PartitionedParameter
from zeropp.zero.model_state import SHARD

HELD = {"host_copy": "off"}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("1F1B", {"stage": 3, **HELD}),
        ("Interleaved1F1B", {"stage": 2}),
        pytest.param("GPipe", {"stage": 1}, marks=pytest.mark.slow),
        pytest.param("GPipe", {"stage": 3}, marks=pytest.mark.slow),
        pytest.param("1F1B", {"stage": 2}, marks=pytest.mark.slow),
        pytest.param("Interleaved1F1B", {"stage": 3, **HELD}, marks=pytest.mark.slow),
    ],
)
@on_ranks(4)
def test_same_bits(name: str, options: dict[str, Any]) -> None:
    """20 clipped steps in fp32 equal data parallelism alone, with as many micro-steps as there are micro-batches."""
    mesh = mesh_of(2, 2)
    wanted, norms = alone(mesh, 20, **options)
    found, own_norms = Run(mesh, name, **options).train(20)
    rel = (
        1e-12 if torch.get_default_device().type == "cpu" else 1e-6
    )  # sums of squares in fp64, of which GPUs return fp32
    assert [float(norm) for norm in own_norms] == pytest.approx([float(norm) for norm in norms], rel=rel)
    names = of_all_ranks(list(found))
    assert sorted({one for listed in names for one in listed}) == sorted(wanted), names
    assert all(torch.equal(values, wanted[key]) for key, values in found.items())


SCHEDULES = ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
_plain = functools.cache(plain)


def _pairwise(name: str, stage: int, reduce: str, host_copy: str) -> bool:
    """True for a quarter of the cases, in which any two values of different options meet."""
    number = SCHEDULES.index(name)
    return (reduce == "each") == bool((number + stage) % 2) and (host_copy == "off") == bool(
        (number // 2 + (stage == 2)) % 2
    )


CROSSED = [
    pytest.param(*case, marks=() if _pairwise(*case) else pytest.mark.slow)
    for case in [*itertools.product(SCHEDULES, (1, 2, 3), ("last", "each"), ("auto", "off"))]
]


@pytest.mark.parametrize(
    ("name", "stage", "reduce", "host_copy"),
    [*CROSSED, pytest.param("1F1B", 0, "each", "auto", marks=pytest.mark.slow)],
)
@on_ranks(4)
def test_schedules(name: str, stage: int, reduce: str, host_copy: str) -> None:
    """All schedules, of which some add gradients in another order, under each stage, reduction and holding."""
    micro = 8 if name == "DualPipeV" else MICRO
    wanted, norms = _plain(3, 2, micro)
    found, own_norms = Run(mesh_of(2, 2), name, micro, reduce, stage=stage, host_copy=host_copy).train(3)
    assert own_norms == pytest.approx(norms, rel=1e-5)
    require_close(found, wanted, BOUND)


@pytest.mark.parametrize(("name", "stage"), [("1F1B", 2), ("InterleavedZeroBubble", 3)])
@on_ranks(2)
def test_without_data_ranks(name: str, stage: int) -> None:
    """Each stage is on one rank, where gradients stay in p.grad."""
    wanted, norms = plain(4, 1)
    found, own_norms = Run(mesh_of(2, 1), name, stage=stage).train(4)
    assert own_norms == pytest.approx(norms, rel=1e-5)
    require_close(found, wanted, BOUND)


@on_ranks(2)
def test_stages_keep_the_model() -> None:
    """A script may drop what prepare returned, and keep the schedule and the optimizer."""
    run = Run(mesh_of(2, 1), "1F1B", stage=3)
    engine = weakref.ref(engine_of(run.chunks))
    del run.chunks
    gc.collect()
    for step in range(2):
        run.forward_backward(step)
        run.optimizer.step()
        run.optimizer.zero_grad()
    del run
    gc.collect()
    assert engine() is None


@on_ranks(2)
def test_losses_and_accumulation() -> None:
    """The mean and the sum over micro-batches, by torch's flag or by ours; and two steps of the schedule for one of the optimizer."""
    mesh = mesh_of(2, 1)
    gradients = []
    for loss, flag, loss_fn in (
        (None, True, loss_of), ("mean", False, loss_of), ("sum", True, lambda o, t: loss_of(o, t) / MICRO),
        (None, False, lambda o, t: loss_of(o, t) / MICRO),
    ):  # fmt: skip
        run = Run(mesh, "GPipe", loss=loss, scale_grads=flag, loss_fn=loss_fn, stage=2)
        run.forward_backward(0)
        gradients.append(run.optimizer.clip_grad_norm_(1e9))
    assert gradients == pytest.approx([gradients[0]] * 4, rel=1e-5), gradients
    wanted, _ = plain(1, 2)  # its two data ranks are the two steps here
    run = Run(mesh, "1F1B", stage=2, accumulate=2)
    for rows in range(2):
        x, y = batch(0, rows)
        run.schedule.step(*((x,) if run.stages[0].is_first else ()), target=y if run.stages[0].is_last else None)
        run.optimizer.clip_grad_norm_(CLIP)
        run.optimizer.step()
        run.optimizer.zero_grad()
    require_close(zeropp.full_state_dict(run.chunks), wanted, BOUND)


@on_ranks(2)
def test_loss_scale() -> None:
    """fp16: the last stage scales its loss, and all stages skip a step together and lower the scale."""
    run = Run(mesh_of(2, 1), "1F1B", stage=2, precision="fp16", loss_scale=zeropp.LossScale(init=2.0**40))
    scales = []
    for step in range(3):
        run.forward_backward(step)
        run.optimizer.step()
        scales.append(run.optimizer.loss_scale)
        run.optimizer.zero_grad()
    assert scales[0] < 2.0**40, scales
    assert of_all_ranks(scales) == [scales] * 2


@pytest.mark.parametrize("name", ["1F1B", "DualPipeV", pytest.param("ZBVZeroBubble", marks=pytest.mark.slow)])
@on_ranks(2)
def test_evaluation(name: str) -> None:
    """torch itself runs the backwards of an evaluation, too, in which those of ZBV and DualPipeV fail."""
    run = Run(mesh_of(2, 1), name, stage=3)
    wanted, _ = plain(2, 1)
    for step in range(2):
        x, y = batch(0, 0)
        first, last = (any(getattr(one, kind) for one in run.stages) for kind in ("is_first", "is_last"))
        weights = zeropp.full_state_dict(run.chunks)
        output = run.schedule.eval(*((x,) if first else ()), target=y if last else None)
        if last and step == 0:
            assert torch.allclose(output, net()(x), atol=1e-6)
        assert all(torch.equal(weights[name], one) for name, one in zeropp.full_state_dict(run.chunks).items())
        run.forward_backward(step)
        run.optimizer.clip_grad_norm_(CLIP)
        run.optimizer.step()
        run.optimizer.zero_grad()
    require_close(zeropp.full_state_dict(run.chunks), wanted, BOUND)


def compiled_net() -> nn.Sequential:
    model = net()
    for layer in model:
        layer.compile(backend="aot_eager")
    return model


@pytest.mark.parametrize(
    ("name", "stage", "when"),
    [
        ("1F1B", 3, "before"),
        ("Interleaved1F1B", 2, "after"),
        pytest.param("GPipe", 3, "after", marks=pytest.mark.slow),
        pytest.param("LoopedBFS", 1, "before", marks=pytest.mark.slow),
        pytest.param("1F1B", 3, "after", marks=pytest.mark.slow),
    ],
)
@on_ranks(4)
def test_compiled_layers(name: str, stage: int, when: str) -> None:
    """Compiled before and after prepare: weights and norms of one process."""
    wanted, norms = _plain(3, 2, MICRO)
    run = Run(mesh_of(2, 2), name, build=compiled_net if when == "before" else net, stage=stage)
    for layer in (one for chunk in run.chunks for one in chunk if when == "after"):
        layer.compile(backend="aot_eager")
    found, own_norms = run.train(3)
    assert own_norms == pytest.approx(norms, rel=1e-5)
    require_close(found, wanted, BOUND)


@pytest.mark.parametrize("name", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
@on_ranks(2)
def test_compiled_layers_are_refused_where_backwards_are_split(name: str) -> None:
    """On every rank before anything is sent. A compiled backward gives gradients of inputs and of weights at once."""
    for build in (compiled_net, net):
        run = Run(mesh_of(2, 1), name, build=build, stage=2)
        if build is net:
            list(run.chunks[1])[-2].compile(backend="eager")
        told = sentence(lambda run=run: run.forward_backward(0), zeropp.ConfigError)
        assert "is compiled, and the schedule splits backwards" in told and "use ScheduleGPipe, Schedule1F1B" in told, (
            told
        )
    of_all_ranks(None)


@on_ranks(2)
def test_batches_of_another_size_are_refused() -> None:
    """Before anything is sent, so that a batch of the right size trains on."""
    run = Run(mesh_of(2, 1), "1F1B", stage=2)
    had = rf"the first one of the schedule had \({ROWS}, {WIDTH}\)"
    for rows, shape in ((MICRO * ROWS - 1, (ROWS - 1, WIDTH)), (MICRO * ROWS + MICRO, (ROWS + 1, WIDTH))):
        if run.stages[0].is_first:
            with pytest.raises(zeropp.ConfigError, match=re.escape(f"of 4 has inputs of shapes {shape}") + f".*{had}"):
                run.schedule.step(torch.zeros(rows, WIDTH))
        run.train(1)


@on_ranks(2)
def test_refusals() -> None:
    mesh = mesh_of(2, 1)
    kind = torch_schedules.Schedule1F1B
    rank = mesh.get_local_rank("pp")
    told = sentence(lambda: Run(mesh, "1F1B", stage=2, step_in_backward=True), zeropp.ConfigError)
    assert "Config.step_in_backward" in told and "leave it out" in told, told
    chunks = zeropp.parallel.cut(net(), mesh["pp"], kind)
    told = sentence(lambda: zeropp.parallel.stages(chunks, mesh["pp"]), zeropp.ConfigError)
    assert "was not prepared" in told, told
    chunks, _ = zeropp.prepare(chunks, adam(chunks), zeropp.Config(stage=2), mesh=mesh)
    (stage,) = zeropp.parallel.stages(chunks, mesh["pp"])
    told = sentence(lambda: zeropp.parallel.pipeline(stage), zeropp.ConfigError)
    assert "wanted one of torch.distributed.pipelining's schedules" in told, told
    x = torch.randn(ROWS, WIDTH)
    told = sentence(lambda: chunks[0](x).sum().backward(), Exception)
    assert "outside of an adopted schedule" in told and "zeropp.parallel.pipeline" in told, told
    told = sentence(lambda: stage.backward_maybe_with_nosync("full", {}), zeropp.Error)
    assert f"pipeline stage {rank}" in told and "zeropp.parallel.pipeline(schedule)" in told, told
    schedule = zeropp.parallel.pipeline(kind(stage, MICRO, loss_fn=loss_of))
    told = sentence(lambda: zeropp.parallel.pipeline(schedule), zeropp.ConfigError)
    assert "adopted already" in told, told
    with pytest.raises(zeropp.Error, match="ran 0 backwards of 4 micro-batches"), schedule._zeropp.run(MICRO):
        pass
    told = sentence(lambda: zeropp.prepare(net(), None, zeropp.Config(stage=2), mesh=mesh), zeropp.ConfigError)
    assert "parameter '0.weight' is on ranks 0 and 1 of the pipeline" in told, told
    told = sentence(lambda: zeropp.parallel.cut(Block(), mesh["pp"], kind), zeropp.ConfigError)
    assert "Block has no plan" in told, told


def test_calls_out_of_turn() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    model, _ = zeropp.prepare(model, adam(model), zeropp.Config(stage=2))
    core = engine_of(model).core
    with pytest.raises(zeropp.Error, match="no pass is open"):
        core.pass_graph(bytes(1), 1)
    core.pass_open(False, 1)
    with pytest.raises(zeropp.Error, match="was not announced"):
        core.pass_take()
    core.pass_abort()


def test_balance() -> None:
    assert balanced([1] * 8, 0, 0, 4) == [0, 2, 4, 6, 8]
    assert balanced([1] * 8, 4, 0, 2) == [0, 2, 8]
    assert balanced([1, 1, 1, 9], 0, 0, 3) == [0, 1, 3, 4]
    told = sentence(lambda: balanced([1], 0, 0, 2), zeropp.ConfigError)
    assert "1 layer" in told and "2 stages" in told, told


SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name"),
    [("Llama", "1F1B"), ("Qwen3", "Interleaved1F1B"), pytest.param("Gemma3Text", "1F1B", marks=pytest.mark.slow)],
)
@on_ranks(2)
def test_transformers(kind: str, name: str) -> None:
    """Models as they are, with left padding that differs by micro-batch, in every stage's own mask."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(**SMALL)

    def build() -> Any:
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config).train()

    def loss_of_logits(logits: Tensor, ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    mesh, schedule = mesh_of(2, 1), getattr(torch_schedules, f"Schedule{name}")
    ids = torch.randint(1, 64, (MICRO * ROWS, 12), generator=torch.Generator().manual_seed(7))
    mask = torch.ones_like(ids)
    mask[1, :3] = mask[4, :5] = 0
    whole = build()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    for rows, kept in zip(ids.chunk(MICRO), mask.chunk(MICRO), strict=True):
        logits = whole(input_ids=rows, attention_mask=kept, use_cache=False).logits
        (loss_of_logits(logits, rows) / MICRO).backward()
    optimizer.step()
    chunks = zeropp.parallel.cut(build(), mesh["pp"], schedule)
    chunks, optimizer = zeropp.prepare(
        chunks, torch.optim.SGD(chunks.parameters(), lr=0.1), zeropp.Config(stage=3), mesh=mesh
    )
    stages = zeropp.parallel.stages(chunks, mesh["pp"])
    run = zeropp.parallel.pipeline(schedule(stages if len(stages) > 1 else stages[0], MICRO, loss_fn=loss_of_logits))
    last = any(stage.is_last for stage in stages)
    run.step(
        *((ids,) if any(stage.is_first for stage in stages) else ()), target=ids if last else None, attention_mask=mask
    )
    optimizer.step()
    require_close(zeropp.full_state_dict(chunks), whole.state_dict(), 1e-6)


@on_ranks(2)
def test_hooks_that_would_be_left_out_are_refused() -> None:
    """A split backward runs no hooks."""
    run = Run(mesh_of(1, 2), "1F1B", stage=2)
    chunk = run.schedule._zeropp.chunks[0]
    chunk._refuse_hooks()
    next(run.chunks.parameters()).register_post_accumulate_grad_hook(lambda _: None)
    told = sentence(chunk._refuse_hooks, zeropp.ConfigError)
    assert "parameter '0.weight' has a hook" in told and "use ScheduleGPipe, Schedule1F1B" in told, told


def _double(parameter: Any) -> None:
    parameter.grad.mul_(2.0)


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
@on_ranks(2)
def test_hooks_see_one_micro_batch(stage: int) -> None:
    """One rank a stage, where gradients add up in p.grad, and two data ranks: a hook that doubles a gradient doubles each once."""
    for mesh in (mesh_of(2, 1), mesh_of(1, 2)):
        run = Run(mesh, "1F1B", stage=stage)
        hooked = Run(mesh, "1F1B", stage=stage)
        for parameter in hooked.chunks.parameters():
            parameter.register_post_accumulate_grad_hook(_double)
        norms = []
        for one in (run, hooked):
            one.forward_backward(0)
            norms.append(one.optimizer.clip_grad_norm_(CLIP))
        assert norms[1] == pytest.approx(2 * norms[0], rel=1e-6)


@pytest.mark.parametrize("name", ["1F1B", pytest.param("Interleaved1F1B", marks=pytest.mark.slow)])
@on_ranks(4, backend="zeropp")
def test_reductions_run_in_waits(name: str) -> None:
    """Sums of gradients run while this rank waits: for messages of other stages, or before the norm. Those of the last stage, whose
    backwards end first, cost nothing while the first stage is busy."""
    run = Run(mesh_of(2, 2), name, stage=2)
    run.train(1)  # torch finds out shapes first
    for stage in run.stages if run.stages[0].is_first else []:
        stage.submod.register_full_backward_hook(lambda *_: time.sleep(0.05))
    with tempfile.TemporaryDirectory() as folder:
        with zeropp.trace(f"{folder}/trace.json") as trace:
            run.train(2)
        written = json.loads(trace.file.read_text())
    spans = [event for event in written["traceEvents"] if event.get("cat") in ("reduce", "wait")]
    sums = [event for event in spans if event["cat"] == "reduce"]
    waits = [event for event in spans if event["cat"] == "wait"]
    assert len(sums) >= 2 * len([unit for unit in engine_of(run.chunks).units if unit.trainable])
    for one in sums:
        end = one["ts"] + one["dur"]
        assert any(wait["ts"] <= one["ts"] and end <= wait["ts"] + wait["dur"] for wait in waits), one
    assert {"for a receive", "for reductions"} <= {one["name"] for one in spans}
    least = 0.9 if run.stages[-1].is_last else 0.0
    assert least <= written["otherData"]["reductions_hidden"] <= 1.0
    assert [one for one in waits if one["name"] == "for the other ranks"]


def deep() -> nn.Sequential:
    """Return a net of which every chunk has several blocks, whose units are cut over the ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(10)), nn.Linear(WIDTH, CLASSES))


@on_ranks(4)
def test_gathers_follow_the_schedule() -> None:
    """Stage 3 without a shared copy: a chunk is gathered once for each UNSHARD, or for each micro-batch, forward and backward."""
    bits = []
    for gather in (None, "use"):
        run = Run(mesh_of(2, 2), "Interleaved1F1B", gather=gather, build=deep, stage=3, prefetch=0, **HELD)
        run.train(1)  # torch finds out shapes first
        with tempfile.TemporaryDirectory() as folder:
            with zeropp.trace(f"{folder}/trace.json") as trace:
                run.train(1)
            events = json.loads(trace.file.read_text())["traceEvents"]
        actions = run.schedule.pipeline_order_with_comms[run.mesh.get_local_rank("pp")]
        units = [unit for unit in engine_of(run.chunks).units if unit.place == SHARD]
        wanted = 0
        for stage in run.stages:
            own = sum(any(e.param is p for e in unit.params for p in stage.submod.parameters()) for unit in units)
            unshards = sum(a.computation_type == UNSHARD and a.stage_index == stage.stage_index for a in actions)
            wanted += own * (unshards if gather is None else 2 * MICRO)
            assert own and unshards
        assert len([event for event in events if event.get("cat") == "gather"]) == wanted
        run.train(1)
        assert all(type(e.param) is PartitionedParameter for unit in units for e in unit.params)
        x, y = batch(0, 0)
        last = any(stage.is_last for stage in run.stages)
        run.schedule.eval(*((x,) if run.stages[0].is_first else ()), target=y if last else None)
        bits.append(zeropp.full_state_dict(run.chunks))
    assert all(torch.equal(values, bits[1][name]) for name, values in bits[0].items())


@on_ranks(4)
def test_bytes_of_gradients() -> None:
    """`reduce="each"` holds 1/N of the chunk's gradients and a bucket between micro-batches; `"last"` holds all of them."""
    held: dict[str, list[dict[str, int]]] = {}
    for reduce in ("each", "last"):
        run = Run(mesh_of(2, 2), "1F1B", reduce=reduce, stage=2, bucket_bytes=1 << 12)
        chunk, seen = run.schedule._zeropp.chunks[0], held.setdefault(reduce, [])
        core = engine_of(run.chunks).core
        original = chunk.backward

        @contextlib.contextmanager
        def backward(
            kind: str, last: bool, inner: Any = original, core: Any = core, seen: Any = seen
        ) -> Iterator[None]:
            with inner(kind, last):
                yield
            seen.append(core.memory())

        chunk.backward = backward
        run.forward_backward(0)
        whole = sum(unit.elems for unit in engine_of(run.chunks).units) * 4
        shards = sum(unit.shard_elems for unit in engine_of(run.chunks).units) * 4
        largest = max(unit.elems * 4 + len(unit.params) for unit in engine_of(run.chunks).units)
        assert len(seen) == MICRO and shards == whole // 2
        for one in seen:
            assert one["grads"] == shards
            if reduce == "each":
                assert one["buckets_peak"] <= max(1 << 12, largest) + 64 < whole
            else:
                assert one["buckets"] >= whole


def test_hidden_share() -> None:
    """A sum inside a wait for a message is hidden; one that was waited for is, as far as this rank waits for others afterwards."""
    message = [("wait", "for a receive", 1, 0, 100, 0), ("reduce", "a", 1, 10, 50, 0)]
    assert _hidden(message) == 1.0
    waited = [("wait", "for reductions", 1, 0, 100, 0), ("reduce", "a", 1, 10, 50, 0)]
    assert _hidden(waited) == 0.0
    assert _hidden([*waited, ("wait", "for the other ranks", 1, 100, 110, 0)]) == 0.25
    others = [("wait", "for the other ranks", 1, 100, 110, 0), ("wait", "until all ranks step", 1, 120, 900, 0)]
    assert _hidden([*waited, *others]) == 1.0
    assert _hidden([("reduce", "a", 1, 10, 50, 0), *others]) == 0.0
    assert _hidden([*message, ("reduce", "b", 2, 10, 50, 0)]) == 0.5
    assert _hidden(others) is None
