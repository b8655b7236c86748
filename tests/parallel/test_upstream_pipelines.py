# SPDX-License-Identifier: Apache-2.0
"""What torch's tests of pipelining and DeepSpeed's tests of pipelines ask, asked again of pipelines over ZeRO (docs/conformance.md)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import zeropp
from pipelines import BOUND, CLASSES, MICRO, Run, batch, loss_of, mesh_of, net, plain, require_close
from ranks import of_all_ranks, on_ranks
from torch import Tensor, nn
from torch.distributed.pipelining._utils import PipeliningMetadataError
from zeropp.deepspeed.names.modules import initialize
from zeropp.deepspeed.pipeline import PipelineModule

LR = 0.1
SGD = {"type": "SGD", "params": {"lr": LR}}


def _engine(layers: list[nn.Module], stages: int, micro: int, stage: int, loss_fn: Any) -> Any:
    settings = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": micro, "optimizer": SGD,
        "zero_optimization": {"stage": stage}, "gradient_clipping": 0.0,
    }  # fmt: skip
    return initialize(model=PipelineModule(layers, stages, loss_fn=loss_fn), config=settings)[0]


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_gradients_are_scaled_once(stage: int) -> None:
    """Two factors of 1 in front of a squared loss have the gradient 2 on each stage, however many micro-batches there are."""
    layers: list[nn.Module] = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for layer in layers:
        nn.init.ones_(layer.weight)
    engine = _engine(layers, 2, 2, stage, nn.functional.mse_loss)
    engine.train_batch(iter([(torch.ones(1, 1), torch.zeros(1, 1))] * 2))
    found = zeropp.full_state_dict(engine.module)
    assert len(found) == 2 and all(value.item() == pytest.approx(1 - 2 * LR) for value in found.values()), found


@pytest.mark.parametrize(("stages", "stage"), [(4, 3), (1, 2)])
@on_ranks(4)
def test_as_many_stages_as_ranks_and_one(stages: int, stage: int) -> None:
    """Losses and weights of one process, over pp 4 and over dp 4; a loss of evaluation is the mean over micro-batches."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())]
    whole = nn.Sequential(*copy.deepcopy(layers))
    engine = _engine(layers, stages, 5, stage, nn.functional.mse_loss)
    copies = 4 // stages
    mine = torch.distributed.get_rank() % copies if copies > 1 else 0
    for step in range(2):
        draw = torch.Generator().manual_seed(step)
        data = [[tuple(torch.randn(2, 1, 8, generator=draw)) for _ in range(5)] for _ in range(copies)]
        every = [nn.functional.mse_loss(whole(x), y) for one in data for x, y in one]
        wanted = torch.stack(every).mean()
        told = engine.eval_batch(iter(data[mine]))
        assert told.item() == pytest.approx(wanted.item(), rel=1e-5)
        assert engine.train_batch(iter(data[mine])).item() == pytest.approx(wanted.item(), rel=1e-5)
        wanted.backward()
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter -= LR * parameter.grad
                parameter.grad = None
    require_close(zeropp.full_state_dict(engine.module), dict(whole.state_dict()), 1e-6)


@pytest.mark.parametrize(("name", "stage"), [("GPipe", 3), ("1F1B", 2), ("Interleaved1F1B", 3)])
@on_ranks(2)
def test_nothing_of_a_step_is_kept(name: str, stage: int) -> None:
    """The last stage alone has outputs, no stage has a micro-batch, and losses add up to those of the whole model."""
    run = Run(mesh_of(2, 1), name, stage=stage)
    whole = net()
    for step in range(2):
        losses = run.forward_backward(step)
        if losses:
            x, y = batch(step, 0)
            wanted = [loss_of(whole(a), b) for a, b in zip(x.chunk(MICRO), y.chunk(MICRO), strict=True)]
            torch.testing.assert_close(torch.stack(losses), torch.stack(wanted).detach(), rtol=1e-5, atol=0)
        for one in run.stages:
            assert len(one.fwd_cache) == 0
            assert len(one.output_chunks) == (MICRO if one.is_last else 0)
        run.optimizer.zero_grad()


@on_ranks(2)
def test_evaluation_between_steps() -> None:
    """Evaluations of several batches change nothing: outputs are those of the weights, and training goes on as without them."""
    run = Run(mesh_of(2, 1), "1F1B", stage=3)
    wanted, _ = plain(2, 1)
    first, last = run.stages[0].is_first, run.stages[0].is_last
    for step in range(2):
        weights = zeropp.full_state_dict(run.chunks)
        for at in (5, 6):
            x, y = batch(at, 0)
            found = run.schedule.eval(*((x,) if first else ()), target=y if last else None)
            if last:
                whole = net()
                whole.load_state_dict(weights)
                assert found.shape == (len(x), CLASSES)
                torch.testing.assert_close(found, whole(x).detach(), rtol=1e-5, atol=1e-6)
        run.forward_backward(step)
        run.optimizer.clip_grad_norm_(0.1)
        run.optimizer.step()
        run.optimizer.zero_grad()
    require_close(zeropp.full_state_dict(run.chunks), wanted, BOUND)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_inputs_of_another_shape_or_type(stage: int) -> None:
    """Our check of shapes, and torch's own of types, which it makes where TORCH_DISTRIBUTED_DEBUG is DETAIL, end the step of the first
    stage before anything was sent. The step after it is right."""
    run = Run(mesh_of(2, 1), "1F1B", stage=stage)
    run.train(1)
    x, _ = batch(0, 0)
    if run.stages[0].is_first:
        run.stages[0]._runtime_validate = True
        with pytest.raises(zeropp.ConfigError, match="drop_last"):
            run.schedule.step(torch.cat([x, x]))
        with pytest.raises(PipeliningMetadataError, match="dtype"):
            run.schedule.step(x.double())
    of_all_ranks(None)
    found = _second_step(run)
    wanted, _ = plain(2, 1)
    require_close(found, wanted, BOUND)


def _second_step(run: Run) -> dict[str, Tensor]:
    run.forward_backward(1)
    run.optimizer.clip_grad_norm_(0.1)
    run.optimizer.step()
    return zeropp.full_state_dict(run.chunks)
