# SPDX-License-Identifier: Apache-2.0
"""Indexes of datasets: values against loops over tokens, runs that are killed or find the disk full, bad datasets."""

from __future__ import annotations

import json
import math
import os
import signal
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import zeropp
from faults import exit_codes, files_of_at_most
from token_rows import Rows
from zeropp.data import analyse, open_index
from zeropp.data.metrics import Batched

METRICS = {"length": "seqlen", "rarity": "vocab_rarity", "both": "seqlen_vocab_rarity"}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeropp.data.analysis.BLOCK", 16)
    monkeypatch.setattr("zeropp.data.analysis.SAVE_S", 0.0)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def by_loops(rows: list[list[int]]) -> dict[str, list[float]]:
    """Compute DeepSpeed's formulas token by token."""
    counts = Counter(token for row in rows for token in row)
    total = sum(counts.values())
    rarity = [int(sum(-math.log(counts[token] / total) for token in row)) for row in rows]
    places = math.ceil(math.log10(max(rarity))) + 1
    return {
        "length": [float(len(row)) for row in rows],
        "rarity": [float(one) for one in rarity],
        "both": [float(len(row) * 10**places + one) for row, one in zip(rows, rarity, strict=True)],
    }


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_metrics_are_the_loops_over_tokens(tmp_path: Path, workers: int, padded: bool) -> None:
    dataset = Rows(150, padded=padded)
    index = analyse(dataset, {**METRICS, "first": first_token}, tmp_path / "index", workers=workers)
    wanted = {**by_loops(dataset.rows), "first": [float(row[0]) for row in dataset.rows]}
    for name, values in wanted.items():
        assert index.values(name).tolist() == values, name
        assert index.order(name).tolist() == sorted(range(150), key=lambda i: (values[i], i)), name
    assert names_in(tmp_path) == ["index"]
    assert len(names_in(tmp_path / "index")) == 2 * 4 + 1
    assert open_index(tmp_path / "index") == index


def first_token(sample: Any) -> float:
    return float(sample["input_ids"][0])


def test_a_tensor_dataset_is_read_by_slices(tmp_path: Path) -> None:
    class Plain(torch.utils.data.TensorDataset):
        """Read sample by sample, because a subclass may change its samples."""

    tokens = torch.randint(50, (40, 6), generator=torch.Generator().manual_seed(0))
    seen: list[Any] = []

    def note(sample: Any) -> float:
        seen.append(sample)
        return float(sample[1] + len(sample[0]))

    metrics = {**METRICS, "mine": note}
    found = [analyse(kind(tokens, torch.arange(40)), metrics, tmp_path / kind.__name__)
             for kind in (Plain, torch.utils.data.TensorDataset)]  # fmt: skip
    for name in metrics:
        assert torch.equal(found[0].values(name), found[1].values(name)), name
    for one, other in zip(seen[:40], seen[40:], strict=True):
        assert type(one) is type(other) is tuple and all(map(torch.equal, one, other))


def test_few_samples_live_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeropp.data.analysis.BLOCK", 1024)
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most, lengths = 0, []

    class Dataset:
        def __len__(self) -> int:
            return 1500

        def __getitem__(self, number: int) -> torch.Tensor:
            nonlocal most
            sample = torch.tensor([number])
            alive.add(sample)
            most = max(most, len(alive))
            return sample

    def double(batch: torch.Tensor) -> torch.Tensor:
        lengths.append(len(batch))
        return 2 * batch[:, 0]

    batched = Batched(double, torch.utils.data.default_collate, 7)
    index = analyse(Dataset(), {"length": "seqlen", "mine": batched}, tmp_path / "index")
    assert index.values("mine").tolist() == [2.0 * number for number in range(1500)]
    assert lengths == [7] * 146 + [2] + [7] * 68, "the batches of two blocks"
    assert most <= 7 * 18


@pytest.mark.parametrize("kind", ["tensor", "list", "tuple", "array"])
def test_samples_may_be_plain_rows(tmp_path: Path, kind: str) -> None:
    rows = Rows(40).rows
    numpy = pytest.importorskip("numpy")
    make = {"tensor": torch.tensor, "list": list, "tuple": lambda row: (torch.tensor(row), 1), "array": numpy.array}[
        kind
    ]
    index = analyse([make(row) for row in rows], METRICS, tmp_path / "index")
    assert index.values("rarity").tolist() == by_loops(rows)["rarity"]


def test_padding_may_have_numbers_that_no_token_has(tmp_path: Path) -> None:
    samples = [
        {"input_ids": [1, 2, 999], "attention_mask": [1, 1, 0]},
        {"input_ids": [3, -1], "attention_mask": [1, 0]},
    ]
    index = analyse(samples, METRICS, tmp_path / "index")
    plain = analyse([[1, 2], [3]], METRICS, tmp_path / "plain")
    assert all(torch.equal(index.values(name), plain.values(name)) for name in METRICS)
    analyse([{"input_ids": [7], "attention_mask": [0]}], METRICS, tmp_path / "padding alone")


def test_a_dataset_gives_many_samples_at_once_where_it_can(tmp_path: Path) -> None:
    class Many(Rows):
        def __getitems__(self, numbers: list[int]) -> list[Any]:
            asked.append(numbers)
            return [self[number] for number in numbers]

    asked: list[list[int]] = []
    analyse(Many(40), {"length": "seqlen"}, tmp_path / "index")
    assert asked == [list(range(16)), list(range(16, 32)), list(range(32, 40))]


def test_a_finished_index_is_returned_and_another_replaced(tmp_path: Path) -> None:
    path, dataset = tmp_path / "index", Counting(60)
    analyse(dataset, {"length": "seqlen"}, path)
    read, inode = dataset.read, (path / "length.values").stat().st_ino
    analyse(dataset, {"length": "seqlen"}, path)
    assert dataset.read - read <= 66 and (path / "length.values").stat().st_ino == inode  # the fingerprint reads some
    index = analyse(dataset, {"length": "seqlen", "first": first_token}, path)
    assert index.metrics == ("length", "first")
    assert analyse(Rows(60, seed=1), {"length": "seqlen"}, path).digest != index.digest


class Counting(Rows):
    read = 0

    def __getitem__(self, number: int) -> Any:
        self.read += 1
        return super().__getitem__(number)


class Deadly(Counting):
    """Kills its process at a sample in one of the passes."""

    def __init__(self, samples: int, at: int) -> None:
        super().__init__(samples)
        self.at = at

    def __getitem__(self, number: int) -> Any:
        if self.read == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(number)


@pytest.mark.parametrize("at", [100, 300, 450])
def test_a_killed_run_goes_on(tmp_path: Path, at: int) -> None:
    path = tmp_path / "index"
    assert exit_codes(analyse, (Deadly(200, at), METRICS, path)) == [-signal.SIGKILL]
    assert not path.exists()
    dataset = Counting(200)
    index = analyse(dataset, METRICS, path)
    assert {name: index.values(name).tolist() for name in METRICS} == by_loops(dataset.rows)
    done = max(0, at - 66) // 16 * 16 - 16  # the fingerprint reads up to 66; the last block may not be saved
    assert dataset.read <= 66 + 400 - done
    assert names_in(tmp_path) == ["index"]


@pytest.mark.parametrize("bytes_", [4000, 9000])
def test_a_full_disk_is_an_error_and_the_next_run_goes_on(tmp_path: Path, bytes_: int) -> None:
    path = tmp_path / "index"
    with files_of_at_most(bytes_), pytest.raises(zeropp.TierError, match="free some space"):
        analyse(Rows(2000), METRICS, path)
    assert not path.exists()
    dataset = Counting(2000)
    index = analyse(dataset, METRICS, path)
    assert {name: index.values(name).tolist() for name in METRICS} == by_loops(dataset.rows)
    assert dataset.read < 66 + 2 * 2000  # not from the beginning


def test_what_another_dataset_left_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "index"
    assert exit_codes(analyse, (Deadly(200, 300), METRICS, path)) == [-signal.SIGKILL]
    other = Rows(200, seed=5)
    index = analyse(other, METRICS, path)
    assert {name: index.values(name).tolist() for name in METRICS} == by_loops(other.rows)


def test_several_processes_analyse_to_one_path(tmp_path: Path) -> None:
    arguments = (Rows(400), METRICS, tmp_path / "index")
    assert exit_codes(analyse, arguments, arguments, arguments) == [0, 0, 0]
    assert open_index(tmp_path / "index").values("length").tolist() == by_loops(Rows(400).rows)["length"]


def nan_at_17(sample: Any) -> float:
    return math.nan if len(seen := nan_at_17.__dict__.setdefault("seen", [])) == 17 else seen.append(0) or 1.0


def test_bad_input_is_named(tmp_path: Path) -> None:
    rows, path = Rows(40), tmp_path / "index"

    def refused(dataset: Any, metrics: Any, *said: str, **more: Any) -> None:
        with pytest.raises(zeropp.ConfigError) as caught:
            analyse(dataset, metrics, path, **more)
        for one in said:
            assert one in str(caught.value), str(caught.value)
        assert not path.exists()

    refused(rows, {"hard": nan_at_17}, "'hard'", "sample 17", "nan", "finite")
    refused(rows, {"hard": lambda sample: sample["text"]}, "'hard'", "sample 0", "KeyError")
    refused(rows, {"hard": "entropy"}, "'entropy'", "vocab_rarity")
    refused(rows, {"hard": 3}, "3, an int")
    refused(rows, {}, "no metric")
    refused(rows, {"../x": "seqlen"}, "cannot name a file")
    refused([], {"length": "seqlen"}, "0 samples")
    refused(iter([1]), {"length": "seqlen"}, "__len__")
    refused([{"text": "a"}], {"length": "seqlen"}, "sample 0", "'input_ids'", "tokens=")
    refused(["a", "b"], {"length": "seqlen"}, "token numbers")
    refused([torch.ones(3)], {"length": "seqlen"}, "float32")
    refused([[1, -1]], {"length": "vocab_rarity"}, "-1", "attention_mask")
    refused([{"input_ids": [1, 2], "attention_mask": [1]}], {"length": "seqlen"}, "2 tokens", "attention_mask of 1")
    refused(rows, {"length": "seqlen"}, "workers", workers=-1)
    path.mkdir()
    (path / "thesis.txt").write_text("all of it")
    with pytest.raises(zeropp.ConfigError, match="new or empty"):
        analyse(rows, {"length": "seqlen"}, path)
    assert (path / "thesis.txt").read_text() == "all of it"


def test_a_damaged_index_and_another_dataset_are_refused(tmp_path: Path) -> None:
    path, dataset = tmp_path / "index", Rows(60)
    index = analyse(dataset, METRICS, path)
    index.check_dataset(dataset)
    with pytest.raises(zeropp.ConfigError, match="60 samples, the dataset has 61"):
        index.check_dataset(Rows(61))
    with pytest.raises(zeropp.ConfigError, match="another dataset"):
        index.check_dataset(Rows(60, seed=3))
    with pytest.raises(zeropp.ConfigError, match="no metric 'x'; it has length"):
        index.values("x")
    os.truncate(path / "rarity.order", 236)
    with pytest.raises(zeropp.CheckpointError, match=r"rarity\.order: has 236 bytes, the manifest says 240"):
        open_index(path)
    content = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**content, "samples": 59}))
    with pytest.raises(zeropp.CheckpointError, match="damaged"):
        open_index(path)
    with pytest.raises(zeropp.CheckpointError, match="no index"):
        open_index(tmp_path)
    assert analyse(dataset, METRICS, path).samples == 60  # and a new analysis mends it


def test_a_dataset_that_changes_at_each_read_is_compared_by_its_length(tmp_path: Path) -> None:
    class Masked(Rows):
        def __getitem__(self, number: int) -> Any:
            return {"input_ids": torch.randint(0, 1 << 20, (len(self.rows[number]),))}

    index = analyse(Masked(40), {"length": "seqlen"}, tmp_path / "index")
    index.check_dataset(Masked(40))
    with pytest.raises(zeropp.ConfigError, match="41"):
        index.check_dataset(Masked(41))
