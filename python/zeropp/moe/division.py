# SPDX-License-Identifier: Apache-2.0
"""The experts of a model divided among the ranks: which rank has which, who exchanges tokens, and who holds the same experts.

Of N ranks, ``ep`` consecutive ones hold different experts; rank r has the part ``r % ep`` of every layer. The N/ep ranks with the same
part partition it, as all N ranks partition the rest of the model (zero/model/spread.py):

    rank           0      1      2      3          N = 4, ep = 2
    experts      0..3   4..7   0..3   4..7         of 8
    exchange    [ 0      1 ]  [ 2      3 ]         tokens go to the ranks of the experts that they chose
    same part   [ 0             2 ]                gradients of experts 0 to 3 are summed, and divided by 4

Where t ranks hold the same tokens (``Experts.shared_by``, shared.py), they are among the ``ep`` ranks, and next to each other. In a job whose
data ranks are apart from them, each of the t ranks of a place partitions its own experts with its data ranks, as it does with slices of
tensor parallelism. An expert has seen each token once, so its gradient is divided by the number of batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from zeropp.comm.collective import exchange, of_all_ranks
from zeropp.comm.job import JobRanks, sub_communicator
from zeropp.config import Config, Offload, with_tiers
from zeropp.config.experts import kinds_on
from zeropp.errors import ConfigError
from zeropp.moe.beside import shared_beside
from zeropp.moe.exchange import Exchange
from zeropp.moe.experts import ExpertLayer, ExpertsForward, expert_layers, no_experts
from zeropp.moe.on_demand import Cache, DemandCall, DemandLayer
from zeropp.moe.shared import Sharers
from zeropp.zero.formulas import loads_units
from zeropp.zero.model.boxes import Box, Boxes, Dims, one_box
from zeropp.zero.model.part import Parts, cut, parts_of, shown


@dataclass
class Division:
    """The experts of one model on this rank."""

    layers: list[ExpertLayer]
    ranks: list[int]
    """By layer: how many ranks hold different experts."""
    slices: int
    """Slices of an expert, each an expert of its own here."""
    chunks: int | str
    """Pieces in which tokens go to other hosts."""
    exchanges: dict[int, Exchange]
    """By that number: the exchange of the ranks that hold different experts."""
    parts: dict[nn.Parameter, nn.Parameter]
    """By parameter of the model, this rank's part; empty where one rank has all experts, and none on demand."""
    cache_bytes: int | None = None
    """Of experts on demand; None: there are none."""
    offload: Offload | None = None
    """The tiers of experts alone; None: their states are where those of the rest are."""
    sharers: Sharers | None = None
    """The ranks that hold the same tokens; None: this rank's are its own."""
    divisor: float = 0.0
    """By what the sum of an expert's gradients over the ranks of its part is divided; 0: by the number of data ranks."""

    @property
    def apart(self) -> list[nn.Module]:
        """Return the modules that are a unit each: those with tiers of their own, and those that stay where they are while a pass reads
        single experts."""
        return [] if self.cache_bytes is None and self.offload is None else [layer.module for layer in self.layers]

    @property
    def cache_held(self) -> dict[str, int]:
        """Return the most that experts on demand take, as zeropp.estimate names it."""
        return {} if self.cache_bytes is None else {"expert_cache": self.cache_bytes}

    @property
    def counts(self) -> list[int]:
        """Return the different numbers of parts that parameters are in."""
        return sorted({parts.spread for part in self.parts.values() if (parts := parts_of(part)) is not None})

    def has_experts(self, params: list[nn.Parameter]) -> bool:
        """Return True if these parameters of a unit, or some of them, are experts."""
        experts = {layer.module._parameters[key] for layer in self.layers for key in layer.keys}
        return any(shown(one) in experts for one in params)

    def is_held(self, params: list[nn.Parameter]) -> bool:
        """Return True if these parameters of a unit stay in memory, because the files are those of experts."""
        return bool(kinds_on(self.offload, "nvme")) and not self.has_experts(params)

    def on_host(self, params: list[nn.Parameter]) -> tuple[str, ...]:
        """Return which kinds of states a unit of these parameters has in memory of the host, where others have theirs on a GPU."""
        kinds = kinds_on(self.offload, "cpu")
        return kinds if kinds and self.has_experts(params) else ()

    def install(self, engine: Any) -> None:
        """Let the modules compute with this rank's experts, on rows of all ranks."""
        cache = None if self.cache_bytes is None else Cache(engine, self.cache_bytes)
        if cache is not None:
            engine.expert_cache = cache
            engine.core.set_on_demand(bytes(parts_of(unit.params[0].param) is not None for unit in engine.units))
        for number, (layer, ranks) in enumerate(zip(self.layers, self.ranks, strict=True)):
            if getattr(layer.module, layer.keys[0]) not in self.parts:
                continue
            local = {key: self.parts[getattr(layer.module, key)] for key in layer.keys}
            exchange = self.exchanges[ranks]
            layer.module.forward = forward = ExpertsForward(
                layer, exchange, local, self.slices, self.chunks, self.sharers
            )
            if exchange.network is not None:
                forward.beside = shared_beside(layer.block)
            if cache is not None:
                first = exchange.rank * layer.experts * self.slices // ranks
                forward.demand = DemandLayer(cache, number, layer.name, local, first, self.slices)
                layer.module._compiled_call_impl = DemandCall(layer.module)


def divide(model: nn.Module, config: Config, ranks: JobRanks) -> Division | None:
    """Return how ``Config.experts`` divides a model's experts; None: this stage of a pipeline has none. Collective.

    Args:
        ranks: of the model. Those that hold the same tokens may have different data ranks.

    Raises:
        zeropp.ConfigError: the model has no plan for its experts, or they do not divide.
    """
    layers = _layers_of(model, ranks)
    return _divide(layers, config, ranks) if layers else None


def _divide(layers: list[ExpertLayer], config: Config, ranks: JobRanks) -> Division:
    chosen: Any = config.experts
    sharers = None if chosen.shared_by is None else Sharers(chosen.shared_by)
    alike = 1 if sharers is None else sharers.ranks
    places = _places(ranks, sharers)
    counts = chosen.ranks_of(len(places), [(layer.name, layer.experts) for layer in layers], alike)
    exchanges = {one: Exchange(_neighbours(places, one), config.comm.tokens) for one in sorted(set(counts))}
    parts = {}
    _check_cache(chosen.cache, config, ranks.data)
    apart = sharers is not None and len(places) != _count(ranks.data)
    for layer, one in zip(layers, counts, strict=True):
        if one > 1 or chosen.slices > 1 or chosen.cache is not None:
            parts.update(parts_of_layer(layer, one, chosen.slices, exchanges[one].comm, alike if apart else 1))
    return Division(
        layers, counts, chosen.slices, chosen.chunks, exchanges, parts, chosen.cache, chosen.offload, sharers,
        0.0 if apart else len(places) / alike,
    )  # fmt: skip


def _layers_of(model: nn.Module, ranks: JobRanks) -> list[ExpertLayer]:
    """Return the layers of a model that hold experts. Of the stages of a pipeline some may have none."""
    if ranks.stages == 1:
        return expert_layers(model)
    found: list[ExpertLayer] = []

    def find() -> bool:
        found.extend(expert_layers(model, required=False))
        return bool(found)

    if not any(of_all_ranks(ranks.job, find)):
        raise no_experts(model)
    return found


def parts_of_layer(
    layer: ExpertLayer, ranks: int, slices: int, comm: Any, of_data_rank: int = 1
) -> dict[nn.Parameter, nn.Parameter]:
    """Return, by parameter of a layer, the part of it that this rank has.

    Args:
        ranks: that hold different experts.
        comm: of these; None: the first one's part.
        of_data_rank: how many of these, next to each other, are one rank for ZeRO.
    """
    _refuse_buffers(layer)
    parts = {}
    for key in layer.keys:
        parameter = layer.module._parameters[key]
        assert parameter is not None
        boxes = tuple(_boxes(layer, key, parameter.shape, rank, ranks, slices) for rank in range(ranks))
        parts[parameter] = cut(parameter, Parts(comm, boxes, of_data_rank))
    return parts


def _check_cache(cache: int | None, config: Config, comm: Any) -> None:
    if cache is not None and not loads_units(with_tiers(config)):
        raise ConfigError(
            f"Experts.cache: {cache} bytes of experts on demand, of parameters that are in memory already; wanted "
            "Offload(params='nvme', path=...) or Precision(stored='int8' | 'int4'), or leave it at None"
        )
    if cache is not None and comm is not None and comm.hosts > 1 and config.stored_name is None:
        raise ConfigError(
            f"Experts.cache: {cache} bytes of experts on demand on {comm.hosts} hosts, each of which has a part of every expert in its "
            "file; use Precision(stored=), of which each host has a whole copy, or leave it at None"
        )


def _refuse_buffers(layer: ExpertLayer) -> None:
    name = next((name for name, one in layer.module.named_buffers() if one.dim() and len(one) == layer.experts), None)
    if name is not None:
        raise ConfigError(
            f"Config.experts: the experts of '{layer.name}' have a buffer '{name}', and buffers are not divided among ranks; leave "
            "Config.experts at None, or use experts without buffers"
        )


def _count(comm: Any) -> int:
    return 1 if comm is None else int(comm.ranks)


def _places(ranks: JobRanks, sharers: Sharers | None) -> list[int]:
    """Return the ranks of the job that may hold different experts, in the order in which they are neighbours. Collective."""
    me = ranks.all.job_ranks[ranks.all.rank] if ranks.all is not None else 0
    data = [me] if ranks.data is None else list(ranks.data.job_ranks)
    if sharers is None or sharers.ranks == 1:
        return data
    if set(sharers.members) <= set(data):
        first = data.index(sharers.members[0])
        if first % sharers.ranks or data[first : first + sharers.ranks] != sharers.members:
            raise ConfigError(
                f"Experts.shared_by: ranks {sharers.members} hold the same tokens, and are not next to each other among the data ranks {data}; "
                "give prepare the mesh, prepare(..., mesh=mesh)"
            )
        return data
    if len(set(sharers.members) & set(data)) > 1:
        raise ConfigError(
            f"Experts.shared_by: some of the ranks {sharers.members}, which hold the same tokens, are data ranks of each other and some are not; "
            "name a dimension of the mesh such as mesh['tp']"
        )
    columns = exchange(sharers.comm, data)
    return [rank for row in zip(*columns, strict=True) for rank in row]


def _neighbours(places: list[int], ep: int) -> Any:
    """Return the communicator of the ranks that hold different experts, this rank among them; None for one rank. Collective.

    Exchanges have one of their own also where all ranks take part: their order among the coordinator's collectives is not fixed.
    """
    if ep == 1:
        return None
    at = places.index(dist.get_rank()) // ep * ep
    return sub_communicator(places[at : at + ep], "with different experts")


def _boxes(layer: ExpertLayer, key: str, shape: Dims, rank: int, ranks: int, slices: int) -> Boxes:
    """Return the part of one parameter that the experts of a rank are: whole ones, or slices along the intermediate size."""
    count = layer.experts * slices // ranks
    if slices == 1:
        return one_box(shape, (rank * count, *(0,) * (len(shape) - 1)), (count, *shape[1:]))
    dim, spans = _spans(layer, key, shape, slices)
    size = tuple(n if d != dim else n // spans // slices for d, n in enumerate((1, *shape[1:])))
    found = []
    for local in range(count):
        expert, number = divmod(rank * count + local, slices)
        for span in range(spans):
            offset, at = [expert, *(0,) * (len(shape) - 1)], [local, *(0,) * (len(shape) - 1)]
            offset[dim], at[dim] = span * (shape[dim] // spans) + number * size[dim], span * size[dim]
            found.append(Box(tuple(offset), size, tuple(at)))
    own = tuple(n if d != dim else n // slices for d, n in enumerate((count, *shape[1:])))
    return Boxes(tuple(shape), own, tuple(found))


def _spans(layer: ExpertLayer, key: str, shape: Dims, slices: int) -> tuple[int, int]:
    """Return the dimension of the intermediate size, and how many matrices of that size lie one after the other in it: gate and up.

    Raises:
        zeropp.ConfigError: these experts cannot be sliced.
    """
    module: Any = layer.module
    reason = _unsliceable(module)
    if reason:
        raise ConfigError(f"Experts.slices: {slices} slices of the experts of '{layer.name}': {reason}; use slices=1")
    up = key != "down_proj"
    dim = 1 if up != module.is_transposed else 2
    spans = 2 if up and module.has_gate and module.is_concatenated else 1
    if shape[dim] % (slices * (2 if up and module.has_gate else 1)):
        raise ConfigError(
            f"Experts.slices: {slices} slices of the experts of '{layer.name}': its '{key}' of shape {tuple(shape)} does not divide; "
            "use slices=1"
        )
    return dim, spans


def _unsliceable(module: Any) -> str:
    """Return why no part of these experts can be an expert of its own, "" where one can."""
    if not hasattr(module, "has_bias"):  # transformers says by these flags which dimension is the intermediate size
        return f"a {type(module).__name__} does not say what its intermediate size is, as experts of transformers do"
    if module.has_bias:
        return "its experts have biases, which slices would add several times"
    return "its experts end with a norm, which needs the sum of all slices" if module.has_post_expert_norm else ""
