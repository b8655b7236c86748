# SPDX-License-Identifier: Apache-2.0
"""A rank that is killed inside a layer of experts: the others name it within seconds, whichever phase they are in."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from launch import run_ranks, start_on, survivors
from ranks import simulated

PHASES = ("dispatch", "combine", "backward of combine", "backward of dispatch")
VICTIM = 1


def killed_before(rank: int, ranks: int, phase: int, folder: str, hosts: str, device: str = "cpu") -> dict[str, Any]:
    start_on(hosts[rank], device)
    import torch
    import torch.distributed as dist
    import zeropp

    exchange = zeropp.moe.Exchange(dist.group.WORLD)
    layer = exchange.layer("blocks.0.experts")

    def arrive(at: int) -> None:
        if rank == VICTIM and at == phase:
            Path(folder, "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    class Between(torch.autograd.Function):
        """Experts that change nothing."""

        @staticmethod
        def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
            return rows.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            arrive(3)
            return grad.clone()

    try:
        hidden = torch.randn(8, 16, requires_grad=True)
        weights = torch.rand(8, 2, requires_grad=True)
        arrive(0)
        chosen = torch.rand(8, 6).topk(2, dim=1)[1]
        rows, plan = zeropp.moe.dispatch(hidden, chosen, 6, exchange=exchange, layer=layer)
        arrive(1)
        y = zeropp.moe.combine(Between.apply(rows), plan, weights)
        arrive(2)
        y.sum().backward()
        exchange.comm.barrier()  # the host of a GPU may have enqueued all, and waits for nobody
    except zeropp.CommError as error:
        return {"at": time.time(), "rank": error.rank, "text": str(error)}
    return {"at": 0.0, "rank": None, "text": "no error"}


def texts_of_survivors(outcomes: Any, folder: Path) -> list[str]:
    """Return what the other ranks were told, after a check that it named the victim within five seconds."""
    assert outcomes[VICTIM].code == -signal.SIGKILL, str(outcomes[VICTIM])
    killed_at = float((folder / "killed").read_text())
    values = [outcome.value for outcome in survivors(outcomes, VICTIM)]
    for value in values:
        assert value["rank"] == VICTIM, value
        assert f"rank {VICTIM}" in value["text"]
        assert value["at"] - killed_at < 5.0
    return [value["text"] for value in values]


@pytest.mark.parametrize(
    ("hosts", "phase"),
    [
        ("aaa", 0), pytest.param("aaa", 1, marks=pytest.mark.slow), ("aaa", 2), pytest.param("aaa", 3, marks=pytest.mark.slow),
        pytest.param("aba", 0, marks=pytest.mark.slow), ("aba", 1), pytest.param("aba", 2, marks=pytest.mark.slow),
        pytest.param("aba", 3, marks=pytest.mark.slow), pytest.param("aab", 0, marks=pytest.mark.slow),
        pytest.param("aab", 1, marks=pytest.mark.slow), pytest.param("aab", 2, marks=pytest.mark.slow), ("aab", 3),
    ],
)  # fmt: skip
def test_it_is_named_in_every_phase(hosts: str, phase: int, tmp_path: Path) -> None:
    """The victim is one of three ranks of a host, alone on its host, or beside another one."""
    outcomes = run_ranks(3, killed_before, phase, str(tmp_path), hosts, timeout=90, check=False)
    for text in texts_of_survivors(outcomes, tmp_path):
        if hosts != "aaa":
            assert text  # whoever waits for the network knows the phase there
        elif "socket closed" not in text:  # whoever sends it the descriptor of an arena may notice first
            assert f"{PHASES[phase]} #1 of layer 0 (blocks.0.experts)" in text


@pytest.mark.parametrize(
    ("hosts", "phase"),
    [
        pytest.param("aaa", 0, marks=pytest.mark.slow), ("aaa", 1), pytest.param("aaa", 2, marks=pytest.mark.slow), ("aaa", 3),
        *(pytest.param("aab", phase, marks=pytest.mark.slow) for phase in range(4)),
    ],
)  # fmt: skip
def test_it_is_named_where_streams_wait_for_its_gpu(hosts: str, phase: int, tmp_path: Path) -> None:
    """What the victim enqueued on its GPU has not run, so the others' streams wait for it until its end is noticed."""
    environment = simulated("sim-lazy")
    outcomes = run_ranks(
        3, killed_before, phase, str(tmp_path), hosts, "sim", timeout=240, check=False, env=environment
    )
    texts_of_survivors(outcomes, tmp_path)


# -- in training -----------------------------------------------------------------------------------------------------------

PLACES = {
    "publish": ("dispatch_begin", "before"), "gather": ("dispatch_end", "before"), "products": ("combine", "before"),
    "sum back": ("combine", "behind"), "backward of sums": ("combine_backward", "before"),
    "backward of products": ("dispatch_backward", "before"), "backward of tokens": ("dispatch_backward", "behind"),
}  # fmt: skip
"""Calls of an exchange of rows, and where the victim ends: before the call, or behind it."""
DEAD_S, TIMEOUT_S = 5.0, 15.0


class Struck:
    """The exchange of the victim, which ends at a call.

    Args:
        core: the ``_C.Rows``.
        strike: ends or stops this rank.
    """

    def __init__(self, core: Any, call: str, when: str, strike: Any) -> None:
        self._core, self._call, self._when, self._strike = core, call, when, strike

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._core, name)
        if name != self._call:
            return found

        def run(*args: Any) -> Any:
            if self._when == "before":
                self._strike()
            result = found(*args)
            self._strike()
            return result

        return run


def trained_until(
    rank: int, ranks: int, signal_name: str, place: str, folder: str, hosts: str, stage: int, device: str = "cpu"
) -> Any:
    start_on(hosts[rank], device)
    import datetime

    import torch
    import torch.distributed as dist
    import zeropp
    from zeropp.zero.engine import engine_of

    # Only now: a busy machine takes longer to start the ranks.
    seconds = TIMEOUT_S if signal_name == "SIGSTOP" else 60.0
    dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout = datetime.timedelta(seconds=seconds)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(zeropp.moe.MoE(16, 4, 2, intermediate=8) for _ in range(2)))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = zeropp.prepare(model, optimizer, zeropp.Config(stage=stage, experts=2, units=("MoE",)))

    def strike() -> None:
        Path(folder, "struck").write_text(str(time.time()))
        os.kill(os.getpid(), signal.Signals[signal_name])

    def arm() -> None:
        if place == "reduction":
            model[0].gate.weight.register_hook(lambda grad: strike())
        elif place == "step":
            run = (schedule := engine_of(model).schedule).run
            schedule.run = lambda *args: (strike(), run(*args))
        else:
            exchange = model[1].experts.forward.exchange
            exchange.core = Struck(exchange.core, *PLACES[place], strike)

    try:
        for step in range(50):
            if rank == VICTIM and step == 2:
                arm()
            if signal_name == "SIGSTOP" and step == 2 and rank // 2 != VICTIM // 2:
                time.sleep(
                    2
                )  # a time-out names who is waited for, so that whoever waits for the victim itself has to begin first
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except zeropp.Error as error:
        return {
            "at": time.time(),
            "rank": getattr(error, "rank", None),
            "text": str(error),
            "kind": type(error).__name__,
        }
    return {"at": 0.0, "rank": None, "text": "no error", "kind": ""}


def training_cases() -> Any:
    """Each place once in the layout that is likeliest there; the other layouts are slow."""
    quick = {
        ("SIGKILL", "publish", "aaaa", 3), ("SIGKILL", "gather", "aaaa", 1), ("SIGKILL", "products", "aabb", 3),
        ("SIGKILL", "backward of products", "abab", 3), ("SIGKILL", "reduction", "aaaa", 3), ("SIGKILL", "step", "aabb", 1),
        ("SIGSTOP", "products", "aaaa", 3),
    }  # fmt: skip
    for name in ("SIGKILL", "SIGSTOP"):
        for place in (*PLACES, "reduction", "step"):
            for hosts in ("aaaa", "aabb", "abab"):
                for stage in (1, 3):
                    case = (name, place, hosts, stage)
                    yield pytest.param(*case, marks=() if case in quick else pytest.mark.slow)


@pytest.mark.parametrize(("signal_name", "place", "hosts", "stage"), list(training_cases()))
def test_all_ranks_name_it_in_training(signal_name: str, place: str, hosts: str, stage: int, tmp_path: Path) -> None:
    """Four ranks, two with each part of the experts, on one host or on two: those that do not exchange tokens with the victim name it too."""
    stopped = signal_name == "SIGSTOP"

    def watch(processes: list[Any]) -> None:
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline and any(p.poll() is None for r, p in enumerate(processes) if r != VICTIM):
            time.sleep(0.02)

    outcomes = run_ranks(
        4, trained_until, signal_name, place, str(tmp_path), hosts, stage, timeout=2, watch=watch, check=False
    )
    assert (tmp_path / "struck").exists(), "\n".join(map(str, outcomes))
    struck_at = float((tmp_path / "struck").read_text())
    for outcome in survivors(outcomes, VICTIM):
        value = outcome.value
        assert value["rank"] == VICTIM, [(one.rank, one.value) for one in outcomes]
        assert f"rank {VICTIM}" in value["text"], value
        assert value["kind"] == ("CommTimeoutError" if stopped else "CommError"), value
        if stopped:  # a log line says who is waited for, before the time-out
            assert re.search(rf"rank {outcome.rank} of .* has waited 10 s in .* for rank", outcome.err), str(outcome)
        took = value["at"] - struck_at
        assert took < DEAD_S + (TIMEOUT_S if stopped else 0), value


@pytest.mark.slow
@pytest.mark.parametrize("place", ["products", "reduction", "step"])
def test_all_ranks_name_it_on_gpus_of_hosts(place: str, tmp_path: Path) -> None:
    """NCCL moves the shards, and a rank that is killed is named by those that share its host, its experts or neither."""
    outcomes = run_ranks(
        4, trained_until, "SIGKILL", place, str(tmp_path), "aabb", 3, "sim", timeout=120, check=False,
        env=simulated("sim"),
    )  # fmt: skip
    assert outcomes[VICTIM].code == -signal.SIGKILL, str(outcomes[VICTIM])
    struck_at = float((tmp_path / "struck").read_text())
    for outcome in survivors(outcomes, VICTIM):
        assert (outcome.value["rank"], outcome.value["kind"]) == (VICTIM, "CommError"), outcome.value
        assert outcome.value["at"] - struck_at < DEAD_S, outcome.value


def evaluates_alone(rank: int, ranks: int) -> Any:
    import datetime

    import torch
    import torch.distributed as dist
    import zeropp

    dist.init_process_group("gloo")
    dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout = datetime.timedelta(seconds=TIMEOUT_S)
    model = torch.nn.Sequential(zeropp.moe.MoE(16, 4, 2, intermediate=8))
    model, _ = zeropp.prepare(model, None, zeropp.Config(stage=3, experts=2))
    if rank:
        time.sleep(TIMEOUT_S + DEAD_S)
        return {}
    began = time.time()
    try:
        with torch.no_grad():
            model(torch.randn(8, 16))
    except zeropp.Error as error:
        return {
            "seconds": time.time() - began,
            "rank": getattr(error, "rank", None),
            "text": str(error),
            "kind": type(error).__name__,
        }
    return {"text": "no error"}


@pytest.mark.slow
def test_a_rank_that_evaluates_alone_is_told() -> None:
    first, _ = run_ranks(2, evaluates_alone, timeout=90)
    assert re.search(r"has waited 10 s in dispatch #1 of layer 0 .* for rank 1", first.err), str(first)
    assert (first.value["kind"], first.value["rank"]) == ("CommTimeoutError", 1), first.value
    assert TIMEOUT_S - 1 < first.value["seconds"] < TIMEOUT_S + DEAD_S
    assert "dispatch #1 of layer 0" in first.value["text"]
