# SPDX-License-Identifier: Apache-2.0
"""The user's module: its units, parameters, buffers, its construction in shards, and the device that it comes to."""

from zeropp.zero import lazy_modules

__getattr__ = lazy_modules(__name__)
