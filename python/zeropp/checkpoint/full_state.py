# SPDX-License-Identifier: Apache-2.0
"""Whole values in and out of a partitioned model: state dicts, a bounded-memory stream, safetensors for other
programs."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm  # type: ignore[import-untyped]

from zeropp.checkpoint.job.whole import JobState
from zeropp.checkpoint.sources import FILE_BYTES, Source, as_model_has, opened, plan_files, write_file, write_index
from zeropp.comm.collective import broadcast, job_of
from zeropp.errors import CheckpointError, CommError, are, counted
from zeropp.files import disk
from zeropp.files.hub_names import as_in_files
from zeropp.files.safefile import Piece
from zeropp.zero.access import gathered
from zeropp.zero.engine import Engine, engine_of
from zeropp.zero.model.boxes import Boxes, common, flat_at, strides_of, whole_of
from zeropp.zero.model.buffers import loose_in, loose_tensors
from zeropp.zero.model.part import parts_of
from zeropp.zero.model_state import WHOLE, Entry, Unit

BUCKET_BYTES = 64 << 20
ROUND_BYTES = 4 << 20
EXTRA_STATE = "_extra_state"  # torch's own key


def write_piece(unit: Unit, at: int, values: torch.Tensor) -> None:
    """Write elements from ``at`` on of a unit's flat buffer, where this rank holds them: shard, whole copy and fp32 master.

    Call it inside ``engine.write_shards()``.
    """
    values = values.reshape(-1)
    if unit.place == WHOLE:
        unit.whole[at : at + values.numel()] = values.to(unit.dtype)
    low, high = max(at, unit.begin_elems), min(at + values.numel(), unit.begin_elems + unit.shard.numel())
    if low < high:
        mine = values[low - at : high - at]
        unit.write_shard(low - unit.begin_elems, mine)
        unit.write_master(low - unit.begin_elems, mine)


def named_full_tensors(
    model: nn.Module, bucket_bytes: int = BUCKET_BYTES, *, only: Callable[[str], bool] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter whole, one after the other, then the persistent buffers; collective, so every rank iterates to
    the end. Where ranks hold different parts of the model (pipeline stages, tensor or expert parallelism), the
    parameters are those of the whole model.

    Args:
        bucket_bytes: units are gathered together up to this many bytes; at least one is.
        only: tells by name which are wanted; units of which nothing is wanted are not gathered. None: all.

    Yields:
        (name, a copy on the CPU): names as in ``named_parameters``, tied parameters once.

    Memory: one bucket and one parameter beside the shards.
    """
    engine = engine_of(model)
    engine.flush()
    if engine.job is not None or _is_spread_by_hand(engine):
        yield from JobState(engine, model, "named_full_tensors").stream(bucket_bytes, only)
        return
    yield from _own_tensors(engine, bucket_bytes, only)
    for name, buffer in loose_tensors(model):
        if only is None or only(name):
            yield name, _copy_on_cpu(buffer)


def _own_tensors(
    engine: Engine, bucket_bytes: int, only: Callable[[str], bool] | None
) -> Iterator[tuple[str, torch.Tensor]]:
    for bucket in _buckets(engine, bucket_bytes):
        entries = [entry for unit in bucket for entry in unit.params if only is None or any(map(only, entry.names))]
        with gathered([entry.shown for entry in entries]):
            for entry in entries:
                yield entry.names[0], _copy_on_cpu(entry.shown)


def _copy_on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _buckets(engine: Engine, bucket_bytes: int) -> Iterator[list[Unit]]:
    bucket: list[Unit] = []
    held = 0
    for unit in engine.units:
        size = unit.elems * unit.dtype.itemsize
        if bucket and held + size > bucket_bytes:
            yield bucket
            bucket, held = [], 0
        bucket.append(unit)
        held += size
    if bucket:
        yield bucket


def _is_spread_by_hand(engine: Engine) -> bool:
    """Return True for modules whose parameters differ between ranks (spread.py) and that :func:`gathered` does not join."""
    return any(unit.ranks < engine.ranks and parts_of(unit.params[0].param) is None for unit in engine.units)


def full_state_dict(
    model: nn.Module, *, rank_0_only: bool = False, only: Callable[[str], bool] | None = None
) -> dict[str, torch.Tensor]:
    """Return ``model.state_dict()`` as of the plain model, as copies on the CPU; collective.

    Args:
        rank_0_only: the other ranks get an empty dict, and spend no memory on it.
        only: tells by name which entries are wanted (those of an adapter, say); the same on every rank. None: all.

    Returns:
        Keys in ``state_dict``'s own order; tied parameters stand under all their names and share one tensor.
    """
    engine = engine_of(model)
    stream = _full_tensors(engine, model, only, rank_0_only)
    if rank_0_only and job_of(engine).rank:
        for _ in stream:  # gathers are collective
            pass
        _job_keys(engine, model)
        return {}
    whole = dict(stream)
    if engine.comm is not None and engine.job is None and not rank_0_only:
        _take_rank_0s(engine, [whole[name] for name, _ in loose_tensors(model) if name in whole])
    all_keys, aliases = _job_keys(engine, model)
    whole |= {key: module.get_extra_state() for key, module in _extra_states(model)}
    keys = filter(only, all_keys) if only is not None else all_keys
    return {key: whole[aliases.get(key, key)] for key in keys}


def _full_tensors(
    engine: Engine, model: nn.Module, only: Callable[[str], bool] | None, rank_0_only: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what :func:`named_full_tensors` does. With ``rank_0_only`` other ranks of a job yield meta tensors."""
    if engine.job is None or not rank_0_only:
        return named_full_tensors(model, only=only)
    engine.flush()
    return JobState(engine, model, "full_state_dict").stream(BUCKET_BYTES, only, 0)


def _take_rank_0s(engine: Engine, copies: list[torch.Tensor]) -> None:
    """Replace tensors that are whole on every rank by rank 0's, because they may differ."""
    for copy in copies:
        if copy.layout == torch.strided and copy.numel():
            values = copy.resolve_conj().resolve_neg().contiguous()
            broadcast(engine.comm, values)
            copy.copy_(values)


def _aliases(engine: Engine, model: nn.Module) -> dict[str, str]:
    """Map every name of a parameter or persistent buffer to the name it is gathered under."""
    first = {name: entry.names[0] for unit in engine.units for entry in unit.params for name in entry.names}
    seen: dict[int, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in loose_in(module):
            key = f"{path}.{name}" if path else name
            first[key] = seen.setdefault(id(tensor), key)
    return first


def _keys(model: nn.Module) -> list[str]:
    """Return the keys of ``model.state_dict()`` in its order, without reading a value."""
    keys = []
    for path, module in model.named_modules(remove_duplicate=False):
        own = [name for name, one in module._parameters.items() if one is not None]
        own += [
            n for n, one in module._buffers.items() if one is not None and n not in module._non_persistent_buffers_set
        ]
        own += [EXTRA_STATE] if _has_extra_state(module) else []
        keys += [f"{path}.{name}" if path else name for name in own]
    return keys


def _job_keys(engine: Engine, model: nn.Module) -> tuple[list[str], dict[str, str]]:
    """Return the keys of the whole model's state dict, and by each name the one that it is gathered under. Collective
    where ranks hold different parts of the model; a rank then leaves out other ranks' extra states."""
    keys, aliases = _keys(model), _aliases(engine, model)
    if engine.job is None:
        return keys, aliases
    every = job_of(engine).exchange([[key, aliases[key]] for key in keys if key in aliases])
    merged = {key: name for one in every for key, name in one}
    return [*merged, *(key for key, _ in _extra_states(model))], merged


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _extra_states(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules(remove_duplicate=False):
        if _has_extra_state(module):
            yield (f"{path}.{EXTRA_STATE}" if path else EXTRA_STATE), module


def load_full_state_dict(
    model: nn.Module,
    source: Mapping[str, torch.Tensor] | str | os.PathLike[str],
    *,
    strict: bool = True,
    progress: bool = False,
) -> None:
    """Whole values into a partitioned model; collective. Each rank takes its shards, and reads no more of a file than
    the rows that hold them: no rank ever has the whole model, and nothing travels between ranks.

    Args:
        source: a state dict (the same on every rank); or a safetensors file, or one of ``torch.save`` (``.bin``,
            ``.pt``: tensors only, mapped and never executed), or a folder of either as Hugging Face writes it. Names may be those that
            files of the Hub have for a model of transformers; of experts that are tensors of their own there, a rank reads its own.
        strict: names that are missing or unknown are an error.
        progress: rank 0 shows a bar of the bytes of the model, on stderr.

    Raises:
        zeropp.CheckpointError: a file cannot be read, or names or shapes do not fit; nothing was changed then. On every
            rank.
    """
    engine = engine_of(model)
    ranks = job_of(engine)
    _, known = _job_keys(engine, model)
    with contextlib.ExitStack() as stack:
        found: list[Source] = []

        def look() -> None:
            found.append(as_model_has(stack.enter_context(opened(source)), model, known))
            _check_names(engine, model, found[0], known, strict)

        ranks.all_do(look)
        with engine.write_shards(), torch.no_grad(), _bar(engine, progress and ranks.rank == 0) as count:
            ranks.all_do(lambda: _take_all(engine, model, found[0], count))


def _take_all(engine: Engine, model: nn.Module, values: Source, count: Callable[[int], object]) -> None:
    """Take this rank's part of all that is there: parameters, buffers, extra states."""
    there = set(values.names())
    for unit in engine.units:
        for entry in unit.params:
            name = next((one for one in entry.names if one in there), None)
            if name is not None:
                _take(engine, unit, entry, values, name)
            count(entry.numel * unit.dtype.itemsize)
    for name, buffer in loose_tensors(model):
        if name in there:
            buffer.detach().copy_(values.whole(name))
    for key, module in _extra_states(model):
        if key in there:
            module.set_extra_state(values.whole(key))


@contextlib.contextmanager
def _bar(engine: Engine, shown: bool) -> Iterator[Callable[[int], object]]:
    """Yield a function that counts the bytes of loaded parameters."""
    if not shown:
        yield lambda count: None
        return
    total = sum(entry.numel * unit.dtype.itemsize for unit in engine.units for entry in unit.params)
    with tqdm(total=total, unit="B", unit_scale=True, desc="loading") as bar:
        yield bar.update


def _take(engine: Engine, unit: Unit, entry: Entry, values: Source, name: str) -> None:
    """Take the part of one parameter that this rank holds."""
    offset, numel = entry.offset_elems, entry.numel
    if unit.place == WHOLE or unit.local:
        write_piece(unit, offset, _numbers(entry, values, name, 0, numel))
        return
    low, high = max(offset, unit.begin_elems), min(offset + numel, unit.begin_elems + unit.shard.numel())
    if low < high:
        write_piece(unit, low, _numbers(entry, values, name, low - offset, high - offset))


def _numbers(entry: Entry, values: Source, name: str, begin: int, end: int) -> torch.Tensor:
    """Return the values of a parameter from ``begin`` to ``end``."""
    if entry.boxes is not None:
        return _boxed(entry.boxes, values, name, begin, end)
    if not entry.is_complex:
        return values.flat(name, begin, end)
    return entry.numbers(values.flat(name, begin // 2, -(-end // 2)))[begin % 2 :][: end - begin]


def _boxed(held: Boxes, values: Source, name: str, begin: int, end: int) -> torch.Tensor:
    """Return elements ``begin`` to ``end`` of a local tensor that is a part of the tensor in the file."""
    whole, flat = whole_of(held.whole), torch.empty(0, device="cpu")
    for copy in common(whole, 0, whole.numel, held, begin, end):
        block = values.box(name, copy.source, copy.size)
        if not flat.numel():
            flat = torch.empty(end - begin, dtype=block.dtype, device="cpu")
        flat.as_strided(copy.size, strides_of(held.shape), flat_at(held.shape, copy.target) - begin).copy_(block)
    return flat


def _check_names(engine: Engine, model: nn.Module, values: Source, known: Mapping[str, str], strict: bool) -> None:
    given = set(values.names())
    missing = []
    for names, shape in _shapes(engine, model):
        there = next((one for one in names if one in given), None)
        if there is None:
            missing.append(names[0])
        elif values.shape(there) != shape:
            raise CheckpointError(
                f"load_full_state_dict: '{there}' has shape {values.shape(there)}, the model's has {shape}"
            )
    foreign = sorted(given - known.keys() - dict(_extra_states(model)).keys())
    rows = ((missing, "missing"), (foreign, "unknown to the model"))
    differences = [
        f"{counted(len(names), 'name')} {are(len(names))} {what}{_some(names)}" for names, what in rows if names
    ]
    if strict and differences:
        raise CheckpointError(f"load_full_state_dict: {', '.join(differences)}; strict=False leaves those alone")


def _shapes(engine: Engine, model: nn.Module) -> Iterator[tuple[list[str], tuple[int, ...]]]:
    """Yield (names, shape) of each parameter, persistent buffer and ignored parameter."""
    yield from ((entry.names, entry.held.whole) for unit in engine.units for entry in unit.params)
    yield from (([name], tuple(tensor.shape)) for name, tensor in loose_tensors(model))


def _some(names: list[str]) -> str:
    return f" ({', '.join(map(repr, names[:3]))}{', ...' if len(names) > 3 else ''})" if names else ""


def export(model: nn.Module, folder: str | os.PathLike[str], *, file_bytes: int = FILE_BYTES) -> None:
    """Write the whole model as safetensors in the Hugging Face layout; collective, rank 0 writes.

    ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` with an index where it is larger than
    ``file_bytes``; the model's ``config``, where it has one that can save itself. Tied parameters are written once,
    under their first name. Tensors of a model of transformers have the names that its files have on the Hub, such as
    ``experts.3.w1``; those of a model that lies on several ranks of a pipeline, or is cut by tensor parallelism, have the model's own.

    Memory: rank 0 holds one tensor, or small ones of ``BUCKET_BYTES`` in all, and what is on its way. The others hold what is on its
    way: units of ``BUCKET_BYTES`` or one unit; ``ROUND_BYTES`` of their own shards where ranks hold different parts of the model.
    Where several tensors become one of the Hub's, rank 0 holds these to the end.

    Raises:
        zeropp.TierError: storage is full or failed. On every rank.
    """
    engine = engine_of(model)
    engine.flush()
    ranks = job_of(engine)
    target = Path(folder)
    if engine.job is None:
        shapes = list(as_in_files(model, _without_values(engine, model)))
        stream = as_in_files(model, named_full_tensors(model))
    else:
        state = JobState(engine, model, "export")
        shapes, stream = list(state.without_values()), state.stream(ROUND_BYTES, None, 0)
    there = dict(shapes)
    plan = plan_files([(name, one.nbytes) for name, one in shapes], file_bytes)
    ranks.only_rank_0(lambda: _make_folder(target))
    for file_name, members in plan.items():
        like = {name: there[name] for name in members}
        ranks.all_do(functools.partial(_write_next, target / file_name, like, stream, ranks.rank == 0))
    for _ in stream:
        raise AssertionError("the plan covers every tensor")
    ranks.only_rank_0(lambda: write_index(target, plan, sum(one.nbytes for one in there.values())))
    ranks.only_rank_0(lambda: _save_config(model, target))


def _write_next(
    path: Path, like: Mapping[str, torch.Tensor], stream: Iterator[tuple[str, torch.Tensor]], writes: bool
) -> None:
    """Write one file of tensors that come next in a stream, each taken when it is its turn. The stream is collective: a rank that
    does not write takes them too, and so does one whose file fails."""
    left = iter(like)

    def take(name: str) -> torch.Tensor:
        found, tensor = next(stream)
        assert (found, tensor.shape, tensor.dtype) == (name, like[name].shape, like[name].dtype), found
        return tensor

    def parts(name: str) -> Iterator[torch.Tensor]:
        assert next(left) == name
        yield take(name)

    try:
        if writes:
            pieces = [
                Piece(name, one.dtype, tuple(one.shape), functools.partial(parts, name)) for name, one in like.items()
            ]
            write_file(path, pieces)
    except CommError:  # the stream is over
        left = iter(())
        raise
    finally:
        for name in left:
            take(name)


def _without_values(engine: Engine, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield on meta what :func:`named_full_tensors` yields."""
    for entry in (entry for unit in engine.units for entry in unit.params):
        yield entry.names[0], torch.empty(entry.held.whole, dtype=entry.shown.dtype, device="meta")
    for name, buffer in loose_tensors(model):
        yield name, torch.empty_like(buffer, device="meta")


def _make_folder(folder: Path) -> None:
    with disk.storage_errors(folder, 0):
        folder.mkdir(parents=True, exist_ok=True)


def _save_config(model: nn.Module, folder: Path) -> None:
    save_config = getattr(getattr(model, "config", None), "save_pretrained", None)
    if save_config is not None:
        save_config(folder)


@dataclass(frozen=True)
class PackedTensors:
    """Tensors of one dtype, one after the other in one buffer."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    flat: torch.Tensor
    """1-D, on the CPU; belongs to the receiver."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, a view of the buffer in the tensor's shape)."""
        first = 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            yield name, self.flat[first : first + shape.numel()].view(shape)
            first += shape.numel()


def packed_full_tensors(
    model: nn.Module, bucket_bytes: int = BUCKET_BYTES, *, only: Callable[[str], bool] | None = None
) -> Iterator[PackedTensors]:
    """Yield the tensors of ``named_full_tensors``, packed; collective, so every rank iterates to the end.

    Args:
        bucket_bytes: a buffer is handed out before it grows beyond this; one tensor may be larger.
        only: tells by name which are wanted; the same on every rank. None: all.

    Memory: one buffer, the tensors that it is made from, and what ``named_full_tensors`` takes.
    """
    held: list[tuple[str, torch.Tensor]] = []
    held_bytes = 0
    for name, tensor in named_full_tensors(model, bucket_bytes, only=only):
        if held and (held[0][1].dtype != tensor.dtype or held_bytes + tensor.nbytes > bucket_bytes):
            yield _pack(held)
            held, held_bytes = [], 0
        held.append((name, tensor))
        held_bytes += tensor.nbytes
    if held:
        yield _pack(held)


def _pack(held: list[tuple[str, torch.Tensor]]) -> PackedTensors:
    flat = torch.cat([tensor.reshape(-1) for _, tensor in held])
    return PackedTensors(tuple(name for name, _ in held), tuple(tensor.shape for _, tensor in held), flat)
