# SPDX-License-Identifier: Apache-2.0
"""A small model with everything that a checkpoint has to hold, and its training. The tests and the ranks that they start
share it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import rank
import torch
import torch.distributed as dist
import zeropp
from torch import nn
from zeropp import Config, prepare

LR = 1e-2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 31)
        self.drop = nn.Dropout(0.1)  # draws random numbers, so that the generators' states count
        self.down = nn.Linear(31, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(torch.tanh(self.up(x))))


class Model(nn.Module):
    """A model with tied weights, a frozen part, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(53, 12)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.frozen = nn.Linear(12, 12)
        self.frozen.requires_grad_(False)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 53, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(self.frozen(x)))


def make(kind: str = "adamw", **config):
    """Return a prepared model with optimizer and scheduler; the weights depend on the seed alone."""
    torch.manual_seed(0)
    model = Model()
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trainable[:2], "weight_decay": 0.0}, {"params": trainable[2:]}]
    optimizer = {
        "adamw": lambda: torch.optim.AdamW(groups, lr=LR),
        "amsgrad": lambda: torch.optim.Adam(groups, lr=LR, amsgrad=True),
        "sgd": lambda: torch.optim.SGD(groups, lr=LR, momentum=0.9),
        "lion": lambda: zeropp.optim.Lion(groups, lr=LR / 10),
        "nesterov": lambda: torch.optim.SGD(groups, lr=LR, momentum=0.9, nesterov=True),
        "adagrad": lambda: torch.optim.Adagrad(groups, lr=LR, initial_accumulator_value=0.1),
        "rmsprop": lambda: torch.optim.RMSprop(groups, lr=LR, momentum=0.5),
        "rmsprop centered": lambda: torch.optim.RMSprop(groups, lr=LR, centered=True),
        "adadelta": lambda: torch.optim.Adadelta(groups),
        "adamax": lambda: torch.optim.Adamax(groups, lr=LR),
        "nadam": lambda: torch.optim.NAdam(groups, lr=LR),
        "radam": lambda: torch.optim.RAdam(groups, lr=LR),
        "asgd": lambda: torch.optim.ASGD(groups, lr=LR, lambd=0.1, t0=2.0),
        "rprop": lambda: torch.optim.Rprop(groups, lr=LR / 10),
        "lamb": lambda: zeropp.optim.LAMB(groups, lr=LR),
    }[kind]()
    model, optimizer = prepare(model, optimizer, Config(**config))
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5, 7], gamma=0.5)
    return model, optimizer, scheduler


def train(model, optimizer, scheduler, start: int, stop: int) -> list[float]:
    """Train, and return the losses. Every rank sees the same batch, so that any number of ranks trains alike."""
    losses = []
    for step in range(start, stop):
        batch = torch.randint(0, 53, (4, 9), generator=torch.Generator().manual_seed(step))
        logits = model(batch[:, :-1]).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


@contextlib.contextmanager
def group(ranks: int) -> Iterator[None]:
    """Make the process group of a job, where it has several ranks; on the device that its test gives, if it does."""
    torch.set_num_threads(1)
    rank.use_of_the_environment()
    if ranks > 1:
        dist.init_process_group("zeropp")
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
