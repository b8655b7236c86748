# SPDX-License-Identifier: Apache-2.0
"""The optimizer's step over shards: element-wise, LAMB, Muon, one-bit, custom; loss scaling; delayed and in the backward."""

from zeropp.zero import lazy_modules

__getattr__ = lazy_modules(__name__)
