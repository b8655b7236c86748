# SPDX-License-Identifier: Apache-2.0
"""An optimizer's moments in memory, in fp32, bf16 or 8 bits: ``Config(precision=Precision(state="bf16"))``. docs/design/0022.

A unit's ``state`` holds bf16 values, or 8-bit codes whose scales lie in ``scales``: for each parameter that this rank has
a part of, in order, one a block of 256 elements of the parameter. The step works on both in place (csrc/ops/moments);
all other code gets and gives fp32 here.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from zeropp.ops import moments_decode_, moments_encode_, moments_scales
from zeropp.zero.model_state import StateStore, Unit

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
"""In the order of enum zpp_moments_kind."""


def spans(unit: Unit) -> Iterator[tuple[int, slice, int, slice]]:
    """For each parameter that this rank has a part of: its number, the part in the shard, the first element's place in
    the parameter, and its scales."""
    at = 0
    for index, first, elems in unit.pieces():
        begin = unit.begin_elems + first - unit.params[index].offset_elems
        count = moments_scales(elems, begin)
        yield index, slice(first, first + elems), begin, slice(at, at + count)
        at += count


def make(unit: Unit, name: str) -> None:
    """Make a moment of zeros, unless the unit has it."""
    if name not in unit.state:
        dtype = unit.state_dtype if unit.state_name == "fp32" else DTYPES[unit.state_name]
        unit.state[name] = unit.new_states(name, unit.shard.numel(), dtype)
    if unit.state_name == "int8" and name not in unit.scales:
        count = sum(scales.stop - scales.start for _, _, _, scales in spans(unit))
        unit.scales[name] = unit.new_states(f"scales of {name}", count, torch.float32)


class MemoryStates(StateStore):
    """Master weights and moments in memory, in fp32, bf16 or 8 bits."""

    def in_place(self, unit: Unit) -> bool:
        return unit.state_name != "int8"

    def make(self, unit: Unit, kind: str) -> torch.Tensor:
        make(unit, kind)
        return unit.state[kind]

    def load(self, unit: Unit, values: dict[str, torch.Tensor]) -> None:
        for name, one in values.items():
            if unit.state_name == "int8":
                write_all(unit, name, one)
            else:
                self.make(unit, name).copy_(one)

    def write(self, unit: Unit, kind: str, index: int, first: int, values: torch.Tensor) -> None:
        put(unit, kind, index, values)

    def bind(self, unit: Unit, names: tuple[str, ...]) -> None:
        assert unit.steps is not None
        for name in filter(None, names):
            make(unit, name)
        master = 0 if unit.master is None else unit.master.data_ptr()
        at = [_address(held.get(name)) for name in names for held in (unit.state, unit.scales)]
        kind = list(DTYPES).index(unit.state_name)
        unit.core.set_states(kind, master, unit.steps.data_ptr(), unit.first_param, unit.groups, *at)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def read(unit: Unit, name: str, index: int) -> torch.Tensor:
    """Return one parameter's part of an 8-bit moment, in fp32; empty where this rank has none."""
    for number, part, begin, scales in spans(unit):
        if number == index:
            values = torch.empty(part.stop - part.start, device=unit.device)
            moments_decode_(unit.state[name][part], unit.scales[name][scales], values, moment=name, first=begin)
            return values
    return torch.empty(0, device=unit.device)


def write(unit: Unit, name: str, index: int, values: torch.Tensor) -> None:
    """Encode one parameter's part of an 8-bit moment, to the nearest level."""
    for number, part, begin, scales in spans(unit):
        if number == index:
            codes, of_codes = unit.state[name][part], unit.scales[name][scales]
            moments_encode_(values.float().contiguous(), codes, of_codes, moment=name, first=begin)


def put(unit: Unit, name: str, index: int, values: torch.Tensor) -> None:
    """Write one parameter's part of a moment, of 8 bits or not."""
    for number, part, _, _ in spans(unit):
        if number == index and unit.state_name != "int8":
            unit.state[name][part] = values
    if unit.state_name == "int8":
        write(unit, name, index, values)


def load_all(unit: Unit, name: str, into: torch.Tensor) -> None:
    """Decode the whole moment to fp32, into memory of the shard's length."""
    for _, part, begin, scales in spans(unit):
        of_codes = unit.scales[name][scales] if unit.scales else torch.empty(0, device=unit.device)
        moments_decode_(unit.state[name][part], of_codes, into[part], moment=name, first=begin)


def store_all(unit: Unit, name: str, values: torch.Tensor, present: list[bool]) -> None:
    """Encode the whole moment, rounded as a step rounds; of the parameters that are present, whose steps are
    counted."""
    assert unit.steps is not None
    for index, part, begin, scales in spans(unit):
        if present[index]:
            of_codes = unit.scales[name][scales] if unit.scales else torch.empty(0, device=unit.device)
            moments_encode_(
                values[part], unit.state[name][part], of_codes, moment=name, first=begin,
                stream=unit.first_param + index, step=int(unit.steps[index]),
            )  # fmt: skip


def write_all(unit: Unit, name: str, values: torch.Tensor) -> None:
    """Make an 8-bit moment from fp32 values of the shard's length."""
    make(unit, name)
    for index, part, _, _ in spans(unit):
        write(unit, name, index, values[part])
