# SPDX-License-Identifier: Apache-2.0
"""Scratch folders leave nothing behind, whatever ends the job; and the point of it all: a step under a memory limit
that states in memory do not survive."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from zeropp.files import scratch

TIERS = 2
"""Of each job, with a folder each: states and gradients."""

TRAIN = """
import sys, torch, zeropp
torch.set_num_threads(1)
path, end = sys.argv[1].split(","), sys.argv[2]
model = torch.nn.Linear(300, 300)
adam = torch.optim.AdamW(model.parameters())
offload = zeropp.Offload(optimizer="nvme", grads="nvme", path=path)
model, adam = zeropp.prepare(model, adam, zeropp.Config(stage=2, offload=offload))
model(torch.ones(1, 300)).sum().backward()
adam.step()
print("stepped", flush=True)
if end == "wait":
    sys.stdin.read()
elif end == "raise":
    raise SystemExit("the script fails")
"""


def folders(path: Path) -> list[str]:
    return sorted(one.name for one in path.glob("zeropp-scratch-*"))


def start(path: Path | list[Path], end: str) -> subprocess.Popen[str]:
    paths = ",".join(str(one) for one in (path if isinstance(path, list) else [path]))
    process = subprocess.Popen(
        [sys.executable, "-c", TRAIN, paths, end], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "stepped\n"
    return process


@pytest.mark.parametrize("end", ["return", pytest.param("raise", marks=pytest.mark.slow)])
def test_the_end_of_a_job_removes_its_folder(tmp_path: Path, end: str) -> None:
    process = start(tmp_path, end)
    process.communicate(timeout=60)
    assert process.returncode == (end == "raise") and not folders(tmp_path)


def test_the_next_job_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    killed, alive = start(tmp_path, "wait"), start(tmp_path, "wait")
    killed.send_signal(signal.SIGKILL)
    killed.wait(timeout=60)
    left = folders(tmp_path)
    assert len(left) == 2 * TIERS, "a kill cannot clean up"
    third = start(tmp_path, "wait")
    now = folders(tmp_path)
    assert len(now) == 2 * TIERS and len(set(now) & set(left)) == TIERS, (
        "the dead one's is gone, the living one's is not"
    )
    for process in (alive, third):
        process.communicate("", timeout=60)
    assert not folders(tmp_path)


def test_jobs_over_several_folders_leave_nothing_in_any(tmp_path: Path) -> None:
    """One is killed, and its neighbours name the same folders in another order."""
    first, second = tmp_path / "first", tmp_path / "second"
    killed, alive = start([first, second], "wait"), start([second, first], "wait")
    assert folders(first) == folders(second) and len(folders(first)) == 2 * TIERS
    killed.send_signal(signal.SIGKILL)
    killed.wait(timeout=60)
    left = folders(first)
    third = start([second, first], "wait")
    assert folders(first) == folders(second) and len(set(folders(first)) - set(left)) == TIERS
    assert len(folders(first)) == 2 * TIERS, "the dead one's is gone from both"
    for process in (alive, third):
        process.communicate("", timeout=60)
    assert not folders(first) and not folders(second)


def test_a_model_may_end_while_the_next_makes_its_folder(tmp_path: Path) -> None:
    """A model ends as by the garbage collector: in the middle of making, with the lock on the folder held by this thread."""

    class Alone:
        rank = 0

        def exchange(self, mine: object) -> list[object]:
            return [mine]

        def all_try(self, action: Callable[[], object]) -> tuple[object, None]:
            return action(), None

    old: Any = scratch.Scratch(tmp_path, Alone())  # type: ignore[arg-type]
    plain = scratch.remove_abandoned

    def remove_abandoned(root: Path) -> None:
        plain(root)
        old.remove()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scratch, "remove_abandoned", remove_abandoned)
        signal.alarm(20)  # a lock that waits for itself would wait for ever
        new = scratch.Scratch(tmp_path, Alone())  # type: ignore[arg-type]
        signal.alarm(0)
    assert len(folders(tmp_path)) == 1 and new.folder.is_dir()
    new.remove()
    assert not folders(tmp_path)


LIMITED = """
import resource, sys, torch, zeropp
from pathlib import Path
torch.set_num_threads(1)
path, kind = sys.argv[1:]
model = torch.nn.Sequential(*(torch.nn.Linear(1280, 1280, bias=False) for _ in range(10)))    # 16 million parameters
adam = torch.optim.AdamW(model.parameters())
tier = zeropp.Tier("nvme", path=path) if kind == "nvme" else zeropp.Tier()
model, adam = zeropp.prepare(model, adam, zeropp.Config(stage=2, offload=zeropp.Offload(optimizer=tier)))
loss = sum((layer.weight * 1e-3).sum() for layer in model)    # every gradient exists, no activation is needed
loss.backward()
del loss
now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
limit = now + (48 << 20)                                      # AdamW's moments are 125 MiB
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    adam.step()
    seen = zeropp.memory(model, adam)
    print("stepped", seen.get("nvme", {}).get("optimizer", {}).get("held", 0))
except (MemoryError, RuntimeError) as error:
    print("no memory", type(error).__name__)
"""


def test_a_step_under_a_memory_limit_that_states_in_memory_do_not_fit_in(tmp_path: Path) -> None:
    answers = {}
    for kind in ("memory", "nvme"):
        done = subprocess.run(
            [sys.executable, "-c", LIMITED, str(tmp_path), kind], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        answers[kind] = done.stdout.split()
    assert answers["memory"][:2] == ["no", "memory"]
    assert answers["nvme"] == ["stepped", str(8 * 10 * 1280 * 1280)]


MANY = """
import os, sys, torch, zeropp
from pathlib import Path
from zeropp.zero.offload import activations
torch.set_num_threads(1)
activations.MIN_BYTES = 1 << 12
model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.GELU(), torch.nn.Linear(100, 100))
adam = torch.optim.AdamW(model.parameters())
kinds = dict.fromkeys(sys.argv[2:], "nvme")
offload = zeropp.Offload(**kinds, path=sys.argv[1], checksums=len(kinds) > 1)
model, adam = zeropp.prepare(model, adam, zeropp.Config(stage=3, offload=offload))
inputs = torch.ones(20, 100)
def held():
    files = [(str(one), one.stat().st_blocks) for one in sorted(Path(sys.argv[1]).rglob("*"))]
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096, len(os.listdir("/proc/self/fd")), files
seen = []
for step in range(2000):
    model(inputs).sum().backward()
    adam.step()
    adam.zero_grad()
    if step in (500, 1999):
        seen.append(held())
(before, descriptors, files), (after, *rest) = seen
assert rest == [descriptors, files], (seen, "descriptors or files grew")
assert after - before < 1 << 20, (before, after, "memory grew")
print("constant")
"""


ALL = ["params", "grads", "optimizer", "activations"]


@pytest.mark.parametrize("kinds", [["optimizer"], pytest.param(ALL, marks=pytest.mark.slow)], ids=["one", "all"])
def test_two_thousand_steps_hold_no_more_than_five_hundred(tmp_path: Path, kinds: list[str]) -> None:
    command = [sys.executable, "-c", MANY, str(tmp_path), *kinds]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.stdout == "constant\n", done.stderr
