# SPDX-License-Identifier: Apache-2.0
"""Models whose tensors have other names and shapes in files of the Hub: ``experts.3.w1`` there, one tensor of all experts in the model.

transformers converts them where it loads and saves (its ``WeightConverter``). Here the same rules serve a stream of tensors that is
written, and reads of a part: the experts of this rank alone.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

_LATER = ("Concatenate", "Transpose", "Interleave")
"""Operations of transformers that leave the first dimension alone where theirs is another one."""


def rules() -> Any:
    """Return transformers' module of conversions; None where transformers was not imported."""
    return importlib.import_module("transformers.core_model_loading") if "transformers" in sys.modules else None


def converts(model: Any) -> bool:
    """Return True for a model of transformers, whose files may have other names."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def merges_rows(converter: Any) -> bool:
    """Return True if row i of what a converter makes comes from item i of its lists alone, so that some rows need some items."""
    first, *later = getattr(converter, "operations", None) or [None]
    if type(first).__name__ != "MergeModulelist" or first.dim or len(converter.target_patterns) > 1:
        return False
    dims = [dim for one in later for key in ("dim", "dim0", "dim1") if (dim := getattr(one, key, None)) is not None]
    known = all(type(one).__name__ in _LATER and not getattr(one, "check_dims", False) for one in later)
    return known and all(dim > 0 for dim in dims)


def keeps_rows(converter: Any) -> bool:
    """Return True if row i of the one tensor that a converter makes comes from row i of each of its tensors."""
    operations = getattr(converter, "operations", None) or []
    dims = [
        dim for one in operations for key in ("dim", "dim0", "dim1") if (dim := getattr(one, key, None)) is not None
    ]
    known = all(type(one).__name__ in _LATER and not getattr(one, "check_dims", False) for one in operations)
    return bool(operations) and known and all(dim > 0 for dim in dims) and len(converter.target_patterns) == 1


def _alone_at_rows(converter: Any, name: str) -> bool:
    """Return True if a converter has one operation, of this name, along the first dimension, of as many tensors as it says."""
    first, *later = getattr(converter, "operations", None) or [None]
    along = getattr(first, "dim", None) == 0 and getattr(first, "num_shards_attribute", None) is None
    return type(first).__name__ == name and along and not later


# -- writing -----------------------------------------------------------------------------------------------------------


def as_in_files(model: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model with the names and shapes of its files on the Hub; those of other models as they are.

    A tensor that becomes several is cut at once. Several that become one wait for each other, and come last. Tensors on meta may be
    given, to know names and sizes: their order is the same.
    """
    if not converts(model):
        yield from tensors
        return
    kinds = [*model.named_parameters(), *model.named_buffers()]
    whole = _reverted(model, {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in kinds})
    joined = {}
    for name, tensor in tensors:
        if name in whole and whole[name].shape == tensor.shape:
            yield name, tensor
        elif (alone := _alone(model, name, tensor, whole)) is not None:
            yield from alone.items()
        else:
            joined[name] = tensor
    if joined:
        yield from _reverted(model, joined).items()


def _reverted(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = rules().revert_weight_conversion(model, dict(tensors))
    return found


def _alone(
    model: Any, name: str, tensor: torch.Tensor, whole: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor] | None:
    """Return what one tensor becomes; None where it takes others for that."""
    try:
        parts = _reverted(model, {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")})
    except Exception:  # an operation wants tensors that are not there, and says so in its own way
        return None
    if any(part not in whole or whole[part].shape != one.shape for part, one in parts.items()):
        return None
    return parts if tensor.is_meta else _reverted(model, {name: tensor})


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass
class Merge:
    """The tensors of files that one tensor of a model, or several, are made of."""

    converter: Any
    """transformers' rule; None: a tensor under another name."""
    lists: dict[str, list[str]] = field(default_factory=dict)
    """By pattern of the rule: names in the files, in their order."""

    @property
    def by_rows(self) -> bool:
        """Return True if some rows need some tensors of each list."""
        return merges_rows(self.converter) and len({len(names) for names in self.lists.values()}) == 1

    def make(
        self, model: Any, target: str, read: Callable[[str], torch.Tensor], rows: slice = slice(None)
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of the model; of ``rows`` alone where :attr:`by_rows`."""
        if self.converter is None:
            return {target: read(next(iter(self.lists.values()))[0])}
        made = copy.deepcopy(self.converter)
        for pattern, names in self.lists.items():
            for name in names[rows]:
                made.add_tensor(target, name, pattern, read(name))
        found = made.convert(target, model=model, config=model.config)
        return {name: one[0] if isinstance(one, list) else one for name, one in found.items()}


def merges_of(model: Any, names: Sequence[str], known: Mapping[str, Any]) -> dict[str, Merge]:
    """Return by first name in the model which tensors of files become it.

    Args:
        names: in the files.
        known: by name, what the model has.
    """
    core = rules()
    mapping = getattr(model, "_weight_conversions", None)
    if mapping is None:
        mapping = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, core.WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, core.WeightConverter)]
    of = {pattern: one for one in converters for pattern in one.source_patterns}
    found: dict[str, Merge] = {}
    for name in sorted(names, key=core.dot_natural_key):
        target, pattern = core.rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        merge = found.setdefault(target, Merge(of.get(pattern)))
        merge.lists.setdefault(pattern or name, []).append(name)
    return found


def rows_of(shape: Sequence[int], begin: int, end: int) -> tuple[int, int]:
    """Return the first row, and the one after the last, that hold elements ``begin`` to ``end`` of a tensor that is not empty."""
    row = math.prod(shape[1:])
    return begin // row, -(-end // row)


# -- reading inside from_pretrained ------------------------------------------------------------------------------------


class _Rows:
    """Some rows of a tensor in a file; transformers asks for ``[...]``."""

    def __init__(self, tensor: Any, rows: slice) -> None:
        self._tensor, self._rows = tensor, rows

    def __getitem__(self, _: Any) -> Any:
        return self._tensor[self._rows]


@contextlib.contextmanager
def reading_rows(
    wanted: Callable[[Sequence[int]], tuple[int, int]], made: Callable[[torch.Tensor], None]
) -> Iterator[None]:
    """Inside, ``from_pretrained`` reads some rows of each parameter, of a vector some elements: those that this rank keeps.

    Args:
        wanted: returns for a shape the first row and the one after the last.
        made: is given each tensor of which only these rows have values.

    Tensors are read whole where a rule mixes rows, other than by cutting or joining tensors along the first dimension, a quantiser wants
    them all, or the file has another shape, which transformers refuses.
    """
    core = rules()
    if core is None:
        yield
        return
    before = core.WeightConverter.convert, core.WeightRenaming.convert, core.spawn_materialize

    def convert_rows(self: Any, layer_name: str, model: Any = None, **more: Any) -> Any:
        shape = _shape_of(self, model, layer_name, more)
        rows = slice(*wanted(shape)) if shape else slice(0)
        took = _take(self, shape, rows)
        found = before[0](self, layer_name, model=model, **more)
        if took is not _take_parts:
            return placed(found, shape, rows.start) if shape and took else found
        for one in found.values():
            made(one[0])
        return found

    def rename_rows(self: Any, layer_name: str, model: Any = None, **more: Any) -> Any:
        items, shape = next(iter(self.collected_tensors.values())), _shape_of(self, model, layer_name, more)
        read = getattr(items[0], "rows", None)
        if not shape or read is None or getattr(items[0], "shape", None) != tuple(shape):
            return before[1](self, layer_name, model=model, **more)
        rows = slice(*wanted(shape))
        items[:] = [lambda: read(rows)]
        return placed(before[1](self, layer_name, model=model, **more), shape, rows.start)

    def spawn(
        pool: Any, tensor: Any, device: Any = None, dtype: Any = None, sharding_op: Any = None, tensor_idx: Any = None
    ) -> Any:
        job = before[2](pool, tensor, device, dtype, sharding_op=sharding_op, tensor_idx=tensor_idx)
        if pool is None and sharding_op is None and tensor_idx is None:
            job.rows = lambda rows: core._materialize_copy(_Rows(tensor, rows), device, dtype)
            job.shape = tuple(tensor.get_shape() if hasattr(tensor, "get_shape") else tensor.shape)
        return job

    def placed(found: Mapping[str, Any], shape: torch.Size, first: int) -> dict[str, torch.Tensor]:
        return {
            name: _among(one[0] if isinstance(one, list) else one, shape, first, made) for name, one in found.items()
        }

    core.WeightConverter.convert, core.WeightRenaming.convert, core.spawn_materialize = convert_rows, rename_rows, spawn
    try:
        yield
    finally:
        core.WeightConverter.convert, core.WeightRenaming.convert, core.spawn_materialize = before


def _take(rule: Any, shape: torch.Size | None, rows: slice) -> Any:
    """Let a rule read these rows of a parameter alone. Return the function by which it does; None: it reads whole tensors."""
    if not shape:
        return None
    ways = (_take_tensors, _take_rows, _take_parts)
    return next((way for way in ways if way(rule, rule.collected_tensors, shape, rows)), None)


def _take_tensors(rule: Any, lists: dict[str, list[Any]], shape: torch.Size, rows: slice) -> bool:
    """Let a rule of which a row is made of tensors of its own read those. Return False, and change nothing, for another one."""
    if not merges_rows(rule) or {len(items) for items in lists.values()} != {shape[0]}:
        return False
    lists.update({pattern: items[rows] for pattern, items in lists.items()})
    return True


def _take_rows(rule: Any, lists: dict[str, list[Any]], shape: torch.Size, rows: slice) -> bool:
    """Let a rule read rows of each of its tensors. Return False, and change nothing, for one that mixes rows."""
    patterns = [pattern for pattern in rule.source_patterns if pattern in lists]
    items = [item for pattern in patterns for item in lists[pattern]]
    heights = [
        (getattr(item, "shape", None) or (-1 << 62,))[0] for item in items
    ]  # of a scalar, or read by threads: none that fits
    begins = _first_rows(rule, heights, shape[0])
    if begins is None or len(patterns) != len(lists):
        return False
    found = (_within(item, begin, rows) for item, begin in zip(items, begins, strict=True))
    for pattern in patterns:
        lists[pattern] = list(itertools.islice(found, len(lists[pattern])))
    return True


def _first_rows(rule: Any, heights: list[int], height: int) -> list[int] | None:
    """Return where the first row of each of a rule's tensors is in what it makes; None where it mixes rows."""
    if keeps_rows(rule) and set(heights) == {height}:
        return [0] * len(heights)
    if _alone_at_rows(rule, "Concatenate") and sum(heights) == height:
        return [sum(heights[:at]) for at in range(len(heights))]
    return None


def _within(item: Any, first: int, rows: slice) -> Callable[[], torch.Tensor | None]:
    """Return what reads those of these rows that a tensor in a file has, the first of which has the number ``first``."""
    begin, end = max(rows.start - first, 0), min(rows.stop - first, item.shape[0])
    return lambda: item.rows(slice(begin, end)) if begin < end else None


def _take_parts(rule: Any, lists: dict[str, list[Any]], shape: torch.Size, rows: slice) -> bool:
    """Let a rule that cuts one tensor into several of this shape read these rows of each. Return False, and change nothing, where it is
    another one."""
    items = [item for listed in lists.values() for item in listed]
    parts = len(rule.target_patterns)
    whole = (parts * shape[0], *shape[1:])
    if len(items) != 1 or getattr(items[0], "shape", None) != whole or not _alone_at_rows(rule, "Chunk"):
        return False

    def read() -> torch.Tensor:
        first = items[0].rows(rows)
        values = torch.empty(
            whole, dtype=first.dtype, device=first.device
        )  # nobody touches the pages of the other rows
        values[rows] = first
        for part in range(1, parts):
            own = slice(part * shape[0] + rows.start, part * shape[0] + rows.stop)
            values[own] = items[0].rows(own)
        return values

    lists[next(iter(lists))] = [read]
    return True


def _among(rows: torch.Tensor, shape: torch.Size, first: int, made: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """Return a tensor of which some rows have values; of the others nobody touches the pages, so that they take no memory."""
    whole = torch.empty(shape, dtype=rows.dtype, device=rows.device)
    whole[first : first + len(rows)] = rows
    made(whole)
    return whole


def _shape_of(rule: Any, model: Any, name: str, more: Mapping[str, Any]) -> torch.Size | None:
    """Return the shape of a parameter that a rule makes; None for buffers, what is empty or not there, and where values are quantised."""
    if more.get("hf_quantizer") is not None or rule.quantization_operation is not None:
        return None
    try:
        shape: torch.Size = model.get_parameter(name).shape
    except AttributeError:
        return None
    return shape if shape.numel() else None
