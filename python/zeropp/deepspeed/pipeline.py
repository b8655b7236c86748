# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's pipelines over torch's 1F1B and DualPipeV (:func:`zeropp.parallel.pipeline`): a PipelineModule, and the steps of its engine.

    model = PipelineModule([LayerSpec(nn.Linear, 8, 8), F.relu, LayerSpec(nn.Linear, 8, 8)], num_stages=2, loss_fn=loss_fn)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    loss = engine.train_batch(iterator)

Unlike there, ZeRO may have any stage. A rank builds the layers of its own stage alone, under the names of the whole model.
"""

from __future__ import annotations

import collections
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, ScheduleDualPipeV
from torch.utils.checkpoint import checkpoint

from zeropp.config.deepspeed_json import accept_only, refuse_unknown, section_of
from zeropp.deepspeed import dimensions
from zeropp.deepspeed.engine import Engine
from zeropp.errors import ConfigError, counted, what_it_is
from zeropp.parallel.cut import Chunks, balanced, named_as_whole, stage_indices
from zeropp.parallel.pipeline import pipeline, stages

_ALWAYS: dict[str, tuple[tuple[object, ...], str]] = {
    "stages": (("auto",), "the PipelineModule says it"),
    "partition": (("best",), "the PipelineModule's partition_method says it"),
    "seed_layers": ((False,), "the PipelineModule says it"),
    "activation_checkpoint_interval": ((0,), "the PipelineModule says it"),
    "pipe_partitioned": ((True, False), "activations between stages are sent whole"),
    "grad_partitioned": ((True, False), "gradients between stages are sent whole"),
    "use_reentrant": ((True, False), "recomputation never re-enters the autograd engine"),
}


class LayerSpec:
    """A layer that is built where its stage is.

    Args:
        typename: a class of modules.
        module_args, module_kwargs: of its constructor.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise ConfigError(f"LayerSpec: typename is {what_it_is(typename)}; wanted a class of torch.nn.Module")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def __repr__(self) -> str:
        said = [*map(repr, self.module_args), *(f"{name}={value!r}" for name, value in self.module_kwargs.items())]
        return f"{self.typename.__name__}({', '.join(said)})"

    def build(self, log: bool = False) -> nn.Module:
        """Return a new module."""
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer whose module all layers of one key share.

    Args:
        key: of the module.
        forward_fn: called with (module, input) in place of the module.
        tied_weight_attr: DeepSpeed's list of shared weights; here the whole module is shared.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[..., Any] | None = None,
        tied_weight_attr: Any = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn, self.tied_weight_attr = key, forward_fn, tied_weight_attr


class ProcessTopology:
    """Ranks on a grid of named axes, the last one of neighbours.

    Args:
        axes: names.
        dims: ranks along each.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = list(axes), list(dims)
        self.ProcessCoord: Any = collections.namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]
        places: Iterator[Any] = itertools.product(*(range(one) for one in self.dims))
        self.mapping: dict[Any, int] = {self.ProcessCoord(*place): rank for rank, place in enumerate(places)}

    def get_rank(self, **coordinates: int) -> int:
        """Return the rank with a coordinate for each axis."""
        return self.mapping[self.ProcessCoord(**coordinates)]

    def get_axis_names(self) -> list[str]:
        return self.axes

    def get_dim(self, axis: str) -> int:
        """Return the ranks along an axis; 0 for one that is not there."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """Return the named coordinates of a rank."""
        return next(place for place, one in self.mapping.items() if one == rank)

    def filter_match(self, **coordinates: int) -> list[int]:
        """Return the ranks with these coordinates."""
        return [
            rank for place, rank in self.mapping.items() if all(getattr(place, k) == v for k, v in coordinates.items())
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks with one coordinate."""
        return self.filter_match(**{axis: idx})

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return, for each line along an axis, its ranks."""
        at = self.axes.index(axis) if axis in self.axes else None
        lines: dict[Any, list[int]] = {}
        for place, rank in self.mapping.items():
            if at is not None:
                lines.setdefault((*place[:at], *place[at + 1 :]), []).append(rank)
        return list(lines.values())

    def world_size(self) -> int:
        return len(self.mapping)

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Stages, each of ``num_dp`` neighbouring ranks."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Stages, their copies, and slices of matrices. A PipelineModule refuses it unless ``num_mp`` is 1."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


class PipelineModule(nn.Module):
    """A sequence of layers, of which this rank builds and runs those of its stage. Collective.

    Args:
        layers: ``LayerSpec``, ``TiedLayerSpec``, modules and functions; or an ``nn.Sequential``. Each takes what the one before returns.
        num_stages: ranks along the pipeline; or ``topology``, a :class:`PipeDataParallelTopology`.
        loss_fn: takes (output, labels), returns the loss of one micro-batch.
        seed_layers, seed_fn, base_seed: layer k is built after ``seed_fn(base_seed + k)``, or torch's seed.
        partition_method: ``"parameters"``, ``"uniform"``, or ``"type:REGEX"``: what is balanced, trained parameters, layers, or those
            layers whose class has such a name.
        activation_checkpoint_interval: so many layers are computed again in the backward; 0 keeps all activations.
        activation_checkpoint_func: takes (function, *inputs); None: torch's.
        checkpointable_layers: names of the classes that are computed again; None: those with parameters.
        dynamic_shape: True is refused: micro-batches have one shape.

    Raises:
        zeropp.ConfigError: fewer layers than stages, ranks that the stages do not divide, or another axis in the topology.
    """

    _chunks = 1  # of a rank

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        super().__init__()
        if dynamic_shape:
            raise ConfigError(
                "PipelineModule: dynamic_shape is not supported, because torch's stages learn shapes once; pad micro-batches to one length"
            )
        self._topo = _topology(num_stages, topology)
        self.num_stages, self.loss_fn = self._topo.get_dim("pipe"), loss_fn
        self.mesh = dimensions.job_mesh(pp=self.num_stages)
        if self._topo.world_size() != self.mesh.size():
            raise ConfigError(
                f"PipelineModule: the topology {self._topo.dims} has {self._topo.world_size()} ranks, and the job has {self.mesh.size()}"
            )
        self.stage_id = self.mesh.get_local_rank("pp")
        self._layer_specs = list(layers)
        self.parts = _bounds(self._layer_specs, self.num_stages * self._chunks, partition_method)
        self._recomputation = _Recomputation(
            activation_checkpoint_interval,
            activation_checkpoint_func or functools.partial(checkpoint, use_reentrant=False),
            None if checkpointable_layers is None else tuple(checkpointable_layers),
        )
        self.tied_modules = nn.ModuleDict()
        self.forward_funcs: list[Callable[..., Any]] = []
        self._build((seed_fn or torch.manual_seed) if seed_layers else None, base_seed)
        shared = (name for name, _ in self.named_parameters() if name.startswith("tied_modules."))
        self._zeropp_tied = [[name] for name in shared]  # zero/model/tied.py

    def _build(self, seed: Callable[[int], Any] | None, base_seed: int) -> None:
        """Build the layers of this rank."""
        self.forward_funcs += self._layers_of(self.stage_id, self, seed, base_seed)

    def _layers_of(
        self, stage: int, owner: Any, seed: Callable[[int], Any] | None, base_seed: int
    ) -> list[Callable[..., Any]]:
        """Return what runs the layers of a stage, whose modules ``owner`` gets."""
        funcs = []
        for index in range(*self.parts[stage : stage + 2]):
            if seed is not None:
                seed(base_seed + index)
            funcs.append(self._built(index, self._layer_specs[index], owner))
        return funcs

    def _built(self, index: int, layer: Any, owner: Any) -> Callable[..., Any]:
        """Return what runs a layer; its module gets its number, or the key that it shares, as its name."""
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in owner.tied_modules:
                owner.tied_modules[layer.key] = self._tied(layer)
            module = owner.tied_modules[layer.key]
            return module if layer.forward_fn is None else functools.partial(layer.forward_fn, module)
        if isinstance(layer, LayerSpec):
            layer = layer.build()
        if isinstance(layer, nn.Module):
            owner.add_module(str(index), layer)
        elif not callable(layer):
            raise ConfigError(
                f"PipelineModule: layer {index} is {what_it_is(layer)}; wanted a LayerSpec, a module or a function"
            )
        return layer  # type: ignore[no-any-return]

    def _tied(self, layer: TiedLayerSpec) -> nn.Module:
        """Return the module of a key that a stage of this rank has not met yet."""
        return layer.build()

    def forward(self, *inputs: Any) -> Any:
        """Run this stage's layers; several inputs are one tuple to the first of them, as in DeepSpeed."""
        return self._recomputation.run(self.forward_funcs, inputs)

    @property
    def activation_checkpoint_interval(self) -> int:
        """Return how many layers are computed again together in the backward; 0: none."""
        return self._recomputation.every

    @property
    def last_stage_id(self) -> int:
        """Return the rank of the pipeline that has the last layer, and computes the loss."""
        return self.num_stages - 1

    def schedule(self, micro_batches: int, loss_fn: Callable[..., Any] | None) -> Any:
        """Return torch's schedule of so many micro-batches, once the module is prepared."""
        return Schedule1F1B(stages(self, self.mesh["pp"])[0], micro_batches, loss_fn=loss_fn)

    def partitions(self) -> list[int]:
        """Return the first layer of each stage, and the number of layers."""
        return self.parts

    def stage_owner(self, layer_idx: int) -> int:
        """Return the stage that has a layer."""
        return next(at for at in range(len(self.parts) - 1) if self.parts[at] <= layer_idx < self.parts[at + 1])

    def topology(self) -> ProcessTopology:
        return self._topo

    def num_pipeline_stages(self) -> int:
        return self.num_stages

    def set_checkpoint_interval(self, interval: int) -> None:
        self._recomputation.every = interval

    def mpu(self) -> Any:
        """Return the groups of ranks of the pipeline."""
        return dimensions


class DualPipeVModule(PipelineModule):
    """A sequence of layers in twice as many parts as there are ranks, which torch's DualPipeV runs. Rank r of P has part r and part
    2 P - 1 - r, so the first one reads the batches and computes the loss.

    Args:
        As :class:`PipelineModule`. ``num_stages`` are ranks. A step has at least 2 P micro-batches.
    """

    _chunks = 2

    def _build(self, seed: Callable[[int], Any] | None, base_seed: int) -> None:
        indices = stage_indices(self.stage_id, self.num_stages, 2, "v")
        self.phases = Chunks([_Phase(self._recomputation) for _ in indices], indices)
        phases: list[Any] = [*self.phases]
        for phase, index in zip(phases, indices, strict=True):
            phase.forward_funcs += self._layers_of(index, phase, seed, base_seed)

    def _tied(self, layer: TiedLayerSpec) -> nn.Module:
        phases: Any = self.phases
        have = (one.tied_modules[layer.key] for one in phases if layer.key in one.tied_modules)
        return next(have, None) or layer.build()

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield modules under the names of the whole model, which has no parts."""
        yield from named_as_whole(self, self.phases, memo, prefix, remove_duplicate)

    def forward(self, *inputs: Any) -> Any:
        """Refuse: a rank has two parts that do not follow each other.

        Raises:
            zeropp.ConfigError: always.
        """
        raise ConfigError(
            "a DualPipeVModule runs in engine.train_batch(iterator) and engine.eval_batch(iterator) alone"
        )

    @property
    def last_stage_id(self) -> int:
        return 0

    def schedule(self, micro_batches: int, loss_fn: Callable[..., Any] | None) -> Any:
        least = 2 * self.num_stages
        if micro_batches < least:
            raise ConfigError(
                f"DualPipeVModule: {micro_batches} micro-batches a step on {counted(self.num_stages, 'rank')} of the pipeline; wanted "
                f'at least {least}: raise "gradient_accumulation_steps" (num_micro_batches of eval_batch), or use PipelineModule'
            )
        return ScheduleDualPipeV([*stages(self.phases, self.mesh["pp"])], micro_batches, loss_fn=loss_fn)

    def stage_owner(self, layer_idx: int) -> int:
        """Return the rank of the pipeline that has a layer."""
        stage = super().stage_owner(layer_idx)
        return min(stage, 2 * self.num_stages - 1 - stage)


class _Phase(nn.Module):
    """One of the two parts of a rank."""

    def __init__(self, recomputation: _Recomputation) -> None:
        super().__init__()
        self._recomputation = recomputation
        self.tied_modules = nn.ModuleDict()
        self.forward_funcs: list[Callable[..., Any]] = []

    def forward(self, *inputs: Any) -> Any:
        return self._recomputation.run(self.forward_funcs, inputs)


@dataclass
class _Recomputation:
    """Which layers are computed again in the backward."""

    every: int
    function: Callable[..., Any]
    classes: tuple[str, ...] | None

    def run(self, layers: Sequence[Callable[..., Any]], inputs: Sequence[Any]) -> Any:
        """Return what layers make of inputs."""
        x = inputs[0] if len(inputs) == 1 else inputs
        if self.every <= 0 or not torch.is_grad_enabled():
            return _through(layers, x)
        for at in range(0, len(layers), self.every):
            part = layers[at : at + self.every]
            x = self.function(_Run(part), *_tuple(x)) if self._fits(part) else _through(part, x)
        return x

    def _fits(self, part: Sequence[Callable[..., Any]]) -> bool:
        if self.classes is not None:
            return all(type(one).__name__ in self.classes for one in part)
        return any(isinstance(one, nn.Module) and any(True for _ in one.parameters()) for one in part)


class _Run:
    """Several layers as one function, which a recomputation calls again."""

    def __init__(self, layers: Sequence[Callable[..., Any]]) -> None:
        self.layers = layers

    def __call__(self, *inputs: Any) -> Any:
        return _through(self.layers, inputs[0] if len(inputs) == 1 else inputs)


def _through(layers: Iterable[Callable[..., Any]], x: Any) -> Any:
    for layer in layers:
        x = layer(x)
    return x


def _tuple(x: Any) -> tuple[Any, ...]:
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def _topology(num_stages: int | None, topology: ProcessTopology | None) -> ProcessTopology:
    if topology is None:
        if num_stages is None:
            raise ConfigError("PipelineModule: neither num_stages nor topology is given; wanted one of them")
        dimensions.job_mesh(pp=num_stages)
        return PipeDataParallelTopology(num_stages, dimensions.size("dp"))
    strange = [name for name in topology.axes if name not in ("pipe", "data") and topology.get_dim(name) > 1]
    if strange or topology.axes[0] != "pipe":
        raise ConfigError(
            f"PipelineModule: a topology of {topology.axes}, {topology.dims} ranks; wanted PipeDataParallelTopology(num_pp, num_dp). Slices of "
            "matrices under a pipeline: zeropp.parallel.tensor and zeropp.parallel.cut (docs/parallel.md)"
        )
    return topology


def _bounds(specs: Sequence[Any], count: int, method: str) -> list[int]:
    """Return the first layer of each stage, and the number of layers."""
    kind, _, pattern = method.partition(":")
    if method.lower() == "uniform":
        sizes = [1] * len(specs)
    elif method.lower() == "parameters":
        sizes = [_trained(one) for one in specs]
    elif kind.lower() == "type":
        sizes = [int(re.search(pattern, _name(one), re.IGNORECASE) is not None) for one in specs]
        if not any(sizes):
            raise ConfigError(
                f"PipelineModule: partition_method {method!r} finds no such layer in {sorted(set(map(_name, specs)))}"
            )
    else:
        raise ConfigError(
            f"PipelineModule: partition_method {method!r} is not known; wanted 'parameters', 'uniform' or 'type:REGEX'"
        )
    if len(specs) < count:
        raise ConfigError(
            f"PipelineModule: {counted(len(specs), 'layer')} for {counted(count, 'stage')}; wanted fewer stages"
        )
    return balanced(sizes, 0, 0, count)


def _name(layer: Any) -> str:
    one = layer.typename if isinstance(layer, LayerSpec) else type(layer) if isinstance(layer, nn.Module) else layer
    return getattr(one, "__name__", type(one).__name__)


def _trained(layer: Any) -> int:
    """Return the trained elements of a layer; one that is not built yet is built without memory."""
    if isinstance(layer, LayerSpec):
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            layer = layer.build()
    if not isinstance(layer, nn.Module):
        return 0
    return sum(one.numel() for one in layer.parameters() if one.requires_grad)


class PipelineSteps(Engine):
    """The engine of a :class:`PipelineModule`: one call is a whole step, of ``gradient_accumulation_steps`` micro-batches."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._schedules: dict[Any, Any] = {}
        self.agg_train_loss: Tensor | None = None
        self.data_iterator: Any = None
        self._batch_fn: Callable[[Any], Any] | None = None
        self._pipe: Any = self.module
        self.num_stages, self.stage_id = self._pipe.num_stages, self._pipe.stage_id
        section = section_of(self.config, "pipeline")
        refuse_unknown(section, _ALWAYS, "pipeline")
        accept_only(section, _ALWAYS, "pipeline.")

    @property
    def micro_batches(self) -> int:
        return self.zeropp_config.accumulate

    def is_first_stage(self) -> bool:
        return bool(self.stage_id == 0)

    def is_last_stage(self) -> bool:
        return bool(self.stage_id == self._pipe.last_stage_id)

    def set_dataiterator(self, iterator: Any) -> None:
        """Set where :meth:`train_batch` takes micro-batches from."""
        self.data_iterator = iterator

    def set_dataloader(self, loader: Any) -> None:
        """Set the loader whose micro-batches :meth:`train_batch` takes."""
        self.training_dataloader, self.data_iterator = loader, iter(loader)

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Set what turns a micro-batch into (inputs, labels)."""
        self._batch_fn = fn

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Run forward, backward and step of a whole batch. Collective.

        Args:
            data_iter: gives micro-batches (inputs, labels), so many as ``gradient_accumulation_steps``; read on the first and the last stage,
                which must be given the same ones. None: the loader of ``training_data``, or the one that was set.

        Returns:
            The mean of the losses of all micro-batches, over the copies of the pipeline, on every rank; fp32.

        Raises:
            StopIteration: ``data_iter`` ends within the step.
        """
        if self.optimizer is None:
            raise ConfigError(
                'train_batch: there is no optimizer; give optimizer=, or "optimizer" in the configuration'
            )
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch: gradients are off here; call eval_batch, or leave torch.no_grad()")
        if data_iter is not None:
            self.data_iterator = data_iter
        elif self.data_iterator is None and self.training_dataloader is not None:
            self.data_iterator = _again(self.training_dataloader)
        self.module.train()
        inputs, labels = self._micro_batches(self.data_iterator, self.micro_batches)
        self.tput_timer.start()
        losses: list[Tensor] = []
        self._run(self._schedule(len(inputs), trains=True), inputs, labels, losses)
        self.micro_steps += len(inputs)
        self._update({})
        self.tput_timer.stop(global_step=True)
        self.agg_train_loss = self._mean(losses)
        return self.agg_train_loss

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Run the forward of a whole batch. Collective.

        Args:
            data_iter: gives micro-batches (inputs, labels).
            return_logits: return (result, outputs of the last micro-batch on the last stage, else None).
            compute_loss: the result is the mean loss; else the outputs.
            reduce_output: ``"avg"``: the mean over micro-batches and copies; None: a list by micro-batch, on the last stage.
            bcast_loss: a mean loss is the same on every rank, always; False is accepted.
            num_micro_batches: in place of ``gradient_accumulation_steps``.

        Returns:
            A scalar loss on every rank; or outputs on the last stage, and None on the others.
        """
        self.module.eval()
        inputs, labels = self._micro_batches(data_iter, num_micro_batches or self.micro_batches)
        schedule = self._schedule(len(inputs), trains=False)
        with torch.no_grad():
            self._run(schedule, inputs, labels, None)
            outputs = [out for one in _stages_of(schedule) if one.is_last for out in one.output_chunks]
            result = self._result(outputs, labels, compute_loss, reduce_output)
        return (result, outputs[-1] if outputs else None) if return_logits else result

    def _result(self, outputs: list[Any], labels: list[Any], compute_loss: bool, reduce_output: str | None) -> Any:
        if reduce_output not in (None, "avg"):
            raise ConfigError(f"eval_batch: reduce_output {reduce_output!r} is not known; wanted 'avg' or None")
        if compute_loss and self._pipe.loss_fn is not None:
            outputs = [self._pipe.loss_fn(out, label) for out, label in zip(outputs, labels, strict=False)]
            return self._mean(outputs) if reduce_output == "avg" else outputs or None
        if reduce_output is None or not outputs:
            return outputs or None
        mean = torch.stack([_tuple(out)[0] for out in outputs]).mean(0)
        dist.all_reduce(mean, group=self.data_parallel_group)
        return mean / self.batches

    def _micro_batches(self, iterator: Any, count: int) -> tuple[list[tuple[Any, ...]], list[Any]]:
        """Return the inputs and the labels of the micro-batches of a step; empty tuples where the stage reads none."""
        if not (self.is_first_stage() or self.is_last_stage()):
            return [()] * count, []
        if iterator is None:
            raise ConfigError("train_batch: there are no batches; give data_iter, or training_data to initialize")
        inputs: list[tuple[Any, ...]] = []
        labels: list[Any] = []
        for _ in range(count):
            batch = next(iterator)
            batch = batch if self._batch_fn is None else self._batch_fn(batch)
            if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                raise ConfigError(f"train_batch: a micro-batch is {what_it_is(batch)}; wanted (inputs, labels)")
            inputs.append(tuple(one.to(self.device) for one in _tuple(batch[0])) if self.is_first_stage() else ())
            labels.append(_moved(batch[1], self.device))
        return inputs, labels

    def _schedule(self, count: int, *, trains: bool) -> Any:
        """Return the schedule of so many micro-batches, made when it is first wanted."""
        key = (count, trains)
        if key not in self._schedules:
            made = self._pipe.schedule(count, (self._pipe.loss_fn or _first) if trains else None)
            self._schedules[key] = pipeline(made, loss="mean")
        return self._schedules[key]

    def _run(self, schedule: Any, inputs: list[Any], labels: list[Any], losses: list[Tensor] | None) -> None:
        """Run a schedule over micro-batches that are cut already, which its ``step`` would cut out of one batch."""
        for stage in _stages_of(schedule):
            stage.has_backward = schedule._has_backward
            stage.clear_runtime_states()
        schedule._step_microbatches(inputs, [{} for _ in inputs], labels if self.is_last_stage() else None, losses)

    def _mean(self, losses: Sequence[Tensor]) -> Tensor:
        """Return the mean of the last stages' losses, on every rank."""
        total = torch.zeros((), device=self.device)
        for loss in losses:
            total += loss.detach().float() / (len(losses) * self.batches)
        dist.all_reduce(total)
        return total

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: a stage alone has no output.

        Raises:
            zeropp.ConfigError: always.
        """
        raise ConfigError("a PipelineModule runs in engine.train_batch(iterator) and engine.eval_batch(iterator) alone")

    backward = step = forward


def _stages_of(schedule: Any) -> list[Any]:
    return list(schedule._stages) if isinstance(schedule, PipelineScheduleMulti) else [schedule._stage]


def _first(output: Any, label: Any) -> Any:
    """Return the output, which is the loss where the module has no ``loss_fn``."""
    return output


def _moved(labels: Any, device: torch.device) -> Any:
    if isinstance(labels, (tuple, list)):
        return type(labels)(_moved(one, device) for one in labels)
    return labels.to(device) if isinstance(labels, Tensor) else labels


def _again(loader: Any) -> Iterator[Any]:
    """Yield the batches of a loader, over and over."""
    while True:
        yield from loader
