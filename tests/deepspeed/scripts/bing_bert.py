# SPDX-License-Identifier: Apache-2.0
"""The calls of bing_bert's deepspeed_train.py and of its classifiers on sst2: bing_bert.py RESULT FOLDER --deepspeed_config FILE."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import torch
from deepspeed.utils.logging import logger
from torch import nn


class Sentiment(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.LayerNorm, self.classifier = nn.Embedding(30, 16), nn.LayerNorm(16), nn.Linear(16, 2)

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        found = self.classifier(self.LayerNorm(self.words(batch[0]).mean(1)))
        return nn.functional.cross_entropy(found, batch[1])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = deepspeed.add_config_arguments(parser).parse_args()
    args.local_rank = int(os.environ["LOCAL_RANK"])
    return args


def prepared(args: argparse.Namespace, model: SimpleNamespace) -> torch.optim.Optimizer:
    keys = json.loads(Path(args.deepspeed_config).read_text(encoding="utf-8"))
    assert keys["optimizer"]["type"] == "Lamb"
    named = list(model.network.named_parameters())
    none = ["bias", "LayerNorm.weight"]
    groups = [
        {"params": [p for n, p in named if not any(one in n for one in none)], "weight_decay": 0.01},
        {"params": [p for n, p in named if any(one in n for one in none)], "weight_decay": 0.0},
    ]
    deepspeed.init_distributed(dist_backend="nccl")
    model.network, optimizer, _, _ = deepspeed.initialize(args=args, model=model.network, model_parameters=groups)
    args.train_micro_batch_size_per_gpu = model.network.train_micro_batch_size_per_gpu()
    args.gradient_accumulation_steps = model.network.gradient_accumulation_steps()
    args.local_rank, args.device = model.network.local_rank, model.network.device
    args.fp16 = model.network.fp16_enabled()
    args.use_lamb = model.network.optimizer_name() in (
        deepspeed.runtime.config.LAMB_OPTIMIZER, deepspeed.runtime.config.ONEBIT_LAMB_OPTIMIZER,
    )  # fmt: skip
    return optimizer


def epoch(
    args: argparse.Namespace, model: SimpleNamespace, optimizer: torch.optim.Optimizer, steps: int
) -> list[float]:
    model.network.train()
    draw = torch.Generator().manual_seed(torch.distributed.get_rank())
    losses = []
    for index in range(steps * args.gradient_accumulation_steps):
        words = torch.randint(0, 30, (args.train_micro_batch_size_per_gpu, 6), generator=draw)
        batch = tuple(one.to(args.device) for one in (words, (words[:, 0] > 14).long()))
        loss = model.network(batch)
        losses.append(loss.item())
        model.network.backward(loss)
        if model.network.is_gradient_accumulation_boundary():
            for group in optimizer.param_groups:
                group["lr"] = 0.02 / (1 + index)
            model.network.step()
        else:
            model.network.step()
    return losses


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(1)
    model = SimpleNamespace(network=Sentiment())
    optimizer = prepared(args, model)
    logger.info("begin epoch 1")
    first = epoch(args, model, optimizer, 6)
    assert model.network.save_checkpoint(args.folder, "epoch1", {"epoch": 1, "last_global_step": 6})
    second = epoch(args, model, optimizer, 3)
    _, client = model.network.load_checkpoint(args.folder, "epoch1")
    again = epoch(args, model, optimizer, 3)
    if torch.distributed.get_rank() == 0:
        found = {
            "losses": first,
            "second": second,
            "again": again,
            "client": client,
            "lamb": args.use_lamb,
            "fp16": args.fp16,
        }
        args.result.write_text(json.dumps(found))


if __name__ == "__main__":
    main(arguments())
