# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the operators' Python functions: checks that C cannot make, the call, and the rules for autograd."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FP32 = (torch.float32,)
CPU = ("cpu",)
BOTH = ("cpu", "cuda", *(["sim"] if os.environ.get("ZEROPP_CUDA_DRIVER") else []))
"""The devices of operators that have CUDA kernels. "sim" is the simulated GPU of tests/sim."""

Gradients = dict[str, tuple[Callable[..., Any], Callable[..., Any]]]
"""The backward of each operator that has one, and what keeps its inputs for that."""


def check_readable(name: str, label: str, tensor: Tensor, devices: tuple[str, ...] = CPU) -> None:
    """Require a tensor, on one of the devices, that a differentiable operator may read."""
    if isinstance(tensor, Tensor) and tensor.is_cpu:
        return
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: {label} is a {type(tensor).__name__}, wanted a tensor")
    if tensor.device.type not in devices:
        raise ValueError(
            f"{name}: {label} is on {tensor.device}, wanted {' or '.join(devices)}; other devices are not supported"
        )


def check_tensor(name: str, label: str, tensor: Tensor, devices: tuple[str, ...] = CPU) -> None:
    """Require a tensor, on one of the devices, whose gradient is not lost."""
    if isinstance(tensor, Tensor) and tensor.is_cpu and not tensor.requires_grad:
        return  # nearly all: an operator on few elements takes less than the checks below would
    check_readable(name, label, tensor, devices)
    if torch.is_grad_enabled() and tensor.requires_grad:
        raise ValueError(
            f"{name}: {label} requires grad, and this operation has no gradient; wanted a tensor that does not: call "
            "it under torch.no_grad(), or pass tensor.detach()"
        )


def are_plain(tensors: Iterable[Tensor]) -> bool:
    """True if all are tensors on the cpu that require no gradient, as nearly all are; for another one an error has to name it."""
    for tensor in tensors:  # noqa: SIM110  (a generator would cost as much as the looks)
        if not isinstance(tensor, Tensor) or not tensor.is_cpu or tensor.requires_grad:
            return False
    return True


def check_tensors(name: str, argument: str, tensors: Sequence[Tensor], devices: tuple[str, ...] = CPU) -> None:
    """Require a list of tensors that :func:`check_tensor` takes."""
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(f"{name}: {argument} is a {type(tensors).__name__}, wanted a list of tensors")
    if torch.compiler.is_compiling() or not _all_fine(tensors, "cuda" in devices):
        for index, tensor in enumerate(tensors):
            check_tensor(name, f"{argument}[{index}]", tensor, devices)


_is_cpu, _is_cuda, _asks_grad = map(operator.attrgetter, ("is_cpu", "is_cuda", "requires_grad"))


def _all_fine(tensors: Sequence[Tensor], cuda: bool) -> bool:
    """Most lists are, and long: naming each tensor before looking at it would cost more than the operator's work. So would a loop here."""
    if not set(map(type, tensors)) <= {Tensor, Parameter}:
        return False
    if not all(map(_is_cpu, tensors)) and not (cuda and all(map(_is_cuda, tensors))):
        return False
    return not (torch.is_grad_enabled() and any(map(_asks_grad, tensors)))


def check_numbers(name: str, numbers: Mapping[str, object]) -> None:
    """Numbers, not booleans."""
    for argument, value in numbers.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise TypeError(f"{name}: {argument} is {value!r}, wanted a number")


def check_whole(name: str, argument: str, value: object) -> None:
    """Require a whole number."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: {argument} is {value!r}, wanted a whole number")


def check_blocks(name: str, argument: str, elems: object) -> None:
    """Require the length of a block or chunk."""
    check_whole(name, argument, elems)
    assert isinstance(elems, int)
    if elems < 16 or elems % 16:
        raise ValueError(f"{name}: {argument} is {elems}, wanted a multiple of 16, at least 16")


def steps_of(name: str, step: int | Sequence[int], params: Sequence[Tensor]) -> list[int]:
    """Return one number a tensor."""
    if isinstance(step, bool) or not isinstance(step, (int, list, tuple)):
        raise TypeError(f"{name}: step is a {type(step).__name__}, wanted a whole number, or a list of them")
    return [step] * len(params) if isinstance(step, int) else list(step)


def rates_of(name: str, rates: Mapping[str, float | Sequence[float]]) -> list[list[float]]:
    """Return each rate as a list: one number for all tensors, or one a tensor."""
    lists = []
    for argument, value in rates.items():
        if isinstance(value, (list, tuple)):
            check_numbers(name, {f"{argument}[{index}]": one for index, one in enumerate(value)})
            lists.append([float(one) for one in value])
        else:
            check_numbers(name, {argument: value})
            assert isinstance(value, (int, float))
            lists.append([float(value)])
    return lists


def skips_of(name: str, skip: Tensor | None) -> list[Tensor]:
    """Return the list that operators take for ``skip``, which has no tensor for None."""
    words = [] if skip is None else [skip]
    check_tensors(name, "skip", words, BOTH)
    return words


def scale_of(name: str, grad_scale: float | Tensor, skip: Tensor | None) -> list[object]:
    """Return the three arguments that operators take for ``grad_scale``, a number or a tensor, and ``skip``."""
    if isinstance(grad_scale, Tensor):
        check_tensors(name, "grad_scale", [grad_scale], BOTH)
        return [1.0, [grad_scale], skips_of(name, skip)]
    check_numbers(name, {"grad_scale": grad_scale})
    return [grad_scale, [], skips_of(name, skip)]


def prefix_of(name: str) -> str:
    """Return the words that C puts before its messages about an operator."""
    return name.replace("zeropp.ops.", "zeropp::") + ": "


def call(name: str, op: Callable[..., Any], arguments: Sequence[Any], written: Iterable[Tensor]) -> Any:
    """Call an operator; what it refuses is a ValueError whose message names the function."""
    if torch.compiler.is_compiling():
        return op(*arguments)
    try:
        result = op(*arguments)
    except RuntimeError as error:
        message = str(error).split("\n", 1)[0]
        raise ValueError(f"{name}: {message.removeprefix(prefix_of(name))}") from error
    # Count the write, so that a backward that saved the old value refuses it. (Inference tensors have no counter, and are left out.)
    torch.autograd.graph.increment_version(written)
    return result


def decode(name: str, op: Callable[..., Any], parts: Sequence[Tensor], dst: Tensor, numbers: Sequence[Any]) -> None:
    """Call an operator that writes to ``dst`` the values that codes and scales stand for."""
    check_tensor(name, "dst", dst, BOTH)
    call(name, op, [*parts, dst, *numbers], [dst])


def ask(name: str, op: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Call an operator that returns new tensors; what C refuses is a ValueError whose message names the function."""
    if torch.compiler.is_compiling():
        return op(*arguments)
    try:
        return op(*arguments)
    except RuntimeError as error:
        message = str(error).split("\n", 1)[0]
        if not message.startswith(prefix_of(name)):
            raise
        raise ValueError(f"{name}: {message.removeprefix(prefix_of(name))}") from error


def fake_check(name: str, label: str, tensor: Tensor, dtypes: Sequence[torch.dtype], elems: int | None = None) -> None:
    """Check a tensor in a fake kernel: its dtype, and its number of elements where it is known."""
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}: {label} is {tensor.dtype}, wanted {' or '.join(map(str, dtypes))}")
    if elems is not None and tensor.numel() != elems:
        raise ValueError(f"{name}: {label} has {tensor.numel()} elements, wanted {elems}")


def fake_check_like(
    name: str, argument: str, tensors: Sequence[Tensor], params: Sequence[Tensor], dtypes: Sequence[torch.dtype]
) -> None:
    """Check a list beside ``params`` in a fake kernel."""
    if len(tensors) != len(params):
        raise ValueError(f"{name}: {argument} has {len(tensors)} tensors, wanted {len(params)} as in params")
    for index, (tensor, param) in enumerate(zip(tensors, params, strict=True)):
        fake_check(name, f"{argument}[{index}]", tensor, dtypes, param.numel())
