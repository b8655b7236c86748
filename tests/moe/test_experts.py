# SPDX-License-Identifier: Apache-2.0
"""``Config(experts=)``: losses and gradients of transformers' models against one process on the joined batch, in any layout."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import moe_models
import pytest
import torch
import zeropp
from moe_models import batch, loss_of
from ranks import of_all_ranks, on_ranks
from torch import Tensor

MODELS = ("Mixtral", "Qwen3Moe", "GptOss", "DeepseekV3", "NemotronH")
# Of the largest gradient of a parameter. One fp32 rounding is 6e-8; sums of some hundred products in another order, through two
# layers and back, stay below a hundred of them.
BOUND = 1e-5
STEPS = 2


def reference(
    name: str, ranks: int, steps: int = STEPS
) -> tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor]]:
    """Return losses, gradients of each step, and final values of one process on all ranks' batches."""
    model = moe_models.build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, gradients = [], []
    for step in range(steps):
        loss = loss_of(model, torch.cat([batch(step, rank) for rank in range(ranks)]))
        loss.backward()
        losses.append(loss.item())
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, {n: p.detach().clone() for n, p in model.named_parameters()}


def compare(got: Tensor | None, wanted: Tensor, what: str) -> None:
    assert got is not None, what
    assert got.shape == wanted.shape, what
    error = (got - wanted).abs().max().item()
    assert error <= BOUND * max(wanted.abs().max().item(), 1e-3), (what, error, wanted.abs().max().item())


def parity(name: str, experts: Any, implementation: str = "grouped_mm", **more: Any) -> None:
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    losses, gradients, values = reference(name, ranks)
    model = moe_models.build(name, implementation)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = zeropp.prepare(model, optimizer, zeropp.Config(experts=experts, **more))
    for step in range(STEPS):
        loss = loss_of(model, batch(step, rank))
        loss.backward()
        assert abs(sum(of_all_ranks(loss.item())) / ranks - losses[step]) <= BOUND * losses[step]
        for path, parameter in model.named_parameters():
            if path in gradients[step]:
                compare(zeropp.get_full(parameter, "grad"), gradients[step][path], f"step {step}: gradient of {path}")
        squares = sum(g.double().square().sum() for g in gradients[step].values())
        assert abs(optimizer.clip_grad_norm_(1e9) - squares**0.5) <= BOUND * squares**0.5
        optimizer.step()
        optimizer.zero_grad()
    whole = zeropp.full_state_dict(model)
    for path, value in values.items():
        compare(whole[path], value, f"value of {path}")


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
