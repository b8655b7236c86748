# SPDX-License-Identifier: Apache-2.0
"""Train a model whose states are larger than the machine's memory: everything but gradients lives on disk.

`make demo OFFLOAD=nvme PRESET=large` runs this script, under torchrun:

    torchrun --nproc-per-node 2 examples/infinity_gpt.py --memory-bytes 25769803776

Parameters (fp32) and Adam's moments are files in --out/scratch, or over the folders of --scratch, one for each disk; a layer's
parameters are in memory when it is computed.
Each step prints its time, the bytes that it moved, and the planned bytes. The plan, with Psi parameters:

    read     20 Psi   parameters forward, backward and in the step; two moments in the step (none in the first)
    written  12 Psi   parameters and two moments
"""

import argparse
import ctypes
import json
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import zeropp
from gpt import GPT, STATE_BYTES, larger_than, learning_rate
from report import proportional_set_bytes
from text import Text

GIB = 1 << 30
PROBE_BYTES = 256 << 20


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory-bytes", type=int, required=True, help="the memory that the states shall exceed")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=1, help="sequences a rank and step")
    parser.add_argument("--data", help="a folder or file of text; default: the source of Python's standard library")
    parser.add_argument("--out", type=Path, default=Path("out/infinity"))
    parser.add_argument(
        "--scratch", nargs="+", type=Path, help="folders of the files, one for each disk; default: scratch in --out"
    )
    return parser.parse_args()


def disk_limit(folders: list[Path], size: int) -> tuple[float, float]:
    """Return the bytes a second that the engine reads and writes with nothing computed: the best of three rounds."""
    with zeropp.aio.Engine(paths=folders, stripe_bytes=2 << 20) as engine:
        blocks = [engine.empty(size // 8, torch.uint8) for _ in range(8)]
        for block in blocks:
            block.fill_(7)
        best = {"read": 0.0, "write": 0.0}
        for _ in range(3):
            for kind in ("write", "read"):
                begin = engine.write if kind == "write" else engine.read
                started = time.perf_counter()
                futures = [begin(block, "probe", index * block.numel()) for index, block in enumerate(blocks)]
                for future in futures:
                    future.wait()
                moved = sum(block.numel() for block in blocks)
                best[kind] = max(best[kind], moved / (time.perf_counter() - started))
        for folder in folders:
            (folder / "probe").unlink()
    return best["read"], best["write"]


def of_all_ranks(values: list[float]) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return [float(one) for one in total]


def disk_totals() -> list[float]:
    moved = zeropp.traffic()["nvme"]
    return [moved["read"]["bytes"], moved["write"]["bytes"], moved["read"]["waited_ns"] / 1e9]


def stop_with_the_launcher() -> None:
    """Stop when the launcher dies, even by SIGKILL, and leave no files behind."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG


def main() -> None:
    args = options()
    dist.init_process_group("zeropp")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stop_with_the_launcher()
    scratch = args.scratch or [args.out / "scratch"]
    for folder in scratch:
        folder.mkdir(parents=True, exist_ok=True)
    shape = larger_than(args.memory_bytes)
    text = Text(args.data)
    batches = {
        "rank": rank,
        "ranks": ranks,
        "batch": args.batch,
        "context": shape.context,
        "device": torch.device("cpu"),
    }

    def say(line: str) -> None:
        if rank == 0:
            print(line, flush=True)

    limits = [0.0, 0.0]
    if rank == 0:
        limits = list(disk_limit(scratch, min(PROBE_BYTES, max(8 << 20, args.memory_bytes // 8))))
    read_limit, write_limit = of_all_ranks(limits)
    say(f"The disk's limit, measured now: {read_limit / 1e9:.2f} GB/s read, {write_limit / 1e9:.2f} GB/s written.")

    torch.manual_seed(0)
    with zeropp.sharded_init():  # no rank ever holds the whole model
        model = GPT(shape)
    parameters = sum(p.numel() for p in model.parameters())
    say(
        f"{parameters:,} parameters ({shape.layers} layers of width {shape.width}): states of "
        f"{parameters * STATE_BYTES / GIB:.2f} GiB, memory of {args.memory_bytes / GIB:.2f} GiB."
    )
    peak = 3e-3 / shape.width  # so that the loss falls from the first step on, whatever the width
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.1)
    tiers = zeropp.Offload(params="nvme", optimizer="nvme", path=scratch)
    config = zeropp.Config(stage=3, device="cpu", offload=tiers, prefetch=2 * 48 * shape.width**2)
    plan = ranks * zeropp.estimate(model, config, ranks=ranks)["traffic"]["nvme"]
    model, optimizer = zeropp.prepare(model, optimizer, config)

    held = zeropp.memory(model, optimizer)
    planned, in_files = of_all_ranks(
        [float(sum(kind[what] for kind in held["nvme"].values())) for what in ("planned", "held")]
    )
    say(
        f"In files: {planned / GIB:.3f} GiB planned, {in_files / GIB:.3f} GiB so far (moments come with the first step)."
    )
    with (args.out / "metrics.jsonl" if rank == 0 else Path("/dev/null")).open("w") as metrics:
        before = disk_totals()
        for step in range(args.steps):
            started = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, args.steps, peak)
            inputs, targets = text.batch(step, **batches)
            loss = model(inputs, targets)
            loss.backward()
            norm = optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            took = time.perf_counter() - started
            now = disk_totals()
            mine = [after - earlier for after, earlier in zip(now, before, strict=True)]
            before = now
            read, written, waited, total, memory = of_all_ranks([*mine, loss.item(), float(proportional_set_bytes())])
            del loss
            plan_written = 12 * parameters
            plan_read = 12 * parameters if step == 0 else plan - plan_written  # moments come with the first step
            least = read / read_limit + written / write_limit
            planned_least = plan_read / read_limit + plan_written / write_limit
            row = {
                "step": step + 1, "loss": total / ranks, "norm": norm, "step_s": took, "disk_read_bytes": int(read),
                "disk_written_bytes": int(written), "planned_read_bytes": plan_read,
                "planned_written_bytes": plan_written, "waited_s": waited / ranks, "of_disk_limit": least / took,
                "planned_disk_s": planned_least, "memory_bytes": int(memory),
            }  # fmt: skip
            metrics.write(json.dumps(row) + "\n")
            metrics.flush()
            say(
                f"step {step + 1}: loss {row['loss']:.3f}, {took:.2f} s | read {read / GIB:.3f} GiB (planned "
                f"{plan_read / GIB:.3f}), written {written / GIB:.3f} GiB (planned {plan_written / GIB:.3f}) | "
                f"{(read + written) / took / 1e9:.2f} GB/s, {least / took:.0%} of the disk's limit | waited "
                f"{waited / ranks:.2f} s a rank; the plan: {planned_least:.2f} s of disk | memory {memory / GIB:.2f} GiB"
            )
    held = zeropp.memory(model, optimizer)["nvme"]
    sums = of_all_ranks([float(held[kind][what]) for kind in held for what in ("planned", "held")])
    for index, kind in enumerate(held):
        say(f"{kind} on disk: {sums[2 * index] / GIB:.3f} GiB planned, {sums[2 * index + 1] / GIB:.3f} GiB held")
    del model, optimizer
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
