# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: saving, loading, verifying and exporting them, and whole values out of a model in shards."""

from zeropp.zero import lazy_modules

__getattr__ = lazy_modules(__name__)
