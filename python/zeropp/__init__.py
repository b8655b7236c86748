# SPDX-License-Identifier: Apache-2.0
"""zeropp: train models many times larger than your memory, on the hardware you have.

    model, optimizer = zeropp.prepare(model, optimizer, zeropp.Config(stage=3))

Importing loads torch and the C library, registers the torch.distributed backend ``"zeropp"`` and the operators
``torch.ops.zeropp``, starts nothing and prints nothing. Everything else is loaded when it is first used.
"""

from __future__ import annotations

import gc
import importlib
import sys
from typing import TYPE_CHECKING, Any

from zeropp import _C

if TYPE_CHECKING:
    from zeropp.checkpoint.full_state import export as export
    from zeropp.checkpoint.full_state import full_state_dict as full_state_dict
    from zeropp.checkpoint.full_state import load_full_state_dict as load_full_state_dict
    from zeropp.checkpoint.full_state import named_full_tensors as named_full_tensors
    from zeropp.checkpoint.full_state import packed_full_tensors as packed_full_tensors
    from zeropp.checkpoint.load import load as load
    from zeropp.checkpoint.save import save as save
    from zeropp.checkpoint.values import get_full as get_full
    from zeropp.checkpoint.values import get_local as get_local
    from zeropp.checkpoint.values import local_range as local_range
    from zeropp.checkpoint.values import set_full as set_full
    from zeropp.checkpoint.values import set_local as set_local
    from zeropp.config import Comm as Comm
    from zeropp.config import Config as Config
    from zeropp.config import Efficiency as Efficiency
    from zeropp.config import Experts as Experts
    from zeropp.config import Growth as Growth
    from zeropp.config import LayerDrop as LayerDrop
    from zeropp.config import LossScale as LossScale
    from zeropp.config import Offload as Offload
    from zeropp.config import Precision as Precision
    from zeropp.config import Tier as Tier
    from zeropp.config import TokenDrop as TokenDrop
    from zeropp.deepspeed.engine import initialize as initialize
    from zeropp.errors import CheckpointError as CheckpointError
    from zeropp.errors import CommError as CommError
    from zeropp.errors import CommTimeoutError as CommTimeoutError
    from zeropp.errors import ConfigError as ConfigError
    from zeropp.errors import Error as Error
    from zeropp.errors import NotBuiltError as NotBuiltError
    from zeropp.errors import PartitionedParameterError as PartitionedParameterError
    from zeropp.errors import TierError as TierError
    from zeropp.files.timeline import trace as trace
    from zeropp.parallel.layout import layout as layout
    from zeropp.zero.access import gathered as gathered
    from zeropp.zero.access import memory as memory
    from zeropp.zero.access import no_sync as no_sync
    from zeropp.zero.access import traffic as traffic
    from zeropp.zero.memory_plan import estimate as estimate
    from zeropp.zero.model.init import sharded_init as sharded_init
    from zeropp.zero.offload.offload_states import offload_states as offload_states
    from zeropp.zero.prepare import prepare as prepare
    from zeropp.zero.prepare import register_forward_method as register_forward_method

__version__: str = _C.version()

_HOME = {
    **dict.fromkeys(("prepare", "register_forward_method"), "zero.prepare"),
    **dict.fromkeys(("gathered", "memory", "no_sync", "traffic"), "zero.access"),
    "offload_states": "zero.offload.offload_states",
    "save": "checkpoint.save",
    "load": "checkpoint.load",
    **dict.fromkeys(("full_state_dict", "load_full_state_dict", "named_full_tensors", "export"), "checkpoint.full_state"),
    **dict.fromkeys(("get_full", "get_local", "local_range", "set_full", "set_local"), "checkpoint.values"),
    "packed_full_tensors": "checkpoint.full_state",
    "sharded_init": "zero.model.init",
    "trace": "files.timeline",
    "estimate": "zero.memory_plan",
    "layout": "parallel.layout",
    "initialize": "deepspeed.engine",
    **dict.fromkeys(("Config", "Precision", "LossScale", "Offload", "Tier", "Comm"), "config"),
    **dict.fromkeys(("Efficiency", "Experts", "Growth", "LayerDrop", "TokenDrop"), "config"),
    **dict.fromkeys(
        (
            "CheckpointError", "CommError", "CommTimeoutError", "ConfigError", "Error", "NotBuiltError", "PartitionedParameterError",
            "TierError",
        ),
        "errors",
    ),
}  # fmt: skip
_MODULES = (
    "accelerate",
    "aio",
    "comm",
    "config",
    "data",
    "elastic",
    "errors",
    "hf",
    "lightning",
    "moe",
    "nn",
    "ops",
    "optim",
    "parallel",
    "process_group",
    "zero",
)

__all__ = ["__version__", *_HOME]


def _module(name: str) -> Any:
    """Import a module with garbage collection paused: a full collection walks all objects of torch, which takes 0.1 s and more."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(f"zeropp.{name}")
    finally:
        if collects:
            gc.enable()


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(_module(_HOME[name]), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return _module(name)
    raise AttributeError(f"module 'zeropp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME, *_MODULES])


def _create_group(store: Any, rank: int, size: int, timeout: Any) -> Any:
    """Return a process group for ``init_process_group("zeropp")`` and ``new_group``. The first call builds the class."""
    from zeropp.comm.process_group import ProcessGroup

    return ProcessGroup(store, rank, size, timeout)


def _load() -> None:
    """torch, then the C library over it."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":  # torch is there, and lacks something: its own error names that
            raise
        raise ImportError("zeropp needs torch >= 2.11, and there is none: pip install torch") from error
    _C.load_torch()
    from zeropp import ops

    ops.register()
    if torch.distributed.is_available() and "ZEROPP" not in torch.distributed.Backend._plugins:
        from zeropp.comm import default_group

        torch.distributed.Backend.register_backend("zeropp", _create_group, devices=["cpu", "cuda"])
        default_group.install()


def _register_with_transformers() -> None:
    """Make the implementation "zeropp" of attention, experts and expert parallelism known to transformers; what computes it is loaded
    when a model first calls it."""
    transformers: Any = importlib.import_module("transformers")

    def later(home: str, name: str) -> Any:
        return lambda *given, **named: getattr(importlib.import_module(home), name)(*given, **named)

    transformers.AttentionInterface.register("zeropp", later("zeropp.efficiency.attention", "attend"))
    transformers.AttentionMaskInterface.register("zeropp", later("zeropp.efficiency.attention", "seen_keys"))
    for module, interface, name in (
        ("integrations.moe", "ALL_EXPERTS_FUNCTIONS", "experts_forward"),
        ("distributed.expert_parallel", "EPImplementationInterface", "EpImplementation"),
    ):
        there = sys.modules.get(f"transformers.{module}")  # older versions have none
        if there is not None:
            getattr(there, interface).register("zeropp", later("zeropp.moe.experts", name))


def _register_names() -> None:
    """Make zeropp's names known to Lightning and transformers, where they are imported already: neither has entry points."""
    if "transformers.modeling_utils" in sys.modules:
        _register_with_transformers()
    if any(
        name in sys.modules
        for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")
    ):
        importlib.import_module("zeropp.lightning")


_load()
_register_names()
