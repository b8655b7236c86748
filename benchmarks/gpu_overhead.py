# SPDX-License-Identifier: Apache-2.0
"""Measure what ZeRO-3 costs the host of a GPU: forward and backward of many small units, beyond the same model without it.

There is no GPU: the device is the simulated one of tests/sim, as late as a GPU may be, and the processor time of the
thread that plays it is taken off. One process a rank holds all contenders, which take turns. Before anything is timed,
the gradients are compared with the plain model's. tests/sim/case_overhead.py is what a rank runs.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import ROOT, Need, Row, Run, alone, quartiles

CLAIM = "On a GPU, ZeRO-3's host time per unit and step is below 1/10 of FSDP2's (simulated GPU, tiny units)"
NEEDS = (Need("FSDP2", module="torch.distributed.fsdp"),)
TITLE, LAYERS, RANKS, LIMIT_S = "100 x Linear(16,16) 2 ranks", 100, 2, 280.0
SIM = ROOT / "tests" / "sim"
#: How the contender is called in the row: ours with shards on the GPU, and on the host.
OURS = {"on the device": "", "on the host": " shards on the host"}


def launch(rounds: int) -> list[dict[str, Any]]:
    """Return what each rank printed."""
    sys.path.insert(0, str(SIM))
    import sim_build  # is there in a source tree only

    if why_not := sim_build.why_no_torch_device():
        raise SystemExit(f"gpu_overhead: {why_not}")
    sim_build.torch_device()
    paths = os.pathsep.join(map(str, (ROOT / "python", SIM, os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SIM_IDLE_MS": "100", "PYTHONPATH": paths}
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, str(SIM / "case_overhead.py"), str(rank), str(RANKS), folder, str(rounds)],
                stdout=subprocess.PIPE, stderr=(Path(folder) / f"{rank}.err").open("w"), text=True, env=environment,
            )
            for rank in range(RANKS)
        ]  # fmt: skip
        try:
            printed = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(rank.returncode for rank in ranks):
            raise SystemExit("\n".join((Path(folder) / f"{rank}.err").read_text()[-2000:] for rank in range(RANKS)))
    return [json.loads(text.splitlines()[-1]) for text in printed]


def report(bench: Run, name: str, samples: dict[str, list[dict[str, float]]]) -> None:
    """One row: our overhead per unit against FSDP2's, rank 0's clock."""

    def overhead(contender: str) -> list[float]:
        pairs = zip(samples[contender], samples["plain"], strict=True)
        return [(one["ms"] - plain["ms"]) / LAYERS * 1e3 for one, plain in pairs]

    def beyond(contender: str, count: str) -> float:
        return statistics.median(one[count] for one in samples[contender]) - samples["plain"][0][count]

    if alone():
        bench.own(f"{TITLE}{OURS[name]}", overhead(name), "us")
        return
    low, middle, high = quartiles(overhead(name))
    peer_low, peer_middle, peer_high = quartiles(overhead("FSDP2"))
    floor = (high - low) / 2  # where ours is lost in the noise of plain
    calls = ("kernels", "copies", "records", "waits", "counters")
    bench.report(
        Row(
            bench=bench.name, case=f"{TITLE}{OURS[name]}", ours=middle, peer=peer_middle, peer_name="FSDP2", unit="us",
            rounds=len(samples["plain"]), ratio=peer_middle / max(middle, floor),
            ratio_low=peer_low / max(high, floor), ratio_high=peer_high / max(low, floor),
            extra={
                "driver_calls_per_unit": sum(beyond(name, one) for one in calls) / LAYERS,
                "peer_driver_calls_per_unit": sum(beyond("FSDP2", one) for one in calls) / LAYERS,
                "host_waits": beyond(name, "host_waits"), "peer_host_waits": beyond("FSDP2", "host_waits"),
            },
        )
    )  # fmt: skip


def run(bench: Run) -> None:
    results = launch(3 if bench.quick else 9)
    for rank, result in enumerate(results):
        bench.check(not result["wrong"], f"rank {rank}: other gradients than the plain model: {result['wrong']}")
        bench.check(not result["error"], f"rank {rank}: {result['error']}")
    for name in OURS:
        report(bench, name, results[0]["samples"])
