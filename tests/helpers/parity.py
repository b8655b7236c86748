# SPDX-License-Identifier: Apache-2.0
"""Five steps of each model under plain torch DDP (gloo) and under zeropp, in three modes at once: one shared copy per
host, gathering, gathering ahead.

Exact: with two ranks DDP's sum of halves and ours, half of the sum, are the same bits, so losses, values and
gradients are compared with torch.equal. AdamW: zeropp's kernel rounds in another order than torch's, so one step is
held to BOUND, and the reference then goes on from zeropp's values: every later step is exact again, instead of within a
bound that grows.

BOUND, per element: a step is p (1 - lr wd) - lr m^/(sqrt(v^) + eps). The moments are sums of t terms, each rounded at
most 4 times (u = 2^-24): |dm| <= 4 u t max|g|, while sqrt(v) >= sqrt((1 - beta2) ...) >= 0.03 max|g|; with bias
corrections (1 - 0.9^t) >= 0.1 and sqrt(1 - 0.999^5) <= 0.071 the quotient errs by at most 4 u 5 (0.071 / 0.0316) /
0.1 < 450 u; four more roundings of the quotient and two of p. So |difference| <= 512 u lr + 4 u |p|."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import zeropp
from data_parallel import data_parallel
from tiny import MODES
from torch import Tensor, nn
from zeropp.zero.prepare import is_prepared

LR, STEPS, U = 1e-2, 5, 2.0**-24


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    step: Callable[[nn.Module, int], Tensor]
    """Forward and backward(s) of one step; the loss. Gets the model, and the number that the batch depends on."""
    setup: Callable[[nn.Module], None] | None = None
    units: Any = "auto"
    ddp: dict[str, Any] | None = field(default_factory=dict)
    """Keywords of DistributedDataParallel. None: the step goes around forward, so gradients are averaged by hand."""
    modes: dict[str, dict[str, Any]] = field(default_factory=lambda: MODES)
    tolerance: float = 0.0
    """Times the largest gradient of a parameter: where the order of summation differs, and says why."""


def draw(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 * step + dist.get_rank())


def rows(step: int) -> Tensor:
    return torch.randn(4, 8, generator=draw(step))


def tokens(step: int) -> Tensor:
    return torch.randint(0, 300, (2, 16), generator=draw(step))


def backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss


def language(model: nn.Module, step: int) -> Tensor:
    ids = tokens(step)
    return backward(model(input_ids=ids, labels=ids).loss)


def vector(model: nn.Module, step: int) -> Tensor:
    return backward(model(rows(step)))


def two_backwards(model: nn.Module, step: int) -> Tensor:
    first = backward(model(rows(step)))
    return first.detach() + backward(model(rows(step + 50)))


def backward_alone(model: nn.Module, loss: Tensor) -> None:
    """Run a backward. The gradients of a plain model are averaged over ranks before they are added, as zeropp does it."""
    if is_prepared(model):
        loss.backward()
        return
    before = [p.grad for p in model.parameters()]
    model.zero_grad()
    loss.backward()
    average(model)
    for p, old in zip(model.parameters(), before, strict=True):
        p.grad = p.grad if old is None else old if p.grad is None else old + p.grad


def in_order(order: str, outside: bool) -> Callable[[nn.Module, int], Tensor]:
    """A step of forwards F, backwards B and evaluations E in this order; P is the backward of a loss that shares no graph with F's."""

    def step(model: nn.Module, step: int) -> Tensor:
        losses: dict[str, Tensor] = {}
        for word in order.split():
            x = rows(step + 50 * int(word[1]))
            if word[0] == "F":
                out = model(x)
                losses[f"B{word[1]}"] = (model.again(out) if outside else out).square().mean()
                losses[f"P{word[1]}"] = model.middle.weight.view(-1).square().mean() if outside else x.mean()
            elif word[0] == "E":
                with torch.no_grad():
                    model(x)
            else:
                backward_alone(model, losses[word])
        return sum((losses[word].detach() for word in order.split() if word in losses), torch.tensor(0.0))

    return step


ORDERS = ("F0 B0 F1 B1", "F0 F1 B0 B1", "F0 F1 B1 B0", "F0 F1 B0 E1 B1", "F0 E0 B0 P0")


def checkpointing(reentrant: bool) -> Callable[[nn.Module], None]:
    def setup(model: nn.Module) -> None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()

    return setup


def compile_blocks(model: nn.Module) -> None:
    for block in model.model.layers:
        block.compile(backend="aot_eager")


COMPILING = {compile_blocks}


def snapshot(model: nn.Module, **how: Any) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
    """Whole values and gradients by name."""
    with zeropp.gathered(model, **how):
        values = {n: p.detach().clone() for n, p in model.named_parameters()}
        gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    return values, gradients


def average(model: nn.Module) -> None:
    for p in model.parameters():
        if p.requires_grad and p.grad is not None:
            mean = p.grad.cpu() / dist.get_world_size()  # gloo has no sums on a simulated GPU
            dist.all_reduce(mean)
            p.grad.copy_(mean)


def same_gradients(
    what: str, ours: dict[str, Tensor | None], wanted: dict[str, Tensor | None], tolerance: float
) -> None:
    for name, want in wanted.items():
        got = ours[name]
        assert (got is None) == (want is None), f"{what}: gradient of {name}: {got is None=}, {want is None=}"
        if want is None:
            continue
        worst = (got - want).abs().max().item() if want.numel() else 0.0
        most = tolerance * want.abs().max().item() if tolerance else 0.0
        assert worst <= most, f"{what}: gradient of {name} off by {worst}, wanted at most {most}"


def same_values(what: str, ours: dict[str, Tensor], wanted: dict[str, Tensor], bound: bool) -> None:
    for name, want in wanted.items():
        if not bound:
            assert torch.equal(ours[name], want), f"{what}: values of {name} off by {(ours[name] - want).abs().max()}"
            continue
        most = 512 * U * LR + 4 * U * want.abs()
        over = (ours[name] - want).abs() - most
        assert not want.numel() or over.max() <= 0, f"{what}: {name} beyond the bound of one AdamW step by {over.max()}"


def left_full(model: nn.Module) -> list[str]:
    from zeropp.zero.engine import engine_of
    from zeropp.zero.model_state import SHARD

    return [u.name for u in engine_of(model).units if u.place == SHARD and u.core.full]


def run(case: Case) -> dict[str, Any]:
    torch.manual_seed(0)
    reference = case.make().train()
    if case.setup:
        case.setup(reference)
    copies = {mode: copy.deepcopy(reference) for mode in case.modes}
    if case.setup in COMPILING:  # a copy is a plain module
        for model in copies.values():
            case.setup(model)
    ddp = reference if case.ddp is None else data_parallel(reference, **case.ddp)
    optimizer = torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], lr=LR)
    ours = {}
    for mode, keywords in case.modes.items():
        model = copies[mode]
        adam = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
        ours[mode] = zeropp.prepare(model, adam, zeropp.Config(units=case.units, **keywords))
    zeropp.traffic(reset=True)
    losses = []
    for step in range(STEPS):
        losses.append(_one_step(case, step, reference, ddp, optimizer, ours))
    return {"losses": losses, "traffic": zeropp.traffic(), "units": len(_units(ours["gather"][0]))}


def _units(model: nn.Module) -> list[Any]:
    from zeropp.zero.engine import engine_of

    return engine_of(model).units


def _one_step(
    case: Case, step: int, reference: nn.Module, ddp: nn.Module, optimizer: Any, ours: dict[str, Any]
) -> float:
    want = case.step(ddp, step).item()
    if case.ddp is None:
        average(reference)
    wanted_gradients = {n: p.grad for n, p in reference.named_parameters()}
    wanted_values = {n: p.detach() for n, p in reference.named_parameters()}
    seen = []
    for mode, (model, _) in ours.items():
        what = f"step {step}, {mode}"
        got = case.step(model, step).item()
        assert got == want, f"{what}: loss {got!r}, DDP's {want!r}"
        assert not left_full(model), f"{what}: still whole after backward: {left_full(model)}"
        values, gradients = snapshot(model, grads=True)
        same_values(what, values, wanted_values, False)
        same_gradients(what, gradients, wanted_gradients, case.tolerance)
        if seen:
            same_gradients(f"{what} against {next(iter(ours))}", gradients, seen[0], 0.0)
        seen.append(gradients)
    optimizer.step()
    optimizer.zero_grad()
    stepped = []
    for mode, (model, adam) in ours.items():
        adam.step()
        adam.zero_grad()
        values, _ = snapshot(model)
        same_values(
            f"after step {step}, {mode}", values, {n: p.detach() for n, p in reference.named_parameters()}, True
        )
        if stepped:
            same_values(f"after step {step}, {mode} against {next(iter(ours))}", values, stepped[0], False)
        stepped.append(values)
    with torch.no_grad():
        for name, p in reference.named_parameters():
            p.copy_(stepped[0][name])
    return want
