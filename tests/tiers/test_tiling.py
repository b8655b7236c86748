# SPDX-License-Identifier: Apache-2.0
"""Tiles of matrices and of sequences under ZeRO."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import zeropp
from disk import scratch
from ranks import on_ranks
from torch import Tensor, nn
from zeropp import Offload
from zeropp.nn import TiledLinear, tile_linears, tile_sequence
from zeropp.zero.engine import engine_of

WIDTH, TILES = 256, 4


class Wide(nn.Module):
    """One matrix that is most of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.last = nn.Linear(4 * WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.wide(self.first(x)))).square().mean()


def wide_losses(tile: bool, **config: Any) -> tuple[list[float], int]:
    """Losses of three steps, and the most bytes of parameters that were in memory at once, where that is counted."""
    torch.manual_seed(0)
    model: Any = Wide()
    if tile:
        assert tile_linears(model, 4 * WIDTH * 4 * WIDTH // TILES) == ["wide"]
        assert isinstance(model.wide, TiledLinear) and len(model.wide.tiles) == TILES
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, adam = zeropp.prepare(model, adam, zeropp.Config(units=("Linear",), prefetch=0, **config))
    losses = []
    for step in range(3):
        draw = torch.Generator().manual_seed(10 * step + dist.get_rank())
        loss = model(torch.randn(4, WIDTH, generator=draw))
        loss.backward()
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
        del loss
    tier = engine_of(model).params
    return losses, tier.figures()["acquired_peak_bytes"] if tier.in_file else 0


@on_ranks(1, 2)
def test_tiles_come_and_go() -> None:
    """A tile is in memory when it is used, not the matrix: in forward and in backward, the same losses in every tier."""
    with scratch() as path:
        plain, _ = wide_losses(False, stage=3)
        wanted, _ = wide_losses(True, stage=0)
        assert all(abs(a - b) <= 1e-5 * abs(b) for a, b in zip(wanted, plain, strict=True)), (wanted, plain)
        assert wide_losses(True, stage=3)[0] == wanted
        if dist.get_world_size() > 1:
            assert wide_losses(True, stage=3, host_copy="off")[0] == wanted
        losses, peak = wide_losses(True, stage=3, offload=Offload(params="nvme", optimizer="nvme", path=path))
        assert losses == wanted
        matrix = 4 * WIDTH * 4 * WIDTH
        assert peak < matrix * 5 // 8, (peak, matrix)
        _, untiled = wide_losses(False, stage=3, offload=Offload(params="nvme", path=path))
        assert untiled >= matrix


def llama_losses(tile: bool, **config: Any) -> list[Any]:
    import transformers

    torch.manual_seed(0)
    shape = transformers.LlamaConfig(
        vocab_size=80, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True, pad_token_id=0,
    )  # fmt: skip
    model: Any = transformers.LlamaForCausalLM(shape)
    if tile:
        assert len(tile_sequence(model, mlp_tile=8, loss_tile=8).mlps) == 2
    model.train()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, adam = zeropp.prepare(model, adam, zeropp.Config(**config))
    seen = []
    for step in range(3):
        draw = torch.Generator().manual_seed(10 * step + dist.get_rank())
        rows = torch.randint(1, 80, (2, 21), generator=draw)
        out = model(input_ids=rows, labels=rows)
        out.loss.backward()
        seen += [out.loss.item(), adam.clip_grad_norm_(1.0)]
        adam.step()
        adam.zero_grad()
        del out
    return seen


@on_ranks(1, 2)
def test_sequences_in_tiles() -> None:
    """The head is tied to the embedding, and partitioned: the tiled loss reads it outside of its module."""
    with scratch() as path:
        wanted = llama_losses(True, stage=0)
        plain = llama_losses(False, stage=0)
        assert all(abs(a - b) <= 1e-4 * abs(b) for a, b in zip(wanted, plain, strict=True)), (wanted, plain)
        every = Offload(params="nvme", optimizer="nvme", activations="nvme", path=path)
        for config in ({"stage": 2}, {"stage": 3, "host_copy": "off"}, {"stage": 3, "offload": every}):
            assert llama_losses(True, **config) == wanted, config
