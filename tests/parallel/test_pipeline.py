# SPDX-License-Identifier: Apache-2.0
"""torch's pipeline schedules over ZeRO: two stages of two data ranks, against data parallelism alone and against plain torch."""

from __future__ import annotations

import json
import tempfile
from typing import Any

import pytest
import torch
import zeropp
from ranks import of_all_ranks, on_ranks
from tiny import sentence
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import schedules as torch_schedules
from zeropp.comm.job import JobRanks, over
from zeropp.parallel.cut import balanced
from zeropp.parallel.mesh import ranks_along
from zeropp.zero.engine import engine_of
from zeropp.zero.prepare import prepare_over

MICRO, ROWS, WIDTH, CLASSES, CLIP = 4, 2, 16, 20, 0.1
BOUND = 2e-5
"""A step of AdamW moves a weight by about lr = 1e-3; where a gradient is near zero, its rounding turns up in that move."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(6)), nn.Linear(WIDTH, CLASSES))


def batch(step: int, data_rank: int, micro: int = MICRO) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + data_rank)
    rows = micro * ROWS
    return torch.randn(rows, WIDTH, generator=draw), torch.randint(0, CLASSES, (rows,), generator=draw)


loss_of = nn.functional.cross_entropy


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def alone(mesh: DeviceMesh, steps: int, **options: Any) -> tuple[dict[str, Tensor], list[float]]:
    """Return weights and norms of data parallelism alone, which the data ranks of each stage run for themselves."""
    ranks = JobRanks(over(ranks_along(mesh, ("dp",))).data)
    model = net()
    model, optimizer = prepare_over(ranks, model, adam(model), zeropp.Config(accumulate=MICRO, **options))
    norms = []
    for step in range(steps):
        x, y = batch(step, mesh.get_local_rank("dp"))
        for rows, classes in zip(x.chunk(MICRO), y.chunk(MICRO), strict=True):
            loss_of(model(rows), classes).backward()
        norms.append(optimizer.clip_grad_norm_(CLIP))
        optimizer.step()
        optimizer.zero_grad()
    return zeropp.full_state_dict(model), norms


def plain(steps: int, data_ranks: int, micro: int = MICRO) -> tuple[dict[str, Tensor], list[float]]:
    """Return weights and norms of one process on the joined batch."""
    model = net()
    optimizer, norms = adam(model), []
    for step in range(steps):
        for data_rank in range(data_ranks):
            x, y = batch(step, data_rank, micro)
            for rows, classes in zip(x.chunk(micro), y.chunk(micro), strict=True):
                (loss_of(model(rows), classes) / (micro * data_ranks)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), norms


class Run:
    """A pipeline of all ranks, with `data` data ranks a stage."""

    def __init__(
        self, mesh: DeviceMesh, name: str, micro: int = MICRO, reduce: str = "last", loss: str | None = None,
        scale_grads: bool = True, loss_fn: Any = loss_of, **options: Any,
    ) -> None:  # fmt: skip
        kind = getattr(torch_schedules, f"Schedule{name}")
        self.mesh, self.micro = mesh, micro
        chunks = zeropp.parallel.cut(net(), mesh["pp"], kind)
        self.chunks, self.optimizer = zeropp.prepare(chunks, adam(chunks), zeropp.Config(**options), mesh=mesh)
        self.stages = zeropp.parallel.stages(self.chunks, mesh["pp"])
        stages = self.stages if len(self.stages) > 1 else self.stages[0]
        schedule = kind(stages, micro, loss_fn=loss_fn, scale_grads=scale_grads)
        self.schedule = zeropp.parallel.pipeline(schedule, reduce=reduce, loss=loss)

    def forward_backward(self, step: int) -> list[Tensor]:
        x, y = batch(step, self.mesh.get_local_rank("dp"), self.micro)
        last = any(stage.is_last for stage in self.stages)
        losses: list[Tensor] = []
        given = (x,) if any(stage.is_first for stage in self.stages) else ()
        self.schedule.step(*given, target=y if last else None, losses=losses if last else None)
        return losses

    def train(self, steps: int) -> tuple[dict[str, Tensor], list[float]]:
        norms = []
        for step in range(steps):
            self.forward_backward(step)
            norms.append(self.optimizer.clip_grad_norm_(CLIP))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return zeropp.full_state_dict(self.chunks), norms


def mesh_of(stages: int, data_ranks: int) -> DeviceMesh:
    return init_device_mesh("cpu", (stages, data_ranks), mesh_dim_names=("pp", "dp"))


def require_close(found: dict[str, Tensor], wanted: dict[str, Tensor], bound: float) -> None:
    for name, values in found.items():
        assert float((values - wanted[name]).abs().max()) <= bound, name


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
    assert own_norms == pytest.approx(norms, rel=1e-12)  # sums of squares in fp64, of other units one after the other
    names = of_all_ranks(list(found))
    assert sorted({one for listed in names for one in listed}) == sorted(wanted), names
    assert all(torch.equal(values, wanted[key]) for key, values in found.items())


@pytest.mark.parametrize(
    ("name", "reduce", "options"),
    [
        ("ZBVZeroBubble", "last", {"stage": 3, **HELD}),
        ("InterleavedZeroBubble", "each", {"stage": 2}),
        pytest.param("LoopedBFS", "last", {"stage": 2}, marks=pytest.mark.slow),
        pytest.param("DualPipeV", "each", {"stage": 3, **HELD}, marks=pytest.mark.slow),
        pytest.param("DualPipeV", "last", {"stage": 1}, marks=pytest.mark.slow),
        pytest.param("1F1B", "each", {"stage": 0}, marks=pytest.mark.slow),
        pytest.param("1F1B", "each", {"stage": 1}, marks=pytest.mark.slow),
    ],
)
@on_ranks(4)
def test_schedules(name: str, reduce: str, options: dict[str, Any]) -> None:
    """Schedules that add gradients in another order."""
    micro = 8 if name == "DualPipeV" else MICRO
    wanted, norms = plain(4, 2, micro)
    found, own_norms = Run(mesh_of(2, 2), name, micro, reduce, **options).train(4)
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


@on_ranks(2)
def test_evaluation() -> None:
    run = Run(mesh_of(2, 1), "1F1B", stage=3)
    x, y = batch(0, 0)
    last = run.stages[0].is_last
    output = run.schedule.eval(*((x,) if run.stages[0].is_first else ()), target=y if last else None)
    if last:
        assert torch.allclose(output, net()(x), atol=1e-6)
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
    tied = net()
    tied[6].up.weight = tied[1].up.weight
    told = sentence(lambda: zeropp.parallel.cut(tied, mesh["pp"], kind), zeropp.ConfigError)
    assert "tied parameters across ranks are not supported yet" in told, told
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
    """Sums of gradients run while this rank waits: for messages of other stages, or at the end of the schedule's step."""
    run = Run(mesh_of(2, 2), name, stage=2)
    run.train(1)  # torch finds out shapes first
    with tempfile.TemporaryDirectory() as folder:
        with zeropp.trace(f"{folder}/trace.json") as trace:
            run.train(2)
        written = json.loads(trace.file.read_text())
    spans = [event for event in written["traceEvents"] if event.get("cat") in ("reduce", "wait")]
    sums = [event for event in spans if event["cat"] == "reduce"]
    hidden = written["otherData"]["reductions_in_waits"]
    assert len(sums) >= 2 * len([unit for unit in engine_of(run.chunks).units if unit.trainable])
    assert hidden >= 0.9, (hidden, [(one["cat"], one["name"], one["ts"], one["dur"]) for one in spans])
    assert {"for a receive", "for reductions"} <= {one["name"] for one in spans}
