# SPDX-License-Identifier: Apache-2.0
"""The configuration: frozen, keyword-only dataclasses that refuse what they do not know.

Every mistake is a `zeropp.ConfigError` that names the path of the key, the value seen, what is allowed and the nearest name; no
option is read and ignored. `Config.from_json` reads the same keys from JSON, and DeepSpeed's own files. Which options do not
combine stands in zeropp/compat.py.
"""

from zeropp.config.config import Config
from zeropp.config.config import as_config as as_config
from zeropp.config.config import facts_of as facts_of
from zeropp.config.config import with_tiers as with_tiers
from zeropp.config.efficiency import Efficiency, Growth, LayerDrop, TokenDrop
from zeropp.config.experts import Experts
from zeropp.config.sections import Comm, LossScale, Offload, Precision, Tier
from zeropp.config.values import DTYPES as DTYPES
from zeropp.config.values import GATHER_WAYS as GATHER_WAYS
from zeropp.config.values import MOST_NUMBER as MOST_NUMBER
from zeropp.config.values import TIERS as TIERS
from zeropp.config.values import TORCH_DTYPES as TORCH_DTYPES
from zeropp.config.values import WIRE_FORMATS as WIRE_FORMATS
from zeropp.config.values import Folders as Folders
from zeropp.config.values import T, folders, nearest, not_yet, wrong

__all__ = [
    "Comm", "Config", "Efficiency", "Experts", "Growth", "LayerDrop", "LossScale", "Offload", "Precision", "T", "Tier", "TokenDrop", "folders",
    "nearest", "not_yet", "wrong",
]  # fmt: skip
