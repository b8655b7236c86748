# SPDX-License-Identifier: Apache-2.0
"""Tokens for heads, as before a layer's attention: q, k and v of a rank's tokens become all tokens of its heads, in bf16 on two ranks.

Ours is one exchange of what each rank needs (zeropp.comm.heads.to_heads). The peers do what DeepSpeed 0.19.8's UlyssesSPAttentionHF does, step
by step: heads of keys repeated up to the number of ranks, three all-to-alls, each rearranged before and after, and an all-gather of the
positions; over gloo, and over zeropp's own group. Results are compared before anything is timed. The limit is one strided copy of what
a rank holds into new memory, which any exchange has to make at least: its results are new tensors, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from harness import Run
from paired import Paired

CLAIM = "q, k and v to heads: 3x three all-to-alls over gloo, 1.5x the same over our group, 0.4 of one strided copy"
NEEDS = ()
WIDTH = 64


@dataclass(frozen=True)
class Case:
    """A row or a few: heads of queries and of keys, and tokens of the whole sequence."""

    heads: int
    kv_heads: int
    tokens: int
    ranks: int = 2
    repeat: int = 3

    @property
    def name(self) -> str:
        return f"{self.heads} heads over {self.kv_heads}, {self.tokens} tokens, {self.ranks} ranks"


def cases(quick: bool) -> list[Case]:
    shapes = [Case(16, 16, 2048), Case(16, 4, 8192), Case(16, 1, 32768)]
    more = [Case(16, 16, 32768), Case(16, 4, 2048), Case(16, 1, 2048), Case(12, 4, 8192, ranks=4)]
    return shapes if quick else shapes + more


class Bench(Paired):
    """The state of a rank."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist
        import zeropp

        torch.set_num_threads(1)
        self.torch, self.dist = torch, dist
        dist.init_process_group("gloo")
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.zeropp = dist.new_group(list(range(self.ranks)), backend="zeropp")
        self.door = zeropp.comm.Communicator(self.zeropp)

    def tensors(self, case: Case) -> tuple[Any, Any]:
        """(what all results go into, one after the other; what q, k and v lie in)."""
        own, all_kv = case.tokens // self.ranks, max(case.kv_heads // self.ranks, 1)
        result = self.torch.empty(
            case.tokens * (case.heads // self.ranks + 2 * all_kv) * WIDTH, dtype=self.torch.bfloat16
        )
        return result, self.torch.empty(own * (case.heads + 2 * case.kv_heads) * WIDTH, dtype=self.torch.bfloat16)

    def calls(self, case: Case, output: Any, source: Any) -> dict[str, Callable[[], Any]]:
        from zeropp.comm.heads import Cut, key_spans, query_spans, to_heads

        own = case.tokens // self.ranks
        sizes = [own * heads * WIDTH for heads in (case.heads, case.kv_heads, case.kv_heads)]
        states = [one.view(1, own, -1, WIDTH).transpose(1, 2) for one in source.split(sizes)]
        cut = Cut(self.zeropp, (own,) * self.ranks)
        spans = query_spans(case.heads, self.ranks)
        shared = key_spans(spans, case.heads // case.kv_heads)
        positions = self.torch.arange(own)[None]
        self.found: Any = None

        def ours() -> None:
            self.found = to_heads(cut, states, (spans, shared, shared))

        def peer(group: Any) -> Callable[[], None]:
            def call() -> None:
                self.found = [self.by_one(one, group) for one in states]
                every = [self.torch.empty_like(positions) for _ in range(self.ranks)]
                self.dist.all_gather(every, positions, group=group)
                self.torch.cat(every, 1)

            return call

        return {"ours": ours, "gloo": peer(None), "zeropp all_to_all": peer(self.zeropp)}

    def by_one(self, one: Any, group: Any) -> Any:
        """One tensor to heads, as DeepSpeed's _DimZeroAllToAll and what surrounds it do."""
        rows, heads, own, width = one.shape
        one = one.permute(2, 0, 1, 3)
        if heads < self.ranks:
            one, heads = one.repeat_interleave(self.ranks // heads, dim=2), self.ranks
        sent = one.reshape(own, rows, self.ranks, heads // self.ranks, width).permute(2, 0, 1, 3, 4).contiguous()
        came = self.torch.empty_like(sent)
        self.dist.all_to_all_single(came, sent, group=group)
        whole = came.reshape(self.ranks * own, rows, heads // self.ranks, width).contiguous()
        return whole.permute(1, 2, 0, 3).contiguous()

    def result(self, case: Case, output: Any) -> Any:
        return self.torch.cat([one.reshape(-1) for one in self.found]).float()

    def limit(self, case: Case, output: Any) -> tuple[str, Callable[[], Any]] | None:
        source = self.torch.zeros(
            case.tokens // self.ranks * (case.heads + 2 * case.kv_heads) * WIDTH, dtype=self.torch.bfloat16
        )
        rows = source.view(case.tokens // self.ranks, case.heads + 2 * case.kv_heads, WIDTH).transpose(0, 1)
        return "one strided copy", rows.contiguous


def worker(args: Mapping[str, Any]) -> list[Any]:
    bench = Bench()
    rows = [bench.measure(Case(**case), args["rounds"]) for case in args["cases"]]
    bench.dist.barrier()
    return rows


def run(bench: Run) -> None:
    for ranks in sorted({case.ranks for case in cases(bench.quick)}):
        chosen = [case for case in cases(bench.quick) if case.ranks == ranks]
        args = {"cases": [dataclasses.asdict(case) for case in chosen], "rounds": 9 if bench.quick else 25}
        results = bench.launch("worker", ranks=ranks, args=args)
        for case, found in zip(chosen, results[0], strict=True):
            bench.check(not found["wrong"], found["wrong"])
            bench.compare(
                case.name,
                found["samples"],
                ours="ours",
                peers=("gloo", "zeropp all_to_all"),
                unit="us",
                limit="one strided copy",
            )
