# SPDX-License-Identifier: Apache-2.0
"""Activations of an accelerator: in page-locked memory of the host, ``Config(offload=Offload(activations="cpu"))``, or on NVMe.

    stream       does                            after
    down         copies a storage to its place   the computation that made it; the last copy up from that place
    up           copies it to new memory         its copy down; the last use of that memory
    computation  frees what went down            its copy down
                 uses what came up               its copy up

The host waits for none of this. The memory of what went down is freed once enough is on its way (`WAITING_BYTES`): then the
computation's stream waits for the oldest copy, so whoever has that memory next comes after it. What the forward saved last
is still on its way when the backward begins, and is used from there.

To and from a file the same bytes go through page-locked memory, which the host hands to the file once the copy down is over, and to the
device once they are read. There the host waits where it would wait for a file on a machine without an accelerator.
"""

from __future__ import annotations

import bisect
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zeropp import aio
from zeropp.config import Tier
from zeropp.errors import TierError
from zeropp.zero.formulas import rounded
from zeropp.zero.model_state import Bytes, ModelState
from zeropp.zero.offload.activations import ActivationFile, Extents, MovedActivations, Place, Saved

SLAB_BYTES = 64 << 20
"""Page-locked memory is taken in pieces of this, or of the next power of two that one storage needs: torch rounds to those."""
_ALIGN_BYTES = 512


@dataclass
class _Slab:
    """A piece of page-locked memory, at ``start`` in the places of all of them."""

    start: int
    memory: Tensor
    extents: Extents = field(default_factory=Extents)


class _CopyDown:
    """A copy to the host. The stream on which the storage was saved waits for it, before the storage is freed."""

    def __init__(self, stream: torch.Stream, event: torch.Event) -> None:
        self._stream, self._event = stream, event

    def done(self) -> bool:
        """False: to ask is a call of the driver, and what waits is bounded."""
        return False

    def wait(self) -> None:
        self._stream.wait_event(self._event)

    cancel = wait


class _CopyUp:
    """A copy to the device, to memory of the stream that was current."""

    def __init__(self, stream: torch.Stream, event: torch.Event, memory: Tensor) -> None:
        self._stream, self._event, self._memory = stream, event, weakref.ref(memory)
        self._ordered: set[int] = set()

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        memory = self._memory()
        assert memory is not None  # who fetches it has it
        self.give(memory)

    def give(self, memory: Tensor) -> None:
        """Let the current stream use the memory, which is this."""
        current = torch.accelerator.current_stream(self._stream.device)
        if current.stream_id in self._ordered:
            return
        current.wait_event(self._event)
        self._ordered.add(current.stream_id)
        if current != self._stream:
            memory.record_stream(current)

    def cancel(self) -> None:
        self._stream.wait_event(self._event)


class PinnedActivations(MovedActivations):
    """Keep what autograd saves on an accelerator in page-locked memory of the host.

    Args:
        tier: kind "cpu"; ``fraction`` counts.
    """

    doing = "copied it to the host"

    def __init__(self, engine: ModelState, tier: Tier) -> None:
        super().__init__(engine, engine.device, float(tier.fraction))
        self.down, self.up = torch.Stream(self.device), torch.Stream(self.device)
        self._core = engine.core
        self._slabs: list[_Slab] = []
        self._came_up = False
        """True if something was copied up since the last copy down waited for that."""
        self._down_events: dict[int, torch.Event] = {}
        self._arrivals: dict[int, _CopyUp] = {}

    def close(self) -> None:
        """A backward that needs what is there raises. torch gives the memory back once the copies are over."""
        with self._lock:
            self._closed = True
            self._slabs.clear()

    def held_bytes(self, engine: ModelState) -> Bytes:
        with self._lock:
            self._free_dead()
            return {
                ("pinned", "activations"): self._pinned_bytes(),
                ("device", "activations"): self.waiting_bytes + self.ahead_bytes,
            }

    def _pinned_bytes(self) -> int:
        return sum(slab.memory.numel() for slab in self._slabs)

    # -- places

    def _take_place(self, size: int) -> int:
        size = rounded(size, _ALIGN_BYTES)
        for slab in self._slabs:
            if slab.extents.fits(size, slab.memory.numel()):
                return slab.start + slab.extents.take(size)
        slab = self._add_slab(max(SLAB_BYTES, 1 << (size - 1).bit_length()))
        return slab.start + slab.extents.take(size)

    def _give_place(self, offset: int, size: int) -> None:
        if not self._closed:
            slab = self._slab_of(offset)
            slab.extents.give(offset - slab.start, rounded(size, _ALIGN_BYTES))

    def _slab_of(self, offset: int) -> _Slab:
        return self._slabs[bisect.bisect_right(self._slabs, offset, key=lambda slab: slab.start) - 1]

    def _add_slab(self, size: int) -> _Slab:
        memory = _page_locked(size, self._pinned_bytes(), self._core)
        last = self._slabs[-1] if self._slabs else None
        self._slabs.append(_Slab(0 if last is None else last.start + last.memory.numel(), memory))
        return self._slabs[-1]

    def _bytes_at(self, place: Place) -> Tensor:
        slab = self._slab_of(place.offset_bytes)
        first = place.offset_bytes - slab.start
        return slab.memory[first : first + place.bytes]

    # -- copies

    def _start_write(self, flat: Tensor, place: Place) -> _CopyDown:
        current = torch.accelerator.current_stream(self.device)
        self.down.wait_stream(current)
        if self._came_up:
            self.down.wait_stream(self.up)
            self._came_up = False
        with self.down:
            self._bytes_at(place).copy_(flat, non_blocking=True)
        event = self._down_events[place.index] = torch.Event(self.device)
        event.record(self.down)
        return _CopyDown(current, event)

    def _start_read(self, flat: Tensor, place: Place) -> _CopyUp:
        current = torch.accelerator.current_stream(self.device)
        self.up.wait_stream(current)
        self.up.wait_event(self._down_events[place.index])
        with self.up:
            flat.copy_(self._bytes_at(place), non_blocking=True)
        event = torch.Event(self.device)
        event.record(self.up)
        self._came_up = True
        copy = self._arrivals[place.index] = _CopyUp(current, event, flat)
        return copy

    def _in_use(self, saved: Saved) -> Tensor | None:
        flat = super()._in_use(saved)
        if flat is not None:
            self._arrivals[saved.index].give(flat)
        return flat

    def _note_dead(self, place: Place) -> None:
        self._down_events.pop(place.index, None)
        self._arrivals.pop(place.index, None)


class _WriteFromDevice:
    """A copy down, and then a write to the file. The device's memory may be freed once both are over."""

    def __init__(self, tier: DeviceActivationFile, flat: Tensor, place: Place) -> None:
        self._tier, self._name, self._offset = tier, tier.file.name, place.offset_bytes
        tier.down.wait_stream(torch.accelerator.current_stream(tier.device))
        self._staged = tier.staging(place.bytes)
        with tier.down:
            self._staged.copy_(flat, non_blocking=True)
        self._copied = torch.Event(tier.device)
        self._copied.record(tier.down)
        self._written: aio.Future | None = None

    def begun(self) -> bool:
        """Begin to write if the copy is over; return True if the write began."""
        if self._written is None and self._copied.query():
            self._written = self._tier.write(self._staged, self._offset)
        return self._written is not None

    def done(self) -> bool:
        return self.begun() and self._written is not None and self._written.done()

    def wait(self) -> None:
        if self._written is None:
            self._copied.synchronize()
            self._written = self._tier.write(self._staged, self._offset)
        self._written.wait()

    def cancel(self) -> None:
        if self._written is not None:
            self._written.cancel()


class _ReadToDevice:
    """A read from the file, and then a copy up, on the stream that wants the bytes."""

    def __init__(self, tier: DeviceActivationFile, flat: Tensor, place: Place) -> None:
        self._stream, self._memory = torch.accelerator.current_stream(tier.device), weakref.ref(flat)
        self._staged = tier.staging(place.bytes)
        self._read = tier.read(self._staged, place.offset_bytes)

    def done(self) -> bool:
        return self._read.done()

    def wait(self) -> None:
        self._read.wait()
        current, memory = torch.accelerator.current_stream(self._stream.device), self._memory()
        assert memory is not None  # who fetches it has it
        if current != self._stream:
            current.wait_stream(self._stream)
            memory.record_stream(current)
        memory.copy_(self._staged, non_blocking=True)

    def cancel(self) -> None:
        self._read.cancel()


class DeviceActivationFile(ActivationFile):
    """Keep what autograd saves on an accelerator in a file. Construction is collective; see :class:`ActivationFile`."""

    doing = "copied it to the disk"

    def __init__(self, engine: ModelState, tier: Tier) -> None:
        super().__init__(engine, tier)
        self.device = engine.device
        self.down = torch.Stream(self.device)
        self._core = engine.core

    def held_bytes(self, engine: ModelState) -> Bytes:
        held = super().held_bytes(engine)
        held["device", "activations"] = held.pop(("cpu", "activations"))
        return held

    def staging(self, size: int) -> Tensor:
        """Return page-locked memory for so many bytes."""
        return _page_locked(size, 0, self._core)

    def write(self, staged: Tensor, offset: int) -> aio.Future:
        """Begin to write to the file."""
        return self._io.write(staged, self.file.name, offset)

    def read(self, staged: Tensor, offset: int) -> aio.Future:
        """Begin to read from the file."""
        return self._io.read(staged, self.file.name, offset)

    def _start_write(self, flat: Tensor, place: Place) -> _WriteFromDevice:
        return _WriteFromDevice(self, flat, place)

    def _start_read(self, flat: Tensor, place: Place) -> _ReadToDevice:
        return _ReadToDevice(self, flat, place)

    def _reap(self, patiently: bool = False) -> None:
        for _, future, _ in self._writing:
            if isinstance(future, _WriteFromDevice) and not future.begun():
                break
        super()._reap(patiently)

    def _memory_for(self, size: int) -> Tensor:
        return MovedActivations._memory_for(self, size)

    def _over(self, storage: torch.UntypedStorage, size: int) -> Tensor:
        return MovedActivations._over(self, storage, size)

    def _note_freed(self, size: int) -> None:
        """Do nothing: torch's allocator of the device keeps its memory."""


def _page_locked(size: int, held_bytes: int, core: Any) -> Tensor:
    """Return so many bytes of page-locked memory, of which activations hold ``held_bytes`` already."""
    try:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:
        said = str(error).partition("\n")[0]
        raise TierError(
            f"activations: there is no page-locked memory of the host for {size} bytes more ({said}); this rank page-locked "
            f"{held_bytes} bytes for activations and {core.memory()['pinned']} for parameters and gradients; move fewer with "
            "Offload(activations=Tier('cpu', fraction=0.5)), use torch.utils.checkpoint in the model, or raise the limit (`ulimit -l`, "
            "or the container's memory)",
            bytes_wanted=size,
        ) from error
