# SPDX-License-Identifier: Apache-2.0
"""``Precision(param="fp32", compute="bf16")``: the model's forward under ``torch.autocast`` (docs/design/0028)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class AutocastCall:
    """Stands in a model's ``_compiled_call_impl``, around what stood there.

    Autocast's cache of weights in 16 bits is off: it would keep a copy of every weight until the forward ends, also where
    blocks are checkpointed and their units released.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._device_type = next(model.parameters()).device.type
        self._dtype, self._inner = dtype, model._compiled_call_impl

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inner = self._inner
        assert inner is not None
        with torch.autocast(self._device_type, dtype=self._dtype, cache_enabled=False):
            return inner(*args, **kwargs)

    @property
    def call(self) -> Any:
        """What the trigger calls; ``module.compile()`` sets it."""
        return self._inner.call  # type: ignore[union-attr]

    @call.setter
    def call(self, value: Any) -> None:
        self._inner.call = value  # type: ignore[union-attr]
