# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of jobs whose ranks hold different parts of the model: saved in one layout, read in another.

The model is a bag of parameters whose gradients are fixed numbers, so that a part of a parameter trains as the whole does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from checkpoint.models import group
from launch import run_ranks
from safetensors import safe_open
from torch import nn
from zeropp.checkpoint import offline
from zeropp.comm import job
from zeropp.errors import CheckpointError
from zeropp.zero.model import boxes
from zeropp.zero.model.boxes import Box, Boxes
from zeropp.zero.prepare import prepare_over

SHAPES = {
    "first.rows": (5, 6), "first.columns": (4, 7), "first.norm": (9,), "shared": (6, 5), "last.experts": (4, 3, 5),
    "last.packed": (8, 3), "last.bias": (3,),
}  # fmt: skip


def whole(name: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(map(ord, name)))
    return torch.randn(SHAPES[name], generator=generator)


def part_of(name: str, tp: int, index: int) -> Boxes:
    """Return the boxes that a rank of a tensor-parallel group holds of a parameter."""
    shape = SHAPES[name]
    if name.endswith("packed"):  # two halves, each cut by rows
        rows = shape[0] // 2 // tp
        size = (rows, shape[1])
        found = (Box((index * rows, 0), size, (0, 0)), Box((shape[0] // 2 + index * rows, 0), size, (rows, 0)))
        return Boxes(shape, (2 * rows, shape[1]), found)
    dim = {"rows": 0, "experts": 0, "columns": 1}.get(name.split(".")[-1])
    if dim is None:
        return boxes.whole_of(shape)
    each = -(-shape[dim] // tp)
    low = index * each
    size = [min(each, shape[dim] - low) if d == dim else n for d, n in enumerate(shape)]
    return boxes.one_box(shape, [low if d == dim else 0 for d in range(len(shape))], size)


def local(part: Boxes, values: torch.Tensor) -> torch.Tensor:
    out = torch.empty(part.shape)
    for box in part.boxes:
        there = tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))
        out[tuple(slice(a, a + n) for a, n in zip(box.at, box.size, strict=True))] = values[there]
    return out


class Bag(nn.Module):
    """The parameters of one rank."""

    def __init__(self, names: list[str], tp: int, index: int, seed: int) -> None:
        super().__init__()
        self.gradients = {}
        for name in names:
            module = self
            *path, last = name.split(".")
            for one in path:
                if not hasattr(module, one):
                    module.add_module(one, nn.Module())
                module = getattr(module, one)
            part = part_of(name, tp, index)
            parameter = nn.Parameter(local(part, whole(name, seed)))
            if not part.is_whole:
                boxes.hold_boxes(parameter, part)
            module.register_parameter(last, parameter)
            self.gradients[name] = local(part, whole(name, 1000))
        for end in sorted({name.split(".")[0] for name in names} - {"shared"}):
            self.register_buffer(f"seen_{end}", torch.tensor(float(seed)))

    def forward(self) -> torch.Tensor:
        found = dict(self.named_parameters())
        return sum((found[name] * gradient).sum() for name, gradient in self.gradients.items())


def make(layout: dict[str, int], stage: int, seed: int) -> tuple[Any, Any]:
    """Return this rank's part of the model, prepared. The ranks are numbered pp, dp, tp, the last one fastest."""
    pp, dp, tp = (layout.get(name, 1) for name in ("pp", "dp", "tp"))
    rank = dist.get_rank() if dist.is_initialized() else 0
    at_pp, at_tp = rank // (dp * tp), rank % tp
    names = list(SHAPES)
    if pp == 2:
        names = [name for name in names if not name.startswith("last" if at_pp == 0 else "first")]
    model = Bag(names, tp, at_tp, seed)
    members = [(at_pp * dp + d) * tp + at_tp for d in range(dp)]
    ranks = job.over(members) if dist.is_initialized() else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return prepare_over(ranks, model, optimizer, zeropp.Config(stage=stage, host_copy="off"))


def step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model().backward()
    optimizer.step()


def wanted(steps: int) -> dict[str, torch.Tensor]:
    """What one process of plain torch has after so many steps."""
    model = Bag(list(SHAPES), 1, 0, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        step(model, optimizer)
    return {name: p.detach() for name, p in model.named_parameters()}


def check(found: dict[str, torch.Tensor], steps: int) -> None:
    for name, values in wanted(steps).items():
        assert (found[name] - values).abs().max() < 1e-6, name  # fp32, AdamW steps of 0.01


def save(rank: int, ranks: int, path: str, layout: dict[str, int], stage: int) -> None:
    with group(ranks):
        model, optimizer = make(layout, stage, 0)
        step(model, optimizer)
        step(model, optimizer)
        zeropp.save(
            path, model, optimizer, step=2, background=stage == 3, extra=[1]
        ).wait() if stage == 3 else zeropp.save(path, model, optimizer, step=2, extra=[1])


def resume(rank: int, ranks: int, path: str, layout: dict[str, int], stage: int) -> None:
    with group(ranks):
        model, optimizer = make(layout, stage, 77)
        assert zeropp.load(path, model, optimizer)["extra"] == [1]
        found = zeropp.full_state_dict(model)
        assert sorted(found) == sorted([*SHAPES, "seen_first", "seen_last"]) and found["seen_last"] == 0
        check(found, 2)
        step(model, optimizer)  # the moments and the number of steps came along
        again = zeropp.full_state_dict(model, rank_0_only=True)
        assert bool(again) == (rank == 0)
        if rank == 0:
            check(again, 3)
        zeropp.export(model, Path(path) / "online")
        other, _ = make(layout, stage, 5)
        zeropp.load_full_state_dict(other, Path(path) / "online")
        check(zeropp.full_state_dict(other), 3)


PP_DP, TP_DP, PP_TP, DP = {"pp": 2, "dp": 2}, {"tp": 2, "dp": 2}, {"pp": 2, "tp": 2}, {"dp": 2}


def number(layout: dict[str, int]) -> int:
    return layout.get("pp", 1) * layout.get("dp", 1) * layout.get("tp", 1)


@pytest.mark.parametrize(
    "saved, stage, read, read_stage",
    [
        (PP_DP, 2, TP_DP, 3),
        (TP_DP, 3, DP, 2),
        (DP, 3, PP_TP, 1),
        pytest.param(PP_TP, 1, {}, 0, marks=pytest.mark.slow),
        pytest.param({}, 0, TP_DP, 1, marks=pytest.mark.slow),
        pytest.param(TP_DP, 0, PP_DP, 3, marks=pytest.mark.slow),
        pytest.param(PP_DP, 3, {}, 0, marks=pytest.mark.slow),
        pytest.param(TP_DP, 1, {"tp": 2}, 2, marks=pytest.mark.slow),
        pytest.param({"tp": 2}, 2, TP_DP, 3, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_goes_from_one_layout_to_another(tmp_path, saved, stage, read, read_stage):
    run_ranks(number(saved), save, str(tmp_path), saved, stage, timeout=200)
    content = json.loads((tmp_path / "step-2" / "manifest.json").read_text())["content"]
    assert sorted(content["parameters"]) == sorted(SHAPES) and content["version"] == 2
    # Copies are written once: the files hold each element of each parameter and of its moments once.
    held = dict.fromkeys(SHAPES, 0)
    for file in (tmp_path / "step-2").glob("rank-*"):
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118
                name = key.removesuffix("/exp_avg_sq")
                if name in held and key != name:
                    held[name] += tensors.get_tensor(key).numel()
    assert held == {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
    assert all(one.wrong is None for one in offline.verify(tmp_path))
    check(offline.whole_state(tmp_path, None), 2)
    run_ranks(number(read), resume, str(tmp_path), read, read_stage, timeout=200)


def clash(rank: int, ranks: int, path: str) -> None:
    """Two ranks hold parts of one parameter that overlap; two whole tensors of one name and two shapes."""
    with group(ranks):
        for name, size, offset, says in (
            (
                "first.rows",
                (4, 6),
                (rank, 0),
                "save: 'first.rows' has parts that overlap (rank 0 holds [4, 6] at [0, 0]",
            ),
            ("first.rows", (2, 6), (2 * rank, 0), "save: 'first.rows' has 30 elements, and its parts hold 24 of them"),
            (
                "first.rows",
                (5, 6 + rank),
                None,
                "'first.rows' has shape [5, 6] on rank 0 and [5, 7] on rank 1; two parameters of one name",
            ),
        ):
            model = nn.Module()
            model.first = nn.Module()
            model.first.rows = nn.Parameter(torch.zeros(size))
            if offset is not None:
                boxes.hold(model.first.rows, SHAPES[name], offset)
            model, _ = prepare_over(job.over([rank]), model, None, None)
            with pytest.raises(CheckpointError) as raised:
                zeropp.save(path, model, step=1)
            assert says in str(raised.value), str(raised.value)


def test_parts_that_are_no_tensor_are_refused_by_name(tmp_path):
    run_ranks(2, clash, str(tmp_path), timeout=100)
    assert not (tmp_path / "step-1").exists()
