# SPDX-License-Identifier: Apache-2.0
"""The shared experts of a block are computed while its tokens are on their way to other hosts.

A block such as DeepSeek-V3's calls its experts, and then its shared experts on its own input. So the experts' forward may compute the shared
ones after it has begun to send, and hand their output out when the block asks for it with the same tensor. Autograd runs the backward of
the shared experts between the two ends of the opposite move, because it goes through operators in the reverse order of the forward. A block
that asks for its shared experts first, as Qwen2-MoE's does, has nothing to compute then, and goes on as it is.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

NAMES = ("shared_experts", "shared_expert", "shared_mlp", "shared")
"""What blocks call the experts that every token passes."""


class SharedExperts:
    """The forward of a block's shared experts.

    Args:
        block: has the shared experts, and those that tokens choose.
        shared: a module of the block.
    """

    def __init__(self, block: nn.Module, shared: nn.Module) -> None:
        self._shared = weakref.ref(shared)
        self._inner: Any = shared.__dict__.get("forward")
        self._given: Tensor | None = None
        """The block's input; None: outside of its forward, or its shared experts were asked for already."""
        self._made: tuple[Tensor, int, Any] | None = None
        self.is_asked_later = True
        """False once a block asked for something else than what was computed for it."""
        self.ahead = 0
        """How often shared experts were computed while tokens were on their way."""
        block.register_forward_pre_hook(self._begin, with_kwargs=True)
        block.register_forward_hook(self._end, always_call=True)
        shared.forward = self

    def __call__(self, x: Tensor) -> Any:
        made, self._made, self._given = self._made, None, None
        if made is None:
            return self._compute(x)
        if made[0] is x and made[1] == x._version:
            return made[2]
        self.is_asked_later = False
        return self._compute(x)

    def compute_ahead(self) -> None:
        """Compute what the block will ask for next, if it will."""
        x, shared = self._given, self._shared()
        if x is None or shared is None or not self.is_asked_later or torch.compiler.is_compiling():
            return
        if shared._forward_hooks or shared._forward_pre_hooks or shared._compiled_call_impl is not None:
            return  # these see each call, and would see two
        self._given, self._made = None, (x, x._version, self._compute(x))
        self.ahead += 1

    def _compute(self, x: Tensor) -> Any:
        shared = self._shared()
        assert shared is not None
        return type(shared).forward(shared, x) if self._inner is None else self._inner(x)

    def _begin(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = next(iter((*args, *kwargs.values())), None)
        self._given, self._made = given if isinstance(given, Tensor) else None, None

    def _end(self, block: nn.Module, args: Any, output: Any) -> None:
        self._given = self._made = None


def shared_beside(block: nn.Module) -> SharedExperts | None:
    """Return the shared experts of a block; None: it has none."""
    shared = next((one for key in NAMES if isinstance(one := getattr(block, key, None), nn.Module)), None)
    return None if shared is None else SharedExperts(block, shared)
