# SPDX-License-Identifier: Apache-2.0
"""Values, gradients and optimizer states of single parameters, whole or this rank's part: for debugging, surgery on
weights, and metrics. What DeepSpeed calls ``safe_get_full_fp32_param`` and its relatives.

Kinds: ``"value"`` (in fp32 where there are master weights), ``"grad"`` (the averaged gradient as the step will use it:
unscaled, clipped), and the optimizer's own names, such as ``"exp_avg"``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeropp.checkpoint.full_state import write_piece
from zeropp.comm.collective import Ranks, all_gather
from zeropp.errors import ConfigError, Error
from zeropp.zero.engine import Engine
from zeropp.zero.model.dtensor import like
from zeropp.zero.model.parameter import Ref, is_dtensor, local_of, ref_of
from zeropp.zero.model.part import parts_of
from zeropp.zero.model.tied import require_untied
from zeropp.zero.model_state import WHOLE, Entry, Unit
from zeropp.zero.step import moments

__all__ = ["get_full", "get_local", "local_range", "set_full", "set_local"]


def local_range(param: nn.Parameter) -> tuple[int, int]:
    """Return (first, last + 1) of the flattened parameter's elements that this rank keeps, updates and saves. Empty
    where both are equal. Of a complex parameter: of its numbers, real and imaginary part in turn, as `get_local` has
    them."""
    part = _Part(_ref(param))
    return part.begin, part.begin + part.elems


def get_local(param: nn.Parameter, kind: str = "value") -> torch.Tensor | None:
    """Return a copy of this rank's part, 1-D; None where there is no such thing (a gradient before backward, a state
    before the first step). Not collective. With a delayed update under way a value is the optimizer's; of fp32
    parameters on NVMe, the model's."""
    part = _Part(_ref(param))
    held = part.read(kind)
    return None if held is None else held.clone()


def get_full(param: nn.Parameter, kind: str = "value") -> torch.Tensor | None:
    """Return a copy of the whole, in the parameter's shape, on every rank; None where there is no such thing.
    Collective.

    Cost: one gather of this parameter.

    Raises:
        zeropp.ConfigError: no such kind; or not a parameter of a prepared model.
    """
    part = _Part(_ref(param))
    part.engine.flush()
    whole = _of_group(part, kind)
    if part.parts is not None:
        return part.parts.gather_some(whole, part.unit.grad_dtype)
    if whole is None or not is_dtensor(param):
        return whole
    joined: torch.Tensor = like(param, whole).full_tensor()  # type: ignore[attr-defined]
    return joined


def _of_group(part: _Part, kind: str) -> torch.Tensor | None:
    """Return all that the ranks which partition a unit have of one parameter."""
    unit = part.unit
    if unit.local:
        held = part.read(kind)
        return None if held is None else part.entry.of(held.clone())
    parts: list[torch.Tensor | None] = []

    def read() -> str | None:  # a rank without a piece of it has no states to know a wrong name by
        parts.append(part.read(kind))
        return None if parts[0] is None else str(parts[0].dtype)

    types = [one for one in Ranks(unit).all_do(read) if one is not None]
    held = parts[0]
    if not types:
        return None
    dtype: torch.dtype = getattr(torch, types[0].removeprefix("torch."))
    spans = list(part.spans())
    most = max(last - first for first, last in spans)
    shard = part.unit.shard
    mine = torch.zeros(most, dtype=dtype, device="cpu" if shard.is_meta else shard.device)  # meta: it is in a file
    every = torch.empty(most * unit.ranks, dtype=dtype, device=mine.device)
    if held is not None:
        mine[: held.numel()] = held
    all_gather(unit.comm, every, mine)
    pieces = [every[rank * most : rank * most + last - first] for rank, (first, last) in enumerate(spans)]
    return part.entry.of(torch.cat(pieces))


def set_local(param: nn.Parameter, values: torch.Tensor, kind: str = "value") -> None:
    """Replace this rank's part: as many elements as :func:`local_range` has. Collective for values; between two steps."""
    part = _Part(_ref(param))
    flat = values.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    require_untied([part.unit], "set_local")
    if flat.numel() != part.elems:
        raise ConfigError(
            f"set_local: {flat.numel()} elements for '{part.name}', of which this rank has {part.elems}: "
            f"{part.begin} to {part.begin + part.elems} (zeropp.local_range)"
        )
    if kind == "value":
        if part.unit.place == WHOLE and not part.unit.local:
            raise ConfigError(f"set_local: every rank holds all of '{part.name}'; use zeropp.set_full")
        with part.engine.write_shards(), torch.no_grad():
            write_piece(part.unit, part.entry.offset_elems + part.begin, flat)
        return
    part.write(kind, flat)


def set_full(param: nn.Parameter, values: torch.Tensor, kind: str = "value") -> None:
    """Replace the whole; give the same values on every rank. Collective; between two steps.

    Raises:
        zeropp.ConfigError: another shape; no such kind. zeropp.Error: there is no gradient or state yet.
    """
    part = _Part(_ref(param))
    require_untied([part.unit], "set_full")
    held = part.entry.held
    shape = tuple(held.whole)
    if tuple(values.shape) != shape:
        raise ConfigError(f"set_full: values of shape {tuple(values.shape)} for '{part.name}' of shape {shape}")
    flat = part.entry.numbers(values.detach() if held.is_whole else held.taken(values.detach()))
    if kind == "value":
        with part.engine.write_shards(), torch.no_grad():
            if part.unit.place == WHOLE or part.unit.local:
                write_piece(part.unit, part.entry.offset_elems, flat)
            else:
                write_piece(part.unit, part.entry.offset_elems + part.begin, flat[part.begin : part.begin + part.elems])
        return
    mine = flat[part.begin : part.begin + part.elems]
    if part.unit.local:
        part.write(kind, mine)
    else:
        Ranks(part.engine).all_do(lambda: part.write(kind, mine))


def _ref(param: Any) -> Ref:
    ref = ref_of(param) if isinstance(param, nn.Parameter) else None
    if ref is None:
        raise ConfigError(
            f"{type(param).__name__} of shape {tuple(getattr(param, 'shape', ()))} is not a parameter of a model that "
            "zeropp.prepare was given; pass one of model.parameters()"
        )
    return ref


@dataclass
class _Part:
    """One parameter as this rank holds it."""

    ref: Ref

    def __post_init__(self) -> None:
        self.engine: Engine = self.ref.engine
        self.unit: Unit = self.ref.unit
        self.entry: Entry = self.unit.params[self.ref.index]
        self.name = self.entry.names[0]
        self.parts = parts_of(self.entry.param)
        first, last = self._span(self.unit.begin_elems)
        self.begin, self.elems = first, last - first
        self.first = self.entry.offset_elems + first - self.unit.begin_elems  # in the unit's shard

    def _span(self, begin: int) -> tuple[int, int]:
        """Return elements of the parameter in the shard that begins there."""
        offset, numel = self.entry.offset_elems, self.entry.numel
        first = min(max(begin - offset, 0), numel)
        return first, max(first, min(begin + self.unit.shard.numel() - offset, numel))

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield the spans of every rank."""
        for rank in range(self.unit.ranks):
            yield self._span(rank * self.unit.shard_elems)

    def read(self, kind: str) -> torch.Tensor | None:
        """Return this rank's part, 1-D, perhaps a view."""
        self._await_update()
        if kind == "value":
            return _loaded(self.unit.own[self.first : self.first + self.elems].detach())
        if kind == "grad":
            return self._gradient()
        state = self._state(kind)
        if state is not None and self.unit.state_name == "int8":
            return moments.read(self.unit, kind, self.ref.index)
        return None if state is None else _loaded(state[self.first : self.first + self.elems])

    def _await_update(self) -> None:
        """Wait for an update that is delayed; raise for one that a backward began: either may write what is asked
        for."""
        self.engine.schedule.finish()
        self.engine.schedule.require_ended("a part of a parameter was asked for")

    def _gradient(self) -> torch.Tensor | None:
        scale = self.engine.grad_scale
        if self.engine.local_grads:
            gradient = self._own_gradient()
            return None if gradient is None else self.entry.numbers(gradient) * scale
        found = self.engine.gradient_shard(self.unit)
        if found is None or not found[1][self.ref.index]:
            return None
        return found[0][self.first : self.first + self.elems] * scale

    def _own_gradient(self) -> torch.Tensor | None:
        with torch._C.DisableTorchFunctionSubclass():
            gradient = self.entry.param.grad
            return None if gradient is None else local_of(gradient)

    def _state(self, kind: str) -> torch.Tensor | None:
        state = self.engine.optimizer_state(self.unit) if self.unit.trainable else {}
        state.pop("step", None)
        if kind in state:
            return state[kind]
        if state:
            raise ConfigError(
                f"'{self.name}' has no '{kind}'; it has 'value', 'grad', {', '.join(map(repr, sorted(state)))}"
            )
        return None

    def write(self, kind: str, values: torch.Tensor) -> None:
        if kind == "grad":
            self._write_gradient(values)
            return
        self._await_update()
        if self._state(kind) is None:
            if not self.elems:  # torch's own optimizers have states of pieces: this rank has none, others may
                return
            raise Error(f"'{self.name}' has no '{kind}' yet: states exist from the first optimizer.step() on")
        if self.elems:
            self.engine.strategy.write_state(self.unit, kind, self.ref.index, self.first, values)

    def _write_gradient(self, values: torch.Tensor) -> None:
        scale = self.engine.grad_scale
        missing = Error(f"'{self.name}' has no gradient to replace; call backward first")
        if self.engine.local_grads:
            gradient = self._own_gradient()
            if gradient is None:
                raise missing
            gradient.copy_(self.entry.of(values / scale))
        else:
            found = self.engine.gradient_shard(self.unit)
            if found is None or not found[1][self.ref.index]:
                raise missing
            found[0][self.first : self.first + self.elems] = values / scale
            self.engine.grads.write(self.unit, found[0])
        self.engine.norm = None


def _loaded(values: Any) -> torch.Tensor:
    """Return values; those of a tier are read from its file."""
    tensor: torch.Tensor = values.tensor() if hasattr(values, "tensor") else values
    return tensor
