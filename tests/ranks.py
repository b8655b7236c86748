# SPDX-License-Identifier: Apache-2.0
"""Run the body of a test on every rank of a process group.

    @on_ranks(1, 2, "2 hosts")
    def test_trains() -> None:
        model, optimizer = zeropp.prepare(...)
        ...
        first, second = of_all_ranks(loss)

pytest shows one test for each number of ranks, and a failure shows the traceback of each rank that failed. "2 hosts" are two
ranks, each on a host of its own, over the loopback interface. Parameters of the test have to be JSON values, because each rank
loads the test's file and calls the function by its name (rank.py).

With ``devices=("cpu", "sim")`` the test also runs on a simulated GPU (tests/sim), where tensors are made by default. There a case that
is not supported yet says which error it expects: ``refused={"sim": "not supported yet"}``. ``pytest --device sim`` runs every test of
ranks there; what zeropp refuses as not supported yet is then skipped, with the sentence.

One launch runs all selected tests of a file that have the same number of ranks and the same device, because starting Python and importing torch costs
more than most tests. A test that fails ends its ranks; the tests after it get fresh ones, so that no test sees what another broke.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from warm import Process, free_port, start

Started = Process | subprocess.Popen[bytes]
RANK = Path(__file__).with_name("rank.py")
TEST_S = 90.0
"""A test that takes longer on a rank hangs. The log then shows the stacks."""
LAUNCH_S = 280.0
SIM_TIMES = 4.0
"""The limits are so many times longer on the simulated GPU, where each operator crosses to another thread and back."""
DEVICE = ""
"""The device of all tests, of ``pytest --device``; empty: each runs on its own ones."""
GRACE_S = 10.0
"""The other ranks have this long to end after the first one failed."""


def on_ranks(
    *worlds: Any,
    backend: str = "gloo",
    devices: tuple[str, ...] = ("cpu",),
    refused: Mapping[str, str] | None = None,
    cold: bool = False,
    alone: bool = False,
    test_s: float = TEST_S,
    launch_s: float = LAUNCH_S,
) -> Any:
    """Return a decorator of tests whose body runs on every rank.

    Args:
        worlds: numbers of ranks, or "N hosts"; or pytest.param of them. Several become the parameter ``ranks``. None: the test
            is parametrized with ``ranks`` itself.
        backend: of the process group.
        devices: "cpu", "sim" (each operation runs when it is enqueued), "sim-lazy" (as late as possible),
            "sim-offload" ("sim", where shards and states are on the host unless the test says more); or pytest.param of them. Several
            become the parameter ``device``.
        refused: by device, a pattern of the zeropp.ConfigError that the test ends with there, on every rank.
        cold: start the ranks without a warm process, for tests that measure the memory of the process.
        alone: start ranks for this test only, because it measures what others leave behind, or ends the group.
        test_s, launch_s: limits of the test, and of the launch that runs it.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(each_rank: Callable[[], Outcome], **_: Any) -> None:
            __tracebackhide__ = True
            each_rank().check()

        where = (DEVICE,) if DEVICE else devices
        times = SIM_TIMES if DEVICE.startswith("sim") else 1.0
        several = {"ranks": len(worlds) != 1, "device": len(where) != 1}
        own = [name for name in inspect.signature(body).parameters if name not in several]
        names = ["each_rank", *own, *(name for name, here in several.items() if here)]
        kind = inspect.Parameter.KEYWORD_ONLY
        test.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
        test.on_ranks = _How(  # type: ignore[attr-defined]
            worlds[0] if len(worlds) == 1 else None, where[0] if len(where) == 1 else None, dict(refused or {}), backend, cold,
            alone, times * test_s, times * launch_s,
        )  # fmt: skip
        for name, values in (("ranks", worlds), ("device", where)):
            if len(values) > 1:
                test = pytest.mark.parametrize(name, values)(test)
        return test

    return decorate


def of_all_ranks(value: Any) -> list[Any]:
    """Return the values of all ranks, in their order. Every rank calls it."""
    import torch.distributed as dist

    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_cpu_only(why: str) -> None:
    """Skip the test of a rank where tensors are made on another device than the CPU; ``why`` says what is different there."""
    import torch

    if torch.get_default_device().type != "cpu":
        pytest.skip(f"{torch.get_default_device().type}: {why}")


def shards_tier() -> str:
    """Return the tier of zeropp.memory that has the shards where nothing is offloaded. A backward has threads that do not know it."""
    import torch

    return "cpu" if torch.get_default_device().type == "cpu" else "device"


@dataclass(frozen=True)
class _How:
    """What :func:`on_ranks` was given."""

    world: Any
    device: Any
    refused: dict[str, str]
    backend: str
    cold: bool
    alone: bool
    test_s: float
    launch_s: float


@dataclass
class Outcome:
    """The end of a test on each rank: a traceback, or None where it passed."""

    errors: list[str | None]
    skipped: str | None
    log: str

    def check(self) -> None:
        """Raise the errors of the ranks that failed."""
        __tracebackhide__ = True
        failed = [(rank, error) for rank, error in enumerate(self.errors) if error]
        if failed:
            text = "\n".join(f"--- rank {rank}\n{error}" for rank, error in failed)
            raise AssertionError(f"{text}\n--- output\n{self.log[-4000:]}")
        if self.skipped is not None:
            pytest.skip(self.skipped)


@dataclass(frozen=True)
class Launch:
    """The tests that can share ranks."""

    world: Any
    device: str
    backend: str
    cold: bool
    launch_s: float
    only: str | None
    """The one test that it has, or None."""

    @property
    def ranks(self) -> int:
        return int(str(self.world).split()[0])

    @property
    def hosts(self) -> bool:
        return str(self.world).endswith("hosts")


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[pytest.Item], Outcome]:
    """Return launched(test) -> its Outcome. The first test of a world launches the ranks, with all selected tests of that world."""
    outcomes: dict[str, Outcome] = {}

    def find(item: Any) -> Outcome:
        same = [one for one in item.session.items if _on_ranks(one, item.module) and _launch(one) == _launch(item)]
        while item.nodeid not in outcomes:
            left = [one for one in same if one.nodeid not in outcomes]
            outcomes.update(_run(_launch(item), left, tmp_path_factory.mktemp("ranks")))
        return outcomes[item.nodeid]

    return find


@pytest.fixture
def each_rank(request: pytest.FixtureRequest, launched: Callable[[pytest.Item], Outcome]) -> Callable[[], Outcome]:
    """Return a function that returns how the test ended on each rank."""
    return lambda: launched(request.node)


def _on_ranks(item: Any, module: Any) -> bool:
    return getattr(item, "module", None) is module and hasattr(item.obj, "on_ranks")


def _launch(item: Any) -> Launch:
    how = item.obj.on_ranks
    return Launch(
        how.world or item.callspec.params["ranks"],
        how.device or item.callspec.params["device"],
        how.backend,
        how.cold,
        how.launch_s,
        item.nodeid if how.alone else None,
    )


def _run(launch: Launch, items: list[Any], folder: Path) -> dict[str, Outcome]:
    """Run until all tests are done or one fails. Return outcomes for the tests that were begun."""
    order = folder / "tests.json"
    requests = [_request(item, launch.device) for item in items]
    wanted = {"file": str(items[0].path), "backend": launch.backend, "device": launch.device, "tests": requests}
    order.write_text(json.dumps(wanted))
    more = simulated(launch.device)
    answers = [folder / f"{rank}.jsonl" for rank in range(launch.ranks)]
    log_path, port = folder / "log.txt", free_port()
    # A rank that fails or is killed leaves its temporary files. They go with the folder.
    scratch = tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True)
    with log_path.open("w") as log, scratch as path:
        processes = [
            start_rank(
                RANK, [str(order), str(answers[rank])], rank, launch.ranks, port, log, launch.cold, TMPDIR=path,
                **(more | ({"ZEROPP_HOST_ID": str(rank)} if launch.hosts else {})),
            )
            for rank in range(launch.ranks)
        ]  # fmt: skip
        try:
            wait_all(processes, launch.launch_s)
            ends = [_how_it_ended(one, launch.launch_s) for one in processes]
            cut_short = all(one.poll() is None for one in processes)
        finally:
            end(processes)
    outcomes = _outcomes(items, [_read(path) for path in answers], ends, log_path.read_text(errors="replace"))
    if cut_short and len(outcomes) > 1:  # the last test had less time than its own limit, and is begun again
        outcomes.popitem()
    return outcomes


def simulated(device: str) -> dict[str, str]:
    """Return the environment of a rank on a device; skip the test where the simulated GPU cannot be built."""
    if not device.startswith("sim"):
        return {}
    import sim_build  # imports setuptools, which no other test needs

    if why_not := sim_build.why_no_torch_device():
        pytest.skip(why_not)
    sim_build.torch_device()  # before any time limit runs
    return {"SIM_LAZY": str((1 << 63) - 1 if device == "sim-lazy" else 0)}


def taking_the_device() -> dict[str, str]:
    """Return the environment of ranks that a test starts itself, whose body begins with :func:`rank.use_of_the_environment`."""
    return {**simulated(DEVICE), "ZEROPP_TEST_DEVICE": DEVICE}


def _how_it_ended(process: Started, launch_s: float) -> str:
    if process.poll() is not None:
        return f"it ended with {process.returncode}"
    return f"it was killed {GRACE_S:.0f} s after another rank failed, or {launch_s:.0f} s after the start"


def _request(item: Any, device: str) -> dict[str, Any]:
    own = inspect.signature(inspect.unwrap(item.obj)).parameters
    params = {"device": device} | getattr(getattr(item, "callspec", None), "params", {})
    return {
        "id": item.nodeid,
        "function": item.originalname,
        "params": {name: value for name, value in params.items() if name in own},
        "seconds": item.obj.on_ranks.test_s,
        "refused": item.obj.on_ranks.refused.get(device),
    }


def _outcomes(items: list[Any], rows: list[dict[str, Any]], ends: list[str], log: str) -> dict[str, Outcome]:
    begun = [item.nodeid for item in items if any(item.nodeid in row for row in rows)]
    if not begun:
        return {items[0].nodeid: Outcome(["the rank did not start"] * len(rows), None, log)}
    outcomes = {}
    for name in begun:
        records = [row.get(name, {}) for row in rows]
        errors = [
            None if "seconds" in record else record.get("error", f"the rank gave no answer: {ended}")
            for record, ended in zip(records, ends, strict=True)
        ]
        skipped = [record["skipped"] for record in records if "skipped" in record]
        outcomes[name] = Outcome(errors, skipped[0] if skipped else None, log)
    return outcomes


def _read(path: Path) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            record = json.loads(line)
            rows.setdefault(record["id"], {}).update(record)
    return rows


def start_rank(
    script: Path, arguments: Iterable[str], rank: int, ranks: int, port: int, log: Any, cold: bool = False, **more: str
) -> Started:
    """Start one rank as torchrun would, in a process group of its own, so that it can be stopped as a whole."""
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        **more,
    }
    words = [str(script), *arguments]
    return start(words, slot=rank, env=environment, stdout=log, stderr=subprocess.STDOUT, new_session=True, cold=cold)


def end(processes: Iterable[Started]) -> None:
    """Kill every process that still runs, with its children."""
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_all(processes: list[Started], limit_s: float) -> None:
    """Wait until all ended, for the limit at most. After the first failure the others have GRACE_S."""
    deadline = time.monotonic() + limit_s
    while any(p.poll() is None for p in processes):
        if any(p.poll() not in (None, 0) for p in processes):
            deadline = min(deadline, time.monotonic() + GRACE_S)
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)
