# SPDX-License-Identifier: Apache-2.0
"""precision_cases with every rank on a host of its own, over the loopback interface."""

from __future__ import annotations

import os

os.environ["ZEROPP_HOST_ID"] = os.environ["RANK"]  # before the communicator is made

from precision_cases import exact_gradients

ONE = ("stage 0", "stage 1", "stage 3, gathering")
CASES = {
    "gradients: reduce fp32": lambda: exact_gradients("reduce fp32", {"each": ONE, "no_sync": ONE}, True),
    "gradients: accumulate fp32": lambda: exact_gradients("accumulate fp32", {"no_sync": ONE}, True),
}
