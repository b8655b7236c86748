# SPDX-License-Identifier: Apache-2.0
"""Parameters of which a rank holds a part as a parameter of its own.

The model and the optimizer keep the parameter that they had: its name, its true shape, no values. Units, gradients and states belong
to the part, a leaf of autograd that the module sees inside its forward. ``shown`` leads from the part to what the model shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from zeropp.comm.collective import all_gather
from zeropp.errors import PartitionedParameterError
from zeropp.zero.model.boxes import Boxes, slices
from zeropp.zero.model.parameter import METADATA, Managed, converts_nothing, leaves_of, ref_of


class PartParameter(Managed):
    """A parameter that the model shows, and of which this rank has a part. It answers what needs no values."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        answer = super().__torch_function__(func, types, args, kwargs)
        if func in (torch.Tensor.requires_grad.__set__, torch.Tensor.requires_grad_):  # type: ignore[attr-defined]
            ref = ref_of(args[0])
            if ref is not None:
                ref.unit.params[ref.index].param.requires_grad_(args[0].requires_grad)
        return answer

    @classmethod
    def _operate(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if converts_nothing(func, args, kwargs):
            return args[0]
        ref = next(ref_of(one) for one in leaves_of((args, kwargs)) if type(one) is PartParameter)
        name = "a parameter of a model that is gone" if ref is None else f"parameter '{ref.name}'"
        raise PartitionedParameterError(
            f"this rank holds a part of {name} alone, and `{getattr(func, '__name__', func)}` reads or writes all of it outside of its "
            "module's forward; use `with zeropp.gathered(parameter):`, or zeropp.full_state_dict(model) for a whole copy"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        ref = ref_of(self)
        return f"PartParameter('{ref.name if ref else ''}', shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return self._operate(torch.Tensor.__deepcopy__, (self, memo), {})  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._operate(torch.Tensor.__reduce_ex__, (self, protocol), {})


@dataclass(frozen=True)
class Parts:
    """How a parameter is cut among the ranks of a communicator, of which each holds one part."""

    comm: Any
    """None: there is one part."""
    boxes: tuple[Boxes, ...]
    """By rank; all have one shape."""
    of_data_rank: int = 1
    """How many parts that follow each other are on ranks that are one rank for ZeRO: those of a job that hold the same tokens, and of
    which each partitions its own part."""

    @property
    def own(self) -> Boxes:
        """Return this rank's."""
        return self.boxes[self.comm.rank if self.comm is not None else 0]

    @property
    def spread(self) -> int:
        """Return how many parts there are among data ranks."""
        return len(self.boxes) // self.of_data_rank

    def of_rank(self, rank: int) -> Boxes:
        """Return what a data rank has."""
        own = self.comm.rank if self.comm is not None else 0
        return self.boxes[rank % self.spread * self.of_data_rank + own % self.of_data_rank]

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of whole values."""
        return self.own.taken(whole)

    def gather_some(self, part: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Return whole values, zeros where a rank has no part of them; None if no rank has any. Collective."""
        have = torch.zeros(len(self.boxes), dtype=torch.int64, device="cpu")
        all_gather(self.comm, have, have.new_tensor([part is not None]))
        if not have.any():
            return None
        return self.gather(torch.zeros(self.own.shape, dtype=dtype) if part is None else part)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return whole values from all ranks' parts. Collective."""
        every = torch.empty(len(self.boxes) * part.numel(), dtype=part.dtype, device=part.device)
        all_gather(self.comm, every, part.reshape(-1).contiguous())
        whole = torch.empty(self.own.whole, dtype=part.dtype, device=part.device)
        for boxes, values in zip(self.boxes, every.view(len(self.boxes), *self.own.shape), strict=True):
            for box in boxes.boxes:
                whole[slices(box.offset, box.size)] = values[slices(box.at, box.size)]
        return whole


class Division(Protocol):
    """The parameters of a model of which ranks have parts, as :class:`zeropp.moe.division.Division`."""

    parts: dict[nn.Parameter, nn.Parameter]
    """By parameter of the model, this rank's part."""

    @property
    def counts(self) -> list[int]:
        """Return the numbers of parts that there are: of n parts rank r has ``r % n``, and partitions it with those that have the same
        (spread.py)."""

    @property
    def divisor(self) -> float:
        """Return by what the sum of gradients over the ranks of a part is divided; 0: by the number of all data ranks."""

    @property
    def apart(self) -> list[nn.Module]:
        """Return modules that are units of their own, whatever they stand in."""

    def is_held(self, params: list[nn.Parameter]) -> bool:
        """Return True if a unit of these parameters stays in memory, where others have a part in files."""

    def on_host(self, params: list[nn.Parameter]) -> tuple[str, ...]:
        """Return which kinds of states a unit of these parameters has in memory of the host, where others have theirs on a GPU."""

    def install(self, engine: Any) -> None:
        """Let the modules compute with the parts, of units of this engine."""


def cut(parameter: nn.Parameter, parts: Parts) -> nn.Parameter:
    """Return a new parameter, without values, for this rank's part of one that the model goes on to show."""
    empty = torch.empty(1, dtype=parameter.dtype, device="cpu").expand(parts.own.shape)
    part: Any = nn.Parameter(empty, parameter.requires_grad)
    part._zeropp_shown, part._zeropp_parts, part._zeropp_boxes = parameter, parts, parts.own
    return part  # type: ignore[no-any-return]


def parts_of(parameter: nn.Parameter) -> Parts | None:
    """Return how the parameter that a model shows is cut, by this rank's part of it; None: a unit has all of it."""
    return parameter.__dict__.get("_zeropp_parts")


def shown(parameter: nn.Parameter) -> nn.Parameter:
    """Return what the model and the optimizer have in place of a unit's parameter: mostly the same."""
    found: nn.Parameter = parameter.__dict__.get("_zeropp_shown", parameter)
    return found


def without_values(parameter: nn.Parameter) -> None:
    """Free the values of a parameter that is shown; its shape, type and device stay."""
    with torch._C.DisableTorchFunctionSubclass():
        empty = torch.empty(1, dtype=parameter.dtype, device=parameter.device)
        parameter.__class__ = nn.Parameter
        parameter.data = empty.expand(parameter.shape)
    parameter.__class__ = PartParameter


def with_values(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Let a parameter that is shown have values of its own, until :func:`without_values`."""
    parameter.__class__ = nn.Parameter
    parameter.data = values
