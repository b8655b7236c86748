# SPDX-License-Identifier: Apache-2.0
"""``zeropp.save``: checkpoints that cannot tear.

``save("ckpt", ..., step=7)`` writes ``ckpt/step-7``: one safetensors file a rank with the shards it owns, under the
parameters' real names, and a manifest. Everything goes to a temporary folder first; files and folder are synced, the
manifest comes last with the checksums of all files, one atomic rename gives the folder its name, and only then
``ckpt/latest`` moves. Whatever dies whenever, what was loadable before stays loadable. Each part is
collective: all ranks commit, or none.

Nothing is pickled. Byte-level format: docs/checkpoint-format.md. Loading: load.py.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import nn

from zeropp import _C
from zeropp.checkpoint import background as behind
from zeropp.checkpoint import loaders, random_state
from zeropp.checkpoint.background import Saving
from zeropp.checkpoint.content import FORMAT, VERSION, part_json, part_name
from zeropp.checkpoint.job.folders import Group, rank_in_job
from zeropp.checkpoint.job.layout import Layout, entries_of, layout_of
from zeropp.checkpoint.manifest import LATEST, MANIFEST, SCALES, SPARE, leftovers_in, manifest_text, steps_in
from zeropp.checkpoint.plain import to_plain
from zeropp.comm.collective import Ranks, job_of
from zeropp.errors import CheckpointError, ConfigError, Error
from zeropp.files import disk as files
from zeropp.files import folder_writer, safefile
from zeropp.files.disk import replace_folder, storage_errors, write_text
from zeropp.files.safefile import Piece, piece_of
from zeropp.zero.engine import Engine, engine_of
from zeropp.zero.model.buffers import loose_tensors
from zeropp.zero.model_state import Entry, Unit
from zeropp.zero.step import moments
from zeropp.zero.step.custom import kind_of


@overload
def save(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Any = None, *, step: int | None = None,
    scheduler: Any = None, loader: Any = None, extra: Any = None, keep: int | None = None, spare: bool = False,
    only: Callable[[str], bool] | None = None, background: Literal[False] = False,
) -> Path: ...  # fmt: skip
@overload
def save(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Any = None, *, step: int | None = None,
    scheduler: Any = None, loader: Any = None, extra: Any = None, keep: int | None = None, spare: bool = False,
    only: Callable[[str], bool] | None = None, background: Literal[True],
) -> Saving: ...  # fmt: skip
@overload
def save(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Any = None, *, step: int | None = None,
    scheduler: Any = None, loader: Any = None, extra: Any = None, keep: int | None = None, spare: bool = False,
    only: Callable[[str], bool] | None = None, background: bool,
) -> Path | Saving: ...  # fmt: skip
def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
    *,
    step: int | None = None,
    scheduler: Any = None,
    loader: Any = None,
    extra: Any = None,
    keep: int | None = None,
    spare: bool = False,
    only: Callable[[str], bool] | None = None,
    background: bool = False,
) -> Path | Saving:
    """Write a checkpoint; collective. It is complete and durable when this returns, and absent when this raises.

    With ``background=True`` it returns when this rank's bytes are copied to host memory, and the training goes on while
    they are written. ``wait()`` of what it returns, the next save or load of the model and the end of the process wait
    for it, and raise what went wrong.

    Args:
        path: folder of the checkpoints; this one becomes ``path/step-<step>``, and ``path/latest`` names it.
        model: prepared by :func:`zeropp.prepare`.
        optimizer: the one given to ``prepare``; None saves weights and buffers only.
        step: number of the checkpoint; None: one more than the highest there.
        scheduler: a learning-rate scheduler (anything with ``state_dict``).
        loader: where this rank stands in its data: torchdata's StatefulDataLoader, a :class:`zeropp.data.CurriculumSampler`, or anything
            with ``state_dict`` and ``load_state_dict``. Each rank saves its own.
        extra: user data of rank 0: numbers, strings, lists, dicts, tensors.
        keep: remove all but this many of the newest checkpoints afterwards; None keeps all.
        spare: of what goes (by ``keep``, or replaced by the same step) keep one checkpoint's files as ``path/.spare``, and
            write the next checkpoint over them: into blocks that the disk has already, which is up to twice as fast on
            thin-provisioned and flash storage. Costs the disk space of one checkpoint more. A file that is open elsewhere
            is never overwritten.
        only: tells by name which parameters are saved; the same on every rank. Those left out keep the model's own values in a load
            (the base under an adapter, which has a file already). None: all.
        background: copy now, write while the training goes on.

    Returns:
        The folder of this checkpoint; in the background, a :class:`~zeropp.checkpoint.background.Saving`.

    Raises:
        zeropp.TierError: storage is full or failed: path, bytes wanted, bytes free. On every rank.
        zeropp.CheckpointError: data that cannot be saved, ranks that save different things, or a folder that another job, or another
            group of ranks of this job, writes into. On every rank.
        Both also for an earlier background save that failed and was not reported yet; nothing is saved then.

    Save between steps: gradients that were accumulated but not stepped with are not saved.
    Cost: each rank writes its shards once: 4 bytes a parameter and 8 of AdamW's state, over N ranks. Memory: 16 MiB; in
    the background one copy of these shards, whose memory the next background save of the model uses again.
    """
    _check_arguments(step, keep, background, spare)
    loaders.check(loader)
    engine = engine_of(model)
    check_optimizer(engine, optimizer)
    ranks = job_of(engine)
    behind.finish(engine)
    engine.flush()
    engine.storage.require_whole()  # also of states in memory
    root = Path(path)
    step, group = _common_step(ranks, root, step)
    plan = _Plan(root, step, keep, spare, group)
    left_out = _left_out(engine, only)
    layout = layout_of(engine, model, "save")
    own: list[behind.RankFile] = []
    content: dict[str, Any] = {}

    def take() -> dict[str, Any]:
        """Write this rank's part, or copy it to memory."""
        engine.strategy.check_saved(engine)
        pieces, part = _describe_rank(engine, layout, optimizer, loader, left_out)
        if layout.describes:
            pieces += _common_pieces(engine, layout, model, optimizer, part, left_out)
        if ranks.rank == 0:
            pieces += _user_pieces(scheduler, extra, part)
        name = part_name(ranks.rank)
        about = {"format": "pt", "rank": str(ranks.rank), "ranks": str(ranks.count), "layout": "pieces: manifest.json"}
        if background:
            own.append(behind.RankFile(engine, ranks.rank, plan.partial, plan.parts, pieces, about, plan.spare / name))
        else:
            part["file"] = safefile.write_pieces(plan.partial / name, pieces, about, plan.spare / name)
        return part

    try:
        ranks.only_rank_0(lambda: plan.begin(engine, background))
        parts = ranks.all_do(take)
        ranks.only_rank_0(lambda: content.update(_describe(engine, layout, parts, step, left_out)))
        if not background:
            ranks.only_rank_0(lambda: plan.commit(content, [part["file"] for part in parts]))
    except BaseException:
        for file in own:
            file.close()
        if ranks.rank == 0:
            plan.undo()
            folder_writer.leave(plan)
        raise
    if not background:
        return plan.final
    return behind.start(engine, plan.final, ranks, functools.partial(_write_behind, plan, own[0], content, ranks))


def _check_arguments(step: Any, keep: Any, background: Any, spare: Any) -> None:
    if step is not None and not _is_count(step, 0):
        raise ConfigError(f"save: step {step!r} is not allowed; wanted a whole number >= 0, or None for the next one")
    if keep is not None and not _is_count(keep, 1):
        raise ConfigError(f"save: keep {keep!r} is not allowed; wanted a whole number >= 1, or None to keep all")
    for name, value in (("background", background), ("spare", spare)):
        if not isinstance(value, bool):
            raise ConfigError(f"save: {name} {value!r} is not allowed; wanted True or False")


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _write_behind(plan: _Plan, own: behind.RankFile, content: dict[str, Any], ranks: Ranks) -> None:
    """Write this rank's file in the background; rank 0 waits for the others and commits."""
    try:
        entry = own.write()
        if ranks.rank == 0:
            plan.commit(content, [entry, *behind.collect(plan.partial, plan.parts, ranks.count)])
    except BaseException:
        if ranks.rank == 0:
            with contextlib.suppress(Error):  # the others may still be writing there
                behind.collect(plan.partial, plan.parts, ranks.count)
            plan.undo()
        raise
    finally:
        folder_writer.leave(plan)


def check_optimizer(engine: Engine, optimizer: Any) -> None:
    if optimizer is not None and getattr(optimizer, "_engine", None) is not engine:
        raise ConfigError("the optimizer was not given to zeropp.prepare together with this model")


def _common_step(ranks: Ranks, root: Path, step: int | None) -> tuple[int, Group]:
    """Return the number of the checkpoint, and the ranks that save it."""
    asked = ranks.exchange([str(root.absolute()), step, rank_in_job()])
    group = Group([one.pop() for one in asked])
    for rank, one in enumerate(asked):
        if one != asked[0]:
            raise CheckpointError(
                f"save: rank {rank} saves to {one[0]} step {one[1]}, rank 0 to {asked[0][0]} step {asked[0][1]}; "
                "call save with the same path and step on every rank"
            )
    if step is not None:
        return step, group
    return ranks.only_rank_0(lambda: max((number for number, _ in steps_in(root)), default=-1) + 1), group


class _Plan:
    """The folders of one save, and what rank 0 does with them."""

    def __init__(self, root: Path, step: int, keep: int | None, keep_spare: bool, group: Group) -> None:
        self.root, self.keep, self.keep_spare, self.group = root, keep, keep_spare, group
        self.is_writer = False
        self.spare = root / SPARE
        self.final = root / f"step-{step}"
        self.partial = root / f".step-{step}.partial"
        self.parts = root / f".step-{step}.parts"

    def begin(self, engine: Engine, background: bool) -> None:
        """Become the writer; then what saves that died left behind goes first."""
        behind.let_end(self.root)  # of another model of this process
        with storage_errors(self.partial, 0):
            files.make_folders(self.root)
        self.group.take(self.root, engine)
        self.is_writer = True
        if background:
            folder_writer.take(self.root, self)  # also if the model goes before its checkpoint is written
        with storage_errors(self.partial, 0):
            for folder in leftovers_in(self.root):
                files.disk.remove_tree(folder)
            files.disk.make_folder(self.partial)
            if background:
                files.disk.make_folder(self.parts)

    def commit(self, content: dict[str, Any], entries: list[dict[str, Any]]) -> None:
        """Write the manifest, the final name, and ``latest``: in this order, each durable before the next. Then the
        rest goes."""
        try:
            self.group.settle()
            content["files"] = {part_name(rank): entry for rank, entry in enumerate(entries)}
            write_text(self.partial / MANIFEST, manifest_text(content))
            replaced = replace_folder(self.partial, self.final)
            write_text(self.root / LATEST, self.final.name + "\n")
        except BaseException:
            self.undo()
            raise
        with storage_errors(self.root, 0):
            files.disk.remove_tree(self.parts)
            files.disk.remove_tree(self.spare)  # what this save had no use for
            gone = [] if replaced is None else [replaced]
            self._retire([*gone, *self._prune()])

    def undo(self) -> None:
        """Remove what a failed save wrote."""
        if not self.is_writer:  # what lies there is another's
            return
        for folder in (self.partial, self.parts):
            with contextlib.suppress(OSError):
                files.disk.remove_tree(folder)

    def _prune(self) -> Iterator[Path]:
        """Out of sight in one step, so that no half of a checkpoint is ever among the others. Where they are then."""
        if self.keep is None:
            return
        others = [folder for _, folder in steps_in(self.root) if folder != self.final]
        for folder in others[: max(0, len(others) + 1 - self.keep)]:
            removed = self.root / f".{folder.name.lstrip('.')}.removed"
            files.disk.remove_tree(removed)
            files.disk.rename(folder, removed)
            yield removed

    def _retire(self, folders: Iterable[Path]) -> None:
        """Remove renamed folders; one of them may become the spare. It gets that name, durably, before it is written to: else
        a power cut could restore the old name with new bytes."""
        wanted = self.keep_spare
        for folder in folders:
            if not wanted:
                files.disk.remove_tree(folder)
                continue
            files.disk.remove_tree(folder / MANIFEST)
            files.disk.rename(folder, self.spare)
            files.disk.sync_folder(self.root)
            wanted = False


def _describe_rank(
    engine: Engine, layout: Layout, optimizer: Any, loader: Any, left_out: set[str]
) -> tuple[list[Piece], dict[str, Any]]:
    """Return the tensors of this rank's file that are its own, and what the manifest has to say of them."""
    loose: dict[str, torch.Tensor] = {}
    part: dict[str, Any] = {"pieces": [], "steps": {}, "random": random_state.collect(loose)}
    pieces: list[Piece] = []
    for unit in engine.units:
        if engine.stage > 0 or layout.is_first(unit):  # at stage 0 every rank of a group holds the same
            pieces += _unit_pieces(engine, layout, unit, optimizer is not None and unit.trainable, part, left_out)
    private = None if optimizer is None else engine.strategy.private()
    if private is not None:
        part["private"] = to_plain(private, "private", loose)
    if loader is not None:
        part["loader"] = loaders.describe(loader, loose)
    return [*pieces, *_loose_pieces(loose)], part


def _loose_pieces(loose: Mapping[str, torch.Tensor]) -> list[Piece]:
    return [piece_of(name, tensor) for name, tensor in loose.items()]


def _common_pieces(
    engine: Engine, layout: Layout, model: nn.Module, optimizer: Any, part: dict[str, Any], left_out: set[str]
) -> list[Piece]:
    """Describe what the first rank of a group saves for its group: parameters, and buffers, whose tensors are returned."""
    part["parameters"] = _describe_parameters(engine, layout, left_out)
    part["units"] = _describe_units(engine)
    part["optimizer"] = None if optimizer is None else _describe_optimizer(engine, optimizer)
    buffers = [(name, one) for name, one in loose_tensors(model) if layout.buffers[name] == layout.rank]
    return [piece_of(name, buffer.detach().cpu().contiguous()) for name, buffer in buffers]


def _user_pieces(scheduler: Any, extra: Any, part: dict[str, Any]) -> list[Piece]:
    """Describe what rank 0 saves for all: user data, the scheduler. Return their tensors."""
    loose: dict[str, torch.Tensor] = {}
    part["extra"] = to_plain(extra, "extra", loose)
    if scheduler is not None:
        state = to_plain(scheduler.state_dict(), "scheduler", loose)
        part["scheduler"] = {"class": type(scheduler).__name__, "state": state}
    return _loose_pieces(loose)


def _left_out(engine: Engine, only: Callable[[str], bool] | None) -> set[str]:
    """Return the first names of the parameters that are not wanted under any of their names."""
    entries = [] if only is None else [entry for unit in engine.units for entry in unit.params]
    return {entry.names[0] for entry in entries if only is not None and not any(map(only, entry.names))}


def _unit_pieces(
    engine: Engine, layout: Layout, unit: Unit, with_state: bool, part: dict[str, Any], left_out: set[str]
) -> Iterator[Piece]:
    state = engine.optimizer_state(unit) if with_state else {}
    scaled = unit.scales if with_state else {}
    steps = state.pop("step", None)
    kinds = {"": unit.own, **state}
    places = {index: scales for index, _, _, scales in moments.spans(unit)} if scaled else {}
    written = [one for one in unit.pieces() if _is_written(unit, unit.params[one[0]], layout, left_out)]
    for index, first, elems in written:
        entry = unit.params[index]
        name, begin = entry.names[0], unit.begin_elems + first - entry.offset_elems
        for kind, values in kinds.items():
            yield piece_of(f"{name}/{kind}" if kind else name, values.detach()[first : first + elems])
        for kind, scales in scaled.items():
            yield piece_of(f"{name}/{kind}{SCALES}", scales[places[index]])
        part["pieces"].append([name, begin, begin + elems, layout.part(entry), list(state)])
        if steps is not None:
            part["steps"][name] = int(steps[index])


def _is_written(unit: Unit, entry: Entry, layout: Layout, left_out: set[str]) -> bool:
    return entry.names[0] not in left_out and layout.writes(unit, entry)


def _describe(
    engine: Engine, layout: Layout, parts: list[dict[str, Any]], step: int, left_out: set[str]
) -> dict[str, Any]:
    """Return the manifest's content but for ``files``."""
    firsts = [part for part in parts if "units" in part]
    optional = {
        "left_out": sorted(left_out),
        **{field: _by_rank(parts, field) for field in ("private", "loader")},
    }
    return {
        "format": FORMAT,
        "version": VERSION,
        "zeropp": _C.version(),
        "torch": torch.__version__,
        "step": step,
        "ranks": len(parts),
        "groups": len(firsts),
        "stage": engine.stage,
        "parameters": _with_pieces(firsts, parts, layout),
        "buffers": layout.buffers,
        "units": [unit for part in firsts for unit in part["units"]],
        **_describe_steps(engine, [part["optimizer"] for part in firsts]),
        **{field: value for field, value in optional.items() if value},
        "scheduler": parts[0].get("scheduler"),
        "extra": parts[0]["extra"],
        "random": [part["random"] for part in parts],
    }


def _describe_units(engine: Engine) -> list[dict[str, Any]]:
    return [
        {"name": unit.name, "elems": unit.elems, "parameters": [entry.names[0] for entry in unit.params]}
        for unit in engine.units
    ]


def _describe_parameters(engine: Engine, layout: Layout, left_out: set[str]) -> dict[str, Any]:
    """Return what the manifest says of the parameters of this group, but for their pieces."""
    described: dict[str, Any] = {}
    for unit, entry in entries_of(engine):
        name, parts = entry.names[0], layout.parts[entry.names[0]]
        if name not in left_out and layout.writers[name][0] == layout.rank:
            described[name] = {
                "names": entry.names,
                "shape": list(entry.held.whole),
                "dtype": str(unit.dtype).removeprefix("torch."),
                **({"complex": True} if entry.is_complex else {}),
                "trainable": unit.trainable,
                "unit": unit.name,
                **({"parts": [part_json(one) for one in parts]} if layout.is_cut(name) else {}),
                "pieces": {},
            }
    return described


def _with_pieces(firsts: list[dict[str, Any]], parts: list[dict[str, Any]], layout: Layout) -> dict[str, Any]:
    """Return what the manifest says of all parameters."""
    described = {name: one for part in firsts for name, one in part["parameters"].items()}
    for rank, part in enumerate(parts):
        for name, begin, end, index, kinds in part["pieces"]:
            piece = [rank, begin, end, index] if layout.is_cut(name) else [rank, begin, end]
            for kind in ("", *kinds):
                described[name]["pieces"].setdefault(kind, []).append(piece)
        for name, steps in part["steps"].items():
            described[name]["steps"] = max(steps, described[name].get("steps", 0))
    return described


def _by_rank(parts: list[dict[str, Any]], field: str) -> list[Any]:
    """Return what each rank says; nothing if none says it."""
    return [part.get(field) for part in parts] if any(field in part for part in parts) else []


def _describe_steps(engine: Engine, optimizers: list[Any]) -> dict[str, Any]:
    """Return what the manifest says of the optimizer, by what the first rank of each group says."""
    if optimizers[0] is None:
        return {"optimizer": None, "steps": None, "scaler": None}
    return {
        "optimizer": _merged_groups(optimizers),
        "steps": engine.clock.step,
        "scaler": engine.scaler.state(),
    }


def _merged_groups(optimizers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the manifest says of the optimizer: each of its groups has the parameters of all ranks."""
    groups = [one["groups"] for one in optimizers]
    if len({len(one) for one in groups}) > 1:
        raise CheckpointError(
            f"save: the optimizers of the job have {', '.join(str(len(one)) for one in groups)} groups of parameters; build them "
            "with the same groups on every rank, some of which may be empty"
        )
    merged = [
        {"values": same[0]["values"], "parameters": list(dict.fromkeys(n for one in same for n in one["parameters"]))}
        for same in zip(*groups, strict=True)
    ]
    return {"class": optimizers[0]["class"], "groups": merged}


def _describe_optimizer(engine: Engine, optimizer: Any) -> dict[str, Any]:
    names = {id(entry.shown): entry.names[0] for unit in engine.units for entry in unit.params}
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        held: dict[str, torch.Tensor] = {}
        plain = to_plain({k: v for k, v in group.items() if k != "params"}, f"param_groups.{index}", held)
        numbers = {name: tensor.item() for name, tensor in held.items() if tensor.numel() == 1}
        if len(numbers) < len(held):
            raise CheckpointError(f"param_groups.{index}: holds a tensor of several elements, which is not saved yet")
        groups.append({"values": _fill_numbers(plain, numbers), "parameters": [names[id(p)] for p in group["params"]]})
    original = kind_of(type(optimizer).__mro__[2])  # behind the adopted class and ZeroOptimizer
    return {"class": original.__name__, "groups": groups}


def _fill_numbers(plain: Any, numbers: Mapping[str, Any]) -> Any:
    """Put numbers in place of tensors of one element, such as a learning rate."""
    if isinstance(plain, dict):
        if set(plain) == {"$tensor"}:
            return numbers[plain["$tensor"]]
        return {key: _fill_numbers(value, numbers) for key, value in plain.items()}
    return [_fill_numbers(value, numbers) for value in plain] if isinstance(plain, list) else plain
