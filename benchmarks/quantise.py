# SPDX-License-Identifier: Apache-2.0
"""Block quantisation against the same arithmetic in torch operations, which are given memory to reuse."""

from __future__ import annotations

from collections.abc import Callable

import torch
from harness import Need, Run, alternate, repeat_for, timed
from torch import Tensor

CLAIM = "Quantise and dequantise in blocks of 256: >= 2x torch in cache, >= 4x at 16M, >= 0.6 of a copy of the bytes."
NEEDS: tuple[Need, ...] = ()
BLOCK = 256
SIZES = {"64K": 1 << 16, "1M": 1 << 20, "16M": 1 << 24}


class TorchPeer:
    """Symmetric block quantisation with torch operations into memory that is there (fresh memory costs page faults)."""

    def __init__(self, elems: int, bits: int) -> None:
        self.bits, self.levels = bits, 127 if bits == 8 else 7
        self.wide, self.other = torch.empty(elems // BLOCK, BLOCK), torch.empty(elems // BLOCK, BLOCK)
        self.scales, self.inverse = torch.empty(elems // BLOCK, 1), torch.empty(elems // BLOCK, 1)
        self.codes = torch.empty(elems // BLOCK, BLOCK, dtype=torch.int8)
        self.high = torch.empty(elems // 2, dtype=torch.int8)
        self.packed = torch.empty(elems // 2, dtype=torch.int8)

    def quantise(self, x: Tensor) -> None:
        blocks = x.view(-1, BLOCK)
        torch.abs(blocks, out=self.wide)
        torch.amax(self.wide, dim=1, keepdim=True, out=self.scales)
        self.scales.div_(self.levels).clamp_min_(2.0**-126)
        torch.reciprocal(self.scales, out=self.inverse)
        torch.mul(blocks, self.inverse, out=self.wide)
        self.wide.round_()
        self.codes.copy_(self.wide)
        if self.bits == 4:
            pairs = self.codes.view(-1, 2)
            torch.bitwise_left_shift(pairs[:, 1], 4, out=self.high)
            torch.bitwise_and(pairs[:, 0], 15, out=self.packed)
            self.packed.bitwise_or_(self.high)

    def dequantise(self, out: Tensor, accumulate: bool) -> None:
        if self.bits == 4:
            pairs = self.codes.view(-1, 2)
            torch.bitwise_left_shift(self.packed, 4, out=self.high)
            torch.bitwise_right_shift(self.high, 4, out=self.high)
            pairs[:, 0].copy_(self.high)
            torch.bitwise_right_shift(self.packed, 4, out=self.high)
            pairs[:, 1].copy_(self.high)
        blocks = out.view(-1, BLOCK)
        if accumulate:
            self.other.copy_(self.codes)
            blocks.addcmul_(self.other, self.scales)
        else:
            torch.mul(self.codes, self.scales, out=blocks)


def run(bench: Run) -> None:
    torch.set_num_threads(1)
    for size, elems in SIZES.items():
        if not (bench.quick and size == "64K"):
            measure(bench, size, elems)


def measure(bench: Run, size: str, elems: int) -> None:
    """Measure all cases of one size."""
    import zeropp
    from zeropp.ops import Quantised

    x, out, ours_out = torch.randn(elems), torch.zeros(elems), torch.zeros(elems)
    for bits in (8, 4):
        peer, q = TorchPeer(elems, bits), Quantised.empty(elems, bits=bits, block_elems=BLOCK)
        zeropp.ops.quantise_(x, q)
        peer.quantise(x)
        bench.check(torch.equal(q.scales, peer.scales.flatten()), f"int{bits} {size}: scales differ from torch's")
        codes = q.codes if bits == 8 else q.codes.view(torch.int8)
        theirs = peer.codes.flatten() if bits == 8 else peer.packed
        bench.check(torch.equal(codes, theirs), f"int{bits} {size}: codes differ from torch's")
        zeropp.ops.dequantise_(q, ours_out)
        peer.dequantise(out, False)
        bench.check(torch.equal(out, ours_out), f"int{bits} {size}: values differ from torch's")
        # a copy that touches as many bytes as the operation: half of them read, half written
        code_bytes = elems * bits // 8

        def copier(touched: int) -> Callable[[], object]:
            src, dst = (torch.zeros(touched // 2, dtype=torch.uint8) for _ in range(2))
            return lambda: dst.copy_(src)

        cases: dict[str, tuple[Callable[[], object], Callable[[], object], int]] = {
            "quantise": (
                lambda q=q: zeropp.ops.quantise_(x, q),  # type: ignore[misc]
                lambda peer=peer: peer.quantise(x),  # type: ignore[misc]
                4 * elems + code_bytes,
            ),
            "dequantise": (
                lambda q=q: zeropp.ops.dequantise_(q, ours_out),  # type: ignore[misc]
                lambda peer=peer: peer.dequantise(out, False),  # type: ignore[misc]
                4 * elems + code_bytes,
            ),
            "accumulate": (
                lambda q=q: zeropp.ops.dequantise_(q, ours_out, accumulate=True),  # type: ignore[misc]
                lambda peer=peer: peer.dequantise(out, True),  # type: ignore[misc]
                8 * elems + code_bytes,
            ),
        }
        for what, (ours, theirs_call, touched) in cases.items():
            copy = copier(touched)
            repeat = repeat_for(ours, 5.0)
            contenders = {
                "ours": timed(ours, repeat=repeat),
                "torch": timed(theirs_call, repeat=1 if elems > 1 << 20 else repeat),
                "copy": timed(copy, repeat=repeat),
            }
            samples = alternate(contenders, rounds=7 if bench.quick else 15, ours=["ours"])
            rate = {name: [elems / ms / 1e3 for ms in values] for name, values in samples.items()}
            bench.compare(
                f"{what} fp32 int{bits} {size}", rate, ours="ours", peers=["torch"], unit="Melem/s", limit="copy",
                better="higher",
            )  # fmt: skip
