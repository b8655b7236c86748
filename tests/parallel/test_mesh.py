# SPDX-License-Identifier: Apache-2.0
"""Meshes: which ranks partition one model, and what is refused."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
import zeropp
from ranks import of_all_ranks, on_ranks
from tiny import Tiny, sentence
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from zeropp.parallel.mesh import data_names, ranks_along
from zeropp.zero.engine import engine_of
from zeropp.zero.model.init import is_sharded, own_shard


@pytest.mark.parametrize(
    ("names", "chosen", "wanted"),
    [
        (("pp", "dp"), None, ("dp",)),
        (("pp", "dp_replicate", "dp_shard", "cp", "tp"), None, ("dp_replicate", "dp_shard", "cp")),
        (("data_parallel", "tensor_parallel"), None, ("data_parallel",)),
        (("stage", "rows"), ("rows",), ("rows",)),
    ],
)
def test_names(names: tuple[str, ...], chosen: tuple[str, ...] | None, wanted: tuple[str, ...]) -> None:
    assert data_names(names, chosen, "prepare") == wanted


def test_unknown_names() -> None:
    told = sentence(lambda: data_names(("pp", "rows"), None, "prepare"), zeropp.ConfigError)
    assert "dimension 'rows'" in told and "data_dims=" in told, told
    told = sentence(lambda: data_names(("pp", "dp"), ("rows",), "prepare"), zeropp.ConfigError)
    assert "data_dims names 'rows'" in told and "('pp', 'dp')" in told, told


@on_ranks(4)
def test_data_ranks() -> None:
    """Two data dimensions beside another one: ranks that differ in that have other values, and are left alone."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("part", "dp", "cp"))
    part = mesh.get_local_rank("part")
    assert ranks_along(mesh, ("dp", "cp")) == [2 * part, 2 * part + 1]
    torch.manual_seed(part)
    model = Tiny()
    wanted = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _ = zeropp.prepare(model, optimizer, zeropp.Config(stage=3), mesh=mesh, data_dims=("dp", "cp"))
    assert engine_of(model).ranks == 2
    with zeropp.gathered(model):
        for name, values in model.named_parameters():
            assert torch.equal(values, wanted[name]), name


def _held_elems(model: torch.nn.Module) -> int:
    """Return how many elements this rank holds of parameters that were built in shards."""
    assert all(map(is_sharded, model.parameters()))
    return sum(own_shard(one).numel() for one in model.parameters())


@on_ranks(4)
def test_sharded_init() -> None:
    """Parameters are cut over all ranks of the job; stages keep theirs, cut over their data ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(3)
    plain = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    torch.manual_seed(3)
    with zeropp.sharded_init(mesh=mesh):
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    assert _held_elems(model) == 4 * 72 // 4
    chunks = zeropp.parallel.cut(model, mesh["pp"], torch.distributed.pipelining.Schedule1F1B)
    assert _held_elems(chunks) == 2 * 72 // 2
    chunks, _ = zeropp.prepare(chunks, None, zeropp.Config(stage=3, host_copy="off"), mesh=mesh)
    found = zeropp.full_state_dict(chunks)
    names = of_all_ranks(list(found))
    assert sorted({name for one in names for name in one}) == sorted(plain.state_dict()), names
    assert all(torch.equal(values, plain.state_dict()[name]) for name, values in found.items())


@on_ranks(4)
def test_from_pretrained_in_slices_and_stages() -> None:
    """pp 2 x tp 2: no rank holds more of a model of transformers than its rows, then its slices, then its stage."""
    transformers = pytest.importorskip("transformers")
    import cut_models

    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    folder = of_all_ranks(tempfile.mkdtemp() if dist.get_rank() == 0 else None)[0]
    plain = cut_models.model("llama", 4, 4, "eager")
    if dist.get_rank() == 0:
        plain.save_pretrained(folder)
    dist.barrier()
    with zeropp.sharded_init(mesh=mesh):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    total = sum(one.numel() for one in plain.parameters())
    assert _held_elems(model) <= total // 4 + len(list(plain.parameters()))
    zeropp.parallel.tensor(model, mesh["tp"])
    weight = model.model.layers[0].self_attn.q_proj.weight
    assert (
        is_sharded(weight)
        and weight.placements == (Shard(0),)
        and weight.shape == plain.get_parameter("model.layers.0.self_attn.q_proj.weight").shape
    )
    for read in (weight.to_local, weight.full_tensor, lambda: weight + 1, lambda: copy.deepcopy(weight)):
        with pytest.raises(
            zeropp.PartitionedParameterError, match=r"layers\.0\.self_attn\.q_proj\.weight.*sharded_init"
        ):
            read()
    chunks = zeropp.parallel.cut(model, mesh["pp"], torch.distributed.pipelining.Schedule1F1B)
    chunks, _ = zeropp.prepare(chunks, None, zeropp.Config(stage=3, host_copy="off"), mesh=mesh)
    found = zeropp.full_state_dict(chunks)
    assert found and all(torch.equal(values, plain.state_dict()[name]) for name, values in found.items())
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


@on_ranks(4)
def test_stages_of_other_parameters_are_refused() -> None:
    """Stages that are made by hand of a model that all ranks share have to be cut by ``cut``."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    with zeropp.sharded_init(mesh=mesh):
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    stage = mesh.get_local_rank("pp")
    chunk = torch.nn.Sequential(OrderedDict((str(i), model[i]) for i in (2 * stage, 2 * stage + 1)))
    told = sentence(
        lambda: zeropp.prepare(zeropp.parallel.Chunks([chunk]), None, zeropp.Config(stage=3), mesh=mesh),
        zeropp.ConfigError,
    )
    assert "shared by 4 ranks since sharded_init" in told and "zeropp.parallel.cut" in told, told


@on_ranks(2)
def test_refusals() -> None:
    def prepare(**options: object) -> str:
        return sentence(lambda: zeropp.prepare(Tiny(), None, zeropp.Config(stage=3), **options), zeropp.ConfigError)

    told = prepare(mesh=init_device_mesh("cpu", (2,)))
    assert "have no names" in told and "mesh_dim_names=" in told, told
    told = prepare(mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))["tp"])
    assert "has 1 ranks, and the job has 2" in told and "whole mesh" in told, told
    told = prepare(mesh="dp")
    assert "wanted a DeviceMesh" in told, told
    told = prepare(data_dims=("dp",))
    assert "pass mesh= too" in told, told
    assert dist.get_world_size() == 2
