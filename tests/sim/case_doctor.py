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
import zeropp.cli.device_steps
import zeropp.ops
from zeropp.cli import main


def broken(name: str) -> Any:
    """Make an operator's results on the device wrong by one bit."""
    right = getattr(zeropp.ops, name)

    def wrong(tensors: list[torch.Tensor]) -> Any:
        sums, counts = right(tensors)
        return (sums if sums.is_cpu else sums + 1), counts

    setattr(zeropp.ops, name, wrong)


def broken_step() -> None:
    """Make the reference of the steps, plain torch's, wrong: a model that starts from other values."""
    right = zeropp.cli.device_steps._plain

    def wrong(device: torch.device, precision: str | None) -> Any:
        losses, params = right(device, precision)
        return losses, [one + 1 for one in params]

    zeropp.cli.device_steps._plain = wrong


arguments = sys.argv[1:]
if arguments[0] == "--break":
    broken_step() if arguments[1] == "step" else broken(arguments[1])
    arguments = arguments[2:]
printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    status = main(arguments)
print(json.dumps({"status": status, "printed": printed.getvalue()}))
