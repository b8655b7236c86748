# SPDX-License-Identifier: Apache-2.0
"""Run a script or a function on N ranks as torchrun would, and report how each rank ended.

    def body(rank, ranks):
        ...
    outcomes = run_ranks(3, body, timeout=60)

A function is taken by its source module and name, so it must stand at the top level of an importable file; what it returns is in
``Outcome.value`` (JSON).
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warm import Process, free_port, start

ROOT = Path(__file__).resolve().parents[2]
Started = Process | subprocess.Popen[bytes]

_CALL = """
import faulthandler, importlib.util, json, os, signal, sys
faulthandler.register(signal.SIGUSR1)  # see launch._show_stacks
spec = importlib.util.spec_from_file_location("rank_body", {path!r})
module = importlib.util.module_from_spec(spec)
sys.modules["rank_body"] = module
spec.loader.exec_module(module)
value = getattr(module, {name!r})(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), *json.loads({args!r}))
with open(os.environ["ZEROPP_TEST_VALUE"], "w") as file:
    json.dump(value, file)
"""


@dataclass
class Outcome:
    """The end of one rank: its exit code (negative: the signal), its output, and what its function returned."""

    rank: int
    code: int | None
    out: str
    err: str
    value: Any
    seconds: float

    def __str__(self) -> str:
        return f"rank {self.rank}: exit {self.code} after {self.seconds:.1f} s\n{self.out}{self.err}"


def start_on(host: str, device: str) -> None:
    """Let this rank, in a function of :func:`run_ranks`, be of a host and have a device. Comes before zeropp is imported."""
    os.environ["ZEROPP_HOST_ID"] = host
    import torch
    import torch.distributed as dist

    if device == "sim":
        sys.path.insert(0, str(ROOT / "tests" / "sim"))
        importlib.import_module("sim").register_backend()
    torch.set_default_device(device)
    dist.init_process_group("gloo")


def survivors(outcomes: Sequence[Outcome], victim: int) -> list[Outcome]:
    """Return the outcomes of all ranks but one, once each of them has ended well."""
    others = [outcome for outcome in outcomes if outcome.rank != victim]
    for outcome in others:
        assert outcome.code == 0, str(outcome)
    return others


def _words(what: str | Path | Callable[..., Any], args: Sequence[Any]) -> list[str]:
    if callable(what):
        return ["-c", _CALL.format(path=inspect.getfile(what), name=what.__name__, args=json.dumps(list(args)))]
    if isinstance(what, Path):
        return [str(what), *map(str, args)]
    return ["-c", what, *map(str, args)]


def run_ranks(
    ranks: int,
    what: str | Path | Callable[..., Any],
    *args: Any,
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
    env_of: Sequence[Mapping[str, str]] | None = None,
    prefix: Sequence[Sequence[str]] | None = None,
    watch: Callable[[list[Started]], None] | None = None,
    check: bool = True,
) -> list[Outcome]:
    """Start `ranks` processes and wait for all of them.

    Args:
        what: a function ``(rank, ranks, *args)``, the path of a script, or source text.
        env_of, prefix: variables of each rank; words before its command.
        timeout: seconds, from the start or the return of `watch`; what still runs then is killed, and shows as code -9.
        watch: called with the processes once they are started, in this process (to kill or stop some).
        check: require that every rank ends with code 0.

    Raises:
        AssertionError: with the output of all ranks.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        processes, files = [], []
        begun = time.monotonic()
        for rank in range(ranks):
            streams = [open(f"{folder}/{rank}.{name}", "w+b") for name in ("out", "err")]  # noqa: SIM115, PTH123
            files.append(streams)
            variables = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(
                    [str(ROOT / "python"), str(ROOT / "tests" / "comm"), os.environ.get("PYTHONPATH", "")]
                ),
                "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "ZEROPP_TEST_VALUE": f"{folder}/{rank}.json",
                **(env or {}),
                **(env_of[rank] if env_of else {}),
            }
            words = _words(what, args)
            if prefix and prefix[rank]:
                words = [*prefix[rank], sys.executable, *words]
                process = subprocess.Popen(words, env=variables, stdout=streams[0], stderr=streams[1], cwd=folder)
            else:
                process = start(words, slot=rank, env=variables, stdout=streams[0], stderr=streams[1], cwd=folder)
            processes.append(process)
        try:
            if watch is not None:
                watch(processes)
            ended = _wait(processes, begun, time.monotonic() + timeout)
        finally:
            _kill(processes)
        outcomes = []
        for rank, process in enumerate(processes):
            texts = []
            for stream in files[rank]:
                stream.seek(0)
                texts.append(stream.read().decode(errors="replace"))
                stream.close()
            value_path = Path(f"{folder}/{rank}.json")
            value = json.loads(value_path.read_text()) if value_path.exists() else None
            outcomes.append(Outcome(rank, process.returncode, texts[0], texts[1], value, ended[rank]))
    if check and any(outcome.code != 0 for outcome in outcomes):
        raise AssertionError("ranks failed:\n" + "\n".join(map(str, outcomes)))
    return outcomes


def _show_stacks(processes: Sequence[Started]) -> None:
    """Make each rank that still runs a function write the Python stacks of all threads, before it is killed."""
    for process in processes:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            status = dict(line.split(":", 1) for line in lines)
            caught = int(status["SigCgt"], 16) >> (signal.SIGUSR1 - 1) & 1
            if caught and "T" not in status["State"].split()[0]:
                process.send_signal(signal.SIGUSR1)
    time.sleep(0.5 if processes else 0.0)


def _kill(processes: Sequence[Started]) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)  # also ends a stopped one
            process.wait()


def _wait(processes: Sequence[Started], begun: float, deadline: float) -> list[float]:
    """Return the seconds after which each rank ended."""
    ended: dict[int, float] = {}
    while len(ended) < len(processes):
        for rank, process in enumerate(processes):
            if rank not in ended and process.poll() is not None:
                ended[rank] = time.monotonic() - begun
        if time.monotonic() > deadline:
            _show_stacks([process for process in processes if process.poll() is None])
            _kill(processes)
            deadline = float("inf")
        time.sleep(0.02)
    return [ended[rank] for rank in range(len(processes))]
