# SPDX-License-Identifier: Apache-2.0
"""zeropp under Lightning: ``Trainer(strategy="zeropp")``, and Fabric's.

    import zeropp.lightning      # registers the names below
    trainer = Trainer(strategy="zeropp_stage_2", devices=2)
    trainer = Trainer(strategy=zeropp.lightning.ZeroppStrategy(stage=3, host_copy="off"), devices=2)

Names: ``zeropp`` (stage 3), ``zeropp_stage_1``, ``_2``, ``_3``, each of these three with ``_offload``, and ``zeropp_infinity``.

``lightning.pytorch`` and ``pytorch_lightning`` are one code under two names, with base classes and registries of their own: what is
imported already is served, or else what is installed. :data:`STRATEGIES` and :data:`FABRIC_STRATEGIES` have the classes by the name of the package.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from zeropp.errors import NotBuiltError
from zeropp.lightning.fabric import make_fabric_strategy
from zeropp.lightning.trainer import make_strategy

_TRAINERS = ("lightning.pytorch", "pytorch_lightning")
_FABRICS = ("lightning.fabric", "lightning_fabric")


def _chosen(names: tuple[str, ...]) -> list[str]:
    imported = [name for name in names if name in sys.modules]
    return imported or [name for name in names if importlib.util.find_spec(name.partition(".")[0]) is not None]


#: {"lightning.pytorch": class, ...}
STRATEGIES: dict[str, Any] = {name: make_strategy(name) for name in _chosen(_TRAINERS)}
#: {"lightning.fabric": class, ...}
FABRIC_STRATEGIES: dict[str, Any] = {name: make_fabric_strategy(name) for name in _chosen(_FABRICS)}

if not STRATEGIES and not FABRIC_STRATEGIES:
    raise NotBuiltError("zeropp.lightning needs Lightning, and there is none: pip install zeropp[lightning]")

ZeroppStrategy: Any = next(iter(STRATEGIES.values()), None)
"""The strategy for ``lightning.pytorch`` (or ``pytorch_lightning``, where only that is there)."""

ZeroppFabricStrategy: Any = next(iter(FABRIC_STRATEGIES.values()), None)
"""The strategy for ``lightning.fabric`` (or ``lightning_fabric``)."""

__all__ = ["FABRIC_STRATEGIES", "STRATEGIES", "ZeroppFabricStrategy", "ZeroppStrategy"]
