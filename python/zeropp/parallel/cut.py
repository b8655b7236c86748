# SPDX-License-Identifier: Apache-2.0
"""A model cut into the chunks of a pipeline, with the names that its parameters have in the whole model.

What another stage has is replaced by a placeholder that hands its input on, so the model's own forward runs in every
chunk. Hugging Face models say in ``base_model_pp_plan`` which of their modules follow one another.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, ScheduleDualPipeV, ScheduleZBVZeroBubble

from zeropp.errors import ConfigError, counted, what_it_is
from zeropp.zero.model.init import share_at_place


class Chunks(nn.ModuleList):
    """The chunks of one rank: a ModuleList whose parameters and buffers keep the names that they have in their chunk.

    Args:
        chunks: modules whose names are those of the whole model. What stages have under one name is one parameter: it begins with
            equal values, and each stage adds the gradients of all of them.
        indices: the stage of each, among all stages; None: chunk k of rank r is stage r + k ranks.
        tied: of each parameter that several stages have, all names in the whole model, such as ``("embed.weight", "head.weight")``. The
            values are those of the first stage. Names that no chunk here has do no harm.
    """

    def __init__(
        self, chunks: Iterable[nn.Module], indices: Sequence[int] | None = None, tied: Iterable[Sequence[str]] = ()
    ) -> None:
        super().__init__(chunks)
        self.indices = None if indices is None else list(indices)
        self._zeropp_tied = [list(names) for names in tied]  # zero/model/tied.py

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        yield from named_as_whole(self, self, memo, prefix, remove_duplicate)


def named_as_whole(
    owner: nn.Module, parts: Iterable[nn.Module], memo: set[nn.Module] | None, prefix: str, remove_duplicate: bool
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model's parts under the names of the whole model: ``named_modules`` of a module that only holds them."""
    memo = set() if memo is None else memo
    memo.add(owner)
    yield prefix, owner
    for part in parts:
        yield from part.named_modules(memo, prefix, remove_duplicate)


class Elsewhere(nn.Module):
    """Stands where another stage has a module, and hands its first argument on."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        kind = getattr(module, "attention_type", None)  # transformers chooses a mask by it
        if kind is not None:
            self.attention_type = kind

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else next(iter(kwargs.values()))


def stage_indices(rank: int, ranks: int, chunks: int, style: str) -> list[int]:
    """Return which stages a rank has, as torch places them: ``"loop"``: rank, rank + ranks, ...; ``"v"``: rank, and as far from the end."""
    if style == "v":
        return [rank, 2 * ranks - 1 - rank]
    return [rank + chunk * ranks for chunk in range(chunks)]


def place_in(mesh: DeviceMesh, caller: str) -> tuple[int, int]:
    """Return (this rank's number in the pipeline, its ranks)."""
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise ConfigError(
            f'{caller}: mesh is {what_it_is(mesh)}; wanted the one dimension of the pipeline, such as mesh["pp"]'
        )
    return mesh.get_local_rank(), mesh.size()


def _style_of(schedule: type, chunks: int | None) -> tuple[str, int]:
    """Return how a schedule places its stages, and how many chunks a rank has."""
    style = "v" if issubclass(schedule, (ScheduleZBVZeroBubble, ScheduleDualPipeV)) else "loop"
    single = issubclass(schedule, PipelineScheduleSingle)
    count = chunks or (1 if single else 2)
    if (single and count != 1) or (style == "v" and count != 2):
        raise ConfigError(f"cut: {schedule.__name__} has {1 if single else 2} chunks a rank, and chunks is {count}")
    return style, count


def cut(model: nn.Module, mesh: DeviceMesh, schedule: type, *, chunks: int | None = None) -> Chunks:
    """Cut a model into contiguous chunks of about equally many parameters, and keep those of this rank.

    Args:
        model: a Hugging Face model whose configuration has a ``base_model_pp_plan``, or an ``nn.Sequential``. It is taken apart:
            use the chunks from now on. Inside ``zeropp.sharded_init(mesh=mesh)`` it is never whole in memory.
        mesh: the pipeline's dimension, such as ``mesh["pp"]``.
        schedule: the class of torch's schedule that will run them, which says how many chunks a rank has and which: one
            (GPipe, 1F1B), or two (the others). ZBV and DualPipeV give each rank one from the front and one from the end.
        chunks: how many a rank has, in place of two.

    Returns:
        The chunks of this rank. Give them to :func:`zeropp.prepare`, then to :func:`stages`. The first stage takes the model's
        input; the last one of a Hugging Face model returns logits ``(B, T, V)``, the others hidden states ``(B, T, D)``.
        Keywords, such as a mask that differs by micro-batch, go to every stage.

    Raises:
        zeropp.ConfigError: no plan, or fewer layers than stages.
    """
    rank, ranks = place_in(mesh, "cut")
    parameters = list(model.parameters())
    made = chunks_of(model, rank, ranks, schedule, chunks)
    kept = {id(one) for one in made.parameters()}
    share_at_place(parameters, mesh, lambda one, values: (one, values) if id(one) in kept else None)
    return made


def chunks_of(model: nn.Module, rank: int, ranks: int, schedule: type, chunks: int | None = None) -> Chunks:
    """Do as :func:`cut`, for any rank of a pipeline of so many, without a mesh."""
    style, count = _style_of(schedule, chunks)
    spine = _spine(model)
    bounds = balanced([_elems(one) for one in spine.layers], _elems(*spine.before), _elems(*spine.after), count * ranks)
    placed = [stage_indices(one, ranks, count, style) for one in range(ranks)]
    tied = _tied_over(model, spine, bounds, {stage: one for one in range(ranks) for stage in placed[one]})
    kept = {id(parameter): parameter for parameter in model.parameters()}
    copies = [copy.deepcopy(model, dict(kept)) for _ in range(count - 1)] + [model]
    for one, stage in zip(copies, placed[rank], strict=True):
        _keep(one, bounds, stage)
    return Chunks(copies, placed[rank], tied)


# -- what follows what -------------------------------------------------------------------------------------------------


class _Spine:
    """The modules of a model that its input goes through: some before the layers, the layers, some after them."""

    def __init__(self, model: nn.Module, base: nn.Module, names: Sequence[str], layers: nn.ModuleList) -> None:
        self.model, self.base, self.layers = model, base, layers
        at = next(i for i, name in enumerate(names) if getattr(base, name) is layers)
        self.names_before, self.names_after = list(names[:at]), list(names[at + 1 :])
        self.heads = [name for name, child in model.named_children() if child is not base] if model is not base else []

    @property
    def before(self) -> list[nn.Module]:
        return [getattr(self.base, name) for name in self.names_before]

    @property
    def after(self) -> list[nn.Module]:
        return [getattr(self.base, name) for name in self.names_after] + [getattr(self.model, n) for n in self.heads]


def _spine(model: nn.Module) -> Any:
    if isinstance(model, nn.Sequential):
        return _Row(model)
    base = getattr(model, "base_model", model)
    plan = getattr(getattr(model, "config", None), "base_model_pp_plan", None) or getattr(base, "_pp_plan", None)
    names = [name for name in plan or () if isinstance(getattr(base, name, None), nn.Module)]
    layers = [getattr(base, name) for name in names if isinstance(getattr(base, name), nn.ModuleList)]
    if len(layers) != 1:
        raise ConfigError(
            f"cut: {type(model).__name__} has no plan for a pipeline (config.base_model_pp_plan with one list of layers), and is no "
            "nn.Sequential; build each stage yourself and give them to zeropp.parallel.Chunks([...])"
        )
    _refuse_unplanned(base, names)
    return _Spine(model, base, names, layers[0])


def _refuse_unplanned(base: nn.Module, names: Sequence[str]) -> None:
    """Refuse a parameter of a model that is in no part of its plan."""
    strange = [name for name, _ in base.named_parameters() if name.partition(".")[0] not in names]
    if strange:
        raise ConfigError(
            f"cut: parameter '{strange[0]}' of {type(base).__name__} is in no part of its plan {tuple(names)}, so every stage would have a "
            "copy; build each stage yourself and give them to zeropp.parallel.Chunks([...])"
        )


class _Row:
    """A Sequential: layers alone."""

    def __init__(self, model: nn.Sequential) -> None:
        self.layers = model
        self.before: list[nn.Module] = []
        self.after: list[nn.Module] = []


def _keep(model: nn.Module, bounds: list[int], stage: int) -> None:
    """Replace what other stages have, and let the forward of a Hugging Face model take and return what a stage does."""
    first, last = stage == 0, stage == len(bounds) - 2
    spine = _spine(model)
    for index, layer in enumerate(list(spine.layers)):
        if not bounds[stage] <= index < bounds[stage + 1]:
            spine.layers[index] = Elsewhere(layer)
    if isinstance(spine, _Row):
        return
    gone = ([] if first else spine.names_before) + ([] if last else spine.names_after)
    for name in gone:
        setattr(spine.base, name, Elsewhere(getattr(spine.base, name)))
    for name in [] if last else spine.heads:
        setattr(model, name, Elsewhere(getattr(model, name)))
    model.__class__ = _class_for(type(model))
    model._first, model._last = first, last  # type: ignore[assignment]


def _class_for(kind: type) -> type:
    """Return the class of one stage of a Hugging Face model: hidden states come in place of tokens, and go in place of outputs."""

    def forward(self: Any, hidden: Any, **keywords: Any) -> Any:
        keywords["use_cache"] = False
        keywords["input_ids" if self._first else "inputs_embeds"] = hidden
        whole = self._last or self.base_model is self
        output = kind.forward(self, **keywords) if whole else self.base_model(**keywords)  # type: ignore[attr-defined]
        return output.logits if self._last and hasattr(output, "logits") else output.last_hidden_state

    return type(f"Stage{kind.__name__}", (kind,), {"forward": forward, "__doc__": kind.__doc__})


# -- balance -----------------------------------------------------------------------------------------------------------


def _elems(*modules: nn.Module) -> int:
    found = {id(p): p.numel() for module in modules for p in module.parameters()}
    return sum(found.values())


def balanced(sizes: Sequence[int], before: int, after: int, parts: int) -> list[int]:
    """Return ``parts + 1`` bounds of contiguous parts, none empty, whose largest sum is least.

    Args:
        sizes: of each layer.
        before, after: what the first and the last part have besides.
    """
    if len(sizes) < parts:
        raise ConfigError(
            f"cut: the model has {counted(len(sizes), 'layer')}, and the pipeline {counted(parts, 'stage')}; use fewer ranks in the "
            "pipeline, or fewer chunks a rank"
        )
    weights = [size + before * (i == 0) + after * (i == len(sizes) - 1) for i, size in enumerate(sizes)]
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    # least[end]: (largest sum, bounds) of the first `end` layers in as many parts as were placed
    least: dict[int, tuple[int, list[int]]] = {0: (0, [0])}
    for part in range(1, parts + 1):
        ends = range(part, len(weights) - (parts - part) + 1)
        least = {
            end: min(
                (max(least[at][0], sums[end] - sums[at]), [*least[at][1], end]) for at in least if at < end
            )
            for end in ends
        }  # fmt: skip
    return least[len(weights)][1]


def _tied_over(model: nn.Module, spine: Any, bounds: list[int], rank_of: dict[int, int]) -> list[list[str]]:
    """Return the names of each parameter that two ranks will have; two chunks of one rank share one as ever."""
    where: dict[int, set[int]] = {}

    def place(modules: Iterable[nn.Module], stage: int) -> None:
        for module in modules:
            for parameter in module.parameters():
                where.setdefault(id(parameter), set()).add(rank_of[stage])

    layers = list(spine.layers)
    for stage in range(len(bounds) - 1):
        place(layers[bounds[stage] : bounds[stage + 1]], stage)
    place(spine.before, 0)
    place(spine.after, len(bounds) - 2)
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [named for parameter, named in names.items() if len(where.get(id(parameter), ())) > 1]
