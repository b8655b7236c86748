# SPDX-License-Identifier: Apache-2.0
"""What zeropp.trace writes on two ranks: what happened is there, once, and in the order in which it can happen."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zeropp
from ranks import on_cpu_only, on_ranks
from torch import nn

STEPS, BLOCKS, WIDTH = 3, 4, 160


def _model(**config: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
    return zeropp.prepare(model, torch.optim.AdamW(model.parameters()), zeropp.Config(**config))


def _train(model: nn.Module, optimizer: Any) -> None:
    for _ in range(STEPS):
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _read(path: Path) -> dict[str, list[dict[str, Any]]]:
    whole = json.loads(path.read_text())
    assert whole["otherData"]["dropped"] == 0
    found: dict[str, list[dict[str, Any]]] = {}
    for event in whole["traceEvents"]:
        if event["ph"] != "M":
            found.setdefault(event["cat"], []).append(event)
    return found


@on_ranks(2)
def test_gathering() -> None:
    """Each unit is gathered for forward and for backward of each step, inside them, and reduced once."""
    on_cpu_only("gathers are operations of the GPU, and no spans of the host")
    model, optimizer = _model(host_copy="off", prefetch=0)
    _train(model, optimizer)
    with tempfile.TemporaryDirectory() as folder, zeropp.trace(f"{folder}/t.json") as trace:
        _train(model, optimizer)
        trace.__exit__(None, None, None)
        assert trace.file.name == f"t.rank-{dist.get_rank()}.json"
        found = _read(trace.file)
        trace.__enter__()
    bytes_ = 4 * (WIDTH * WIDTH + WIDTH)
    names = sorted(str(i) for i in range(BLOCKS))
    for kind, times in (("gather", 2), ("reduce", 1), ("forward", 1)):
        seen = [e["name"] for e in found[kind] if e["name"] != "model"]
        assert sorted(seen) == sorted(names * STEPS * times), (kind, seen)
    assert all(e["args"]["bytes"] >= bytes_ for e in found["gather"])
    assert len(found["backward"]) == len(found["step"]) == STEPS
    passes = [e for e in found["forward"] if e["name"] == "model"] + found["backward"]
    for event in found["gather"]:
        inside = [p for p in passes if p["ts"] <= event["ts"] and event["ts"] + event["dur"] <= p["ts"] + p["dur"]]
        assert len(inside) == 1, event
    assert {e["name"] for e in found["wait"]} == {
        "for a gather", "for reductions", "for the other ranks", "until all ranks step", "until all ranks have stepped",
    }  # fmt: skip
    assert all(e["pid"] == dist.get_rank() and e["dur"] >= 0 for events in found.values() for e in events)


@on_ranks(2)
def test_files() -> None:
    """Offloaded states: pairs of begin and end, with bytes."""
    with tempfile.TemporaryDirectory() as folder:
        offload = zeropp.Offload(optimizer=zeropp.Tier("nvme", path=folder))
        model, optimizer = _model(host_copy="off", offload=offload)
        _train(model, optimizer)
        with zeropp.trace(Path(folder) / "t.json") as trace:
            _train(model, optimizer)
        found = _read(trace.file)
    for kind in ("read", "write"):
        begins = {e["id"]: e for e in found[kind] if e["ph"] == "b"}
        ends = {e["id"]: e for e in found[kind] if e["ph"] == "e"}
        assert begins.keys() == ends.keys() and all(ends[i]["ts"] >= begin["ts"] for i, begin in begins.items())
        states = 4 * 2 * (WIDTH * WIDTH + WIDTH) * BLOCKS // dist.get_world_size() * STEPS
        assert sum(e["args"]["bytes"] for e in begins.values()) >= states


@on_ranks(2)
def test_refusals() -> None:
    told: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        with zeropp.trace(f"{folder}/a.json"):
            for act in (lambda: zeropp.trace(f"{folder}/b.json").__enter__(), lambda: zeropp.trace("/no/such/t.json")):
                try:
                    act()
                except zeropp.Error as error:
                    told.append(str(error))
        with zeropp.trace(f"{folder}/c.json", capacity=2) as trace:
            _train(*_model(host_copy="off"))
        assert json.loads(trace.file.read_text())["otherData"]["dropped"] > 0
    assert "one is being taken already in this process" in told[0]
    assert told[1] == "trace: /no/such is no folder; make it first"
