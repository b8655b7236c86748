# SPDX-License-Identifier: Apache-2.0
"""Whole training steps of a GPT of 25M parameters on two CPU ranks, and the memory that they take.

Every library trains the same model from the same seed on the same tokens, one thread a rank: forward, backward, AdamW,
zero_grad. Each contender is a launch of its own (torchrun, two ranks), because they cannot share a process. All
launches live at once and take turns of a few steps, in an order drawn anew each round, so that contenders run in the
same seconds; the others sleep meanwhile. Losses of the first steps must agree before time
counts.

Memory is measured apart, one launch alone at a time: the sum over ranks of the proportional set size (shared pages
count once), sampled from outside all the while, from the first step on; its peak. It counts what a user pays, so
libraries are included.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, NamedTuple

from harness import BenchError, Need, Run, alone, alternate

CLAIM = "a step of stage 3 takes at most 1.05x DDP's, in less memory than every peer's"
NEEDS = (Need("DeepSpeed", module="deepspeed"),)

RANKS = 2
CONTEXT, VOCABULARY = 256, 12000
SEQUENCES = 2  # a rank and step
LEARNING_RATE = 3e-4
CHECKED_STEPS = 5
#: fp32 sums in another order: the losses of the first steps agree far better than this, wrong ones never do.
LOSS_TOLERANCE = 2e-5


class Shape(NamedTuple):
    """The sizes of a GPT: GPT-2's, except for the vocabulary."""

    layers: int
    width: int
    heads: int


SMALL = Shape(6, 512, 8)  # 25M parameters
PEERS = {"DDP": ("ddp", 0), "FSDP2": ("fsdp2", 3), "DeepSpeed ZeRO-3": ("deepspeed", 3)}
OURS = {f"stage {stage}": ("zeropp", stage) for stage in (3, 2, 1, 0)}


# --- a rank ---------------------------------------------------------------------------------------------------------


def build_model(shape: Shape) -> Any:
    """A GPT in plain PyTorch, embedding and head tied. Shapes: B sequences, T tokens, D width, H heads."""
    import torch
    from torch import Tensor, nn
    from torch.nn import functional as F

    layers, width, heads = shape

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x_BTD: Tensor) -> Tensor:
            b, t, d = x_BTD.shape
            q, k, v = self.qkv(self.norm_1(x_BTD)).view(b, t, 3, heads, d // heads).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x_BTD = x_BTD + self.out(attended.transpose(1, 2).reshape(b, t, d))
            return x_BTD + self.down(F.gelu(self.up(self.norm_2(x_BTD))))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
            self.head.weight = self.tokens.weight
            for name, p in self.named_parameters():
                if p.dim() == 2:
                    nn.init.normal_(p, std=0.02 / (math.sqrt(2 * layers) if "out" in name or "down" in name else 1))

        def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
            x_BTD = self.tokens(tokens_BT) + self.positions(torch.arange(tokens_BT.shape[1]))
            for block in self.blocks:
                x_BTD = block(x_BTD)
            return F.cross_entropy(self.head(self.norm(x_BTD)).flatten(0, 1), targets_BT.flatten())

    torch.manual_seed(0)
    return GPT()


def batch_of(step: int, rank: int) -> tuple[Any, Any]:
    """Tokens with a skewed distribution, so that there is something to learn; the same for every contender."""
    import torch

    draw = torch.Generator().manual_seed(1000 * step + rank)
    odds = 1.0 / (torch.arange(VOCABULARY) + 10.0)
    tokens = torch.multinomial(odds, SEQUENCES * (CONTEXT + 1), replacement=True, generator=draw).view(SEQUENCES, -1)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def adamw(model: Any, **options: Any) -> Any:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, **options)


Step = Callable[[Any, Any], float]


def plain_step(model: Any, optimizer: Any) -> Step:
    def step(tokens: Any, targets: Any) -> float:
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def start_zeropp(stage: int, shape: Shape) -> Step:
    import torch.distributed as dist
    import zeropp

    dist.init_process_group("zeropp")
    model = build_model(shape)
    return plain_step(*zeropp.prepare(model, adamw(model), zeropp.Config(stage=stage)))


def start_ddp(_: int, shape: Shape) -> Step:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(build_model(shape), gradient_as_bucket_view=True)
    return plain_step(model, adamw(model, fused=True))


def start_fsdp2(_: int, shape: Shape) -> Step:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model = build_model(shape)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return plain_step(model, adamw(model, fused=True))


def start_deepspeed(stage: int, shape: Shape) -> Step:
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    model = build_model(shape)
    config = {
        "train_micro_batch_size_per_gpu": SEQUENCES,
        "gradient_clipping": 0.0,  # its default clips at 1.0, which nobody else does
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model, fused=True), config=config)

    def step(tokens: Any, targets: Any) -> float:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


STARTS = {"zeropp": start_zeropp, "ddp": start_ddp, "fsdp2": start_fsdp2, "deepspeed": start_deepspeed}


def train(args: dict[str, Any]) -> int:
    """Worker: one rank of one contender."""
    import torch

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    step = STARTS[args["library"]](args["stage"], Shape(*args["shape"]))
    return answer(args, lambda number: batch_of(number, rank), lambda batch: step(*batch), each_together=False)


def answer(
    args: dict[str, Any], batch_of: Callable[[int], Any], step: Callable[[Any], float], each_together: bool = True
) -> int:
    """Train as many steps as the parent asks for, again and again, and answer with [(ms, loss), ...]; return the steps.

    Args:
        batch_of: makes the batch of a step, by its number, before the clock starts.
        each_together: ranks wait for each other before each step, else before each of the parent's rounds.
    """
    import torch.distributed as dist

    rank, done = int(os.environ["RANK"]), 0
    with Client(args["address"], authkey=bytes.fromhex(args["key"])) as parent:
        parent.send((args["contender"], rank, os.getpid()))
        while count := parent.recv():
            figures = []
            for at in range(count):
                batch = batch_of(done)
                if each_together or at == 0:
                    dist.barrier()
                start = time.perf_counter_ns()
                loss = step(batch)
                figures.append(((time.perf_counter_ns() - start) / 1e6, loss))
                done += 1
            parent.send(figures)
        dist.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()
    return done


# --- the parent -----------------------------------------------------------------------------------------------------


class Team:
    """The ranks of one launch, each at the other end of a connection."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ranks: dict[int, Connection] = {}
        self.pids: dict[int, int] = {}
        self.losses: list[float] = []
        self.error: BaseException | None = None

    def check(self) -> None:
        if self.error is not None:
            raise BenchError(f"step: {self.name}: {self.error}")

    def ask(self, steps: int) -> None:
        for connection in self.ranks.values():
            connection.send(steps)

    def answered(self) -> bool:
        self.check()
        return all(c.poll() for c in self.ranks.values())

    def answer(self) -> list[float]:
        """Milliseconds of each step, the slowest rank's; remembers the losses, averaged over ranks."""
        figures = []
        for connection in self.ranks.values():
            while not connection.poll(0.2):
                self.check()
            try:
                figures.append(connection.recv())
            except EOFError:
                time.sleep(1.0)  # the launch says why
                self.check()
                raise BenchError(f"step: {self.name}: a rank went away") from None
        steps = list(zip(*figures, strict=True))
        self.losses += [sum(loss for _, loss in ranks) / len(ranks) for ranks in steps]
        return [max(ms for ms, _ in ranks) for ranks in steps]

    def turn(self, steps: int) -> float:
        """One step untimed, then ``steps`` timed: their median."""
        self.ask(steps + 1)
        return statistics.median(self.answer()[1:])


@contextlib.contextmanager
def launched(
    bench: Run, contenders: dict[str, tuple[str, int]], ranks: int = RANKS, shape: Shape = SMALL,
    more: dict[str, Any] | None = None,
) -> Iterator[dict[str, Team]]:  # fmt: skip
    """Start all contenders, each waiting for its turn, and end them with the block. ``more``: arguments of their workers."""
    teams = {name: Team(name) for name in contenders}
    key = secrets.token_bytes(16)
    with tempfile.TemporaryDirectory(prefix="zeropp-bench-") as folder:
        listener = Listener(str(Path(folder) / "parent"), backlog=64, authkey=key)
        threads = []
        for name, (library, stage) in contenders.items():
            args = {"contender": name, "library": library, "stage": stage, "shape": shape}
            args |= {"address": listener.address, "key": key.hex(), **(more or {})}
            thread = threading.Thread(target=launch_one, args=(bench, teams[name], ranks, args), daemon=True)
            thread.start()
            threads.append(thread)
        try:
            wait_for_ranks(listener, teams, ranks)
            yield teams
        finally:
            for team in teams.values():
                for connection in team.ranks.values():
                    with contextlib.suppress(OSError):
                        connection.send(0)
            listener.close()
            for team in teams.values():
                for connection in team.ranks.values():
                    connection.close()
            for thread in threads:
                thread.join()


def launch_one(bench: Run, team: Team, ranks: int, args: dict[str, Any]) -> None:
    try:
        bench.launch("train", ranks=ranks, args=args, timeout_s=1800.0, env={"DS_ACCELERATOR": "cpu"})
    except BaseException as error:  # raised where this team is waited for
        team.error = error


def wait_for_ranks(listener: Listener, teams: dict[str, Team], ranks: int) -> None:
    """Accept ``ranks`` connections a team; a launch that fails ends the wait."""
    missing = ranks * len(teams)
    arrived: list[Connection] = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            for _ in range(missing):
                arrived.append(listener.accept())

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    while missing:
        for team in teams.values():
            team.check()
        time.sleep(0.05)
        while arrived:
            connection = arrived.pop()
            name, rank, pid = connection.recv()
            teams[name].ranks[rank] = connection
            teams[name].pids[rank] = pid
            missing -= 1


def check_losses(bench: Run, losses: dict[str, list[float]]) -> None:
    """The first losses of every contender equal DDP's; without peers, the first contender's."""
    first = "DDP" if "DDP" in losses else next(iter(losses))
    wanted = losses[first]
    bench.log(f"losses of {first}: " + " ".join(f"{loss:.6f}" for loss in wanted))
    for name, mine in losses.items():
        far = max(abs(a - b) / b for a, b in zip(mine, wanted, strict=True))
        bench.log(f"losses of {name}: at most {far:.1e} away from those of {first}")
        bench.check(
            far <= LOSS_TOLERANCE,
            f"{name}: losses {mine} differ from those of {first}, {wanted}, by {far:.1e}; {LOSS_TOLERANCE} allowed",
        )
    bench.check(wanted[-1] < wanted[0] - 0.05, f"the loss of {first} does not fall: {wanted}")


def first_losses(team: Team, steps: int = CHECKED_STEPS) -> list[float]:
    """Return the losses of the first steps, averaged over ranks."""
    team.ask(steps)
    team.answer()
    return team.losses[:]


def measure_time(
    bench: Run, contenders: dict[str, tuple[str, int]], rounds: int, ranks: int = RANKS, shape: Shape = SMALL
) -> dict[str, list[float]]:
    """Milliseconds a step, one figure a contender and round."""
    with launched(bench, contenders, ranks, shape) as teams:
        check_losses(bench, {name: first_losses(team) for name, team in teams.items()})
        turns = {name: partial(team.turn, 2) for name, team in teams.items()}
        return alternate(turns, rounds=rounds, warmup=0)


def pss_mib(pid: int) -> dict[str, float]:
    """Proportional set size of a process, by kind."""
    kinds = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        key, _, value = line.partition(":")
        if key in ("Pss", "Pss_Anon", "Pss_Shmem", "Pss_File"):
            kinds[key] = int(value.split()[0]) / 1024
    return kinds


def measure_memory(bench: Run, name: str, contender: tuple[str, int], steps: int) -> dict[str, float]:
    """Peak over ``steps`` steps of the sum over ranks; the parts are those at the peak."""
    peak: dict[str, float] = {"Pss": 0.0}
    with launched(bench, {name: contender}) as teams:
        team = teams[name]
        team.ask(steps)
        while not team.answered():
            ranks = [pss_mib(pid) for pid in team.pids.values()]
            now = {kind: sum(rank[kind] for rank in ranks) for kind in ranks[0]}
            peak = max(peak, now, key=lambda sample: sample["Pss"])
        team.answer()
    return peak


def run(bench: Run) -> None:
    ours = {"stage 3": OURS["stage 3"]} if bench.quick else OURS
    contenders = ours if alone() else {**ours, **PEERS}
    samples = measure_time(bench, contenders, rounds=3 if bench.quick else 10)
    for name in ours:
        bench.compare(f"{name} 25M 2 ranks", samples, ours=name, peers=list(PEERS), unit="ms")
    peaks: dict[str, list[dict[str, float]]] = alternate(
        {name: partial(measure_memory, bench, name, contender, 3) for name, contender in contenders.items()},
        rounds=1 if bench.quick else 3,
        warmup=0,
    )
    totals = {name: [peak["Pss"] for peak in found] for name, found in peaks.items()}
    for name in ours:
        if alone():
            bench.own(f"{name} 25M 2 ranks memory", totals[name], "MiB")
            continue
        for peer in PEERS:
            parts = {
                f"{who}_{kind.lower()}_mib": statistics.median(peak[kind] for peak in peaks[contender])
                for who, contender in (("ours", name), ("peer", peer))
                for kind in ("Pss_Anon", "Pss_Shmem", "Pss_File")
            }
            case = f"{name} 25M 2 ranks memory"
            bench.compare(case, totals, ours=name, peers=[peer], unit="MiB", extra=parts)
