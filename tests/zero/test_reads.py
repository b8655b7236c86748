# SPDX-License-Identifier: Apache-2.0
"""A released parameter answers with metadata and refuses every read by name; p.grad is never wrong in silence."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import zeropp
from ranks import on_cpu_only, on_ranks
from tiny import MODES, Tiny, vector
from torch import Tensor, nn
from torch.nn import functional as F


def prepared(mode: str, **more: Any) -> tuple[Tiny, Any]:
    torch.manual_seed(0)
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return zeropp.prepare(model, optimizer, zeropp.Config(units=("Linear", "Tiny"), **MODES[mode], **more))


def _no_grad(read: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    def guarded(p: Tensor) -> Any:
        with torch.no_grad():
            return read(p)

    return guarded


def _data_ptr_read(p: Tensor) -> Any:
    return p.data_ptr()


def _assign(p: Tensor) -> None:
    p[0, 0] = 1.0


def _in_place(p: Tensor) -> None:
    p += 1.0


def _set_data(p: Tensor) -> None:
    p.data = torch.zeros(8, 8)


# Every one of these reads or writes values, gives them away, or would take them along.
READS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda p: p.sum(),
    "sum under no_grad": _no_grad(lambda p: p.sum()),
    "add": lambda p: p + 1,
    "multiply under no_grad": _no_grad(lambda p: 2 * p),
    "matmul under no_grad": _no_grad(lambda p: torch.ones(2, 8) @ p),
    "in place add": _no_grad(_in_place),
    "add_": _no_grad(lambda p: p.add_(1)),
    "zero_": _no_grad(lambda p: p.zero_()),
    "index": lambda p: p[0],
    "assign an element": _no_grad(_assign),
    "iterate": lambda p: list(p),
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.numpy(),
    "numpy.asarray": lambda p: np.asarray(p),
    "detach": lambda p: p.detach(),
    "detach_": lambda p: p.detach_(),
    "data": lambda p: p.data,
    "set data": _set_data,
    "clone": lambda p: p.clone(),
    "clone under no_grad": _no_grad(lambda p: p.clone()),
    "copy_ into it": _no_grad(lambda p: p.copy_(torch.zeros(8, 8))),
    "copy_ out of it": _no_grad(lambda p: torch.zeros(8, 8).copy_(p)),
    "view": lambda p: p.view(-1),
    "transpose": lambda p: p.t(),
    "T": lambda p: p.T,
    "to dtype": lambda p: p.to(torch.bfloat16),
    "half": lambda p: p.half(),
    "cpu": lambda p: p.cpu().sum(),
    "equal": lambda p: torch.equal(p, torch.zeros(8, 8)),
    "==": lambda p: p == 0,
    "allclose": lambda p: torch.allclose(p, torch.zeros(8, 8)),
    "bool": lambda p: bool((p > 0).all()),
    "isnan": lambda p: torch.isnan(p),
    "norm": lambda p: p.norm(),
    "torch.stack": lambda p: torch.stack([p, p]),
    "torch.cat": lambda p: torch.cat([p, p]),
    "foreach": _no_grad(lambda p: torch._foreach_add([p], 1.0)),
    "F.linear": _no_grad(lambda p: F.linear(torch.ones(2, 8), p)),
    "einsum": _no_grad(lambda p: torch.einsum("ij->j", p)),
    "init": lambda p: nn.init.normal_(p),
    "data_ptr": _data_ptr_read,
    "untyped_storage": lambda p: p.untyped_storage(),
    "share_memory_": lambda p: p.share_memory_(),
    "torch.save": lambda p: torch.save(p, io.BytesIO()),
    "deepcopy": lambda p: copy.deepcopy(p),
    "copy": lambda p: copy.copy(p),
    "parameters_to_vector": lambda p: nn.utils.parameters_to_vector([p]),
    "vector_to_parameters": lambda p: nn.utils.vector_to_parameters(torch.zeros(64), [p]),
    "torch.ops": lambda p: torch.ops.aten.sum(p),
    "torch.nn.Parameter": lambda p: nn.Parameter(p),
    "torch.as_tensor": lambda p: torch.as_tensor(p).sum(),
    "format with digits": lambda p: f"{p.sum():.3f}",
}
SCALAR_READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda p: p.item(),
    "float": lambda p: float(p),
    "int": lambda p: int(p),
    "bool of one": lambda p: bool(p),
}
MODEL_READS: dict[str, Callable[[nn.Module], Any]] = {
    "state_dict": lambda m: m.state_dict(),
    "torch.save state_dict": lambda m: torch.save(m.state_dict(), io.BytesIO()),
    "load_state_dict": lambda m: m.load_state_dict({"scalar": torch.tensor(1.0)}, strict=False),
    "model.to": lambda m: m.to(torch.bfloat16),
    "model.half": lambda m: m.half(),
    "deepcopy of the model": lambda m: copy.deepcopy(m),
    "torch.save of the model": lambda m: torch.save(m, io.BytesIO()),
    "sum over parameters": lambda m: sum(p.sum() for p in m.parameters()),
}
METADATA: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda p: tuple(p.shape),
    "size": lambda p: tuple(p.size()),
    "size of one dimension": lambda p: p.size(0),
    "dtype": lambda p: str(p.dtype),
    "device": lambda p: str(p.device),
    "requires_grad": lambda p: p.requires_grad,
    "is_leaf": lambda p: p.is_leaf,
    "grad_fn": lambda p: p.grad_fn is None,
    "numel": lambda p: p.numel(),
    "torch.numel": lambda p: torch.numel(p),
    "dim": lambda p: p.dim(),
    "ndim": lambda p: p.ndim,
    "stride": lambda p: p.stride(),
    "element_size": lambda p: p.element_size(),
    "nbytes": lambda p: p.nbytes,
    "len": lambda p: len(p),
    "hash": lambda p: hash(p) == id(p),
    "is_floating_point": lambda p: p.is_floating_point(),
    "torch.is_floating_point": lambda p: torch.is_floating_point(p),
    "is_contiguous": lambda p: p.is_contiguous(),
    "get_device": lambda p: p.get_device(),
    "layout": lambda p: str(p.layout),
    "is parameter": lambda p: isinstance(p, nn.Parameter),
    "is tensor": lambda p: torch.is_tensor(p),
    "grad": lambda p: p.grad is None,
    "in a set": lambda p: p in {p},
    "is_sparse": lambda p: p.is_sparse,
    "is_cuda": lambda p: p.is_cuda,
}


def _try(read: Callable[[Any], Any], of: Any) -> dict[str, Any]:
    try:
        value = read(of)
    except Exception as error:
        return {
            "error": type(error).__name__,
            "text": str(error),
        }  # load_state_dict repeats our sentence in an error of its own
    return {"value": repr(value)[:200]}


@functools.cache
def every_read(mode: str) -> dict[str, Any]:
    """Try every read after prepare and after a step. The model trains on like one whose values were not read."""
    model, optimizer = prepared(mode)
    untouched, control = prepared(mode)
    answer: dict[str, Any] = {}
    for when in ("after prepare", "after a step"):
        p = model.blocks[1].weight
        found = {name: _try(read, p) for name, read in READS.items()}
        found |= {name: _try(read, model.scalar) for name, read in SCALAR_READS.items()}
        found |= {name: _try(read, model) for name, read in MODEL_READS.items()}
        answer[when] = found
        for each, adam in ((model, optimizer), (untouched, control)):
            each(vector()).backward()
            adam.step()
            adam.zero_grad()
    with zeropp.gathered(model), zeropp.gathered(untouched):
        for a, b in zip(model.parameters(), untouched.parameters(), strict=True):
            assert torch.equal(a, b), "a refused read changed something"
    return answer


def stray_views(mode: str) -> None:
    """What no class swap sees (torch.tensor(p), views taken before the release) reads NaN where the memory stays
    mapped; where the host has one copy it reads what is there."""
    model, _ = prepared(mode)
    with zeropp.gathered(model):
        view = model.blocks[1].weight.detach().view(-1)
        want = view.clone()
    stays = mode == "host copy" or dist.get_world_size() == 1
    if not stays:
        on_cpu_only("a read of released memory of a device gets what is there; ZEROPP_POISON=1 puts NaN there")
    for stray in (view.clone(), torch.tensor(model.blocks[1].weight).view(-1)):
        assert torch.equal(stray, want) if stays else torch.isnan(stray).all()


@functools.cache
def metadata(mode: str) -> dict[str, Any]:
    model, _ = prepared(mode)
    plain = Tiny().blocks[1].weight
    p = model.blocks[1].weight
    return {name: [_try(read, p), _try(read, plain)] for name, read in METADATA.items()}


def printing(mode: str) -> None:
    model, _ = prepared(mode)
    p = model.blocks[1].weight
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        print(p)
        print(next(iter(model.named_parameters())))
    wanted = "PartitionedParameter('blocks.1.weight', shape=(8, 8), dtype=torch.float32)"
    assert repr(p) == str(p) == f"Parameter containing:\n{wanted}"
    assert f"{p}" == wanted
    assert wanted in out.getvalue()
    assert "Linear(in_features=8, out_features=8" in repr(model)


def _grad_error(read: Callable[[], Any]) -> str:
    try:
        value = read()
    except zeropp.PartitionedParameterError as error:
        return str(error)
    raise AssertionError(f"the gradient was read: {value!r}")


def gradients(mode: str, stage: int) -> None:
    """p.grad: None before, refused after backward, whole inside gathered(grads=True), None again after either
    zero_grad."""
    more = {} if stage == 3 else {"stage": stage}
    model, optimizer = prepared(mode, **more)
    params = list(model.parameters())
    assert all(p.grad is None for p in params)
    for clear in (optimizer.zero_grad, model.zero_grad, lambda: [setattr(p, "grad", None) for p in params]):
        model(vector()).backward()
        for p in params:
            sentence = _grad_error(lambda p=p: p.grad)
            assert "clip_grad_norm_" in sentence and "grads=True" in sentence, sentence
        sentence = _grad_error(lambda: params[1].grad.norm())
        assert "'blocks.0.weight'" in sentence, sentence
        _grad_error(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        _grad_error(lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0))
        _grad_error(lambda: [p.grad for p in params if p.grad is not None])
        _grad_error(lambda: setattr(params[0], "grad", torch.zeros(())))
        with zeropp.gathered(model, grads=True):
            assert all(p.grad is not None and p.grad.shape == p.shape for p in params)
            norm = torch.nn.utils.get_total_norm([p.grad for p in params]).item()
        assert abs(optimizer.clip_grad_norm_(float("inf")) - norm) < 1e-6 * norm
        _grad_error(lambda: params[0].grad)
        clear()
        assert all(p.grad is None for p in params), clear
        assert optimizer_refuses(optimizer), clear
        model(vector(1)).backward()  # and it trains on
        optimizer.step()
        optimizer.zero_grad()


def optimizer_refuses(optimizer: Any) -> bool:
    try:
        optimizer.step()
    except zeropp.Error as error:
        return "no parameter has a gradient" in str(error)
    return False


def accumulated(mode: str) -> None:
    """Without zero_grad the next backward adds, as everywhere in torch; with one between, it does not."""
    model, _ = prepared(mode)
    model(vector()).backward()
    once = _whole(model)
    model(vector()).backward()
    twice = _whole(model)
    for name, gradient in once.items():
        # Halves add without rounding: the same gradient twice is its double, bit for bit.
        assert torch.equal(twice[name], 2 * gradient), name
    model.zero_grad()
    model(vector()).backward()
    again = _whole(model)
    assert all(torch.equal(again[name], gradient) for name, gradient in once.items())


def _whole(model: nn.Module) -> dict[str, Tensor]:
    with zeropp.gathered(model, grads=True):
        return {name: p.grad.clone() for name, p in model.named_parameters()}


def writing(mode: str) -> None:
    """gathered(write=True): rank 0's values on all ranks, in the master and in the next forward. Without: an error or
    lost."""
    for precision in (None, "bf16"):
        model, optimizer = prepared(mode, precision=precision)
        with zeropp.gathered(model, write=True), torch.no_grad():
            for i, p in enumerate(model.parameters()):
                p.fill_(0.25 * (i + 1) + 100 * dist.get_rank())
        with zeropp.gathered(model):
            for i, p in enumerate(model.parameters()):
                assert torch.equal(p, torch.full_like(p, 0.25 * (i + 1))), (precision, i)
        losses = [torch.zeros(1) for _ in range(dist.get_world_size())]
        loss = model(torch.ones(4, 8))
        dist.all_gather(losses, loss.detach().float().view(1))
        assert all(torch.equal(x, losses[0]) for x in losses), losses
        loss.backward()
        optimizer.step()  # the master has the new values too: a step moves them by about lr, not back
        with zeropp.gathered(model):
            for i, p in enumerate(model.parameters()):
                assert (p - 0.25 * (i + 1)).abs().max() < 0.05, (precision, i)
        # One parameter of a unit: the rest keeps its bits, masters' included.
        with zeropp.gathered(model):
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
        with zeropp.gathered(model.blocks[2].bias, write=True), torch.no_grad():
            model.blocks[2].bias.zero_()
        with zeropp.gathered(model):
            for name, p in model.named_parameters():
                want = torch.zeros_like(p) if name == "blocks.2.bias" else before[name]
                assert torch.equal(p, want), (precision, name)


def writing_unasked(mode: str) -> None:
    """A change inside gathered() without write=True never reaches the other ranks in silence."""
    model, _ = prepared(mode)
    with zeropp.gathered(model):
        before = [p.detach().clone() for p in model.parameters()]
    sentence = ""
    try:
        with zeropp.gathered(model.blocks[0]), torch.no_grad():
            model.blocks[0].weight.add_(0.0)
    except zeropp.PartitionedParameterError as error:
        sentence = str(error)
    dist.barrier()
    with zeropp.gathered(model):
        assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    shared = torch.get_default_device().type == "cpu" and mode == "host copy" and dist.get_world_size() > 1
    if shared:  # a copy that ranks share
        assert "'blocks.0.weight' was changed inside zeropp.gathered" in sentence and "write=True" in sentence


def gathered_nests(mode: str) -> None:
    """gathered() inside itself, around a forward, around a backward, left by an exception, of a module, a list, a
    parameter."""
    model, optimizer = prepared(mode)
    first, second = model.blocks[0].weight, model.blocks[1].weight
    with zeropp.gathered(first):
        with zeropp.gathered([first, second]):
            assert first.sum() + second.sum() == second.sum() + first.sum()
            loss = model(vector())
        assert torch.isfinite(first.sum())
        _refused(second)
        loss.backward()
        assert torch.isfinite(first.sum())
    _refused(first)
    with contextlib.suppress(ZeroDivisionError), zeropp.gathered(model.blocks):
        _ = 1 / 0
    _refused(first)
    optimizer.step()
    _refused(first)
    with zeropp.gathered([model.blocks[0], model.scalar]):
        assert model.scalar.item() != 0
    with zeropp.gathered(torch.nn.Linear(2, 2)):  # not partitioned: left alone
        pass


def _refused(p: Tensor) -> None:
    answer = _try(READS["sum under no_grad"], p)  # with gradients on it would be a part of the loss that is being built
    assert answer.get("error") == "PartitionedParameterError", answer


def in_forward(mode: str) -> None:
    """Inside a forward of the model any parameter may be read, also by a module that does not own it."""

    class Nosy(Tiny):
        def forward(self, x: Tensor) -> Tensor:
            penalty = sum(p.pow(2).sum() for p in self.parameters())
            with torch.no_grad():
                largest = self.blocks[2].weight.abs().max().item()
            return super().forward(x) + 1e-3 * penalty + 0 * largest

    torch.manual_seed(0)
    plain = Nosy()
    model, _ = zeropp.prepare(copy.deepcopy(plain), None, zeropp.Config(units=("Linear", "Nosy"), **MODES[mode]))
    want, got = plain(vector()), model(vector())
    assert torch.equal(got, want)
    want.backward()
    got.backward()
    for p in plain.parameters():
        p.grad.div_(dist.get_world_size())
        dist.all_reduce(p.grad)
    whole = _whole(model)
    for name, p in plain.named_parameters():
        worst = (whole[name] - p.grad).abs().max()
        assert torch.equal(whole[name], p.grad), f"{name} off by {worst}"
    _refused(model.blocks[0].weight)


WRITES = ("in place add", "add_", "zero_", "assign an element", "copy_ into it", "init", "load_state_dict")


@on_ranks(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("read", [*READS, *SCALAR_READS, *MODEL_READS])
def test_reads_are_refused(read: str, mode: str) -> None:
    for when, found in every_read(mode).items():
        refused(read, when, found[read], 2)


def refused(read: str, when: str, result: dict[str, str], ranks: int) -> None:
    """The sentence names the parameter and the way out. Changing p.data has one of its own."""
    text = result.get("text", f"read {result.get('value')}")
    assert "partitioned over" in text or read == "set data", f"{read} {when}: {text}"
    assert "zeropp.gathered(parameter" in text, f"{read} {when}: {text}"
    if read != "set data":
        assert f"is partitioned over {ranks} rank{'s' if ranks > 1 else ''}," in text, text
    if read in READS or read in SCALAR_READS:
        assert ("'scalar'" if read in SCALAR_READS else "'blocks.1.weight'") in text, text
    if read in WRITES:
        assert "writes its values" in text and "write=True" in text, text


@on_ranks(2)
@pytest.mark.parametrize("read", METADATA)
def test_metadata_answers(read: str) -> None:
    for mode in MODES:
        ours, plain = metadata(mode)[read]
        assert ours == plain and "value" in ours, (mode, ours, plain)


PER_MODE: dict[str, Callable[[str], None]] = {
    "printing": printing,
    "stray views": stray_views,
    "gradients": lambda mode: gradients(mode, 3),
    "accumulated": accumulated,
    "writing": writing,
    "writing unasked": writing_unasked,
    "gathered nests": gathered_nests,
    "in forward": in_forward,
}
CASES = {f"{name}, {mode}": (lambda f=f, mode=mode: f(mode)) for name, f in PER_MODE.items() for mode in MODES}
CASES |= {f"gradients, stage {stage}": (lambda stage=stage: gradients("host copy", stage)) for stage in (1, 2)}


@on_ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str) -> None:
    CASES[case]()


@on_ranks(1)
def test_one_rank_refuses_alike() -> None:
    """A script that works on one process must not fail on two."""
    for case in CASES.values():
        case()
    for mode in MODES:
        metadata(mode)
        for when, found in every_read(mode).items():
            for read, result in found.items() if mode == "host copy" else ():
                refused(read, when, result, 1)
