# SPDX-License-Identifier: Apache-2.0
"""A rank that dies, stops or goes its own way: every survivor says which, soon, and ends. Nobody computes with wrong
weights."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks import end, simulated, start_rank
from warm import free_port

FAULT_RANK = Path(__file__).with_name("fault_rank.py")
RANKS, FAILED_RANK = 3, 1
DEAD_S = 5.0  # a dead process is noticed within this
TIMEOUT_S = 4.0  # what fault_rank.py gives init_process_group where a rank only stops
START_S = 60.0


def launch(
    tmp_path: Path,
    what: str,
    where: str,
    mode: str,
    done: Callable[[list[Any]], bool],
    device: str = "cpu",
    hosts: str = "",
) -> list[dict[str, Any]]:
    """Start, wait until `done(processes)`, end all. What each rank wrote. ``hosts``: a letter a rank, for the host that it is on."""
    port, files = free_port(), [tmp_path / f"{r}.json" for r in range(RANKS)]
    more = simulated(device)
    with (tmp_path / "log.txt").open("w") as log:
        processes = [
            start_rank(
                FAULT_RANK, [what, where, mode, str(FAILED_RANK), str(files[r]), device], r, RANKS, port, log,
                **more, **({"ZEROPP_HOST_ID": hosts[r]} if hosts else {}),
            )
            for r in range(RANKS)
        ]  # fmt: skip
        try:
            deadline = time.monotonic() + START_S
            while not done(processes) and time.monotonic() < deadline:
                time.sleep(0.02)
            answers = [json.loads(f.read_text()) if f.exists() else {} for f in files]
        finally:
            end(processes)
    text = (tmp_path / "log.txt").read_text(errors="replace")
    for rank, (process, answer) in enumerate(zip(processes, answers, strict=True)):
        answer.update(code=process.returncode, log=text[-3000:], is_failed_rank=rank == FAILED_RANK)
    return answers


def survivors_ended(processes: list[Any]) -> bool:
    return all(p.poll() is not None for r, p in enumerate(processes) if r != FAILED_RANK)


def strikes() -> Any:
    """Every way of dying in every place; stopping, which takes the whole time-out each time, is slow but for one."""
    for what, where, mode in itertools.product(
        ("kill", "stop"), ("forward", "backward", "step"), ("host copy", "gather")
    ):
        slow = what == "stop" and (where, mode) != ("backward", "gather")
        yield pytest.param(what, where, mode, marks=pytest.mark.slow if slow else ())


@pytest.mark.parametrize(("what", "where", "mode"), list(strikes()))
def test_survivors_name_the_rank(what: str, where: str, mode: str, tmp_path: Path) -> None:
    answers = launch(tmp_path, what, where, mode, survivors_ended)
    struck = answers[FAILED_RANK].get("struck")
    assert struck, answers[FAILED_RANK]["log"]
    for answer in answers:
        if answer["is_failed_rank"]:
            continue
        assert answer["code"] == 3, answer  # ended by itself, with a zeropp.Error
        assert answer["rank"] == FAILED_RANK, answer
        assert f"rank {FAILED_RANK}" in answer["text"], answer
        if what == "kill":
            assert answer["error"] == "CommError", answer
            assert answer["at"] - struck < DEAD_S, answer
        else:
            assert answer["error"] == "CommTimeoutError", answer
            assert TIMEOUT_S - 1 < answer["at"] - struck < TIMEOUT_S + DEAD_S, answer


ON_GPUS = [("kill", "backward"), ("lost", "forward")]
SLOW_ON_GPUS = [("kill", "forward"), ("kill", "step"), ("lost", "backward"), ("lost", "step")] + [
    ("stop", where) for where in ("forward", "backward", "step")
]


@pytest.mark.parametrize(
    ("what", "where"), [*ON_GPUS, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW_ON_GPUS)]
)
def test_survivors_on_gpus_name_the_rank(what: str, where: str, tmp_path: Path) -> None:
    """On simulated GPUs, whose streams wait for counters that the rank no longer writes."""
    done = survivors_ended if what != "lost" else lambda ps: all(p.poll() is not None for p in ps)
    answers = launch(tmp_path, what, where, "gather", done, "sim-lazy")
    failed = answers[FAILED_RANK]
    assert "struck" in failed, failed
    limit = TIMEOUT_S + DEAD_S if what == "stop" else DEAD_S
    for answer in answers:
        if not answer["is_failed_rank"]:
            assert (answer["code"], answer["rank"]) == (3, FAILED_RANK), answer
            assert f"rank {FAILED_RANK}" in answer["text"], answer
            assert answer["at"] - failed["struck"] < limit, answer
    if what == "lost":
        assert failed["code"] == 1, failed  # a RuntimeError, as torch raises for its own operations
        assert "RuntimeError" in failed["log"] and "CUDA_ERROR_ILLEGAL_ADDRESS" in failed["log"], failed
        noticed = "noticed in the step" if where == "step" else "noticed at module"
        assert noticed in failed["log"], failed


@pytest.mark.parametrize(
    ("where", "hosts"),
    [("backward", "aab"), *(pytest.param(*one, "aba", marks=pytest.mark.slow) for one in (("forward",), ("step",)))],
)
def test_survivors_on_gpus_of_several_hosts_name_the_rank(where: str, hosts: str, tmp_path: Path) -> None:
    """Calls of NCCL wait for the rank, and would for ever."""
    answers = launch(tmp_path, "kill", where, "gather", survivors_ended, "sim", hosts)
    failed = answers[FAILED_RANK]
    assert "struck" in failed, failed
    for answer in answers:
        if not answer["is_failed_rank"]:
            assert (answer["code"], answer["rank"]) == (3, FAILED_RANK), answer
            assert f"rank {FAILED_RANK}" in answer["text"], answer
            assert answer["at"] - failed["struck"] < DEAD_S, answer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "where", "hosts"),
    [("kill", "forward", "aab"), ("kill", "backward", "aba"), ("kill", "step", "aab"), ("lost", "backward", "aab")],
)
def test_survivors_with_shards_on_hosts_of_gpus_name_the_rank(
    what: str, where: str, hosts: str, tmp_path: Path
) -> None:
    """Calls of the communicator wait for the rank, or for a GPU that has lost its context."""
    done = survivors_ended if what != "lost" else lambda ps: all(p.poll() is not None for p in ps)
    answers = launch(tmp_path, what, where, "offload", done, "sim-lazy", hosts)
    failed = answers[FAILED_RANK]
    assert "struck" in failed, failed
    for answer in answers:
        if not answer["is_failed_rank"]:
            assert (answer["code"], answer["rank"]) == (3, FAILED_RANK), answer
            assert f"rank {FAILED_RANK}" in answer["text"], answer
            assert answer["at"] - failed["struck"] < DEAD_S, answer
    if what == "lost":
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in failed["log"], failed


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_an_exception_on_one_rank_ends_the_others(where: str, tmp_path: Path) -> None:
    """The failed rank raises its own error and its process ends; the others name it."""
    answers = launch(tmp_path, "raise", where, "host copy", lambda ps: all(p.poll() is not None for p in ps))
    assert answers[FAILED_RANK]["code"] == 1 and "the failed rank's own mistake" in answers[FAILED_RANK]["log"]
    for answer in answers:
        if not answer["is_failed_rank"]:
            assert (answer["code"], answer["error"], answer["rank"]) == (3, "CommError", FAILED_RANK), answer


def test_a_rank_that_leaves_backward_step(tmp_path: Path) -> None:
    answers = launch(tmp_path, "leave", "-", "host copy", lambda ps: all(p.poll() is not None for p in ps))
    assert answers[FAILED_RANK]["code"] == 0, answers[FAILED_RANK]
    for answer in answers:
        if not answer["is_failed_rank"]:
            assert (answer["code"], answer["error"], answer["rank"]) == (3, "CommError", FAILED_RANK), answer


@pytest.mark.parametrize("mode", ["host copy", "gather"])
def test_one_backward_more_than_the_others(mode: str, tmp_path: Path) -> None:
    """A second backward's reduction meets the others' step: an error that shows both sides, not two steps of gradients in
    one."""
    answers = launch(tmp_path, "extra", "-", mode, lambda ps: all(p.poll() is not None for p in ps))
    for answer in answers:
        assert answer["code"] == 3, answer
        assert answer["error"] == "CommError", answer
    told = " ".join(answer["text"] for answer in answers)
    assert "is at the reduction of the gradient of module 'blocks." in told and "after 4 backwards" in told, told
    assert "notice" not in told and "lane" not in told, told
