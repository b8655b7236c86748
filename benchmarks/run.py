# SPDX-License-Identifier: Apache-2.0
"""One command for all benchmarks: ``python benchmarks/run.py NAME... [--json FILE] [--quick] [--against REV] [--list]``.

Every other file of this folder that defines CLAIM and run() is a benchmark; harness.py says what it must expose.
With ``--against`` the peer is another revision of this repository (against.py).
Without ``--json`` the rows go to stdout, one JSON object a line; with it they go to FILE and stdout shows a table.
Exit status: 0 measured, 1 a contender was wrong or a launch failed, 2 wrong usage, a revision that does not build, or a peer that
is not installed; also where other rows could be measured without that peer, and were.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import against  # noqa: E402  (its folder is put on the path above)
import harness  # noqa: E402

# The package of the tree that this file belongs to is used, installed or not; with --against it may be another revision's.
if (harness.PYTHON / "zeropp").is_dir():
    sys.path.insert(1, str(harness.PYTHON))


def benches() -> dict[str, str]:
    """Name and claim of every benchmark, without importing any."""
    found = {}
    for path in sorted(HERE.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            value = getattr(node, "value", None)
            if isinstance(target, ast.Name) and target.id == "CLAIM" and value is not None:
                found[path.stem] = str(ast.literal_eval(value))
    return found


def load(name: str) -> ModuleType:
    """Import a benchmark, after its name was found by benches()."""
    return importlib.import_module(name)


def work(target: str, args: str, out: str) -> None:
    """One rank of Run.launch: call the worker function and leave its result, or what it yields, for the parent."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)  # a killed torchrun leaves no worker behind
    harness.prefer_me()
    name, _, function = target.partition(":")
    result = getattr(load(name), function)(json.loads(args))
    path = Path(out) / f"rank{os.environ['RANK']}.json"
    if isinstance(result, Iterator):
        result = harness.Lines.write(path.with_suffix(".lines"), result)
    path.with_suffix(".part").write_text(json.dumps(result))
    path.with_suffix(".part").rename(path)


def table_line(row: harness.Row) -> str:
    """A row for people."""
    limit = "" if row.of_limit is None else f"  {row.of_limit:5.2f} of {row.limit_name}"
    return (
        f"{row.bench:14} {row.case:36} {row.ours:10.4g} {row.unit:6} {row.peer:10.4g} {row.peer_name:28} "
        f"ratio {row.ratio:6.2f} ({row.ratio_low:.2f}-{row.ratio_high:.2f}){limit}"
    )


def needs(name: str) -> Iterator[harness.Need]:
    """Yield what must be installed: no peer where our own side is measured alone."""
    return (need for need in load(name).NEEDS if not (need.peer and harness.alone()))


@contextlib.contextmanager
def rows_to(json_path: str | None, command: list[str]) -> Iterator[Callable[[harness.Row | harness.Own], None]]:
    """A function that writes a row where rows go."""
    where = harness.environment(command)
    with Path(json_path).open("a") if json_path else contextlib.nullcontext() as sink:

        def report(row: harness.Row | harness.Own) -> None:
            if isinstance(row, harness.Own):
                print(json.dumps(vars(row)), file=sink, flush=True)
                return
            print(json.dumps({**json.loads(row.as_json()), **where}), file=sink, flush=True)
            if sink is not None:
                print(table_line(row), flush=True)

        yield report


def measure(options: argparse.Namespace, command: list[str]) -> list[str]:
    """Run the benchmarks, one after the other; return sentences about rows that could not be measured."""
    unmeasured: list[str] = []
    with rows_to(options.json, command) as report:
        if options.against is not None:
            against.run(options.names, options.against, options.quick, report)
            return unmeasured
        for name in options.names:
            bench = harness.Run(name, quick=options.quick, report=report)
            load(name).run(bench)
            unmeasured += bench.unmeasured
    return unmeasured


def main(argv: list[str]) -> int:
    """Parse the command line and run; see the top of the file."""
    parser = argparse.ArgumentParser(prog="benchmarks/run.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run; see --list")
    parser.add_argument("--json", metavar="FILE", help="append rows to FILE, show a table on stdout")
    parser.add_argument("--quick", action="store_true", help="fewer cases, all peers; under 60 s a bench")
    parser.add_argument(
        "--nice", type=int, metavar="N", help="scheduling preference of all that is measured, -20 first (below 0: root)"
    )
    parser.add_argument(
        "--against", metavar="REV", help="compare with that revision, built beside the tree, in place of the peers"
    )
    parser.add_argument("--list", action="store_true", help="name the benchmarks and their claims")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--worker-args", default="{}", help=argparse.SUPPRESS)
    parser.add_argument("--worker-out", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.nice is not None:
        os.environ[harness.NICE_VARIABLE] = str(options.nice)
        harness.prefer_me()
    if options.worker:
        work(options.worker, options.worker_args, options.worker_out)
        return 0
    known = benches()
    if options.list:
        for name, claim in known.items():
            print(f"{name:16} {claim}")
        return 0
    if not options.names:
        parser.error(f"name at least one benchmark: {', '.join(known)}")
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"no benchmark is called {unknown[0]!r}; known: {', '.join(known)}")
    try:
        for name in options.names if options.against is None else ():
            for need in needs(name):
                need.check()
    except harness.BenchError as error:
        print(f"benchmarks/run.py: {error}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, harness.end_on_signal)
    try:
        unmeasured = measure(options, ["benchmarks/run.py", *argv])
    except (harness.PeerMissing, against.revision.RevisionError) as error:
        print(f"benchmarks/run.py: {error}", file=sys.stderr)
        return 2
    except harness.BenchError as error:
        print(f"benchmarks/run.py: {error}", file=sys.stderr)
        return 1
    for sentence in unmeasured:
        print(f"benchmarks/run.py: {sentence}", file=sys.stderr)
    return 2 if unmeasured else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
