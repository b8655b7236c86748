# SPDX-License-Identifier: Apache-2.0
"""``torchrun … -m zeropp doctor``: latency and bandwidth of every pair of ranks and of the whole, and which rank is slow or dead.

``doctor --device cuda`` tries the GPUs of this machine in place of the ranks (device_doctor.py)."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zeropp.cli import device_doctor, new_table, refuse, show
from zeropp.comm.group import communicator
from zeropp.errors import CommError, counted, one_line
from zeropp.health import Report, check
from zeropp.health.gather import GatherWay, gather_way

MOST_TIMEOUT_S = 86400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``doctor``."""
    parser.add_argument(
        "--device",
        metavar="cuda",
        help="try this GPU (cuda:1), or all of its kind (cuda), and no ranks: without torchrun",
    )
    parser.add_argument("--quick", action="store_true", help="with --device: only what every training asks for")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--factor", type=float, default=3.0, help="how many times slower than the best is a fault (3)")
    parser.add_argument(
        "--timeout", type=float, default=30.0, help="seconds to wait for a rank that does not answer (30)"
    )


def run(options: argparse.Namespace) -> int:
    """Print what was measured, on rank 0. Exit status: 0 healthy, 1 something is slow, dead or wrong, 2 not under torchrun."""
    if options.device is not None:
        return device_doctor.run(options.device, options.quick, options.json)
    wrong = _wrong_option(options) or _wrong_place(os.environ)
    if wrong:
        return refuse("doctor", wrong)
    torch.set_num_threads(1)
    try:
        dist.init_process_group("zeropp", timeout=timedelta(seconds=options.timeout))
        report = check(factor=options.factor)
    except CommError as error:
        return _dead(error, options)
    except (ValueError, RuntimeError) as error:
        return refuse("doctor", one_line(error))
    if dist.get_rank() == 0:
        way = _gather_way()
        if options.json:
            print(json.dumps({**report.as_dict(), **({"gather": way.as_dict()} if way else {})}))
        else:
            print_report(report, way)
    dist.destroy_process_group()
    return 1 if report.faults else 0


def _wrong_option(options: argparse.Namespace) -> str:
    """Return which option is wrong in a check of ranks; empty: none."""
    if options.quick:
        return "--quick is for GPUs; name them, as in --device cuda"
    if not 1 < options.factor < math.inf:
        return f"--factor {options.factor} is not allowed; wanted a number above 1"
    if not 0 < options.timeout <= MOST_TIMEOUT_S:
        return f"--timeout {options.timeout} is not allowed; wanted seconds above 0, at most {MOST_TIMEOUT_S}"
    return ""


def _wrong_place(environment: Mapping[str, str]) -> str:
    """Return what is wrong with these variables; torch would show a stack of its C++ code, or wait for a store."""
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing:
        return (
            f"no ranks ({', '.join(missing)} not set); start it as the job is started: "
            "torchrun --nproc-per-node 2 -m zeropp doctor"
        )
    numbers = {}
    for name, least, most in (("WORLD_SIZE", 1, 1 << 20), ("RANK", 0, 1 << 20), ("MASTER_PORT", 0, (1 << 16) - 1)):
        value = environment[name]
        if not value.isdecimal() or not least <= int(value) <= most:
            return f"{name}={value} is not allowed; wanted a whole number, {least} to {most}"
        numbers[name] = int(value)
    if numbers["RANK"] >= numbers["WORLD_SIZE"]:
        return f"RANK={numbers['RANK']} is not allowed with WORLD_SIZE={numbers['WORLD_SIZE']}; wanted 0 to {numbers['WORLD_SIZE'] - 1}"
    return ""


def _dead(error: CommError, options: argparse.Namespace) -> int:
    """Print the dead rank, on the lowest rank that is not it; return the exit status."""
    rank = int(os.environ["RANK"])
    speaker = 1 if error.rank == 0 else 0
    if rank == speaker or error.rank is None:
        fault: dict[str, Any] = {"kind": "dead rank", "ranks": [error.rank], "why": str(error)}
        if options.json:
            print(json.dumps({"ranks": int(os.environ["WORLD_SIZE"]), "faults": [fault], "healthy": False}), flush=True)
        else:
            who = "a rank" if error.rank is None else f"rank {error.rank}"
            print(f"dead: {who}: {error}", flush=True)
    return 1


def _gather_way() -> GatherWay | None:
    """Return how the GPUs of the ranks would exchange shards, as this host shows it; None without GPUs."""
    if not torch.cuda.is_available():
        return None
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    count = min(torch.cuda.device_count(), ranks_here)
    return gather_way([torch.device("cuda", index) for index in range(count)], communicator().hosts)


def print_report(report: Report, way: GatherWay | None = None) -> None:
    """Print tables of the ranks alone, the pairs and the whole, how GPUs would exchange shards, and the conclusion."""
    healthy = f"healthy: {counted(report.ranks, 'rank')}, none slower than its like"
    show(*_tables(report), *([] if way is None else [str(way)]))
    show(*(map(str, report.faults) if report.faults else [healthy]))


def _tables(report: Report) -> list[Any]:
    alone = new_table("each rank by itself")
    for name in ("rank", "host", "copy GB/s", "matrix product GFLOP/s"):
        alone.add_column(name, justify="left" if name == "host" else "right")
    for one in report.alone:
        alone.add_row(str(one.rank), one.host, f"{one.copy_gb_per_s:.1f}", f"{one.matmul_gflops:.1f}")
    between = new_table("all-reduce: us below 1 MB, GB/s from there")
    between.add_column("ranks")
    for size in report.whole:
        between.add_column(_size(size), justify="right")
    for pair, times in report.pairs.items():
        between.add_row(f"{pair[0]}-{pair[1]}", *(_speed(size, seconds) for size, seconds in times.items()))
    between.add_row("all", *(_speed(size, seconds) for size, seconds in report.whole.items()))
    return [alone, between]


def _size(size: int) -> str:
    return f"{size} B" if size < 1024 else f"{size // 1024} KB" if size < 1 << 20 else f"{size >> 20} MB"


def _speed(size: int, seconds: float) -> str:
    return f"{seconds * 1e6:.1f}" if size < 1 << 20 else f"{size / seconds / 1e9:.2f}"
