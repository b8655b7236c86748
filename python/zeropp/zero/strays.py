# SPDX-License-Identifier: Apache-2.0
"""Reads of memory that was given back: views of a unit's values that somebody kept after the unit was released.

The handler in csrc/base/stray.c gives them NaN and goes on; whoever calls zeropp next hears of it here
(docs/design/0037-a-read-of-released-memory.md).
"""

from __future__ import annotations

from zeropp import _C
from zeropp.errors import PartitionedParameterError


def _name_at(address: int) -> str | None:
    """The parameter whose values lie there while its unit is whole; None: of no living model."""
    from zeropp.zero.engine import _engines

    for engine in list(_engines.values()):
        for unit in engine.units:
            at = (address - unit.whole.data_ptr()) // unit.dtype.itemsize
            if 0 <= at < unit.elems and unit.params:
                return next(entry.names[0] for entry in reversed(unit.params) if entry.offset_elems <= at)
    return None


def raise_strays() -> None:
    """Raise where such memory was read since the last call, naming the parameters; each read is told of once."""
    if not _C.stray_seen():
        return
    names = dict.fromkeys(_name_at(address) for address in _C.stray_take())
    living = ", ".join(f"'{name}'" for name in names if name is not None) or "of a model that is gone"
    raise PartitionedParameterError(
        f"a tensor over the values of parameter {living} was used after its unit was released, and was full of NaN: a view that was "
        "kept (of detach(), .data, an index, view, .T, numpy()) has no memory of its own; clone it while the module runs, inside the "
        "hook, or read the parameter in `with zeropp.gathered(parameter):`"
    )
