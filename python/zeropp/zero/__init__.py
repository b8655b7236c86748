# SPDX-License-Identifier: Apache-2.0
"""The ZeRO coordinator's Python side: preparing a model, whole values for a while, construction, checkpoints.

Its modules are imported when they are used: ``from zeropp import zero`` loads none of them.
"""

from __future__ import annotations

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
