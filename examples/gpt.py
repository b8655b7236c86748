# SPDX-License-Identifier: Apache-2.0
"""A byte-level GPT in plain PyTorch: the model of the examples. It does not import zeropp.

Pre-norm blocks, GELU, torch's fused attention, learned positions, and one matrix that is both embedding and head
(tied), which is what makes it a fair test of anything that partitions parameters. Tokens are bytes, so there is no
tokenizer and the loss is in nats a byte.
Shapes: B sequences, T tokens, D width, H heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256  # bytes


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The sizes of a model."""

    layers: int
    heads: int
    width: int
    context: int


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model with suitable training settings."""

    model: GPTConfig
    steps: int
    batch: int  # sequences a rank and step
    lr: float  # peak learning rate


PRESETS = {
    "small": Preset(model=GPTConfig(layers=4, heads=4, width=128, context=64), steps=600, batch=12, lr=2e-3),
    "base": Preset(model=GPTConfig(layers=8, heads=8, width=512, context=512), steps=2000, batch=8, lr=1e-3),
    "large": Preset(model=GPTConfig(layers=12, heads=12, width=768, context=1024), steps=10000, batch=8, lr=6e-4),
}


STATE_BYTES = 16
"""Model states of a parameter in fp32: itself, its gradient, and Adam's two moments."""


def larger_than(memory_bytes: int, context: int = 256) -> GPTConfig:
    """Return the smallest model of usual proportions (a layer for every 64 of width, at most) whose states are a quarter more
    than ``memory_bytes``."""
    wanted = memory_bytes * 5 // 4 // STATE_BYTES
    width = 128
    while True:
        layers = max(2, -(-(wanted - (VOCABULARY + context) * width) // (12 * width * width)))
        if layers <= max(2, width // 64):
            return GPTConfig(layers=layers, heads=width // 64, width=width, context=context)
        width += 128


class Block(nn.Module):
    """One transformer layer: attention and MLP, each behind a norm and beside a skip."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        b, t, d = x_BTD.shape
        q, k, v = self.qkv(self.norm_1(x_BTD)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(attended.transpose(1, 2).reshape(b, t, d))
        return x_BTD + self.down(F.gelu(self.up(self.norm_2(x_BTD))))


class GPT(nn.Module):
    """Bytes in, next-byte logits out; with targets, the mean cross-entropy in nats a byte."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        """Initialise as GPT-2: normal(0.02), and smaller where a block adds to the residual, so that depth does not grow
        the sum."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Block):
            for linear in (module.out, module.down):
                nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * self.config.layers))

    def forward(self, bytes_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        t = bytes_BT.shape[1]
        x_BTD = self.tokens(bytes_BT) + self.positions(torch.arange(t, device=bytes_BT.device))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits = self.head(self.norm(x_BTD))
        if targets_BT is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten())


@torch.no_grad()
def generate(
    model: nn.Module, prompt: bytes, length: int, *, context: int, device: torch.device, temperature: float = 0.8
) -> bytes:
    """Continue `prompt` by `length` bytes. Every rank calls it and gets the same bytes: each draws from the same
    seed."""
    draw = torch.Generator().manual_seed(0)
    text = list(prompt)
    for _ in range(length):
        window = torch.tensor([text[-context:]], device=device)
        logits = model(window)[0, -1].float().cpu() / temperature
        text.append(int(torch.multinomial(logits.softmax(-1), 1, generator=draw)))
    return bytes(text)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Return the rate: linear warm-up over the first twentieth, then a cosine down to a twentieth of the peak. It depends on
    the step alone."""
    warm = max(1, steps // 20)
    if step < warm:
        return peak * (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
