# SPDX-License-Identifier: Apache-2.0
"""The public name of :mod:`zeropp.deepspeed.names`; a Ray cluster's ``runtime_env`` reads ``zeropp.deepspeed_names.install``."""

from __future__ import annotations

from zeropp.deepspeed.names import CHILDREN, VERSION, active, install, reach_children, real_package

__all__ = ["CHILDREN", "VERSION", "active", "install", "reach_children", "real_package"]
