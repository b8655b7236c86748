# SPDX-License-Identifier: Apache-2.0
"""Run ``python -m zeropp`` with the given arguments where torch has the simulated GPU. Print its output, and the exit status as JSON.

python case_doctor.py [--break KERNEL] doctor --device sim ...
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from typing import Any

import sim  # noqa: F401  (makes the device)
import torch
import zeropp.ops
from zeropp.cli import main


def broken(name: str) -> Any:
    """Make an operator's results on the device wrong by one bit."""
    right = getattr(zeropp.ops, name)

    def wrong(tensors: list[torch.Tensor]) -> Any:
        sums, counts = right(tensors)
        return (sums if sums.is_cpu else sums + 1), counts

    setattr(zeropp.ops, name, wrong)


arguments = sys.argv[1:]
if arguments[0] == "--break":
    broken(arguments[1])
    arguments = arguments[2:]
printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    status = main(arguments)
print(json.dumps({"status": status, "printed": printed.getvalue()}))
