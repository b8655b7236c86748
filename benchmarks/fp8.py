# SPDX-License-Identifier: Apache-2.0
"""Block quantisation to 8-bit floats against the same arithmetic in torch operations, which are given memory to reuse."""

from __future__ import annotations

from collections.abc import Callable

import torch
from harness import Need, Run, alternate, repeat_for, timed
from torch import Tensor

CLAIM = "8-bit floats in blocks of 256: >= 2x torch in cache, >= 3x at 16M."
NEEDS: tuple[Need, ...] = ()
BLOCK = 256
SIZES = {"64K": 1 << 16, "1M": 1 << 20, "16M": 1 << 24}
DTYPES = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}


class TorchPeer:
    """The peer: torch operations into existing memory (fresh memory costs page faults)."""

    def __init__(self, elems: int, form: str) -> None:
        dtype, self.most = DTYPES[form]
        self.wide = torch.empty(elems // BLOCK, BLOCK)
        self.scales, self.inverse = torch.empty(elems // BLOCK, 1), torch.empty(elems // BLOCK, 1)
        self.codes = torch.empty(elems // BLOCK, BLOCK, dtype=torch.uint8).view(dtype)

    def quantise(self, x: Tensor) -> None:
        blocks = x.view(-1, BLOCK)
        torch.abs(blocks, out=self.wide)
        torch.amax(self.wide, dim=1, keepdim=True, out=self.scales)
        self.scales.div_(self.most).clamp_min_(2.0**-126)
        torch.reciprocal(self.scales, out=self.inverse)
        torch.mul(blocks, self.inverse, out=self.wide)
        self.wide.clamp_(-self.most, self.most)
        self.codes.copy_(self.wide)

    def dequantise(self, out: Tensor) -> None:
        out.view(-1, BLOCK).copy_(self.codes).mul_(self.scales)


def run(bench: Run) -> None:
    torch.set_num_threads(1)
    for size, elems in SIZES.items():
        if not (bench.quick and size == "1M"):
            for form in DTYPES:
                measure(bench, size, elems, form)


def measure(bench: Run, size: str, elems: int, form: str) -> None:
    """Both ways at one size."""
    import zeropp

    x, out, ours_out = torch.randn(elems), torch.zeros(elems), torch.zeros(elems)
    peer, q = TorchPeer(elems, form), zeropp.ops.Fp8.empty(elems, format=form, block_elems=BLOCK)
    zeropp.ops.fp8_quantise_(x, q)
    peer.quantise(x)
    same = torch.equal(q.codes.view(torch.uint8), peer.codes.view(torch.uint8).flatten())
    bench.check(
        same and torch.equal(q.scales, peer.scales.flatten()), f"{form} {size}: codes or scales differ from torch's"
    )
    zeropp.ops.fp8_dequantise_(q, ours_out)
    peer.dequantise(out)
    bench.check(torch.equal(out, ours_out), f"{form} {size}: values differ from torch's")
    touched = torch.zeros(2, 5 * elems // 2, dtype=torch.uint8)
    calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "quantise": (lambda: zeropp.ops.fp8_quantise_(x, q), lambda: peer.quantise(x)),
        "dequantise": (lambda: zeropp.ops.fp8_dequantise_(q, ours_out), lambda: peer.dequantise(out)),
    }
    for what, (ours, theirs) in calls.items():
        repeat = repeat_for(ours, 5.0)
        contenders = {
            "ours": timed(ours, repeat=repeat),
            "torch": timed(theirs, repeat=1 if elems > 1 << 20 else repeat),
            "copy": timed(lambda: touched[0].copy_(touched[1]), repeat=repeat),
        }
        samples = alternate(contenders, rounds=7 if bench.quick else 15)
        rate = {name: [elems / ms / 1e3 for ms in values] for name, values in samples.items()}
        bench.compare(
            f"{what} fp32 {form} {size}", rate, ours="ours", peers=["torch"], unit="Melem/s", limit="copy",
            better="higher",
        )  # fmt: skip
