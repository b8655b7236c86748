# SPDX-License-Identifier: Apache-2.0
"""Models that broke a design of ZeRO-3 once: five steps equal to torch DDP, bit for bit, in three modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zeropp
import zoo
from parity import (
    ORDERS,
    STEPS,
    Case,
    U,
    backward,
    checkpointing,
    compile_blocks,
    in_order,
    language,
    rows,
    run,
    tokens,
    two_backwards,
    vector,
)
from ranks import of_all_ranks, on_cpu_only, on_ranks
from torch import Tensor, nn


# -- steps -----------------------------------------------------------------------------------------------
def autocast(model: nn.Module, step: int) -> Tensor:
    ids = tokens(step)
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    return backward(loss)


def two_losses(model: nn.Module, step: int) -> Tensor:
    """Two graphs that share a body, in one backward after the other."""
    left, right = model(rows(step))
    left.backward(retain_graph=True)
    right.backward()
    return left.detach() + right.detach()


def penalty(model: nn.Module, step: int) -> Tensor:
    x = rows(step).requires_grad_()
    y = model(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return backward(y.mean() + ((slope.norm(2, dim=1) - 1) ** 2).mean())


def head_outside(model: nn.Module, step: int) -> Tensor:
    """A loss as TRL computes log-probabilities: the body's forward, then the head's weight with no forward open."""
    ids = tokens(step)
    hidden = model.model(input_ids=ids).last_hidden_state
    logits = hidden @ model.lm_head.weight.t()
    return backward(nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))


class Squared:
    """A critic as a loss."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, x: Tensor) -> Tensor:
        return (self.model(x) ** 2).mean()

    def parameters(self) -> Any:
        return self.model.parameters()


def decay_outside(model: nn.Module, step: int) -> Tensor:
    """A regulariser over all parameters, between forward and backward."""
    loss = model(rows(step))
    return backward(loss + 1e-3 * sum(p.pow(2).sum() for p in model.parameters()))


def offloaded(model: nn.Module, step: int) -> Tensor:
    """Somebody else's saved-tensor hooks around ours."""
    ids = tokens(step)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: ("kept", t.detach().clone()), lambda kept: kept[1]):
        loss = model(input_ids=ids, labels=ids).loss
    return backward(loss)


def evaluated_between(model: nn.Module, step: int) -> Tensor:
    """A pass without a graph, and one whose graph is dropped, before the one that counts."""
    ids = tokens(step)
    model.eval()
    with torch.no_grad():
        model(input_ids=ids)
    model.train()
    model(input_ids=ids)
    return backward(model(input_ids=ids, labels=ids).loss)


def functional(model: nn.Module, step: int) -> Tensor:
    """torch.func.functional_call, with the parameters themselves and with tensors computed from them."""
    values = dict(model.named_parameters())
    if step % 2:
        with zeropp.gathered(model):
            values = {name: p * 1.5 for name, p in values.items()}
    return backward(torch.func.functional_call(model, values, (rows(step),)))


# -- the table -------------------------------------------------------------------------------------------
STATIC: dict[str, Any] = {"static_graph": True}  # DDP needs it where a parameter's gradient comes in parts
UNUSED: dict[str, Any] = {"find_unused_parameters": True}
TABLE: dict[str, Case] = {
    "gpt2 tied": Case(zoo.gpt2, language),
    "llama": Case(zoo.llama, language),
    "llama, nothing replicated": Case(zoo.llama, language, units=("LlamaDecoderLayer",)),
    "llama, every Linear a unit": Case(zoo.llama, language, units=(nn.Linear, nn.Embedding)),
    "llama, units by size": Case(zoo.llama, language, units=50_000),
    "llama tied": Case(zoo.tied_llama, language),
    "mixtral": Case(zoo.mixtral, language, ddp=UNUSED),
    "LoRA": Case(zoo.lora, language),
    "autocast": Case(zoo.llama, autocast),
    "llama, somebody's saved-tensor hooks": Case(zoo.llama, offloaded),
    "llama, evaluation between": Case(zoo.llama, evaluated_between),
    "llama, head read outside": Case(zoo.llama, head_outside, ddp=None),
    "llama tied, head read outside": Case(zoo.tied_llama, head_outside, ddp=None),
    "llama, compiled blocks": Case(zoo.llama, language, setup=compile_blocks),
    **{
        f"{name}, checkpoint, {kind}": Case(make, language, setup=checkpointing(kind == "reentrant"), ddp=ddp)
        for kind in ("reentrant", "non-reentrant")
        for name, make, ddp in (
            ("llama", zoo.llama, STATIC), ("llama tied", zoo.tied_llama, STATIC), ("LoRA", zoo.lora, STATIC),
            ("mixtral", zoo.mixtral, STATIC), ("gpt2 tied", zoo.gpt2, STATIC),
        )
    },
    "shared block, three times, reentrant": Case(zoo.SharedReentrant, vector, units=("Linear",), ddp=STATIC),
    "shared modules and weights": Case(zoo.Shared, vector, units=("Linear",)),
    "shared modules, whole model one unit": Case(zoo.Shared, vector, units=("Shared",)),
    "encoder and LSTM": Case(zoo.Recurrent, vector, units=("TransformerEncoderLayer", "LSTM")),
    "encoder and LSTM, every Linear a unit": Case(zoo.Recurrent, vector, units=(nn.Linear, nn.LSTM)),
    "unused parameters": Case(lambda: zoo.Unused(False), vector, units=("Linear",), ddp=UNUSED),
    "unused on one rank": Case(lambda: zoo.Unused(True), vector, units=("Linear",), ddp=UNUSED),
    # DDP adds the second gradient to the mean of the first before it averages; we add two means: at most 4 roundings
    # apart.
    "two backwards a step": Case(zoo.Shared, two_backwards, units=("Linear",), tolerance=4 * U),
    "two losses, one graph": Case(zoo.TwoLosses, two_losses, units=("Linear",), ddp=None, tolerance=4 * U),
    **{
        f"{order}, {'read outside' if outside else 'read inside'}": Case(
            zoo.ReadFromOutside, in_order(order, outside), units=("Linear",), ddp=None)
        for order in ORDERS for outside in (False, True) if outside or "E" not in order
    },
    "gradient penalty": Case(zoo.Critic, penalty, units=("Linear",)),
    "outputs of every shape": Case(zoo.Outputs, vector, units=("Block",)),
    "regulariser outside": Case(zoo.Critic, lambda m, s: decay_outside(Squared(m), s), units=("Linear",), ddp=None),
    "weight kept by an autograd.Function": Case(zoo.KeepsWeight, vector, units=("Linear",)),
    "weights saved beside the output": Case(zoo.LeakyLeaves, vector, units=("Linear",)),
    "channels-last convolutions": Case(zoo.Convolutions, vector, units=("Conv2d", "Linear"),
                                       setup=lambda m: m.to(memory_format=torch.channels_last)),
    "odd sizes": Case(zoo.Odd, vector, units=("Linear", "Odd")),
    "functional_call": Case(zoo.Shared, functional, units=("Linear",), ddp=None),
}  # fmt: skip


@on_ranks(2)
@pytest.mark.parametrize("case", TABLE)
def test_equal_to_ddp(case: str) -> None:
    if case == "channels-last convolutions":
        on_cpu_only("its convolutions add in the order of the weight's layout, which is contiguous once it is prepared")
    answer = run(TABLE[case])
    losses = of_all_ranks(answer["losses"])
    assert len(losses[0]) == STEPS
    assert losses[0] != losses[1], "the ranks must see different batches, or the test shows nothing"
    # Gathered, really: each rank read the other's slices, and the other's gradients.
    assert sum(link["all_gather"]["bytes"] for link in answer["traffic"].values()) > 0
    assert sum(link["reduce_scatter"]["bytes"] for link in answer["traffic"].values()) > 0
