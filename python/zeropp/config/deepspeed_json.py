# SPDX-License-Identifier: Apache-2.0
"""Reads the JSON file that DeepSpeed users own (names and defaults of DeepSpeed 0.19) into fields of `zeropp.Config`.

Four kinds of keys: those that map to a field; those that ask for what zeropp always does, accepted at that value
only; hints about DeepSpeed's own memory layout, accepted with a warning; and everything else, which is an error with
its path. `"auto"` leaves zeropp's own default.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

import torch.distributed as dist

from zeropp import compat
from zeropp.config.deepspeed_keys import (
    AIO,
    AIO_THREADS,
    CONVERTED,
    LEAF_MODULE,
    REFUSED,
    SWITCHES,
    ZERO_ALIASES,
    ZERO_REFUSED,
)
from zeropp.config.sections import Comm, LossScale, Offload, Precision, Tier
from zeropp.config.values import DTYPES, folders, nearest, not_yet, wrong
from zeropp.errors import ConfigError, counted

_ZERO = "zero_optimization."
Field = tuple[str, Any]  # path of the key in the file, value of the field of Config

# Top-level keys that zeropp always satisfies: accepted values, and what it does.
_TOP_ALWAYS: dict[str, tuple[tuple[object, ...], str]] = {
    "zero_force_ds_cpu_optimizer": ((False,), "the optimizer given is the one used"),
    "gradient_predivide_factor": ((1, 1.0), "gradients are averaged after the sum, in fp32"),
    "sparse_gradients": ((False,), "gradients are dense"),
    "gradient_allreduce_op": (("mean",), "gradients are averaged; zeropp.initialize sums them where it says 'sum'"),
    "managed_gradient_accumulation": ((True,), "the engine counts micro-steps; zeropp.no_sync accumulates by hand"),
    "seq_parallel_communication_data_type": ((None, "fp32", "bf16", "fp16"), "heads travel in their own type"),
    "sequence_parallel_size": (
        (1,),
        "zeropp.initialize splits sequences over ranks; elsewhere zeropp.parallel.ulysses(model, mesh['sp']) does",
    ),
    "use_data_before_expert_parallelism": ((False,), "ranks with different experts are neighbours; see Config.experts"),
    "dataloader_drop_last": ((True, False), "the loader of zeropp.initialize follows it"),
    "disable_python_gc": ((False,), "Python's collector is the script's own"),
    "log_level": ((None,), "the loggers are logging.getLogger('zeropp') and 'DeepSpeed'"),
}
# Switches of what DeepSpeed prints, and of the way that bytes take: the usual value, and why the other changes nothing here.
_TOP_SWITCHES = {
    "wall_clock_breakdown": (False, "the library prints nothing; zeropp.trace writes a timeline of steps"),
    "dump_state": (False, "the library prints nothing"),
    "memory_breakdown": (False, "zeropp.memory() tells it when asked"),
    "prescale_gradients": (False, "gradients are averaged after the sum, in fp32"),
    "disable_allgather": (False, "updated parameters are shared"),
}
_TOP_MAPPED = (
    "zero_optimization",
    "zero_allow_untested_optimizer",
    "bf16",
    "bfloat16",
    "fp16",
    "torch_autocast",
    "communication_data_type",
    "data_types",
    "expert_parallel",
    "gradient_clipping",
    "gradient_accumulation_steps",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "optimizer",
    "scheduler",
    "activation_checkpointing",
    "aio",
    "checkpoint",
    "steps_per_print",
    "timers",
    "vocabulary_size",
    "curriculum_learning",
    "data_efficiency",
    "progressive_layer_drop",
    "sparse_attention",
)
DEEPSPEED_KEYS = (*_TOP_MAPPED, *_TOP_ALWAYS, *_TOP_SWITCHES, *REFUSED)

# Hints about how DeepSpeed lays out memory, which have no counterpart here: a number is accepted, and a warning says
# why it changes nothing.
_ZERO_HINTS = {
    "allgather_bucket_size": "a unit is gathered at once; see Config.units",
    "sub_group_size": "the step goes unit by unit",
    "stage3_param_persistence_threshold": "small parameters travel with their unit",
    "stage3_model_persistence_threshold": "small parameters travel with their unit",
    "stage3_max_live_parameters": "the unit in use and what is prefetched is held; see Config.prefetch",
    "stage3_max_reuse_distance": "a unit is released after use; see Config.prefetch",
    "stage3_module_granularity_threshold": "modules are grouped by Config.units",
}
# The same for zero_optimization.
_ZERO_ALWAYS: dict[str, tuple[tuple[object, ...], str]] = {
    "overlap_comm": ((True, False, None), "reductions never block backward"),
    "compute_grad_norm": ((True,), "clip_grad_norm_ returns it"),
    "round_robin_gradients": ((False, True), "every rank owns an equal slice of every unit"),
    "ignore_unused_parameters": (
        (True,),
        "unused parameters are allowed; zeropp.initialize refuses them where it says false",
    ),
    "load_from_fp32_weights": ((True,), "fp32 master weights are saved and loaded"),
    "parameter_alignment": ((False, True), "parameters are aligned"),
    "stage3_gather_16bit_weights_on_model_save": ((True, False), "zeropp.full_state_dict gathers when asked"),
    "stage3_gather_fp16_weights_on_model_save": ((True, False), "zeropp.full_state_dict gathers when asked"),
    "zero_quantized_nontrainable_weights": ((False,), "frozen parameters are held as they are"),
    "cpu_offload_use_pin_memory": ((True, False, None), "buffers are locked where the system lets them"),
    "zenflow": ((None,), "Config(offload=Offload(delayed_update=)) overlaps the step with the next pass"),
    "memory_efficient_linear": ((True, False), "backward gathers a weight again, and keeps none"),
    "override_module_apply": ((True, False), "nothing of torch is overridden; zeropp.sharded_init builds in slices"),
    "enable_sanity_checks": ((True, False), "every gather and reduction is checked, always"),
    "save_muon_momentum_buffer_in_memory": ((True, False), "Muon's momentum is in memory"),
}
_ZERO_SWITCHES = {
    "contiguous_gradients": (True, "gradients of a unit lie in one buffer"),
    "use_multi_rank_bucket_allreduce": (True, "a unit holds a slice of every rank"),
    "allgather_partitions": (True, "parameters are all-gathered"),
    "reduce_scatter": (
        True,
        "each rank gets the same sums by a reduce-scatter, in fewer bytes than by the all-reduce that it asks for",
    ),
    "legacy_stage1": (False, "there is one implementation"),
    "stage3_use_all_reduce_for_fetch_params": (False, "parameters are all-gathered"),
    "stage3_allgather_sequential": (False, "a unit is gathered at once"),
    "elastic_checkpoint": (False, "a checkpoint loads on any number of ranks"),
    "pipeline_loading_checkpoint": (False, "checkpoints are read slice by slice"),
    "log_trace_cache_warnings": (False, "zeropp.trace shows what was fetched when"),
}
_FP16_MAPPED = ("enabled", "loss_scale", "initial_scale_power", "loss_scale_window", "min_loss_scale")
_FP16_ALWAYS: dict[str, tuple[tuple[object, ...], str]] = {
    "auto_cast": ((True, False), "floating inputs are cast"),
    "consecutive_hysteresis": ((False,), "the scale goes down at the first overflow"),
    "fp16_master_weights_and_grads": ((False,), "the master copy is fp32"),
}
_OFFLOAD_PARAM_ALWAYS: dict[str, tuple[tuple[object, ...], str]] = {
    "pin_memory": ((True, False), "there is no accelerator to copy to"),
}
_OFFLOAD_OPTIMIZER_ALWAYS: dict[str, tuple[tuple[object, ...], str]] = {
    "super_offload": ((False,), "it is for superchips; Offload(delayed_update=) overlaps the step with the next pass"),
    "cpuadam_cores_perc": ((0.8,), "it belongs to super_offload; OMP_NUM_THREADS says how many threads step"),
    "pin_memory": ((True, False), "buffers are locked where the system lets them"),
    "pipeline_read": ((True, False), "reads always overlap the step"),
    "pipeline_write": ((True, False), "writes always overlap the step"),
    "fast_init": ((True, False), "states are made by the first step"),
}
# Hints of the offload sections: what DeepSpeed takes where nothing is said, and why another number changes nothing.
_OFFLOAD_PARAM_HINTS = {
    "buffer_count": (5, "a unit is read to its own place, without a buffer"),
    "buffer_size": (100_000_000, "a unit is read to its own place, whatever its size"),
    "max_in_cpu": (1_000_000_000, "a unit stays in memory while it is used; Tier(fraction=) keeps more there"),
}
_OFFLOAD_OPTIMIZER_HINTS = {
    "buffer_count": (4, "records of 2 MiB are stepped, written and read ahead at a time"),
}
_CHECKPOINTING_ALWAYS: dict[str, tuple[tuple[object, ...], str]] = {
    "partition_activations": ((False,), "there is no tensor slicing that would replicate them"),
    "cpu_checkpointing": (
        (False,),
        "torch.utils.checkpoint in the model, with Config(offload=Offload(activations='nvme', path=...))",
    ),
    "contiguous_memory_optimization": ((False,), "torch.utils.checkpoint keeps what it keeps"),
    "synchronize_checkpoint_boundary": ((False,), "there is nothing to wait for"),
    "profile": ((False,), "zeropp.trace and torch.profiler tell times"),
}
_CHECKPOINT_ALWAYS: dict[str, tuple[tuple[object, ...], str]] = {
    "tag_validation": (
        ("Ignore", "Warn", "Fail", "IGNORE", "WARN", "FAIL", "ignore", "warn", "fail"),
        "all ranks save and load one folder, which is checked",
    ),
    "load_universal": ((True, False), "checkpoints load on any number of ranks, at any stage"),
    "use_node_local_storage": ((False,), "all hosts see the folder"),
    "parallel_write": (({}, {"pipeline_stage": True}, {"pipeline_stage": False}), "every rank writes its slices"),
    "writer": ((None, {}), "zeropp.save(..., background=True) writes beside the next steps"),
    "checkpoint_serialization": ((True, False), "safetensors are written"),
}
_DATA_TYPES_ALWAYS: dict[str, tuple[tuple[object, ...], str]] = {
    "param_dtype": ((None,), "bf16 and fp16 say the type of parameters, or zeropp.Config(precision=Precision(param=))"),
    "buffer_dtype": ((None,), "buffers keep the type they have"),
    "keep_in_fp32_modules": (
        ("auto",),
        "batch norms stay fp32, other modules take the precision",
    ),
}
_ZERO_MAPPED = (
    "stage",
    "reduce_bucket_size",
    "stage3_prefetch_bucket_size",
    "offload_param",
    "offload_optimizer",
    "leaf_module",
    "zero_quantized_weights",
    "zero_quantized_gradients",
    "zero_hpz_partition_size",
)


def is_deepspeed_key(name: str) -> bool:
    return name in DEEPSPEED_KEYS


def fields_from_deepspeed(keys: Mapping[str, Any], ranks: int | None = None) -> dict[str, Field]:
    """Fields of `zeropp.Config`, each with the path that it came from. A file without DeepSpeed's keys gives none."""
    if not keys:
        return {}
    fields: dict[str, Field] = {}
    low = _precision(keys, fields)
    _types(keys, fields)
    _zero(zero_section(keys), fields, element_bytes=2 if low else 4)
    untested = keys.get("zero_allow_untested_optimizer")
    if untested == 1 or flag_of(
        keys, "zero_allow_untested_optimizer", ""
    ):  # files and DeepSpeed's own tests say 1, too
        fields["custom_optimizer"] = ("zero_allow_untested_optimizer", True)
    _clip(keys, fields)
    _batch(keys, fields, ranks)
    accept_only(keys, _TOP_ALWAYS, "")
    _switches(keys, _TOP_SWITCHES, "")
    for name, why in REFUSED.items():
        if not _is_off(name, keys.get(name)):
            switch, values = SWITCHES.get(name, ("enabled", (False,)))
            raise not_yet(name, keys[name], f'remove it, or set "{switch}": {json.dumps(values[0])}: {why}')
    _hints(keys)
    for name, way in (("optimizer", "build it in the script"), ("scheduler", "build it in the script")):
        if name in keys:
            raise not_yet(name, keys[name], f"{way} and hand it to zeropp.prepare")
    if keys.get("steps_per_print") not in ("auto", None, float("inf")):
        warn(
            f"steps_per_print: {keys['steps_per_print']!r} changes nothing in zeropp: a loop or a Trainer says when it logs "
            "(zeropp.initialize follows it)"
        )
    return fields


def _is_off(name: str, section: Any) -> bool:
    """True if a refused section asks for nothing."""
    if section in (None, False, {}, "auto"):
        return True
    if not isinstance(section, Mapping):
        return False
    switch, off = SWITCHES.get(name, ("enabled", (False,)))
    return section.get(switch, False) in off


def _hints(keys: Mapping[str, Any]) -> None:
    """Sections about DeepSpeed's own workings: their keys are known, and a warning says why they change nothing."""
    for name, table in (("activation_checkpointing", _CHECKPOINTING_ALWAYS), ("checkpoint", _CHECKPOINT_ALWAYS)):
        section = section_of(keys, name)
        known = (*table, "number_checkpoints") if name == "activation_checkpointing" else tuple(table)
        refuse_unknown(section, known, name)
        accept_only(section, table, f"{name}.")
    aio = section_of(keys, "aio")
    refuse_unknown(aio, AIO, "aio")
    if aio:
        why = "depth and block size are those that python -m zeropp bench-io PATH measured"
        _changes_nothing("aio", dict(aio), why + (f"; {AIO_THREADS}" if "thread_count" in aio else ""))
    if section_of(keys, "timers"):
        _changes_nothing("timers", keys["timers"], "the library prints nothing")
    if keys.get("vocabulary_size") not in (None, "auto"):
        _changes_nothing("vocabulary_size", keys["vocabulary_size"], "DeepSpeed only warns of its alignment")


def warn(message: str) -> None:
    """Warn at the line outside of zeropp that asked for the configuration."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "zeropp":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def _changes_nothing(path: str, value: object, why: str) -> None:
    warn(f"{path}: {value!r} changes nothing in zeropp: {why}")


def refuse_unknown(section: Mapping[str, Any], known: Iterable[str], path: str) -> None:
    for key, value in section.items():
        if key not in known:
            raise ConfigError(f"{path}.{key}: unknown key (value {value!r}){nearest(key, known)}")


def section_of(keys: Mapping[str, Any], name: str, path: str = "") -> Mapping[str, Any]:
    section = keys.get(name)
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise wrong(path + name, section, "a JSON object")
    return section


def accept_only(keys: Mapping[str, Any], table: Mapping[str, tuple[tuple[object, ...], str]], path: str) -> None:
    for name, (accepted, why) in table.items():
        value = keys.get(name, "auto")
        if value != "auto" and not any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in accepted
        ):
            allowed = " or ".join(repr(one) for one in accepted)
            raise not_yet(path + name, value, f"remove it, or give 'auto' or {allowed} ({why})")


def _switches(section: Mapping[str, Any], table: Mapping[str, tuple[bool, str]], path: str) -> None:
    for name, (usual, why) in table.items():
        if flag_of(section, name, path, default=usual) is not usual:
            _changes_nothing(path + name, section[name], why)


def _switch(section: Mapping[str, Any], path: str) -> bool | None:
    enabled = section.get("enabled", False)
    if enabled == "auto":
        return None
    if not isinstance(enabled, bool):
        raise wrong(f"{path}.enabled", enabled, 'true, false or "auto"')
    return enabled


def _precision(keys: Mapping[str, Any], fields: dict[str, Field]) -> bool:
    name = "bfloat16" if "bfloat16" in keys else "bf16"
    bf16 = section_of(keys, name)
    known = (
        "enabled",
        "immediate_grad_update",
        "check_grad_overflow",
        "bf16_master_weights_and_grads",
        "bf16_optimizer_states",
    )
    for key in bf16:
        if key not in known:
            raise ConfigError(f"{name}.{key}: unknown key; known are {', '.join(known)}{nearest(key, known)}")
    on = _switch(bf16, name)
    if on:
        fields["precision"] = (f"{name}.enabled", "bf16")
        accept_only(
            bf16,
            {
                "immediate_grad_update": ((True, False), "gradients are reduced as they come"),
                "check_grad_overflow": ((False,), "a step is never skipped; clip_grad_norm_ returns the norm"),
            },
            f"{name}.",
        )
    half = section_of(keys, "fp16")
    if _fp16(half, fields, _switch(half, "fp16")):
        compat.check({"fp16.enabled": True, f"{name}.enabled": bool(on)})
        on = True
    return bool(on)


_LONG_DTYPES = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}


def _types(keys: Mapping[str, Any], fields: dict[str, Field]) -> None:
    """Read the types beside `bf16` and `fp16`: `Precision(...)` in place of the short form."""
    path, low = fields.get("precision", ("torch_autocast.enabled", None))
    said: dict[str, Field] = {}
    name = "bfloat16" if "bfloat16" in keys else "bf16"
    if low == "bf16":
        for key, field in (("bf16_master_weights_and_grads", "master"), ("bf16_optimizer_states", "state")):
            if flag_of(section_of(keys, name), key, f"{name}."):
                said[field] = (f"{name}.{key}", "bf16")
    _autocast(section_of(keys, "torch_autocast") if keys.get("torch_autocast") else {}, low, said)
    _dtype(keys, "communication_data_type", "", "reduce", said)
    types = section_of(keys, "data_types")
    refuse_unknown(types, ("grad_accum_dtype", *_DATA_TYPES_ALWAYS), "data_types")
    accept_only(types, _DATA_TYPES_ALWAYS, "data_types.")
    if isinstance(types.get("grad_accum_dtype"), str):
        kind = types["grad_accum_dtype"].lower()
        types = {**types, "grad_accum_dtype": _LONG_DTYPES.get(kind, kind)}
    _dtype(types, "grad_accum_dtype", "data_types.", "accumulate", said)
    if not said:
        return
    try:
        whole = Precision(param=low, **{field: value for field, (_, value) in said.items()})
    except ConfigError as error:
        for field, (where, _) in said.items():
            if str(error).startswith(f"Precision.{field}:"):
                raise ConfigError(where + str(error).removeprefix(f"Precision.{field}")) from None
        raise
    fields["precision"] = (path, whole)


def flag_of(section: Mapping[str, Any], key: str, path: str, default: bool = False) -> bool:
    value = section.get(key)
    if value not in (None, "auto") and not isinstance(value, bool):
        raise wrong(path + key, value, 'true, false or "auto"')
    return value if isinstance(value, bool) else default


def _dtype(section: Mapping[str, Any], key: str, path: str, field: str, said: dict[str, Field]) -> None:
    value = section.get(key)
    if value in (None, "auto"):
        return
    if not isinstance(value, str) or value.lower() not in DTYPES:
        raise wrong(path + key, value, "one of 'fp32', 'bf16', 'fp16', or \"auto\"")
    said[field] = (path + key, value.lower())


_AUTOCAST_DTYPES = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "half": "fp16"}


def _autocast(section: Mapping[str, Any], low: str | None, said: dict[str, Field]) -> None:
    refuse_unknown(section, ("enabled", "dtype", "lower_precision_safe_modules"), "torch_autocast")
    if not _switch(section, "torch_autocast"):
        return
    if low is not None:
        compat.check({"torch_autocast.enabled": True, f"{low}.enabled": True})
    dtype = section.get("dtype", "bfloat16")
    name = _AUTOCAST_DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else None
    if name is None:
        raise wrong("torch_autocast.dtype", dtype, "'bfloat16' or 'float16'")
    if section.get("lower_precision_safe_modules") is not None:
        warn(
            "torch_autocast.lower_precision_safe_modules changes nothing in zeropp: parameters are gathered in the type they are held "
            "in; communication_data_type says what gradients travel in"
        )
    said["compute"] = ("torch_autocast.enabled", name)


def _fp16(section: Mapping[str, Any], fields: dict[str, Field], on: bool | None) -> bool:
    """``loss_scale`` 0 is a dynamic one, by the rule of DeepSpeed's DynamicLossScaler without its hysteresis."""
    known = (*_FP16_MAPPED, *_FP16_ALWAYS, "hysteresis")
    for key, value in section.items():
        if key not in known:
            raise ConfigError(
                f"fp16.{key}: unknown key (value {value!r}); known are {', '.join(known)}{nearest(key, known)}"
            )
    if not on:
        return False
    accept_only(section, _FP16_ALWAYS, "fp16.")
    if section.get("hysteresis", "auto") not in ("auto", 1):
        warn(
            f"fp16.hysteresis: {section['hysteresis']!r} changes nothing in zeropp: the scale goes down at the first overflow"
        )

    def number(key: str, default: float, least: float, most: float = 2.0**62) -> float:
        value = section.get(key, default)
        if value == "auto":
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < float("inf"):
            raise wrong(f"fp16.{key}", value, f"a number >= {least:g}")
        if value > most:
            raise wrong(f"fp16.{key}", value, f"a number <= {most:g}")
        return value

    fixed = number("loss_scale", 0, 0)
    if fixed:
        scale = LossScale(init=float(fixed), least=float(fixed), dynamic=False)
    else:
        init = 2.0 ** number("initial_scale_power", 16, 0, 1023)
        window = int(number("loss_scale_window", 1000, 1))
        lowest = number("min_loss_scale", 1, 0) or 2.0**-24  # 0: no bound; below this no fp16 gradient is not finite
        scale = LossScale(init=init, interval=window, least=min(float(lowest), init))
    fields["precision"] = ("fp16.enabled", "fp16")
    fields["loss_scale"] = ("fp16.loss_scale", scale)
    return True


def zero_section(keys: Mapping[str, Any]) -> Mapping[str, Any]:
    """``zero_optimization`` with what DeepSpeed still converts: the oldest form of all, which is true or false, and the names that say
    where states and parameters are offloaded to."""
    if isinstance(keys.get("zero_optimization"), bool):
        return {"stage": int(keys["zero_optimization"])}
    section = dict(section_of(keys, "zero_optimization"))
    for old, new in CONVERTED.items():
        if old not in section:
            continue
        if flag_of(section, old, "zero_optimization."):
            there = None if section.get(new) == "auto" else section.get(new)
            compat.check({f"zero_optimization.{old}": True, f"zero_optimization.{new}": there})
            section[new] = {"device": "cpu"}
        del section[old]
    return section


def _zero(section: Mapping[str, Any], fields: dict[str, Field], element_bytes: int) -> None:
    for name, why in ZERO_REFUSED.items():
        if section.get(name) not in (None, "auto"):
            raise ConfigError(f"{_ZERO}{name}: {section[name]!r} is not there; remove it: {why}")
    section = {ZERO_ALIASES.get(name, name): value for name, value in section.items() if name not in ZERO_REFUSED}
    refuse_unknown(section, (*_ZERO_MAPPED, *_ZERO_ALWAYS, *_ZERO_SWITCHES, *_ZERO_HINTS), "zero_optimization")
    stage = section.get("stage", 0)
    fields["stage"] = (f"{_ZERO}stage", stage)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise wrong(f"{_ZERO}stage", stage, "0, 1, 2 or 3")
    accept_only(section, _ZERO_ALWAYS, _ZERO)
    _zero_hints(section)
    for name, field in (("reduce_bucket_size", "bucket_bytes"), ("stage3_prefetch_bucket_size", "prefetch")):
        elems = section.get(name, "auto")
        if elems != "auto":
            fields[field] = (f"{_ZERO}{name}", _elements(elems, name) * element_bytes)
    comm = _comm(section, stage)
    if comm != Comm():
        fields["comm"] = (f"{_ZERO}zero_quantized_weights", comm)
    offload = _offload(section, stage)
    if offload != Offload():
        fields["offload"] = (f"{_ZERO}offload_optimizer", offload)


def _zero_hints(section: Mapping[str, Any]) -> None:
    """Warn of keys about DeepSpeed's own layout of memory, which change nothing here."""
    for name, why in _ZERO_HINTS.items():
        if name in section and section[name] != "auto":
            _elements(section[name], name)
            warn(f"{_ZERO}{name}: {section[name]!r} changes nothing in zeropp: {why}")
    _switches(section, _ZERO_SWITCHES, _ZERO)
    leaves = section_of(section, "leaf_module", _ZERO)
    refuse_unknown(leaves, LEAF_MODULE, f"{_ZERO}leaf_module")
    if leaves:
        why = "repeated blocks come and go whole; Config.units chooses others"
        _changes_nothing(f"{_ZERO}leaf_module", dict(leaves), why)


def _offload(section: Mapping[str, Any], stage: int) -> Offload:
    params = _tier(section, "offload_param", _OFFLOAD_PARAM_ALWAYS, _OFFLOAD_PARAM_HINTS)
    if params.kind == "cpu" and stage < 3:  # accelerate's plugin writes it at every stage
        warn(
            f"{_ZERO}offload_param: device 'cpu' changes nothing in zeropp: parameters are partitioned from stage 3 on"
        )
        params = Tier()
    optimizer = _tier(section, "offload_optimizer", _OFFLOAD_OPTIMIZER_ALWAYS, _OFFLOAD_OPTIMIZER_HINTS)
    return Offload(params=params, optimizer=optimizer)


def _comm(section: Mapping[str, Any], stage: int) -> Comm:
    """Return ZeRO++'s choices: parameters in 8 bits, gradients in 4 (both as there), and a second copy on each host."""
    chosen: dict[str, Any] = {}
    facts: dict[str, Any] = {f"{_ZERO}stage": stage}
    for name, field, form in (
        ("zero_quantized_weights", "params", "int8"),
        ("zero_quantized_gradients", "grads", "int4"),
    ):
        facts[f"{_ZERO}{name}"] = asked = flag_of(section, name, _ZERO)
        if asked:
            chosen[field] = form
    path = f"{_ZERO}zero_hpz_partition_size"
    facts[path] = size = section.get("zero_hpz_partition_size", 1)
    if size not in ("auto", 1) and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise wrong(path, size, "1, or at stage 3 the number of ranks on a host")
    compat.check(facts)
    if size not in ("auto", 1):
        here = os.environ.get("LOCAL_WORLD_SIZE")
        if here is not None and int(here) != size:
            raise not_yet(path, size, f"give {here}, the ranks of this host, or 1 for no second copy")
        chosen["secondary_shard"] = "host"
    return Comm(**chosen)


def _tier(
    section: Mapping[str, Any],
    name: str,
    always: Mapping[str, tuple[tuple[object, ...], str]],
    hints: Mapping[str, tuple[int, str]],
) -> Tier:
    """Return the tier of `offload_param` or `offload_optimizer`."""
    keys = section_of(section, name, _ZERO)
    path = f"{_ZERO}{name}."
    known = ("device", "nvme_path", *(("ratio",) if name == "offload_optimizer" else ()), *always, *hints)
    refuse_unknown(keys, known, path.rstrip("."))
    device = keys.get("device", "none")
    if device in ("none", None):
        return Tier()
    if device not in ("cpu", "nvme"):
        raise wrong(f"{path}device", device, '"none", "cpu" or "nvme"')
    accept_only(keys, always, path)
    for key, (usual, why) in hints.items():
        value = keys.get(key, "auto")
        if value != "auto" and _elements(value, f"{name}.{key}") != usual:
            warn(f"{path}{key}: {value!r} changes nothing in zeropp: {why}")
    share = _share(keys, path)
    if device != "nvme":
        return Tier(device, fraction=share)
    folder = keys.get("nvme_path")
    if not isinstance(folder, (str, list)):
        raise wrong(f"{path}nvme_path", folder, 'a folder on a local disk, or a list of them, for "device": "nvme"')
    return Tier(device, path=folders(f"{path}nvme_path", folder), fraction=share)


def _share(keys: Mapping[str, Any], path: str) -> float:
    share = keys.get("ratio", 1.0)
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise wrong(f"{path}ratio", share, "a number above 0 and at most 1 (share of the bytes)")
    return float(share)


def _elements(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**62 or value != int(value):
        raise wrong(f"zero_optimization.{name}", value, 'a whole number of elements >= 0, or "auto"')
    return int(value)


def _clip(keys: Mapping[str, Any], fields: dict[str, Field]) -> None:
    """DeepSpeed clips at 1.0 unless told otherwise, and 0 switches it off; the same file has to train the same way
    here."""
    norm = keys.get("gradient_clipping", 1.0)
    if norm == "auto":
        return
    if isinstance(norm, bool) or not isinstance(norm, (int, float)) or not 0 <= norm < float("inf"):
        raise wrong("gradient_clipping", norm, 'a number >= 0 (0 = off), or "auto"')
    fields["clip"] = ("gradient_clipping", float(norm) or None)


def _world_size() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _batch(keys: Mapping[str, Any], fields: dict[str, Field], ranks: int | None) -> None:
    """Find the accumulation from train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks, of which one
    may be missing."""
    path = "gradient_accumulation_steps"
    train, micro, steps = (_count(keys, name) for name in ("train_batch_size", "train_micro_batch_size_per_gpu", path))
    world = ranks or _world_size()
    if train is not None:
        _check_product(train, micro, steps, world)
        if steps is None and micro is not None:
            steps, path = train // (micro * world), "train_batch_size"
    if steps is not None:
        fields["accumulate"] = (path, steps)


def _check_product(train: int, micro: int | None, steps: int | None, world: int) -> None:
    product = (micro or 1) * (steps or 1) * world
    if train % product or (micro and steps and train != product):
        factors = f"{micro or 'auto'} x gradient_accumulation_steps {steps or 'auto'} x {counted(world, 'rank')}"
        raise ConfigError(
            f"train_batch_size: {train} does not fit train_micro_batch_size_per_gpu {factors}; change one of the three, or give it "
            'as "auto"'
        )


def _count(keys: Mapping[str, Any], name: str) -> int | None:
    value = keys.get(name, "auto")
    if value == "auto" or value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise wrong(name, value, 'a whole number >= 1, or "auto"')
    return value
