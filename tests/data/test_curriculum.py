# SPDX-License-Identifier: Apache-2.0
"""Orders of a curriculum: against sets, over ranks, after a resume, and the walk in C against one in Python."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from faults import files_of_at_most
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import on_ranks
from token_rows import Rows
from zeropp import _C
from zeropp.config.efficiency import Growth
from zeropp.data import CurriculumSampler, Index, Percentile, Value, analyse

SAMPLES = 300
TO_ALL = Growth(10, 100, steps=40)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    path = tmp_path_factory.mktemp("index") / "index"
    return analyse(Rows(SAMPLES), {"length": "seqlen", "rarity": "vocab_rarity", "first": first_token}, path)


def first_token(sample: Any) -> float:
    return float(sample["input_ids"][0])


def whole(sampler: CurriculumSampler, steps: int) -> list[list[int]]:
    return [sampler.of_step(step) for step in range(steps)]


# -- which samples ---------------------------------------------------------------------------------------------------------------------


def test_batches_hold_samples_within_all_bounds(index: Index, tmp_path: Path) -> None:
    length, rank = index.values("length"), torch.empty(SAMPLES, dtype=torch.int64)
    rank[index.order("first").long()] = torch.arange(SAMPLES)
    bounds = {"length": Value(Growth(4, 12, steps=50)), "first": Percentile(Growth(20, 100, steps=30))}
    sampler = CurriculumSampler(index, bounds, batch=8, steps=80, order_path=tmp_path)
    for step in range(80):
        batch = torch.tensor(sampler.of_step(step))
        assert float(length[batch].max()) <= bounds["length"].schedule(step)
        assert int(rank[batch].max()) < -(-bounds["first"].schedule(step) * SAMPLES // 100)
    seen = {sample for step in range(80) for sample in sampler.of_step(step)}
    assert len(seen) == SAMPLES  # all, at last


@pytest.mark.parametrize("batch", [7, 32, 450])
def test_no_sample_comes_twice_before_every_admissible_one_came(index: Index, tmp_path: Path, batch: int) -> None:
    sampler = CurriculumSampler(index, {"length": TO_ALL}, batch=batch, order_path=tmp_path)
    by_rank, undrawn = index.order("length").tolist(), set[int]()
    admitted = 0
    for step in range(100):
        now = -(-TO_ALL(step) * SAMPLES // 100)
        undrawn |= set(by_rank[admitted:now])
        admitted = now
        for sample in sampler.of_step(step):
            if not undrawn:
                undrawn = set(by_rank[:admitted])
            assert sample in undrawn
            undrawn.remove(sample)


def test_draws_are_even() -> None:
    firsts, pairs = Counter[int](), Counter[tuple[int, int]]()
    for seed in range(3000):
        drawn = draw(torch.arange(50, dtype=torch.int32), torch.tensor([seed, 0, 0]), [30, 30, 30], 10)
        assert sorted(drawn) == list(range(30))  # one round
        firsts[drawn[0]] += 1
        pairs[drawn[0], drawn[1]] += 1
    # 3000 draws of 30: mean 100, standard deviation 9.8; five of them. Of 870 pairs: mean 3.4, standard deviation 1.9; eight.
    assert len(firsts) == 30 and all(abs(count - 100) < 49 for count in firsts.values())
    assert max(pairs.values()) < 19


class Walk:
    """The order sample by sample, with lists (csrc/ops/draw/draw.h)."""

    def __init__(self, arrival: list[int], seed: int) -> None:
        self.pool, self.state, self.admitted, self.left = list(arrival), seed, 0, 0

    def below(self, bound: int) -> int:
        while True:
            self.state = (self.state + 0x9E3779B97F4A7C15) % (1 << 64)
            z = self.state
            z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
            z = (z ^ (z >> 27)) * 0x94D049BB133111EB % (1 << 64)
            product = ((z ^ (z >> 31)) >> 32) * bound
            if product % (1 << 32) >= (1 << 32) % bound:
                return product >> 32

    def swap(self, a: int, b: int) -> None:
        self.pool[a], self.pool[b] = self.pool[b], self.pool[a]

    def step(self, wanted: int, batch: int) -> list[int]:
        while self.admitted < wanted:
            self.swap(self.admitted, self.left)
            self.admitted, self.left = self.admitted + 1, self.left + 1
        drawn = []
        for _ in range(batch):
            self.left = self.left or self.admitted
            self.left -= 1
            self.swap(self.below(self.left + 1), self.left)
            drawn.append(self.pool[self.left])
        return drawn


def draw(pool: torch.Tensor, state: torch.Tensor, wanted: list[int], batch: int) -> list[int]:
    order, admitted = torch.full((len(wanted) * batch,), -1, dtype=torch.int32), torch.tensor(wanted)
    _C.draw_order(
        pool.data_ptr(), len(pool), state.data_ptr(), admitted.data_ptr(), len(wanted), batch, order.data_ptr()
    )
    return order.tolist()


@settings(deadline=None, max_examples=60)
@given(
    samples=st.integers(1, 40), seed=st.integers(0, 2**63 - 1), batch=st.integers(1, 9), cut=st.integers(0, 10),
    data=st.data(),
)  # fmt: skip
def test_the_walk_in_c_is_the_one_in_python(samples: int, seed: int, batch: int, cut: int, data: st.DataObject) -> None:
    wanted = sorted(data.draw(st.lists(st.integers(1, samples), min_size=1, max_size=20)))
    arrival = data.draw(st.permutations(range(samples)))
    walk = Walk(list(arrival), seed)
    pool, state = torch.tensor(arrival, dtype=torch.int32), torch.tensor([seed, 0, 0])
    got = [sample for part in (wanted[:cut], wanted[cut:]) for sample in draw(pool, state, part, batch)]
    assert got == [sample for count in wanted for sample in walk.step(count, batch)]


@pytest.mark.parametrize("wanted", [[0], [3, 2], [5], [-1]])
def test_the_walk_refuses_bounds_outside_of_the_pool(wanted: list[int]) -> None:
    state = torch.tensor([1, 0, 0])
    with pytest.raises(ValueError, match="admits"):
        draw(torch.arange(4, dtype=torch.int32), state, wanted, 2)
    assert state.tolist() == [1, 0, 0]


# -- ranks and resume ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batch", [None, 3])
def test_ranks_share_each_batch(index: Index, tmp_path: Path, ranks: int, micro_batch: int | None) -> None:
    alone = CurriculumSampler(index, {"length": TO_ALL}, batch=10, steps=20, order_path=tmp_path)
    each = [
        CurriculumSampler(
            index,
            {"length": TO_ALL},
            batch=10,
            micro_batch=micro_batch,
            steps=20,
            order_path=tmp_path,
            rank=r,
            ranks=ranks,
        )
        for r in range(ranks)
    ]
    assert len({len(one) for one in each}) == 1
    for step in range(20):
        got, weight = Counter[int](), 0.0
        for sampler in each:
            assert sampler.step == step
            for micro in sampler.micro_batches:
                samples = next(sampler)
                assert len(samples) == len(micro.sequences)
                weight += micro.weight
                got.update(samples if micro.weight else [])
        assert got == Counter(alone.of_step(step))
        assert weight / ranks / len(each[0].micro_batches) == pytest.approx(1.0)
    assert [list(one) for one in each] == [[] for _ in each]
    assert len(list(tmp_path.iterdir())) == 1  # one file for all


@pytest.mark.parametrize("steps", [None, 60])
def test_a_resumed_sampler_goes_on(index: Index, tmp_path: Path, steps: int | None) -> None:
    options: dict[str, Any] = {"batch": 12, "micro_batch": 5, "steps": steps, "order_path": tmp_path}
    sampler = CurriculumSampler(index, {"length": TO_ALL}, **options)
    lists = [next(sampler) for _ in range(3 * 40)]
    later = CurriculumSampler(index, {"length": TO_ALL}, **options, step=17)
    assert [next(later) for _ in range(30)] == lists[51:81]
    for at in (0, 7, 90):
        first = CurriculumSampler(index, {"length": TO_ALL}, **options)
        for _ in range(at):
            next(first)
        second = CurriculumSampler(index, {"length": TO_ALL}, **options)
        second.load_state_dict(first.state_dict())
        assert [next(second) for _ in range(20)] == lists[at : at + 20]
    if steps is not None:
        assert len(later) == 3 * (60 - 27)
    else:
        with pytest.raises(TypeError, match="steps="):
            len(sampler)


def test_an_order_without_end_grows_and_keeps_its_draws(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zeropp.data.curriculum.FIRST_DRAWS", 1)
    monkeypatch.setattr("zeropp.data.curriculum._CHUNK_DRAWS", 100)
    fixed = CurriculumSampler(index, {"length": TO_ALL}, batch=11, steps=400, order_path=tmp_path / "fixed")
    grown = CurriculumSampler(index, {"length": TO_ALL}, batch=11, order_path=tmp_path / "grown")
    (file,) = (tmp_path / "grown").iterdir()
    before = file.stat().st_size
    assert [next(grown) for _ in range(400)] == whole(fixed, 400)
    assert file.stat().st_size >= 8 * before and list((tmp_path / "grown").iterdir()) == [file]
    again = CurriculumSampler(index, {"length": TO_ALL}, batch=11, order_path=tmp_path / "grown", step=399)
    assert next(again) == fixed.of_step(399)


def test_an_order_is_made_once_and_anew_for_other_choices(index: Index, tmp_path: Path) -> None:
    def order(**change: Any) -> list[list[int]]:
        options: dict[str, Any] = {"metrics": {"length": TO_ALL}, "batch": 8, "steps": 30, "seed": 1, **change}
        return whole(CurriculumSampler(index, order_path=tmp_path, **options), 30)

    first = order()
    (file,) = tmp_path.iterdir()
    inode = file.stat().st_ino
    assert order() == first and file.stat().st_ino == inode
    changes = [{"seed": 2}, {"metrics": {"length": Growth(10, 100, steps=39)}}, {"metrics": {"rarity": TO_ALL}}]
    changes += [{"metrics": {"length": Growth.at({0: 10, at: 100})}} for at in (21, 22)]
    assert all(order(**change) != first for change in changes)
    assert len(list(tmp_path.iterdir())) == 6


@pytest.mark.parametrize("workers", [0, 2])
def test_it_is_a_batch_sampler_of_torch(index: Index, tmp_path: Path, workers: int) -> None:
    dataset = Rows(SAMPLES)
    sampler = CurriculumSampler(index, {"length": TO_ALL}, batch=6, steps=25, order_path=tmp_path, dataset=dataset)
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler, num_workers=workers, collate_fn=list)
    assert len(loader) == 25
    got = [[row["input_ids"].tolist() for row in batch] for batch in loader]
    assert got == [[dataset.rows[i] for i in sampler.of_step(step)] for step in range(25)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_accelerate_shares_the_lists(index: Index, tmp_path: Path, ranks: int) -> None:
    accelerate = pytest.importorskip("accelerate.data_loader")
    dataset, got = Rows(SAMPLES), []
    for rank in range(ranks):
        sampler = CurriculumSampler(
            index, {"length": TO_ALL}, batch=16, micro_batch=2, steps=12, order_path=tmp_path, rank=0, ranks=1
        )
        loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler, collate_fn=list)
        shared = accelerate.prepare_data_loader(loader, num_processes=ranks, process_index=rank, put_on_device=False)
        got.append([[row["input_ids"].tolist() for row in batch] for batch in shared])
    whole_run = CurriculumSampler(index, {"length": TO_ALL}, batch=16, steps=12, order_path=tmp_path)
    per_step = 8 // ranks
    for step in range(12):
        rows = [row for mine in got for batch in mine[step * per_step : (step + 1) * per_step] for row in batch]
        assert sorted(rows) == sorted(dataset.rows[sample] for sample in whole_run.of_step(step))


@on_ranks(2)
def test_ranks_with_different_indexes_name_both() -> None:
    rank, folder = dist.get_rank(), common_folder()
    for turn, seed in enumerate((0, rank)):
        path = folder / f"{turn}-{seed}"
        analyse(Rows(50, seed=seed), {"length": "seqlen"}, path)
        if turn == 0:
            sampler = CurriculumSampler(path, {"length": TO_ALL}, batch=4, steps=9)
            assert next(sampler) == sampler.of_step(0)[2 * rank : 2 * rank + 2]
            continue
        with pytest.raises(zeropp.ConfigError) as caught:
            CurriculumSampler(path, {"length": TO_ALL}, batch=4, steps=9)
        assert "rank 1 has" in str(caught.value) and "rank 0 has" in str(caught.value)
        assert "/1-0" in str(caught.value) and "/1-1" in str(caught.value)
    with pytest.raises(zeropp.ConfigError, match="rank 1 would draw another order"):
        CurriculumSampler(folder / "0-0", {"length": TO_ALL}, batch=4, seed=rank)
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)


def common_folder() -> Path:
    """Return one new folder, the same on all ranks."""
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name)
    return Path(name[0])


# -- bad input, faults -----------------------------------------------------------------------------------------------------------------


def test_bad_arguments_are_named(index: Index, tmp_path: Path) -> None:
    def refused(said: str, metrics: Any = None, **change: Any) -> None:
        options: dict[str, Any] = {"batch": 4, "steps": 20, "order_path": tmp_path / "orders", **change}
        with pytest.raises(zeropp.ConfigError, match=said):
            CurriculumSampler(index, {"length": TO_ALL} if metrics is None else metrics, **options)
        assert not (tmp_path / "orders").exists() or not list((tmp_path / "orders").iterdir())

    refused("batch 0", batch=0)
    refused("micro_batch 0", micro_batch=0)
    refused("steps 0", steps=0)
    refused("step -1", step=-1)
    refused("seed 1.5", seed=1.5)
    refused("no metric 'depth'; it has length", {"depth": TO_ALL})
    refused("'length' is 3", {"length": 3})
    refused("shrinks from 50 to 40 at step 7", {"length": lambda step: 40 if step == 7 else 50})
    refused("NaN at step 0", {"length": lambda step: float("nan")})
    refused("percentile 200 from 1.*Value", {"length": Growth(1, 200, steps=5)})
    refused("no sample of 300 .* step 0.*'length' 0", {"length": Value(Growth(0, 5, steps=5))})
    refused("the dataset has 301", dataset=Rows(301))
    refused("batch 1 is less than the 2 ranks", batch=1, rank=0, ranks=2)
    sampler = CurriculumSampler(index, {"length": TO_ALL}, batch=4, order_path=tmp_path)
    with pytest.raises(zeropp.ConfigError, match="step -3"):
        sampler.step = -3
    other = CurriculumSampler(index, {"length": TO_ALL}, batch=4, seed=5, order_path=tmp_path)
    with pytest.raises(zeropp.ConfigError, match="of the order"):
        sampler.load_state_dict(other.state_dict())
    halves = CurriculumSampler(index, {"length": TO_ALL}, batch=4, micro_batch=2, order_path=tmp_path)
    next(halves)
    with pytest.raises(zeropp.ConfigError, match="inside step 0, of 2 micro-batches"):
        sampler.load_state_dict(halves.state_dict())


def test_an_order_that_was_cut_short_is_made_again(index: Index, tmp_path: Path) -> None:
    wanted = whole(CurriculumSampler(index, {"length": TO_ALL}, batch=4, steps=50, order_path=tmp_path), 50)
    (file,) = tmp_path.iterdir()
    os.truncate(file, 100)
    file.with_name(f".{file.stem}.new").write_bytes(b"x" * 5000)  # of a run that was killed
    assert whole(CurriculumSampler(index, {"length": TO_ALL}, batch=4, steps=50, order_path=tmp_path), 50) == wanted
    assert list(tmp_path.iterdir()) == [file]


def test_a_full_disk_leaves_no_order(index: Index, tmp_path: Path) -> None:
    with files_of_at_most(5000), pytest.raises(zeropp.TierError, match="80000 bytes wanted"):
        CurriculumSampler(index, {"length": TO_ALL}, batch=4, steps=5000, order_path=tmp_path)
    assert not list(tmp_path.iterdir())
