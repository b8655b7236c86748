# SPDX-License-Identifier: Apache-2.0
"""Operators are registered for the accelerators that this process has, and for no other vendor's device."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SHOW = """
import torch
import zeropp
from zeropp import _C

keys = ("CPU", "CUDA", "PrivateUse1")
for name, _, _, cuda in _C.op_table():
    found = [key for key in keys if torch._C._dispatch_has_kernel_for_dispatch_key(f"zeropp::{name}", key)]
    print(name, cuda, *found)
"""


def registered(**environment: str) -> list[list[str]]:
    outside = {name: value for name, value in os.environ.items() if name != "ZEROPP_CUDA_DRIVER"}
    done = subprocess.run(
        [sys.executable, "-c", SHOW], capture_output=True, text=True, env={**outside, **environment}, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.parametrize("simulated", [False, True])
def test_private_use_is_ours_over_a_named_driver_only(simulated: bool) -> None:
    rows = registered(**({"ZEROPP_CUDA_DRIVER": "libsim.so"} if simulated else {}))
    assert len(rows) > 20
    for name, cuda, *keys in rows:
        assert ("CUDA" in keys) == (cuda == "True"), name
        assert ("PrivateUse1" in keys) == (simulated and cuda == "True"), name
