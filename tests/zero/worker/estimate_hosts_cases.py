# SPDX-License-Identifier: Apache-2.0
"""estimate_cases with every rank on a host of its own, over the loopback interface."""

from __future__ import annotations

import os

os.environ["ZEROPP_HOST_ID"] = os.environ["RANK"]  # before the communicator is made

from estimate_cases import HOSTS_CASES, compare

CASES = {name: (lambda name=name: compare(name, "", hosts=2)) for name in HOSTS_CASES}
