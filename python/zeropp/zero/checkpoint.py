# SPDX-License-Identifier: Apache-2.0
"""``zeropp.save`` and ``zeropp.load``: checkpoints that cannot tear, and that load on any number of ranks and at any
stage.

``save("ckpt", ..., step=7)`` writes ``ckpt/step-7``: one safetensors file a rank with the slices it owns, under the
parameters' real names, and a manifest. Everything goes to a temporary folder first; files and folder are synced, the
manifest comes last with the checksums of all files, one atomic rename gives the folder its name, and only then
``ckpt/latest`` moves. Whatever dies whenever, what was loadable before stays loadable. The ranks agree after each
part: all commit, or none.

Nothing is pickled. Byte-level format: docs/checkpoint-format.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeropp.errors import CheckpointError, ConfigError, NotBuiltError
from zeropp.zero import random_state, safefile
from zeropp.zero.agree import Ranks
from zeropp.zero.engine import WHOLE, Engine, Unit, engine_of
from zeropp.zero.plain import from_plain, to_plain
from zeropp.zero.state import persistent_buffers, write_piece

FORMAT = "zeropp checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
LATEST = "latest"


# --- save
# -----------------------------------------------------------------------------------------------------------------


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
    *,
    step: int | None = None,
    scheduler: Any = None,
    extra: Any = None,
    keep: int | None = None,
    background: bool = False,
) -> Path:
    """Write a checkpoint; collective. It is complete and durable when this returns, and absent when this raises.

    Args:
        path: folder of the checkpoints; this one becomes ``path/step-<step>``, and ``path/latest`` names it.
        model: prepared by :func:`zeropp.prepare`.
        optimizer: the one given to ``prepare``; None saves weights and buffers only.
        step: number of the checkpoint; None: one more than the highest there.
        scheduler: a learning-rate scheduler (anything with ``state_dict``).
        extra: user data of rank 0: numbers, strings, lists, dicts, tensors.
        keep: remove all but this many of the newest checkpoints afterwards; None keeps all.
        background: not built yet.

    Returns:
        The folder of this checkpoint.

    Raises:
        zeropp.TierError: storage is full or failed: path, bytes wanted, bytes free. On every rank.
        zeropp.CheckpointError: data that cannot be saved, or ranks that save different things. On every rank.

    Save between steps: gradients that were accumulated but not stepped with are not saved.
    Cost: each rank writes its slices once: 4 bytes a parameter and 8 of AdamW's state, over N ranks.
    """
    if background:
        raise NotBuiltError(
            "save(background=True) is not built yet; leave it out: the save returns when all is durable"
        )
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise ConfigError(f"save: step {step!r} is not allowed; wanted a whole number >= 0, or None for the next one")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ConfigError(f"save: keep {keep!r} is not allowed; wanted a whole number >= 1, or None to keep all")
    engine = engine_of(model)
    _check_optimizer(engine, optimizer)
    ranks = Ranks(engine)
    root = Path(path)
    step = _agree_on_step(ranks, root, step)
    final, partial = root / f"step-{step}", root / f".step-{step}.partial"
    try:
        ranks.only_rank_0(lambda: _make_empty(partial))
        parts = ranks.all_do(lambda: _write_part(engine, model, partial, optimizer, scheduler, extra))
        ranks.only_rank_0(lambda: _commit(engine, parts, partial, final, step, optimizer))
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    ranks.only_rank_0(lambda: _prune(root, final, keep))
    return final


def _check_optimizer(engine: Engine, optimizer: Any) -> None:
    if optimizer is not None and getattr(optimizer, "_engine", None) is not engine:
        raise ConfigError("the optimizer was not given to zeropp.prepare together with this model")


def _agree_on_step(ranks: Ranks, root: Path, step: int | None) -> int:
    asked = ranks.exchange([str(root.absolute()), step])
    for rank, one in enumerate(asked):
        if one != asked[0]:
            raise CheckpointError(
                f"save: rank {rank} saves to {one[0]} step {one[1]}, rank 0 to {asked[0][0]} step {asked[0][1]}; "
                "call save with the same path and step on every rank"
            )
    if step is not None:
        return step
    return ranks.only_rank_0(lambda: max((number for number, _ in steps_in(root)), default=-1) + 1)


def _make_empty(partial: Path) -> None:
    """What a save that died left behind goes first."""
    with safefile.storage_errors(partial, 0):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)


def _part_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _write_part(
    engine: Engine, model: nn.Module, folder: Path, optimizer: Any, scheduler: Any, extra: Any
) -> dict[str, Any]:
    """This rank's file, and what the manifest has to say of it."""
    tensors: dict[str, torch.Tensor] = {}
    part: dict[str, Any] = {"pieces": [], "steps": {}, "random": random_state.collect(tensors)}
    if engine.stage > 0 or engine.rank == 0:  # at stage 0 every rank holds the same
        for unit in engine.units:
            _add_unit(engine, unit, optimizer is not None and unit.trainable, tensors, part)
    if engine.rank == 0:
        for name, buffer in persistent_buffers(model):
            tensors[name] = buffer.detach().cpu().contiguous()
        part["extra"] = to_plain(extra, "extra", tensors)
        if scheduler is not None:
            part["scheduler"] = {
                "class": type(scheduler).__name__,
                "state": to_plain(scheduler.state_dict(), "scheduler", tensors),
            }
    about = {
        "format": "pt",
        "rank": str(engine.rank),
        "ranks": str(engine.ranks),
        "layout": "flat slices: manifest.json",
    }
    part["file"] = safefile.write_tensors(folder / _part_name(engine.rank), tensors, about)
    return part


def _add_unit(
    engine: Engine, unit: Unit, with_state: bool, tensors: dict[str, torch.Tensor], part: dict[str, Any]
) -> None:
    state = engine.optimizer_state(unit) if with_state else {}
    steps = state.pop("step", None)
    kinds = {"": unit.own, **state}
    for index, first, elems in unit.pieces():
        entry = unit.params[index]
        name = entry.names[0]
        begin = unit.begin_elems + first - entry.offset_elems
        for kind, values in kinds.items():
            tensors[f"{name}/{kind}" if kind else name] = values.detach()[first : first + elems]
        part["pieces"].append([name, begin, begin + elems, list(state)])
        if steps is not None:
            part["steps"][name] = int(steps[index])


def _commit(engine: Engine, parts: list[dict[str, Any]], partial: Path, final: Path, step: int, optimizer: Any) -> None:
    """The manifest, the final name, and ``latest``: in this order, each durable before the next."""
    from zeropp import __version__

    content = {
        "format": FORMAT,
        "version": VERSION,
        "zeropp": __version__,
        "torch": torch.__version__,
        "step": step,
        "ranks": engine.ranks,
        "stage": engine.stage,
        "files": {_part_name(rank): part["file"] for rank, part in enumerate(parts)},
        "parameters": _describe_parameters(engine, parts),
        "units": [
            {"name": unit.name, "elems": unit.elems, "parameters": [entry.names[0] for entry in unit.params]}
            for unit in engine.units
        ],
        "optimizer": None if optimizer is None else _describe_optimizer(engine, optimizer),
        "scheduler": parts[0].get("scheduler"),
        "extra": parts[0]["extra"],
        "random": [part["random"] for part in parts],
    }
    text = json.dumps({"sha256": _digest(content), "content": content}, separators=(",", ":"))
    safefile.write_text(partial / MANIFEST, text)
    safefile.replace_folder(partial, final)
    safefile.write_text(final.parent / LATEST, final.name + "\n")


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, separators=(",", ":"), sort_keys=True).encode()).hexdigest()


def _describe_parameters(engine: Engine, parts: list[dict[str, Any]]) -> dict[str, Any]:
    described: dict[str, Any] = {}
    for unit in engine.units:
        for entry in unit.params:
            described[entry.names[0]] = {
                "names": entry.names,
                "shape": list(entry.shape),
                "dtype": str(unit.dtype).removeprefix("torch."),
                "trainable": unit.trainable,
                "unit": unit.index,
                "pieces": {},
            }
    for rank, part in enumerate(parts):
        for name, begin, end, kinds in part["pieces"]:
            for kind in ("", *kinds):
                described[name]["pieces"].setdefault(kind, []).append([rank, begin, end])
        for name, steps in part["steps"].items():
            described[name]["steps"] = max(steps, described[name].get("steps", 0))
    return described


def _describe_optimizer(engine: Engine, optimizer: Any) -> dict[str, Any]:
    names = {id(entry.param): entry.names[0] for unit in engine.units for entry in unit.params}
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        held: dict[str, torch.Tensor] = {}
        plain = to_plain({k: v for k, v in group.items() if k != "params"}, f"param_groups.{index}", held)
        numbers = {name: tensor.item() for name, tensor in held.items() if tensor.numel() == 1}
        if len(numbers) < len(held):
            raise CheckpointError(f"param_groups.{index}: holds a tensor of several elements, which is not saved yet")
        groups.append({"values": _fill_numbers(plain, numbers), "parameters": [names[id(p)] for p in group["params"]]})
    base = next(cls for cls in type(optimizer).__mro__ if cls.__module__.startswith("torch.optim"))
    return {"class": base.__name__, "groups": groups}


def _fill_numbers(plain: Any, numbers: Mapping[str, Any]) -> Any:
    """A learning rate may be a tensor of one element; its number is what counts."""
    if isinstance(plain, dict):
        if set(plain) == {"$tensor"}:
            return numbers[plain["$tensor"]]
        return {key: _fill_numbers(value, numbers) for key, value in plain.items()}
    return [_fill_numbers(value, numbers) for value in plain] if isinstance(plain, list) else plain


def _prune(root: Path, final: Path, keep: int | None) -> None:
    if keep is not None:
        others = [folder for _, folder in steps_in(root) if folder != final]
        for folder in others[: max(0, len(others) + 1 - keep)]:
            shutil.rmtree(folder, ignore_errors=True)


def steps_in(root: Path) -> list[tuple[int, Path]]:
    """(number, folder) of every finished checkpoint in a folder, lowest first."""
    found = [(one.name.removeprefix("step-"), one) for one in root.glob("step-*")]
    return sorted((int(number), one) for number, one in found if number.isdigit() and one.is_dir())


# --- load
# -----------------------------------------------------------------------------------------------------------------


def load(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Any = None, *, scheduler: Any = None
) -> dict[str, Any]:
    """Restore the newest good checkpoint; collective. Any number of ranks, any stage and precision.

    Every checksum is verified before the model is touched. A damaged checkpoint is passed over for the one before it,
    with a warning and in the result; a folder named directly (``ckpt/step-7``) is taken or refused.

    Args:
        path: the folder given to :func:`save`, or one checkpoint in it.
        model, optimizer, scheduler: as for :func:`save`; None leaves that part alone.

    Returns:
        ``{"step": n, "path": folder, "extra": user data, "damaged": {folder: what is wrong with it},
        "random_restored": bool}``. Random states are restored where the number of ranks is that of the save.

    Raises:
        zeropp.CheckpointError: nothing there, nothing good there, or another model; file and offset are named. On
        every rank.
    """
    engine = engine_of(model)
    _check_optimizer(engine, optimizer)
    ranks = Ranks(engine)
    candidates = [Path(one) for one in ranks.only_rank_0(lambda: [str(one) for one in _candidates(Path(path))])]
    folder, content, damaged = _first_good(ranks, candidates)
    for bad, what in damaged.items():
        warnings.warn(f"zeropp.load: {bad} is damaged and was passed over for {folder}: {what}", stacklevel=2)
    ranks.all_do(lambda: _check_fit(engine, content, optimizer, scheduler, folder))
    with _Parts(folder, content) as parts:

        def copy() -> None:
            for unit in engine.units:
                _fill_unit(engine, unit, content["parameters"], parts, optimizer is not None and unit.trainable)
            own = parts.tensors(0)
            for name, buffer in persistent_buffers(model):
                buffer.copy_(own.get_tensor(name))

        with engine.write_shards(), torch.no_grad():
            _, error = _try(copy)
        ranks.all_do(lambda: _raise(error))
        if optimizer is not None:
            _restore_groups(optimizer, content["optimizer"]["groups"])
        if scheduler is not None:
            scheduler.load_state_dict(parts.plain(0, content["scheduler"]["state"]))
        same_ranks = content["ranks"] == engine.ranks
        if same_ranks:
            random_state.restore(parts.plain(engine.rank, content["random"][engine.rank]))
        extra = parts.plain(0, content["extra"])
    return {
        "step": content["step"], "path": folder, "extra": extra, "random_restored": same_ranks,
        "damaged": {str(bad): what for bad, what in damaged.items()},
    }  # fmt: skip


def _candidates(path: Path) -> list[Path]:
    """Checkpoints in the order of preference. Rank 0 looks, so that all ranks try the same."""
    if (path / MANIFEST).exists():
        return [path]
    folders = [folder for _, folder in reversed(steps_in(path))]
    with contextlib.suppress(OSError):
        named = path / (path / LATEST).read_text(encoding="utf-8").strip()
        if named in folders:
            folders = [named, *(folder for folder in folders if folder != named)]
    if not folders:
        what = "no step-* folder and no manifest.json in it" if path.exists() else "no such folder"
        raise CheckpointError(f"{path}: no checkpoint there ({what}); give the folder that zeropp.save wrote to")
    return folders


def _first_good(ranks: Ranks, candidates: list[Path]) -> tuple[Path, dict[str, Any], dict[Path, str]]:
    damaged: dict[Path, str] = {}
    for folder in candidates:
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
    lines = "; ".join(damaged.values())
    raise CheckpointError(f"no good checkpoint among {len(candidates)}: {lines}")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The verified content of a manifest.

    Raises:
        zeropp.CheckpointError: it is missing, damaged, or of a version that this zeropp does not know.
    """
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing, so the checkpoint was never finished or was damaged since") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: damaged at offset {error.start}: not UTF-8") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        whole = json.loads(text)
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path}: damaged at offset {error.pos}: {error.msg}") from error
    if not isinstance(whole, dict) or not isinstance(whole.get("content"), dict):
        raise CheckpointError(f"{path}: is not a manifest of zeropp")
    content: dict[str, Any] = whole["content"]
    if _digest(content) != whole.get("sha256"):
        raise CheckpointError(
            f"{path}: damaged somewhere in its {len(text)} bytes: its sha256 does not match its content"
        )
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise CheckpointError(
            f"{path}: format {content.get('format')!r} version {content.get('version')!r}; "
            f"this zeropp reads {FORMAT!r} version {VERSION}"
        )
    return content


class _Parts:
    """The ranks' files of one checkpoint, opened when first read."""

    def __init__(self, folder: Path, content: Mapping[str, Any]) -> None:
        self._names = [folder / name for name in content["files"]]
        self._open: dict[int, Any] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> _Parts:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def tensors(self, rank: int) -> Any:
        from safetensors import safe_open

        if rank not in self._open:
            self._open[rank] = self._stack.enter_context(safe_open(str(self._names[rank]), "pt"))
        return self._open[rank]

    def plain(self, rank: int, value: Any) -> Any:
        """Data that may refer to tensors of that rank's file."""
        file = self.tensors(rank)

        class Named(dict[str, torch.Tensor]):
            def __missing__(self, name: str) -> torch.Tensor:
                tensor: torch.Tensor = file.get_tensor(name)
                return tensor

        return from_plain(value, Named())

    def read(
        self, name: str, kind: str, begin: int, end: int, pieces: list[list[int]]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """(first element, values) of every saved piece that overlaps elements ``begin`` to ``end`` of a parameter."""
        key = f"{name}/{kind}" if kind else name
        for rank, first, last in pieces:
            low, high = max(begin, first), min(end, last)
            if low < high:
                yield low, self.tensors(rank).get_slice(key)[low - first : high - first]


def _check_fit(engine: Engine, content: Mapping[str, Any], optimizer: Any, scheduler: Any, folder: Path) -> None:
    saved = content["parameters"]
    mine = {entry.names[0]: entry for unit in engine.units for entry in unit.params}
    missing, foreign = sorted(mine.keys() - saved.keys()), sorted(saved.keys() - mine.keys())
    if missing or foreign:
        raise CheckpointError(
            f"{folder}: holds another model: {len(missing)} parameters are not in it{_first(missing)}, "
            f"{len(foreign)} in it are not in the model{_first(foreign)}"
        )
    for name, entry in mine.items():
        if list(entry.shape) != saved[name]["shape"]:
            raise CheckpointError(
                f"{folder}: '{name}' has shape {saved[name]['shape']} there, {list(entry.shape)} in the model"
            )
    if optimizer is not None:
        _check_optimizer_fit(content["optimizer"], optimizer, mine, folder)
    if scheduler is not None:
        there = content["scheduler"]
        if there is None or there["class"] != type(scheduler).__name__:
            kind = "no scheduler" if there is None else f"a {there['class']}"
            raise CheckpointError(f"{folder}: holds {kind}, and a {type(scheduler).__name__} is to be restored")


def _check_optimizer_fit(there: Any, optimizer: Any, mine: Mapping[str, Any], folder: Path) -> None:
    if there is None:
        raise CheckpointError(f"{folder}: was saved without an optimizer; load(path, model) restores the weights alone")
    if there["class"] not in {cls.__name__ for cls in type(optimizer).__mro__}:
        raise CheckpointError(
            f"{folder}: holds the state of {there['class']}, the optimizer is {type(optimizer).__mro__[2].__name__}"
        )
    names = {id(entry.param): name for name, entry in mine.items()}
    groups = [sorted(names[id(p)] for p in group["params"]) for group in optimizer.param_groups]
    if groups != [sorted(group["parameters"]) for group in there["groups"]]:
        raise CheckpointError(
            f"{folder}: its optimizer has groups of {[len(group['parameters']) for group in there['groups']]} "
            f"parameters, this one of {[len(group) for group in groups]}, or of others; build it the same way"
        )


def _first(names: list[str]) -> str:
    return f" (first '{names[0]}')" if names else ""


def _fill_unit(engine: Engine, unit: Unit, saved: Mapping[str, Any], parts: _Parts, with_state: bool) -> None:
    """This rank's slices of one unit: weights, and the optimizer's state where asked for."""
    whole = unit.place == WHOLE and not engine.local  # every rank has all of it, and fills all of it
    wanted = (
        [(i, e.offset_elems - unit.begin_elems, e.numel) for i, e in enumerate(unit.params)] if whole else unit.pieces()
    )
    for index, first, elems in wanted:
        entry = unit.params[index]
        name, pieces = entry.names[0], saved[entry.names[0]]["pieces"]
        begin = unit.begin_elems + first - entry.offset_elems
        for low, values in parts.read(name, "", begin, begin + elems, pieces[""]):
            write_piece(unit, entry.offset_elems + low, values)
    if with_state:
        _fill_state(engine, unit, saved, parts)


def _fill_state(engine: Engine, unit: Unit, saved: Mapping[str, Any], parts: _Parts) -> None:
    entries = [saved[entry.names[0]] for entry in unit.params]
    kinds = {kind for one in entries for kind in one["pieces"] if kind} | (
        engine.optimizer_state(unit).keys() - {"step"}
    )
    state = {kind: torch.zeros(unit.shard.numel(), dtype=torch.float32) for kind in kinds}
    state["step"] = torch.tensor([one.get("steps", 0) for one in entries], dtype=torch.int64)
    for index, first, elems in unit.pieces():
        entry = unit.params[index]
        begin = unit.begin_elems + first - entry.offset_elems
        for kind, pieces in entries[index]["pieces"].items():
            if kind:
                for low, values in parts.read(entry.names[0], kind, begin, begin + elems, pieces):
                    at = entry.offset_elems + low - unit.begin_elems
                    state[kind][at : at + values.numel()] = values
    engine.load_optimizer_state(unit, state)


def _restore_groups(optimizer: Any, groups: list[dict[str, Any]]) -> None:
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in from_plain(saved["values"], {}).items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = value


def _try(work: Any) -> tuple[Any, BaseException | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error
