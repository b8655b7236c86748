# SPDX-License-Identifier: Apache-2.0
"""What stands in a model's ``_compiled_call_impl`` around what stood there: the trigger of its units."""

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
        """What the trigger calls."""
        return self.inner.call

    @call.setter
    def call(self, value: Any) -> None:
        self.inner.call = value
