# SPDX-License-Identifier: Apache-2.0
"""``zeropp.load``: a checkpoint back into a model, on any number of ranks and at any stage.

All is verified before anything is touched; each rank reads the ranges of the files that it holds itself.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeropp.checkpoint import loaders, random_state
from zeropp.checkpoint.background import finish
from zeropp.checkpoint.full_state import write_piece
from zeropp.checkpoint.job.layout import entries_of
from zeropp.checkpoint.manifest import candidates, none_good, read_manifest
from zeropp.checkpoint.pieces import Files
from zeropp.checkpoint.plain import from_plain
from zeropp.checkpoint.save import check_optimizer
from zeropp.comm.collective import Ranks, job_of
from zeropp.errors import CheckpointError, ConfigError, are, counted
from zeropp.files import safefile
from zeropp.zero.engine import Engine, engine_of
from zeropp.zero.model.buffers import loose_tensors
from zeropp.zero.model_state import WHOLE, Entry, Unit
from zeropp.zero.unfreeze import was_trained


def _restore_optimizer(engine: Engine, optimizer: Any, content: Mapping[str, Any], parts: Files, ranks: Ranks) -> None:
    _restore_groups(optimizer, content["optimizer"]["groups"])
    engine.scaler.restore(content.get("scaler"))
    engine.clock.restore(_steps_taken(content))
    _restore_private(engine, content, parts, ranks)


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
    *,
    scheduler: Any = None,
    loader: Any = None,
    strict: bool = True,
) -> dict[str, Any]:
    """Restore the newest good checkpoint; collective. Any number of ranks, any stage and precision.

    Every checksum is verified before the model is touched. A damaged checkpoint is passed over for the one before it,
    with a warning and in the result; a folder named directly (``ckpt/step-7``) is taken or refused. With
    ``Config(accumulate=n)`` and an optimizer the next backward is the first of n: gradients that were added up are forgotten.

    Args:
        path: the folder given to :func:`save`, or one checkpoint in it.
        model, optimizer, scheduler: as for :func:`save`; None leaves that part alone.
        loader: as for :func:`save`; goes on where this rank's stood. Another number of ranks is an error, but for zeropp.data's samplers,
            whose place is the step.
        strict: parameters and buffers that only the model or only the checkpoint has are an error, but for those that the save left
            out (``only``). False: they are passed over, and the model keeps its own values.

    Returns:
        ``{"step": n, "path": folder, "extra": user data, "damaged": {folder: what is wrong with it},
        "random_restored": bool}``. Random states are restored where the number of ranks is that of the save.

    Raises:
        zeropp.CheckpointError: nothing there, nothing good there, or another model; file and offset are named. On
        every rank.
    """
    engine = engine_of(model)
    check_optimizer(engine, optimizer)
    ranks = job_of(engine)
    finish(engine)
    found = ranks.only_rank_0(lambda: [str(one) for one in candidates(Path(path))])
    folder, content, damaged = _first_good(ranks, [Path(one) for one in found])
    for bad, what in damaged.items():
        warnings.warn(f"zeropp.load: {bad} is damaged and was passed over for {folder}: {what}", stacklevel=2)
    own = ranks.all_do(lambda: _own_names(engine, optimizer))
    ranks.all_do(lambda: _check_fit(engine, content, own, optimizer, scheduler, folder, strict))
    ranks.all_do(lambda: loaders.check_fit(loader, content, ranks.count, folder))
    content["parameters"] = {**_without_values(engine), **content["parameters"]}
    with Files(folder, content) as parts:

        def copy() -> None:
            then: list[Callable[[], None]] = []  # what has to wait until all is read
            with safefile.Fills() as fills:
                for unit in engine.units:
                    _fill_unit(engine, unit, content["parameters"], parts, fills, then)
                    if optimizer is not None and unit.trainable:
                        _fill_state(engine, unit, content["parameters"], parts, fills, then)
            for finish_unit in then:
                finish_unit()
            for name, buffer in loose_tensors(model):
                if strict or name in content["buffers"]:
                    buffer.copy_(parts.tensors(content["buffers"].get(name, 0)).tensor(name))

        engine.schedule.drop(states=optimizer is not None)
        if optimizer is not None and engine.accumulate > 1:
            engine.restart_step()
        if optimizer is not None:
            engine.unfreezing.unfreeze_trained(content["parameters"])
        with engine.write_shards(), torch.no_grad():
            ranks.all_do(copy)
        if optimizer is not None:
            _restore_optimizer(engine, optimizer, content, parts, ranks)
        if scheduler is not None:
            scheduler.load_state_dict(parts.plain(0, content["scheduler"]["state"]))
        loaders.restore(loader, content, ranks.rank, parts.plain)
        same_ranks = content["ranks"] == ranks.count
        if same_ranks:
            random_state.restore(parts.plain(ranks.rank, content["random"][ranks.rank]))
        extra = parts.plain(0, content["extra"])
    return {
        "step": content["step"], "path": folder, "extra": extra, "random_restored": same_ranks,
        "damaged": {str(bad): what for bad, what in damaged.items()},
    }  # fmt: skip


def _first_good(ranks: Ranks, folders: list[Path]) -> tuple[Path, dict[str, Any], dict[Path, str]]:
    damaged: dict[Path, str] = {}
    for folder in folders:
        contents: list[dict[str, Any]] = []

        def examine(folder: Path = folder, contents: list[dict[str, Any]] = contents) -> None:
            content = read_manifest(folder)
            for name in list(content["files"])[ranks.rank :: ranks.count]:
                safefile.verify(folder / name, content["files"][name])
            contents.append(content)

        _, error = ranks.all_try(examine)
        if error is None:
            return folder, contents[0], damaged
        if not isinstance(error, CheckpointError):
            raise error
        damaged[folder] = str(error)
    raise none_good(damaged)


def _without_values(engine: Engine) -> dict[str, Any]:
    """Return what a manifest without values would say of the model's parameters."""
    return {
        entry.names[0]: {"names": entry.names, "shape": list(entry.held.whole), "pieces": {}}
        for _, entry in entries_of(engine)
    }


def _own_names(engine: Engine, optimizer: Any) -> dict[str, Any]:
    """Return the first names of this rank's parameters, and those of each of its optimizer's groups."""
    names = {id(entry.shown): entry.names[0] for _, entry in entries_of(engine)}
    groups = [] if optimizer is None else [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    return {"names": list(names.values()), "groups": groups}


def _check_fit(
    engine: Engine, content: Mapping[str, Any], own: list[dict[str, Any]], optimizer: Any, scheduler: Any, folder: Path,
    strict: bool,
) -> None:  # fmt: skip
    """Check that a checkpoint fits the model; ``own``: what each rank of the job said of its parameters."""
    saved = content["parameters"]
    mine = {entry.names[0]: entry for _, entry in entries_of(engine)}
    if strict:
        _check_same_names({name for one in own for name in one["names"]}, content, folder)
    for name, entry in mine.items():
        if name in saved:
            _check_parameter_fit(name, entry, saved[name], folder)
    if optimizer is not None:
        _check_optimizer_fit(content["optimizer"], optimizer, [one["groups"] for one in own], folder)
        _check_unfrozen(engine, saved, folder)
    if scheduler is not None:
        _check_scheduler_fit(content["scheduler"], scheduler, folder)


def _check_same_names(mine: set[str], content: Mapping[str, Any], folder: Path) -> None:
    saved = content["parameters"]
    missing = sorted(mine - saved.keys() - set(content.get("left_out", ())))
    foreign = sorted(saved.keys() - mine)
    rows = ((missing, "", "not in it"), (foreign, " of it", "not in the model"))
    differences = [
        f"{counted(len(names), 'parameter')}{of} {are(len(names))} {what} (first '{names[0]}')"
        for names, of, what in rows
        if names
    ]
    if differences:
        raise CheckpointError(
            f"{folder}: holds another model: {', '.join(differences)}; build the model that was saved"
        )


def _check_parameter_fit(name: str, entry: Entry, there: Mapping[str, Any], folder: Path) -> None:
    if list(entry.held.whole) != there["shape"]:
        raise CheckpointError(
            f"{folder}: '{name}' has shape {there['shape']} there, {list(entry.held.whole)} in the model"
        )
    if entry.is_complex != there.get("complex", False):
        kinds = ("real", "complex") if entry.is_complex else ("complex", "real")
        raise CheckpointError(f"{folder}: '{name}' is {kinds[0]} there, {kinds[1]} in the model")


def _check_scheduler_fit(there: Any, scheduler: Any, folder: Path) -> None:
    if there is None or there["class"] != type(scheduler).__name__:
        kind = "no scheduler" if there is None else f"a {there['class']}"
        raise CheckpointError(f"{folder}: holds {kind}, and a {type(scheduler).__name__} is to be restored")


def _check_optimizer_fit(there: Any, optimizer: Any, own: list[list[list[str]]], folder: Path) -> None:
    if there is None:
        raise CheckpointError(f"{folder}: was saved without an optimizer; load(path, model) restores the weights alone")
    if there["class"] not in {cls.__name__ for cls in type(optimizer).__mro__}:
        raise CheckpointError(
            f"{folder}: holds the state of {there['class']}, the optimizer is {type(optimizer).__mro__[2].__name__}"
        )
    groups = [{name for names in same for name in names} for same in zip(*own, strict=False)]
    if groups != [set(group["parameters"]) for group in there["groups"]]:
        raise CheckpointError(
            f"{folder}: its optimizer has groups of {[len(group['parameters']) for group in there['groups']]} "
            f"parameters, this one of {[len(group) for group in groups]}, or of others; build it the same way, with the groups that "
            "optimizer.add_param_group had added by then"
        )


def _check_unfrozen(engine: Engine, saved: Mapping[str, Any], folder: Path) -> None:
    """Check that parameters that are frozen here and were trained in the checkpoint can be unfrozen."""
    for unit in engine.units:
        there = (e.names[0] for e in unit.params if e.names[0] in saved)
        name = next((one for one in there if was_trained(saved[one])), None)
        if name is None or unit.trainable:
            continue
        try:
            engine.unfreezing.require_possible(unit, name)
        except ConfigError as error:
            raise CheckpointError(f"{folder}: '{name}' was trained there, and is frozen here: {error}") from None


Then = list[Callable[[], None]]


def _fill_unit(
    engine: Engine, unit: Unit, saved: Mapping[str, Any], parts: Files, fills: safefile.Fills, then: Then
) -> None:
    """Read this rank's shards of one unit's weights."""
    if engine.local or unit.place != WHOLE:
        if not unit.states_in.in_file and not unit.in_file:
            _fill_shards(unit, saved, parts, fills, then)
            return
        wanted: Iterable[tuple[int, int, int]] = unit.pieces()
    else:  # every rank has all of it, and fills all of it
        wanted = [(i, e.offset_elems - unit.begin_elems, e.numel) for i, e in enumerate(unit.params)]
    for index, first, elems in wanted:
        entry = unit.params[index]
        name, begin = entry.names[0], unit.begin_elems + first - entry.offset_elems
        for low, values in parts.read(name, "", entry.held, begin, begin + elems, saved[name]):
            write_piece(unit, entry.offset_elems + low, values)


def _fill_shards(unit: Unit, saved: Mapping[str, Any], parts: Files, fills: safefile.Fills, then: Then) -> None:
    """Read straight into this rank's shard, or into its fp32 master and from there to the shard."""
    wanted = [(unit.params[index], first, elems) for index, first, elems in unit.pieces()]
    names = [entry.names[0] for entry, _, _ in wanted]
    if unit.master_waits and any(parts.dtype(name, "", saved[name]) == torch.float32 for name in names):
        unit.make_master()
    own = unit.own
    for (entry, first, elems), name in zip(wanted, names, strict=True):
        begin = unit.begin_elems + first - entry.offset_elems
        parts.fill(fills, name, "", entry.held, begin, own[first : first + elems], saved[name])
    if own is not unit.shard:

        def convert() -> None:
            unit.shard.copy_(own)

        then.append(convert)


def _fill_state(
    engine: Engine, unit: Unit, saved: Mapping[str, Any], parts: Files, fills: safefile.Fills, then: Then
) -> None:
    """Read the optimizer's state of this rank's shard: straight into it, or unit by unit where it lives elsewhere."""
    entries = [saved[entry.names[0]] for entry in unit.params]
    if not unit.states_in.in_file and not any(map(was_trained, entries)):
        engine.forget_optimizer_state(unit)
        return
    kinds = {kind for one in entries for kind in one["pieces"] if kind} | engine.optimizer_state(unit).keys()
    state = {kind: engine.state_buffer(unit, kind) for kind in kinds - {"step"}}
    in_place = engine.states_in_place(unit)
    with contextlib.nullcontext(fills) if in_place else safefile.Fills() as now:
        _read_state(unit, state, entries, parts, now)
    state["step"] = torch.tensor([one.get("steps", 0) for one in entries], dtype=torch.int64, device="cpu")
    if in_place:
        then.append(lambda: engine.load_optimizer_state(unit, state))
    else:
        engine.load_optimizer_state(unit, state)


def _read_state(
    unit: Unit, state: Mapping[str, torch.Tensor], entries: list[Any], parts: Files, fills: safefile.Fills
) -> None:
    """Fill buffers of ``shard`` length with this rank's part of the saved states; zeros where nothing was saved."""
    for index, first, elems in unit.pieces():
        entry = unit.params[index]
        begin = unit.begin_elems + first - entry.offset_elems
        for kind, values in state.items():
            target = values[first : first + elems]
            if kind in entries[index]["pieces"]:
                parts.fill(fills, entry.names[0], kind, entry.held, begin, target, entries[index])
            else:
                target.zero_()


def _restore_groups(optimizer: Any, groups: list[dict[str, Any]]) -> None:
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in from_plain(saved["values"], {}).items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = value


def _steps_taken(content: Mapping[str, Any]) -> int:
    """Return the optimizer's steps; a parameter without a gradient in some steps has taken fewer. Older manifests lack them."""
    most = max((one.get("steps", 0) for one in content["parameters"].values()), default=0)
    return int(content.get("steps", most))


def _restore_private(engine: Engine, content: Mapping[str, Any], parts: Files, ranks: Ranks) -> None:
    """Restore the tensors of one rank alone, where the same ranks are one group, as they were when it was saved."""
    same = content["ranks"] == ranks.count == engine.ranks and "private" in content and content.get("groups", 1) == 1
    engine.strategy.restore(parts.plain(ranks.rank, content["private"][ranks.rank]) if same else None)
