# SPDX-License-Identifier: Apache-2.0
"""Calls wrapped around a module's forward; ``Precision(param="fp32", compute="bf16")`` runs it under ``torch.autocast`` (docs/design/0028)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


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


class AutocastCall(WrappedCall):
    """Autocast's cache of weights in 16 bits is off: it would keep a copy of every weight until the forward ends, also where
    blocks are checkpointed and their units released.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__(model)
        self._device_type, self._dtype = next(model.parameters()).device.type, dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self._device_type, dtype=self._dtype, cache_enabled=False):
            return self.inner(*args, **kwargs)
