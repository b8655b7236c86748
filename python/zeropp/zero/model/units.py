# SPDX-License-Identifier: Apache-2.0
"""Which parameters are gathered together, and which modules need them whole.

A unit is a set of parameters and the set of modules that trigger it (design decision 4). A parameter whose owners all lie in
one block belongs to that block; any other (a tied embedding and head, a final norm) is a unit with every owner as trigger. Each
unit holds one dtype and one ``requires_grad``, so a block with frozen weights gives two.
"""

from __future__ import annotations

import difflib
import fnmatch
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from zeropp.errors import ConfigError
from zeropp.parallel.cut import Chunks
from zeropp.zero.model.parameter import is_dtensor, local_of
from zeropp.zero.model.part import parts_of

#: Units that would stand alone and are smaller than this stay whole on every rank: a gather costs more than they weigh.
REPLICATE_BYTES = 64 * 1024

Triggers = tuple[nn.Module, ...]


@dataclass
class UnitPlan:
    """One unit before its memory exists."""

    name: str
    params: list[nn.Parameter]
    names: list[list[str]]
    triggers: list[nn.Module]
    dtype: torch.dtype
    trainable: bool
    alone: bool = False
    spread: int = 0  # whose parameters differ between ranks: its number in the list (spread.py), from 1 on; 0: none
    stays_frozen: str = ""  # of one that is not trainable: why it cannot be unfrozen; empty: it can
    parted: int = 0  # `params` are parts of what the model shows (part.py), of so many: those of this rank's experts; 0: they are not
    held: bool = False  # it stays in memory, where other units have states in files
    on_host: tuple[str, ...] = ()  # params, optimizer: it has these in memory of the host, others on the GPU
    numel: int = field(init=False)

    def __post_init__(self) -> None:
        self.numel = sum(numbers(p) for p in self.params)

    def replicates(self, units: object) -> bool:
        """Return True if the unit stays whole on every rank, where ``Config.units`` is ``units``."""
        return self.alone and self.numel * self.dtype.itemsize < REPLICATE_BYTES and units == "auto"


def kind_of(parameter: torch.Tensor) -> int:
    """Return what a unit holds: 0 plain parameters, 1 DTensors that are cut over their mesh, 2 DTensors that are whole on
    each of its ranks."""
    if not is_dtensor(parameter):
        return 0
    return 2 if all(one.is_replicate() for one in parameter._spec.placements) else 1  # type: ignore[attr-defined]


def numbers(parameter: torch.Tensor) -> int:
    """Return how many real numbers a parameter holds on this rank: a complex one counts as two."""
    return local_of(parameter).numel() * (2 if parameter.is_complex() else 1)


#: Complex parameters are held as pairs of real numbers: all that is done to shards is done number by number, as torch's own optimizers do.
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def _has_params(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def entries_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that a program calls: the chunks of a pipeline, or the model."""
    return list(model) if isinstance(model, Chunks) else [model]


def _repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the children of the outermost containers that repeat one class: the layers of most transformers."""
    blocks: list[nn.Module] = []
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        children = list(module.children())
        if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            kinds = [type(c) for c in children if _has_params(c)]
            repeated = {k for k in kinds if kinds.count(k) > 1}
            for child in children:
                if type(child) in repeated:
                    if child not in seen:
                        seen.update(child.modules())
                        blocks.append(child)
                else:
                    visit(child)
            return
        for child in children:
            visit(child)

    for entry in entries_of(model):
        visit(entry)
    return blocks


def _blocks_of_classes(model: nn.Module, classes: Iterable[type | str]) -> list[nn.Module]:
    wanted = list(classes)
    found: dict[nn.Module, None] = {}
    used: set[type | str] = set()
    for module in model.modules():
        for want in wanted:
            if type(module).__name__ == want if isinstance(want, str) else isinstance(module, want):
                found.setdefault(module)
                used.add(want)
    for want in wanted:
        if want not in used:
            names = sorted({type(m).__name__ for m in model.modules() if _has_params(m)})
            raise ConfigError(f"units: no module of class {want!r} in the model; it has {', '.join(names)}")
    return list(found)


def _blocks_of_size(model: nn.Module, most_bytes: int) -> list[list[nn.Module]]:
    """Return consecutive owners of parameters, together until they hold ``most_bytes``."""
    groups: list[list[nn.Module]] = []
    held = 0
    for module in model.modules():
        own = sum(numbers(p) * p.itemsize for p in module.parameters(recurse=False))
        if not own:
            continue
        if not groups or held + own > most_bytes:
            groups.append([])
            held = 0
        groups[-1].append(module)
        held += own
    return groups


def _owners(model: nn.Module) -> tuple[dict[nn.Parameter, list[str]], dict[nn.Parameter, list[nn.Module]]]:
    names: dict[nn.Parameter, list[str]] = {}
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            names.setdefault(parameter, []).append(f"{path}.{key}" if path else key)
            if module not in owners.setdefault(parameter, []):
                owners[parameter].append(module)
    return names, owners


def _of_running_norms(owners: list[nn.Module]) -> bool:
    """BatchNorm's: torch wants its weights in the dtype of its running statistics, and takes low-precision inputs with both in fp32."""
    kind = nn.modules.batchnorm._NormBase
    return all(isinstance(owner, kind) and owner.running_mean is not None for owner in owners)


def _homes(model: nn.Module, units: object) -> dict[nn.Module, Triggers]:
    """Return the block's triggers for each module inside a block. The innermost named class wins."""
    if isinstance(units, int):
        return {m: tuple(group) for group in _blocks_of_size(model, units) for m in group}
    blocks = _repeated_blocks(model) if units == "auto" else _blocks_of_classes(model, units)  # type: ignore[arg-type]
    homes: dict[nn.Module, Triggers] = {inner: (block,) for block in blocks for inner in block.modules()}
    # Tiles of a matrix that is too large to be whole come and go one by one, whatever they stand in.
    return homes | {module: (module,) for module in model.modules() if getattr(module, "is_tile", False) is True}


def ignored_parameters(model: nn.Module, names: Iterable[str]) -> dict[nn.Parameter, str]:
    """Return the parameters that ``Config(ignored=names)`` names, each with its name.

    Raises:
        zeropp.ConfigError: a name that no parameter has.
    """
    found: dict[nn.Parameter, str] = {}
    known = [(name, p) for name, p in model.named_parameters(remove_duplicate=False)] if names else []
    for wanted in names:
        meant = {p: n for n, p in known if f"{n}.".startswith(f"{wanted}.") or fnmatch.fnmatchcase(n, wanted)}
        if not meant:
            paths = {prefix for n, _ in known for prefix in (n, n.rpartition(".")[0])}
            close = difflib.get_close_matches(wanted, sorted(paths), n=1)
            more = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"Config.ignored: {wanted!r} names no parameter and no module that has one{more}")
        found.update(meant)
    return found


def refuse_lazy(model: nn.Module, caller: str) -> None:
    """Raise if a parameter or buffer waits for a first batch to tell its shape (as of ``torch.nn.LazyLinear``).

    Raises:
        zeropp.ConfigError: names it, and its module.
    """
    for path, module in model.named_modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and is_lazy(tensor):
                name, where = (f"{path}.{key}", f"module '{path}'") if path else (key, "the model")
                raise ConfigError(
                    f"{caller}: '{name}' has no shape yet: {where} is a {type(module).__name__}, which takes its shape from the first batch; "
                    f"run one batch first (model(batch)), build the optimizer then, and call {caller} after that"
                )


def plan_units(
    model: nn.Module, units: object = "auto", compute_dtype: torch.dtype | None = None, ignored: Iterable[str] = (),
    parts: Mapping[nn.Parameter, nn.Parameter] | None = None, apart: Iterable[nn.Module] = (),
    alone: Iterable[nn.Parameter] = (),
) -> list[UnitPlan]:  # fmt: skip
    """Split a model's parameters into units, in the order of first use as registered.

    Args:
        model: the whole model.
        units: ``"auto"`` (repeated blocks), an iterable of classes or class names, or a number of bytes.
        compute_dtype: floating-point parameters are held in it; None keeps their own. Those of norms with running statistics
            (BatchNorm) always keep their own.
        ignored: names of what is in no unit, see :func:`ignored_parameters`.
        parts: by parameter, the part of it that this rank has; parts are in units of their own.
        apart: modules that are a block each, whatever they stand in.
        alone: parameters that are a unit each.

    Returns:
        Plans in registration order, the same on every rank for the same model.
    """
    names, owners = _owners(model)
    for parameter in ignored_parameters(model, ignored):
        del names[parameter]
    homes = _homes(model, units) | {inner: (block,) for block in apart for inner in block.modules()}
    module_names = {m: n or "(model)" for n, m in model.named_modules()}
    parts, number = parts or {}, dict(zip(alone, itertools.count(1)))
    members: dict[tuple[Triggers, torch.dtype, bool, int, tuple[int, int]], list[nn.Parameter]] = {}
    for parameter in names:
        triggers = _triggers(owners[parameter], homes)
        dtype = _held_dtype(parameter, owners[parameter], compute_dtype)
        parted = _parts_count(parts.get(parameter))
        kind = (kind_of(parameter), number.get(parameter, 0))
        key = (triggers, dtype, parameter.requires_grad, parted, kind)
        members.setdefault(key, []).append(parameter)
    blocks = set(homes.values())
    return [
        UnitPlan(
            "+".join(module_names[m] for m in triggers), [parts.get(p, p) for p in params], [names[p] for p in params],
            list(triggers), dtype, trainable, alone=triggers not in blocks, parted=parted,
        )
        for (triggers, dtype, trainable, parted, _), params in members.items()
    ]  # fmt: skip


def _parts_count(part: nn.Parameter | None) -> int:
    """Return in how many parts the parameter is, among data ranks, of which a rank has this one; 0 for None, and -1 for a slice of
    tensor parallelism, as an estimate has it."""
    if part is None:
        return 0
    parts = parts_of(part)
    return -1 if parts is None else parts.spread


def _triggers(owners: list[nn.Module], homes: dict[nn.Module, Triggers]) -> Triggers:
    """Return the triggers of a parameter: those of the one block that has all its owners, else the owners."""
    found = {homes.get(owner) for owner in owners}
    home = next(iter(found)) if len(found) == 1 else None
    return tuple(owners) if home is None else home


def _held_dtype(parameter: nn.Parameter, owners: list[nn.Module], compute_dtype: torch.dtype | None) -> torch.dtype:
    if compute_dtype is not None and parameter.is_floating_point() and not _of_running_norms(owners):
        return compute_dtype
    return _REAL.get(parameter.dtype, parameter.dtype)
