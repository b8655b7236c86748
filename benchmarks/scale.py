# SPDX-License-Identifier: Apache-2.0
"""Measure what grows with the ranks of a group: python benchmarks/scale.py [--ranks 4 8 16 32 64] [--hosts 1 8] [--json FILE].

The ranks are threads of one process over the product's own rendezvous, sockets and control memory (scale.c), so nothing of
the control path is a model; the loopback stands for the network. One JSON object a line and size: per rank the values that it
reads from the store and their bytes, descriptors, kB of memory, bytes that it receives in an all-reduce of 8 bytes; microseconds of the
start and of a barrier; milliseconds until all have heard of a rank that left. A last line for each number of hosts has the power of the
ranks with which each figure of the whole group grows between the two largest sizes: 1.0 is linear, 2.0 quadratic.

A group has at most 64 ranks, so larger sizes are refused. docs/design/0046-what-grows-with-ranks.md has the figures and what follows.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OF_ALL = ("store_gets", "store_bytes", "descriptors", "memory_kb")
"""Figures of the whole process, which every rank has a share of."""


def build(folder: Path) -> Path:
    """Compile the ranks against the product's objects, which the C tests' runner makes."""
    program = folder / "scale"
    runner = [sys.executable, str(ROOT / "tests" / "c" / "run.py"), "--only", "test_base_status"]
    subprocess.run(runner, check=True, stdout=subprocess.DEVNULL, timeout=900)
    sources = [str(ROOT / "benchmarks" / "scale.c"), str(ROOT / "build" / "c" / "plain" / "product.a")]
    compiler = ["cc", "-O2", f"-I{ROOT / 'csrc'}", *sources, "-lm", "-ldl", "-lpthread", "-o", str(program)]
    subprocess.run(compiler, check=True, timeout=120)
    return program


def measured(program: Path, ranks: int, hosts: int) -> dict[str, Any]:
    """Return the figures of one size."""
    done = subprocess.run(
        [str(program), str(ranks), str(hosts)], capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr.strip() or f"scale: {ranks} ranks on {hosts} hosts ended with {done.returncode}")
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def rows(program: Path, sizes: list[int], hosts: int) -> Iterator[dict[str, Any]]:
    """Yield one row a size, then the powers with which they grow."""
    every = [measured(program, ranks, hosts) for ranks in sizes if ranks > hosts and ranks % hosts == 0]
    for row in every:
        each = {f"{name}_a_rank": row[name] / row["ranks"] for name in OF_ALL}
        yield {"bench": "scale", "case": f"{row['ranks']} ranks {hosts} hosts", **row, **each}
    if len(every) > 1:
        small, large = every[-2:]
        grows = math.log(large["ranks"] / small["ranks"])
        names = (*OF_ALL, "all_reduce_bytes", "start_us", "barrier_us")
        powers = {name: round(math.log(large[name] / small[name]) / grows, 2) for name in names if small[name] > 0}
        yield {"bench": "scale", "case": f"power of the ranks, {hosts} hosts", **powers}


def main() -> int:
    """Print the rows; exit status 0."""
    parser = argparse.ArgumentParser(description="What grows with the ranks of a group.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--json", type=Path, help="add the rows to this file, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        lines = [json.dumps(row) for hosts in options.hosts for row in rows(program, options.ranks, hosts)]
    print("\n".join(lines))
    if options.json is not None:
        with options.json.open("a") as file:
            file.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
