# SPDX-License-Identifier: Apache-2.0
"""A whole training step with parameters and optimizer states on disk (ZeRO-Infinity), against the same step in memory.

fp32, AdamW, one rank. The limit of a round is the longer of two: the step in memory, and the bytes of the row moved through the
engine with nothing computed. How many these are is counted in steps before. Losses are equal, bit for bit.

"step after": with Psi parameters a step reads up to 20 Psi bytes (parameters forward, backward and in the step, two moments) and
writes 12 Psi; units that the forward ends with stay for the backward, and are not read again. The limit is as if all bytes moved
beside the computation. 8 Psi do, forward and backward; the other 24 Psi are the optimizer's, which steps when the norm of all
gradients is known, so they come after the computation. Where both take equally long that leaves 1 / (1 + 24/32) = 0.57 of the limit.

"step inside": Config(step_in_backward=True), which steps a unit when its gradients are complete, while it is in memory: up to 16 Psi
are read (less what stays in memory at the turn and over the step, each within Config.prefetch), and so its limit is a lower one.
4 Psi move beside the forward, 24 Psi beside the backward, which computes two thirds of the time; what the first units' states take
at the end is beside nothing. Where both take equally long that leaves 1 / (1/3 + 24/28) = 0.84 of the limit, less that end.

The figures beside each row say where the time went: in optimizer.step(), in waiting for the disk in the step (wherever it is) and
outside of it.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import zeropp
from harness import ROOT, Need, Run, alone, alternate
from zeropp.aio import Engine

CLAIM = "A step with parameters and states on NVMe: <= 1.15x the longer of the computation and its bytes at the disk's limit."
NEEDS: tuple[Need, ...] = ()
BLOCK_BYTES = 4 << 20
WARM_STEPS = 3


def engine_of(model: Any) -> Any:
    """The engine of a prepared model, whose figures are not public: of this tree alone, so not of every revision."""
    from zeropp.zero import engine

    return engine.engine_of(model)


def _params(engine: Any) -> Any:
    """Return the store of the parameters, also of a revision that calls it by its older name."""
    return engine.params_tier if hasattr(engine, "params_tier") else engine.params


class Trainer:
    """One model that takes a step at a time."""

    def __init__(self, layers: int, width: int, rows: int, **config: Any) -> None:
        sys.path.insert(0, str(ROOT / "examples"))
        from gpt import GPT, GPTConfig

        torch.manual_seed(0)
        model: Any = GPT(GPTConfig(layers=layers, heads=8, width=width, context=128))
        self.parameters = sum(p.numel() for p in model.parameters())
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.model, self.adam = zeropp.prepare(model, adam, zeropp.Config(stage=3, device="cpu", **config))
        self.rows, self.count, self.losses = rows, 0, []
        self.parts: list[dict[str, float]] = []

    def step(self) -> float:
        draw = torch.Generator().manual_seed(self.count)
        rows = torch.randint(0, 256, (self.rows, 129), generator=draw)
        began_ms, waited = self.waited(), {}
        started = time.perf_counter()
        loss = self.model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        stepped = time.perf_counter()
        self.adam.step()
        ended = time.perf_counter()
        self.adam.zero_grad()
        took = (time.perf_counter() - started) * 1e3
        for what, now in self.waited().items():
            waited[what] = now - began_ms[what]
        self.parts.append({"optimizer_step_ms": (ended - stepped) * 1e3, **waited})
        self.count += 1
        self.losses.append(loss.item())
        return took

    def moved(self) -> tuple[int, int]:
        """Bytes read and written so far, when nothing is under way any more."""
        engine, before = engine_of(self.model), None
        while before != (now := self._moved(engine)):
            before = now
            time.sleep(0.05)
        return now

    @staticmethod
    def _moved(engine: Any) -> tuple[int, int]:
        seen = [_params(engine).figures(), engine.states.figures()]
        return sum(one["read_bytes"] for one in seen), sum(one["written_bytes"] for one in seen)

    def bytes_of_a_step(self) -> tuple[int, int]:
        """(read, written) once moments exist, and the order of units is known."""
        for _ in range(WARM_STEPS):
            self.step()
        read, written = self.moved()
        self.step()
        read_then, written_then = self.moved()
        return read_then - read, written_then - written

    def waited(self) -> dict[str, float]:
        """Milliseconds so far that this model waited for the disk, in the optimizer's step and outside of it."""
        engine = None if alone() else engine_of(self.model)
        if engine is None or not hasattr(_params(engine), "file") or not hasattr(engine.states, "file"):
            return {}
        params, states = _params(engine).figures(), engine.states.figures()
        return {
            "waited_for_units_ms": params["load_wait_ns"] / 1e6,
            "waited_in_step_ms": (params["step_wait_ns"] + states["waited_ns"]) / 1e6,
        }

    def medians(self, rounds: int) -> dict[str, float]:
        """Return the medians of the parts of the last steps."""
        last = self.parts[-rounds:]
        return {what: statistics.median(one[what] for one in last) for what in last[0]}


class Mover:
    """Moves as many bytes, read and written in a file, with nothing computed."""

    def __init__(self, engine: Engine, path: Path, read_bytes: int, written_bytes: int) -> None:
        self.engine, self.path = engine, path
        self.blocks = [engine.empty(BLOCK_BYTES // 4) for _ in range(8)]
        for block in self.blocks:
            block.zero_()
        self.places, self.reads = -(-written_bytes // BLOCK_BYTES), -(-read_bytes // BLOCK_BYTES)
        self.move()  # the file is there

    def move(self) -> float:
        """Reads and writes in turn, as near to their ratio as whole blocks come."""
        started = time.perf_counter()
        under_way: dict[int, Any] = {}
        read = written = 0
        for index in range(self.reads + self.places):
            slot = index % len(self.blocks)
            if slot in under_way:
                under_way.pop(slot).wait()
            writes = written * self.reads < read * self.places or written == 0 or read == self.reads
            if writes and written < self.places:
                under_way[slot] = self.engine.write(self.blocks[slot], self.path, written * BLOCK_BYTES)
                written += 1
            else:
                place = read % max(1, written)
                under_way[slot] = self.engine.read(self.blocks[slot], self.path, place * BLOCK_BYTES)
                read += 1
        for future in under_way.values():
            future.wait()
        return (time.perf_counter() - started) * 1e3


def run(bench: Run) -> None:
    torch.set_num_threads(1)
    # The first is bound by its computation, the second by the disk.
    for layers, width, rows in ((4, 384, 8), (4, 384, 1)) if bench.quick else ((12, 1024, 16), (12, 1024, 1)):
        measure(bench, layers, width, rows, rounds=9 if bench.quick else 5)


ROWS: dict[str, dict[str, Any]] = {"step after": {}, "step inside": {"step_in_backward": True}}


def case_of(trainer: Trainer, rows: int, row: str) -> str:
    return f"fp32 {trainer.parameters / 1e6:.0f}M {rows * 128} tokens 1 rank, {row}"


def measure_alone(bench: Run, rows: int, rounds: int, on_disk: dict[str, Trainer]) -> None:
    """Without what bounds a step."""
    for _ in range(WARM_STEPS + 1):
        for trainer in on_disk.values():
            trainer.step()
    taken = alternate({row: trainer.step for row, trainer in on_disk.items()}, rounds, warmup=1)
    losses = [trainer.losses for trainer in on_disk.values()]
    bench.check(losses.count(losses[0]) == len(losses), f"losses of {', '.join(on_disk)} differ: {losses}")
    for row, trainer in on_disk.items():
        bench.own(case_of(trainer, rows, row), taken[row], "ms")


def measure(bench: Run, layers: int, width: int, rows: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".infinity-bench-") as folder:
        tiers = zeropp.Offload(params="nvme", optimizer="nvme", path=folder)
        on_disk = {row: Trainer(layers, width, rows, offload=tiers, **config) for row, config in ROWS.items()}
        if alone():
            measure_alone(bench, rows, rounds, on_disk)
            return
        moved = {row: trainer.bytes_of_a_step() for row, trainer in on_disk.items()}
        in_memory = Trainer(layers, width, rows)
        for _ in range(WARM_STEPS + 1):
            in_memory.step()
        with Engine() as engine:
            movers = {row: Mover(engine, Path(folder) / row, *bytes_) for row, bytes_ in moved.items()}
            contenders = {"in memory": in_memory.step}
            for row in on_disk:
                contenders |= {row: on_disk[row].step, f"aio, bytes of {row}": movers[row].move}
            taken = alternate(contenders, rounds, warmup=1)
            del movers, contenders
        for row, (read_bytes, written_bytes) in moved.items():
            losses = on_disk[row].losses
            bench.check(losses == in_memory.losses, f"{row}: losses {losses} and {in_memory.losses} differ")
            samples = {
                "nvme": taken[row],
                "in memory": taken["in memory"],
                "aio, same bytes": taken[f"aio, bytes of {row}"],
            }
            samples["longer of both"] = [
                max(pair) for pair in zip(samples["in memory"], samples["aio, same bytes"], strict=True)
            ]
            bench.compare(
                case_of(in_memory, rows, row), samples, ours="nvme", peers=["in memory"], unit="ms", limit="longer of both",
                extra={"bytes_read": read_bytes, "bytes_written": written_bytes, **on_disk[row].medians(rounds)},
            )  # fmt: skip
        del on_disk, in_memory
