# SPDX-License-Identifier: Apache-2.0
"""Experts on demand: without gradients, only the experts that the tokens chose are read (``Experts(cache="4GiB")``).

One sequence that decodes chooses k of E experts of a layer, so a token takes dense + k/E of the experts from NVMe in place of all of
them (MoE-Infinity, Xue et al. 2024, arXiv:2401.14361). All reads that a call needs are under way at once, as far as the cache has
memory, and an expert computes as soon as it is there. The experts that were used last stay.

Where weights are kept in 8 or 4 bits (``Precision(stored=)``) the bytes that are read, or expanded out of memory, are those of the chosen
experts' codes.

Of a model on a GPU the cache is memory of the GPU. An expert is read to page-locked memory of the host, and one copy engine takes it up:

    stream       does                                after
    the host     reads an expert to its staging      the copy up that had the staging before
    computation  copies it up, in one piece          what computed with the memory before; the read, for which the host waits
    computation  computes with it                    that copy
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from zeropp.errors import ConfigError, TierError
from zeropp.zero.formulas import rounded
from zeropp.zero.model.forward import WrappedCall
from zeropp.zero.model.parameter import ref_of
from zeropp.zero.model_state import Bytes, ModelState, Part
from zeropp.zero.offload.weight_quant import BLOCK_ELEMS

ALIGN_BYTES = 4096
"""Of memory that files are read to: a page, as O_DIRECT wants it."""
SPARE = 2
"""Pieces of memory of dropped experts that wait for the next ones."""
STAGINGS = 16
"""Experts of one size on their way to a GPU at a time: so many reads of a few MiB keep a disk busy."""
Key = tuple[int, int]
"""The number of a layer, and that of an expert among those of this rank."""


@dataclass
class Staging:
    """Page-locked memory of the host, for one expert on its way to a GPU."""

    memory: Tensor
    copied: torch.Event
    """The last copy from it is over."""


@dataclass
class Expert:
    """The values of one expert, or their memory while they are read."""

    memory: Tensor
    values: dict[str, Tensor]
    parts: list[tuple[str, Any]] = field(default_factory=list)
    """Reads that are under way, each with the parameter in the module that it is of."""
    staging: Staging | None = None
    """Where they come to, if the values are on a GPU; None: they are there, or nothing goes up."""


class Stagings:
    """Keep what experts of a GPU are read to, by their size."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[int, list[Staging]] = {}
        self._made: dict[int, int] = {}

    def take(self, size: int, now: bool) -> Staging | None:
        """Return a staging that no copy reads any more. None: all are on their way; with ``now`` the host waits for the oldest copy."""
        free = self._free.setdefault(size, [])
        if free and (free[0].copied.query() or (now and self._made[size] >= STAGINGS)):
            free[0].copied.synchronize()
            return free.pop(0)
        if self._made.get(size, 0) >= STAGINGS:
            return None
        self._made[size] = self._made.get(size, 0) + 1
        return Staging(torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True), torch.Event(self._device))

    def give(self, staging: Staging) -> None:
        self._free[staging.memory.nbytes].append(staging)

    @property
    def made_bytes(self) -> int:
        """Return the bytes of all stagings, in use or not."""
        return sum(size * count for size, count in self._made.items())


class Cache(Part):
    """The experts of one model that are in memory on this rank, the one that was used last at the end.

    Args:
        engine: of the prepared model.
        most_bytes: of all experts together.
    """

    def __init__(self, engine: Any, most_bytes: int) -> None:
        self.engine, self.most_bytes = engine, most_bytes
        self._experts_bytes = 0
        self.hits = self.reads = 0
        self._held: OrderedDict[Key, Expert] = OrderedDict()
        self._free: dict[int, list[Tensor]] = {}
        self._version = engine.version
        self.device: torch.device = engine.device
        """Where experts are, and compute."""
        self._stagings = None if self.device.type == "cpu" else Stagings(self.device)
        self._stream: torch.Stream | None = None
        """Of a GPU: the one that computed with the experts last."""

    def planned_bytes(self, engine: ModelState, paper: dict[str, int]) -> Bytes:
        return {(self._tier, "expert_cache"): self.most_bytes}

    def held_bytes(self, engine: ModelState) -> Bytes:
        spare_bytes = sum(memory.nbytes for memory in itertools.chain(*self._free.values()))
        held: Bytes = {(self._tier, "expert_cache"): self._experts_bytes + spare_bytes}
        if self._stagings is not None:
            held["pinned", "expert_cache"] = self._stagings.made_bytes
        return held

    @property
    def _tier(self) -> str:
        return "cpu" if self._stagings is None else "device"

    def each(self, layer: DemandLayer, chosen: list[int]) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
        """Yield the chosen experts, in their order, each with its values; these are good until the next one is asked for.

        Raises:
            zeropp.TierError: a read failed; it names the expert.
        """
        self._forget_old()
        self._follow()
        begun = 0
        try:
            for at, expert in enumerate(chosen):
                begun = max(begun, at)
                while begun < len(chosen) and self._begin(layer, chosen[begun], chosen[at : begun + 1], begun == at):
                    begun += 1
                yield expert, self._arrived(layer, expert)
        finally:
            for expert in chosen:  # those of reads that nobody waits for any more
                if (one := self._held.get((layer.number, expert))) is not None and one.parts:
                    self._drop((layer.number, expert))

    def _forget_old(self) -> None:
        """Drop all experts where values of the model were changed."""
        if self._version != self.engine.version:
            for key in list(self._held):
                self._drop(key)
            self._version = self.engine.version

    def _follow(self) -> None:
        """Keep memory of experts from torch's allocator until the stream that computes with them now is done with it, too.

        The hook of the module that computes has made this stream wait for the one before.
        """
        if self._stagings is None:
            return
        current = torch.accelerator.current_stream(self.device)
        if self._stream is not None and current != self._stream:
            for memory in (*(one.memory for one in self._held.values()), *itertools.chain(*self._free.values())):
                memory.record_stream(current)
        self._stream = current

    def _begin(self, layer: DemandLayer, expert: int, needed: list[int], now: bool) -> bool:
        """Have the values of an expert in memory or under way. False: the experts that are ``needed`` before leave no memory for it."""
        key = layer.number, expert
        if key in self._held:
            self.hits += 1
            self._held.move_to_end(key)
            return True
        if not self._drop_oldest(layer, needed, now):
            return False
        staging = None if self._stagings is None else self._stagings.take(layer.expert_bytes, now)
        if self._stagings is not None and staging is None:
            return False
        self.reads += 1
        self._experts_bytes += layer.expert_bytes
        one = layer.memory(self._free.get(layer.expert_bytes, []))
        one.staging = staging
        self._held[key] = one
        for name in one.values:
            with self._named(layer, expert, name):
                layer.begin(expert, one, name)
        return True

    def _drop_oldest(self, layer: DemandLayer, needed: list[int], now: bool) -> bool:
        """Drop the oldest experts until there is memory for one. False: only those that are ``needed`` are left; with ``now`` they go, too."""
        keep = {(layer.number, one) for one in needed}
        while self._experts_bytes + layer.expert_bytes > self.most_bytes:
            oldest = next((one for one in self._held if one not in keep), None)
            if oldest is None and not now:
                return False
            self._drop(next(iter(self._held)) if oldest is None else oldest)
        return True

    def _arrived(self, layer: DemandLayer, expert: int) -> Mapping[str, Tensor]:
        one = self._held[layer.number, expert]
        while one.parts:
            with self._named(layer, expert, one.parts[0][0]):
                self.engine.core.end_part(one.parts[0][1])
            one.parts.pop(0)
        if one.staging is not None:
            layer.copy_up(one.staging, one.memory)
            self._give(one)
        return one.values

    def _give(self, one: Expert) -> None:
        """Give back what an expert was read to."""
        if one.staging is not None and self._stagings is not None:
            self._stagings.give(one.staging)
            one.staging = None

    def _drop(self, key: Key) -> None:
        one = self._held.pop(key)
        self._experts_bytes -= one.memory.nbytes
        one.parts.clear()  # waits for what is under way
        self._give(one)
        self._free.setdefault(one.memory.nbytes, []).append(one.memory)
        del self._free[one.memory.nbytes][SPARE:]

    @contextlib.contextmanager
    def _named(self, layer: DemandLayer, expert: int, name: str) -> Iterator[None]:
        try:
            yield
        except TierError as error:
            self._drop((layer.number, expert))
            error.args = (f"{layer.name_of(expert, name)}: {error.args[0]}", *error.args[1:])
            raise


class DemandLayer:
    """Find the experts of one layer, and read them.

    Args:
        number: of the layer.
        name: of its module.
        local: by name in the module, the parameters of this rank's experts.
        first: the number of the first of these, among the slices of all experts of the layer.
        slices: of an expert.
    """

    def __init__(
        self, cache: Cache, number: int, name: str, local: Mapping[str, nn.Parameter], first: int, slices: int
    ) -> None:
        self.cache, self.number, self.name, self._first, self._slices = cache, number, name, first, slices
        self._places = {}
        offset = 0
        for key, parameter in local.items():
            ref = ref_of(parameter)
            assert ref is not None, "the model is prepared"
            entry, shape = ref.unit.params[ref.index], torch.Size((1, *parameter.shape[1:]))
            self._places[key] = (ref.unit.index, entry.offset_elems, shape, ref.unit.dtype, offset)
            offset += rounded(shape.numel() * ref.unit.dtype.itemsize, ALIGN_BYTES)
            self._check_blocks(key, parameter.dim(), shape.numel())
        self.expert_bytes = offset + ALIGN_BYTES
        if self.expert_bytes > cache.most_bytes:
            raise ConfigError(
                f"Experts.cache: {cache.most_bytes} bytes, and one expert of '{name}' takes {self.expert_bytes}; give it that at least"
            )

    def _check_blocks(self, key: str, dims: int, elems: int) -> None:
        stored = self.cache.engine.config.stored_name
        if stored is not None and dims == 3 and elems % BLOCK_ELEMS:
            raise ConfigError(
                f"Experts.cache: '{key}' of an expert of '{self.name}' has {elems} elements, and {stored} is kept in blocks of "
                f"{BLOCK_ELEMS}, so that experts share blocks; leave Experts.cache or Precision.stored at None"
            )

    def name_of(self, expert: int, name: str) -> str:
        """Return the name in messages of an expert's part of a parameter of the module."""
        return f"'{self.name}.{name}[{(self._first + expert) // self._slices}]'"

    def memory(self, free: list[Tensor]) -> Expert:
        """Return memory for one expert, that of ``free`` where there is some."""
        memory = free.pop() if free else self._new_memory()
        return Expert(memory, self._values_in(memory))

    def _values_in(self, memory: Tensor) -> dict[str, Tensor]:
        """Return an expert's parameters in memory for one: they begin at a page."""
        pages = _pages(memory)
        return {
            key: pages[at : at + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for key, (_, _, shape, dtype, at) in self._places.items()
        }

    def copy_up(self, staging: Staging, memory: Tensor) -> None:
        """Copy an expert to memory of a GPU, on torch's current stream."""
        size = self.expert_bytes - ALIGN_BYTES
        _pages(memory)[:size].copy_(_pages(staging.memory)[:size], non_blocking=True)
        staging.copied.record(torch.accelerator.current_stream(memory.device))

    def _new_memory(self) -> Tensor:
        """Return memory of the cache's device; on the host what the file's engine reads to without looking up its pages, where there is an
        engine."""
        if self.cache.device.type != "cpu":
            return torch.empty(self.expert_bytes, dtype=torch.uint8, device=self.cache.device)
        capsule = self.cache.engine.core.part_memory(self.expert_bytes)
        if capsule is None:
            return torch.empty(self.expert_bytes, dtype=torch.uint8, device="cpu")
        memory: Tensor = from_dlpack(capsule)
        return memory

    def begin(self, expert: int, one: Expert, name: str) -> None:
        """Begin to read an expert's part of a parameter of the module."""
        unit, offset, shape, _, _ = self._places[name]
        first, count = offset + expert * shape.numel(), shape.numel()
        memory = one.memory if one.staging is None else one.staging.memory
        values = one.values if one.staging is None else self._values_in(memory)
        part = self.cache.engine.core.begin_part(unit, first, count, values[name].data_ptr(), memory)
        one.parts.append((name, part))

    def each(self, ends: Tensor) -> Iterator[tuple[Mapping[str, Tensor], slice]]:
        """Yield for each expert that has rows its values, and which rows these are. ``ends``: the row at which each expert's end."""
        bounds = [0, *ends.tolist()]
        chosen = [expert for expert in range(len(bounds) - 1) if bounds[expert] < bounds[expert + 1]]
        for expert, values in self.cache.each(self, chosen):
            yield values, slice(bounds[expert], bounds[expert + 1])


def _pages(memory: Tensor) -> Tensor:
    """Return memory from its first whole page on."""
    return memory[-memory.data_ptr() % ALIGN_BYTES :]


class DemandCall(WrappedCall):
    """The call of a module of experts: without gradients its unit stays where it is, because the forward reads experts of its own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._module = weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        return self.inner(*args, **kwargs) if torch.is_grad_enabled() else module._call_impl(*args, **kwargs)
