# SPDX-License-Identifier: Apache-2.0
"""Experts of different ranks in files and in memory: the same bits in every tier."""

from __future__ import annotations

from typing import Any

import moe_models
import pytest
import torch
import torch.distributed as dist
import zeropp
from disk import scratch
from moe_models import batch, loss_of
from ranks import on_ranks, shards_tier
from torch import Tensor

SLOW = pytest.mark.slow
STEPS = 3


def prepared(experts: Any, **config: Any) -> tuple[Any, Any]:
    model = moe_models.build("Mixtral", "grouped_mm")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"stage": 3, **config}
    return zeropp.prepare(model, optimizer, zeropp.Config(experts=experts, units=("MixtralExperts",), **options))  # type: ignore[no-any-return]


def trained(experts: Any, **config: Any) -> tuple[dict[str, Tensor], list[float], Any]:
    """Return values and losses after some steps, and what zeropp.memory says then."""
    model, optimizer = prepared(experts, **config)
    losses = []
    for step in range(STEPS):
        for micro in range(config.get("accumulate", 1)):
            loss = loss_of(model, batch(10 * step + micro, dist.get_rank()))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return zeropp.full_state_dict(model), losses, zeropp.memory(model, optimizer)


def same(got: tuple[dict[str, Tensor], list[float], Any], wanted: tuple[dict[str, Tensor], list[float], Any]) -> None:
    assert got[1] == wanted[1]
    assert [name for name, value in wanted[0].items() if not torch.equal(got[0][name], value)] == []


KINDS = {
    "params": {"params": "nvme"},
    "all": {"params": "nvme", "grads": "nvme", "optimizer": "nvme"},
    "params and states": {"params": "nvme", "optimizer": "nvme"},
    "a half": {"params": 0.5, "grads": 0.5, "optimizer": 0.5},
    "delayed": {"params": "nvme", "optimizer": "nvme", "delayed_update": 0},
}


def offload(kind: str, path: str) -> zeropp.Offload:
    fields: dict[str, Any] = dict(KINDS.get(kind, {kind: "nvme"}))
    for name, value in fields.items():
        if isinstance(value, float):
            fields[name] = zeropp.Tier("nvme", path=path, fraction=value)
    return zeropp.Offload(**fields, **({"path": path} if "nvme" in fields.values() else {}))


@on_ranks(2, 4)
@pytest.mark.parametrize("kind", ["params", "all", "a half", "delayed"])
def test_files_have_the_bits_of_memory(kind: str, ranks: int) -> None:
    """The parameters of each part lie in the file that the ranks of the host share."""
    more = {"offload": zeropp.Offload(optimizer="cpu", delayed_update=0)} if kind == "delayed" else {}
    wanted = trained(2, **more)
    with scratch() as path:
        got = trained(2, offload=offload(kind, path))
        same(got, wanted)
    for tier in ("cpu", "nvme"):
        for name in ("params", "grads", "optimizer"):
            figures = got[2][tier].get(name)
            if figures is not None and kind != "a half":  # pages, and what pads 9 units' shards
                assert abs(figures["planned"] - figures["held"]) <= 9 * 4096, (tier, name, figures)
    assert got[2]["nvme"]["params"]["held"] > 0


@on_ranks(2)
@pytest.mark.parametrize("more", [{"step_in_backward": True}, {"accumulate": 2}, {"clip": 0.1}])
def test_steps_of_files(more: dict[str, Any]) -> None:
    wanted = trained(2, **more)
    with scratch() as path:
        kind = "all" if "clip" in more else "params"  # gradients in a file are added once for each micro-step
        same(trained(2, offload=offload(kind, path), **more), wanted)


# -- experts alone -------------------------------------------------------------------------------------------------------


def alone(kind: str, path: str) -> zeropp.Experts:
    return zeropp.Experts(parallel=2, offload=offload(kind, path))


@on_ranks(2, 4)
@pytest.mark.parametrize("kind", ["params", "grads", "optimizer", "all", "a half"])
def test_tiers_of_experts_alone(kind: str) -> None:
    """The same bits, and the files have the experts and nothing else."""
    wanted = trained(2, precision="bf16")
    with scratch() as path:
        got = trained(alone(kind, path), precision="bf16")
    same(got, wanted)
    size = {name: value.numel() for name, value in wanted[0].items()}
    mine = sum(count for name, count in size.items() if ".experts." in name) / dist.get_world_size()
    rest = sum(count for name, count in size.items() if ".experts." not in name)
    for name, each in {"params": 2, "grads": 2, "master": 4, "optimizer": 8}.items():
        in_file, held = got[2].get("nvme", {}).get(name), got[2]["cpu"][name]["held"]
        kinds = KINDS.get(kind, {kind: "nvme"})
        if ("optimizer" if name == "master" else name) not in kinds:
            assert in_file is None
            continue
        share = 0.5 if kind == "a half" else 1.0
        pages = 2 * 4096  # two units of experts, each of whole pages where a half of it is in the file
        for what in ("planned", "held"):
            assert abs(in_file[what] - share * each * mine) <= pages, (name, what, in_file, each * mine)
        assert abs(got[2]["cpu"][name]["planned"] - held) <= 20 * 4096, (name, got[2]["cpu"][name])  # all units
        # What is no expert: every rank's shard; units that are no block's are small, and whole on each rank.
        assert held >= each * rest / dist.get_world_size()


@on_ranks(2, devices=("sim-offload",))
@pytest.mark.parametrize("kind", ["optimizer", "params and states", "all"])
def test_experts_in_files_beside_a_gpu(kind: str) -> None:
    """The rest of the model has its shards in memory of the host."""
    wanted = trained(2, precision="bf16")
    with scratch() as path:
        got = trained(alone(kind, path), precision="bf16")
    same(got, wanted)
    size = {name: value.numel() for name, value in wanted[0].items() if ".experts." in name}
    mine = sum(size.values()) / dist.get_world_size()
    assert abs(got[2]["nvme"]["optimizer"]["held"] - 8 * mine) <= 2 * 4096


@on_ranks(2)
@pytest.mark.parametrize("more", [{"step_in_backward": True}, {"accumulate": 2}, {"clip": 0.1}, {"delayed": True}])
def test_steps_of_experts_in_files(more: dict[str, Any]) -> None:
    """Both kinds of units in one step: inside the backward, over micro-steps, with a norm over all, delayed."""
    delayed: dict[str, Any] = (
        {"offload": zeropp.Offload(optimizer="cpu", delayed_update=0)} if "delayed" in more else {}
    )
    more = {key: value for key, value in more.items() if key != "delayed"} | delayed
    wanted = trained(2, **more)
    with scratch() as path:
        kind = "all" if "clip" in more or "offload" in more else "params and states"  # as in test_steps_of_files
        same(trained(alone(kind, path), **more), wanted)


# -- experts on the host of a GPU ----------------------------------------------------------------------------------------

ON_HOST = {"optimizer": {"optimizer": "cpu"}, "both": {"params": "cpu", "optimizer": "cpu"}}


def on_host(kind: str) -> zeropp.Experts:
    return zeropp.Experts(parallel=2, offload=zeropp.Offload(**ON_HOST[kind]))


@on_ranks(2, 4, devices=("cpu", "sim", "sim-lazy"))
@pytest.mark.parametrize("kind", list(ON_HOST))
def test_experts_on_the_host_of_a_gpu(kind: str) -> None:
    """The same bits, and memory of the host has the experts and nothing else. Without a GPU nothing is different."""
    wanted = trained(2, precision="bf16")
    got = trained(on_host(kind), precision="bf16")
    same(got, wanted)
    size = {name: value.numel() for name, value in wanted[0].items()}
    mine = sum(count for name, count in size.items() if ".experts." in name) / dist.get_world_size()
    if shards_tier() == "cpu":
        assert "pinned" not in got[2]
        return
    for name, each in {"params": 2, "master": 4, "optimizer": 8}.items():
        pinned, before, after = (
            one.get(name, {"held": 0}) for one in (got[2]["pinned"], wanted[2]["device"], got[2]["device"])
        )
        share = 0 if kind == "optimizer" and name == "params" else each * mine
        assert abs(pinned["held"] - share) <= 2 * 4096, (name, pinned, share)
        assert abs(pinned["held"] - pinned.get("planned", 0)) <= 2 * 4096, (name, pinned)
        assert abs(before["held"] - after["held"] - pinned["held"]) <= 2 * 4096, (name, before, after)
    assert got[2]["device"]["grads"]["held"] == wanted[2]["device"]["grads"]["held"]


@on_ranks(2, devices=("sim",))
@pytest.mark.parametrize(
    "more",
    [{"step_in_backward": True}, {"accumulate": 2}, {"clip": 0.1}, {"stage": 2}, {"int8 states": True}, {"int8": True}],
)
def test_steps_of_experts_on_the_host(more: dict[str, Any]) -> None:
    """Inside the backward, over micro-steps, with a norm over all, at a stage whose parameters stay, and of quantised gathers."""
    kind = "optimizer" if "stage" in more else "both"
    if "int8" in more:
        more = {"comm": zeropp.Comm(params="int8")}
    elif "int8 states" in more:
        more = {"precision": zeropp.Precision(param="bf16", state="int8")}
    same(trained(on_host(kind), **more), trained(2, **more))


@on_ranks(1, devices=("sim",))
def test_states_on_the_host_of_one_gpu() -> None:
    experts = zeropp.Experts(parallel=1, offload=zeropp.Offload(optimizer="cpu"))
    got = trained(experts, precision="bf16")
    same(got, trained(1, precision="bf16"))
    assert got[2]["pinned"]["optimizer"]["held"] > 0


@on_ranks(2, devices=("sim",))
def test_estimate_counts_experts_on_the_host() -> None:
    """What zeropp.memory plans is what zeropp.estimate says, by tier."""
    model = moe_models.build("Mixtral", "grouped_mm")
    config = zeropp.Config(experts=on_host("both"), units=("MixtralExperts",), precision="bf16")
    said = zeropp.estimate(model, config, ranks=2, optimizer="AdamW")
    planned = trained(on_host("both"), precision="bf16")[2]
    for name in ("params", "master", "optimizer"):
        assert abs(said["pinned"][name] - planned["pinned"][name]["held"]) <= 2 * 4096, name
        assert abs(said["device"][name] - planned["device"][name]["held"]) <= 20 * 4096, name
    assert abs(said["pinned"]["page_locked"] - planned["pinned"]["page_locked"]["held"]) <= 8 * 4096


@on_ranks(2, devices=("cpu", "sim"))
def test_a_checkpoint_of_experts_on_the_host() -> None:
    """What they saved loads where all is on the GPU, and the other way round."""
    with scratch() as path:
        first, optimizer = prepared(on_host("both"))
        loss_of(first, batch(0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        zeropp.save(f"{path}/step", first, optimizer)
        second, other = prepared(2)
        zeropp.load(f"{path}/step", second, other)
        zeropp.save(f"{path}/again", second, other)
        zeropp.load(f"{path}/again", first, optimizer)
        for model, steps in ((first, optimizer), (second, other)):
            loss_of(model, batch(1, dist.get_rank())).backward()
            steps.step()
        wanted, got = zeropp.full_state_dict(second), zeropp.full_state_dict(first)
        assert [name for name, value in wanted.items() if not torch.equal(got[name], value)] == []
        del first, optimizer, second, other, model, steps


@on_ranks(2)
def test_a_checkpoint_of_experts_in_files() -> None:
    """What experts in files saved loads where all is in memory, and the other way round."""
    with scratch() as path:
        first, optimizer = prepared(alone("all", path))
        loss_of(first, batch(0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        zeropp.save(f"{path}/step", first, optimizer)
        wanted = zeropp.full_state_dict(first)
        for experts in (2, alone("optimizer", path)):
            second, other = prepared(experts)
            zeropp.load(f"{path}/step", second, other)
            got = zeropp.full_state_dict(second)
            assert [name for name, value in wanted.items() if not torch.equal(got[name], value)] == []
            del second, other
        del first, optimizer


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            {"stage": 2, "kinds": {"params": "nvme"}},
            r"Config.offload.params.kind: 'nvme' does not combine with Config.stage=2",
        ),
        ({"kinds": {"activations": "nvme"}}, r"Experts.offload: .* wanted params, grads and optimizer"),
        (
            {"kinds": {"grads": "cpu"}},
            r"Experts.offload: .* wanted params, grads or optimizer on 'nvme', or params and optimizer on 'cpu'",
        ),
        (
            {"kinds": {"optimizer": "cpu", "params": "nvme"}},
            r"Experts.offload: .* wanted params, grads or optimizer on 'nvme', or params and optimizer on 'cpu'",
        ),
        (
            {"kinds": {"optimizer": "nvme"}, "offload": zeropp.Offload(optimizer="nvme", path="/tmp")},
            r"Experts.offload.optimizer: 'nvme', and Config.offload.optimizer has all of them on 'nvme'",
        ),
    ],
)
def test_what_tiers_of_experts_refuse(config: dict[str, Any], sentence: str) -> None:
    kinds = config.pop("kinds")
    path = {"path": "/tmp"} if "nvme" in kinds.values() else {}
    with pytest.raises(zeropp.ConfigError, match=sentence):
        zeropp.Config(experts=zeropp.Experts(offload=zeropp.Offload(**kinds, **path)), **config)
