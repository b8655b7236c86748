# SPDX-License-Identifier: Apache-2.0
"""Shared parts of all benchmarks: alternation, medians with spread, rows, launches of several ranks.

A benchmark is one file beside this one. It exposes

    CLAIM: str                   one sentence, shown by ``run.py --list``
    NEEDS: tuple[Need, ...]      peers that must be installed, each with the way to get it
    def run(bench: Run) -> None  checks that contenders agree, measures, and reports rows

and, where a case needs several processes, worker functions ``def NAME(args: dict) -> object`` that ``Run.launch``
calls on every rank; one of many cases is a generator, whose results are reported as they come, so that an interrupted
run leaves what it measured. Contenders alternate in a random order, once a round, so that a change of the machine's mood meets
all of them; ratios are medians over rounds of the ratio *within* a round, never of figures from different minutes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import platform
import random
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from turns import PYTHON_VARIABLE, TWINS, alone

Better = Literal["lower", "higher"]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PYTHON = Path(os.environ.get(PYTHON_VARIABLE) or ROOT / "python")
"""Folder of the package that is measured: this tree's, or with ``run.py --against`` another revision's."""


class BenchError(Exception):
    """A benchmark cannot be measured: a peer is missing, contenders disagree, or a launch failed."""


class PeerMissing(BenchError):
    """A peer is not installed, or lacks something of the system; the sentence names what brings it."""


@dataclass(frozen=True)
class Need:
    """A peer that must be there: a Python module, a program, or a library with its header that a peer is built with."""

    name: str
    """How the peer is called in messages."""
    module: str | None = None
    """Python module to find, or None."""
    program: str | None = None
    """Program to find on PATH, or None."""
    library: str | None = None
    """Library that can be linked, with a header of the same name before ".h" and behind "lib"; or None."""
    install: str = "pip install -e .[bench]"
    """The command that brings it."""
    peer: bool = True
    """False where our own side needs it, too."""

    def check(self) -> None:
        """Raise PeerMissing, naming the way out, where the peer is missing."""
        if self.module is not None and importlib.util.find_spec(self.module) is None:
            raise PeerMissing(f"peer {self.name}: Python module {self.module!r} is not installed; {self.install}")
        if self.program is not None and shutil.which(self.program) is None:
            raise PeerMissing(f"peer {self.name}: program {self.program!r} is not on PATH; {self.install}")
        if self.library is not None and not links(self.library):
            raise PeerMissing(
                f"peer {self.name}: lib{self.library}.h and lib{self.library}.so, which it is built with, are not installed; {self.install}"
            )


def links(library: str) -> bool:
    """True if a C program with this library and its header can be built, by CC, CFLAGS and LDFLAGS."""
    flags = [shlex.split(os.environ.get(name, "")) for name in ("CFLAGS", "LDFLAGS")]
    command = [*shlex.split(os.environ.get("CC") or "cc"), *flags[0], "-x", "c", "-", "-o", os.devnull, *flags[1]]
    program = f"#include <lib{library}.h>\nint main(void) {{ return 0; }}\n"
    try:
        return subprocess.run([*command, f"-l{library}"], input=program, capture_output=True, text=True).returncode == 0
    except OSError:
        return False


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the result: ours against one peer in one case. ``ratio`` > 1 means that ours is better."""

    bench: str
    case: str
    ours: float
    peer: float
    peer_name: str
    unit: str
    ratio: float
    ratio_low: float
    """First quartile of the ratios within a round."""
    ratio_high: float
    """Third quartile of the ratios within a round."""
    rounds: int
    limit: float | None = None
    limit_name: str | None = None
    of_limit: float | None = None
    """Fraction of the limit that ours reaches, median over rounds."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further figures of the bench's choice; merged into the JSON object."""

    def as_json(self) -> str:
        """One JSON object, without the fields that do not apply."""
        values: dict[str, Any] = {k: v for k, v in vars(self).items() if v is not None and k != "extra"}
        values.update(self.extra)
        return json.dumps({k: round_figure(v) for k, v in values.items()})


@dataclass(frozen=True, kw_only=True)
class Own:
    """Our own figures in one case, where no peer is measured (:func:`alone`); against.py makes rows of two revisions'."""

    case: str
    unit: str
    better: Better
    samples: tuple[float, ...]
    """One a round."""


def round_figure(value: object) -> object:
    """Five significant digits: more would only show noise."""
    if isinstance(value, float) and math.isfinite(value) and value != 0.0:
        return round(value, 4 - math.floor(math.log10(abs(value))))
    return value


Samples = dict[str, list[Any]]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def alternate(
    contenders: Mapping[str, Callable[[], Any]],
    rounds: int,
    warmup: int = 1,
    seed: int = 0,
    ours: Sequence[str] | None = None,
) -> Samples:
    """Call every contender once a round, in an order drawn anew each round, and keep what each returned.

    ``ours`` names the contenders that our own rows are made of: where these are measured alone, the others are not called.
    """
    order = [name for name in contenders if not alone() or ours is None or name in ours]
    rng = random.Random(seed)
    samples: Samples = {name: [] for name in order}
    for index in range(warmup + rounds):
        rng.shuffle(order)
        for name in order:
            with TWINS.turn():
                value = contenders[name]()
            if index >= warmup:
                samples[name].append(value)
    return samples


def timed(call: Callable[[], Any], prepare: Callable[[], Any] | None = None, repeat: int = 1) -> Callable[[], float]:
    """A contender that returns milliseconds a call: ``prepare`` runs untimed, then ``call`` ``repeat`` times, timed."""

    def measure() -> float:
        if prepare is not None:
            prepare()
        start = time.perf_counter_ns()
        for _ in range(repeat):
            call()
        return (time.perf_counter_ns() - start) / 1e6 / repeat

    return measure


def repeat_for(call: Callable[[], Any], at_least_ms: float) -> int:
    """How often to call so that one timing lasts at least that long."""
    call()
    once = timed(call)()
    return max(1, math.ceil(at_least_ms / max(once, 1e-6)))


class Run:
    """The argument of a benchmark's ``run``: it has the options and takes the rows."""

    def __init__(self, name: str, *, quick: bool, report: Callable[[Row | Own], None]) -> None:
        self.name = name
        """The benchmark's name: its file's."""
        self.quick = quick
        """Drop cases, never peers: under 60 s on 2 cores, whole training steps under 240 s."""
        self._report = report
        self.unmeasured: list[str] = []
        """Sentences: rows that could not be measured, and why."""

    def leave_out(self, rows: str, error: PeerMissing) -> None:
        """Name rows that cannot be measured; the others are, and run.py ends with the status of a missing peer."""
        self.unmeasured.append(f"{self.name}: not measured: {rows}: {error}")
        self.log(self.unmeasured[-1])

    def log(self, sentence: str) -> None:
        """Progress, to stderr."""
        print(f"[{self.name}] {sentence}", file=sys.stderr, flush=True)

    def report(self, row: Row) -> None:
        """Report a row that the benchmark computed itself, whose figures are better the lower; most use :meth:`compare`."""
        if alone():
            self.own(row.case, [row.ours], row.unit)
        else:
            self._report(row)

    def own(self, case: str, samples: Sequence[float], unit: str, better: Better = "lower") -> None:
        """Report our own figures, where no peer is measured; :meth:`compare` does so by itself."""
        self._report(Own(case=case, unit=unit, better=better, samples=tuple(map(float, samples))))

    def check(self, condition: bool, sentence: str) -> None:
        """Correctness comes before timing: a contender that computes something else is not timed."""
        if not condition:
            raise BenchError(f"{self.name}: {sentence}")

    def compare(
        self,
        case: str,
        samples: Mapping[str, Sequence[float]],
        *,
        ours: str,
        peers: Sequence[str],
        unit: str,
        limit: str | None = None,
        better: Better = "lower",
        extra: Mapping[str, Any] | None = None,
    ) -> list[Row]:
        """Report one row a peer from samples of the same rounds. ``limit`` names the contender that bounds ours."""
        if alone():
            self.own(case, samples[ours], unit, better)
            return []
        mine = [float(v) for v in samples[ours]]
        rows = []
        for peer in peers:
            theirs = [float(v) for v in samples[peer]]
            low, ratio, high = quartiles([gain(m, t, better) for m, t in zip(mine, theirs, strict=True)])
            row = Row(
                bench=self.name, case=case, unit=unit, rounds=len(mine), extra=dict(extra or {}),
                ours=statistics.median(mine), peer=statistics.median(theirs), peer_name=peer,
                ratio=ratio, ratio_low=low, ratio_high=high,
                **({} if limit is None else of_limit(mine, samples[limit], limit, better)),
            )  # fmt: skip
            self._report(row)
            rows.append(row)
        return rows

    def launch(
        self,
        worker: str,
        *,
        ranks: int,
        args: Mapping[str, Any] | None = None,
        threads: int = 1,
        timeout_s: float = 240.0,
        env: Mapping[str, str] | None = None,
        heard: Callable[[Any], None] | None = None,
    ) -> list[Any]:
        """Run this file's function ``worker(args)`` on ``ranks`` processes under torchrun; what each rank returned.

        Workers find RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_SIZE and a rendezvous in the environment, as torchrun sets them
        (LOCAL_SIZE is for DeepSpeed), and ``threads`` OpenMP threads each. A worker that fails, or a launch that
        outlasts ``timeout_s``, is a BenchError with the end of its output. Nothing that was started is left behind.
        Of a worker that is a generator, ``heard`` is given what rank 0 yields, soon after it did; what a rank returned
        is then the list of all.
        """
        with tempfile.TemporaryDirectory(prefix="zeropp-bench-") as out:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                       "--local-addr=127.0.0.1",  # else the machine's name, which it may be unable to resolve
                       f"--nproc-per-node={ranks}", str(HERE / "run.py"), "--worker", f"{self.name}:{worker}", "--worker-out", out,
                       "--worker-args", json.dumps(dict(args or {}))]  # fmt: skip
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "LOCAL_SIZE": str(ranks), **(env or {})}
            lines = Lines(Path(out) / "rank0.lines", heard)
            what = f"{self.name}:{worker} on {ranks} ranks"
            # A twin's turns come on top of our own; and peers, which take longer, are missing.
            limit_s = timeout_s * (2 if alone() else 1)
            with TWINS.launching() as turns:
                text = run_group(command, {**environment, **turns}, limit_s, what, meanwhile=lines.read)
            results = []
            for rank in range(ranks):
                path = Path(out) / f"rank{rank}.json"
                if not path.exists():
                    raise BenchError(f"{self.name}:{worker}: rank {rank} left no result; output ends:\n{text[-3000:]}")
                results.append(json.loads(path.read_text()))
            return results


class Lines:
    """JSON values that a worker writes to a file, one a line, and this process hands on as they come."""

    def __init__(self, path: Path, heard: Callable[[Any], None] | None) -> None:
        self.path, self.heard, self.at = path, heard, 0

    def read(self) -> None:
        """Hand on the lines that are whole."""
        if self.heard is None or not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.at)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self.at += len(line)
                self.heard(json.loads(line))

    @staticmethod
    def write(path: Path, values: Iterable[Any]) -> list[Any]:
        """The worker's side: each value as soon as it is there, then all of them."""
        written = []
        with path.open("w") as file:
            for value in values:
                print(json.dumps(value), file=file, flush=True)
                written.append(value)
        return written


def gain(ours: float, peer: float, better: Better) -> float:
    """How many times better ours is."""
    return peer / ours if better == "lower" else ours / peer


def of_limit(ours: Sequence[float], limit: Sequence[float], name: str, better: Better) -> dict[str, Any]:
    """The limit's figure, and the fraction of it that ours reaches.

    1 is the limit itself; more than that is noise, and reads 1 (``ours`` and ``limit`` still show it).
    """
    fractions = [gain(m, float(b), better) for m, b in zip(ours, limit, strict=True)]
    return {
        "limit": statistics.median(float(v) for v in limit),
        "limit_name": name,
        "of_limit": min(1.0, statistics.median(fractions)),
    }


#: What run_group has started and not yet seen end; several threads of a bench may each have one.
_running: set[subprocess.Popen[Any]] = set()


LOOK_S = 1.0  # how often run_group looks at what was written meanwhile


def run_group(
    command: Sequence[str],
    env: Mapping[str, str],
    timeout_s: float,
    what: str,
    meanwhile: Callable[[], None] = lambda: None,
) -> str:
    """Run a command in a process group of its own; its output. The whole group ends with it.

    ``meanwhile`` is called now and then, and once when the command has ended.
    """
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, env=dict(env), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        _running.add(process)
        try:
            code: int | None = None
            deadline = time.monotonic() + timeout_s
            while code is None and time.monotonic() < deadline:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(timeout=min(LOOK_S, timeout_s))
                meanwhile()
        finally:
            end_group(process)
            _running.discard(process)
        output.seek(0)
        text = output.read()
    if code is None:
        raise BenchError(f"{what}: not finished after {timeout_s:.0f} s; its output ends:\n{text[-3000:]}")
    if code != 0:
        raise BenchError(f"{what}: exit status {code}; its output ends:\n{text[-3000:]}")
    return text


def end_on_signal(number: int, _frame: object) -> None:
    """Handle SIGTERM and Ctrl-C: a terminal and a time limit reach this process alone, because launches have their own sessions.

    Launches get SIGTERM, on which torchrun ends its ranks. The threads that wait for them then return, and the main
    thread ends as by Ctrl-C.
    """
    for process in tuple(_running):
        process.terminate()
    raise SystemExit(128 + number)


NICE_VARIABLE = "ZEROPP_BENCH_NICE"


def prefer_me() -> None:
    """Apply ``run.py --nice`` to this process: on a machine that others use, all that is measured comes before them.

    Each session of processes (torchrun gives every rank its own) is scheduled as one group, whose preference counts
    before the nice value inside it.
    """
    wanted = os.environ.get(NICE_VARIABLE)
    if wanted is None:
        return
    os.setpriority(os.PRIO_PROCESS, 0, int(wanted))
    group = Path("/proc/self/autogroup")
    if group.exists():
        group.write_text(wanted)


def end_group(process: subprocess.Popen[Any]) -> None:
    """End what is left of a process group that run_group started.

    SIGTERM first: torchrun then ends its workers, which live in sessions of their own. Workers also ask the kernel to
    end with their parent (run.py, ``work``), so that even a killed torchrun leaves none. What a build tool started is in
    groups of its own, but in this session.
    """
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=15.0)
    for pid in (process.pid, *of_session(process.pid)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    process.wait()


def of_session(session: int) -> list[int]:
    """Leaders of the process groups in a session, but for the session's own."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            group, of = path.read_text().rpartition(")")[2].split()[2:4]
            if int(of) == session and int(group) != session:
                found.add(int(group))
    return sorted(found)


def environment(command: Sequence[str]) -> dict[str, str]:
    """Machine, versions, date and command, for stored results."""
    versions = [f"python {platform.python_version()}"]
    for module in ("torch", "deepspeed", "transformers", "numpy"):
        if importlib.util.find_spec(module) is not None:
            versions.append(f"{module} {version_of(module)}")
    return {
        "machine": f"{cpu_model()}, {os.cpu_count()} cpus, {memory_gib():.0f} GiB, {platform.system()}",
        "versions": ", ".join(versions),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(command),
    }


def version_of(module: str) -> str:
    """Version of an installed distribution, without importing it."""
    from importlib import metadata

    try:
        return metadata.version(module)
    except metadata.PackageNotFoundError:
        return "unknown"


def cpu_model() -> str:
    """Model name, family and instruction sets that matter here."""
    fields: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    except OSError:
        return platform.processor() or "unknown cpu"
    flags = fields.get("flags", "").split()
    level = "avx512" if "avx512f" in flags else "avx2" if "avx2" in flags else "baseline"
    name = fields.get("model name", "unknown cpu")
    return f"{name} (family {fields.get('cpu family', '?')} model {fields.get('model', '?')}, {level})"


def memory_gib() -> float:
    """Physical memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
