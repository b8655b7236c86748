# SPDX-License-Identifier: Apache-2.0
"""Measure what grows with the ranks of a group, 4 to 1,024, over the product's rendezvous, sockets and control memory.

The ranks are threads of a few processes (scale.c), and nothing of the control path is a model. Only the network between
hosts is simulated: the loopback carries its bytes, every message is counted, and arrives in simulated time after a
stated latency and at a stated bandwidth. The peer is a *full* group, in which every rank reads every endpoint and every
pair of hosts' ranks connects: measured up to 64 ranks, counted by its formulas above. Every row has all figures of its
size as further fields: per rank the values and bytes read from the store, descriptors, kB of memory, messages, control
bytes and counters of a barrier, of an all-reduce of 8 bytes, and up to 256 ranks of one of 2 MiB, which goes from each
host to each other one; microseconds of the start and of these, real and simulated; milliseconds until all have heard of
a rank that died. Counts are exact. Real times of hundreds of threads on a few cores are upper
bounds.

docs/design/0046-what-grows-with-ranks.md has the figures, and what they leave out.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import ROOT, BenchError, Need, Row, Run

CLAIM = "control messages, links and store reads of a rank grow with log(hosts) at most; 1,024 ranks hear of a dead one within 5 s"
NEEDS = (Need("the C compiler", program="cc", install="apt-get install gcc", peer=False),)

LOCALS = 8  # ranks a host
LATENCY_US, BYTES_PER_US = 20, 1250  # 10 Gbit/s Ethernet
WRAPPED = ("send", "sendmsg", "recv", "connect", "listen", "zpp_counter_raise", "zpp_exchange")
LINKS = 4  # of a pair in a full group: control, send and receive, two for data
HEARD_MS = 5000.0
OF_ALL = (
    "store_sets", "store_gets", "store_bytes", "descriptors", "descriptors_later", "descriptors_long", "memory_kb",
)  # fmt: skip
"""Figures of the whole group, which every rank has a share of; so have the counts of steps."""


def build(folder: Path) -> Path:
    """Compile the ranks against the product's objects, which the C tests' runner makes."""
    program = folder / "scale"
    runner = [sys.executable, str(ROOT / "tests" / "c" / "run.py"), "--only", "test_base_status"]
    subprocess.run(runner, check=True, stdout=subprocess.DEVNULL, timeout=1800)
    sources = [str(ROOT / "benchmarks" / "scale.c"), str(ROOT / "build" / "c" / "plain" / "product.a")]
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-O2", f"-I{ROOT / 'csrc'}", *(f"-Wl,--wrap={name}" for name in WRAPPED)]
    subprocess.run(["cc", *flags, *sources, "-lm", "-ldl", "-lpthread", "-o", str(program)], check=True, timeout=300)
    return program


def measured(program: Path, ranks: int, full: bool = False) -> dict[str, Any]:
    """Return the figures of one size, of a rank where they are counts."""
    hosts = max(1, ranks // LOCALS)
    options = [ranks, hosts, LATENCY_US, BYTES_PER_US, ranks if full else 1 if hosts > 1 else 0]
    done = subprocess.run([str(program), *map(str, options)], capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise BenchError(f"scale: {ranks} ranks on {hosts} hosts ended with {done.returncode}: {done.stderr[-600:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    shared = [n for n in found if n in OF_ALL or n.endswith(("e_messages", "r_messages", "_bytes", "_counters"))]
    return {**found, **{name: found[name] / ranks for name in shared}}


def full_by_formula(ranks: int) -> dict[str, float]:
    """Return what a rank of a full group has: endpoints of all, links to all ranks elsewhere, messages to all hosts."""
    elsewhere, hosts = ranks - LOCALS, ranks // LOCALS
    return {
        "store_gets": ranks - 1 + elsewhere,
        "descriptors_later": 2 * (LOCALS - 1) + LINKS * elsewhere + 2,
        "all_reduce_messages": hosts - 1,
    }


def run(bench: Run) -> None:
    """Measure every size, then the powers of the ranks with which figures of the group grow."""
    sizes = [4, 16, 64, 256] if bench.quick else [4, 16, 64, 128, 256, 512, 1024]
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        every = [measured(program, ranks) for ranks in sizes]
        for row in every:
            ranks = int(row["ranks"])
            bench.check(row["heard_ms"] < HEARD_MS, f"{ranks} ranks heard of a dead one after {row['heard_ms']} ms")
            if ranks > LOCALS:
                peer = measured(program, ranks, full=True) if ranks <= 64 else full_by_formula(ranks)
                name = "a full group" if ranks <= 64 else "a full group, by formula"
                _report(bench, row, peer, name)
    small, large = every[-2:]
    grows = math.log(large["ranks"] / small["ranks"])
    for name in ("store_gets", "store_bytes", "descriptors_later", "memory_kb", "all_reduce_messages"):
        power = 1 + math.log(large[name] / small[name]) / grows
        bench.log(f"{name} of the group grow with the ranks to the power of {power:.2f}")


def _report(bench: Run, row: dict[str, Any], peer: dict[str, Any], peer_name: str) -> None:
    names = {
        "store_gets": "store reads",
        "descriptors_later": "descriptors",
        "all_reduce_messages": "messages, all-reduce",
    }
    for name, said in names.items():
        ratio = peer[name] / row[name]
        bench.report(
            Row(bench=bench.name, case=f"{row['ranks']} ranks: {said} a rank", ours=row[name], peer=peer[name],
                peer_name=peer_name, unit="", ratio=ratio, ratio_low=ratio, ratio_high=ratio, rounds=1,
                extra=row if name == "store_gets" else {})
        )  # fmt: skip
