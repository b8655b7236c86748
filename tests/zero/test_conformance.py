# SPDX-License-Identifier: Apache-2.0
"""Cases of torch's own tests of FSDP2, re-expressed: equal to DDP for five steps (helpers/parity.py), or as
each test says. Each test is named as torch names it; docs/conformance.md is the list."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zeropp
from data_parallel import data_parallel
from parity import COMPILING, STEPS, Case, left_full, rows, run, vector
from ranks import of_all_ranks, on_cpu_only, on_ranks, shards_tier
from tiny import MODES
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zeropp.zero.prepare import is_prepared
from zoo import Mlp


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
    left, right = model(rows(step))
    loss = (left * right).sum() if step < 3 else left.sum()
    loss.backward()
    return loss


def always_one(model: nn.Module, step: int) -> Tensor:
    loss = model(rows(step))[0].sum()
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
            model(rows(step))
    return vector(model, step)


def plain_stack(reentrant: bool | None = None) -> nn.Module:
    return Stack([Mlp() for _ in range(3)], reentrant)


def freeze(model: nn.Module, which: Callable[[str], bool]) -> None:
    for name, p in model.named_parameters():
        if p.requires_grad == which(name):
            p.requires_grad_(not which(name))


def weights_frozen_after(model: nn.Module, step: int) -> Tensor:
    """Prepared with everything trainable; the weights are frozen before the first step."""
    freeze(model, lambda name: "bias" not in name)
    return vector(model, step)


def unfrozen(model: nn.Module, step: int) -> Tensor:
    """Gradual unfreezing: the last block alone, then the last two, then all; and the first is frozen again."""
    trained = (("blocks.2",), ("blocks.1", "blocks.2"), ("blocks",), ("blocks",), ("blocks.1", "blocks.2"))[step]
    freeze(model, lambda name: not name.startswith(trained))
    return vector(model, step)


def shaped(*widths: int) -> nn.Module:
    """Layers whose sizes no number of ranks divides."""
    into, out = nn.Linear(8, widths[0]), nn.Linear(widths[-1], 8)
    between = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    return Stack([into, nn.ReLU(), *between, out])


class TwiceInOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x) + self.inner(x * 2)).pow(2).mean()


class OtherMethods(nn.Module):
    """A model like a vision transformer: features by a method of its own, with a parameter that is in no submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(4, 8))
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward_features(self, x: Tensor) -> Tensor:
        x = x + self.positions
        for block in self.blocks:
            x = x + block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.forward_features(x))


def by_another_method(model: nn.Module, step: int) -> Tensor:
    """`forward` of the model never runs: its own method does, and the head's weight is read outside."""
    if is_prepared(model) and step == 0:
        zeropp.register_forward_method(model, "forward_features")
    features = model.forward_features(rows(step))
    loss = (features @ model.head.weight.t()).pow(2).mean()
    loss.backward()
    return loss


def without_the_root(model: nn.Module, step: int) -> Tensor:
    """Only a block in the middle runs; in other steps the whole model."""
    loss = model.blocks[1](rows(step)).pow(2).mean() if step % 2 else model(rows(step))
    loss.backward()
    return loss


def microbatches(model: nn.Module, step: int) -> Tensor:
    """All forwards first, then the backwards, reduced at the last one: 1F1B's order."""
    losses = [model(rows(step + 10 * i)) for i in range(3)]
    for i, loss in enumerate(losses):
        with zeropp.no_sync(model) if is_prepared(model) and i < 2 else contextlib.nullcontext():
            loss.backward()
    return torch.stack([loss.detach() for loss in losses]).sum()


def compiled(model: nn.Module) -> None:
    """Compile what returns or takes the outputs and containers of a case."""
    for module in model.blocks if isinstance(model, Containers) else model.children():
        module.compile(backend="aot_eager")


COMPILING.add(compiled)
UNUSED: dict[str, Any] = {"find_unused_parameters": True}
TABLE: dict[str, Case] = {
    "test_train_mixed_requires_grad_per_group": Case(biases_only, vector),
    "test_train_mixed_requires_grad_per_group, checkpointing": Case(lambda: biases_only(False), vector),
    "test_train_mixed_requires_grad_across_groups": Case(every_other_frozen, without_graph_first),
    "test_train_mixed_requires_grad_per_group, freeze_after_init": Case(plain_stack, weights_frozen_after, ddp=None),
    "test_train_mixed_requires_grad_per_group, freeze_after_init, checkpointing": Case(
        lambda: plain_stack(False), weights_frozen_after, ddp=None
    ),
    "test_train_mixed_requires_grad_across_groups, unfreeze_params": Case(
        plain_stack, unfrozen, units=("Mlp",), ddp=None
    ),
    "test_train_mixed_requires_grad_across_groups, unfreeze_params, checkpointing": Case(
        lambda: plain_stack(False), unfrozen, units=("Linear",), ddp=None
    ),
    "test_train_parity_single_group": Case(lambda: shaped(15), vector, units=("Stack",)),
    "test_train_parity_single_group, odd": Case(lambda: shaped(7, 15, 3), vector, units=("Stack",)),
    "test_train_parity_multi_group": Case(lambda: shaped(17, 13), vector, units=("Linear",)),
    "test_train_parity_multi_group, checkpointing": Case(
        plain_stack, vector, units=("Mlp",), ddp={"static_graph": True}, setup=lambda m: setattr(m, "reentrant", False)
    ),
    "test_non_root_forward_backward": Case(plain_stack, without_the_root, units=("Mlp",), ddp=None),
    "test_multi_forward_module": Case(TwiceInOne, vector, units=("Linear",)),
    "test_register_fsdp_forward_method": Case(OtherMethods, by_another_method, units=("Mlp",), ddp=None),
    "test_1f1b_microbatching": Case(plain_stack, microbatches, units=("Mlp",), ddp=None),
    "test_multi_forward_mixed_requires_grad": Case(Several, vector, units=("Linear",)),
    "test_unused_forward_output": Case(Twins, both_then_one, units=("Linear",), ddp=UNUSED),
    "test_unused_forward_module": Case(Twins, always_one, units=("Linear",), ddp=UNUSED),
    **{
        f"test_nontensor_activations, {kind}": Case(lambda kind=kind: Containers(kind), vector)
        for kind in ("list", "tuple", "dict", "namedtuple")
    },
    "test_unused_forward_output, compiled": Case(Twins, both_then_one, units=("Linear",), ddp=UNUSED, setup=compiled),
    "test_unused_forward_module, compiled": Case(Twins, always_one, units=("Linear",), ddp=UNUSED, setup=compiled),
    "test_nontensor_activations, dict, compiled": Case(lambda: Containers("dict"), vector, setup=compiled),
}


# -- counts, memory, types -------------------------------------------------------------------------------------------
def gathering(model: nn.Module, **config: Any) -> tuple[nn.Module, Any]:
    """Every Mlp a unit, gathered by every rank when it is needed."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return zeropp.prepare(model, optimizer, zeropp.Config(host_copy="off", prefetch=0, units=("Mlp",), **config))


def calls() -> dict[str, int]:
    return {
        kind: counts["calls"] for kind, counts in zeropp.traffic(reset=True).get("shm", {}).items() if counts["calls"]
    }


@on_ranks(2)
def test_fully_shard_communication_count() -> None:
    """Count collectives of five blocks: a forward without a graph, a forward, its backward."""
    model, optimizer = gathering(Stack([Mlp() for _ in range(5)]))
    model(rows(0)).backward()  # records the order
    optimizer.zero_grad()
    calls()
    with torch.no_grad():
        model(rows(1))
    assert calls() == {"all_gather": 5}
    loss = model(rows(1))
    assert calls() == {"all_gather": 5}
    loss.backward()
    found = calls()
    # What the last block saved is still whole when its backward begins.
    assert found["reduce_scatter"] == 5 and 4 <= found["all_gather"] <= 5
    with zeropp.no_sync(model):
        model(rows(1)).backward()
    assert "reduce_scatter" not in calls()


@on_ranks(2)
def test_fully_shard_training_memory() -> None:
    """At most two units are whole, inside each block's forward and backward, after forward and after backward."""
    on_cpu_only("whole units have the same memory from the beginning, which test_device_memory.py counts")
    model, _ = gathering(Stack([Mlp(64) for _ in range(6)]))
    block = sum(p.numel() * 4 for p in model.blocks[0].parameters())
    seen: list[int] = []
    tier = shards_tier()

    def look(*_: Any) -> None:
        seen.append(zeropp.memory(model)[tier]["gathered"]["held"])

    for one in model.blocks:
        one.out.register_forward_hook(look)
        one.out.register_full_backward_hook(look)
    x = torch.randn(4, 64)
    loss = model(x)
    after_forward = zeropp.memory(model)[tier]["gathered"]["held"]
    loss.backward()
    held = zeropp.memory(model)[tier]
    assert len(seen) == 12 and after_forward <= 2 * block
    assert min(seen) > 0 and max(seen) <= 2 * block + 4 * 4096, (seen, block)
    # No unit is whole any more; the memory of two stays warm for the next step.
    assert not left_full(model) and held["gathered"]["held"] <= max(seen)
    assert held["grads"]["held"] <= 6 * block // 2 + 6 * 4096


@dataclasses.dataclass
class Given:
    x: Tensor
    mask: Tensor
    note: str


class TakesDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, given: Given, pair: Named) -> Tensor:
        assert given.x.dtype == pair.x.dtype == self.body.weight.dtype == torch.bfloat16
        assert given.mask.dtype == torch.int64 and given.note == "as it was"
        return (self.body(given.x) * given.mask + pair.other).float().pow(2).mean()


@on_ranks(2)
def test_dataclass_input() -> None:
    """Floating tensors inside a dataclass and a named tuple are cast as bare ones are; the caller's are as they were."""
    model = TakesDataclass()
    model, optimizer = zeropp.prepare(model, torch.optim.AdamW(model.parameters()), zeropp.Config(precision="bf16"))
    given, pair = (
        Given(torch.randn(4, 8), torch.ones(8, dtype=torch.int64), "as it was"),
        Named(torch.ones(8), torch.ones(8)),
    )
    model(given, pair).backward()
    optimizer.step()
    assert given.x.dtype == pair.x.dtype == torch.float32


@on_ranks(2)
def test_ddp_A_fsdp_B_ddp_C() -> None:
    """A and C in torch's DDP, B ours: losses and all gradients of five steps are those of DDP around the whole."""
    for mode, config in MODES.items():
        torch.manual_seed(0)
        whole = nn.Sequential(Mlp(), nn.Sequential(Mlp(), Mlp()), Mlp(), nn.Linear(8, 8))
        whole[3].requires_grad_(False)
        model = copy.deepcopy(whole)
        reference = data_parallel(whole)
        adam = torch.optim.AdamW((p for p in whole.parameters() if p.requires_grad), lr=1e-2)
        model[0], model[2] = data_parallel(model[0]), data_parallel(model[2])
        outside = [*model[0].parameters(), *model[2].parameters()]
        theirs = torch.optim.AdamW(outside, lr=1e-2)
        model, ours = zeropp.prepare(
            model, torch.optim.AdamW(model[1].parameters(), lr=1e-2), zeropp.Config(ignored=("0", "2.*", "3"), **config)
        )
        assert all(type(p) is nn.Parameter and p.untyped_storage().nbytes() for p in (*outside, *model[3].parameters()))
        for step in range(5):
            losses = []
            for one in (reference, model):
                losses.append(one(rows(step)).pow(2).mean())
                losses[-1].backward()
            assert losses[0].item() == losses[1].item(), (mode, step)
            with zeropp.gathered(model, grads=True):
                for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
                    assert q.grad is None or torch.equal(p.grad, q.grad), (mode, step, name)
            for optimizer in (adam, theirs, ours):
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad(), zeropp.gathered(model):  # one step of our AdamW: helpers/parity.py has its bound
                for p, q in zip(model.parameters(), whole.parameters(), strict=True):
                    q.copy_(p)
        full = zeropp.full_state_dict(model)
        assert [tuple(v.shape) for v in full.values()] == [tuple(v.shape) for v in whole.state_dict().values()]
        assert torch.equal(full["0.module.into.weight"], model[0].module.into.weight.cpu())


def norm_modules(dtype: str) -> None:
    """LayerNorm, GroupNorm and BatchNorm in low precision, forward and backward, in training and evaluation."""
    for norm in (nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.BatchNorm1d(8)):
        model = nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 8))
        model, optimizer = zeropp.prepare(model, torch.optim.AdamW(model.parameters()), zeropp.Config(precision=dtype))
        optimizer.backward(model(rows(0)).float().pow(2).mean())
        optimizer.step()
        assert model.eval()(rows(1)).dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]


@on_ranks(2)
def test_norm_modules_bf16() -> None:
    norm_modules("bf16")


@on_ranks(2)
def test_norm_modules_fp16() -> None:
    norm_modules("fp16")


@on_ranks(2)
def test_param_registration_after_backward() -> None:
    """Names, objects and shapes are the same after prepare, forward and backward; every one is a parameter."""
    model = Stack([Mlp() for _ in range(3)])
    before = [(name, id(p), tuple(p.shape)) for name, p in model.named_parameters()]
    model, _ = gathering(model)
    seen = []
    loss = model(rows(0))
    seen.append([(name, id(p), tuple(p.shape)) for name, p in model.named_parameters()])
    loss.backward()
    seen.append([(name, id(p), tuple(p.shape)) for name, p in model.named_parameters()])
    assert seen == [before, before] and all(isinstance(p, nn.Parameter) for p in model.parameters())


@on_ranks(2)
def test_dp_state_dict_save_load() -> None:
    """Whole values out of one model and into another that is held in another way; on rank 0 alone where asked."""
    torch.manual_seed(3)
    model, _ = gathering(Stack([Mlp() for _ in range(3)]))
    state = zeropp.full_state_dict(model)
    other = Stack([Mlp() for _ in range(3)])
    other, _ = zeropp.prepare(other, None, zeropp.Config())
    zeropp.load_full_state_dict(other, state)
    again = zeropp.full_state_dict(other)
    assert list(state) == list(again) and all(torch.equal(state[name], again[name]) for name in state)
    assert len(zeropp.full_state_dict(model, rank_0_only=True)) == (0 if torch.distributed.get_rank() else len(state))
    assert torch.equal(model(rows(0)), other(rows(0)))


PAGE = Path(__file__).resolve().parents[2] / "docs" / "conformance.md"


@on_ranks(2)
@pytest.mark.parametrize("case", TABLE)
def test_equal_to_ddp(case: str) -> None:
    losses = of_all_ranks(run(TABLE[case])["losses"])
    assert len(losses[0]) == STEPS and losses[0] != losses[1]


def test_the_page_lists_them() -> None:
    text = PAGE.read_text(encoding="utf-8")
    others = [name for name, test in globals().items() if hasattr(test, "on_ranks") and test is not test_equal_to_ddp]
    assert len(others) == 8
    missing = [case for case in (*TABLE, *others) if f"`{case.partition(',')[0]}`" not in text]
    assert not missing
