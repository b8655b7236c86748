# SPDX-License-Identifier: Apache-2.0
"""Train with shards on the simulated GPU, two ranks as processes: losses and parameters have the bits of plain torch there."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import sim_build  # noqa: E402
from test_sim_fsdp2 import run  # noqa: E402

WHY_NOT = sim_build.why_no_torch_device()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it can be built")

RANKS = 2
#: The streams are: 0 torch's default stream, which computes; 1 gathers, where they are prefetched; then sums.
SCHEDULES = ("0", "0xff", "0b1", "0b10", "0b110:3")
OFTEN = ("device: stage 3", "device: stage 0", "device: inside: stage 3")
#: Names of case_offload.py, which imports the device and so runs in processes of its own.
SELDOM = (
    "small units whole", "no prefetch", "little prefetch", "stage 2", "stage 1", "bf16", "accumulate", "clip", "tied and frozen",
    "checkpointed", "inside: small units whole", "inside: stage 2", "inside: stage 1", "inside: accumulate", "inside: bf16",
    "inside: two streams", "inside: tied and frozen", "inside: torch steps",
)  # fmt: skip
CASES = [*OFTEN, *(pytest.param(f"device: {name}", marks=pytest.mark.slow) for name in SELDOM)]


@pytest.fixture(scope="module", autouse=True)
def device() -> None:
    sim_build.torch_device()


def train(
    case: str, schedules: tuple[str, ...], folder: Path, without: str = "", hosts: str = "", gather: str = "auto"
) -> list[dict[str, object]]:
    """Return what each rank printed. ``hosts``: a letter a rank, for the host that it is on."""
    ranks = len(hosts) or RANKS
    driver = str(sim_build.driver())
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "SIM_IDLE_MS": "100",
        "ZEROPP_CUDA_DRIVER": driver,
        "ZEROPP_NCCL": driver,
        "SIM_HOSTS": hosts,
        "SIM_GATHER": gather,
    }
    commands = [
        [sys.executable, str(HERE / "case_offload.py"), str(rank), str(ranks), str(folder), case]
        + ([f"without={without}"] if without else [])
        + [*schedules]
        for rank in range(ranks)
    ]
    codes = run(commands, environment, folder)
    assert codes == [0] * ranks, "\n".join((folder / f"{rank}.err").read_text() for rank in range(ranks))
    return [json.loads((folder / f"{rank}.out").read_text().splitlines()[-1]) for rank in range(ranks)]


@pytest.mark.parametrize("case", CASES)
def test_training_has_the_bits_of_plain_torch(case: str, tmp_path: Path) -> None:
    for found in train(case, SCHEDULES[:2] if case in OFTEN else SCHEDULES, tmp_path):
        assert not found["wrong"] and not found["error"]


HOSTS = (("stage 3", "ab"), ("stage 0", "aab"))
SELDOM_ON_HOSTS = (
    *(("bf16", one) for one in ("ab", "aab")), ("stage 1", "ab"), ("stage 2", "aba"), ("accumulate", "ab"), ("clip", "ab"),
    ("small units whole", "aab"), ("no prefetch", "ab"), ("tied and frozen", "ab"), ("checkpointed", "ab"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("case", "hosts"), [*HOSTS, *(pytest.param(*one, marks=pytest.mark.slow) for one in SELDOM_ON_HOSTS)]
)
def test_several_hosts_have_the_bits_of_plain_torch(case: str, hosts: str, tmp_path: Path) -> None:
    for found in train(f"device: {case}", SCHEDULES[:2], tmp_path, hosts=hosts):
        assert not found["wrong"] and not found["error"]


def test_nccl_on_one_host_has_the_bits_of_plain_torch(tmp_path: Path) -> None:
    for found in train("device: stage 2", SCHEDULES[:2], tmp_path, gather="nccl"):
        assert not found["wrong"] and not found["error"]


HOST, COMPUTE, SUMS = -1, 0, 2
#: As in test_sim_offload.py, of waits that tests/c/test_zero_device.c does not leave out.
WAITS = {
    "the shard of a device waits for the values at set-up": (HOST, COMPUTE, "device: stage 3", "1"),
    "computation waits for steps inside the backward": (COMPUTE, SUMS, "device: inside: stage 3", "0b100"),
    "sums wait for steps of torch's own": (SUMS, COMPUTE, "device: inside: torch steps", "0b1"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in WAITS])
def test_it_is_wrong_without_one_of_its_waits(name: str, tmp_path: Path) -> None:
    waiter, source, case, schedule = WAITS[name]
    assert any(one["wrong"] for one in train(case, (schedule,), tmp_path, f"{waiter},{source}"))
