# SPDX-License-Identifier: Apache-2.0
"""Python imports this file when an interpreter starts whose PYTHONPATH begins with this folder: the children of ``python -m zeropp
run``. It lets ``import deepspeed`` mean zeropp there too, and then runs the sitecustomize that would have run without it.

A child may be any Python, so this file has no functions, annotations or other new syntax, and an old Python gets no finder.
"""

import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  pathlib would slow the start of every child down
sys.path[:] = [_one for _one in sys.path if not _one or os.path.abspath(_one) != _here]  # noqa: PTH100

if sys.version_info >= (3, 10) and "zeropp.deepspeed.names.finder" not in sys.modules:
    import importlib.util

    _spec = importlib.util.spec_from_file_location(
        "zeropp.deepspeed.names.finder",
        os.path.join(os.path.dirname(_here), "finder.py"),  # noqa: PTH118, PTH120
    )
    if _spec is not None and _spec.loader is not None:
        _module = importlib.util.module_from_spec(_spec)
        sys.modules[_spec.name] = _module  # zeropp.deepspeed.names, imported later, uses the same one
        _spec.loader.exec_module(_module)
        sys.meta_path.insert(0, _module.Finder())

_ours = sys.modules.pop("sitecustomize", None)
try:
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401  the next one on the path
except ImportError as _error:
    if _error.name != "sitecustomize":
        raise
finally:
    if _ours is not None:
        sys.modules.setdefault("sitecustomize", _ours)  # the import that runs this file looks for it there
