# SPDX-License-Identifier: Apache-2.0
"""``import deepspeed`` answered by zeropp: in one process and its children. It needs a call of :func:`install`.

``python -m zeropp run SCRIPT --zeropp CFG`` calls :func:`install` and :func:`reach_children` and then runs the script, unchanged. The
names that scripts and frameworks read (tree.py) then lead to the engine of ``zeropp.initialize``. Nothing named deepspeed is
written to disk, nothing is patched: one finder (finder.py) is added to ``sys.meta_path``, which Python asks first.

A process that can import the real package is refused: two things of one name are worse than none.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from pathlib import Path

from zeropp.deepspeed.names.finder import VERSION, Finder, real_spec
from zeropp.errors import ConfigError

# They decide at import whether there is a deepspeed.
_DECIDED_EARLY = ("transformers.integrations.deepspeed", "accelerate.accelerator", "lightning.pytorch", "trl")

CHILDREN = Path(__file__).parent / "children"
"""The folder whose sitecustomize.py gives a child interpreter the same finder."""


def active() -> bool:
    """True if ``import deepspeed`` means zeropp in this process."""
    return any(isinstance(one, Finder) for one in sys.meta_path)


def real_package() -> str | None:
    """Return the file of the real package, if this process could import it."""
    found = None if active() else real_spec()
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
            f"{late[0]} was imported before zeropp.deepspeed.names.install(), and has decided already that there is no deepspeed; "
            "install first",
            stacklevel=2,
        )
    # Before the folder of files, which would be a package without modules.
    sys.meta_path.insert(0, Finder(checked=True))
    importlib.invalidate_caches()


def reach_children() -> None:
    """Let interpreters that this process starts from now on answer ``import deepspeed`` too, whoever starts them: workers of a
    DataLoader, ``torch.multiprocessing``, ``subprocess``, Ray. PYTHONPATH brings it to them, so an interpreter that is started with
    ``-I``, ``-E`` or ``-S``, or with an environment of its own, does not get it."""
    if sys.flags.ignore_environment or sys.flags.no_site:
        warnings.warn(
            "this Python was started with -I, -E or -S, and starts its workers so too: they read neither PYTHONPATH nor sitecustomize, "
            "so `import deepspeed` fails there; leave these options out",
            stacklevel=2,
        )
    before = os.environ.get("PYTHONPATH", "")
    if str(CHILDREN) not in before.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join([str(CHILDREN), *([before] if before else [])])


__all__ = ["CHILDREN", "VERSION", "active", "install", "reach_children", "real_package"]
