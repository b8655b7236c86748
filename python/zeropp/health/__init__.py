# SPDX-License-Identifier: Apache-2.0
"""Is every rank and every link of a job as fast as its like? ``python -m zeropp doctor`` and ``Config(preflight=True)``."""

from __future__ import annotations

from zeropp.health.check import Report, check, preflight
from zeropp.health.search import Fault, search

__all__ = ["Fault", "Report", "check", "preflight", "search"]
