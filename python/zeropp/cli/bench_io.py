# SPDX-License-Identifier: Apache-2.0
"""``python -m zeropp bench-io PATH``: the best block size and depth for a disk, by measurement, and how near its limit.

Every setting reads and writes the same scratch file in turn, a round at a time, beside a plain loop of O_DIRECT
preads and pwrites on a few threads: what the disk gives without the engine. Ratios are taken within a round, because
disks drift. The result is kept per device in the user's cache folder, and ``zeropp.aio.Engine(paths=PATH)`` uses it.

With several folders each is measured by itself, and then a file that is striped over them, as ``Offload(path=[...])`` does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from zeropp.aio import Engine
from zeropp.cli import refuse
from zeropp.config import folders as config_folders
from zeropp.errors import ConfigError, Error
from zeropp.files.io_settings import IoSettings, store
from zeropp.files.scratch import STRIPE_BYTES

FILE_BYTES = 128 << 20
TIME_LIMIT_S = 15.0
SETTINGS = [(32, 1 << 20), (8, 4 << 20), (64, 256 << 10), (4, 8 << 20), (8, 1 << 20)]
"""(depth, block_bytes)"""
PLAIN = [(8, 4 << 20), (16, 1 << 20)]
"""(threads, block_bytes) of the plain loop."""


@dataclass(frozen=True)
class Contender:
    """Something that moves the whole file once; ``move(write)`` returns 10^9 bytes a second."""

    name: str
    setting: tuple[int, int] | None
    move: Callable[[bool], float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument(
        "path", nargs="+", help="a folder on the disk to measure, or one on each; 128 MiB of it are used and given back"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--no-save", action="store_true", help="do not keep the result")


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A file that goes away again, whatever happens."""
    handle, name = tempfile.mkstemp(dir=folder, prefix=".zeropp-bench-io-")
    os.close(handle)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def engine_contender(engine: Engine, path: Path, setting: tuple[int, int]) -> Contender:
    """Return the engine with one setting, and memory of its own arena."""
    tensor = engine.empty(FILE_BYTES, torch.uint8).random_()
    engine.write(tensor, path).wait()  # fresh blocks once, so that every round overwrites

    def move(write: bool) -> float:
        start = time.perf_counter()
        (engine.write if write else engine.read)(tensor, path).wait()
        return FILE_BYTES / (time.perf_counter() - start) / 1e9

    return Contender(f"{setting[0]} x {setting[1] >> 10} KiB", setting, move)


def plain_contender(path: Path, buffer: mmap.mmap, threads: int, block_bytes: int) -> Contender:
    """pread and pwrite on threads, nothing else."""
    view = memoryview(buffer)

    def one(fd: int, write: bool, first: int) -> None:
        for at in range(first * block_bytes, FILE_BYTES, threads * block_bytes):
            piece = view[at : at + block_bytes]
            moved = os.pwritev(fd, [piece], at) if write else os.preadv(fd, [piece], at)
            if moved != len(piece):
                raise Error(f"bench-io: {path} moved {moved} of {len(piece)} bytes at offset {at}")

    def move(write: bool) -> float:
        flags = (os.O_RDWR if write else os.O_RDONLY) | getattr(os, "O_DIRECT", 0)
        try:
            fd = os.open(path, flags)
        except OSError:  # no O_DIRECT here: the engine goes through the page cache, and so does this
            fd = os.open(path, os.O_RDWR)
        try:
            start = time.perf_counter()
            with ThreadPoolExecutor(threads) as workers:
                list(workers.map(lambda first: one(fd, write, first), range(threads)))
            return FILE_BYTES / (time.perf_counter() - start) / 1e9
        finally:
            os.close(fd)

    return Contender(f"plain loop, {threads} threads x {block_bytes >> 10} KiB", None, move)


def rounds(contenders: list[Contender], until: float) -> dict[str, list[tuple[float, float]]]:
    """Return (read, write) of each contender, a round at a time, in alternating order; at least one round."""
    seen: dict[str, list[tuple[float, float]]] = {contender.name: [] for contender in contenders}
    number, longest = 0, 0.0
    while number == 0 or time.monotonic() + longest < until:
        start = time.monotonic()
        for contender in contenders if number % 2 == 0 else contenders[::-1]:
            written = contender.move(True)
            seen[contender.name].append((contender.move(False), written))
        longest = max(longest, time.monotonic() - start)
        number += 1
    return seen


def measure(folder: Path) -> tuple[IoSettings, dict[str, float], list[dict[str, object]]]:
    """Return the best settings, how near the limit they come ({"read": 0..1, "write": 0..1}), and a row for each contender."""
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    if free < 2 * FILE_BYTES:
        raise Error(f"bench-io: {folder} has {free} bytes free, wanted {2 * FILE_BYTES}; choose another folder")
    until = time.monotonic() + TIME_LIMIT_S
    engines = [Engine(depth, block_bytes) for depth, block_bytes in SETTINGS]
    try:
        with scratch(folder) as path:
            buffer = mmap.mmap(-1, FILE_BYTES)
            contenders = [
                engine_contender(engine, path, setting) for engine, setting in zip(engines, SETTINGS, strict=True)
            ]
            plain = [plain_contender(path, buffer, *setting) for setting in PLAIN]
            seen = rounds(contenders + plain, until)
    finally:
        for engine in engines:
            engine.abort()
    return judge(contenders, seen)


def judge(
    contenders: list[Contender], seen: dict[str, list[tuple[float, float]]]
) -> tuple[IoSettings, dict[str, float], list[dict[str, object]]]:
    """Return the setting that comes nearest to the limit, reads and writes together.

    The limit of a round is the largest rate that any contender reached, plain loops included.
    """
    names = [contender.name for contender in contenders]
    count = len(seen[names[0]])
    limits = [tuple(max(seen[name][index][kind] for name in seen) for kind in (0, 1)) for index in range(count)]

    def ratio(name: str, kind: int) -> float:
        return statistics.median(seen[name][index][kind] / limits[index][kind] for index in range(count))

    def speed(name: str, kind: int) -> float:
        return statistics.median(pair[kind] for pair in seen[name])

    best = max(contenders, key=lambda contender: ratio(contender.name, 0) * ratio(contender.name, 1))
    assert best.setting is not None
    rows: list[dict[str, object]] = [
        {"setting": name, "read_gb_s": speed(name, 0), "write_gb_s": speed(name, 1), "read_ratio": ratio(name, 0),
         "write_ratio": ratio(name, 1), "rounds": count}
        for name in seen
    ]  # fmt: skip
    depth, block_bytes = best.setting
    settings = IoSettings(
        depth=depth, block_bytes=block_bytes, read_gb_s=speed(best.name, 0), write_gb_s=speed(best.name, 1)
    )
    return settings, {"read": ratio(best.name, 0), "write": ratio(best.name, 1)}, rows


def striped(folders: list[Path]) -> dict[str, float]:
    """{"read_gb_s", "write_gb_s"} of a file over all folders, with the settings that were kept; the best of three rounds."""
    best = {"read_gb_s": 0.0, "write_gb_s": 0.0}
    with contextlib.ExitStack() as stack, Engine(paths=folders, stripe_bytes=STRIPE_BYTES) as engine:
        name = f".zeropp-bench-io-{os.getpid()}-striped"
        for folder in folders:
            stack.callback((folder / name).unlink, missing_ok=True)
        tensor = engine.empty(FILE_BYTES, torch.uint8).random_()
        engine.write(tensor, name).wait()
        for _ in range(3):
            for kind, begin in (("write_gb_s", engine.write), ("read_gb_s", engine.read)):
                start = time.perf_counter()
                begin(tensor, name).wait()
                best[kind] = max(best[kind], FILE_BYTES / (time.perf_counter() - start) / 1e9)
    return best


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    try:
        chosen = config_folders("bench-io", options.path)
    except ConfigError as error:
        return refuse("bench-io", error)
    folders = [Path(one) for one in ((chosen,) if isinstance(chosen, str) else chosen)]
    for folder in folders:
        if not folder.is_dir():
            return refuse("bench-io", f"{folder} is not a folder; name one on the disk to measure")
    values: dict[str, object] = {}
    try:
        for folder in folders:
            values[str(folder)] = _one(folder, options, heading=len(folders) > 1)
        if len(folders) > 1:
            values["striped"] = striped(folders)
    except (Error, OSError) as error:
        return refuse("bench-io", error, status=1)
    if options.json:
        print(json.dumps(values if len(folders) > 1 else values[str(folders[0])]))
    elif len(folders) > 1:
        together = cast(dict[str, float], values["striped"])
        print(
            f"striped over {len(folders)} folders: {together['read_gb_s']:.2f} GB/s read, {together['write_gb_s']:.2f} GB/s written"
        )
    return 0


def _one(folder: Path, options: argparse.Namespace, heading: bool) -> dict[str, object]:
    """Measured, kept and, unless JSON is asked for, told."""
    settings, of_limit, rows = measure(folder)
    kept = None
    try:
        kept = None if options.no_save else store(folder, settings)
    except OSError as error:
        print(f"bench-io: not kept: {error}; XDG_CACHE_HOME= names another folder for it", file=sys.stderr)
    if options.json:
        return {"depth": settings.depth, "block_bytes": settings.block_bytes, "of_limit": of_limit, "rows": rows}
    if heading:
        print(f"{folder}:")
    print(f"{'setting':36} {'read':>10} {'write':>10}   of the limit")
    for row in rows:
        print(
            f"{row['setting']:36} {row['read_gb_s']:5.2f} GB/s {row['write_gb_s']:5.2f} GB/s"
            f"   {row['read_ratio']:.2f} read, {row['write_ratio']:.2f} write"
        )
    print(
        f"best: depth {settings.depth}, blocks of {settings.block_bytes >> 10} KiB: "
        f"{of_limit['read']:.2f} of the disk's limit reading, {of_limit['write']:.2f} writing"
    )
    if kept is not None:
        print(f"kept in {kept}; zeropp.aio.Engine(paths={str(folder)!r}) uses it")
    return {}
