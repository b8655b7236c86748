# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's index files: written and read back, read by DeepSpeed where it is installed, and broken bytes."""

from __future__ import annotations

import itertools
import os
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import zeropp
from hypothesis import given, settings
from hypothesis import strategies as st
from token_rows import Rows
from zeropp.data import CurriculumSampler, Percentile, Value, analyse, sampler_of
from zeropp.data.indexed import read_rows, values_of_samples, write_rows
from zeropp.deepspeed.data_analyzer import DataAnalyzer

SAMPLES = 130


def seqlen(batch: Any) -> torch.Tensor:
    return batch["attention_mask"].sum(1)


def counts(batch: Any) -> torch.Tensor:
    return torch.bincount(batch["input_ids"].reshape(-1), minlength=50)


def as_tensors(rows: list[Any]) -> dict[str, torch.Tensor]:
    return {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}


@pytest.fixture(scope="module")
def analysed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("analysed")
    analyzer = DataAnalyzer(
        Rows(SAMPLES, padded=True), batch_size=9, metric_names=["seqlen", "counts"], metric_functions=[seqlen, counts],
        metric_types=["single_value_per_sample", "accumulate_value_over_samples"], metric_dtypes=[torch.int64] * 2,
        save_path=str(folder), collate_fn=as_tensors,
    )  # fmt: skip
    analyzer.run_map_reduce()
    return folder


@settings(deadline=None, max_examples=50)
@given(
    rows=st.lists(st.lists(st.integers(-(2**40), 2**40), max_size=5), min_size=1, max_size=9), narrow=st.integers(0, 40)
)
def test_rows_come_back(tmp_path_factory: pytest.TempPathFactory, rows: list[list[int]], narrow: int) -> None:
    prefix = tmp_path_factory.mktemp("rows") / "x"
    flat = [value >> narrow for row in rows for value in row] or [7]
    lengths = [len(row) for row in rows] if any(rows) else [1]
    write_rows(prefix, torch.tensor(lengths), torch.tensor(flat))
    got = read_rows(prefix)
    assert got[0].tolist() == lengths and got[1].tolist() == flat


def test_the_analyzer_writes_what_deepspeed_reads(analysed: Path) -> None:
    dataset = Rows(SAMPLES, padded=True)
    lengths, samples = read_rows(analysed / "seqlen" / "seqlen_index_to_sample")
    ones, values = read_rows(analysed / "seqlen" / "seqlen_index_to_metric")
    wanted = sorted({len(row) for row in dataset.rows})
    assert values.tolist() == wanted and ones.tolist() == [1] * len(wanted)
    assert [part.tolist() for part in samples.split(lengths.tolist())] == [
        [i for i, row in enumerate(dataset.rows) if len(row) == value] for value in wanted
    ]
    assert read_rows(analysed / "seqlen" / "seqlen_sample_to_metric")[1].tolist() == [len(row) for row in dataset.rows]
    total = read_rows(analysed / "counts" / "counts_metric_value")[1]
    assert total[1:].tolist() == [sum(row.count(token) for row in dataset.rows) for token in range(1, 50)]


def test_deepspeeds_own_class_reads_the_files(analysed: Path) -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    indexed = pytest.importorskip("deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset")
    for name in ("sample_to_metric", "index_to_metric", "index_to_sample", "index_to_sample_percentile_merged"):
        lengths, values = read_rows(analysed / "seqlen" / f"seqlen_{name}")
        theirs = indexed.MMapIndexedDataset(str(analysed / "seqlen" / f"seqlen_{name}"), skip_warmup=True)
        assert [theirs[row].tolist() for row in range(len(theirs))] == [
            part.tolist() for part in values.split(lengths.tolist())
        ]


# -- from the JSON ---------------------------------------------------------------------------------------------------------------------


def section(folder: Path, **metric: Any) -> dict[str, Any]:
    found = {
        "index_to_sample_path": str(folder / "seqlen" / "seqlen_index_to_sample"),
        "index_to_metric_path": str(folder / "seqlen" / "seqlen_index_to_metric"),
        "difficulty_type": "value", "clustering_type": "schedule_based", "min_difficulty": 3, "max_difficulty": 12,
        "schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 20, "difficulty_step": 1}, **metric,
    }  # fmt: skip
    learning = {"enabled": True, "data_cluster_path": str(folder / "clusters"), "curriculum_metrics": {"seqlen": found}}
    sampling = {"enabled": True, "num_epochs": 3, "curriculum_learning": learning}
    return {"enabled": True, "seed": 7, "data_sampling": sampling}


def curriculum(folder: Path, **metric: Any) -> Any:
    efficiency = zeropp.Config.from_json({"data_efficiency": section(folder, **metric)}).efficiency
    assert efficiency is not None
    return efficiency.curriculum


def linear(step: int) -> int:
    return min(12, 3 + 9 * (step + 1) // 20)


def test_the_section_is_a_sampler(analysed: Path, tmp_path: Path) -> None:
    dataset = Rows(SAMPLES, padded=True)
    index = analyse(dataset, {"seqlen": "seqlen"}, tmp_path / "index")
    cases: list[tuple[dict[str, Any], Any]] = [
        ({}, Value(linear)),
        ({"difficulty_type": "percentile"}, Percentile(linear, of=12)),
        ({"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [4, 12], "max_step": [5]}},
         Value(lambda step: 4 if step < 5 else 12)),
    ]  # fmt: skip
    for change, bound in cases:
        got = sampler_of(curriculum(analysed, **change), dataset, batch=8, micro_batch=4, seed=7, rank=0, ranks=1)
        wanted = CurriculumSampler(index, {"seqlen": bound}, batch=8, seed=7, steps=48)
        assert len(got) == 2 * (SAMPLES * 3 // 8)
        for step in range(48):
            lengths = [len(dataset.rows[sample]) for sample in got.of_step(step)]
            assert "schedule_type" in change or bound.schedule(step) == got._bounds["seqlen"].schedule(step)
            assert isinstance(bound, Percentile) or max(lengths) <= bound.schedule(step), change
        assert {s for step in range(48) for s in got.of_step(step)} == {
            s for step in range(48) for s in wanted.of_step(step)
        }
    single = sampler_of(curriculum(analysed, clustering_type="single_cluster"), dataset, batch=10, rank=0, ranks=1)
    assert sorted(sample for step in range(13) for sample in single.of_step(step)) == list(range(SAMPLES))


def test_an_index_of_another_dataset_is_named(analysed: Path) -> None:
    for samples, said in ((SAMPLES + 1, "of the dataset's 131 samples"), (SAMPLES - 1, "names samples 0 to 129")):
        with pytest.raises(zeropp.ConfigError, match=said):
            sampler_of(curriculum(analysed), Rows(samples, padded=True), batch=8, rank=0, ranks=1)


def test_initialize_gives_a_loader_with_the_curriculum(analysed: Path, tmp_path: Path) -> None:
    dataset = Rows(SAMPLES, padded=True)

    def start(**metric: Any) -> tuple[Any, Any]:
        keys = {
            "train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1},
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}, "data_efficiency": section(analysed, **metric),
        }  # fmt: skip
        model = torch.nn.Linear(12, 1)
        engine, _, loader, _ = zeropp.initialize(model=model, config=keys, training_data=dataset, collate_fn=as_tensors)
        return engine, loader

    def train(engine: Any, loader: Any, steps: int) -> list[list[int]]:
        seen = []
        for batch in itertools.islice(loader, 2 * steps):
            seen.append(batch["attention_mask"].sum(1).tolist())
            engine.backward(engine(batch["input_ids"].float()).square().mean())
            engine.step()
        return seen

    engine, loader = start()
    seen = train(engine, loader, 30)
    assert all(max(seen[2 * step] + seen[2 * step + 1]) <= linear(step) for step in range(30)) and len(seen[0]) == 4
    first, loader = start()
    train(first, loader, 11)
    first.save_checkpoint(str(tmp_path))
    second, loader = start()
    second.load_checkpoint(str(tmp_path))
    assert train(second, loader, 19) == seen[22:]
    with pytest.raises(zeropp.ConfigError, match="no schedule_type 'custom'"):
        second.set_custom_curriculum_learning_schedule({"seqlen": linear})
    custom, loader = start(schedule_type="custom")
    with pytest.raises(zeropp.ConfigError, match="set_custom_curriculum_learning_schedule"):
        next(iter(loader))
    custom.set_custom_curriculum_learning_schedule({"seqlen": lambda step: 4 if step <= 10 else 12})
    lengths = train(custom, loader, 20)
    assert max(max(part) for part in lengths[:20]) == 4 < max(max(part) for part in lengths[20:])


# -- broken bytes ----------------------------------------------------------------------------------------------------------------------


def test_broken_files_are_errors_and_nothing_else(analysed: Path, tmp_path: Path) -> None:
    source = analysed / "seqlen" / "seqlen_index_to_sample"
    good = {end: Path(f"{source}{end}").read_bytes() for end in (".idx", ".bin")}
    prefix, made, refused = tmp_path / "x", random.Random(0), 0
    for turn in range(1500):
        bad = {end: bytearray(data) for end, data in good.items()}
        one = bad[".idx"] if turn % 4 else bad[".bin"]
        kind = turn % 3
        if kind == 0:
            del one[made.randrange(len(one)) :]
        elif kind == 1:
            one[made.randrange(len(one))] = made.randrange(256)
        else:
            at = made.randrange(len(one) - 8)
            one[at : at + 8] = struct.pack("<q", made.choice([-1, 2**62, 2**31, 0, -(2**63)]))
        for end, data in bad.items():
            Path(f"{prefix}{end}").write_bytes(data)
        try:
            values_of_samples(prefix, None, SAMPLES)
        except (zeropp.CheckpointError, zeropp.ConfigError):
            refused += 1
    assert refused > 1000
    for end in (".idx", ".bin"):
        Path(f"{prefix}{end}").unlink(missing_ok=True)
        with pytest.raises(zeropp.CheckpointError, match="cannot be read"):
            read_rows(prefix)
