# SPDX-License-Identifier: Apache-2.0
"""The operators as torch sees them: opcheck, one graph under compile, misuse refused before a byte is written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zeropp
from torch import Tensor

RATES = ([1e-3], 0.9, 0.999, 1e-8, [0.01])


def lists(count: int = 2, elems: int = 40) -> dict[str, Any]:
    """Arguments of a correct call."""
    make = {"params": 1.0, "grads": 0.5, "exp_avgs": 0.0, "exp_avg_sqs": 0.0}
    return {**{name: [torch.full((elems,), value) for _ in range(count)] for name, value in make.items()}, "step": 1,
            "lr": 1e-3}  # fmt: skip


def op_arguments() -> tuple[Any, ...]:
    a = lists()
    return (a["params"], a["grads"], a["exp_avgs"], a["exp_avg_sqs"], [], [], [1, 2], *RATES, True, False, 1.0, [], [])


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.zeropp.norm_squares.default, ([torch.randn(5), torch.randn(2, 3).half()],))
    torch.library.opcheck(torch.ops.zeropp.adam_step_.default, op_arguments())
    outs = [torch.empty(40, dtype=torch.bfloat16) for _ in range(2)]
    tops = [torch.zeros(40) for _ in range(2)]
    p, g, m, v, _, _, *rest = op_arguments()
    torch.library.opcheck(torch.ops.zeropp.adam_step_.default, (p, g, m, v, tops, outs, *rest))


def test_one_graph_under_compile() -> None:
    def step(p: list[Tensor], g: list[Tensor], m: list[Tensor], v: list[Tensor]) -> Tensor:
        scaled = [x * 2 for x in g]
        sums, bad = zeropp.ops.norm_squares(scaled)
        zeropp.ops.adam_step_(p, scaled, m, v, step=3, lr=1e-3, weight_decay=0.01)
        return sums.sum().sqrt() + bad.sum()

    eager, compiled = lists(), lists()
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs")
    want = step(*(eager[name] for name in names))
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(*(compiled[name] for name in names))
    assert torch.equal(want, got)
    for name in names:
        assert all(torch.equal(a, b) for a, b in zip(eager[name], compiled[name], strict=True)), name


def test_a_write_is_told_to_autograd() -> None:
    """A backward that saved the old parameter refuses, as after any torch operation in place."""
    a = lists(1)
    weight = torch.ones(40, requires_grad=True)
    loss = (weight * a["params"][0]).sum()
    zeropp.ops.adam_step_(**a)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_write_into_inference_tensors_has_no_counter() -> None:
    with torch.inference_mode():
        a = lists()
    zeropp.ops.adam_step_(**a)
    assert a["params"][0].is_inference() and (a["params"][0] < 1).all()


def test_shared_memory_is_found_in_any_order() -> None:
    """Lists whose addresses rise, fall, and do neither; then one element in two tensors of them."""
    turn = torch.randperm(300, generator=torch.Generator().manual_seed(1)).tolist()
    for orders in ([range(300)] * 4, [range(299, -1, -1)] * 4, [turn, range(300), turn[::-1], turn]):
        whole = torch.zeros(4, 300, 20)
        a = [[whole[row, at, :16] for at in order] for row, order in enumerate(orders)]
        zeropp.ops.adam_step_(*a, step=1, lr=0.1)
        last = 20 * orders[0][17] + 15
        a[3][200] = whole[0].view(-1)[last : last + 16]
        with pytest.raises(ValueError, match=r"params\[17\] and exp_avg_sqs\[200\] share memory"):
            zeropp.ops.adam_step_(*a, step=1, lr=0.1)


def test_empty_lists_do_nothing() -> None:
    zeropp.ops.adam_step_([], [], [], [], step=1, lr=0.1)


def broken(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    a = lists()
    change(a)
    return a


MISUSE: dict[str, tuple[Callable[[dict[str, Any]], object], type[Exception], str]] = {
    "dtype of a gradient": (
        lambda a: a.update(grads=[g.double() for g in a["grads"]]), ValueError,
        r"adam_step_: grads\[0\] is float64, wanted float32, bfloat16 or float16",
    ),
    "dtype of a moment": (
        lambda a: a["exp_avgs"].__setitem__(1, torch.zeros(40, dtype=torch.bfloat16)), ValueError,
        r"exp_avgs\[1\] is bfloat16, wanted float32",
    ),
    "complex": (
        lambda a: a["grads"].__setitem__(0, torch.zeros(40, dtype=torch.complex64)), ValueError,
        r"grads\[0\] is torch dtype \d+, wanted",
    ),
    "device": (
        lambda a: a["grads"].__setitem__(1, torch.zeros(40, device="meta")), ValueError,
        r"grads\[1\] is on meta, wanted cpu",
    ),
    "not contiguous": (
        lambda a: a["params"].__setitem__(1, torch.ones(8, 10)[:, ::2]), ValueError,
        r"params\[1\] is not contiguous, wanted contiguous",
    ),
    "too few tensors": (
        lambda a: a["exp_avg_sqs"].pop(), ValueError, r"exp_avg_sqs has 1 tensors, wanted 2 as in params",
    ),
    "elements": (
        lambda a: a["exp_avg_sqs"].__setitem__(1, torch.zeros(39)), ValueError,
        r"exp_avg_sqs\[1\] has 39 elements, wanted 40 as in params\[1\]",
    ),
    "too few steps": (lambda a: a.update(step=[1]), ValueError, r"steps has 1 numbers, wanted 2"),
    "step 0": (lambda a: a.update(step=0), ValueError, r"steps\[0\] is 0, wanted .* counted from 1"),
    "step is a float": (lambda a: a.update(step=1.5), TypeError, r"step is a float, wanted a whole number"),
    "same tensor twice": (
        lambda a: a["params"].__setitem__(1, a["params"][0]), ValueError,
        r"params\[0\] and params\[1\] share memory",
    ),
    "moments are one": (
        lambda a: a.update(exp_avg_sqs=a["exp_avgs"]), ValueError,
        r"exp_avgs\[\d\] and exp_avg_sqs\[\d\] share memory",
    ),
    "gradient is the parameter": (
        lambda a: a["grads"].__setitem__(0, a["params"][0]), ValueError, r"params\[0\] and grads\[0\] share memory",
    ),
    "copy-out over the moments": (
        lambda a: a.update(param_outs=[m.view(torch.bfloat16)[:40] for m in a["exp_avgs"]]), ValueError,
        r"exp_avgs\[\d\] and param_outs\[\d\] share memory",
    ),
    "requires grad": (
        lambda a: a["params"][1].requires_grad_(), ValueError,
        r"params\[1\] requires grad, and this operation has no gradient.*no_grad",
    ),
    "gradient requires grad": (
        lambda a: a["grads"][0].requires_grad_(), ValueError, r"grads\[0\] requires grad",
    ),
    "beta1 = 1": (lambda a: a.update(beta1=1.0), ValueError, r"beta1 is 1, wanted 0 <= beta1 < 1"),
    "beta2 NaN": (lambda a: a.update(beta2=float("nan")), ValueError, r"beta2 is -?nan, wanted 0 <= beta2 < 1"),
    "eps < 0": (lambda a: a.update(eps=-1e-8), ValueError, r"eps is -1e-08, wanted eps >= 0"),
    "lr infinite": (lambda a: a.update(lr=float("inf")), ValueError, r"lr is inf, wanted a finite number"),
    "lr a tensor": (lambda a: a.update(lr=torch.tensor(0.1)), TypeError, r"lr is tensor\(0.1000\), wanted a number"),
    "scale NaN": (lambda a: a.update(grad_scale=float("nan")), ValueError, r"grad_scale is -?nan, wanted a finite"),
    "no list": (lambda a: a.update(params=torch.ones(2)), TypeError, r"params is a Tensor, wanted a list of tensors"),
    "no tensor": (lambda a: a["grads"].__setitem__(1, None), TypeError, r"grads\[1\] is a NoneType, wanted a tensor"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_is_named_and_writes_nothing(case: str) -> None:
    change, kind, sentence = MISUSE[case]
    a = broken(change)
    before = {name: [t.clone() if isinstance(t, Tensor) else t for t in a[name]] for name in list(a)[:4]}
    with pytest.raises(kind, match=sentence):
        zeropp.ops.adam_step_(**a)
    for name, tensors in before.items():
        for index, (old, new) in enumerate(zip(tensors, a[name], strict=True)):
            same = old is new or old.is_meta or torch.equal(old.detach(), new.detach())
            assert same, f"{name}[{index}] was written"


def test_norm_misuse() -> None:
    with pytest.raises(ValueError, match=r"norm_squares: tensors\[1\] is int64, wanted float32, bfloat16 or float16"):
        zeropp.ops.norm_squares([torch.ones(3), torch.ones(3, dtype=torch.int64)])
    with pytest.raises(ValueError, match=r"tensors\[0\] requires grad"):
        zeropp.ops.norm_squares([torch.ones(3, requires_grad=True)])
    with pytest.raises(TypeError, match=r"tensors is a Tensor, wanted a list"):
        zeropp.ops.norm_squares(torch.ones(3))  # type: ignore[arg-type]


def test_no_grad_lets_parameters_in() -> None:
    a = lists()
    for p in a["params"]:
        p.requires_grad_()
    with torch.no_grad():
        zeropp.ops.adam_step_(**a)
    assert a["params"][0][0] < 1


@pytest.mark.parametrize("argument", ["grads", "exp_avgs", "exp_avg_sqs"])
def test_raising_in_c_says_our_sentence_first(argument: str) -> None:
    """Not through the door: the operator itself. RuntimeError, no abort."""
    p, g, m, v, *rest = op_arguments()
    named = {"params": p, "grads": g, "exp_avgs": m, "exp_avg_sqs": v}
    named[argument] = [torch.zeros(3) for _ in named[argument]]
    with pytest.raises(RuntimeError) as caught:
        torch.ops.zeropp.adam_step_(*named.values(), *rest)
    sentence = f"zeropp::adam_step_: {argument}[0] has 3 elements, wanted 40 as in params[0]"
    assert str(caught.value).split("\n")[0] == sentence


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_ten_thousand_raises_leak_nothing() -> None:
    """Every way out of the C code that raises: lists, single tensors, results that were made already."""
    p, g, m, v, *rest = op_arguments()
    bad_m = [torch.zeros(3) for _ in m]
    integers = [torch.ones(1000, dtype=torch.int64)] * 50

    def raise_all(times: int) -> None:
        for _ in range(times):
            for call in (
                lambda: torch.ops.zeropp.adam_step_(p, g, bad_m, v, *rest),
                lambda: torch.ops.zeropp.norm_squares(integers),
                lambda: torch.ops.zeropp._adopt(integers[0], -5),
            ):
                with pytest.raises(RuntimeError):
                    call()

    raise_all(500)
    before, uses = resident_bytes(), [t._use_count() for t in (*p, *g, *bad_m, *v, integers[0])]
    raise_all(3_500)
    assert [t._use_count() for t in (*p, *g, *bad_m, *v, integers[0])] == uses, "references to arguments leaked"
    grown = resident_bytes() - before
    # One leaked list (50 handles, about 2 KB) a call would be 7 MB; the allocator's own noise is far below 2.
    assert grown < 2 * 2**20, f"{grown} bytes in 10,500 raises"


def test_references_are_given_back() -> None:
    a = lists()
    before = [t._use_count() for name in ("params", "grads") for t in a[name]]
    for _ in range(20):
        zeropp.ops.adam_step_(**a)
        zeropp.ops.norm_squares(a["grads"])
    assert [t._use_count() for name in ("params", "grads") for t in a[name]] == before
