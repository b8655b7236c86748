# SPDX-License-Identifier: Apache-2.0
"""Reads the sections of DeepSpeed's JSON about data efficiency and compressed training into ``Config.efficiency``.

``data_efficiency`` is as in DeepSpeed 0.19.8. ``curriculum_learning`` (sequence lengths), ``progressive_layer_drop`` and
``sparse_attention`` are those of 0.18.9, which 0.19 removed. Schedules have the values of DeepSpeed's own classes, at every step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zeropp.config.attention import read_section
from zeropp.config.deepspeed_json import Field, accept_only, flag_of, refuse_unknown, section_of, warn
from zeropp.config.efficiency import Curriculum, Efficiency, LayerDrop, Metric, Schedule, Steps, TokenDrop
from zeropp.config.values import finite, not_yet, one_of, whole, wrong
from zeropp.errors import ConfigError

_CURRICULUM = ("enabled", "curriculum_type", "min_difficulty", "max_difficulty", "schedule_type", "schedule_config")
_METRIC = ("index_to_sample_path", "index_to_metric_path", "difficulty_type", "clustering_type", *_CURRICULUM[2:])
_SAMPLING = ("enabled", "num_epochs", "num_workers", "pin_memory", "curriculum_learning", "dynamic_batching")
_BATCHING = (
    *("enabled", "metrics_path", "lr_scaling_method", "min_batch_size", "max_batch_size", "sequence_picking_order"),
    *("max_tokens", "verbose"),
)
_RANDOM_LTD = (
    *("enabled", "total_layer_num", "random_ltd_layer_num", "random_ltd_layer_id", "model_mask_name", "model_type"),
    *("hidden_state_order", "random_ltd_schedule", "layer_token_lr_schedule"),
)
_RANDOM_LTD_ALWAYS: dict[str, tuple[tuple[object, ...], str]] = {
    "model_type": (("encoder", "decoder"), "masks of either kind are cut"),
    "hidden_state_order": (("batch_seq_dim",), "hidden states are (batch, sequence, width)"),
}
_TYPES = ("fixed_linear", "fixed_root", "fixed_discrete", "custom")
ROUTING = "data_efficiency.data_routing.random_ltd"
SAMPLING = "data_efficiency.data_sampling"


@dataclass(frozen=True)
class FixedRoot:
    """DeepSpeed's schedules ``fixed_linear`` and ``fixed_root``: :class:`zeropp.Growth`, in which the end may be no multiple.

    At step t it is start + (end - start) ((t + first) / steps)^(1 / root), rounded down to a multiple, and at most ``end``.
    """

    start: float
    end: float
    steps: int
    multiple: int
    root: float = 1
    first: int = 1
    """The number of the first step: curricula count steps from 1, random-LTD from 0."""
    raised: bool = True
    """True: no value is below the first multiple that is at least ``start``. Random-LTD has no such bound."""

    def __call__(self, step: int) -> float:
        """Return the value at a step, counted from 0."""
        if self.start == self.end:
            return self.end
        grown = ((step + self.first) / self.steps) ** (1.0 / self.root)
        value: float = math.floor(grown * (self.end - self.start) + self.start)
        value -= value % self.multiple
        if self.raised:
            value = max(value, -(-self.start // self.multiple) * self.multiple)
        return min(value, self.end)


@dataclass(frozen=True)
class Custom:
    """DeepSpeed's schedule ``custom``: a function that the script gives to the engine."""

    metric: str

    def __call__(self, step: int) -> float:
        raise ConfigError(
            f'{SAMPLING}.curriculum_learning.curriculum_metrics.{self.metric}: its schedule_type is "custom"; give its function of the '
            f"step (counted from 1) by engine.set_custom_curriculum_learning_schedule({{{self.metric!r}: function}}) before the first batch"
        )


def efficiency_from_deepspeed(keys: Mapping[str, Any]) -> dict[str, Field]:
    """Return the field ``efficiency`` of `zeropp.Config`, with the path that it came from; nothing where the file asks for nothing."""
    fields: dict[str, Any] = {}
    paths: dict[str, str] = {}
    _seq_length(keys, fields, paths)
    _layer_drop(keys, fields, paths)
    section = _switched(keys, "data_efficiency", "")
    if section is not None:
        _data_efficiency(section, fields, paths)
    if keys.get("sparse_attention") is not None:
        fields["attention"] = read_section(keys["sparse_attention"], "sparse_attention")
        paths["attention"] = "sparse_attention"
    if not paths:
        return {}
    try:
        return {"efficiency": (next(iter(paths.values())), Efficiency(**fields))}
    except ConfigError as error:
        name, _, rest = str(error).removeprefix("Efficiency.").partition(":")
        if name not in paths:
            raise
        raise ConfigError(f"{paths[name]}:{rest}") from None


def _switched(keys: Mapping[str, Any], name: str, path: str) -> Mapping[str, Any] | None:
    """Return a section that is there; None where it is left out, null, false or "auto"."""
    return None if keys.get(name) in (None, False, "auto") else section_of(keys, name, path)


def _enabled(keys: Mapping[str, Any], name: str, path: str, around: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return a section whose own switch is on, as DeepSpeed does; warn where the section around it is off."""
    section = _switched(keys, name, f"{path}.")
    if section is None or not flag_of(section, "enabled", f"{path}.{name}."):
        return None
    if not flag_of(around, "enabled", f"{path}."):
        warn(f'{path}: "enabled" is false, and that of {name} in it is true; {name} is on, as in DeepSpeed')
    return section


def _seq_length(keys: Mapping[str, Any], fields: dict[str, Any], paths: dict[str, str]) -> None:
    path = "curriculum_learning"
    section = _switched(keys, path, "")
    if section is None:
        return
    refuse_unknown(section, _CURRICULUM, path)
    if not flag_of(section, "enabled", f"{path}."):
        return
    one_of(f"{path}.curriculum_type", section.get("curriculum_type", "seqlen"), ("seqlen",))
    if section.get("schedule_type") == "custom":
        raise not_yet(f"{path}.schedule_type", "custom", "give zeropp.Efficiency(seq_length=function of the step)")
    fields["seq_length"], paths["seq_length"] = _schedule(section, path), path


def _layer_drop(keys: Mapping[str, Any], fields: dict[str, Any], paths: dict[str, str]) -> None:
    path = "progressive_layer_drop"
    section = _switched(keys, path, "")
    if section is None:
        return
    refuse_unknown(section, ("enabled", "theta", "gamma"), path)
    if flag_of(section, "enabled", f"{path}."):
        try:
            drop = LayerDrop(theta=section.get("theta", 1.0), gamma=section.get("gamma", 0.001))
        except ConfigError as error:
            raise ConfigError(f"{path}.{str(error).removeprefix('LayerDrop.')}") from None
        fields["layer_drop"], paths["layer_drop"] = drop, path


def _data_efficiency(section: Mapping[str, Any], fields: dict[str, Any], paths: dict[str, str]) -> None:
    path = "data_efficiency"
    refuse_unknown(section, ("enabled", "seed", "data_sampling", "data_routing"), path)
    seed = section.get("seed", 1234)
    whole(f"{path}.seed", seed, 0, "all random choices follow from it")
    sampling = _enabled(section, "data_sampling", path, section)
    if sampling is not None:
        _data_sampling(sampling, fields, paths)
    routing = _enabled(section, "data_routing", path, section)
    if routing is not None:
        refuse_unknown(routing, ("enabled", "random_ltd"), f"{path}.data_routing")
        drop = _enabled(routing, "random_ltd", f"{path}.data_routing", routing)
        if drop is not None:
            fields["token_drop"], paths["token_drop"] = _token_drop(drop), ROUTING
    if paths:
        fields["seed"] = seed


def _data_sampling(section: Mapping[str, Any], fields: dict[str, Any], paths: dict[str, str]) -> None:
    refuse_unknown(section, _SAMPLING, SAMPLING)
    batching = _enabled(section, "dynamic_batching", SAMPLING, section)
    if batching is not None:
        _check_batching(batching, f"{SAMPLING}.dynamic_batching")
    curriculum = _enabled(section, "curriculum_learning", SAMPLING, section)
    if curriculum is None:
        return
    path = f"{SAMPLING}.curriculum_learning"
    refuse_unknown(curriculum, ("enabled", "data_cluster_path", "curriculum_metrics"), path)
    metrics = section_of(curriculum, "curriculum_metrics", f"{path}.")
    if not metrics:
        raise wrong(f"{path}.curriculum_metrics", metrics, "at least one metric")
    found = {name: _metric(metrics, name, f"{path}.curriculum_metrics.") for name in metrics}
    counts = {name: section.get(name, usual) for name, usual in (("num_epochs", 1000), ("num_workers", 0))}
    whole(f"{SAMPLING}.num_epochs", counts["num_epochs"], 1, "epochs")
    whole(f"{SAMPLING}.num_workers", counts["num_workers"], 0, "processes that load samples")
    accept_only(section, {"pin_memory": ((True, False), "there is no accelerator to copy to")}, f"{SAMPLING}.")
    fields["curriculum"] = Curriculum(
        metrics=found, order_path=_path(curriculum, "data_cluster_path", path), epochs=counts["num_epochs"], workers=counts["num_workers"]
    )  # fmt: skip
    paths["curriculum"] = path


def _check_batching(section: Mapping[str, Any], path: str) -> None:
    """Check the keys of batches by tokens, which a script asks for by a function of DeepSpeed's."""
    refuse_unknown(section, _BATCHING, path)
    whole(f"{path}.max_tokens", section.get("max_tokens"), 1, "tokens of a micro-batch")
    for name in ("min_batch_size", "max_batch_size"):
        if section.get(name) is not None:
            whole(f"{path}.{name}", section[name], 1, "samples of a micro-batch")
    order, scaling = section.get("sequence_picking_order", "dataloader"), section.get("lr_scaling_method", "linear")
    one_of(f"{path}.sequence_picking_order", order, ("dataloader", "random", "seqlen"))
    one_of(f"{path}.lr_scaling_method", str(scaling).lower(), ("linear", "sqrt", "none"))
    _path(section, "metrics_path", path)
    warn(
        f"{path}: acts where the script calls get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed, as in DeepSpeed; without "
        "DeepSpeed's names, zeropp.data.TokenBatchSampler does the same"
    )


def _metric(metrics: Mapping[str, Any], name: str, path: str) -> Metric:
    section = section_of(metrics, name, path)
    path += name
    refuse_unknown(section, _METRIC, path)
    kind, clusters = section.get("difficulty_type", "value"), section.get("clustering_type", "schedule_based")
    one_of(f"{path}.difficulty_type", kind, ("value", "percentile"))
    one_of(f"{path}.clustering_type", clusters, ("single_cluster", "schedule_based"))
    schedule = _schedule(section, path, name)
    if clusters == "single_cluster":
        return Metric(schedule=schedule, by=kind, of=section["max_difficulty"])
    samples, values = (_path(section, key, path) for key in ("index_to_sample_path", "index_to_metric_path"))
    if samples is None or (values is None and kind == "value"):
        missing = "index_to_sample_path" if samples is None else "index_to_metric_path"
        raise wrong(
            f"{path}.{missing}",
            None,
            'the path of an index that DataAnalyzer wrote, or "clustering_type": "single_cluster"',
        )
    return Metric(schedule=schedule, by=kind, of=section["max_difficulty"], samples_path=samples, values_path=values)


def _path(section: Mapping[str, Any], key: str, path: str) -> str | None:
    value = section.get(key)
    if value is not None and (not isinstance(value, str) or not value):
        raise wrong(f"{path}.{key}", value, "a path")
    return value


def _number(section: Mapping[str, Any], key: str, path: str) -> Any:
    value = section.get(key)
    if not finite(value):
        raise wrong(f"{path}.{key}", value, "a finite number")
    return value


def _schedule(section: Mapping[str, Any], path: str, metric: str = "") -> Schedule:
    """Return the schedule of a curriculum."""
    low, high = (_number(section, key, path) for key in ("min_difficulty", "max_difficulty"))
    if high < low:
        raise wrong(f"{path}.max_difficulty", high, f"at least min_difficulty, which is {low}")
    kind = section.get("schedule_type")
    one_of(f"{path}.schedule_type", kind, _TYPES)
    if kind == "custom":
        return Custom(metric)
    config, inside = section_of(section, "schedule_config", f"{path}."), f"{path}.schedule_config"
    if kind == "fixed_discrete":
        return _discrete(config, inside, low, high)
    refuse_unknown(
        config,
        ("total_curriculum_step", "difficulty_step", *(("root_degree",) if kind == "fixed_root" else ())),
        inside,
    )
    total, multiple = config.get("total_curriculum_step"), config.get("difficulty_step")
    whole(f"{inside}.total_curriculum_step", total, 1, "steps until max_difficulty")
    whole(f"{inside}.difficulty_step", multiple, 1, "difficulties are multiples of it")
    root = _number(config, "root_degree", inside) if kind == "fixed_root" else 1
    if root <= 0:
        raise wrong(f"{inside}.root_degree", root, "a number above 0; 1 is linear")
    assert total is not None and multiple is not None
    return FixedRoot(low, high, total, multiple, root)


def _discrete(config: Mapping[str, Any], path: str, low: float, high: float) -> Steps:
    """Return the schedule of listed difficulties. As in DeepSpeed it stays where it has reached ``high``."""
    refuse_unknown(config, ("difficulty", "max_step"), path)
    values, ends = config.get("difficulty"), config.get("max_step")
    _check_lists(values, ends, path)
    assert values is not None and ends is not None
    if low >= high:
        return Steps(((0, low),))
    by_step = dict(zip((0, *ends), values, strict=True))
    stays = next((step for step, value in sorted(by_step.items()) if value >= high), ends[-1])
    return Steps(tuple(sorted(item for item in by_step.items() if item[0] <= stays)))


def _check_lists(values: Any, ends: Any, path: str) -> None:
    if not isinstance(values, (list, tuple)) or not values or not all(map(finite, values)):
        raise wrong(f"{path}.difficulty", values, "a list of numbers")
    if not isinstance(ends, (list, tuple)) or len(ends) != len(values) - 1 or not ends or list(ends) != sorted(ends):
        raise wrong(f"{path}.max_step", ends, f"a list of {len(values) - 1} rising steps, one fewer than difficulties")
    for end in ends:
        whole(f"{path}.max_step", end, 0, "the last step of a difficulty")


def _token_drop(section: Mapping[str, Any]) -> TokenDrop:
    refuse_unknown(section, _RANDOM_LTD, ROUTING)
    accept_only(section, _RANDOM_LTD_ALWAYS, f"{ROUTING}.")
    _path(section, "model_mask_name", ROUTING)  # masks are found by their shape
    rates = _switched(section, "layer_token_lr_schedule", f"{ROUTING}.") or {}
    if flag_of(rates, "enabled", f"{ROUTING}.layer_token_lr_schedule."):
        raise not_yet(
            f"{ROUTING}.layer_token_lr_schedule", dict(rates), "zeropp.initialize builds it; elsewhere build zeropp.optim.LayerTokenLR in the script"
        )  # fmt: skip
    layers, count, total = (
        section.get(key) for key in ("random_ltd_layer_id", "random_ltd_layer_num", "total_layer_num")
    )
    whole(f"{ROUTING}.total_layer_num", total, 1, "layers of the model")
    if not isinstance(layers, (list, tuple)) or not layers:
        raise wrong(f"{ROUTING}.random_ltd_layer_id", layers, "a list of layers' numbers")
    for layer in layers:
        whole(f"{ROUTING}.random_ltd_layer_id", layer, 0, "the number of a layer")
    assert isinstance(total, int)
    if max(layers) >= total:
        raise wrong(f"{ROUTING}.random_ltd_layer_id", layers, f"numbers below total_layer_num, which is {total}")
    if count != len(set(layers)):
        raise wrong(f"{ROUTING}.random_ltd_layer_num", count, f"{len(set(layers))}, the length of random_ltd_layer_id")
    return TokenDrop(keep=ltd_schedule(section_of(section, "random_ltd_schedule", f"{ROUTING}.")), layers=tuple(layers))


def ltd_schedule(section: Mapping[str, Any]) -> FixedRoot:
    """Return random-LTD's number of kept tokens by step."""
    path = f"{ROUTING}.random_ltd_schedule"
    refuse_unknown(section, ("min_value", "max_value", "schedule_type", "schedule_config"), path)
    one_of(f"{path}.schedule_type", section.get("schedule_type"), ("fixed_linear",))
    config = section_of(section, "schedule_config", f"{path}.")
    refuse_unknown(config, ("require_steps", "seq_per_step"), f"{path}.schedule_config")
    low, high = section.get("min_value"), section.get("max_value")
    steps, multiple = config.get("require_steps"), config.get("seq_per_step")
    named = {
        "min_value": low,
        "max_value": high,
        "schedule_config.require_steps": steps,
        "schedule_config.seq_per_step": multiple,
    }
    for name, value in named.items():
        whole(f"{path}.{name}", value, 1, "tokens, or steps")
    assert low is not None and high is not None and steps is not None and multiple is not None
    if high < low:
        raise wrong(f"{path}.max_value", high, f"at least min_value, which is {low}")
    if low < high and low < multiple:
        raise wrong(
            f"{path}.min_value", low, f"at least seq_per_step, {multiple}: rounded down to a multiple it is 0 tokens"
        )
    return FixedRoot(low, high, steps, multiple, first=0, raised=False)
