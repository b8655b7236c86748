# SPDX-License-Identifier: Apache-2.0
"""Curriculum sampling: the analysis of a dataset against DeepSpeed's DataAnalyzer, and a sampler's batches and resume.

Both analyses get the same dataset of tensors and the same function of a batch, with 10,007 different values, as many as rarities
have. One dataset is of a class of its own, where each sample costs a call on both sides, the other is torch's TensorDataset. What
they found is compared. The sampler is compared with torch's BatchSampler over a RandomSampler: how long a batch takes, and how long
it takes to stand at step 10^6 again (torch's draws what was drawn). Limits are the goals: 20 us a batch, 10 ms a resume.
"""

from __future__ import annotations

import itertools
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from harness import Need, PeerMissing, Run, alone, alternate, timed
from torch.utils.data import BatchSampler, Dataset, RandomSampler, TensorDataset

CLAIM = "Analysing: the goal is 20x DeepSpeed's DataAnalyzer at 1M samples; a batch of 100M: <= 20 us; resume at step 10^6: <= 10 ms."
NEEDS = ()
DEEPSPEED = Need("DeepSpeed DataAnalyzer", module="deepspeed")
BATCH, VALUES = 32, 10_007
READ = 100  # samples that a function gets at a time, on both sides
STEP = 1_000_000


class Rows(Dataset[Any]):
    """Samples of 8 numbers."""

    def __init__(self, samples: int) -> None:
        self.rows = torch.arange(samples)[:, None].expand(-1, 8)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> torch.Tensor:
        return self.rows[number]


def difficulty(batch: Any) -> torch.Tensor:
    rows: torch.Tensor = batch if isinstance(batch, torch.Tensor) else batch[0]
    return rows[:, 0] * 7919 % VALUES


def arguments(dataset: Dataset[Any], path: Path) -> dict[str, Any]:
    return {
        "dataset": dataset, "batch_size": READ, "metric_names": ["m"], "metric_functions": [difficulty],
        "metric_types": ["single_value_per_sample"], "metric_dtypes": [torch.int64], "save_path": str(path),
    }  # fmt: skip


def ours(dataset: Dataset[Any], path: Path) -> None:
    from zeropp.data import analyse
    from zeropp.data.metrics import Batched

    analyse(dataset, {"m": Batched(difficulty, torch.utils.data.default_collate, READ)}, path / "index")


def theirs(dataset: Dataset[Any], path: Path) -> None:
    from deepspeed.runtime.data_pipeline.data_sampling.data_analyzer import DataAnalyzer

    with Path(os.devnull).open("w") as sink:
        before = os.dup(1)
        os.dup2(sink.fileno(), 1)  # it prints a line a value
        try:
            analyzer = DataAnalyzer(**arguments(dataset, path))
            analyzer.run_map()
            analyzer.run_reduce()
        finally:
            os.dup2(before, 1)
            os.close(before)


def analysis(bench: Run, dataset: Dataset[Any], samples: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        turns = itertools.count()
        contenders = {"ours": timed(lambda: ours(dataset, Path(folder) / f"ours-{next(turns)}"))}
        if not alone():
            try:
                DEEPSPEED.check()
            except PeerMissing as error:
                bench.leave_out("the analysis against DeepSpeed's", error)
                return
            logging.disable(logging.INFO)
            check(bench, Path(folder))
            contenders[DEEPSPEED.name] = timed(lambda: theirs(dataset, Path(folder) / f"theirs-{next(turns)}"))
        times = alternate(contenders, rounds=rounds)
        case = f"analyse {samples // 1000}k samples, {type(dataset).__name__}"
        bench.compare(case, times, ours="ours", peers=[DEEPSPEED.name], unit="ms")


def check(bench: Run, folder: Path) -> None:
    """Compare what both find in a small dataset."""
    from zeropp.data import open_index
    from zeropp.data.indexed import values_of_samples

    small = Rows(5000)
    ours(small, folder / "a")
    theirs(small, folder / "b")
    prefix = folder / "b" / "m" / "m_index_to_"
    same = torch.equal(
        values_of_samples(f"{prefix}sample", f"{prefix}metric", 5000), open_index(folder / "a" / "index").values("m")
    )
    bench.check(same, "the two analyses found different values")


def sampling(bench: Run, samples: int) -> None:
    import zeropp
    from zeropp.data import CurriculumSampler
    from zeropp.data.index import write_index

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index"
        values = (torch.arange(samples) * 7919 % VALUES).to(torch.float64)
        write_index(path, {"m": values}, samples, fingerprint="", work=Path(folder) / "work")
        bounds = {"m": zeropp.Growth(1, 100, steps=10_000)}

        def sampler(step: int = 0) -> Any:
            return CurriculumSampler(path, bounds, batch=BATCH, step=step)

        def plain() -> Any:
            return iter(
                BatchSampler(RandomSampler(range(samples), replacement=True, num_samples=1 << 60), BATCH, False)
            )

        mine, torchs = sampler(), plain()
        bench.check(len(set(itertools.chain(*(next(mine) for _ in range(100))))) == 3200, "a sample came twice")
        size = f"{samples // 1_000_000}M samples"
        times = alternate({"ours": timed(lambda: next(mine), repeat=1000), "torch": timed(lambda: next(torchs), repeat=1000)},
                          rounds=7)  # fmt: skip
        times["goal"] = [0.020] * len(times["ours"])
        bench.compare(f"next(sampler), {size}", times, ours="ours", peers=["torch"], unit="ms", limit="goal")
        sampler(STEP)  # the order reaches that far now
        last = STEP // 100 if bench.quick else STEP  # torch's grows with the steps; ours does not
        times = alternate({"ours": timed(lambda: next(sampler(STEP))),
                           "torch": timed(lambda: next(itertools.islice(plain(), last, None)))}, rounds=5)  # fmt: skip
        times["goal"] = [10.0] * len(times["ours"])
        case = f"resume at step 10^6, {size}" + (" (torch: at 10^4)" if bench.quick else "")
        bench.compare(case, times, ours="ours", peers=["torch"], unit="ms", limit="goal")


def run(bench: Run) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    samples = 100_000 if bench.quick else 1_000_000
    for dataset in (Rows(samples), TensorDataset(Rows(samples).rows)):
        analysis(bench, dataset, samples, 2)
    sampling(bench, 5_000_000 if bench.quick else 100_000_000)
