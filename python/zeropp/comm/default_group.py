# SPDX-License-Identifier: Apache-2.0
"""torch.distributed's default group for scripts in which a framework would make it: this backend in place of gloo.

Accelerate knows gloo alone on machines without a GPU, and leaves a group that stands as it is. Under gloo a lost rank is noticed after
half an hour, and a script that ends without ``destroy_process_group``, as Trainer's do, can be aborted at its very end ("terminate
called without an active exception"): a thread of gloo's drops a tensor while the interpreter goes.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

__all__ = ["BACKEND", "begin"]

BACKEND = "zeropp"
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def begin(timeout: timedelta) -> None:
    """Make the default group, where a launcher has started several ranks and nobody has made it yet."""
    launched = all(os.environ.get(name) for name in _LAUNCHED) and int(os.environ["WORLD_SIZE"]) > 1
    if launched and dist.is_available() and not dist.is_initialized():
        dist.init_process_group(BACKEND, timeout=timeout)
