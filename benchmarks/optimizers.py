# SPDX-License-Identifier: Apache-2.0
"""Adam, Lion, Adagrad, SGD and LAMB over lists of tensors against torch's foreach and fused versions and DeepSpeed's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness import Need, Run, alone, alternate, repeat_for, timed
from torch import Tensor

CLAIM = (
    "over lists of tensors Lion and LAMB >= 3x torch foreach, Adam over 1,000 tensors >= 2x torch fused; none behind "
    "DeepSpeed's"
)
NEEDS = (Need("DeepSpeed", module="deepspeed"),)
SHAPES = {"16M in 16 tensors": [1 << 20] * 16, "1000 tensors of 4096": [4096] * 1000}


def foreach_lion(params: list[Tensor], grads: list[Tensor], momenta: list[Tensor], scratch: list[Tensor]) -> None:
    """Lion as it is written with torch's foreach operations (torch has no Lion), into memory that is there."""
    torch._foreach_copy_(scratch, momenta)
    torch._foreach_mul_(scratch, 0.9)
    torch._foreach_add_(scratch, grads, alpha=0.1)
    torch._foreach_sign_(scratch)
    torch._foreach_mul_(params, 1 - 1e-3 * 0.1)
    torch._foreach_add_(params, scratch, alpha=-1e-3)
    torch._foreach_mul_(momenta, 0.99)
    torch._foreach_add_(momenta, grads, alpha=0.01)


def foreach_lamb(params: list[Tensor], grads: list[Tensor], moments: list[Tensor], squares: list[Tensor]) -> None:
    """Step 2 of LAMB as it is written with torch's foreach operations (torch has no LAMB)."""
    torch._foreach_lerp_(moments, grads, 0.1)
    torch._foreach_mul_(squares, 0.999)
    torch._foreach_addcmul_(squares, grads, grads, value=0.001)
    roots = torch._foreach_sqrt(squares)
    torch._foreach_div_(roots, (1 - 0.999**2) ** 0.5)
    torch._foreach_add_(roots, 1e-6)
    updates = torch._foreach_div(moments, roots)
    torch._foreach_div_(updates, 1 - 0.9**2)
    torch._foreach_add_(updates, params, alpha=0.1)
    sizes, norms = torch._foreach_norm(updates), torch._foreach_norm(params)
    ratios = torch.clamp(torch.stack(norms) / torch.stack(sizes), 0.0, 10.0) * 1e-3
    torch._foreach_mul_(updates, list(ratios.unbind()))
    torch._foreach_sub_(params, updates)


def stepper(kind: Any, lists: dict[str, list[Tensor]], **options: Any) -> Callable[[], object]:
    """The step of an optimizer of a peer over its own copies, after a first step that makes its state."""
    params = [p.clone().requires_grad_() for p in lists["params"]]
    for param, grad in zip(params, lists["grads"], strict=True):
        param.grad = grad
    optimizer = kind(params, **options)
    optimizer.step()
    step: Callable[[], object] = optimizer.step
    return step


def run(bench: Run) -> None:
    torch.set_num_threads(1)
    for shape, lengths in SHAPES.items():
        measure(bench, shape, lengths)


def measure(bench: Run, shape: str, lengths: list[int]) -> None:
    """Measure all optimizers over tensors of these lengths."""
    import zeropp

    lists = {name: [torch.randn(n) for n in lengths] for name in ("params", "grads")}
    states = [torch.rand(n) for n in lengths]
    scratch = [torch.empty(n) for n in lengths]
    check(bench, shape, lists, states)
    mine = [p.clone() for p in lists["params"]]
    grads, squares = lists["grads"], [s.clone() for s in states]
    ours: dict[str, Callable[[], object]] = {
        "AdamW": lambda: zeropp.ops.adam_step_(mine, grads, states, squares, step=2, lr=1e-3, weight_decay=0.1),
        "Lion": lambda: zeropp.ops.lion_step_(mine, grads, states, lr=1e-3, weight_decay=0.1),
        "Adagrad": lambda: zeropp.ops.adagrad_step_(mine, grads, states, step=2, lr=1e-3),
        "SGD": lambda: zeropp.ops.sgd_step_(mine, grads, states, step=2, lr=1e-3, momentum=0.9),
        "LAMB": lambda: zeropp.ops.lamb_step_(mine, grads, states, squares, step=2, lr=1e-3, weight_decay=0.1),
    }
    peers = {} if alone() else peers_of(lists, states, scratch)
    for name, own in ours.items():
        contenders = {"ours": own, **peers.get(name, {})}
        repeat = repeat_for(own, 5.0)
        touched = (28 if name == "AdamW" else 20) * sum(lengths)
        src, dst = (torch.zeros(touched // 2, dtype=torch.uint8) for _ in range(2))
        copy = timed(partial(dst.copy_, src))
        samples = alternate(
            {**{key: timed(call, repeat=repeat) for key, call in contenders.items()}, "copy": copy},
            rounds=7 if bench.quick else 15,
            ours=["ours"],
        )
        # The copy moves as many bytes as one pass does; LAMB's two move twice that, so it has no such limit.
        limit = None if name == "LAMB" else "copy"
        names = list(peers.get(name, {}))
        bench.compare(f"{name} fp32 {shape}", samples, ours="ours", peers=names, unit="ms", limit=limit)


def peers_of(
    lists: dict[str, list[Tensor]], states: list[Tensor], scratch: list[Tensor]
) -> dict[str, dict[str, Callable[[], object]]]:
    """The peers of each optimizer, over copies of their own."""
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.lion import DeepSpeedCPULion

    grads = lists["grads"]
    twin, twin_states = [p.clone() for p in lists["params"]], [s.clone() for s in states]
    twin_squares = [s.clone() for s in states]
    adam, adagrad, sgd = torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD
    return {
        "AdamW": {
            "torch foreach": stepper(adam, lists, lr=1e-3, weight_decay=0.1, foreach=True),
            "torch fused": stepper(adam, lists, lr=1e-3, weight_decay=0.1, fused=True),
            "DeepSpeedCPUAdam": stepper(DeepSpeedCPUAdam, lists, lr=1e-3, weight_decay=0.1),
        },
        "Lion": {
            "torch foreach": lambda: foreach_lion(twin, grads, twin_states, scratch),
            "DeepSpeedCPULion": stepper(DeepSpeedCPULion, lists, lr=1e-3, weight_decay=0.1),
        },
        "Adagrad": {
            "torch foreach": stepper(adagrad, lists, lr=1e-3, foreach=True),
            "torch fused": stepper(adagrad, lists, lr=1e-3, fused=True),
            "DeepSpeedCPUAdagrad": stepper(DeepSpeedCPUAdagrad, lists, lr=1e-3),
        },
        "SGD": {
            "torch foreach": stepper(sgd, lists, lr=1e-3, momentum=0.9, foreach=True),
            "torch fused": stepper(sgd, lists, lr=1e-3, momentum=0.9, fused=True),
        },
        "LAMB": {
            "torch foreach": lambda: foreach_lamb(twin, grads, twin_states, twin_squares),
        },
    }


def check(bench: Run, shape: str, lists: dict[str, list[Tensor]], states: list[Tensor]) -> None:
    """One step of each from the same state: within a few ulp (the derived bounds: tests/ops)."""
    import zeropp

    params, grads = lists["params"][:2], lists["grads"][:2]
    for name in ("AdamW", "Lion", "Adagrad", "SGD", "LAMB"):
        mine, mine_states = [p.clone() for p in params], [s.clone() for s in states[:2]]
        twin, twin_states = [p.clone() for p in params], [s.clone() for s in states[:2]]
        if name == "Lion":
            zeropp.ops.lion_step_(mine, grads, mine_states, lr=1e-3, weight_decay=0.1)
            foreach_lion(twin, grads, twin_states, [torch.empty_like(p) for p in twin])
        elif name == "LAMB":
            squares, twin_squares = [s.clone() for s in mine_states], [s.clone() for s in mine_states]
            zeropp.ops.lamb_step_(mine, grads, mine_states, squares, step=2, lr=1e-3, weight_decay=0.1)
            foreach_lamb(twin, grads, twin_states, twin_squares)
        else:
            kind = getattr(torch.optim, name)
            leaves = [p.requires_grad_() for p in twin]
            for leaf, grad in zip(leaves, grads, strict=True):
                leaf.grad = grad
            optimizer = kind(leaves, lr=1e-3, foreach=True, **({"momentum": 0.9} if name == "SGD" else {}))
            squares = [s.clone() for s in mine_states]
            for leaf, state in zip(leaves, twin_states, strict=True):
                optimizer.state[leaf] = {
                    "AdamW": {"step": torch.tensor(1.0), "exp_avg": state, "exp_avg_sq": state.clone()},
                    "Adagrad": {"step": torch.tensor(1.0), "sum": state},
                    "SGD": {"momentum_buffer": state},
                }[name]
            optimizer.step()
            if name == "AdamW":
                zeropp.ops.adam_step_(mine, grads, mine_states, squares, step=2, lr=1e-3, weight_decay=0.01)
            elif name == "Adagrad":
                zeropp.ops.adagrad_step_(mine, grads, mine_states, step=2, lr=1e-3)
            else:
                zeropp.ops.sgd_step_(mine, grads, mine_states, step=2, lr=1e-3, momentum=0.9)
        off = max((a - b.detach()).abs().max().item() for a, b in zip(mine, twin, strict=True))
        # parameters are below 8 (3 bits of exponent over 1): a few ulp; a sign of Lion's that is not determined: 2 lr
        bench.check(off <= (2.1e-3 if name == "Lion" else 4 * 8 * 2.0**-24), f"{name} {shape}: differs by {off}")
