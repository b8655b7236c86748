# SPDX-License-Identifier: Apache-2.0
"""What is missing for a GPU is named, with the way out: on this machine, which has none, by functions of torch that answer otherwise."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from ranks import of_all_ranks, on_ranks
from torch import nn
from zeropp import _C
from zeropp.comm.group import communicator
from zeropp.zero.model import gpus
from zeropp.zero.model.accelerator import check_accelerator

Patch = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Patch:
    """Return a function that makes this process believe in GPUs: ``machine(driver=13000, images=[...], ...)``."""

    def patch(
        driver: int = 13000, toolkit: int = 13000, images: Any = (("adam", 1),), count: int = 2, usable: bool = True
    ) -> None:
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(_C, "cuda_driver", lambda: driver)
        monkeypatch.setattr(_C, "cuda_toolkit", lambda: toolkit)
        monkeypatch.setattr(_C, "cuda_images", lambda: list(images))

    return patch


def refused(device: str = "cuda:0", kernels: bool = True) -> str:
    with pytest.raises(zeropp.ConfigError) as found:
        gpus.require_gpu(torch.device(device), kernels)
    return str(found.value)


def test_a_gpu_that_is_there_passes(machine: Patch) -> None:
    machine()
    gpus.require_gpu(torch.device("cuda:1"), kernels=True)
    gpus.require_gpu(torch.device("cpu"), kernels=True)


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="torch is built with CUDA")
def test_torch_without_cuda() -> None:
    assert (
        "cuda:0, but this torch is built without CUDA; install a CUDA build of torch, or train on the CPU" in refused()
    )


def test_no_driver(machine: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    machine()

    def missing() -> int:
        raise zeropp.NotBuiltError("the NVIDIA driver was not found")

    monkeypatch.setattr(_C, "cuda_driver", missing)
    assert "there is no driver (the NVIDIA driver was not found); install NVIDIA's driver" in refused()


def test_a_driver_that_is_too_old(machine: Patch) -> None:
    machine(driver=12040)
    said = refused()
    assert "the driver has CUDA 12.4, and the kernels of this build need CUDA 13.0, driver R580 or later" in said
    gpus.require_gpu(torch.device("cuda:0"), kernels=False)  # torch can work with it
    machine(driver=11080, usable=False)
    assert "the driver has CUDA 11.8, torch wants" in refused(kernels=False)


def test_a_build_without_kernels(machine: Patch) -> None:
    machine(images=())
    assert "this build of zeropp has no CUDA kernels; install a wheel" in refused()
    gpus.require_gpu(torch.device("cuda:0"), kernels=False)


def test_more_ranks_than_gpus(machine: Patch) -> None:
    machine(count=2)
    assert "this rank is to compute on cuda:2, and the machine has 2 GPUs" in refused("cuda:2")


@pytest.mark.parametrize(
    "stage, instead", [(2, "Offload(optimizer='cpu', grads"), (3, "Offload(params='cpu', optimizer='cpu', grads")]
)
def test_gradients_in_files_beside_shards_there(stage: int, instead: str) -> None:
    """A kernel of the GPU would read a mapping of the host."""
    config = zeropp.Config(stage=stage, offload=zeropp.Offload(grads="nvme", path="/nvme"))
    with pytest.raises(zeropp.ConfigError) as found:
        check_accelerator(config, torch.device("cuda:0"), None)
    assert "on cuda:0, where gradients on NVMe beside shards there are not supported yet; keep" in str(found.value)
    assert instead in str(found.value)


@on_ranks(2)
def test_ranks_on_one_gpu() -> None:
    """Ranks that were not told to share a GPU are refused on all ranks, before anything is allocated."""
    comm = communicator()
    properties = types.SimpleNamespace(uuid="GPU-1")
    torch.cuda.get_device_properties = lambda device: properties  # type: ignore[assignment]
    device = torch.device("cuda:0")
    with pytest.raises(zeropp.ConfigError, match="ranks 0 and 1 compute on the same GPU"):
        gpus.refuse_shared(device, comm, asked=False)
    gpus.refuse_shared(device, comm, asked=True)
    gpus.refuse_shared(torch.device("cpu"), comm, asked=False)
    properties.uuid = f"GPU-{comm.rank}"
    gpus.refuse_shared(device, comm, asked=False)
    assert of_all_ranks(comm.rank) == [0, 1]


@on_ranks(2, devices=("sim",))
def test_what_one_rank_alone_has_wrong_is_told_on_all() -> None:
    last = dist.get_rank() == 1
    with torch.device("cpu"):
        here, there = nn.Linear(4, 4), nn.Linear(4, 4)
    with pytest.raises(zeropp.ConfigError, match="type of device is sim on rank 0 and cpu on rank 1"):
        zeropp.prepare(here, None, zeropp.Config(device="cpu" if last else "sim"))
    wrong = "parameter 'weight' is on sim:0, and the model is to compute on cpu"
    with pytest.raises(
        zeropp.ConfigError, match=wrong if last else f"prepare: rank 1 cannot prepare its model: .*{wrong}"
    ):
        zeropp.prepare(there.to("sim"), None, zeropp.Config(device="cpu" if last else "sim"))
    zeropp.prepare(here, None, zeropp.Config(device="sim"))


def test_buffers_come_to_the_device_and_stay_shared() -> None:
    first, second = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    second._buffers["running_mean"] = first._buffers["running_mean"]
    model = nn.Sequential(first, second)
    gpus.bring_rest(model, torch.device("meta"), set())
    assert all(buffer.is_meta for buffer in model.buffers())
    assert first.running_mean is second.running_mean


@on_ranks(1, devices=("sim",))
def test_parameters_come_to_a_device_and_stay_the_same_objects() -> None:
    with torch.device("cpu"):
        model = nn.Linear(3, 2)
    weight, values = model.weight, model.weight.detach().clone()
    weight.note = "kept"  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gpus.bring_parameters(model.parameters(), torch.device("sim:0"))
    assert model.weight is weight is optimizer.param_groups[0]["params"][0]
    assert weight.device.type == "sim" and weight.requires_grad and weight.is_leaf
    assert weight.note == "kept"  # type: ignore[attr-defined]
    assert torch.equal(weight.detach().cpu(), values)


@on_ranks(2, devices=("sim",))
@pytest.mark.parametrize("offloaded", [False, True])
def test_buffers_of_a_device_follow_rank_0(offloaded: bool) -> None:
    """As in test_buffers.py: a forward begins with rank 0's running statistics."""
    offload = zeropp.Offload(params="cpu", optimizer="cpu") if offloaded else zeropp.Offload()
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    model, _ = zeropp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), zeropp.Config(offload=offload))
    rank = dist.get_rank()
    ours, first = torch.arange(8.0).view(2, 4) * (rank + 1), torch.arange(8.0).view(2, 4)
    for _ in range(2):
        model(ours).sum().backward()
    mean = 0.9 * (0.1 * first.mean(0)) + 0.1 * ours.mean(0)
    assert model[0].running_mean.device.type == "sim"
    assert torch.allclose(model[0].running_mean.cpu(), mean.cpu(), rtol=1e-6)
    assert model[0].num_batches_tracked.item() == 2


@on_ranks(2, devices=("sim",))
@pytest.mark.parametrize("where", ["sharded_init", "meta"])
@pytest.mark.parametrize("offloaded", [False, True])
def test_a_model_built_in_shards_comes_to_a_device(where: str, offloaded: bool) -> None:
    offload = zeropp.Offload(params="cpu", optimizer="cpu") if offloaded else zeropp.Offload()
    torch.manual_seed(3)
    with torch.device("cpu"):
        plain = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    torch.manual_seed(3)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.device("cpu" if where == "sharded_init" else "meta"))
        if where == "sharded_init":
            stack.enter_context(zeropp.sharded_init())
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = zeropp.Config(device="sim", offload=offload)
    with torch.device("cpu"):  # meta draws here
        model, optimizer = zeropp.prepare(model, optimizer, config)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.zero_grad()
    for name, one in zeropp.full_state_dict(model).items():
        assert torch.equal(one.cpu(), plain.state_dict()[name]), name
    assert all(parameter.device.type == "sim" for parameter in model.parameters())
