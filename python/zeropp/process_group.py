# SPDX-License-Identifier: Apache-2.0
"""The public name of the torch.distributed backend's process group (:mod:`zeropp.comm.process_group`)."""

from __future__ import annotations

from zeropp.comm.process_group import ProcessGroup

__all__ = ["ProcessGroup"]
