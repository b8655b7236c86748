# SPDX-License-Identifier: Apache-2.0
"""Learning rate and decay of every optimizer's step: one number, or one a tensor; and what torch.compile sees of the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from zeropp import ops

STEPS: dict[str, tuple[Callable[..., None], int]] = {  # and how many states
    "adam": (ops.adam_step_, 2),
    "lion": (ops.lion_step_, 1),
    "adagrad": (ops.adagrad_step_, 1),
    "sgd": (ops.sgd_step_, 1),
    "lamb": (ops.lamb_step_, 2),
}
SIZES = (300, 1, 5000)
LRS, DECAYS = [1e-2, 0.0, 3e-3], [0.0, 0.5, 0.1]


def lists(optimizer: str, kind: torch.dtype) -> tuple[list[Any], dict[str, Any]]:
    """Parameters, gradients and states of the first step, and what else the call takes."""
    make, states = torch.Generator().manual_seed(0), STEPS[optimizer][1]
    params, grads = ([torch.randn(n, generator=make) for n in SIZES] for _ in range(2))
    more: dict[str, Any] = {"momentum": 0.9} if optimizer == "sgd" else {}
    if kind != torch.float32 or optimizer != "lion":
        more["step"] = 1
    if kind == torch.uint8:
        more["scales"] = [torch.zeros(ops.moments_scales(n)) for _ in range(states) for n in SIZES]
    return [params, grads, *([torch.zeros(n, dtype=kind) for n in SIZES] for _ in range(states))], more


@pytest.mark.parametrize("kind", [torch.float32, torch.uint8])
@pytest.mark.parametrize("optimizer", STEPS)
def test_each_tensor_has_its_own_rates(optimizer: str, kind: torch.dtype) -> None:
    """One call with rates of each tensor equals three calls with one tensor's rates each."""
    call, states = STEPS[optimizer]
    mine, more = lists(optimizer, kind)
    call(*mine, lr=LRS, weight_decay=DECAYS, **more)
    for index in range(len(SIZES)):
        theirs, more = lists(optimizer, kind)
        call(*theirs, lr=LRS[index], weight_decay=DECAYS[index], **more)
        for which in (0, *range(2, 2 + states)):
            assert torch.equal(mine[which][index], theirs[which][index])


@pytest.mark.parametrize("optimizer", STEPS)
@pytest.mark.parametrize(
    ("rates", "kind", "sentence"),
    [
        ({"lr": [0.1, 0.1]}, ValueError, "lr has 2 numbers, wanted one, or 3 as params has tensors"),
        ({"lr": []}, ValueError, "lr has 0 numbers, wanted one, or 3 as params has tensors"),
        ({"lr": [0.1, float("nan"), 0.1]}, ValueError, r"lr\[1\] is nan, wanted "),
        ({"lr": [0.1, "a", 0.1]}, TypeError, r"lr\[1\] is 'a', wanted a number"),
        (
            {"lr": 0.1, "weight_decay": [0.0, 0.0, float("inf")]},
            ValueError,
            r"weight_decay\[2\] is inf, wanted a finite",
        ),
    ],
)
def test_other_rates_are_refused(optimizer: str, rates: dict[str, Any], kind: type[Exception], sentence: str) -> None:
    call, _ = STEPS[optimizer]
    mine, more = lists(optimizer, torch.float32)
    before = [tensor.clone() for one in mine for tensor in one]
    with pytest.raises(kind, match=f"zeropp.ops.{optimizer}_step_: {sentence}"):
        call(*mine, **{"weight_decay": 0.0, **rates}, **more)
    assert all(torch.equal(a, b) for a, b in zip(before, [tensor for one in mine for tensor in one], strict=True))


@pytest.mark.parametrize("kind", [torch.float32, torch.uint8])
@pytest.mark.parametrize("optimizer", STEPS)
def test_one_graph_under_compile(optimizer: str, kind: torch.dtype) -> None:
    call, _ = STEPS[optimizer]

    def step(mine: list[list[Tensor]], more: dict[str, Any]) -> Tensor:
        call(mine[0], [grad * 2 for grad in mine[1]], *mine[2:], lr=LRS, weight_decay=0.1, **more)
        return mine[0][0] + 1

    torch.compiler.reset()  # one function, ten optimizers: torch compiles it eight times at most
    eager, compiled = lists(optimizer, kind), lists(optimizer, kind)
    want = step(*eager)
    assert torch.equal(want, torch.compile(step, fullgraph=True, backend="aot_eager")(*compiled))
    for a, b in zip(eager[0], compiled[0], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
