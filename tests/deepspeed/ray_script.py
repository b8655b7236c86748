# SPDX-License-Identifier: Apache-2.0
"""A script whose Ray worker says ``import deepspeed``: ray_script.py RESULT."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import deepspeed
import ray


@ray.remote
def whose() -> str:
    import deepspeed

    return deepspeed.__zeropp__


if __name__ == "__main__":
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    Path(sys.argv[1]).write_text(json.dumps([deepspeed.__zeropp__, ray.get(whose.remote(), timeout=100)]))
    ray.shutdown()
