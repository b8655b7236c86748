# SPDX-License-Identifier: Apache-2.0
"""strays_cases with every rank on a host of its own, over the loopback interface."""

from __future__ import annotations

import os

os.environ["ZEROPP_HOST_ID"] = os.environ["RANK"]  # before the communicator is made

from strays_cases import reads

CASES = {holding: (lambda holding=holding: reads(holding, True)) for holding in ("host copy", "nvme")}
