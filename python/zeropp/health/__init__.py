# SPDX-License-Identifier: Apache-2.0
"""Check that every rank and link of a job is as fast as the others: ``python -m zeropp doctor`` and ``Config(preflight=True)``."""

from __future__ import annotations

from zeropp.health.check import Report, check, preflight
from zeropp.health.search import Fault, search

__all__ = ["Fault", "Report", "check", "preflight", "search"]
