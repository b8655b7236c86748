# SPDX-License-Identifier: Apache-2.0
"""``save(..., loader=)``: where each rank stands in its data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import zeropp
from checkpoint.models import group, make
from launch import run_ranks
from token_rows import Rows
from zeropp.config.efficiency import Growth
from zeropp.data import CurriculumSampler, analyse


class Stream:
    """An endless loader of random rows, another one on each rank."""

    def __init__(self, rank: int) -> None:
        self.generator = torch.Generator().manual_seed(rank)
        self.taken, self.buffer = 0, b"\x00\xff"

    def __next__(self) -> float:
        self.taken += 1
        return float(torch.rand((), generator=self.generator))

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.generator.get_state(), "taken": self.taken, 3: self.buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken, self.buffer = state["taken"], state[3]
        self.generator.set_state(state["rng"])


def sampler_in(folder: Path) -> CurriculumSampler:
    return CurriculumSampler(folder / "index", {"length": Growth(20, 100, steps=9)}, batch=8)


def save(rank: int, ranks: int, path: str, background: bool) -> None:
    with group(ranks):
        folder, stream = Path(path), Stream(rank)
        analyse(Rows(60), {"length": "seqlen"}, folder / "index")
        model, optimizer, _ = make()
        for _ in range(3 + rank):
            next(stream)
        saving = zeropp.save(folder / "streams", model, optimizer, loader=stream, background=background)
        (folder / f"next.{rank}").write_text(json.dumps([next(stream) for _ in range(5)]))
        if background:
            saving.wait()
        sampler = sampler_in(folder)
        for _ in range(4):
            next(sampler)
        zeropp.save(folder / "samplers", model, optimizer, loader=sampler)
        zeropp.save(folder / "none", model, optimizer)


def load(rank: int, ranks: int, path: str) -> None:
    with group(ranks):
        folder, stream = Path(path), Stream(7)
        model, optimizer, _ = make()
        if ranks == 2:
            zeropp.load(folder / "streams", model, optimizer, loader=stream)
            assert [next(stream) for _ in range(5)] == json.loads((folder / f"next.{rank}").read_text())
            assert (stream.taken, stream.buffer) == (3 + rank + 5, b"\x00\xff")
        else:
            before = [value.clone() for value in zeropp.full_state_dict(model).values()]
            with pytest.raises(zeropp.CheckpointError, match=r"saved by 2 ranks.* is 1: the places cannot be split"):
                zeropp.load(folder / "streams", model, optimizer, loader=stream)
            assert all(map(torch.equal, before, zeropp.full_state_dict(model).values()))  # nothing was touched
        assert zeropp.load(folder / "streams", model, optimizer)["step"] == 0
        sampler = sampler_in(folder)
        zeropp.load(folder / "samplers", model, optimizer, loader=sampler)
        assert sampler.step == 4 and sum(map(len, [next(sampler)])) == 8 // ranks
        for name, said in (("none", "holds no loader"), ("samplers", "holds CurriculumSampler")):
            with pytest.raises(zeropp.CheckpointError, match=said):
                zeropp.load(folder / name, model, optimizer, loader=stream)
        with pytest.raises(zeropp.ConfigError, match="StatefulDataLoader"):
            zeropp.load(folder / "none", model, optimizer, loader=iter([1]))


@pytest.mark.parametrize("background", [False, True])
def test_each_rank_goes_on_where_it_stood(tmp_path: Path, background: bool) -> None:
    run_ranks(2, save, str(tmp_path), background, timeout=200)
    run_ranks(2, load, str(tmp_path), timeout=200)
    run_ranks(1, load, str(tmp_path), timeout=200)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stateful_loader_of_torchdata_with_a_curriculum(tmp_path: Path, workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    dataset = Rows(60)
    analyse(dataset, {"length": "seqlen"}, tmp_path / "index")

    def loader() -> Any:
        sampler = CurriculumSampler(tmp_path / "index", {"length": Growth(20, 100, steps=9)}, batch=6, steps=20)
        return stateful.StatefulDataLoader(dataset, batch_sampler=sampler, num_workers=workers, collate_fn=rows_of)

    model, optimizer, _ = make()
    first = loader()
    seen, walk = [], iter(first)
    for _ in range(7):
        next(walk)
    zeropp.save(tmp_path / "ckpt", model, optimizer, loader=first)
    seen = list(walk)
    second = loader()
    zeropp.load(tmp_path / "ckpt", model, optimizer, loader=second)
    assert list(second) == seen and len(seen) == 13


def rows_of(samples: list[Any]) -> list[list[int]]:
    return [sample["input_ids"].tolist() for sample in samples]
