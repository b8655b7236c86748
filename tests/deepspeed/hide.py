# SPDX-License-Identifier: Apache-2.0
"""``python -m zeropp`` in a process that cannot see an installed deepspeed: hide.py ARGUMENTS OF ZEROPP."""

from __future__ import annotations

import importlib.machinery
import sys
from typing import Any


class Hidden(importlib.machinery.PathFinder):
    """A finder that does not find one name."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        return None if fullname == "deepspeed" else importlib.machinery.PathFinder.find_spec(fullname, path, target)

    @staticmethod
    def find_distributions(*args: Any, **kwargs: Any) -> Any:
        found = importlib.machinery.PathFinder.find_distributions(*args, **kwargs)
        return (one for one in found if one.name != "deepspeed")


sys.meta_path[:] = [Hidden if one is importlib.machinery.PathFinder else one for one in sys.meta_path]

if __name__ == "__main__":
    from zeropp.cli import main

    sys.exit(main(sys.argv[1:]))
