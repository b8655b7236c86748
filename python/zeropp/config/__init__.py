# SPDX-License-Identifier: Apache-2.0
"""The configuration: frozen, keyword-only dataclasses that refuse what they do not know."""

from zeropp.config.config import DTYPES as DTYPES
from zeropp.config.config import MOST_NUMBER as MOST_NUMBER
from zeropp.config.config import TIERS as TIERS
from zeropp.config.config import TORCH_DTYPES as TORCH_DTYPES
from zeropp.config.config import WIRE_FORMATS as WIRE_FORMATS
from zeropp.config.config import Comm, Config, LossScale, Offload, Precision, T, Tier, folders, nearest, not_yet, wrong
from zeropp.config.config import Folders as Folders
from zeropp.config.config import _read_json as _read_json

__all__ = [
    "Comm", "Config", "LossScale", "Offload", "Precision", "T", "Tier", "folders", "nearest", "not_yet", "wrong",
]  # fmt: skip
