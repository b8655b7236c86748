# SPDX-License-Identifier: Apache-2.0
"""What torch's own tests ask of FSDP2 (test/distributed/_composable/fsdp), asked of zeropp: equal to DDP for five steps
(parity_cases.py). Each case is named as torch names it; docs/conformance.md is the list."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch
from parity_cases import Case, _vector, run, vector
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Mlp(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.into(x).relu()).relu()


class Stack(nn.Module):
    """Blocks one after the other, recomputed in backward or not."""

    def __init__(self, blocks: list[nn.Module], reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks, self.reentrant = nn.ModuleList(blocks), reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x.pow(2).mean()


def biases_only(reentrant: bool | None = None) -> nn.Module:
    model = Stack([Mlp() for _ in range(3)], reentrant)
    for name, p in model.named_parameters():
        p.requires_grad_("bias" in name)
    return model


def every_other_frozen() -> nn.Module:
    blocks = [nn.Linear(8, 8) for _ in range(6)]
    for block in blocks[::2]:
        block.requires_grad_(False)
    return Stack(blocks)


class Several(nn.Module):
    """A trainable and a frozen layer, each three times in forward, once more without a graph in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.trained = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = self.frozen(self.trained(x).relu())
            with torch.no_grad():
                more = self.trained(x).relu()
            x = x + more
        return x.pow(2).mean()


class Twins(nn.Module):
    """Two layers, two outputs, of which the loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x).relu(), self.right(x).relu()


def both_then_one(model: nn.Module, step: int) -> Tensor:
    left, right = model(_vector(step))
    loss = (left * right).sum() if step < 3 else left.sum()
    loss.backward()
    return loss


def always_one(model: nn.Module, step: int) -> Tensor:
    loss = model(_vector(step))[0].sum()
    loss.backward()
    return loss


Named = collections.namedtuple("Named", "x other")


class Wrapped(nn.Module):
    """Gets and gives its activation inside a container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner = kind, Mlp()

    def forward(self, held: Any) -> Any:
        x = self.inner(held["x"] if self.kind == "dict" else held[0])
        if self.kind == "namedtuple":
            return held._replace(x=x)
        return {"list": [x], "tuple": (x,), "dict": {"x": x}}[self.kind]


class Containers(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.blocks = kind, nn.ModuleList(Wrapped(kind) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        held: Any = {"list": [x], "tuple": (x,), "dict": {"x": x}, "namedtuple": Named(x, torch.ones_like(x))}[
            self.kind
        ]
        for block in self.blocks:
            held = block(held)
        return (held["x"] if self.kind == "dict" else held[0]).pow(2).mean()


def without_graph_first(model: nn.Module, step: int) -> Tensor:
    if step == 1:
        with torch.no_grad():
            model(_vector(step))
    return vector(model, step)


UNUSED: dict[str, Any] = {"find_unused_parameters": True}
TABLE: dict[str, Case] = {
    "test_train_mixed_requires_grad_per_group": Case(biases_only, vector),
    "test_train_mixed_requires_grad_per_group, checkpointing": Case(lambda: biases_only(False), vector),
    "test_train_mixed_requires_grad_across_groups": Case(every_other_frozen, without_graph_first),
    "test_multi_forward_mixed_requires_grad": Case(Several, vector, units=("Linear",)),
    "test_unused_forward_output": Case(Twins, both_then_one, units=("Linear",), ddp=UNUSED),
    "test_unused_forward_module": Case(Twins, always_one, units=("Linear",), ddp=UNUSED),
    **{
        f"test_nontensor_activations, {kind}": Case(lambda kind=kind: Containers(kind), vector)
        for kind in ("list", "tuple", "dict", "namedtuple")
    },
}

CASES: dict[str, Callable[[], Any]] = {name: (lambda case=case: run(case)) for name, case in TABLE.items()}
