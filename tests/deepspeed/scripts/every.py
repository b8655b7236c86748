# SPDX-License-Identifier: Apache-2.0
"""Several scripts one after the other in these processes, each as ``__main__`` with its own arguments: every.py FOLDER. What a script
raises is in FOLDER/NAME.RANK.raised."""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from pathlib import Path

if __name__ == "__main__":
    folder, here = Path(sys.argv[1]), Path(__file__).parent
    for name, script, words in json.loads((folder / "list.json").read_text()):
        sys.argv = [str(here / f"{script}.py"), *words]
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except Exception:
            (folder / f"{name}.{os.environ['RANK']}.raised").write_text(traceback.format_exc())
