# SPDX-License-Identifier: Apache-2.0
"""Global gradient norm with a check for what is not finite, over lists of 1,000 tensors, against torch's own.

torch's raises where the norm is not finite and cannot say which tensor it was; ours counts by tensor in the same pass.
Both end in a number in Python, as clipping needs it.
"""

from __future__ import annotations

import math

import torch
from harness import Need, Run, alternate, repeat_for, timed
from torch import Tensor
from torch.nn.utils import get_total_norm

CLAIM = (
    "Norm and check of 1,000 tensors, 64 elements each and 100M in all: >= 3x get_total_norm(error_if_nonfinite=True)."
)
NEEDS: tuple[Need, ...] = ()
TENSORS = 1000


def ours(tensors: list[Tensor]) -> float:
    """The norm; raises where an element is not finite."""
    import zeropp

    sums, nonfinite = zeropp.ops.norm_squares(tensors)
    if nonfinite.any():
        raise ValueError(f"{int(nonfinite.count_nonzero())} tensors are not finite")
    return math.sqrt(sums.sum().item())


def theirs(tensors: list[Tensor]) -> float:
    return float(get_total_norm(tensors, error_if_nonfinite=True))


def run(bench: Run) -> None:
    torch.manual_seed(0)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for name, elems in (("64 elements each", 64), ("100M in all", 100_000)):
            measure(bench, name, elems, threads)


def measure(bench: Run, name: str, elems: int, threads: int) -> None:
    """One length of tensors; beside 100M of them, a sum, which reads as much and does less."""
    case = f"fp32 {TENSORS} tensors, {name}, {threads} thread{'s' if threads > 1 else ''}"
    flat = torch.randn(TENSORS * elems)
    tensors = list(flat.split(elems))
    mine, other = ours(tensors), theirs(tensors)
    bench.check(abs(mine - other) <= 1e-4 * other, f"{case}: the norm is {mine}, torch says {other}")
    flat[7 * elems] = math.inf
    for call in (ours, theirs):
        try:
            call(tensors)
        except (ValueError, RuntimeError):
            continue
        bench.check(False, f"{case}: an infinity was not seen")
    flat[7 * elems] = 0.0
    repeat = repeat_for(lambda: ours(tensors), 5.0)
    contenders = {
        "ours": timed(lambda: ours(tensors), repeat=repeat),
        "torch get_total_norm": timed(lambda: theirs(tensors), repeat=repeat),
    }
    limit = None
    if elems > 64:
        limit = "torch sum"
        contenders[limit] = timed(lambda: flat.sum().item(), repeat=repeat)
    samples = alternate(contenders, rounds=5 if bench.quick else 15)
    bench.compare(case, samples, ours="ours", peers=["torch get_total_norm"], unit="ms", limit=limit)
