# SPDX-License-Identifier: Apache-2.0
"""Choose how a training is laid out over ranks, before any of them runs: ``zeropp.layout(model, ranks=64, hosts=8, ...)``.

Every way to write the ranks as dp x sp x tp x pp is tried with each stage of ZeRO, tier of the optimizer's states, recomputation
and size of micro-batch; for a model with experts also with each number ep of ranks that hold different ones. Of those that fit
into memory the fastest wins; within 2 percent of it the one with the fewest dimensions. Times rank layouts and are no promise.
What the model of a step leaves out is in docs/design/0045-layouts-by-arithmetic.md.

Bytes a rank (16-bit values, fp32 master and Adam; Psi parameters, N = dp sp data ranks, t = tp, p = pp; Rajbhandari et al. 2020):

    stage 1    4 Psi/(pt) + 12 Psi/(ptN)     stage 2    2 Psi/(pt) + 14 Psi/(ptN)     stage 3    16 Psi/(ptN)

Of experts, of which ep ranks hold different ones, a rank computes with 1/(p ep), and N t/ep ranks partition that (docs/moe.md):

    stage 1    4 Psi/(p ep) + 12 Psi/(ptN)   stage 2    2 Psi/(p ep) + 14 Psi/(ptN)   stage 3    16 Psi/(ptN)

Seconds a step: operations (6 Psi + 6 layers width tokens) a token, where of the experts those count that a token chooses; the
bubble (p-1)/M of them; what tp, sp, ep and stages send; what of ZeRO's gathers and reductions does not hide behind 0.8 of the
computation; the states' way through their tier; and the latency of every message that something waits for, as
benchmarks/scale.py counts them (docs/design/0046-what-grows-with-ranks.md).
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zeropp.config.values import nearest as close_name
from zeropp.errors import ConfigError, counted, shown

G = 1e9
LINKS = {"host": 100.0, "network": 25.0, "host_memory": 100.0, "nvme": 5.0}
"""10^9 bytes a second: between two ranks of a host; of a host's network; of a host's memory; of its disks."""
LATENCY = {"host": 2e-6, "network": 20e-6}
"""Seconds that a message takes, besides its bytes."""
NEAR = 1.02
"""Of layouts within this factor of the fastest, the simplest is chosen."""
_USABLE = 0.92  # of the memory of a rank; the rest is the runtime's
_HIDDEN = 0.8  # of the computation, behind which gathers and reductions hide
_LAYER_ACTIVATIONS = (
    34  # bytes a token and width, of 16-bit activations (Korthikanti et al. 2022, without attention's squares)
)
_ROW_ACTIVATIONS = 4  # bytes a width of a row that an expert reads: in, and out
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What configurations of transformers call the number of experts."""
_OFFLOAD = {"none": None, "cpu": "host_memory", "nvme": "nvme"}


@dataclass(frozen=True)
class ExpertFacts:
    """Hold the figures of those layers of experts that are alike."""

    layers: int
    experts: int
    choices: int
    """Experts that a token passes."""
    parameters: int
    """Of all experts of one layer."""


@dataclass(frozen=True)
class Facts:
    """Hold the figures of a transformer that a layout depends on."""

    parameters: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    vocabulary: int
    experts: tuple[ExpertFacts, ...] = ()

    @property
    def of_experts(self) -> int:
        """Return the parameters of all experts."""
        return sum(one.layers * one.parameters for one in self.experts)

    @property
    def of_a_token(self) -> float:
        """Return the parameters that a token passes."""
        idle = (one.layers * one.parameters * (1 - one.choices / one.experts) for one in self.experts)
        return self.parameters - sum(idle)

    @property
    def rows_of_experts(self) -> float:
        """Return the rows that experts read for a token, a layer of the model."""
        return sum(one.layers * one.choices for one in self.experts) / self.layers


@dataclass(frozen=True)
class Cluster:
    """Ranks and what is between them; ``memory`` and ``host_memory`` in bytes, ``links`` in bytes a second."""

    hosts: int
    per_host: int
    memory: float
    host_memory: float
    flops: float
    links: Mapping[str, float]

    @property
    def network(self) -> float:
        """The share of a host's network that a rank has."""
        return self.links["network"] / self.per_host


@dataclass(frozen=True)
class Layout:
    """One way to lay a training out, its bytes and its seconds.

    Attributes:
        dp, sp, tp, pp: ranks along each dimension.
        ep: ranks that hold different experts, ``Config(experts=ep)``, or with tp ``Experts(parallel=ep, shared_by="tp")``. 1: experts
            are partitioned as any parameter.
        stage, offload: of ZeRO; where the optimizer's states are: ``"none"`` (with the rank), ``"cpu"`` or ``"nvme"``.
        recompute: True if a layer's activations are computed again in the backward.
        micro_batch, micro_batches: sequences at one time on a data coordinate, and how many times a step.
        bytes: of a rank's memory, with activations.
        seconds: of a step; ``parts`` says of what.
        lost_by: why it was not chosen, such as ``"tp +1.70 s"``; empty for the one that was.
    """

    dp: int
    sp: int
    tp: int
    pp: int
    ep: int
    stage: int
    offload: str
    recompute: bool
    micro_batch: int
    micro_batches: int
    bytes: float = 0.0
    seconds: float = 0.0
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    lost_by: str = ""

    @property
    def mesh(self) -> dict[str, int]:
        """The dimensions with more than one rank, for ``init_device_mesh``, the last one of neighbours."""
        sizes = {"pp": self.pp, "dp": self.dp, "sp": self.sp, "tp": self.tp}
        return {name: size for name, size in sizes.items() if size > 1} or {"dp": 1}

    @property
    def simplicity(self) -> tuple[Any, ...]:
        """Fewer dimensions come first, of which a pipeline counts twice; then no offload, the lower stage, no recomputation."""
        dimensions = sum(size > 1 for size in (self.dp, self.sp, self.tp, self.pp, self.ep)) + (self.pp > 1)
        return dimensions, self.offload != "none", self.stage, self.recompute, self.seconds

    @property
    def family(self) -> tuple[Any, ...]:
        return self.tp > 1, self.pp > 1, self.sp > 1, self.ep > 1, self.stage, self.offload

    @property
    def expert_part(self) -> int:
        """Return on how many ranks of a stage a layer's experts are: those of ep, or the slices of tp."""
        return self.ep if self.ep > 1 else self.tp

    @property
    def expert_data(self) -> int:
        """Return how many ranks partition one part of the experts."""
        return self.dp * self.sp * self.tp // self.expert_part

    def __str__(self) -> str:
        sizes = " ".join(f"{name} {size}" for name, size in self.mesh.items())
        sizes += f" ep {self.ep}" * (self.ep > 1)
        more = [f"{self.offload} offload"] if self.offload != "none" else []
        more += ["recomputation"] if self.recompute else []
        return ", ".join([f"{sizes}, stage {self.stage}", *more, f"micro-batch {self.micro_batch}"])


class _Refused(Exception):
    """Says why a layout cannot be."""


def layout(
    model: Any,
    *,
    ranks: int,
    hosts: int = 1,
    memory: float,
    sequence: int,
    batch: int,
    tflops: float,
    links: Mapping[str, float] | None = None,
    host_memory: float | None = None,
    most: int = 6,
) -> list[Layout]:
    """Return the layout to choose, and the runners-up of other kinds with what each lost by; nothing is prepared or allocated.

    Args:
        model: a Hugging Face model, which may be on meta, or its configuration.
        ranks, hosts: how many ranks on all hosts together, as many on each.
        memory: bytes of a rank.
        sequence: tokens of a sequence.
        batch: sequences of a step, on all ranks.
        tflops: 10^12 operations a second that a rank's computation reaches.
        links: 10^9 bytes a second, by name, in place of :data:`LINKS`: ``host``, ``network``, ``host_memory``, ``nvme``.
        host_memory: bytes of a host, for states on the CPU; None: four times what its ranks have.
        most: how many are returned.

    Returns:
        Layouts, the chosen one first, the others by seconds.

    Raises:
        zeropp.ConfigError: nothing fits (with the nearest layout and what it is short of), an unknown link, or a model without the
            figures of a transformer.
    """
    counts = {"ranks": ranks, "hosts": hosts, "sequence": sequence, "batch": batch, "most": most}
    if not isinstance(links, Mapping | None):
        raise ConfigError(f"layout: links {shown(links)} is not allowed; wanted numbers by name: {', '.join(LINKS)}")
    strange = [name for name in links or () if name not in LINKS]
    if strange:
        raise ConfigError(f"layout: links has {strange[0]!r}; wanted {', '.join(LINKS)}{close_name(strange[0], LINKS)}")
    per_host_bytes = {} if host_memory is None else {"host_memory": host_memory}
    given = {f"links[{name!r}]": speed for name, speed in (links or {}).items()}
    _check(counts, {"memory": memory, "tflops": tflops, **per_host_bytes, **given})
    speeds = {name: G * (links or {}).get(name, usual) for name, usual in LINKS.items()}
    per_host = ranks // hosts
    bytes_a_host = 4 * memory * per_host if host_memory is None else host_memory
    cluster = Cluster(hosts, per_host, memory, bytes_a_host, tflops * 1e12, speeds)
    return _ranked(_facts_of(model), cluster, sequence, batch, most)


def _check(counts: Mapping[str, Any], amounts: Mapping[str, Any]) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"layout: {name} {shown(value)} is not allowed; wanted a whole number above 0")
    if counts["ranks"] % counts["hosts"]:
        hosts = counted(counts["hosts"], "host")
        raise ConfigError(f"layout: {counted(counts['ranks'], 'rank')} on {hosts}; wanted as many on each")
    for name, amount in amounts.items():
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 < amount < float("inf"):
            raise ConfigError(f"layout: {name} {shown(amount)} is not allowed; wanted a number above 0")


def _facts_of(model: Any) -> Facts:
    config = getattr(model, "config", model)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    missing = [name for name in names if not isinstance(getattr(config, name, None), int)]
    if missing:
        raise ConfigError(
            f"layout: {type(model).__name__} has no {missing[0]} in its configuration; wanted a transformers model or configuration with "
            f"{', '.join(names)}"
        )
    layers, width, heads, vocabulary = (getattr(config, name) for name in names)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if not hasattr(model, "parameters") and any(getattr(config, name, None) for name in _EXPERTS):
        model = _on_meta(model)
    facts = Facts(0, layers, width, heads, kv_heads, vocabulary)
    if not hasattr(model, "parameters"):
        return dataclasses.replace(facts, parameters=_parameters_of(config, facts))
    return dataclasses.replace(facts, parameters=sum(p.numel() for p in model.parameters()), experts=_experts_of(model))


def _parameters_of(config: Any, facts: Facts) -> int:
    """Return about how many parameters a model without experts will have."""
    width, heads = facts.width, facts.heads
    inner = getattr(config, "intermediate_size", None) or 4 * width
    head = getattr(config, "head_dim", None) or width // heads
    layer = 2 * width * head * (heads + facts.kv_heads) + 3 * width * inner
    return facts.layers * layer + 2 * facts.vocabulary * width


def _on_meta(config: Any) -> Any:
    """Return the causal language model of a configuration, on meta: how many experts are where is known by its modules alone."""
    transformers = importlib.import_module("transformers")
    try:
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise ConfigError(
            f"layout: transformers makes no causal language model of {type(config).__name__}, which has experts; give the model itself, on "
            "meta"
        ) from error


def _experts_of(model: Any) -> tuple[ExpertFacts, ...]:
    """Return the layers of experts that expert parallelism can divide, by kinds."""
    found = importlib.import_module("zeropp.moe.crossing").alike_layers(model)
    return tuple(ExpertFacts(layers, *kind) for kind, layers in found.items())


def _ranked(facts: Facts, cluster: Cluster, sequence: int, batch: int, most: int) -> list[Layout]:
    fits: list[Layout] = []
    short: list[tuple[float, str]] = []
    for one in _candidates(facts, cluster, batch):
        try:
            fits.append(_measured(one, facts, cluster, sequence))
        except _Refused as why:
            size = why.args[1] if len(why.args) > 1 else float("inf")
            short.append((size, f"{one}: {why.args[0]}"))
    if not fits:
        nearest = min(short)[1] if short else "no sizes multiply to the ranks"
        raise ConfigError(
            f"layout: nothing fits on {counted(cluster.hosts * cluster.per_host, 'rank')}; the nearest is {nearest}"
        )
    fastest = min(one.seconds for one in fits)
    chosen = min((one for one in fits if one.seconds <= NEAR * fastest), key=lambda one: one.simplicity)
    found, seen = [chosen], {chosen.family}
    for one in sorted(fits, key=lambda one: one.seconds):
        if one.family not in seen and len(found) < most:
            seen.add(one.family)
            found.append(dataclasses.replace(one, lost_by=_lost_by(one, chosen)))
    return found


def _lost_by(one: Layout, chosen: Layout) -> str:
    extra = {name: seconds - chosen.parts[name] for name, seconds in one.parts.items()}
    worst = max(extra, key=lambda name: extra[name])
    if one.seconds <= NEAR * chosen.seconds:
        return f"{one.seconds / chosen.seconds - 1:+.1%}, {one.simplicity[0]} dimensions to {chosen.simplicity[0]}"
    return f"{worst} {extra[worst]:+.2f} s"


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def _candidates(facts: Facts, cluster: Cluster, batch: int) -> Iterator[Layout]:
    ranks = cluster.hosts * cluster.per_host
    for tp in _divisors(ranks):
        for pp, sp in itertools.product(_divisors(ranks // tp), repeat=2):
            if (ranks // tp) % (pp * sp):
                continue
            dp = ranks // tp // pp // sp
            choices = itertools.product(
                _expert_ranks(facts, cluster, dp * sp, tp, pp), (1, 2, 3), _OFFLOAD, (False, True), (1, 2, 4, 8)
            )
            for ep, stage, offload, again, micro in choices:
                if batch % (dp * micro) == 0 and not (stage == 3 and dp * sp == 1):
                    yield Layout(dp, sp, tp, pp, ep, stage, offload, again, micro, batch // (dp * micro))


def _expert_ranks(facts: Facts, cluster: Cluster, data: int, tp: int, pp: int) -> list[int]:
    """Return the numbers of ranks that may hold different experts: they divide the ranks of a stage and the experts of each layer, hosts
    divide them or the other way round, and those of tp are among them."""
    if not facts.experts or pp > 1:
        return [1]
    found = [1]
    for ep in _divisors(data * tp):
        whole = all(one.experts % ep == 0 for one in facts.experts)
        if ep > 1 and ep % tp == 0 and whole and not (ep % cluster.per_host and cluster.per_host % ep):
            found.append(ep)
    return found


def _measured(one: Layout, facts: Facts, cluster: Cluster, sequence: int) -> Layout:
    """Return a layout with its bytes and seconds, or raise why it cannot be."""
    _require_shapes(one, facts, cluster)
    tokens = one.micro_batch * sequence / one.sp
    held = _bytes(one, facts, tokens)
    total = sum(held.values())
    if total > _USABLE * cluster.memory:
        largest = max(held, key=lambda name: held[name])
        raise _Refused(
            f"{total / G:.1f} GB a rank of {cluster.memory / G:.1f}: {largest} {held[largest] / G:.1f}", total
        )
    states = 12 * facts.parameters / (one.tp * one.pp * one.dp * one.sp) * cluster.per_host
    if one.offload == "cpu" and states > 0.8 * cluster.host_memory:
        raise _Refused(f"states of {states / G:.1f} GB a host of {cluster.host_memory / G:.1f}", total)
    parts = _seconds(one, facts, cluster, sequence, tokens)
    return dataclasses.replace(one, bytes=total, seconds=sum(parts.values()), parts=parts)


def _require_shapes(one: Layout, facts: Facts, cluster: Cluster) -> None:
    if one.tp > cluster.per_host:
        raise _Refused(f"tp {one.tp} crosses hosts of {counted(cluster.per_host, 'rank')}")
    if facts.heads % one.tp or facts.kv_heads % one.tp:
        raise _Refused(f"{facts.kv_heads} heads of keys over tp {one.tp}")
    if one.sp * one.tp > facts.heads:
        raise _Refused(f"sp {one.sp} x tp {one.tp} exceeds {facts.heads} heads of queries")
    if one.pp > facts.layers:
        raise _Refused(f"{facts.layers} layers over pp {one.pp}")
    if one.pp > 1 and one.micro_batches < one.pp:
        raise _Refused(f"{one.micro_batches} micro-batches for {one.pp} stages")


def _own(one: Layout, facts: Facts) -> tuple[float, float, float]:
    """Return the parameters that a rank computes with, without experts and of experts, and those that it steps."""
    experts = facts.of_experts / (one.pp * one.expert_part)
    rest = (facts.parameters - facts.of_experts) / (one.tp * one.pp)
    return rest, experts, facts.parameters / (one.tp * one.pp * one.dp * one.sp)


def _bytes(one: Layout, facts: Facts, tokens: float) -> dict[str, float]:
    """Return the bytes of a rank: states, and activations of the micro-batches that are under way at one time."""
    rest, experts, shard = _own(one, facts)
    own = rest + experts
    block = own * one.pp / facts.layers
    params = 2 * own if one.stage < 3 else 2 * shard + 3 * 2 * block  # the shard, the unit in use and two ahead
    waiting = 2 * own if one.pp > 1 and one.micro_batches > 1 else 2 * 2 * block
    grads = 2 * own if one.stage == 1 else 2 * shard + waiting
    states = 12 * shard if one.offload == "none" else 0.0
    row = tokens * facts.width / one.tp
    layer = (_LAYER_ACTIVATIONS + _ROW_ACTIVATIONS * facts.rows_of_experts) * row
    under_way = min(one.pp, one.micro_batches) * facts.layers / one.pp
    kept = 2 * row if one.recompute else layer
    activations = under_way * kept + one.recompute * layer + 2 * tokens * facts.vocabulary / one.tp / 8
    return {"parameters": params, "gradients": grads, "states": states, "activations": activations}


def _seconds(one: Layout, facts: Facts, cluster: Cluster, sequence: int, tokens: float) -> dict[str, float]:
    """Return the seconds of a step by what they go into."""
    links, width, passes = cluster.links, facts.width, 3 if one.recompute else 2
    operations = (
        (6 * facts.of_a_token + 6 * facts.layers * width * sequence) * one.micro_batches * tokens / (one.tp * one.pp)
    )
    compute = operations * (4 / 3 if one.recompute else 1) / cluster.flops
    layers = one.micro_batches * facts.layers / one.pp
    inside = one.sp * one.tp <= cluster.per_host
    heads = tokens * width / facts.heads / one.tp * (2 * facts.heads + 2 * facts.kv_heads)
    bubble = compute * (one.pp - 1) / one.micro_batches
    pipelined = one.pp > 1
    tier = _OFFLOAD[one.offload]
    waits = {
        "tp": 2 * LATENCY["host"] * (one.tp > 1),
        "sp": 2 * LATENCY["host" if inside else "network"] * (one.sp > 1),
    }
    return {
        "compute": compute,
        "bubble": bubble,
        "tp": layers * 2 * passes * (2 * (one.tp - 1) / one.tp * tokens * width * 2 / links["host"] + waits["tp"]),
        "sp": layers
        * passes
        * ((one.sp - 1) / one.sp * heads * 2 / (links["host"] if inside else cluster.network) + waits["sp"]),
        "ep": one.micro_batches / one.pp * passes * _rows(one, facts, cluster, tokens),
        "zero": max(0.0, _zero(one, facts, cluster) - _HIDDEN * (compute + bubble)),
        "optimizer": 0.0 if tier is None else 12 * 2 * _own(one, facts)[2] * cluster.per_host / links[tier],
        "pp": pipelined * 2 * one.micro_batches * (tokens * width * 2 / cluster.network * 0.2 + LATENCY["network"]),
        "control": _control(cluster),
    }


def _zero(one: Layout, facts: Facts, cluster: Cluster) -> float:
    """Return the seconds of ZeRO's gathers and reductions of a step. Ranks of one host have different slices and different experts."""
    rest, experts, _ = _own(one, facts)
    data = one.dp * one.sp
    once = _over(2 * rest, data, one.tp, cluster) + facts.layers / one.pp * _latency(data, one.tp, cluster)
    stride = max(one.tp, one.expert_part)
    layers = (one.ep > 1) * sum(group.layers for group in facts.experts) / one.pp
    once += _over(2 * experts, one.expert_data, stride, cluster) + layers * _latency(one.expert_data, stride, cluster)
    gathers = 2 * one.micro_batches if one.stage == 3 else 1
    return once * (gathers + (1 if one.pp > 1 or one.stage == 1 else one.micro_batches))


def _rows(one: Layout, facts: Facts, cluster: Cluster, tokens: float) -> float:
    """Return the seconds in which rows go to the ranks of their experts and back, once through all layers (docs/moe.md).

    A token goes once to each host that has some of its experts, where their ranks read it. Of tokens that the ranks of tp hold alike each
    exchanges some, and then they gather what came back."""
    if one.ep == 1:
        return 0.0
    hosts = max(1, one.ep // cluster.per_host)
    row, routed, seconds = 2 * facts.width, tokens / one.tp, 0.0
    for group in facts.experts:
        near = (one.ep - hosts) * _hit(group, one.ep) * row / cluster.links["host"]
        far = (hosts - 1) * _hit(group, hosts) * row / cluster.network
        join = (one.tp - 1) * routed * row / cluster.links["host"] + LATENCY["host"] * (one.tp > 1)
        waits = 2 * (LATENCY["host"] + LATENCY["network"] * (hosts > 1))
        seconds += group.layers * (2 * routed * (near + far) + join + waits)
    return seconds


def _hit(group: ExpertFacts, places: int) -> float:
    """Return the chance that a token has an expert at one of so many places with as many experts each."""
    others = group.experts - group.experts // places
    return 1 - math.comb(others, group.choices) / math.comb(group.experts, group.choices)


def _over(size: float, data: int, stride: int, cluster: Cluster) -> float:
    """Return the seconds in which so many bytes reach all data ranks: within each host, and one copy a host between them. ``stride``:
    how far data ranks are from each other."""
    local = max(1, min(data, cluster.per_host // stride))
    hosts = max(1, data // local)
    return (local - 1) / local * size / cluster.links["host"] + (hosts - 1) / hosts * size / local / cluster.network


def _latency(data: int, stride: int, cluster: Cluster) -> float:
    """Return the seconds of a long gather or reduction without bytes: a message within each host, and one between hosts."""
    if data == 1:
        return 0.0
    return LATENCY["host"] + LATENCY["network"] * (data > cluster.per_host // stride)


def _control(cluster: Cluster) -> float:
    """Return the seconds of a step's norm and vote, which all ranks wait for: log2(hosts) messages each."""
    rounds = math.ceil(math.log2(cluster.hosts))
    return 2 * (rounds * LATENCY["network"] + 2 * LATENCY["host"])


def table(found: list[Layout], sequence: int, batch: int) -> str:
    """Return layouts as lines: the choice with its parts, then what each other one lost by."""
    chosen = found[0]
    shares = ", ".join(f"{name} {seconds / chosen.seconds:.0%}" for name, seconds in _largest(chosen))
    lines = [f"{counted(sequence, 'token')} a sequence, {counted(batch, 'sequence')} a step"]
    for one in found:
        why = f"chosen: {shares}" if one is chosen else one.lost_by
        lines.append(f"  {one!s:64} {one.seconds:8.2f} s {one.bytes / G:7.1f} GB  {why}")
    lines.append("seconds rank layouts and are no promise; bytes are with activations")
    return "\n".join(lines)


def _largest(one: Layout) -> list[tuple[str, float]]:
    return sorted(((n, s) for n, s in one.parts.items() if s > 0.01 * one.seconds), key=lambda part: -part[1])
