# SPDX-License-Identifier: Apache-2.0
"""Random layer-token dropping in a whole model: forward and backward with half of the tokens in 10 of 12 layers.

Against the same model with all tokens, and against the same dropping by torch's index operations. A layer's cost in tokens gives the
limit 12 / (10 / 2 + 2) = 1.71 of the ratio to all tokens. Attention, whose cost grows with the square of the tokens, saves more.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import zeropp
from harness import ROOT, Need, Run, alternate, timed
from torch import Tensor, nn

CLAIM = "Half of the tokens in 10 of 12 layers: >= 0.9 of the arithmetic 1.71x, and >= 1.1x torch's index operations."
NEEDS: tuple[Need, ...] = ()
LAYERS = 12
LIMIT = LAYERS / ((LAYERS - 2) / 2 + 2)


def model_of(width: int, seq: int, efficiency: zeropp.Efficiency | None) -> Any:
    sys.path.insert(0, str(ROOT / "examples"))
    from gpt import GPT, GPTConfig

    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=LAYERS, heads=width // 32, width=width, context=seq))
    return zeropp.prepare(model, None, zeropp.Config(stage=0, device="cpu", efficiency=efficiency))[0]


class TorchDrop:
    """The two hooks with torch's index operations."""

    def __init__(self, layer: nn.Module, keep: int) -> None:
        self.keep = keep
        self.full = self.at = torch.empty(0)
        layer.register_forward_pre_hook(self.before)
        layer.register_forward_hook(self.after)

    def before(self, layer: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        self.full = args[0]
        batch, seq, width = self.full.shape
        kept = torch.rand(batch, seq).topk(self.keep, dim=1, sorted=False).indices.sort(1).values
        self.at = kept[:, :, None].expand(-1, -1, width)
        return (self.full.gather(1, self.at),)

    def after(self, layer: nn.Module, args: Any, part: Tensor) -> Tensor:
        return self.full.scatter(1, self.at, part)


def step(model: Any, rows: Tensor) -> None:
    model.zero_grad()
    model(rows[:, :-1], rows[:, 1:]).backward()


def run(bench: Run) -> None:
    torch.set_num_threads(1)
    for width, seq, batch in ((64, 256, 8),) if bench.quick else ((64, 256, 8), (256, 256, 4)):
        measure(bench, width, seq, batch)


def measure(bench: Run, width: int, seq: int, batch: int) -> None:
    keep = seq // 2
    rows = torch.randint(0, 256, (batch, seq + 1), generator=torch.Generator().manual_seed(1))
    ours = model_of(width, seq, zeropp.Efficiency(token_drop=zeropp.TokenDrop(keep=lambda step: keep)))
    full, theirs = model_of(width, seq, None), model_of(width, seq, None)
    lengths: list[int] = []
    for model in (ours, theirs):
        layers = [one for one in model.modules() if type(one).__name__ == "Block"]
        for layer in layers[1:-1] if model is theirs else ():
            TorchDrop(layer, keep)
        for layer in layers:
            layer.up.register_forward_pre_hook(lambda m, args: lengths.append(args[0].shape[1]))
        step(model, rows)
    bench.check(lengths == [seq, *[keep] * 10, seq] * 2, f"layers worked on {lengths} tokens")
    for model in (ours, theirs):
        for layer in (one for one in model.modules() if type(one).__name__ == "Block"):
            layer.up._forward_pre_hooks.clear()
    contenders = {
        "ours": timed(lambda: step(ours, rows)),
        "all tokens": timed(lambda: step(full, rows)),
        "torch index": timed(lambda: step(theirs, rows)),
    }
    samples = alternate(contenders, rounds=9 if bench.quick else 15, warmup=2)
    samples["all tokens, arithmetic"] = [one / LIMIT for one in samples["all tokens"]]
    bench.compare(
        f"{keep} of {seq} tokens, {batch} sequences, width {width}, 10 of 12 layers, 1 thread", samples,
        ours="ours", peers=["all tokens", "torch index"], unit="ms", limit="all tokens, arithmetic",
    )  # fmt: skip
