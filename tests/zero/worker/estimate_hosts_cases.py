# SPDX-License-Identifier: Apache-2.0
"""estimate_cases with every rank on a host of its own, over the loopback interface."""

from __future__ import annotations

import os
import tempfile
from typing import Any

os.environ["ZEROPP_HOST_ID"] = os.environ["RANK"]  # before the communicator is made

from estimate_cases import HOSTS_CASES, compare


def run(name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as own:  # as each host has a disk of its own
        return compare(name, own, hosts=2)


CASES = {name: (lambda name=name: run(name)) for name in HOSTS_CASES}
