# SPDX-License-Identifier: Apache-2.0
"""The names of zeropp.data: a module that is imported must not take the place of a function."""

from __future__ import annotations

import importlib
import pkgutil

import zeropp.data


def test_names_stay_callable_when_modules_are_imported() -> None:
    for module in pkgutil.iter_modules(zeropp.data.__path__):
        importlib.import_module(f"zeropp.data.{module.name}")
    assert [name for name in zeropp.data.__all__ if not callable(getattr(zeropp.data, name))] == []
