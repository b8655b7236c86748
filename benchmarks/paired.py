# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the benchmarks of collectives: contenders on the same tensors in one process, in turns.

Results are compared with gloo's before anything is timed. Contenders take turns in an order drawn anew each round, a barrier before each
turn; a turn is `case.repeat` calls. A time is the slowest rank's.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from turns import TWINS, alone

Call = Callable[[], Any]


class Case(Protocol):
    """A row or a few."""

    @property
    def name(self) -> str: ...

    @property
    def repeat(self) -> int:
        """Calls a turn."""
        ...


class Paired(ABC):
    """One rank. A subclass sets `torch`, `dist` (whose default group is gloo's) and `door` (a Communicator of all ranks), and has the cases'
    tensors and calls.
    """

    torch: Any
    dist: Any
    door: Any
    rank: int
    ranks: int

    @abstractmethod
    def tensors(self, case: Any) -> tuple[Any, Any]:
        """(tensor or output, input)."""

    @abstractmethod
    def calls(self, case: Any, output: Any, source: Any) -> dict[str, Call]:
        """One call of each contender, "gloo" among them."""

    @abstractmethod
    def limit(self, case: Any, output: Any) -> tuple[str, Call] | None:
        """Return the name and the call of what bounds all contenders, measured beside them; None where nothing does."""

    def result(self, case: Any, output: Any) -> Any:
        """Return the part of the output that is defined on this rank."""
        return output

    def gathered(self, mine: Any) -> list[Any]:
        """An object of every rank."""
        objects = [None] * self.ranks
        self.dist.all_gather_object(objects, mine)
        return objects

    def fill(self, tensor: Any) -> None:
        """Values that tell ranks and places apart."""
        generator = self.torch.Generator().manual_seed(self.rank)
        tensor.copy_(self.torch.rand(tensor.numel(), generator=generator))

    def check(self, case: Case, calls: Mapping[str, Call], output: Any, source: Any) -> str:
        """Empty, or which contender computes something else."""
        results = {}
        for name, call in calls.items():
            self.fill(source)
            self.fill(output)
            call()
            results[name] = self.result(case, output).clone()
        for name, result in results.items():
            if not self.torch.allclose(result, results["gloo"], rtol=1e-5, atol=1e-6):
                off = float((result - results["gloo"]).abs().max())
                return f"{case.name}, rank {self.rank}: {name} and gloo disagree by {off}"
        return ""

    def turn(self, call: Call, repeat: int, reset: Any) -> float:
        """Microseconds a call. Tensors that are reduced in place again and again would overflow, so they begin at 0."""
        reset.zero_()
        self.door.barrier()
        start = time.perf_counter_ns()
        for _ in range(repeat):
            call()
        return (time.perf_counter_ns() - start) / 1e3 / repeat

    def measure(self, case: Case, rounds: int) -> dict[str, Any]:
        """Microseconds a call of each contender, round by round."""
        output, source = self.tensors(case)
        calls = self.calls(case, output, source)
        wrong = next(filter(None, self.gathered(self.check(case, calls, output, source))), "")
        bound = None if alone() else self.limit(case, output)
        if bound is not None:
            calls[bound[0]] = bound[1]
        order = [name for name in calls if name == "ours" or not alone()]
        rng = random.Random(case.name)  # the same on every rank
        samples: dict[str, list[float]] = {name: [] for name in order}
        for index in range(rounds + 1):
            rng.shuffle(order)
            for name in order:
                with TWINS.turn():
                    micros = self.torch.tensor(self.turn(calls[name], case.repeat, output))
                    self.door.all_reduce(micros, "max")
                if index:
                    samples[name].append(float(micros))
        return {"wrong": wrong, "samples": samples}
