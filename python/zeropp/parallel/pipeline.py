# SPDX-License-Identifier: Apache-2.0
"""Pipelines of torch over prepared models (GPipe, Huang et al. 2019; 1F1B, Narayanan et al. 2021; zero bubble, Qi et al. 2024).

torch's schedules run the micro-batches and send activations. What they do not know of ZeRO is added here: which backwards
belong to one step and which of them is the last of a chunk, so that gradients are reduced once; and where a split backward
puts gradients of weights. A reduction begins inside the last backward of its chunk, and its end is waited for before the
norm or the step, so that the gradient for the stage before leaves first (csrc/zero/pass.c).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    BACKWARD_WEIGHT,
    FORWARD,
    OVERLAP_F_B,
    RECV_F,
    RESHARD,
    SEND_F,
    UNSHARD,
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
)

from zeropp.comm.group import named_dead
from zeropp.errors import ConfigError, Error, what_it_is
from zeropp.parallel.cut import Chunks, place_in, stage_indices
from zeropp.zero.engine import Engine, engine_of
from zeropp.zero.model.forward import is_compiled

S = TypeVar("S", bound=_PipelineSchedule)

_WITHOUT, _WITH, _LAST = range(3)  # csrc/zero/zero.h


class Stage(PipelineStage):
    """torch's stage over a chunk of a prepared model."""

    _chunk: _Chunk | None = None  # of the schedule that was adopted
    _model: nn.Module | None = None  # what prepare returned; its parameters are of no use once it is gone

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        if self._chunk is not None:
            self._chunk.forwards += 1
        return super().forward_one_chunk(*args, **kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if self._chunk is None:
            raise Error(
                f"pipeline stage {self.stage_index} runs in a schedule that zeropp does not know, so nothing says when gradients are "
                "reduced; call schedule = zeropp.parallel.pipeline(schedule) before its first step"
            )
        if self.is_last and backward_type != "weight":
            self._chunk.scale_loss(bwd_kwargs)
        with self._chunk.backward(backward_type, last_backward):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Leave gradients alone: the reduction takes the mean over micro-batches."""

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Leave gradients alone: each unit was reduced when its last gradient came."""

    def _post_metadata_inference_cleanup(self) -> None:
        super()._post_metadata_inference_cleanup()
        core = (engine_of(self.submod) if self._chunk is None else self._chunk.engine).core
        core.release_all()
        core.reset_uses()


class _Chunk:
    """One chunk of a schedule: which units it has, and what it has done in this step."""

    def __init__(self, engine: Engine, stage: Stage, shared: set[int]) -> None:
        self.engine, self.index, self.module = engine, stage.stage_index, stage.submod
        own = {index for index, unit in enumerate(engine.units) if _reads(stage.submod, unit)}
        self._units = bytes(_WITH if index in own else _WITHOUT for index in range(len(engine.units)))
        last = {index: _WITH if index in shared else _LAST for index in own}
        self._last_units = bytes(last.get(index, _WITHOUT) for index in range(len(engine.units)))
        self.forwards = self.backwards = 0
        self._holds = False

    def hold(self) -> None:
        """Gather the chunk's units, and keep them whole (UNSHARD)."""
        if not self._holds:
            self.engine.core.pass_hold(self._units, 1)
            self._holds = True

    def let_go(self) -> None:
        """Keep the units whole no more (RESHARD)."""
        if self._holds:
            self._holds = False
            self.engine.core.pass_hold(self._units, -1)

    def scale_loss(self, bwd_kwargs: dict[str, Any]) -> None:
        """Scale the loss of the last stage where the precision is fp16."""
        scaler, loss = self.engine.scaler, bwd_kwargs["stage_output"]
        if scaler.enabled:
            bwd_kwargs["stage_output"] = (
                scaler.scaled(loss) if isinstance(loss, torch.Tensor) else tuple(map(scaler.scaled, loss))
            )

    @contextlib.contextmanager
    def backward(self, kind: str, last: bool) -> Iterator[None]:
        """Surround a backward of one micro-batch: ``full``; or ``input``, which gives no gradients of weights, and then ``weight``.

        torch finds the nodes of parameters by ``p.view_as(p)``, and puts gradients of a ``weight`` into ``p.grad``.
        """
        core, units = self.engine.core, self._last_units if last else self._units
        if self.backwards == 0:
            self.engine.hook_order()
            if kind != "full":
                self._refuse_hooks()
        if kind == "full":
            core.pass_graph(units, self.forwards)
            yield
        else:
            core.pass_hold(self._units, 1)
            try:
                yield
                if kind == "weight":
                    self._settle()
                    core.pass_graph(units, self.forwards)
                    core.pass_take()
            finally:
                core.pass_hold(self._units, -1)
        self.backwards += kind != "input"

    def _settle(self) -> None:
        """Bring gradients of DTensors to their placement, because no hook runs where torch puts them into ``p.grad``."""
        for arrivals in self.engine.arrivals:
            arrivals.settle()

    def _refuse_hooks(self) -> None:
        """Refuse hooks of others that a split backward leaves out."""
        engine = self.engine
        own = [unit for index, unit in enumerate(engine.units) if self._units[index] == _WITH and unit.trainable]
        with torch._C.DisableTorchFunctionSubclass():
            entries = (entry for unit in own for entry in unit.params)
            name = next((entry.names[0] for entry in entries if engine.hook_order.of_others(entry.param)), None)
        if name is not None:
            raise ConfigError(
                f"pipeline: parameter '{name}' has a hook on its gradient (register_post_accumulate_grad_hook; transformers puts one on "
                f"norms of heads, such as Qwen3's q_norm, under tensor parallelism), and stage {self.index} splits its backwards, in which "
                "hooks do not run; use ScheduleGPipe, Schedule1F1B or ScheduleInterleaved1F1B, or remove the hook"
            )


def _reads(module: nn.Module, unit: Any) -> bool:
    own = {id(parameter) for parameter in module.parameters()}
    return any(id(entry.param) in own for entry in unit.params)


@dataclass
class _Step:
    """Surround the steps of an adopted schedule, whose chunks these are."""

    engine: Engine
    chunks: list[_Chunk]
    each: bool
    parts: int
    splits: bool
    """True if the schedule splits backwards into those for inputs and those for weights."""
    shapes: list[torch.Size] | None = None
    """Of the inputs of a micro-batch; None: no step ran yet."""

    def require_shapes(self, micro_batches: Sequence[tuple[Any, ...]]) -> None:
        """Refuse inputs of other shapes than those of the first micro-batch, for which stages send and receive."""
        shapes = [[one.shape for one in inputs if isinstance(one, torch.Tensor)] for inputs in micro_batches]
        wanted = shapes[0] if self.shapes is None and shapes else self.shapes
        for at, found in enumerate(shapes):
            if wanted is not None and found != wanted:
                raise ConfigError(
                    f"pipeline: micro-batch {at} of {len(micro_batches)} has inputs of shapes {_shown(found)}, and the first one of the "
                    f"schedule had {_shown(wanted)}; all have one shape, because stages send and receive that alone: leave out a last "
                    "batch that is smaller (DataLoader(drop_last=True)), pad it, or make stages and a schedule for it"
                )
        self.shapes = wanted

    @contextlib.contextmanager
    def run(self, micro_batches: int) -> Iterator[None]:
        """Surround all micro-batches of one step: their backwards are one pass."""
        core, scaler = self.engine.core, self.engine.scaler
        self.engine.ties.require_cleared()
        if self.splits:
            self._refuse_compiled()
        core.pass_open(self.each, self.parts)
        before = core.backwards
        for chunk in self.chunks:
            chunk.forwards = chunk.backwards = 0
        try:
            with self._holding(), self._named_dead():
                yield
            self._require_backwards(micro_batches)
            core.pass_close()
        except BaseException:
            core.pass_abort()
            raise
        scaler.backwards += core.backwards - before

    @contextlib.contextmanager
    def evaluation(self, schedule: Any) -> Iterator[None]:
        """Surround all micro-batches of an evaluation."""
        with torch.no_grad(), self._holding(), self._named_dead(), _forwards_alone(schedule):
            yield

    def _refuse_compiled(self) -> None:
        """Refuse compiled modules, whose backward is one function."""
        for chunk in self.chunks:
            found = (name for name, module in chunk.module.named_modules() if is_compiled(module))
            name = next(found, None)
            if name is not None:
                raise ConfigError(
                    f"pipeline: module '{name or '(stage)'}' of stage {chunk.index} is compiled, and the schedule splits backwards into those "
                    "for inputs and those for weights, which a compiled backward computes together; use ScheduleGPipe, Schedule1F1B, "
                    "ScheduleLoopedBFS or ScheduleInterleaved1F1B, or leave the modules as they are"
                )

    def _named_dead(self) -> contextlib.AbstractContextManager[None]:
        return named_dead(self.engine.comm if self.engine.job is None else self.engine.job)

    @contextlib.contextmanager
    def _holding(self) -> Iterator[None]:
        """Keep no unit whole at the end, also where the schedule ends by an exception."""
        try:
            yield
        finally:
            for chunk in self.chunks:
                chunk.let_go()

    def _require_backwards(self, wanted: int) -> None:
        for chunk in self.chunks:
            if chunk.backwards != wanted:
                raise Error(
                    f"pipeline: stage {chunk.index} ran {chunk.backwards} backwards of {wanted} micro-batches, so its gradients are "
                    "not those of the step; the schedule has to run a backward of each micro-batch"
                )


@contextlib.contextmanager
def _forwards_alone(schedule: Any) -> Iterator[None]:
    """Leave backwards out of a schedule. torch runs them in an evaluation, too, in which those of ZBV and DualPipeV fail."""
    if not isinstance(schedule, _PipelineScheduleRuntime):
        yield
        return
    whole = schedule.pipeline_order_with_comms
    schedule.pipeline_order_with_comms = {rank: list(_forwards_of(actions)) for rank, actions in whole.items()}
    try:
        yield
    finally:
        schedule.pipeline_order_with_comms = whole


def _forwards_of(actions: Sequence[Any]) -> Iterator[Any]:
    for action in actions:
        parts = action.sub_actions if action.computation_type == OVERLAP_F_B else (action,)
        yield from (one for one in parts if one.computation_type in (FORWARD, RECV_F, SEND_F, UNSHARD, RESHARD))


def _shown(shapes: Sequence[torch.Size]) -> str:
    return ", ".join(str(tuple(shape)) for shape in shapes)


_classes: dict[type, type] = {}


def _class_for(original: type) -> type:
    """Return the class that adopted schedules of a class have: it surrounds the micro-batches of each step."""

    def _step_microbatches(self: Any, *args: Any, **kwargs: Any) -> Any:
        step = self._zeropp
        step.require_shapes((args[0] if args else kwargs.get("arg_mbs")) or ())
        with step.run(self._n_microbatches) if self._has_backward else step.evaluation(self):
            return original._step_microbatches(self, *args, **kwargs)  # type: ignore[attr-defined]

    if original not in _classes:
        namespace = {"_step_microbatches": _step_microbatches, "__doc__": original.__doc__}
        _classes[original] = type(f"Zero{original.__name__}", (original,), namespace)
    return _classes[original]


def pipeline(schedule: S, reduce: str = "last", loss: str | None = None, gather: str | None = None) -> S:
    """Let one of torch's pipeline schedules train a prepared model, with any stage of ZeRO.

    Args:
        schedule: any of torch's, such as ``Schedule1F1B(stages[0], 8, loss_fn=loss_fn)`` or ``ScheduleInterleaved1F1B(stages, 8, ...)``, over
            the stages of :func:`stages`. Stays the same object: call its ``step`` and ``eval`` as before.
        reduce: ``"last"``: gradients wait on this rank, 4 or 2 bytes a parameter, and are reduced once, in the last
            micro-batch; 2 (N-1)/N of their bytes a step. ``"each"``: they are reduced after each micro-batch, so that between
            micro-batches each rank holds 1/N of them, at as many times the traffic; the sums are rounded in another order. At
            stage 0 ranks hold whole gradients, so both are ``"last"``.
        loss: ``"mean"``: the loss of the step is the mean of the micro-batches' losses; ``"sum"``: their sum. None: as the schedule's
            ``scale_grads`` says, which torch sets to True, the mean. The factor is part of the reduction.
        gather: at stage 3, ``"schedule"``: all units of a chunk are whole from the schedule's UNSHARD to its RESHARD, and are gathered once
            for that (GPipe and 1F1B have no such actions). ``"use"``: a unit is gathered for each micro-batch that needs it,
            forward and backward, so that few are whole at a time. None: ``"schedule"``, but ``"use"`` for parameters on NVMe.

    Returns:
        The schedule. Between ``schedule.step(...)`` and ``optimizer.step()`` gradients are clipped as always.
        ``Config(accumulate=k)`` takes the mean over k steps of the schedule. With precision fp16 the loss is scaled here.

    Raises:
        zeropp.ConfigError: not one of torch's schedules, a stage whose module was not prepared, or an option that pipelines do not
            support: ``step_in_backward``, ``efficiency``, a delayed update.
    """
    _check_options(reduce, loss, gather)
    stages = _stages_of(schedule)
    if hasattr(schedule, "_zeropp"):
        raise ConfigError("pipeline: the schedule was adopted already; adopt each schedule once")
    engine = _engine_of(stages)
    _check(engine)
    mean = schedule.scale_grads if loss is None else loss == "mean"
    parts = schedule._n_microbatches if mean else 1
    chunks = _adopt(stages, engine)
    each = reduce == "each" and engine.stage > 0
    schedule._zeropp = _Step(engine, chunks, each, parts, _splits(schedule))  # type: ignore[attr-defined]
    if isinstance(schedule, _PipelineScheduleRuntime) and gather != "use" and (gather or not engine.params.in_file):
        _follow(schedule, {chunk.index: chunk for chunk in chunks})
    schedule.__class__ = _class_for(type(schedule))
    engine.core.require_pass()
    return schedule


def _splits(schedule: Any) -> bool:
    """Return True if any rank of a schedule runs backwards for weights alone."""
    orders = getattr(schedule, "pipeline_order", {}).values()
    actions = (
        one for order in orders for action in order if action is not None for one in action.sub_actions or (action,)
    )
    return any(one.computation_type == BACKWARD_WEIGHT for one in actions)


def _follow(schedule: _PipelineScheduleRuntime, chunks: Mapping[int, _Chunk]) -> None:
    """Let the units of chunks come and go with the schedule's UNSHARD and RESHARD, which torch has for FSDP."""
    schedule.register_custom_function(UNSHARD, lambda action, _: chunks[action.stage_index].hold())
    schedule.register_custom_function(RESHARD, lambda action, _: chunks[action.stage_index].let_go())


def _check_options(reduce: Any, loss: Any, gather: Any) -> None:
    for name, value, allowed in (
        ("reduce", reduce, ("last", "each")), ("loss", loss, (None, "mean", "sum")), ("gather", gather, (None, "schedule", "use")),
    ):  # fmt: skip
        if value not in allowed:
            raise ConfigError(f"pipeline: {name} {value!r} is not known; wanted one of {', '.join(map(repr, allowed))}")


def _adopt(stages: list[Any], engine: Engine) -> list[_Chunk]:
    """Let the stages of a schedule tell their backwards; return what they tell it to."""
    reading = [[index for index, unit in enumerate(engine.units) if _reads(one.submod, unit)] for one in stages]
    shared = {index for own in reading for index in own if sum(index in other for other in reading) > 1}
    for stage in stages:
        stage.__class__ = Stage
        stage._chunk = _Chunk(engine, stage, shared)
    return [stage._chunk for stage in stages]


def _stages_of(schedule: Any) -> list[Any]:
    if isinstance(schedule, PipelineScheduleSingle):
        stages = [schedule._stage]
    elif isinstance(schedule, PipelineScheduleMulti):
        stages = list(schedule._stages)
    else:
        raise ConfigError(
            f"pipeline: schedule is {what_it_is(schedule)}; wanted one of torch.distributed.pipelining's schedules, such as Schedule1F1B"
        )
    for stage in stages:
        if type(stage) not in (PipelineStage, Stage):
            raise ConfigError(
                f"pipeline: stage {stage.stage_index} is a {type(stage).__name__}; wanted those of zeropp.parallel.stages(chunks, mesh), or "
                "torch's PipelineStage over a module"
            )
    return stages


def _engine_of(stages: list[Any]) -> Engine:
    own = [
        stage for stage in stages if any(True for _ in stage.submod.parameters())
    ]  # a stage may be an activation alone
    engines = [engine_of(stage.submod) for stage in own or stages]
    if any(engine is not engines[0] for engine in engines):
        raise ConfigError(
            "pipeline: the chunks of this rank were prepared one by one; put them into zeropp.parallel.Chunks and prepare that, so that they "
            "have one optimizer and one norm"
        )
    return engines[0]


def _check(engine: Engine) -> None:
    config = engine.config
    for name, set_ in (
        ("step_in_backward", config.step_in_backward),
        ("efficiency", config.efficiency is not None),
        ("offload.delayed_update", config.offload.delayed_update is not None),
    ):
        if set_:
            raise ConfigError(
                f"pipeline: Config.{name} is not supported in a pipeline's schedule yet, whose step has many backwards; leave it out"
            )


def stages(chunks: nn.Module, mesh: DeviceMesh) -> list[PipelineStage]:
    """Return torch's ``PipelineStage`` objects over the chunks of this rank, for a schedule of torch's.

    Args:
        chunks: what :func:`cut` returned, prepared; or one module, or :class:`Chunks` of your own.
        mesh: the pipeline's dimension, such as ``mesh["pp"]``.

    Returns:
        One stage a chunk, in the order of the chunks. Shapes are found by torch in the schedule's first step.

    Raises:
        zeropp.ConfigError: a mesh of several dimensions, or chunks that were cut for another number of ranks.
    """
    rank, ranks = place_in(mesh, "stages")
    parts = list(chunks) if isinstance(chunks, nn.ModuleList) else [chunks]
    indices = chunks.indices if isinstance(chunks, Chunks) else None
    indices = indices or stage_indices(rank, ranks, len(parts), "loop")
    device = engine_of(chunks).device
    made = [
        Stage(part, index, ranks * len(parts), device, group=mesh.get_group())
        for part, index in zip(parts, indices, strict=True)
    ]
    for stage in made:
        stage._model = chunks
    return [*made]
