# SPDX-License-Identifier: Apache-2.0
"""The user's module: its units, parameters, buffers, and its construction in shards."""

from zeropp.zero import lazy_modules

__getattr__ = lazy_modules(__name__)
