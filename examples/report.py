# SPDX-License-Identifier: Apache-2.0
"""Reports of a training script, apart from the training itself: options, progress, metrics, a clean stop, the closing
table.

Written to the folder of the run: metrics.jsonl (one object a step), loss.png, run.json (how far the run is),
checkpoint/.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import PRESETS, generate
from torch import Tensor, nn
from tqdm import tqdm

PROMPT = b"import os\n\n\ndef "
SAMPLE_BYTES = 300
MEMORY_EVERY_S = 1.0  # reading the proportional set size walks the page tables
PR_SET_PDEATHSIG = 1
LINKS = ("disk_read_bytes", "disk_written_bytes", "shm_bytes", "network_bytes")  # keys of metrics.jsonl, sums of ranks
STATES = ("params", "grads", "master", "optimizer")


def arguments(description: str) -> argparse.Namespace:
    """Return the options that the training scripts share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--preset", choices=PRESETS, default="small", help="size of the model, with the training that suits it"
    )
    parser.add_argument("--steps", type=int, help="training steps; default: of the preset")
    parser.add_argument("--data", help="a folder or file of text; default: the source of Python's standard library")
    parser.add_argument("--out", type=Path, default=Path("out/train"), help="folder for metrics, plot and checkpoint")
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS", help="steps between checkpoints")
    parser.add_argument("--device", default="cpu", help="cpu, or the name of torch's accelerator, as cuda: one a rank")
    parser.add_argument("--backend", help="of torch.distributed, for the CPU, too; default: torch's own choice")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    parser.add_argument(
        "--offload",
        choices=("none", "cpu", "nvme"),
        default="none",
        help="where parameters and optimizer states live; nvme: in files in --out, gone with the run",
    )
    parser.add_argument(
        "--scratch",
        nargs="+",
        type=Path,
        help="folders of --offload nvme, one for each disk; default: scratch in --out",
    )
    args = parser.parse_args()
    if args.steps is not None and args.steps < 1:
        parser.error(f"--steps {args.steps}: wanted a whole number >= 1")
    if args.save_every < 1:
        parser.error(f"--save-every {args.save_every}: wanted a whole number >= 1")
    args.checkpoint = args.out / "checkpoint"
    args.tiers = {}
    if args.scratch and args.offload != "nvme":
        parser.error(f"--scratch {args.scratch[0]}: only --offload nvme has files to put there")
    if args.offload != "none":
        zeropp = sys.modules.get("zeropp")
        if zeropp is None:
            parser.error(f"--offload {args.offload}: only the script with zeropp can do that")
        path = (args.scratch or [args.out / "scratch"]) if args.offload == "nvme" else None
        args.tiers = {"offload": zeropp.Offload(params=args.offload, optimizer=args.offload, path=path)}
    return args


def choose_device(kind: str) -> torch.device:
    """Return the CPU, or this rank's accelerator."""
    if kind == "cpu":
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator()
    if found is None or found.type != kind or not torch.accelerator.is_available():
        raise SystemExit(f"--device {kind}: torch sees no such device here; leave it out to train on the CPU")
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device.index)
    return device


def proportional_set_bytes() -> int:
    """Return the memory of this process, where a page shared by n processes counts 1/n: summed over the ranks, each page counts
    once."""
    with Path("/proc/self/smaps_rollup").open(encoding="ascii") as rollup:
        for line in rollup:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    raise OSError("/proc/self/smaps_rollup: no line starts with Pss:")


class Parts:
    """The parts of a step by the clock of the host, in seconds: forward, backward with clipping, optimizer."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._at = 0.0
        self.seconds: dict[str, float] = {}
        model.register_forward_pre_hook(lambda *_: self._pass(""))
        model.register_forward_hook(lambda *_: self._pass("forward_s"))
        optimizer.register_step_pre_hook(lambda *_: self._pass("backward_s"))
        optimizer.register_step_post_hook(lambda *_: self._pass("optimizer_s"))

    def _pass(self, part: str) -> None:
        now = time.perf_counter()
        if part:
            self.seconds[part] = now - self._at
        self._at = now


class Report:
    """Follows one run on one rank; rank 0 writes. Every method is called by all ranks."""

    def __init__(
        self,
        args: argparse.Namespace,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        steps: int,
        tokens_per_step: int,
    ) -> None:
        self.args, self.total_steps, self.tokens_per_step = args, steps, tokens_per_step
        self._model, self._optimizer, self._parts = model, optimizer, Parts(model, optimizer)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.parameters = sum(p.numel() for p in model.parameters())
        self.stopped = False
        self._asked_to_stop = False
        self._memory, self._memory_at = 0, -math.inf
        self._bar: tqdm[int] | None = None
        self._metrics: Any = None
        self._started = self._last = time.perf_counter()
        self._done = 0
        self.checkpoint_bytes = 0
        self._moved = _moved_bytes()
        self._states: dict[str, int] = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        _stop_with_the_launcher()
        if self.rank == 0:
            args.out.mkdir(parents=True, exist_ok=True)

    def _on_signal(self, number: int, frame: object) -> None:
        """Stop after the running step at the first signal, and at once at the second."""
        self._asked_to_stop = True
        signal.signal(number, signal.SIG_DFL)

    # --- one step after the other -----------------------------------------------------------------------------------

    def steps(self, start: int) -> Iterator[int]:
        """Yield the remaining steps. End early when the ranks agreed to stop."""
        self._done = start
        if self.rank == 0:
            self._open_metrics(start)
            quiet = not sys.stderr.isatty()
            self._bar = tqdm(
                total=self.total_steps,
                initial=start,
                unit="step",
                mininterval=10.0 if quiet else 0.2,
                dynamic_ncols=True,
            )
        self._started = self._last = time.perf_counter()
        for step in range(start, self.total_steps):
            yield step
            if self.stopped:
                break
        if self._bar is not None:
            self._bar.close()
            self._metrics.close()

    def step(self, step: int, loss: Tensor) -> bool:
        """Record a finished step. Return True on every rank when the run ends with it: all steps are done, or a rank got a
        signal to stop."""
        now = time.perf_counter()
        if now - self._memory_at > MEMORY_EVERY_S:
            self._memory, self._memory_at = proportional_set_bytes(), now
            self._states = _state_bytes(self._model, self._optimizer)
        total, before = _moved_bytes(), self._moved
        self._moved = total
        moved = [float(total[link] - before[link]) for link in LINKS]
        mine = torch.tensor([loss.item(), float(self._asked_to_stop), float(self._memory), *moved], dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(everyone, mine)
        losses, flags, memory, *moved_by_rank = torch.stack(everyone).T.tolist()
        mean = sum(losses) / self.ranks
        took_s = time.perf_counter() - self._last
        rate = self.tokens_per_step / took_s
        self._last = time.perf_counter()
        self._done = step + 1
        self.stopped = any(flags) and self._done < self.total_steps
        if self._bar is not None:
            row = {"step": self._done, "loss": mean, "tokens_per_s": rate, "memory_bytes": [int(one) for one in memory]}
            row |= {"step_s": took_s, **self._parts.seconds, **self._states}
            row |= {
                link: int(sum(of_ranks)) for link, of_ranks in zip(LINKS, moved_by_rank, strict=True) if total[link]
            }
            said = f"loss {mean:.3f} nats/byte, {rate:,.0f} tokens/s"
            if self.args.offload == "nvme":
                on_disk = row.get("disk_read_bytes", 0) + row.get("disk_written_bytes", 0)
                said += f", disk {on_disk / took_s / 1e9:.2f} GB/s"
            self._metrics.write(json.dumps(row) + "\n")
            self._metrics.flush()
            self._bar.set_postfix_str(said, refresh=False)
            self._bar.update()
        if not math.isfinite(mean):
            raise SystemExit(f"step {self._done}: the loss is {mean}; lower the learning rate, or look at the data")
        return self.stopped or self._done == self.total_steps

    def _open_metrics(self, start: int) -> None:
        """Keep the rows up to the checkpoint that the run resumes from, and drop later ones."""
        path = self.args.out / "metrics.jsonl"
        rows = path.read_text().splitlines()[:start] if start and path.exists() else []
        self._metrics = path.open("w")
        self._metrics.writelines(row + "\n" for row in rows)

    # --- the plain way to save, for the script without zeropp
    # ----------------------------------------------------------

    def torch_save(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, step: int) -> None:
        if self.rank == 0:
            self.args.checkpoint.mkdir(parents=True, exist_ok=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, self.args.checkpoint / "new.pt")
            (self.args.checkpoint / "new.pt").replace(self.args.checkpoint / "state.pt")
        dist.barrier()

    def torch_load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        state = torch.load(self.args.checkpoint / "state.pt", map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])

    # --- the end ----------------------------------------------------------------------------------------------------

    def finish(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, validation: list[tuple[Tensor, Tensor]]
    ) -> None:
        """End the run: plot, and, unless it was stopped, validate, print a sample and the table."""
        trained_s = time.perf_counter() - self._started
        self._note("stopped" if self.stopped else "finished")
        if self.rank == 0:
            plot_loss(self.args.out)
        if self.stopped:
            if self.rank == 0:
                print(f"Stopped after step {self._done} of {self.total_steps}; checkpoint in {self.args.checkpoint}")
            return
        model.eval()
        loss = self._validate(model, validation)
        device = validation[0][0].device
        context = validation[0][0].shape[1]
        sample = generate(model, PROMPT, SAMPLE_BYTES, context=context, device=device)
        memory = _all_ranks(proportional_set_bytes())
        library = _library_figures(model, optimizer)
        if self.rank == 0:
            self._print_table(loss, trained_s, memory, library)
            print(f"\nA sample, after {PROMPT.decode()!r}:\n\n{sample.decode('utf-8', errors='replace')}\n")

    @torch.no_grad()
    def _validate(self, model: nn.Module, validation: list[tuple[Tensor, Tensor]]) -> float:
        mean = torch.stack([model(inputs, targets) for inputs, targets in validation]).double().mean()
        return sum(_all_ranks(mean.item())) / self.ranks

    def _note(self, state: str) -> None:
        if self.rank == 0:
            path = self.args.out / "run.json"
            facts = json.loads(path.read_text()) if path.exists() else {}
            facts.update(state=state, step=self._done, steps=self.total_steps)
            path.write_text(json.dumps(facts, indent=1) + "\n")

    def _print_table(self, loss: float, trained_s: float, memory: list[float], library: list[tuple[str, str]]) -> None:
        from rich.console import Console
        from rich.table import Table

        rows = [json.loads(line) for line in (self.args.out / "metrics.jsonl").read_text().splitlines()]
        rates = sorted(row["tokens_per_s"] for row in rows)
        checkpoint = sum(file.stat().st_size for file in self.args.checkpoint.rglob("*") if file.is_file())
        table = Table(title=f"{self.args.preset}: {self._done} steps on {self.ranks} ranks", title_justify="left")
        table.add_column("what")
        table.add_column("figure", justify="right")
        table.add_row("parameters", f"{self.parameters:,}")
        for name, figure in library:
            table.add_row(name, figure)
        table.add_row(
            "memory of each rank (proportional)", " + ".join(f"{one / 2**20:,.0f}" for one in memory) + " MiB"
        )
        for name, figure in self._disk_figures(rows):
            table.add_row(name, figure)
        table.add_row("tokens/s, median", f"{rates[len(rates) // 2]:,.0f}")
        table.add_row("training time", f"{trained_s:,.0f} s")
        table.add_row("checkpoints on disk", f"{checkpoint / 2**20:,.1f} MiB")
        table.add_row("validation loss", f"{loss:.3f} nats/byte")
        Console().print(table)
        result = {"validation_loss": loss, "seconds": trained_s, "parameters": self.parameters}
        (self.args.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")

    def _disk_figures(self, rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
        """Return the bytes that a step moved to and from the disk, and those that it has to. fp32 parameters are read in forward,
        backward and step, which writes them; two moments are read and written (the first step reads none)."""
        rows = [row for row in rows if "disk_read_bytes" in row][1:]
        if not rows:
            return []
        wanted = ("disk_read_bytes", "disk_written_bytes", "step_s")
        median = {name: sorted(row.get(name, 0) for row in rows)[len(rows) // 2] for name in wanted}
        read, written = median["disk_read_bytes"], median["disk_written_bytes"]
        return [
            ("read from the disk a step, median", f"{read / 2**20:,.1f} MiB"),
            ("the same, planned", f"{20 * self.parameters / 2**20:,.1f} MiB"),
            ("written to the disk a step, median", f"{written / 2**20:,.1f} MiB"),
            ("the same, planned", f"{12 * self.parameters / 2**20:,.1f} MiB"),
            ("disk, both ways, median", f"{(read + written) / median['step_s'] / 1e9:.3f} GB/s"),
        ]


def _moved_bytes() -> dict[str, int]:
    """Return the bytes that this rank moved so far by link, where the script trains with zeropp; else zeros."""
    zeropp = sys.modules.get("zeropp")
    moved = dict.fromkeys(LINKS, 0)
    traffic = {} if zeropp is None else zeropp.traffic()
    disk = traffic.pop("nvme", None)
    if disk:
        moved |= {"disk_read_bytes": disk["read"]["bytes"], "disk_written_bytes": disk["write"]["bytes"]}
    for link, kinds in traffic.items():
        moved[f"{link}_bytes"] = sum(kind["bytes"] for kind in kinds.values())
    return moved


def _state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return what this rank holds of parameters, gradients and states, and the plan, in bytes; empty without zeropp."""
    zeropp = sys.modules.get("zeropp")
    if zeropp is None:
        return {}
    held = dict.fromkeys(STATES, 0)
    planned = 0
    for place, kinds in zeropp.memory(model, optimizer).items():
        if place in ("parameters", "bytes_per_parameter"):
            continue
        for kind, counted in kinds.items():
            if kind in STATES:
                held[kind] += counted["held"]
                planned += counted["planned"]
    return {f"{kind}_bytes": held[kind] for kind in STATES if held[kind]} | {"planned_bytes": planned}


def plot_loss(out: Path) -> None:
    """Draw loss.png from metrics.jsonl."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    axes.plot([row["step"] for row in rows], [row["loss"] for row in rows], linewidth=1)
    axes.set(xlabel="step", ylabel="training loss, nats a byte", title="byte-level GPT with zeropp")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out / "loss.png", dpi=120)
    pyplot.close(figure)


def _all_ranks(value: float) -> list[float]:
    mine = torch.tensor([value], dtype=torch.float64)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [one.item() for one in everyone]


def _library_figures(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, str]]:
    """Return the rows of zeropp, where the script trains with it: rank 0's memory of model states, and its traffic."""
    zeropp = sys.modules.get("zeropp")
    if zeropp is None:
        return []
    memory = zeropp.memory(model, optimizer)
    each = memory["bytes_per_parameter"]
    rows = [
        ("bytes per parameter and rank, planned", f"{each['planned']:.2f}"),
        ("the same, measured", f"{each['held']:.2f}"),
    ]
    for link, kinds in zeropp.traffic().items():
        for kind, counts in kinds.items():
            if counts.get("bytes"):
                mib = counts["bytes"] / 2**20
                if link == "nvme":
                    rows.append((f"disk, {kind}, in all", f"{mib:,.1f} MiB"))
                    continue
                rows.append((f"read over {link} by {kind}", f"{mib:,.1f} MiB in {counts['calls']:,} calls"))
    return rows


def _stop_with_the_launcher() -> None:
    """Stop this rank when its launcher dies, even by SIGKILL, instead of training on alone (Linux)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
