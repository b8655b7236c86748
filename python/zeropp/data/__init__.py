# SPDX-License-Identifier: Apache-2.0
"""The data that a model is trained on, and their order: analysis of a dataset, curriculum sampling, batches by tokens.

A name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME: dict[str, str] = {
    "analyse": "analysis",
    "cut": "cutting",
    "sampler_of": "sampling",
    "TokenBatchSampler": "token_batches",
    **dict.fromkeys(("CurriculumSampler", "Percentile", "Value"), "curriculum"),
    **dict.fromkeys(("Index", "open_index"), "index"),
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'zeropp.data' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"zeropp.data.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
