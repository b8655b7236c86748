# SPDX-License-Identifier: Apache-2.0
"""DTensors whose parameters, gradients and states lie in files, and packed weights, which are several boxes of the whole tensor."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zeropp
from checkpoint.models import group
from launch import run_ranks
from parallel.test_tensor import CLIP, WIDTH, Net, _adam, _batch, _cut, _joined, _mesh, _net, _train
from ranks import of_all_ranks, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from zeropp.checkpoint import offline


def _equal(model: nn.Module, values: dict[str, Tensor]) -> None:
    """Check whole parameters after a few clipped fp32 steps of 1e-3, whose sums are added up in another order."""
    whole = zeropp.full_state_dict(model)
    assert sorted(whole) == sorted(values)
    for name, value in values.items():
        assert (whole[name] - value).abs().max() < 2e-6, name


@pytest.mark.parametrize(
    "params, states, grads",
    [("nvme", "nvme", "nvme"), pytest.param("nvme", "cpu", "cpu", marks=pytest.mark.slow)],
)
@on_ranks(pytest.param(2, marks=pytest.mark.slow), 4)
def test_parameters_on_nvme(params: str, states: str, grads: str) -> None:
    mesh = _mesh()
    model = _cut(mesh)
    with tempfile.TemporaryDirectory() as folder:
        offload = zeropp.Offload(params=params, optimizer=states, grads=grads, path=of_all_ranks(folder)[0])
        model, optimizer = zeropp.prepare(model, _adam(model), zeropp.Config(stage=3, offload=offload), mesh=mesh)
        norms = _train(model, optimizer, mesh, 4)
        wanted, values = _joined(4, mesh.size(0))
        assert norms == pytest.approx(wanted, rel=1e-5)
        _equal(model, values)
        in_files = zeropp.memory(model)["nvme"]
        assert in_files["params"]["held"] > 0 and ("grads" in in_files) == (grads == "nvme"), in_files
        dist.barrier()


@pytest.mark.parametrize("stage", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
@on_ranks(4)
def test_steps_in_the_backward(stage: int) -> None:
    mesh = _mesh()
    model, plain = _cut(mesh), _net()
    config = zeropp.Config(stage=stage, step_in_backward=True, host_copy="off")
    model, optimizer = zeropp.prepare(model, _adam(model), config, mesh=mesh)
    stepped = _adam(plain)
    for at in range(3):
        model(_batch(at, mesh.get_local_rank("dp"))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        plain(torch.cat([_batch(at, one) for one in range(2)])).square().mean().backward()
        stepped.step()
        stepped.zero_grad()
    _equal(model, plain.state_dict())


class Packed(nn.Module):
    """A gated block whose first matrix has the rows of two, so a rank's part of it is two boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(48, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(WIDTH, 24) / 4)

    def forward(self, x: Tensor) -> Tensor:
        up, down = self.gate_up, self.down
        if not isinstance(up, DTensor):
            gate, values = F.linear(x, up).chunk(2, -1)
            return x + F.linear(F.silu(gate) * values, down)
        mesh = up.device_mesh
        own = DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
        gate, values = F.linear(own, up.to_local()).chunk(2, -1)
        out = DTensor.from_local(F.linear(F.silu(gate) * values, down.to_local()), mesh, [Partial()], run_check=False)
        return x + out.redistribute(placements=[Replicate()]).to_local()


def _packed(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Packed(), Packed(), nn.Linear(WIDTH, 11))


def _packed_over(mesh: Any, seed: int) -> nn.Sequential:
    model = _packed(seed)
    for block in (model[0], model[1]) if mesh.size() > 1 else ():
        for name, placement in (("gate_up", _StridedShard(0, split_factor=2)), ("down", Shard(1))):
            setattr(block, name, nn.Parameter(distribute_tensor(getattr(block, name).data, mesh, [placement])))
    return model


def _packed_steps(steps: int, data: int) -> dict[str, Tensor]:
    model = _packed(0)
    optimizer = _adam(model)
    for at in range(steps):
        model(torch.cat([_batch(at, one) for one in range(data)])).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize(
    "stage, tier", [(0, "device"), (3, "nvme"), *(pytest.param(n, "device", marks=pytest.mark.slow) for n in (1, 2, 3))]
)
@on_ranks(pytest.param(2, marks=pytest.mark.slow), 4)
def test_packed_weights_train(stage: int, tier: str) -> None:
    mesh = _mesh()
    model = _packed_over(mesh["tp"], 0)
    with tempfile.TemporaryDirectory() as folder:
        in_files = zeropp.Offload(params="nvme", optimizer="nvme", path=of_all_ranks(folder)[0])
        config = zeropp.Config(stage=stage, **({"offload": in_files} if tier == "nvme" else {"host_copy": "off"}))
        model, optimizer = zeropp.prepare(model, _adam(model), config, mesh=mesh)
        _train(model, optimizer, mesh, 3)
        _equal(model, _packed_steps(3, mesh.size(0)))
        dist.barrier()


def save_packed(rank: int, ranks: int, path: str, tp: int, stage: int) -> None:
    with group(ranks):
        mesh = init_device_mesh("cpu", (ranks // tp, tp), mesh_dim_names=("dp", "tp"))
        model = _packed_over(mesh["tp"], 0)
        config = zeropp.Config(stage=stage, host_copy="off")
        model, optimizer = zeropp.prepare(model, _adam(model), config, mesh=mesh)
        _train(model, optimizer, mesh, 2)
        zeropp.save(path, model, optimizer, step=2)
        zeropp.export(model, Path(path) / "exported")


def load_packed(rank: int, ranks: int, path: str, tp: int, stage: int) -> None:
    with group(ranks):
        mesh = init_device_mesh("cpu", (ranks // tp, tp), mesh_dim_names=("dp", "tp"))
        model = _packed_over(mesh["tp"], 5)
        config = zeropp.Config(stage=stage, host_copy="off")
        model, optimizer = zeropp.prepare(model, _adam(model), config, mesh=mesh)
        zeropp.load_full_state_dict(model, Path(path) / "exported")
        _equal(model, _packed_steps(2, 2))
        zeropp.load(path, model, optimizer)
        model(_batch(2, mesh.get_local_rank("dp"))).square().mean().backward()
        optimizer.clip_grad_norm_(CLIP)
        optimizer.step()
        _equal(model, _packed_steps(3, 2))


@pytest.mark.parametrize(
    "saved, read", [((2, 3), (1, 2)), pytest.param((1, 1), (2, 3), marks=pytest.mark.slow), pytest.param((2, 0), (2, 1), marks=pytest.mark.slow)]
)  # fmt: skip
def test_packed_weights_are_saved_and_exported_whole(
    tmp_path: Path, saved: tuple[int, int], read: tuple[int, int]
) -> None:
    """(ranks of tp, stage) that save, and that read; two data ranks each, so that the step after the load is the same one."""
    run_ranks(2 * saved[0], save_packed, str(tmp_path), *saved, timeout=150)
    assert all(one.wrong is None for one in offline.verify(tmp_path))
    whole, wanted = offline.whole_state(tmp_path, None), _packed_steps(2, 2)
    for name, value in wanted.items():
        assert (whole[name] - value).abs().max() < 2e-6, name
    run_ranks(2 * read[0], load_packed, str(tmp_path), *read, timeout=150)


def _three_times(parameter: Any) -> None:
    parameter.grad.mul_(3.0)


@on_ranks(2)
def test_hooks_on_dtensors_run_before_ours() -> None:
    """A hook that others put on a DTensor after ``prepare`` changes p.grad, and the step uses what it left."""
    mesh = _mesh()
    model, plain = _cut(mesh), _net()
    model, optimizer = zeropp.prepare(model, _adam(model), zeropp.Config(stage=2), mesh=mesh)
    for one in (model, plain):
        one.layers[0].up.weight.register_post_accumulate_grad_hook(_three_times)
        one(_batch(0, 0)).square().mean().backward()
    norm = optimizer.clip_grad_norm_(CLIP)
    assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(plain.parameters(), CLIP)), rel=1e-5)
    assert isinstance(model, Net)


@on_ranks(4)
def test_ranks_that_share_matrices_share_out_activations() -> None:
    """Over tp, under stage 3: what each block was given is kept by halves, and slices, which differ over the ranks, stay whole."""
    from torch.utils.checkpoint import checkpoint

    mesh, config = _mesh(), zeropp.Config(stage=3, host_copy="off")
    plain, model = (zeropp.prepare(_cut(mesh), None, config, mesh=mesh)[0] for _ in range(2))
    for layer in model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    rows = _batch(0, mesh.get_local_rank("dp"))
    with zeropp.nn.partition_activations(mesh["tp"].get_group(), min_bytes=1) as part:
        loss = model(rows).square().mean()
    assert part.whole_bytes >= 2 * rows.numel() * 4 and part.whole_bytes / 2 <= part.kept_bytes < part.whole_bytes
    loss.backward()
    plain(rows).square().mean().backward()
    assert part.gathered_bytes > 0
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(zeropp.get_full(one, "grad"), zeropp.get_full(other, "grad"))


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.slow)])
@on_ranks(pytest.param(2, marks=pytest.mark.slow), 4)
def test_other_norms(stage: int) -> None:
    """Clip to a norm of each type over matrices that are cut: each slice counts once, and so does what all ranks of tp have."""
    mesh = _mesh()
    model, plain = _cut(mesh), _net()
    sgd = [torch.optim.SGD(one.parameters(), lr=1.0) for one in (model, plain)]
    model, optimizer = zeropp.prepare(model, sgd[0], zeropp.Config(stage=stage, host_copy="off"), mesh=mesh)
    for at, kind in enumerate((2.0, 1.0, 3.0, float("inf"))):
        model(_batch(at, mesh.get_local_rank("dp"))).square().mean().backward()
        plain(torch.cat([_batch(at, one) for one in range(mesh.size(0))])).square().mean().backward()
        norm = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.01, kind))
        assert norm > 0.01 and float(optimizer.clip_grad_norm_(0.01, kind)) == pytest.approx(norm, rel=1e-5), kind
        for one in (optimizer, sgd[1]):
            one.step()
            one.zero_grad()
    _equal(model, plain.state_dict())
