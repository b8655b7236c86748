# SPDX-License-Identifier: Apache-2.0
"""The calls of HelloDeepSpeed's train_bert_ds.py: hello_bert.py RESULT FOLDER. It trains, saves, and goes on from what it saved."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import log_dist
from torch import nn


class Masked(nn.Module):
    """A small encoder with the loss of masked words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 16)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 1, enable_nested_tensor=False
        )
        self.head = nn.Linear(16, 40)

    def forward(self, src_tokens: torch.Tensor, tgt_tokens: torch.Tensor) -> torch.Tensor:
        found = self.head(self.encoder(self.words(src_tokens)))
        return nn.functional.cross_entropy(found.float().flatten(0, 1), tgt_tokens.flatten(), ignore_index=0)


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
    found = []
    for _ in range(count):
        words = torch.randint(1, 40, (4, 1), generator=draw).expand(4, 8)
        found.append({"src_tokens": words.where(torch.rand(4, 8, generator=draw) > 0.2, 0), "tgt_tokens": words})
    return found


def train(folder: Path, load: bool) -> list[float]:
    device = (
        torch.device(get_accelerator().device_name(), 0) if get_accelerator().is_available() else torch.device("cpu")
    )
    torch.manual_seed(42)
    model = Masked()
    log_dist("Creating DeepSpeed engine", ranks=[0], level=logging.INFO)
    model, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
        },
    )
    start = 1
    if load:
        _, client = model.load_checkpoint(load_dir=folder)
        start = client["checkpoint_step"] + 1
    assert sum(p.numel() for p in model.parameters()) > 1000
    model.train()
    losses = []
    for step, batch in enumerate(batches(9)[start - 1 :], start=start):
        for key, value in batch.items():
            batch[key] = value.to(device)
        loss = model(**batch)
        model.backward(loss)
        model.step()
        losses.append(loss.item())
        if step % 5 == 0 and not load:
            model.save_checkpoint(save_dir=folder, client_state={"checkpoint_step": step})
            log_dist(f"Saved model to {folder}", ranks=[0], level=logging.INFO)
    return losses


if __name__ == "__main__":
    losses = train(Path(sys.argv[2]), load=False)
    again = train(Path(sys.argv[2]), load=True)
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps({"losses": losses, "again": again}))
