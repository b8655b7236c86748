# SPDX-License-Identifier: Apache-2.0
"""The finder that makes ``import deepspeed`` mean zeropp. It needs Python's own modules alone and imports zeropp only when
deepspeed is imported, because children/sitecustomize.py loads this file at the start of every child interpreter."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

VERSION = "0.19.8"
"""The version of DeepSpeed whose names are answered: frameworks compare it."""


class Finder:
    """Finds and loads the modules of tree.py, and answers ``importlib.metadata``, where frameworks ask whether deepspeed is installed.

    Args:
        checked: True where the real package was looked for already; else the first question looks, and in an interpreter that has the
            real package, or that has no zeropp, this finder answers nothing.
    """

    def __init__(self, checked: bool = False) -> None:
        self._answers: bool | None = True if checked else None

    def _may_answer(self) -> bool:
        if self._answers is None:
            self._answers = real_spec() is None and importlib.util.find_spec("zeropp") is not None
        return self._answers

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] != "deepspeed" or not self._may_answer():
            return None
        tree = _tables()
        if fullname not in tree.MODULES:
            # An import statement gets the message; importlib.util.find_spec, which only asks, gets None.
            caller = sys._getframe(1).f_back
            if caller is not None and caller.f_code.co_name == "_find_and_load_unlocked":
                raise ModuleNotFoundError(tree.missing(fullname))
            return None
        spec = importlib.machinery.ModuleSpec(fullname, self, is_package=True)  # type: ignore[arg-type]
        spec.origin = "zeropp"
        return spec

    def create_module(self, spec: Any) -> Any:
        return None

    def exec_module(self, module: ModuleType) -> None:
        _tables().fill(module)

    def find_distributions(self, context: Any = None) -> Iterator[Any]:
        name = getattr(context, "name", None)
        if (name is None or name.lower() == "deepspeed") and self._may_answer():
            yield _distribution()


def _tables() -> Any:
    """Return tree.py, which imports zeropp: not at the top of this file, which any child interpreter loads."""
    return importlib.import_module("zeropp.deepspeed.names.tree")


def _distribution() -> Any:
    """Metadata without a file; its author says whose it is."""
    import importlib.metadata  # not at the top: most child interpreters never ask

    class Distribution(importlib.metadata.Distribution):
        def read_text(self, filename: str) -> str | None:
            if filename == "METADATA":
                author = "zeropp (a compatibility module, active in this process only)"
                return f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {VERSION}\nAuthor: {author}\n"
            return "deepspeed\n" if filename == "top_level.txt" else None

        def locate_file(self, path: Any) -> Any:
            raise FileNotFoundError(f"{path}: nothing named deepspeed is on disk; zeropp answers its names")

    return Distribution()


def real_spec() -> Any:
    """Return where the other finders find the real package, or None. A folder of that name without a module of its own is none: files
    for DeepSpeed may lie beside a script."""
    for one in sys.meta_path:
        if isinstance(one, Finder) or not hasattr(one, "find_spec"):
            continue
        spec = one.find_spec("deepspeed", None)
        if spec is not None:
            return spec if spec.origin is not None else None
    return None


__all__ = ["VERSION", "Finder", "real_spec"]
