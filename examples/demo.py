# SPDX-License-Identifier: Apache-2.0
"""Drive `make demo`: choose options that were left open, print the choice, and run train_gpt.py under torchrun.

Every option may be empty, which means its default; `make demo PRESET=base STEPS=100` passes them on. The run lives in
out/demo; an unfinished one is resumed (a terminal is asked, elsewhere a line says so), and RESUME=no starts again.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import json
import logging
import os
import shutil
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent
BYTES_PER_PARAMETER = 12  # of a checkpoint: fp32 weight and two moments
SCRATCH_BYTES_PER_PARAMETER = 12  # OFFLOAD=nvme: the same three, fp32
CHECKPOINTS_HELD = 3  # two kept and the one being written
RUN_FILES = ("metrics.jsonl", "loss.png", "run.json", "result.json", "checkpoint")


class Refused(SystemExit):
    """The requested run is not possible; the sentence names the variable that changes it."""

    def __init__(self, sentence: str) -> None:
        print(f"make demo: {sentence}", file=sys.stderr)
        super().__init__(2)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="", help="small (default), base or large")
    parser.add_argument("--device", default="", help="auto (default: cpu), cpu, or torch's accelerator, as cuda")
    parser.add_argument("--ranks", default="", help="auto (default: one a GPU, two on CPU) or a number")
    parser.add_argument("--steps", default="", help="training steps; default: of the preset")
    parser.add_argument("--offload", default="", help="none (default), cpu or nvme: where states live")
    parser.add_argument(
        "--memory",
        default="",
        help="OFFLOAD=nvme PRESET=large: the memory to exceed, as 512M or 24G; default: the machine's",
    )
    parser.add_argument(
        "--scratch",
        default="",
        help="OFFLOAD=nvme: folders for the files, as /nvme0,/nvme1, one for each disk; default: scratch in --out",
    )
    parser.add_argument("--data", default="", help="folder or file of text; default: Python's own source")
    parser.add_argument("--resume", default="", help="no: start anew; yes: go on without asking")
    parser.add_argument("--yes", nargs="?", const="yes", default="", help="answer every question with yes")
    parser.add_argument("--out", default="", help="folder of the run; default: out/demo of the repository")
    parser.add_argument("--script", default="train_gpt.py", help="ddp_gpt.py trains the same without zeropp")
    return parser.parse_args()


def chosen(value: str, default: str, allowed: tuple[str, ...], variable: str) -> str:
    value = value.strip() or default
    if value not in allowed:
        raise Refused(f"{variable}={value}: wanted one of {', '.join(allowed)}")
    return value


def whole(value: str, variable: str) -> int | None:
    value = value.strip()
    if value in ("", "auto"):
        return None
    if not value.isdigit() or int(value) < 1:
        raise Refused(f"{variable}={value}: wanted a whole number >= 1, or nothing")
    return int(value)


def need_packages(script: str) -> None:
    wanted = {"torch": "torch", "tqdm": "tqdm", "rich": "rich", "matplotlib": "matplotlib"}
    if script != "ddp_gpt.py":
        wanted["zeropp"] = "zeropp (from the repository's folder: pip install .)"
    missing = [name for module, name in wanted.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise Refused(
            f"this Python ({sys.executable}) lacks {', '.join(missing)}; `make demo` installs them, "
            "or: pip install '.[demo]'"
        )


def choose_device(asked: str) -> tuple[str, int]:
    """Return the device and its number of ranks: one a GPU, two on the CPU."""
    if asked in ("auto", "cpu"):
        return "cpu", 2
    import torch

    found = torch.accelerator.current_accelerator()
    if found is None or found.type != asked or not torch.accelerator.is_available():
        raise Refused(f"DEVICE={asked}: torch sees no such device here; leave DEVICE empty to train on the CPU")
    return asked, torch.accelerator.device_count()


def own(out: Path) -> None:
    """Take the folder for this run until its process ends in any way, because two runs would write the same files."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        fcntl.flock(os.open(out, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Refused(
            f"{out}: another run writes there; wait for its end, or choose another folder with --out"
        ) from None


def unfinished_step(out: Path) -> int | None:
    """Return the step that a run in `out` can resume from."""
    try:
        facts = json.loads((out / "run.json").read_text())
    except (OSError, ValueError):
        return None
    if facts.get("state") == "finished" or not (out / "checkpoint").is_dir():
        return None
    steps = [int(one.name.split("-")[1]) for one in (out / "checkpoint").glob("step-*") if one.name[5:].isdigit()]
    plain = (out / "checkpoint" / "state.pt").exists() and facts.get("step")
    return max(steps, default=None) or plain or None


def decide_resume(args: argparse.Namespace, out: Path, facts: dict[str, Any]) -> bool:
    step = unfinished_step(out)
    resume = chosen(args.resume, "ask", ("yes", "no", "ask"), "RESUME")
    if step is None:
        if resume == "yes":
            print("Nothing to resume: no unfinished run with a checkpoint; starting anew.")
        return False
    if resume == "no":
        print(f"RESUME=no: the unfinished run (step {step}) is replaced.")
        return False
    before = json.loads((out / "run.json").read_text())
    for name in ("preset", "data", "ranks", "script"):
        if before.get(name) != facts[name]:
            raise Refused(
                f"the unfinished run in {out} has {name.upper()}={before.get(name) or 'default'}, this one "
                f"{facts[name] or 'default'}; give the same to resume it, or RESUME=no to replace it"
            )
    if facts["steps"] is not None and step >= facts["steps"]:
        raise Refused(f"STEPS={facts['steps']}: the unfinished run is at step {step} already; RESUME=no replaces it")
    if resume == "ask" and not args.yes and sys.stdin.isatty() and sys.stdout.isatty():
        answer = input(f"An unfinished run stands at step {step}. Resume it? [Y/n] ").strip().lower()
        return answer in ("", "y", "yes")
    print(f"Resuming the unfinished run at step {step} (RESUME=no starts anew).")
    return True


def scratch_folders(value: str, out: Path) -> list[Path]:
    names = [one.strip() for one in value.split(",")]
    if names == [""]:
        return [out / "scratch"]
    folders = [Path(one).expanduser().resolve() for one in names if one]
    if len(folders) < len(names) or len(set(folders)) < len(folders):
        raise Refused(
            f"SCRATCH={value}: wanted folders, each once, as /nvme0,/nvme1; or nothing, for {out / 'scratch'}"
        )
    if out in folders:
        raise Refused(f"SCRATCH={value}: {out} is the run's own folder, which it has locked; wanted others")
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    return folders


def by_disk(wanted: list[tuple[Path, int]]) -> list[tuple[Path, int, int]]:
    """Return a folder of each disk, the bytes wanted in all of its folders, and the free bytes."""
    disks: dict[int, tuple[Path, int]] = {}
    for folder, size in wanted:
        there = folder if folder.exists() else folder.parent
        first, before = disks.get(there.stat().st_dev, (there, 0))
        disks[there.stat().st_dev] = first, before + size
    return [(folder, size, shutil.disk_usage(folder).free) for folder, size in disks.values()]


def need_space(out: Path, scratch: list[Path], preset: str, yes: bool) -> None:
    """Refuse to run without enough space. `scratch`: folders that each hold an equal share of the states, none without OFFLOAD=nvme."""
    from gpt import GPT, PRESETS
    from torch import device

    with device("meta"):
        parameters = sum(p.numel() for p in GPT(PRESETS[preset].model).parameters())
    wants = [(out, parameters * BYTES_PER_PARAMETER * CHECKPOINTS_HELD)]
    wants += [(folder, parameters * SCRATCH_BYTES_PER_PARAMETER // len(scratch)) for folder in scratch]
    for folder, wanted, free in by_disk(wants):
        if wanted <= free < 2 * wanted and scratch and not yes:
            ask_for_space(folder, wanted, free)
        if free < wanted:
            what = "the checkpoints" if folder == out else "the files"
            raise Refused(
                f"{folder}: {free / 2**20:,.0f} MiB free, and {what} of PRESET={preset} want "
                f"{wanted / 2**20:,.0f} MiB; free some, or choose a smaller PRESET"
            )


def ask_for_space(out: Path, wanted: int, free: int) -> None:
    question = f"{out}: this takes {wanted / 2**30:,.1f} of {free / 2**30:,.1f} GiB free"
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise Refused(f"{question}, more than half; YES=1 allows it")
    if input(f"{question}. Go on? [y/N] ").strip().lower() not in ("y", "yes"):
        raise Refused(f"{question}; a smaller PRESET, or MEMORY, takes less")


def machine_memory() -> int:
    """Return the bytes of memory that this process may use: the machine's, or its control group's."""
    bytes_ = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            bytes_ = min(bytes_, int(Path(limit).read_text()))
    return bytes_


def memory_asked(value: str) -> int:
    value = value.strip()
    if not value:
        return machine_memory()
    units = {"M": 1 << 20, "G": 1 << 30}
    number, unit = value[:-1], value[-1:].upper()
    if unit not in units or not number.isdigit() or int(number) * units[unit] < 16 << 20:
        raise Refused(f"MEMORY={value}: wanted at least 16M, as 512M or 24G; or nothing, for the machine's")
    return int(number) * units[unit]


def larger_than_memory(args: argparse.Namespace) -> int:
    """Run infinity_gpt.py with a model whose states exceed the memory (OFFLOAD=nvme PRESET=large). It writes no checkpoints, and
    leaves only metrics.jsonl on the disk."""
    steps, ranks_asked = whole(args.steps, "STEPS") or 3, whole(args.ranks, "RANKS")
    if args.resume.strip() == "yes":
        raise Refused("RESUME=yes: this run keeps no checkpoint (it would be as large as the files); leave it empty")
    memory = memory_asked(args.memory)
    need_packages(args.script)
    from gpt import GPT, larger_than
    from torch import device as torch_device
    from zeropp.files.scratch import tidy

    device, suits = choose_device(args.device.strip() or "auto")
    if device != "cpu":
        raise Refused(f"DEVICE={device}: this run (OFFLOAD=nvme PRESET=large) trains on the CPU; leave DEVICE empty")
    ranks = ranks_asked or suits
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    out = Path(args.out or EXAMPLES.parent / "out" / "infinity").resolve()
    with torch_device("meta"):
        parameters = sum(p.numel() for p in GPT(larger_than(memory)).parameters())
    try:
        own(out)
        scratch = scratch_folders(args.scratch, out)
        for folder in scratch:
            tidy(folder)  # what a run that was killed left would count as taken
        share = parameters * SCRATCH_BYTES_PER_PARAMETER * 21 // 20 // len(scratch)
        disks = by_disk([(folder, share) for folder in scratch])
    except OSError as error:
        raise Refused(
            f"{error.filename or out}: {error.strerror}; choose another folder with --out or SCRATCH"
        ) from error
    for folder, wanted, free in disks:
        if free < wanted:
            raise Refused(
                f"{folder}: {free / 2**30:,.1f} GiB free, and the states of this model want {wanted / 2**30:,.1f}; free some, "
                "choose another folder with --out or SCRATCH, or a smaller MEMORY"
            )
        if free < 2 * wanted and not args.yes:
            ask_for_space(folder, wanted, free)
    print(f"PRESET=large OFFLOAD=nvme RANKS={ranks} STEPS={steps} MEMORY={memory / 2**20:,.0f} MiB")
    for folder, wanted, free in disks:
        print(f"{wanted / 2**30:,.2f} of {free / 2**30:,.1f} GiB free in {folder} are used until the end")
    print("Ctrl-C stops and removes them", flush=True)
    command = ["--memory-bytes", str(memory), "--steps", str(steps), "--out", str(out)]
    command += ["--scratch", *map(str, scratch)]
    command += ["--data", str(Path(args.data).resolve())] if args.data else []
    try:
        code = torchrun(ranks, EXAMPLES / "infinity_gpt.py", command)
    finally:
        shutil.rmtree(out / "scratch", ignore_errors=True)
    if code == 0:
        print(f"Every step: {out / 'metrics.jsonl'}")
    return code


def start_anew(out: Path) -> None:
    for name in RUN_FILES:
        path = out / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def torchrun(ranks: int, script: Path, arguments: list[str]) -> int:
    """Run torchrun in this process, so that a Ctrl-C reaches the ranks once and ends without a traceback."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.WARNING)
    # Otherwise ranks meet at this machine's name, which not every machine can resolve.
    command = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node", str(ranks), str(script), *arguments]
    try:
        run.run(run.parse_args(command))
    except SignalException:
        return 0  # the ranks have saved and said so
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        died = (
            f"was ended by signal {-failure.exitcode}"
            if failure.exitcode < 0
            else f"failed with code {failure.exitcode}"
        )
        print(f"make demo: rank {rank} {died}; what it said stands above", file=sys.stderr)
        return 1
    return 0


def main() -> int:
    args = options()
    preset = chosen(args.preset, "small", ("small", "base", "large"), "PRESET")
    offload = chosen(args.offload, "none", ("none", "cpu", "nvme"), "OFFLOAD")
    if args.data and not Path(args.data).exists():
        raise Refused(f"DATA={args.data}: no such file or folder; leave it empty for Python's own source")
    args.yes = chosen(args.yes.lower(), "0", ("1", "yes", "y", "true", "0", "no", "n", "false"), "YES") in (
        "1",
        "yes",
        "y",
        "true",
    )
    if offload == "nvme" and preset == "large":
        if args.script != "train_gpt.py":
            raise Refused(f"OFFLOAD=nvme PRESET=large: {args.script} cannot do that; leave --script out")
        return larger_than_memory(args)
    if args.scratch and offload != "nvme":
        raise Refused(f"SCRATCH={args.scratch}: only OFFLOAD=nvme has files to put there; leave it empty")
    if args.memory:
        raise Refused(f"MEMORY={args.memory}: only OFFLOAD=nvme PRESET=large chooses its model by it; leave it empty")
    if offload != "none" and args.script == "ddp_gpt.py":
        raise Refused(f"OFFLOAD={offload}: ddp_gpt.py trains without zeropp, which alone can do that; leave it empty")
    steps, ranks_asked = whole(args.steps, "STEPS"), whole(args.ranks, "RANKS")
    need_packages(args.script)
    device, suits = choose_device(args.device.strip() or "auto")
    ranks = ranks_asked or suits
    cores = len(os.sched_getaffinity(0))
    threads = max(1, cores // ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))

    out = Path(args.out or EXAMPLES.parent / "out" / "demo").resolve()
    try:
        own(out)
        scratch = scratch_folders(args.scratch, out) if offload == "nvme" else []
        for folder in scratch:
            from zeropp.files.scratch import tidy

            tidy(folder)
        need_space(out, scratch, preset, args.yes)
    except OSError as error:
        raise Refused(
            f"{error.filename or out}: {error.strerror}; choose another folder with --out or SCRATCH"
        ) from error
    data = str(Path(args.data).resolve()) if args.data else None
    facts = {"preset": preset, "data": data, "ranks": ranks, "script": args.script, "steps": steps}
    print(
        f"PRESET={preset} DEVICE={device} RANKS={ranks} ({os.environ['OMP_NUM_THREADS']} threads each, {cores} cores) "
        f"STEPS={steps or 'of the preset'} OFFLOAD={offload}\nDATA={data or 'the source of the standard library'}\n"
        f"writing to {out}; Ctrl-C saves and stops",
        flush=True,
    )
    resume = decide_resume(args, out, facts)
    if not resume:
        start_anew(out)
    (out / "run.json").write_text(json.dumps({**facts, "state": "running"}, indent=1) + "\n")

    command = ["--preset", preset, "--device", device, "--out", str(out), "--offload", offload]
    command += ["--scratch", *map(str, scratch)] if args.scratch else []
    command += ["--backend", "zeropp"] if args.script != "ddp_gpt.py" else []
    command += ["--steps", str(steps)] if steps else []
    command += ["--data", data] if data else []
    command += ["--resume"] if resume else []
    sys.stdout.flush()
    code = torchrun(ranks, EXAMPLES / args.script, command)
    if code == 0:
        state = json.loads((out / "run.json").read_text())["state"]
        if state == "stopped":
            print("`make demo` resumes it.")
        elif state == "running":
            print("Stopped before the first step was saved.")
            return 1
        else:
            print(f"Loss curve: {out / 'loss.png'}; every step: {out / 'metrics.jsonl'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
