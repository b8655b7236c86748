# SPDX-License-Identifier: Apache-2.0
"""unfreeze_cases with every rank on a host of its own, over the loopback interface."""

from __future__ import annotations

import os

os.environ["ZEROPP_HOST_ID"] = os.environ["RANK"]  # before the communicator is made

from unfreeze_cases import adamw, like_torch, twins

CASES = {
    "stage 0": lambda: like_torch({"stage": 0}, "added", adamw),
    "stage 2": lambda: like_torch({"stage": 2}, "all", adamw),
    "stage 3, bf16": lambda: twins({"precision": "bf16"}, adamw),
}
