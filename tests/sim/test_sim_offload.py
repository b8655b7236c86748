# SPDX-License-Identifier: Apache-2.0
"""Train on the simulated GPU with shards on the host: the bits of plain torch there in every schedule, and wrong without a wait.

Each wait of that way is in WAITS. A new one belongs there, with a case and a schedule that fail without it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import sim_build  # noqa: E402
from test_sim_fsdp2 import run  # noqa: E402

WHY_NOT = sim_build.why_no_torch_device()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it can be built")

COMPUTE, GATHER, DOWN = range(3)  # numbers of the streams
UP, DOWN_THERE = 2, 3  # over several hosts
HOST = -1
EACH = tuple(map(str, range(8)))  # each of the three is lazy or not
ALL_LAZY = "0xff"


@pytest.fixture(scope="module", autouse=True)
def device() -> None:
    sim_build.torch_device()


def ranks_of(
    ranks: int, case: str, schedules: tuple[str, ...], folder: Path, without: str = "", **more: str
) -> list[dict[str, Any]]:
    """Return what each rank of case_offload.py found."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SIM_IDLE_MS": "100", **more}
    environment.pop("SIM_LAZY", None)
    program = [sys.executable, str(HERE / "case_offload.py")]
    rest = [str(ranks), str(folder), case, *([f"without={without}"] if without else []), *schedules]
    codes = run([[*program, str(rank), *rest] for rank in range(ranks)], environment, folder)
    assert codes == [0] * ranks, "\n".join((folder / f"{rank}.err").read_text() for rank in range(ranks))
    return [json.loads((folder / f"{rank}.out").read_text().splitlines()[-1]) for rank in range(ranks)]


def require_right(found: list[dict[str, Any]]) -> None:
    assert [(one["wrong"], one["error"]) for one in found] == [({}, "")] * len(found)


def test_every_schedule_has_the_bits_of_plain_torch(tmp_path: Path) -> None:
    require_right(ranks_of(2, "stage 3", (*EACH, "7:1", "7:2"), tmp_path))


def test_one_rank(tmp_path: Path) -> None:
    require_right(ranks_of(1, "stage 3", EACH, tmp_path))


def test_one_hardware_queue(tmp_path: Path) -> None:
    require_right(ranks_of(2, "stage 3", ("0", ALL_LAZY), tmp_path, SIM_ONE_QUEUE="1"))


CASES = (
    "little prefetch", "accumulate", "tied and frozen", "small units whole", "no prefetch", "stage 2", "stage 1", "bf16", "clip",
    "evaluates", "checkpointed", "two streams", "reloads", "in a file", "in a file, evaluates", "in a file, reloads",
    "in a file, flushes", "inside: detached",
)  # fmt: skip


@pytest.mark.parametrize("case", [*CASES[:3], *(pytest.param(case, marks=pytest.mark.slow) for case in CASES[3:])])
def test_each_way_to_train(case: str, tmp_path: Path) -> None:
    require_right(ranks_of(2, case, ("0", ALL_LAZY, "1", "6"), tmp_path))


OFTEN_ON_HOSTS = ("stage 3", "aabb")
SELDOM_ON_HOSTS = (
    ("stage 2", "ab"),
    ("stage 2", "aabb"), ("stage 1", "aabb"), ("accumulate", "aabb"), ("clip", "ab"), ("little prefetch", "ab"), ("no prefetch", "ab"),
    ("small units whole", "ab"), ("bf16", "ab"), ("tied and frozen", "ab"), ("checkpointed", "ab"), ("evaluates", "ab"),
    ("reloads", "ab"), ("two streams", "ab"), ("inside: stage 3", "ab"), ("inside: torch steps", "ab"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("case", "hosts"), [OFTEN_ON_HOSTS, *(pytest.param(*one, marks=pytest.mark.slow) for one in SELDOM_ON_HOSTS)]
)
def test_several_hosts_have_the_bits_of_plain_torch(case: str, hosts: str, tmp_path: Path) -> None:
    """Ranks of a host add their gradients first."""
    require_right(ranks_of(len(hosts), case, ("0", ALL_LAZY), tmp_path, SIM_HOSTS=hosts))


@pytest.mark.slow
def test_every_schedule_of_several_hosts_is_right(tmp_path: Path) -> None:
    schedules = (*map(str, range(16)), "15:1", "15:2")  # a fourth stream copies units up
    require_right(ranks_of(2, "little prefetch", schedules, tmp_path, SIM_HOSTS="ab"))
    (tmp_path / "one").mkdir()
    require_right(ranks_of(2, "stage 3", ("0", ALL_LAZY), tmp_path / "one", SIM_HOSTS="ab", SIM_ONE_QUEUE="1"))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["accumulate", "small units whole", "stage 2", "clip"])
def test_each_way_to_train_alone(case: str, tmp_path: Path) -> None:
    require_right(ranks_of(1, case, ("0", ALL_LAZY), tmp_path))


#: By name: who waits, for which stream, and a case and a schedule that are wrong without it.
WAITS = {
    "gathers wait for the last use of the memory": (GATHER, COMPUTE, "little prefetch", "1"),
    "computation waits for gathers": (COMPUTE, GATHER, "stage 3", "2"),
    "the copy down waits for the gradients": (DOWN, COMPUTE, "stage 3", "1"),
    "gradients wait for the copy down of their memory": (COMPUTE, DOWN, "stage 3", "4"),
    "the reduction waits for the copy down": (HOST, DOWN, "stage 3", "4"),
    "the step waits for gathers": (HOST, GATHER, "evaluates", "2"),
    "the shard waits for the values at set-up": (HOST, COMPUTE, "stage 3", "1"),
    "copies after a step wait for computation": (GATHER, COMPUTE, "stage 2, evaluates", "1"),
    "computation waits for copies after a step": (COMPUTE, GATHER, "stage 2", "2"),
    "a staging waits for the copy from it": (HOST, GATHER, "in a file", "1"),
    "computation waits for the copy up from a file": (COMPUTE, GATHER, "in a file", "2"),
    "a unit without a gradient waits for its gathers": (HOST, GATHER, "inside: detached", ALL_LAZY),
    "a step without gradients waits for copies after the last one": (HOST, GATHER, "in a file, flushes", "2"),
    "the shard in a file waits for the values at set-up": (HOST, COMPUTE, "in a file", "1"),
}


@pytest.mark.parametrize(
    "name", [name if at < 2 else pytest.param(name, marks=pytest.mark.slow) for at, name in enumerate(WAITS)]
)
def test_it_is_wrong_without_one_of_its_waits(name: str, tmp_path: Path) -> None:
    waiter, source, case, schedule = WAITS[name]
    assert any(one["wrong"] for one in ranks_of(2, case, (schedule,), tmp_path, f"{waiter},{source}"))


#: The same over hosts, where stages 1 and 2 have no stream of gathers, so that streams have lower numbers.
WAITS_OVER_HOSTS = {
    "a staging waits for the copy from it to the GPU": (HOST, UP, "stage 3", "4"),
    "the copy up from other hosts waits for the last use of the memory": (UP, GATHER, "little prefetch", "1"),
    "computation waits for the copy up from other hosts": (COMPUTE, UP, "stage 3", "4"),
    "the reduction over hosts waits for the copy down": (HOST, DOWN_THERE, "stage 3", "8"),
    "copies after a step over hosts wait for computation": (UP - 1, COMPUTE, "stage 2, evaluates", "1"),
    "computation waits for copies after a step over hosts": (COMPUTE, UP - 1, "stage 2", "2"),
}


@pytest.mark.parametrize(
    "name", [name if at < 1 else pytest.param(name, marks=pytest.mark.slow) for at, name in enumerate(WAITS_OVER_HOSTS)]
)
def test_it_is_wrong_over_hosts_without_one_of_its_waits(name: str, tmp_path: Path) -> None:
    waiter, source, case, schedule = WAITS_OVER_HOSTS[name]
    found = ranks_of(2, case, (schedule,), tmp_path, f"{waiter},{source}", SIM_HOSTS="ab")
    assert any(one["wrong"] for one in found)


def test_the_driver_is_called_a_bounded_number_of_times(tmp_path: Path) -> None:
    """In a step of four units of six parameters: gathers in forward and backward, the copies down, and what orders them."""
    ranks, units, params = 2, 4, 6
    (mine, *_) = ranks_of(ranks, "stage 3", ("0",), tmp_path)
    counts = mine["counts"]
    assert counts["copies"] == units * (2 * ranks + 1 + params)
    assert counts["records"] <= 6 * units + 1 and counts["waits"] <= 6 * units
    assert counts["counters"] == counts["collectives"] == 0
    assert set(mine["waits"]) <= {
        "cuEventQuery, again and again"
    }  # for gradients to arrive, and for gathers before the step
