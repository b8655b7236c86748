# SPDX-License-Identifier: Apache-2.0
"""One-bit compression with error feedback against torch operations in reused memory and numpy's packbits; and the mean over
two ranks at one bit against gloo's exact one. On one host memory is the wire, so that row shows what the arithmetic
costs, beside the 32 times fewer bytes that it sends."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from harness import Need, Run, alternate, repeat_for, timed
from torch import Tensor

CLAIM = (
    "1-bit compression with error feedback: >= 5x torch operations with numpy packbits; the steps of 1-bit Adam, 0/1 Adam "
    "and 1-bit LAMB: >= 2x the torch operations that they were, in memory that is there."
)
NEEDS = (Need("numpy", module="numpy"),)
CHUNK = 4096
STEPS = {"64K": 1 << 16, "16M": 1 << 24}
SIZES = {"64K": 1 << 16, "1M": 1 << 20, "16M": 1 << 24}
REDUCED = {"1M": 1 << 20, "16M": 1 << 24}
TENSORS = 16
T, LR, DECAY, BETA1, BETA2, EPS = 9, 1e-3, 1e-4, 0.9, 0.999, 1e-8


class Peer:
    """Sign, scale and error with torch in memory that is there; bits by numpy."""

    def __init__(self, elems: int) -> None:
        self.owed, self.value = torch.empty(elems // CHUNK, CHUNK), torch.empty(elems // CHUNK, CHUNK)
        self.signs = torch.empty(elems // CHUNK, CHUNK, dtype=torch.bool)
        self.scales = torch.empty(elems // CHUNK, 1)
        self.bits = np.empty(0, dtype=np.uint8)

    def compress(self, x: Tensor, error: Tensor) -> None:
        torch.add(x.view(-1, CHUNK), error.view(-1, CHUNK), out=self.owed)
        torch.abs(self.owed, out=self.value)
        torch.mean(self.value, dim=1, keepdim=True, out=self.scales)
        torch.ge(self.owed, 0, out=self.signs)
        self.value.copy_(self.signs).mul_(2).sub_(1).mul_(self.scales)
        torch.sub(self.owed, self.value, out=error.view(-1, CHUNK))
        self.bits = np.packbits(self.signs.numpy().reshape(-1), bitorder="little")

    def decode(self, out: Tensor) -> None:
        signs = torch.from_numpy(np.unpackbits(self.bits, bitorder="little"))
        out.copy_(signs).mul_(2).sub_(1)
        out.view(-1, CHUNK).mul_(self.scales)


class Between:
    """Memory for what torch's operations have between."""

    def __init__(self, elems: int) -> None:
        self.one, self.two = torch.empty(elems), torch.empty(elems)
        self.ones = list(self.one.split(elems // TENSORS))
        self.unseen = torch.empty(elems, dtype=torch.bool)


class State:
    """Flat arrays, and the same as lists of tensors; variances are not negative."""

    def __init__(self, elems: int, names: str, between: Between) -> None:
        draw = torch.Generator().manual_seed(3)
        self.flat = {name: torch.randn(elems, generator=draw) * 1e-2 for name in names.split()}
        for name in {"v", "fresh"} & set(self.flat):
            self.flat[name].square_().add_(1e-6)
        self.lists = {name: list(one.split(elems // TENSORS)) for name, one in self.flat.items()}
        self.between = between


def ours_frozen(s: State) -> None:
    import zeropp

    zeropp.ops.frozen_adam_step_(
        s.lists["p"], s.lists["m"], s.lists["v"], step_size=LR, variance_step=T, beta2=BETA2, eps=EPS, decay=DECAY
    )


def torch_frozen(s: State) -> None:
    p, m, v = s.flat["p"], s.flat["m"], s.flat["v"]
    root = torch.sqrt(v, out=s.between.one).mul_((1 - BETA2**T) ** -0.5).add_(EPS)
    root.masked_fill_(torch.eq(v, 0, out=s.between.unseen), float("inf"))
    p.mul_(1 - DECAY).addcdiv_(m, root, value=-LR)


def foreach_frozen(s: State) -> None:
    """Without the care for what was never seen, which foreach has no operation for."""
    roots = s.between.ones
    torch._foreach_copy_(roots, s.lists["v"])
    torch._foreach_sqrt_(roots)
    torch._foreach_mul_(roots, (1 - BETA2**T) ** -0.5)
    torch._foreach_add_(roots, EPS)
    torch._foreach_mul_(s.lists["p"], 1 - DECAY)
    torch._foreach_addcdiv_(s.lists["p"], s.lists["m"], roots, value=-LR)


def run(bench: Run) -> None:
    torch.set_num_threads(1)
    for size, elems in STEPS.items():
        for name, update in UPDATES.items():
            measure_step(bench, name, update, size, elems)
    for size, elems in SIZES.items():
        if not (bench.quick and size == "64K"):
            measure(bench, size, elems)
    for size, elems in REDUCED.items():
        if not (bench.quick and size == "16M"):
            args = {"elems": elems, "rounds": 7 if bench.quick else 15}
            first, *_ = bench.launch("worker", ranks=2, args=args, threads=1)
            bench.check(not first["wrong"], first["wrong"])
            bench.compare(
                f"all_reduce 1 bit fp32 {size} 2 ranks", first["samples"], ours="ours", peers=["gloo, exact"], unit="ms",
                better="lower",
            )  # fmt: skip


def worker(args: Mapping[str, Any]) -> dict[str, Any]:
    """Both means on one rank, in turns: milliseconds of the slower rank."""
    import torch.distributed as dist
    import zeropp.comm

    dist.init_process_group("gloo")
    elems = int(args["elems"])
    reducer = zeropp.comm.OneBitAllReduce(elems, chunk_elems=CHUNK)
    source = torch.randn(elems, generator=torch.Generator().manual_seed(dist.get_rank()))
    exact, seen = source.clone(), torch.zeros(elems)
    dist.all_reduce(exact)
    calls = 16
    for _ in range(
        calls
    ):  # what a call loses comes in the next, so the mean over calls is the exact one but for the errors
        seen += reducer(source.clone())
    owed = 2 * float(reducer.worker_error.abs().max()) + float(reducer.server_error.abs().max())
    off = float((seen / calls - exact / 2).abs().max())
    wrong = (
        "" if off <= 2 * owed / calls + 1e-3 else f"{elems}: the mean over {calls} calls is off by {off}, owed {owed}"
    )
    work = source.clone()
    contenders = {"ours": lambda: reducer(work), "gloo, exact": lambda: dist.all_reduce(work)}
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    order, draw = list(contenders), random.Random(elems)  # the same on every rank
    for turn in range(int(args["rounds"]) + 1):
        draw.shuffle(order)
        for name in order:
            work.copy_(source)
            dist.barrier()
            begin = time.perf_counter()
            contenders[name]()
            took = torch.tensor((time.perf_counter() - begin) * 1e3)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if turn:
                samples[name].append(float(took))
    dist.barrier()
    dist.destroy_process_group()
    return {"wrong": wrong, "samples": samples}


def ours_local(s: State) -> None:
    import zeropp

    zeropp.ops.zero_one_adam_step_(
        *(s.lists[name] for name in ("p", "g", "m", "v")), moved=s.lists["moved"], anchors=s.lists["anchor"],
        step_size=LR, variance_step=T, beta1=BETA1, beta2=BETA2, eps=EPS, decay=DECAY,
    )  # fmt: skip


def torch_local(s: State) -> None:
    s.flat["m"].mul_(BETA1).add_(s.flat["g"], alpha=1 - BETA1)
    s.flat["moved"].add_(s.flat["m"], alpha=LR)
    s.flat["anchor"].mul_(1 - DECAY)
    torch_frozen(s)


def foreach_local(s: State) -> None:
    torch._foreach_mul_(s.lists["m"], BETA1)
    torch._foreach_add_(s.lists["m"], s.lists["g"], alpha=1 - BETA1)
    torch._foreach_add_(s.lists["moved"], s.lists["m"], alpha=LR)
    torch._foreach_mul_(s.lists["anchor"], 1 - DECAY)
    foreach_frozen(s)


COEFFICIENT, RATE, WEIGHT_DECAY, FROZEN = 3.0, 1e-3, 0.1, 5


def ours_lamb(s: State) -> None:
    import zeropp

    zeropp.ops.onebit_lamb_fresh_(
        *(s.lists[name] for name in ("p", "m", "before", "v", "fresh")), step=T, freeze_step=FROZEN,
        coefficient=COEFFICIENT, beta1=BETA1, beta2=BETA2, eps=EPS, weight_decay=WEIGHT_DECAY,
    )  # fmt: skip
    zeropp.ops.frozen_adam_step_(
        s.lists["p"], s.lists["m"], s.lists["v"], step_size=RATE / (COEFFICIENT * (1 - BETA1**T)), variance_step=FROZEN,
        beta2=BETA2, eps=EPS, decay=RATE * WEIGHT_DECAY,
    )  # fmt: skip


def torch_lamb(s: State) -> None:
    p, m, before, v, fresh = (s.flat[name] for name in ("p", "m", "before", "v", "fresh"))
    one, two, unseen = s.between.one, s.between.two, torch.eq(v, 0, out=s.between.unseen)
    torch.mul(before, -BETA1, out=one).add_(m).mul_(1 / (COEFFICIENT * (1 - BETA1)))
    fresh.mul_(BETA2).addcmul_(one, one, value=1 - BETA2)
    torch.div(fresh, 1 - BETA2**T, out=one).sqrt_().add_(EPS)
    torch.div(v, 1 - BETA2**FROZEN, out=two).sqrt_().add_(EPS)
    torch.div(two, one, out=one).masked_fill_(unseen, 0).max()
    values = torch.div(m, two, out=one).mul_(1 / (COEFFICIENT * (1 - BETA1**T))).masked_fill_(unseen, 0)
    values.norm()
    values.add_(p, alpha=WEIGHT_DECAY).norm()
    p.add_(values, alpha=-RATE)


@dataclass(frozen=True)
class Update:
    """One optimizer's: bytes an element that have to be touched, its arrays, and the calls that do it."""

    touched: int
    names: str
    calls: Mapping[str, Callable[[State], None]]


UPDATES = {
    "1-bit Adam's step": Update(
        16, "p m v", {"ours": ours_frozen, "torch": torch_frozen, "torch foreach": foreach_frozen}
    ),
    "0/1 Adam's local step": Update(
        40, "p g m v moved anchor", {"ours": ours_local, "torch": torch_local, "torch foreach": foreach_local}
    ),
    "1-bit LAMB's update": Update(40, "p m before v fresh", {"ours": ours_lamb, "torch": torch_lamb}),
}


def measure_step(bench: Run, name: str, update: Update, size: str, elems: int) -> None:
    """One optimizer's update of tensors of one size, by all."""
    between = Between(elems)
    states = {who: State(elems, update.names, between) for who in update.calls}
    for who, call in update.calls.items():
        call(states[who])
    for key, mine in states["ours"].flat.items():
        for who, state in states.items():
            # Some ten roundings of numbers of about 1e-2, and of steps of 1e-3.
            off = (mine - state.flat[key]).abs().max().item()
            bench.check(off <= 2e-8, f"{name} {size}: {key} of {who} is off by {off}")
    src, dst = (torch.zeros(update.touched * elems // 2, dtype=torch.uint8) for _ in range(2))
    repeat = repeat_for(partial(update.calls["ours"], states["ours"]), 5.0)
    timers = {who: timed(partial(call, states[who]), repeat=repeat) for who, call in update.calls.items()}
    timers["copy"] = timed(lambda: dst.copy_(src), repeat=repeat)
    samples = alternate(timers, rounds=7 if bench.quick else 15)
    rate = {who: [elems / ms / 1e3 for ms in values] for who, values in samples.items()}
    bench.compare(
        f"{name} fp32 {size} in {TENSORS} tensors", rate, ours="ours", peers=[who for who in update.calls if who != "ours"],
        unit="Melem/s", limit="copy", better="higher",
    )  # fmt: skip


def measure(bench: Run, size: str, elems: int) -> None:
    """Measure all cases of one size."""
    import zeropp
    from zeropp.ops import OneBit

    x, error, peer_error = torch.randn(elems), torch.zeros(elems), torch.zeros(elems)
    out, peer_out = torch.empty(elems), torch.empty(elems)
    peer, to = Peer(elems), OneBit.empty(elems, chunk_elems=CHUNK)
    zeropp.ops.onebit_compress_(x, error, to)
    peer.compress(x, peer_error)
    bench.check(np.array_equal(to.bits.numpy(), peer.bits), f"{size}: bits differ from numpy's")
    off = (to.scales - peer.scales.flatten()).abs().max().item()
    bench.check(off <= 600 * 2.0**-24, f"{size}: scales differ from torch's mean by {off}")  # two sums, 262 u each
    zeropp.ops.onebit_decode_(to, out)
    peer.decode(peer_out)
    bench.check(bool((out.sign() == peer_out.sign()).all()), f"{size}: values differ in sign")
    touched = 12 * elems + elems // 8
    src, dst = (torch.zeros(touched // 2, dtype=torch.uint8) for _ in range(2))
    cases = {
        "compress": (
            lambda: zeropp.ops.onebit_compress_(x, error, to),
            lambda: peer.compress(x, peer_error),
            lambda: dst.copy_(src),
        ),
        "decode": (
            lambda: zeropp.ops.onebit_decode_(to, out),
            lambda: peer.decode(peer_out),
            lambda: dst[: elems * 33 // 16].copy_(src[: elems * 33 // 16]),
        ),
    }
    for what, (ours, theirs, copy) in cases.items():
        repeat = repeat_for(ours, 5.0)
        contenders = {
            "ours": timed(ours, repeat=repeat),
            "torch + numpy packbits": timed(theirs, repeat=1 if elems > 1 << 20 else repeat),
            "copy": timed(copy, repeat=repeat),
        }
        samples = alternate(contenders, rounds=7 if bench.quick else 15)
        rate = {name: [elems / ms / 1e3 for ms in values] for name, values in samples.items()}
        bench.compare(
            f"{what} fp32 {size}", rate, ours="ours", peers=["torch + numpy packbits"], unit="Melem/s",
            limit="copy", better="higher",
        )  # fmt: skip
