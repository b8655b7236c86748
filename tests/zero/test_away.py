# SPDX-License-Identifier: Apache-2.0
"""Policy, reference and reward model in one process, and weights handed on between steps, and the policy's
optimizer states on disk meanwhile."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from ranks import on_ranks, shards_tier
from tiny import sentence as sentence_of
from torch import nn
from training import batch, gpt

SENTENCES = {
    "not prepared": "SGD is not an optimizer that zeropp.prepare adopted",
    "to": "to='disk' is not allowed; wanted one of 'device', 'cpu', 'nvme'",
    "path": "to='nvme' needs path=",
    "no path": "does not combine with offload_states.to='cpu'",
    "LAMB": "offload_states() does not combine with optimizer LAMB",
    "blocked": "file",
}

WAYS: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
    "AdamW, stage 3": ({"stage": 3}, torch.optim.AdamW),
    "AdamW bf16, gathering": ({"stage": 3, "host_copy": "off", "precision": "bf16"}, torch.optim.AdamW),
    "SGD bf16, stage 2": ({"stage": 2, "precision": "bf16"}, lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9)),
    "Adagrad, stage 1": ({"stage": 1}, torch.optim.Adagrad),
}


def folder() -> Path:
    """One of this machine's, the same on both ranks."""
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    return Path(str(made[0]))


def loss_of(model: nn.Module, step: int, against: nn.Module, reward: nn.Module) -> torch.Tensor:
    tokens, wanted = batch(step)
    logits = model(tokens)
    with torch.no_grad():
        frozen = against(tokens).float()
        weight = torch.sigmoid(reward(torch.nn.functional.one_hot(tokens, 256).float()).mean())
    nearness = nn.functional.mse_loss(logits.float(), frozen)
    return weight * nn.functional.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten()) + 0.1 * nearness


def loop(way: str, scratch: Path | None) -> tuple[list[float], dict[str, Any]]:
    """Four steps; between the second and the third the weights are handed on, with states away or not."""
    config, optimizer_of = WAYS[way]
    policy = gpt()
    policy, optimizer = zeropp.prepare(policy, optimizer_of(policy.parameters(), lr=1e-2), zeropp.Config(**config))
    reference, _ = zeropp.prepare(gpt().requires_grad_(False), None, zeropp.Config(stage=3, host_copy="off"))
    torch.manual_seed(1)
    reward, _ = zeropp.prepare(nn.Sequential(nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 1)), None, zeropp.Config())
    losses, said = [], {}
    for step in range(4):
        if step == 2:
            before = zeropp.memory(policy, optimizer)[shards_tier()]
            if scratch is not None:
                said = away(policy, optimizer, scratch, before)
            buckets = list(zeropp.packed_full_tensors(policy, bucket_bytes=50_000))
            sums = [float(tensor.double().sum()) for bucket in buckets for _, tensor in bucket.tensors()]
            said["handed on"] = [len(buckets), sum(sums)]
            if scratch is not None:
                said["back"] = zeropp.offload_states(optimizer=optimizer, to="cpu")
                dist.barrier()
                said["left"] = sorted(path.name for path in scratch.rglob("*"))
                after = zeropp.memory(policy, optimizer)[shards_tier()]
                said["as before"] = all(after[kind] == before[kind] for kind in ("params", "master", "optimizer"))
        loss = loss_of(policy, step, reference, reward)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, said


def away(policy: nn.Module, optimizer: Any, scratch: Path, before: dict[str, Any]) -> dict[str, Any]:
    moved = zeropp.offload_states(optimizer=optimizer, to="nvme", path=scratch)
    states = {id(t): t for states in optimizer._engine.states._states.values() for t in states.values()}
    seen = zeropp.memory(policy, optimizer)
    loss = policy(batch(9)[0]).float().mean()
    loss.backward()
    found = {
        "moved": moved,
        "were": before["master"]["held"] + before["optimizer"]["held"],
        "held": [
            seen[shards_tier()]["master"]["held"],
            seen[shards_tier()]["optimizer"]["held"],
            seen["nvme"]["away"]["held"],
        ],
        "storage": sum(one.untyped_storage().size() for one in states.values() if one.numel() > 1),
        "again": zeropp.offload_states(optimizer=optimizer, to="nvme", path=scratch),
        "step": sentence_of(optimizer.step),
        "save": sentence_of(lambda: zeropp.save(folder() / "checkpoint", policy, optimizer, step=1)),
    }
    optimizer.zero_grad()
    return found


@on_ranks(2)
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(one, marks=pytest.mark.slow) if one in ("AdamW, stage 3", "SGD bf16, stage 2") else one
        for one in WAYS
    ],
)
def test_states_go_and_come_back(way: str) -> None:
    """A run whose states went to the disk and came back equals one whose states stayed, bit for bit."""
    scratch = folder()
    stayed, plain = loop(way, None)
    went, said = loop(way, scratch)
    assert went == stayed and went[-1] != went[0]
    assert said["handed on"] == plain["handed on"] and said["handed on"][0] > 2
    assert said["moved"] == said["back"] and said["again"] == 0
    assert 0.9 * said["were"] < said["moved"] <= said["were"], "all but the padding of slices"
    assert said["held"] == [0, 0, said["moved"]] and said["storage"] == 0
    assert said["left"] == [] and said["as before"]
    for name in ("step", "save"):
        assert "on disk since zeropp.offload_states" in said[name], said


def on_disk(scratch: Path) -> dict[str, Any]:
    """A folder that cannot be used changes nothing; what is away when its model dies goes too."""
    blocked = scratch / "file"
    if dist.get_rank() == 0:
        blocked.write_text("")
    dist.barrier()
    policy = gpt()
    policy, optimizer = zeropp.prepare(policy, torch.optim.AdamW(policy.parameters(), lr=1e-2))
    said: dict[str, Any] = {}
    for step in range(2):
        nn.functional.cross_entropy(policy(batch(step)[0]).flatten(0, 1), batch(step)[1].flatten()).backward()
        optimizer.step()
        said["blocked"] = sentence_of(lambda: zeropp.offload_states(optimizer=optimizer, to="nvme", path=blocked))
    zeropp.offload_states(optimizer=optimizer, to="nvme", path=scratch / "gone")
    dist.barrier()
    said["files"] = [sorted(path.name for path in (scratch / "gone").rglob("*") if path.is_file())]
    dist.barrier()
    return said


@on_ranks(2)
def test_refusals() -> None:
    scratch = folder()
    policy = gpt()
    policy, optimizer = zeropp.prepare(policy, zeropp.optim.LAMB(policy.parameters(), lr=1e-2))
    free = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    said = {
        "not prepared": sentence_of(lambda: zeropp.offload_states(optimizer=free)),
        "to": sentence_of(lambda: zeropp.offload_states(optimizer=optimizer, to="disk")),
        "path": sentence_of(lambda: zeropp.offload_states(optimizer=optimizer, to="nvme")),
        "no path": sentence_of(lambda: zeropp.offload_states(optimizer=optimizer, to="cpu", path=scratch)),
        "LAMB": sentence_of(lambda: zeropp.offload_states(optimizer=optimizer, to="nvme", path=scratch)),
    }
    assert zeropp.offload_states(optimizer=optimizer, to="cpu") == 0
    said.update(on_disk(scratch))
    gc.collect()
    dist.barrier()
    said["files"].append(sorted(path.name for path in (scratch / "gone").rglob("*")))
    assert said.pop("files") == [["states", "states"], []], "gone with the model"
    assert {name for name, sentence in said.items() if SENTENCES[name] in sentence} == set(SENTENCES), said
