# SPDX-License-Identifier: Apache-2.0
"""The ZeRO coordinator's Python side: preparing a model, its units and parameters, the engine, the step, the tiers.

Its modules are imported when they are used: ``from zeropp import zero`` loads none of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType


def lazy_modules(package: str) -> Callable[[str], ModuleType]:
    """Return a ``__getattr__`` for `package` that imports its modules when they are first used."""

    def find(name: str) -> ModuleType:
        try:
            return importlib.import_module(f"{package}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{package}.{name}":
                raise
            raise AttributeError(f"module {package!r} has no attribute {name!r}") from None

    return find


__getattr__ = lazy_modules(__name__)
