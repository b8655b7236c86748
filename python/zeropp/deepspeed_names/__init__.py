# SPDX-License-Identifier: Apache-2.0
"""``import deepspeed`` answered by zeropp: in one process, and only where somebody asked for it.

``python -m zeropp run SCRIPT --zeropp CFG`` calls :func:`install` and then runs the script, unchanged. The names that
transformers, accelerate, peft and TRL look for (modules.py) then lead to the engine of ``zeropp.initialize``. Nothing
named deepspeed is written to disk, nothing is patched: one finder is added to ``sys.meta_path``, which Python asks first.
It also answers ``importlib.metadata``, because the frameworks ask there whether deepspeed is installed.

A process that can import the real package is refused: two things of one name are worse than none.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from zeropp.errors import ConfigError

VERSION = "0.19.8"
"""The version of DeepSpeed whose names are answered: frameworks compare it."""

# They decide at import whether there is a deepspeed.
_DECIDED_EARLY = ("transformers.integrations.deepspeed", "accelerate.accelerator", "lightning.pytorch", "trl")


class _Distribution(importlib.metadata.Distribution):
    """Metadata without a file; its author says whose it is."""

    def read_text(self, filename: str) -> str | None:
        if filename == "METADATA":
            author = "zeropp (a compatibility module, active in this process only)"
            return f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {VERSION}\nAuthor: {author}\n"
        return "deepspeed\n" if filename == "top_level.txt" else None

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: nothing named deepspeed is on disk; zeropp answers its names")


class _Finder(importlib.metadata.DistributionFinder, importlib.abc.Loader):
    """Finds and loads the modules of modules.py."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] != "deepspeed":
            return None
        from zeropp.deepspeed_names.modules import MODULES

        if fullname not in MODULES:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        spec.origin = "zeropp"
        return spec

    def create_module(self, spec: Any) -> Any:
        return None

    def exec_module(self, module: ModuleType) -> None:
        from zeropp.deepspeed_names.modules import MODULES

        module.__path__ = []
        module.__doc__ = "Answered by zeropp (zeropp.deepspeed_names)."
        module.__dict__.update(MODULES[module.__name__]())
        for name in MODULES:  # `import deepspeed` alone gives deepspeed.zero, .comm, ...: scripts rely on it
            parent, _, child = name.rpartition(".")
            if parent == module.__name__:
                setattr(module, child, importlib.import_module(name))

        def missing(name: str) -> Any:
            raise AttributeError(
                f"{module.__name__}.{name} is not among the names that zeropp answers for deepspeed "
                "(docs/from-deepspeed.md lists them)"
            )

        module.__dict__["__getattr__"] = missing

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        if context is None or context.name in (None, "deepspeed"):
            yield _Distribution()


def active() -> bool:
    """Does ``import deepspeed`` mean zeropp in this process?"""
    return any(isinstance(one, _Finder) for one in sys.meta_path)


def real_package() -> str | None:
    """Where the real package is, if this process could import it. A folder of that name beside a script, where its files for
    DeepSpeed lie, is not one: it has no module of its own."""
    if active():
        return None
    found = importlib.util.find_spec("deepspeed")
    return None if found is None else found.origin


def install() -> None:
    """Answer ``import deepspeed`` in this process from now on. A second call does nothing.

    Raises:
        ConfigError: the real package is importable.
    """
    if active():
        return
    real = real_package()
    if real is not None:
        raise ConfigError(
            f"deepspeed is installed ({real}), and zeropp does not stand before it; pip uninstall deepspeed, or run the script in "
            "an environment without it"
        )
    late = [name for name in _DECIDED_EARLY if name in sys.modules]
    if late:
        warnings.warn(
            f"{late[0]} was imported before zeropp.deepspeed_names.install(), and has decided already that there is no deepspeed; "
            "install first",
            stacklevel=2,
        )
    sys.meta_path.insert(0, _Finder())  # before the folder of files, which would be a package without modules
    importlib.invalidate_caches()
