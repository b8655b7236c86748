# SPDX-License-Identifier: Apache-2.0
"""The error for stray reads: a view of a unit's values was kept, and read after the unit was released.

The signal handler of csrc/base/stray.c lets such a read return NaN. The next call of a model, of ``optimizer.step`` or of zeropp
raises the error. See docs/design/0007-reads-of-released-memory.md.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from zeropp import _C
from zeropp.errors import PartitionedParameterError

engines: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
"""The engine of each prepared model that lives."""


def _name_at(address: int) -> str | None:
    """Return the name of the parameter at this address; None if no living model has one there."""
    for engine in list(engines.values()):
        for unit in engine.units:
            at = (address - unit.whole.data_ptr()) // unit.dtype.itemsize
            if 0 <= at < unit.elems and unit.params:
                name: str = next(entry.names[0] for entry in reversed(unit.params) if entry.offset_elems <= at)
                return name
    return None


def raise_strays() -> None:
    """Raise an error that names the parameters if there was a stray read since the last call. Costs one call otherwise."""
    if not _C.stray_seen():
        return
    names = dict.fromkeys(_name_at(address) for address in _C.stray_take())
    living = ", ".join(f"'{name}'" for name in names if name is not None) or "of a model that is gone"
    raise PartitionedParameterError(
        f"a view of parameter {living} was kept and used after the parameter was released, so it had NaN for values: detach(), .data, "
        "an index, view(), .T and numpy() give views without memory of their own; clone the view inside the hook or module that makes "
        "it, or read the parameter in `with zeropp.gathered(parameter):`"
    )
