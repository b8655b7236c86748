# SPDX-License-Identifier: Apache-2.0
"""Fail with work in a lazy stream. Print what is in its memory after the device has stopped and a wait has returned."""

from __future__ import annotations

import atexit
import ctypes
import json


def look() -> None:
    torch.accelerator.synchronize()
    print(json.dumps({"value": ctypes.c_float.from_address(x.data_ptr()).value}), flush=True)


atexit.register(look)  # Python calls this after what `sim` registers

import sim  # noqa: E402
import torch  # noqa: E402

x = torch.zeros(4).to("sim")
sim.set_schedule(0xFF, 0)
x.add_(1)
raise SystemExit("the case failed")
