# SPDX-License-Identifier: Apache-2.0
"""Gradients that autograd has accumulated, before our hooks take them: hooks of others see what one backward gave, and those of
DTensors come to the placement of their parameter, with one message a unit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from zeropp.zero.model.dtensor import like
from zeropp.zero.model.parameter import is_dtensor, local_of


class Aside:
    """The gradients of earlier backwards in ``p.grad``, which are put aside while a new one comes.

    A hook of somebody else that changes ``p.grad`` would otherwise change them each time, and torch would bring each gradient of
    a DTensor to their placement with a message of its own.
    """

    def __init__(self, parameter: torch.Tensor) -> None:
        self.waits = False
        """The gradient of this backward is in p.grad and not settled yet, so another one is added to it."""
        self._parameter, self._sum = parameter, None
        # Before the node runs, and not where autograd.grad only reads what comes to it.
        self._node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
        self._node.register_prehook(self._begin)

    def _begin(self, gradients: Any) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            if not self.waits and self._node is not None:
                self._sum, self._parameter.grad = self._parameter.grad, None  # type: ignore[assignment]

    def restore(self, *unused: Any) -> None:
        """Add the gradient of this backward, in the memory of the sum."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            if self._sum is not None and self._parameter.grad is not None:
                local_of(self._sum).add_(local_of(self._parameter.grad))
                self._parameter.grad = self._sum
            self._sum = None

    def close(self) -> None:
        """Let the node go, which would keep the parameter alive."""
        self._node = self._sum = None


class Arrivals:
    """The gradients of one unit of DTensors in a backward.

    What is Partial is summed over the mesh in the type of reductions, packed into one message when the last gradient of the unit has
    come, or when the backward ends. ``take[i](p)`` then takes the gradient of parameter i.
    """

    def __init__(
        self, parameters: Iterable[Any], sums_in: torch.dtype, take: list[Callable[..., Any]], adds: bool
    ) -> None:
        self._parameters, self._sums_in, self._take = list(parameters), sums_in, take
        self._asides = [Aside(one) for one in self._parameters] if adds else []
        self._came: set[int] = set()
        self._waiting: list[int] = []

    def came(self, index: int, parameter: Any) -> None:
        """Settle the gradient of a parameter, or let it wait for others of the unit."""
        if index in self._came and index not in self._waiting:
            self._came.clear()  # a backward before this one ended by an exception
        self._came.add(index)
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            if index not in self._waiting:
                if _is_sum(parameter):
                    self._wait(index, True)
                    self._waiting.append(index)
                else:
                    _place(parameter)
                    self._done(index)
            complete = self._waiting and all(i in self._came for i, p in enumerate(self._parameters) if p.requires_grad)
        if complete:
            self.flush()

    def end(self) -> None:
        """Settle what waits, because the backward is over."""
        self.flush()
        self._came.clear()

    def settle(self) -> None:
        """Bring all gradients to their placement that torch has put into ``p.grad``; nobody takes them here."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            _sum_over_mesh([p for p in self._parameters if _is_sum(p)], self._sums_in)
            for parameter in self._parameters:
                _place(parameter)

    def flush(self) -> None:
        """Sum the gradients that wait, in one message, and hand them on."""
        waiting, self._waiting = sorted(self._waiting), []
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            _sum_over_mesh([self._parameters[i] for i in waiting if _is_sum(self._parameters[i])], self._sums_in)
            for index in waiting:
                self._wait(index, False)
                self._done(index)

    def close(self) -> None:
        """Take no gradients any more."""
        for aside in self._asides:
            aside.close()
        self._take = []

    def _wait(self, index: int, waits: bool) -> None:
        if self._asides:
            self._asides[index].waits = waits

    def _done(self, index: int) -> None:
        if self._asides:
            self._asides[index].restore()
        if self._take:
            self._take[index](self._parameters[index])


def _is_sum(parameter: Any) -> bool:
    """Return whether the gradient of a DTensor is a sum over its mesh that was not taken."""
    grad = parameter.grad
    if grad is None or not is_dtensor(grad):
        return False
    placement = grad._spec.placements[0]
    kind = type(placement).__name__  # subclasses, such as that of embeddings, redistribute in ways of their own
    return kind == "Partial" and placement.reduce_op == "sum"


def _sum_over_mesh(parameters: list[Any], dtype: torch.dtype) -> None:
    """Replace gradients by their sum over the mesh, of which each parameter gets its part, in one message."""
    if not parameters:
        return
    locals_ = [one.grad._local_tensor for one in parameters]
    packed = torch.cat([local.reshape(-1).to(dtype) for local in locals_])
    dist.all_reduce(packed, group=parameters[0].device_mesh.get_group())
    parts = packed.split([local.numel() for local in locals_])
    for parameter, local, part in zip(parameters, locals_, parts, strict=True):
        spec = parameter.grad._spec
        base = type(parameter.grad)
        whole = base.from_local(part.view(local.shape).to(local.dtype), spec.mesh, [_replicate()], run_check=False)
        parameter.grad = whole
        _place(parameter)


def _replicate() -> Any:
    return sys.modules["torch.distributed.tensor"].Replicate()


def _place(parameter: Any) -> None:
    """Bring a gradient to the placement of its parameter."""
    grad = parameter.grad
    if grad is None or not is_dtensor(grad):
        return
    placements = parameter._spec.placements
    if grad._spec.placements != placements:
        grad = grad.redistribute(placements=placements)
    local = grad._local_tensor
    parameter.grad = like(parameter, local.wait() if hasattr(local, "wait") else local)


class HookOrder:
    """Hooks of ours that take gradients away, behind those of others that were registered later (transformers sums the
    gradients of norms between the ranks in one that it registers in the first forward)."""

    def __init__(self) -> None:
        self._hooks: list[tuple[torch.Tensor, list[int]]] = []
        self._adds: list[torch.Tensor] = []
        self._asides: list[Aside] = []

    def add(self, parameter: torch.Tensor, handles: list[Any], adds: bool) -> None:
        """Note our hooks on a parameter. ``adds``: gradients of several backwards add up in ``p.grad``."""
        self._hooks.append((parameter, [handle.id for handle in handles]))
        if adds:
            self._adds.append(parameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> HookOrder:
        return HookOrder()  # a copy of a prepared model is a plain one

    def __reduce__(self) -> Any:
        return HookOrder, ()

    def of_others(self, parameter: torch.Tensor) -> bool:
        """Return True if somebody else has a hook on the gradient of a parameter. Call it where reads of its attributes are plain."""
        hooks: Any = parameter._post_accumulate_grad_hooks or {}
        return len(hooks) > sum(len(own) for known, own in self._hooks if known is parameter)

    def __call__(self, *unused: Any) -> None:
        """Put our hooks last: after a forward, and after a hook was registered on a released parameter."""
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, own in self._hooks:
                hooks: Any = parameter._post_accumulate_grad_hooks
                if not hooks or (own and next(reversed(hooks)) == own[-1]):
                    continue
                self._keep_aside(parameter, own)
                for one in own:
                    hooks[one] = hooks.pop(one)

    def _keep_aside(self, parameter: torch.Tensor, own: list[int]) -> None:
        """Show others the gradient of one backward at a time."""
        at = next((i for i, one in enumerate(self._adds) if one is parameter), None)
        if at is None:
            return
        del self._adds[at]
        self._asides.append(Aside(parameter))
        own.insert(0, parameter.register_post_accumulate_grad_hook(self._asides[-1].restore).id)

    def close(self) -> None:
        """Forget the parameters."""
        for aside in self._asides:
            aside.close()
        self._hooks.clear()
        self._adds.clear()
