# SPDX-License-Identifier: Apache-2.0
"""Quantised collectives beside exact ones of zeropp and of gloo: the bytes that travel, and what they cost in time.

Through shared memory a byte costs less than its rounding, so time is shown, not claimed; the claim is bytes, which count
where links are slow. Row "bytes" compares counted bytes with bf16's: 2 for int8 and 4 for int4, but for the scales.
"""

from __future__ import annotations

from typing import Any

import torch
from harness import Need, Row, Run, alternate, timed

CLAIM = "Quantised all-gather moves exactly 1/2 (int8) and 1/4 (int4) of bf16, plus 4 bytes a block of 256."
NEEDS: tuple[Need, ...] = ()
BLOCK = 256
ELEMS = 4 << 20


def run(bench: Run) -> None:
    for ranks in (2,) if bench.quick else (2, 3, 4):
        report(bench, ranks, bench.launch("measure", ranks=ranks, args={"rounds": 7 if bench.quick else 15}))


def report(bench: Run, ranks: int, results: list[Any]) -> None:
    """The rows of one world size; time is the slowest rank's."""
    for bits in (8, 4):
        for coll in ("all_gather", "reduce_scatter"):
            counted = results[0]["bytes"][f"{coll} {bits}"]
            exact, elems = (ranks - 1) * ELEMS * 2, (ranks - 1) * ELEMS
            wanted = elems * bits // 8 + 4 * elems // BLOCK
            bench.check(counted == wanted, f"{coll} int{bits}: {counted} bytes counted, wanted {wanted}")
            ratio = exact / counted
            case = f"{coll} bf16 8 MB a rank int{bits} {ranks} ranks bytes"
            bench.report(
                Row(bench=bench.name, case=case, ours=counted, peer=exact, peer_name="bf16", unit="bytes", ratio=ratio,
                    ratio_low=ratio, ratio_high=ratio, rounds=1, limit=exact * bits / 16, limit_name="codes alone",
                    of_limit=exact * bits / 16 / counted)
            )  # fmt: skip
            samples = {
                name: [max(values) for values in zip(*(r["ms"][f"{coll} {bits}"][name] for r in results), strict=True)]
                for name in ("ours", "zeropp exact", "gloo")
            }
            bench.compare(
                f"{coll} bf16 8 MB a rank int{bits} {ranks} ranks", samples, ours="ours", peers=["zeropp exact", "gloo"],
                unit="ms",
            )  # fmt: skip


def measure(args: dict[str, Any]) -> dict[str, Any]:
    """One rank."""
    import torch.distributed as dist
    import zeropp

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    comm = zeropp.comm.Communicator()
    mine = torch.randn(ELEMS, generator=torch.Generator().manual_seed(comm.rank)).bfloat16()
    all_ = torch.empty(ELEMS * comm.ranks, dtype=torch.bfloat16)
    sliced = torch.randn(ELEMS * comm.ranks, generator=torch.Generator().manual_seed(comm.rank)).bfloat16()
    answer: dict[str, Any] = {"bytes": {}, "ms": {}}
    for bits in (8, 4):

        def gather(bits: int = bits) -> object:
            return comm.all_gather_quantised(all_, mine, bits=bits, block_elems=BLOCK)

        def scatter(bits: int = bits) -> object:
            return comm.reduce_scatter_quantised(mine, sliced, bits=bits, block_elems=BLOCK)

        cases = {
            "all_gather": (
                gather,
                lambda: comm.all_gather(all_, mine),
                lambda: dist.all_gather_into_tensor(all_, mine),
            ),
            "reduce_scatter": (
                scatter,
                lambda: comm.reduce_scatter(mine, sliced),
                lambda: dist.reduce_scatter_tensor(mine, sliced),
            ),
        }
        for coll, (ours, exact, gloo) in cases.items():
            before = comm.traffic()[coll]["bytes"]
            ours()
            answer["bytes"][f"{coll} {bits}"] = comm.traffic()[coll]["bytes"] - before
            contenders = {
                name: timed(call, prepare=comm.barrier)
                for name, call in (("ours", ours), ("zeropp exact", exact), ("gloo", gloo))
            }
            answer["ms"][f"{coll} {bits}"] = alternate(contenders, rounds=int(args["rounds"]))  # one order on all ranks
    dist.destroy_process_group()
    return answer
