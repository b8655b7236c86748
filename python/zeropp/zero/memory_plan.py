# SPDX-License-Identifier: Apache-2.0
"""Estimate what a run will hold and move, before it runs: ``zeropp.estimate(model, config, ranks=8)``.

The model may be on the meta device, so it may have any size. The code of ``prepare`` chooses the units, and the same
arithmetic pads them, so states agree with ``zeropp.memory`` to within
rounding. Activations are not in it.

Formulas (Rajbhandari et al. 2020; N ranks, Psi = bytes of all parameters, f = (N-1)/N), per rank:

    params     Psi           stage 3: Psi / N
    grads      Psi           stages 2, 3: Psi / N
    master     4 a parameter in 16 bit, optimizer: 4 a state and parameter (bf16: 2, int8: 1 + 4/256);    stages 1 to 3: / N
    gathered   whole units beside the shards (stage 3 without a shared copy)
    wire       stages 0 to 2: 2 f Psi; stage 3: 3 f Psi; stage 3 with one shared copy a host: f Psi

With ``Offload(params="nvme")`` one of the ranks of a host reads each unit where it is used, in forward and in backward, so
on average a rank reads 2 Psi / N, and each rank reads and writes its shard for the step (16 bit: writes only, the
master has the values). Gradients on NVMe are written in each of n backwards and read in all but the first, for the
norm and for the step; with a step inside the backward n - 1 times each, and for neither.

With ``Precision(stored=...)``, for a model that is only evaluated, the matrices of linear layers and experts count as their codes and
scales, NVMe is read once in a forward, each host has a copy, and nothing crosses the network.

Over H hosts of L ranks a gather brings (H-1) shards over the network, a reduction as much, stage 0's 2 (H-1)/H of a
rank's L-th part (docs/design/0016); parameters on NVMe lie in a file of each rank's own, and are gathered.

With ``Comm(params=..., grads=...)`` a quantised copy travels: b bits an element and 4 bytes a block. A shard is held with
its copy beside it (docs/design/0015).
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeropp import _C, compat
from zeropp.config import TORCH_DTYPES, Config, Experts, as_config, with_tiers
from zeropp.errors import ConfigError, counted, shown, what_it_is
from zeropp.parallel.parts import MeshSizes, between_ranks, mesh_sizes, sharers_in, slices_of, stage_of
from zeropp.zero import device_plan
from zeropp.zero.formulas import (
    READ_AHEAD_BYTES,
    UnitSizes,
    delayed_bytes,
    elem_bytes,
    has_master,
    in_pages,
    loads_units,
    model_states,
    pools_grads,
    read_ahead_bytes,
    shares_host_copy,
    split_units,
    states_on_host,
    tier_buffers,
    tier_of,
    wire_bytes,
)  # fmt: skip
from zeropp.zero.model.accelerator import check_accelerator, check_experts, device_of
from zeropp.zero.model.spread import mark_tiers
from zeropp.zero.model.units import UnitPlan, numbers, plan_units, refuse_lazy
from zeropp.zero.model_state import CPU, has_params_on_host, shards_on_device
from zeropp.zero.offload import weight_quant

STATES = {
    "AdamW": 2, "Adam": 2, "LAMB": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adadelta": 2, "Lion": 1, "Adagrad": 1,
    "RMSprop": 1, "SGD": 0, "SGD with momentum": 1, "none": 0,
}  # fmt: skip
"""Values that each optimizer keeps a parameter."""

_SMALL_BYTES = 32 << 10  # of an all-reduce that every host sums whole (csrc/comm/tcp/hier_reduce.c)


@dataclass(frozen=True)
class _Run:
    """A run: its configuration, its ranks and hosts, and its kind of step."""

    config: Config
    ranks: int
    hosts: int
    optimizer: str
    device: torch.device = CPU
    """Where units are whole."""

    @property
    def shards_on_device(self) -> bool:
        """True if an accelerator holds the shards, and steps them."""
        return shards_on_device(self.config, self.device)

    @property
    def offloads(self) -> bool:
        """True if shards are on the host of an accelerator."""
        return self.device.type != "cpu" and not self.shards_on_device

    @property
    def by_nccl(self) -> bool:
        """True if NCCL moves the shards of accelerators, as far as the configuration says so."""
        return self.ranks > 1 and self.shards_on_device and (self.hosts > 1 or self.config.comm.gather == "nccl")

    @property
    def alone(self) -> bool:
        """True if gradients are not reduced: one rank, whose shards are where it computes."""
        return self.ranks == 1 and not self.offloads

    @property
    def steps_whole(self) -> bool:
        """True if each rank steps all of a unit."""
        return self.config.stage == 0 or self.ranks == 1

    @property
    def moves_units(self) -> bool:
        """True if units that are sharded in memory are gathered where they are needed."""
        return self.config.stage == 3 and (self.ranks > 1 or self.offloads) and not self.host_copy

    @property
    def host_copy(self) -> bool:
        """True if the ranks of a host share one copy of the parameters."""
        return self.device.type == "cpu" and shares_host_copy(self.config, self.ranks, self.hosts)

    @property
    def sharers(self) -> int:
        """Return how many ranks have one copy of what is loaded together."""
        return self.ranks if self.config.stored_name is None else self.ranks // self.hosts

    def sharers_of(self, unit: _Sizes) -> float:
        """Return how many of them have one copy of a unit together, of which other ranks may have other parts."""
        return self.sharers * unit.ranks / self.ranks

    def of(self, plan: UnitPlan) -> _Run:
        """Return the run as those ranks see it that partition a unit together."""
        parts = max(1, plan.parted)
        here = self.ranks // self.hosts  # neighbours have different parts
        hosts = self.hosts if parts <= here else self.hosts * here // parts
        return dataclasses.replace(self, ranks=self.ranks // parts, hosts=max(1, hosts))

    def on_nvme(self, *kinds: str) -> bool:
        """Return True if any of these kinds is on NVMe."""
        return any(tier_of(self.config, kind).kind == "nvme" for kind in kinds)

    def fraction(self, kind: str) -> float:
        """Return the share of a kind that is offloaded."""
        return float(tier_of(self.config, kind).fraction)


@dataclass(frozen=True)
class _Sizes(UnitSizes):
    """One unit: its plan, and the bytes of what moves."""

    plan: UnitPlan
    ranks: int
    """How many partition it."""
    hosts: int
    """On how many hosts they are."""
    shard_bytes: int
    moves: bool
    """True if its values are gathered where they are needed, and not loaded."""
    params_wire_bytes: int
    """What one shard takes on its way to a rank that gathers it."""
    grads_wire_bytes: int
    """What the gradients of one shard take on their way to the rank that owns it."""

    @property
    def grad_shard_bytes(self) -> int:
        return self.shard_bytes // self.param_bytes * self.grad_bytes

    @property
    def bucket_bytes(self) -> int:
        return _bucket_bytes(self.whole_bytes // self.param_bytes, self.grad_bytes, self.plan)


def estimate(
    model: nn.Module,
    config: Config | str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    ranks: int | None = None,
    hosts: int = 1,
    optimizer: str = "AdamW",
    tokens: int | None = None,
    tflops: float | None = None,
    mesh: Any = None,
    micro_batches: int = 1,
    schedule: Any = None,
    sequence: int | None = None,
) -> dict[str, Any]:
    """Return bytes that each rank will hold and move; nothing is prepared or allocated.

    Args:
        model: plain, on any device, also meta.
        config: as for :func:`zeropp.prepare`: a :class:`zeropp.Config`, a dict, JSON text or a path; default stage 3.
        ranks: how many, on all hosts together; with ``mesh`` it may be left out.
        hosts: on how many of them, each with as many ranks.
        optimizer: one of ``zeropp.zero.memory_plan.STATES``, such as "AdamW", "SGD with momentum", "none" (evaluation only).
        tokens: tokens (rows of the batch, for other models) a rank and step; with ``tflops``, which 10^12 operations a
            second a rank's computation reaches, the bandwidths are estimated too.
        mesh: other dimensions than data, as ``{"dp": 4, "tp": 2}`` (the last one of neighbouring ranks) or a DeviceMesh. Slices follow
            transformers' plan, stages :func:`zeropp.parallel.cut`.
        micro_batches: of a step. In a pipeline whole gradients wait for the last one (``waiting``).
        schedule: torch's, by class or name; 1F1B.
        sequence: tokens of a micro-batch, on all ranks of sp: ``traffic`` then has what they receive for ``pipeline``, ``tensor`` and
            ``sequence``, too.

    Returns:
        With a mesh, what the fullest stage of the pipeline holds on its first rank of tp, and ``stages``: the sum of ``cpu`` of each. Else:
        ``{"cpu": {kind: bytes}, "nvme": {kind: bytes}, "parameters": n, "units": n, "largest_unit": bytes,
        "traffic": {"gather": bytes, "reduce": bytes, "nvme": bytes}, "bandwidth": {...}}``; with several hosts ``traffic`` has also
        ``network``: what of it a rank receives from other hosts. Kinds: ``params``, ``grads``,
        ``master``, ``optimizer``; ``gathered`` (memory for whole units beside the shards) and ``buckets`` (gradients on
        their way: at most); ``autograd`` (gradients of the two largest parameters, before they are in a bucket);
        ``tier_buffers`` (with something on NVMe: what a step streams through, and shards of gradients that wait for
        the next backward); with ``step_in_backward`` the ``grads`` of two units; ``delayed`` (with
        ``delayed_update``: new values and gradients of the update under way); ``expert_cache`` (of ``Experts(cache=)``). Where a tier has several folders,
        ``folders`` says the bytes in each (``{folder: bytes}``), and each moves its share of ``traffic["nvme"]``.
        With ``Config.experts`` also ``experts``: ``parameters`` of all of them, and ``of_a_token`` of those that one chooses; ``states``:
        bytes of model states of experts, of which ranks have different ones, on one rank; ``token_bytes`` that a token moves in a forward
        to the ranks of its experts and back, ``weight_bytes`` that a rank would gather in their place, and ``crossing``: tokens a rank at
        which both are equal.
        ``traffic``: bytes a rank reads from peers, and reads and writes on NVMe, in one step of one micro-batch; of
        gradients on NVMe in all ``accumulate`` of a step; of parameters on NVMe on average over the ranks, as long as
        they are at the same unit. ``bandwidth``: bytes/s at which each of them takes as long as the computation does:
        with that much, what overlaps is hidden; what does not (NVMe inside the step) doubles the step, and ten times
        as much costs a tenth.

        With a model that is to compute on a GPU (``Config.device``, else as ``prepare`` chooses it) ``device`` has what is there, and
        ``pinned``, where shards are on the host, what is page-locked, of which ``page_locked`` is all that this rank locks: the shards
        of all ranks, and its own buckets.

    Raises:
        zeropp.ConfigError: something that :func:`prepare` would refuse, or that cannot be estimated yet.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"estimate: model is {what_it_is(model)}; wanted a torch.nn.Module, which may be on the meta device"
        )
    refuse_lazy(model, "estimate")
    config = as_config(config, "estimate")
    device = device_of(model, config)
    check_accelerator(config, device, None, optimizer != "none")
    if mesh is not None:
        sizes = mesh_sizes(mesh, "estimate")
        if ranks not in (None, sizes.ranks):
            raise ConfigError(
                f"estimate: ranks {shown(ranks)}, and the mesh {sizes.sizes} has {sizes.ranks}; leave ranks out"
            )
        for name, value in (("micro_batches", micro_batches), ("sequence", sequence or 1)):
            _check_count(name, value)
        _check(config, sizes.ranks, hosts, optimizer, tokens, tflops, _job_facts(config, sizes))
        return _of_mesh(model, sizes, config, hosts, optimizer, (tokens, tflops), (micro_batches, schedule, sequence))
    if (micro_batches, schedule, sequence) != (1, None, None):
        raise ConfigError(
            "estimate: micro_batches, schedule and sequence belong to a mesh; give mesh=, or leave them out"
        )
    if ranks is None:
        raise ConfigError("estimate: neither ranks nor mesh is given; wanted one of them")
    _check(config, ranks, hosts, optimizer, tokens, tflops)
    answer = _of_ranks(model, _Run(config, ranks, hosts, optimizer, device), tokens, tflops)
    del answer["gradients"]
    return answer


def _of_mesh(
    model: nn.Module, sizes: MeshSizes, config: Config, hosts: int, optimizer: str, speed: tuple[Any, Any],
    step: tuple[int, Any, int | None],
) -> dict[str, Any]:  # fmt: skip
    """Return what the fullest rank of a mesh holds; see :func:`estimate`."""
    micro_batches, schedule, sequence = step
    run = _Run(config, sizes.data, sizes.data_hosts(sizes.ranks // hosts), optimizer, device_of(model, config))
    pipelined = sizes.size("pp") > 1
    if pipelined and config.experts is not None:
        importlib.import_module("zeropp.moe.experts").expert_layers(model)  # a stage may have none
    answers = []
    for stage in range(sizes.size("pp")):
        part = stage_of(model, stage, sizes, schedule)
        found = _of_ranks(part, run, *speed, sizes)
        if pipelined and sizes.data == 1:  # what autograd adds up lies beside what the step reads
            _states_tier(found)["grads"] += found["gradients"]
        elif pipelined and micro_batches > 1 and config.stage >= 2:
            _states_tier(found)["waiting"] = found["gradients"]
        found["traffic"]["gather"] *= micro_batches
        if sequence is not None:
            _add_rows(found, part, run, sizes, sequence * micro_batches)
        answers.append(found)
    answer = max(answers, key=in_memory)
    answer.pop("gradients", None)
    if sequence is not None:
        answer["traffic"].update(between_ranks(model, sizes, sequence, micro_batches, _row_elem_bytes(model, config)))
    return {**answer, "stages": [in_memory(found) for found in answers]}


def _row_elem_bytes(model: nn.Module, config: Config) -> int:
    """Return the bytes of an element of the activations that ranks send each other."""
    return 2 if config.dtype_name in ("bf16", "fp16") else max(one.element_size() for one in model.parameters())


def _add_rows(answer: dict[str, Any], model: nn.Module, run: _Run, sizes: MeshSizes, tokens: int) -> None:
    """Add the rows that ranks with different experts send each other in a step of so many tokens of all ranks of sp."""
    division = _division(model, run, sizes)
    if division is None:
        return
    sharers, _ = _sharers(run.config, sizes)
    own, elem_bytes = tokens / sizes.size("sp", "cp"), _row_elem_bytes(model, run.config)
    received = importlib.import_module("zeropp.moe.crossing").received_bytes(model, division, own, sharers, elem_bytes)
    answer["traffic"]["experts"] = round(received)


def _of_ranks(
    model: nn.Module, run: _Run, tokens: int | None, tflops: float | None, sizes: MeshSizes | None = None
) -> dict[str, Any]:
    """Return what each of so many data ranks holds of a model, or of its part on the first rank of tensor parallelism, and the bytes of
    whole gradients."""
    division = _division(model, run, sizes)
    run = dataclasses.replace(run, config=with_tiers(run.config))
    config = run.config
    plans = _plans(model, config, sizes, division)
    all_units = [_sizes(plan, run) for plan in plans]
    units, exact_bytes = _held_as_values(all_units, run)
    held = _held(model, units, run)
    in_file, delayed = _offloaded(model, units, run, held, exact_bytes)
    parameters = sum(plan.numel * max(1, plan.parted) for plan in plans)
    answer: dict[str, Any] = {
        **_by_tier(all_units, held, run), "nvme": in_file, "parameters": parameters, "units": len(plans),
        "largest_unit": max(unit.whole_bytes for unit in all_units), "traffic": _all_traffic(model, units, run, in_file),
    }  # fmt: skip
    if division is not None:
        answer["experts"] = _experts(model, division, units)
        answer["cpu" if run.device.type == "cpu" else "device"].update(division.cache_held)
    answer["gradients"] = sum(unit.plan.numel * unit.grad_bytes for unit in all_units if unit.trainable)
    if any(len(getattr(config.offload, kind).folders) > 1 for kind in ("params", "grads", "optimizer")):
        answer["folders"] = _folders(config, in_file, delayed)
    if tokens is not None and tflops is not None:
        _add_speed(answer, tokens, tflops, _sharers(config, sizes)[1])
    return answer


def _by_tier(units: list[_Sizes], held: dict[str, int], run: _Run) -> device_plan.Tiers:
    """Return what is held by the tier where it is held."""
    if run.device.type == "cpu":
        return {"cpu": held}
    if run.offloads:
        return device_plan.beside(units, held, run.config, run.ranks, run.hosts, run.device)
    there = {
        "params": device_plan.params_bytes(units),
        "gathered": device_plan.gathered_bytes(units, run.config, run.device),
        "buckets": device_plan.bucket_bytes(units, run.config, run.ranks),
    }
    if run.by_nccl:
        there["params"] += device_plan.came_params_bytes(units)
        there["buckets"] += device_plan.came_bytes(units, run.config)
    if run.ranks > 1 and run.config.step_in_backward:  # two places, each for any unit's
        grads = [unit.grads_bytes for unit in units if unit.trainable]
        there["grads"] = min(2, len(grads)) * round(max(grads, default=0))
    if run.config.stage <= 1 and run.ranks > 1:  # they are the buckets
        there["grads"] = sum(device_plan.sent_bucket_bytes(unit, run.config) for unit in units if unit.trainable)
    return _with_host({**held, **there}, units, run)


def _with_host(there: dict[str, int], units: list[_Sizes], run: _Run) -> device_plan.Tiers:
    """Return what is held by tier, of all that is on the device but what units of experts have in memory of the host."""
    pinned = states_on_host((unit.plan.on_host, unit) for unit in units)
    if not pinned:
        return {"device": there, "cpu": {}}
    rest = {kind: size - pinned.get(kind, 0) for kind, size in there.items()}
    pinned["page_locked"] = sum(pinned.values()) + pinned.get("params", 0) * (run.ranks - 1)
    return {"device": rest, "pinned": pinned, "cpu": {}}


def in_memory(answer: dict[str, Any]) -> int:
    """Return the bytes of an answer of :func:`estimate` that are in memory, of a device or of the host; not those that ``page_locked``
    counts again."""
    tiers = (answer.get(tier, {}) for tier in ("cpu", "device", "pinned"))
    return sum(size for kinds in tiers for kind, size in kinds.items() if kind != "page_locked")


def _states_tier(answer: dict[str, Any]) -> dict[str, int]:
    """Return the kinds of the tier that has the gradients."""
    tiers = (answer.get(tier, {}) for tier in ("cpu", "device", "pinned"))
    found: dict[str, int] = next(kinds for kinds in tiers if "grads" in kinds)
    return found


def _add_speed(answer: dict[str, Any], tokens: int, tflops: float, sharers: int) -> None:
    """Add the seconds of a step's computation, and the bandwidth at which what moves takes as long. ``sharers``: ranks of other slices
    that compute the same tokens, each with experts of its own."""
    experts = answer.get("experts")
    idle = 0 if experts is None else (experts["parameters"] - experts["of_a_token"]) / sharers
    seconds = 6 * (answer["parameters"] - idle) * tokens / (tflops * 1e12)  # 2 in forward, 4 in backward
    answer["compute_seconds"] = seconds
    answer["bandwidth"] = {kind: value / seconds for kind, value in answer["traffic"].items()}


def _experts(model: nn.Module, division: Any, units: list[_Sizes]) -> dict[str, Any]:
    """Return the figures of a model's experts; see :func:`estimate`."""
    theirs = [unit for unit in units if division.has_experts(unit.plan.params)]
    elem_bytes = max(unit.param_bytes for unit in theirs)
    figures = importlib.import_module("zeropp.moe.crossing").exchange_figures(model, division, elem_bytes)
    states = model_states([unit for unit in theirs if unit.plan.parted > 0], False)
    return {**figures, "states": sum(states.values())}


def _sharers(config: Config, sizes: MeshSizes | None) -> tuple[int, int]:
    """Return how many ranks route the same tokens to experts, and how many of these are one data rank."""
    return sharers_in(sizes, config.experts.shared_by if isinstance(config.experts, Experts) else None)


def _division(model: nn.Module, run: _Run, sizes: MeshSizes | None) -> Any:
    """Return how ``Config.experts`` would divide the model's experts; None: it does not. As in ``prepare``, what knows experts is loaded
    where there are some."""
    if run.config.experts is None:
        return None
    check_experts(run.config, run.device, run.ranks)
    sharers = _sharers(run.config, sizes)
    stages = 1 if sizes is None else sizes.size("pp")
    planned = importlib.import_module("zeropp.moe.crossing").planned_division
    return planned(model, run.config, run.ranks, *sharers, of_stage=stages > 1)


def _plans(model: nn.Module, config: Config, sizes: MeshSizes | None, division: Any) -> list[UnitPlan]:
    """Return the units that ``prepare`` would make."""
    dtype = None if config.dtype_name is None else TORCH_DTYPES[config.dtype_name]
    own, apart = ({}, ()) if division is None else (division.parts, division.apart)
    parts = own if sizes is None else {**slices_of(model, sizes, own), **own}
    plans = plan_units(model, config.units, dtype, config.ignored, parts, apart)
    mark_tiers(plans, division)
    if not plans:
        raise ConfigError(f"estimate: {type(model).__name__} has no parameters, so there is nothing to partition")
    if config.stored_name is not None:
        for plan in plans:
            plan.trainable = False
    return plans


def _held(model: nn.Module, units: list[_Sizes], run: _Run) -> dict[str, int]:
    """Return the bytes of each kind, as if nothing were in files but the parameters of units that are loaded."""
    config = run.config
    pooled = pools_grads(config.step_in_backward, run.on_nvme("grads"), config.stage, run.ranks)
    held = {
        **model_states(units, pooled), "gathered": _gathered(model, units, run), "buckets": _buckets(units, run),
        "autograd": _autograd(units, run),
    }  # fmt: skip
    if run.on_nvme("params", "grads", "optimizer"):
        nothing = run.optimizer == "none"
        moments = STATES[run.optimizer]
        inside = config.step_in_backward
        held["tier_buffers"] = 0 if nothing else tier_buffers(units, config.offload, moments, inside=inside)
    return held


def _offloaded(
    model: nn.Module, units: list[_Sizes], run: _Run, held: dict[str, int], exact_bytes: int
) -> tuple[dict[str, int], dict[str, float]]:
    """Move what lies in files out of ``held``: return its bytes by kind, and those of a delayed update by the kind of their file."""
    in_file: dict[str, int] = {}
    delayed = dict.fromkeys(("params", "grads"), 0.0)
    if run.config.offload.delayed_update is not None:
        grads_share = run.fraction("grads") if run.on_nvme("grads") else 0.0
        held["delayed"], delayed = delayed_bytes(units, run.fraction("params"), grads_share, alone=run.alone)
        if round(sum(delayed.values())):
            in_file["delayed"] = round(sum(delayed.values()))
    if loads_units(run.config):
        values = _kept_by_rank(model, [unit for unit in units if unit.in_file], run)
        moving = _kept_by_rank(model, _loaded(units), run)
        in_file["params"] = round(run.fraction("params") * moving) if run.on_nvme("params") else 0
        held["params"] += exact_bytes // run.sharers + round(values) - in_file["params"]
    for kind, tier in (("grads", "grads"), ("master", "optimizer"), ("optimizer", "optimizer")):
        if run.on_nvme(tier):
            held[kind], in_file[kind] = split_units(units, held, kind, run.fraction(tier))
    return in_file, delayed


def _loaded(units: list[_Sizes]) -> list[_Sizes]:
    """Return the units that a file has something of."""
    return [unit for unit in units if unit.in_file and not unit.held]


def _kept_by_rank(model: nn.Module, units: list[_Sizes], run: _Run) -> float:
    """Return a rank's part of the bytes that units which are loaded take where they are loaded from."""
    return sum(_kept_bytes(model, unit, run.config) / run.sharers_of(unit) for unit in units)


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 62:
        raise ConfigError(f"estimate: {name} {shown(value)} is not allowed; wanted a whole number above 0")


def _check(
    config: Config, ranks: int, hosts: int, optimizer: str, tokens: int | None, tflops: float | None,
    job: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    for name, value in (("ranks", ranks), ("hosts", hosts), ("tokens", 1 if tokens is None else tokens)):
        _check_count(name, value)
    if ranks % hosts:
        raise ConfigError(
            f"estimate: {counted(ranks, 'rank')} on {counted(hosts, 'host')} is not estimated yet; wanted as many on each"
        )
    if tflops is not None and not 0 < tflops < float("inf"):
        raise ConfigError(f"estimate: tflops {tflops!r} is not allowed; wanted a number above 0")
    if (tokens is None) != (tflops is None):
        raise ConfigError("estimate: tokens and tflops go together; give both, or none")
    if optimizer not in STATES:
        raise ConfigError(f"estimate: optimizer {optimizer!r} is not known; wanted one of {', '.join(STATES)}")
    said = compat.clash({**_facts(config, optimizer), **(job or {})})
    if said:
        raise ConfigError(f"estimate: {said}")


def _job_facts(config: Config, sizes: MeshSizes) -> dict[str, Any]:
    """Return what experts on several ranks depend on where only some ranks partition one model."""
    if config.experts is None or sizes.data * sizes.size("pp") == sizes.ranks:
        return {}
    facts: dict[str, Any] = {"Config.experts": config.experts, "Experts.shared_by": None}
    if isinstance(config.experts, Experts):
        facts["Experts.shared_by"] = config.experts.shared_by
    in_stage = sizes.ranks // sizes.size("pp")
    return {**facts, compat.IN_STAGE: compat.Named(in_stage, f"a model on some of {in_stage} ranks")}


def _facts(config: Config, optimizer: str) -> dict[str, Any]:
    """Return what an estimate depends on. It may be asked of combinations that cannot be trained."""
    facts: dict[str, Any] = {"Precision.stored": config.stored_name, "Precision.state": config.state_name}
    if optimizer != "none":
        facts[compat.OPTIMIZER] = compat.Named(optimizer.partition(" ")[0], f"optimizer {optimizer}")
    if optimizer == "SGD":
        facts["SGD.momentum"] = compat.Named(0, "SGD without momentum")
    return facts


def _sizes(plan: UnitPlan, run: _Run) -> _Sizes:
    config, alone = run.config, run.alone
    run = run.of(plan)
    ranks = run.ranks
    elems, shard_elems = _C.unit_layout([numbers(p) for p in plan.params], plan.dtype.itemsize, ranks)
    small = plan.replicates(config.units)
    in_file = loads_units(config) and not small
    moves = has_params_on_host(plan.on_host, config, run.device) or (run.moves_units and not (small or in_file))
    own_elems = elems if run.steps_whole else shard_elems
    stays, travels = config.gradient_dtypes(plan.dtype)
    params_wire_bytes = _wire_bytes(config.comm.params, plan.dtype, shard_elems, run)
    masters = plan.trainable and run.optimizer != "none" and has_master(plan.dtype, config)
    whole_bytes, shard_bytes = elems * plan.dtype.itemsize, shard_elems * plan.dtype.itemsize
    return _Sizes(
        plan.trainable, in_file, plan.held, masters, whole_bytes,
        _params_bytes(run, whole_bytes, shard_bytes, params_wire_bytes, in_file, moves),
        _grads_bytes(alone, config, plan, elems, shard_elems, stays.itemsize),
        own_elems, plan.dtype.itemsize, stays.itemsize, _moment_bytes(plan, run),
        plan, ranks, run.hosts, shard_bytes, moves, params_wire_bytes,
        _wire_bytes(config.comm.grads if config.stage >= 2 else "exact", travels, shard_elems, run),
    )  # fmt: skip


def _moment_bytes(plan: UnitPlan, run: _Run) -> float:
    """Return the bytes of all moments of an element."""
    each = 8 if plan.dtype == torch.float64 else elem_bytes(run.config.state_name)
    return STATES[run.optimizer] * each if plan.trainable else 0


def _wire_bytes(kind: str, exact: torch.dtype, shard_elems: int, run: _Run) -> int:
    """Return what a shard takes on its way to another rank."""
    return wire_bytes("exact" if run.ranks == 1 else kind, exact, shard_elems, run.config)


def _params_bytes(run: _Run, whole: int, shard: int, wire: int, in_file: bool, moves: bool) -> int:
    """Return the bytes of one unit's parameters that a rank holds between passes."""
    if in_file:
        return 0
    if run.host_copy:
        return whole // run.ranks
    if run.offloads:
        return shard
    if not moves:
        return whole
    if run.hosts == 1 or run.shards_on_device:  # between hosts of CPUs, images are made on the way
        return shard + (wire if wire < shard else 0)
    return shard + (whole // (run.ranks // run.hosts) if run.config.comm.secondary_shard else 0)


def _grads_bytes(alone: bool, config: Config, plan: UnitPlan, elems: int, shard_elems: int, grad_bytes: int) -> int:
    """Return the bytes of one unit's reduced gradients that a rank holds."""
    if alone:
        return plan.numel * grad_bytes
    return _bucket_bytes(elems, grad_bytes, plan) if config.stage <= 1 else shard_elems * grad_bytes


def _bucket_bytes(elems: int, grad_bytes: int, plan: UnitPlan) -> int:
    return (elems * grad_bytes + len(plan.params) + 63) // 64 * 64


def _folders(config: Config, in_file: dict[str, int], delayed: dict[str, float]) -> dict[str, int]:
    """Return the bytes in each folder: every file is shared out over those of its tier. ``delayed``: those of a delayed update."""
    shares: dict[str, float] = {}
    for kind in ("params", "grads", "optimizer"):
        tier = getattr(config.offload, kind)
        size = in_file.get(kind, 0) + delayed.get(kind, 0.0) + (in_file.get("master", 0) if kind == "optimizer" else 0)
        for folder in tier.folders:
            shares[folder] = shares.get(folder, 0.0) + size / len(tier.folders)
    return {folder: round(share) for folder, share in shares.items()}


def _buckets(units: list[_Sizes], run: _Run) -> int:
    """Return the bytes of as many buckets as may wait, and one more that is being filled."""
    sizes = sorted((unit.bucket_bytes for unit in units if unit.trainable), reverse=True)
    if run.alone or run.config.stage <= 1 or not sizes:
        return 0
    bound = run.config.bucket_bytes or sum(sizes)
    return max(_most_within(sizes, bound), sizes[0])


def _most_within(sizes: list[int], bound_bytes: int) -> int:
    """Return the most that some of these buckets take together within the bound: only whole ones wait."""
    if sum(sizes) <= bound_bytes:
        return sum(sizes)
    align = max(64, bound_bytes >> 20)  # of the size of a bucket; with large bounds a millionth
    reached, bound = 1, (1 << bound_bytes // align + 1) - 1  # bit n: some of them take n * align bytes
    for size in sizes:
        reached |= reached << size // align & bound
    return (reached.bit_length() - 1) * align


def _autograd(units: list[_Sizes], run: _Run) -> int:
    """Return the bytes of one gradient that autograd makes, and of the one before, whose memory it has just let go of. One rank's own
    stay, and are counted where they are."""
    if run.ranks == 1 and not run.on_nvme("grads"):
        return 0
    sizes = [numbers(p) * unit.param_bytes for unit in units if unit.trainable for p in unit.plan.params]
    return sum(sorted(sizes)[-2:])


def _kept_bytes(model: nn.Module, unit: _Sizes, config: Config) -> int:
    """Return the bytes of a unit that is loaded, as they are kept where it is loaded from, on all ranks together."""
    if config.stored_name is None:
        return unit.whole_bytes
    quantised, bits = weight_quant.matrices(model), weight_quant.BITS[config.stored_name]
    params = ((p, numbers(p)) for p in unit.plan.params)
    return in_pages(weight_quant.kept_bytes(params, unit.param_bytes, quantised, bits))


def _held_as_values(units: list[_Sizes], run: _Run) -> tuple[list[_Sizes], int]:
    """Return (the other units, bytes of those that are held as they are) where weights in fewer bits, on "cpu", are a fraction of all:
    whole units, the first ones (csrc/zero/offload/unit_file_qcopy.c)."""
    if run.config.stored_name is None or run.on_nvme("params"):
        return units, 0
    sizes = [in_pages(unit.whole_bytes) if unit.in_file else 0 for unit in units]
    capacity, kept, held = (1 - run.fraction("params")) * sum(sizes), [], 0
    for unit, size in zip(units, sizes, strict=True):
        capacity -= size
        if unit.in_file and capacity >= 0:
            held += unit.whole_bytes
        else:
            kept.append(unit)
    return kept, held


def _gathered(model: nn.Module, units: list[_Sizes], run: _Run) -> int:
    """Return the most that is whole at once (the units of a module and of all that it stands in, and what is fetched ahead), or
    the slots that are kept warm for it, two of the largest unit: whichever is more."""
    triggered: dict[nn.Module, list[_Sizes]] = {}
    moving = [unit for unit in units if unit.moves] + _loaded(units)
    for unit in moving:
        for module in unit.plan.triggers:
            triggered.setdefault(module, []).append(unit)

    def most(module: nn.Module, open_bytes: int) -> int:
        open_bytes += sum(unit.whole_bytes for unit in triggered.get(module, ()))
        return max([open_bytes, *(most(child, open_bytes) for child in module.children())])

    ahead = _read_ahead(units, run)
    sizes = [unit.whole_bytes for unit in moving]
    whole = min(sum(sizes), max(most(model, 0), 2 * max(sizes, default=0)) + ahead)
    if not any(unit.in_file for unit in units):
        return whole
    if run.config.stored_name is not None:
        return whole // (run.ranks // run.hosts)
    # The ranks of a host share what was read; over several hosts there is what a rank has read, too, until it is gathered.
    readers = min(unit.ranks for unit in units if unit.in_file)
    return whole // readers if run.hosts == 1 else whole + _shards_under_way(units, run, ahead // run.ranks)


def _shards_under_way(units: list[_Sizes], run: _Run, ahead_bytes: int) -> int:
    """Return the most that a rank has read of its own file and is not gathered yet: all but the unit in use, if there is room."""
    sizes = [in_pages(unit.shard_bytes) for unit in _loaded(units)] or [0]
    most = max(max(sizes), min(sum(sizes) - min(sizes), ahead_bytes))
    return min(most, round(run.fraction("params") * sum(sizes)))


def _read_ahead(units: list[_Sizes], run: _Run) -> int:
    """Return the most that is fetched ahead of need, or kept for the backward."""
    if isinstance(run.config.prefetch, int):
        return run.config.prefetch
    loaded = [unit.whole_bytes for unit in units if unit.in_file]
    if loaded:
        return read_ahead_bytes(loaded)
    return READ_AHEAD_BYTES if run.hosts > 1 else 0


def _kept(units: list[_Sizes], run: _Run) -> int:
    """Return the bytes of units in a file that the forward ends with: they are kept for the backward, which begins with them."""
    capacity, kept = _read_ahead(units, run) if run.hosts == 1 else 0, 0
    for unit in reversed(_loaded(units)):
        if kept + unit.whole_bytes > capacity:
            break
        kept += unit.whole_bytes
    return kept


def _all_traffic(model: nn.Module, units: list[_Sizes], run: _Run, in_file: dict[str, int]) -> dict[str, int]:
    """Return the bytes that a rank moves in a step, by way."""
    traffic = {**_traffic(units, run), "nvme": _nvme_traffic(model, units, run, in_file)}
    return {**traffic, "network": _network_traffic(units, run)} if run.hosts > 1 else traffic


def _traffic(units: list[_Sizes], run: _Run) -> dict[str, int]:
    gather, reduce, stage = 0, 0, run.config.stage
    for unit in units:
        ranks = unit.ranks
        others = unit.shard_bytes * (ranks - 1)
        if unit.moves:
            # once for each place in forward, once in backward
            gather += unit.params_wire_bytes * (ranks - 1) * (len(unit.plan.triggers) + 1)
        elif unit.trainable and stage > 0 and not run.host_copy and not unit.in_file:
            gather += others  # after the step
        if unit.trainable:
            reduce += (unit.grads_wire_bytes + (unit.grad_shard_bytes if stage == 0 else 0)) * (ranks - 1)
    return {"gather": gather, "reduce": reduce}


def _network_traffic(units: list[_Sizes], run: _Run) -> int:
    """Return the bytes that a rank receives from other hosts in a step. Each host has a copy of quantised weights."""
    if run.config.stored_name is not None:
        return 0
    config, total = run.config, 0
    for unit in units:
        ranks, elsewhere = unit.ranks, unit.hosts - 1
        if unit.moves or unit.in_file:
            times = 1 if config.comm.secondary_shard else len(unit.plan.triggers) + 1
            total += elsewhere * unit.params_wire_bytes * times
        elif unit.trainable and config.stage > 0:
            total += elsewhere * unit.shard_bytes
        if unit.trainable and config.stage > 0:
            total += elsewhere * unit.grads_wire_bytes
        elif unit.trainable:
            sent = unit.grads_wire_bytes * ranks
            total += elsewhere * sent if sent <= _SMALL_BYTES else 2 * elsewhere * sent // ranks
    return total


def _nvme_traffic(model: nn.Module, units: list[_Sizes], run: _Run, in_file: dict[str, int]) -> int:
    """Return the bytes read and written by one rank: states once each way, parameters where they are used, gradients in each backward (but in the
    first nothing is read), for the norm and for the step; a step inside the backward moves none in the last one and after it."""
    config = run.config
    if config.stored_name is not None:  # a forward reads each unit wherever it is used
        reads = sum(_kept_bytes(model, unit, config) * len(unit.plan.triggers) for unit in units if unit.in_file)
        return round(run.fraction("params") * reads / run.sharers) if in_file["params"] else 0
    gradients = 2 * config.accumulate + (-2 if config.step_in_backward else 1)
    total = 2 * (in_file.get("master", 0) + in_file.get("optimizer", 0)) + gradients * in_file.get("grads", 0)
    return total + round(run.fraction("params") * _params_traffic(units, run))


def _params_traffic(units: list[_Sizes], run: _Run) -> float:
    """Return the bytes that one rank moves of the units in a file, if all of them lie there: their uses, and their step."""
    used = stepped = 0.0
    for unit in _loaded(units):
        used += unit.whole_bytes * (len(unit.plan.triggers) + 1) / unit.ranks
        if unit.trainable and run.optimizer != "none":
            once = run.config.step_in_backward or unit.has_master
            stepped += (1 if once else 2) * unit.whole_bytes / unit.ranks
    if run.optimizer != "none":
        used -= _kept(units, run) / run.ranks
    return used + stepped
