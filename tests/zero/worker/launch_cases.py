# SPDX-License-Identifier: Apache-2.0
"""Start ranks for the tests of tests/zero.

One launch runs many cases in one process group, because starting Python and importing torch costs more than any case
here. A case that fails ends its ranks; the cases after it get fresh ones, so that no case sees what another broke.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warm import Process, free_port, start

Started = Process | subprocess.Popen[bytes]
WORKER = Path(__file__).parent
GRACE_S = 10.0  # for the other ranks to end after the first one failed


@dataclass
class Outcome:
    """The answers of a case, rank by rank; `errors` holds tracebacks, None where the rank succeeded."""

    values: list[Any]
    errors: list[str | None]
    log: str

    def check(self) -> list[Any]:
        """Return the ranks' answers, or raise the error of the rank that failed first."""
        failed = [(rank, error) for rank, error in enumerate(self.errors) if error]
        if failed:
            text = "\n".join(f"--- rank {rank}\n{error}" for rank, error in failed)
            raise AssertionError(f"{text}\n--- output\n{self.log[-4000:]}")
        return self.values


def start_rank(
    script: str, arguments: Iterable[str], rank: int, ranks: int, port: int, log: Any, cold: bool = False, **more: str
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
    words = [str(WORKER / script), *arguments]
    return start(words, slot=rank, env=environment, stdout=log, stderr=subprocess.STDOUT, new_session=True, cold=cold)


def end(processes: Iterable[Started]) -> None:
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_all(processes: list[Started], limit_s: float) -> bool:
    """True if all ended within the limit. After the first failure the others have GRACE_S."""
    deadline = time.monotonic() + limit_s
    while any(p.poll() is None for p in processes):
        if any(p.poll() not in (None, 0) for p in processes):
            deadline = min(deadline, time.monotonic() + GRACE_S)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def once(
    module: str, cases: list[str], ranks: int, limit_s: float, folder: Path, cold: bool = False
) -> dict[str, Outcome]:
    """Run until all cases are done or one fails. Return answers for the cases that were begun."""
    folder.mkdir(parents=True)
    log_path, port = folder / "log.txt", free_port()
    with log_path.open("w") as log:
        processes = [
            start_rank("rank.py", [module, str(folder / f"{r}.jsonl"), *cases], r, ranks, port, log, cold)
            for r in range(ranks)
        ]
        try:
            in_time = wait_all(processes, limit_s)
        finally:
            end(processes)
    output = log_path.read_text(errors="replace")
    rows = [_read(folder / f"{r}.jsonl") for r in range(ranks)]
    outcomes: dict[str, Outcome] = {}
    for case in cases:
        if not any(case in row for row in rows):
            break
        values, errors = [], []
        for rank, row in enumerate(rows):
            record = row.get(case, {})
            end_text = f"ended with {processes[rank].returncode}" if in_time else f"killed after {limit_s} s"
            values.append(record.get("value"))
            errors.append(None if "value" in record else record.get("error", f"no answer: the rank {end_text}"))
        outcomes[case] = Outcome(values, errors, output)
    if not outcomes:
        outcomes[cases[0]] = Outcome([None] * ranks, ["the rank did not start"] * ranks, output)
    return outcomes


def _read(path: Path) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            record = json.loads(line)
            rows.setdefault(record["case"], {}).update(record)
    return rows
