# SPDX-License-Identifier: Apache-2.0
"""Other dimensions than data: meshes of ranks, pipelines, tensor slices and sequences, from torch's own parts.

A name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeropp.parallel.cut import Chunks as Chunks
    from zeropp.parallel.cut import cut as cut
    from zeropp.parallel.mesh import DATA_DIMS as DATA_DIMS
    from zeropp.parallel.mesh import MODEL_DIMS as MODEL_DIMS
    from zeropp.parallel.pipeline import pipeline as pipeline
    from zeropp.parallel.pipeline import stages as stages
    from zeropp.parallel.ulysses import ulysses as ulysses
    from zeropp.parallel.ulysses import ulysses_attention as ulysses_attention

_HOME: dict[str, str] = {
    "DATA_DIMS": "mesh",
    "MODEL_DIMS": "mesh",
    **dict.fromkeys(("Chunks", "cut"), "cut"),
    **dict.fromkeys(("pipeline", "stages"), "pipeline"),
    "tensor": "tensor",
    **dict.fromkeys(("ulysses", "ulysses_attention"), "ulysses"),
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'zeropp.parallel' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"zeropp.parallel.{_HOME[name]}"), name)
    globals()[name] = value
    return value


class _Package(types.ModuleType):
    """The package: a function keeps its name where its module, which Python would put in its place, has the same one."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
