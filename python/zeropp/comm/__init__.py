# SPDX-License-Identifier: Apache-2.0
"""The communicator of zeropp: collectives over shared memory within a host, over TCP between hosts.

:func:`communicator` gives the C object over any running torch.distributed group (whatever its backend: only its store is
used). :class:`Communicator` takes tensors, and is the shortest way to a collective; through torch.distributed
(``init_process_group("zeropp")``, see :mod:`zeropp.process_group`) the same engine costs a few microseconds more a call.

Tensors made by :func:`empty` lie in the communicator's arena: large collectives read them in place, one copy a byte.
The modules behind these names are loaded when a name is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeropp.comm.group import Communicator as Communicator
    from zeropp.comm.group import all_traffic as all_traffic
    from zeropp.comm.group import close as close
    from zeropp.comm.group import communicator as communicator
    from zeropp.comm.group import create as create
    from zeropp.comm.group import dtype_code as dtype_code
    from zeropp.comm.group import empty as empty
    from zeropp.comm.hooks import ddp_hook as ddp_hook
    from zeropp.comm.hooks import fsdp2_hooks as fsdp2_hooks
    from zeropp.comm.onebit import OneBitAllReduce as OneBitAllReduce

_HOME = {
    **dict.fromkeys(("Communicator", "all_traffic", "close", "communicator", "create", "dtype_code", "empty"), "group"),
    **dict.fromkeys(("ddp_hook", "fsdp2_hooks"), "hooks"),
    "OneBitAllReduce": "onebit",
}

__all__ = [
    "Communicator", "OneBitAllReduce", "all_traffic", "communicator", "create", "ddp_hook", "dtype_code", "empty", "fsdp2_hooks",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
