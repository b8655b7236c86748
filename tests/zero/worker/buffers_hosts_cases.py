# SPDX-License-Identifier: Apache-2.0
"""buffers_cases with every rank on a host of its own, over the loopback interface."""

from __future__ import annotations

import os

os.environ["ZEROPP_HOST_ID"] = os.environ["RANK"]  # before the communicator is made

from buffers_cases import CASES as ALL

CASES = {name: ALL[name] for name in ("stage 0", "gathered")}
