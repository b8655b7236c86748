# SPDX-License-Identifier: Apache-2.0
"""Wrap a model's ``_compiled_call_impl``, which is the trigger of its units."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["WrappedCall"]


class WrappedCall:
    """``inner`` is what stood there. ``module.compile()`` sets ``call``, which is the trigger's."""

    def __init__(self, model: nn.Module) -> None:
        self.inner: Any = model._compiled_call_impl
        assert self.inner is not None

    @property
    def call(self) -> Any:
        """Return what the trigger calls."""
        return self.inner.call

    @call.setter
    def call(self, value: Any) -> None:
        self.inner.call = value
