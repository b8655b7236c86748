# SPDX-License-Identifier: Apache-2.0
"""From the value of ``--zeropp`` and the other training arguments to a :class:`zeropp.Config`.

The file may be zeropp's own or DeepSpeed's. What TrainingArguments say too (batch sizes, accumulation, clipping,
precision, the optimizer's numbers) is ``"auto"`` or equal in the file: all that differs is named in one error, as
transformers does for DeepSpeed. Trainer accumulates, scales the loss and clips; the engine must not do it again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from zeropp import compat
from zeropp.compat import Named
from zeropp.config import Config
from zeropp.config.reading import read_json
from zeropp.errors import ConfigError

#: Names that DeepSpeed's files give to what Trainer builds from ``--optim adamw_torch``.
_ADAMS = ("adam", "adamw")


class _Matched:
    """One file, read against the arguments."""

    def __init__(self, keys: Mapping[str, Any]) -> None:
        self.keys: dict[str, Any] = {k: dict(v) if isinstance(v, Mapping) else v for k, v in keys.items()}
        self.differs: list[str] = []

    def fill(self, path: str, wanted: Any, argument: str) -> None:
        """``"auto"`` becomes the argument's value; anything else must equal it."""
        *parents, name = path.split(".")
        section: Any = self.keys
        for parent in parents:
            section = section.get(parent) if isinstance(section, Mapping) else None
        if not isinstance(section, dict) or section.get(name) is None:
            return
        if section[name] == "auto":
            section[name] = wanted
        elif section[name] != wanted:
            self.differs.append(f"- {path} is {section[name]!r}, and {argument} is {wanted!r}")


def config_for(source: Any, arguments: Any) -> Config:
    """Return the configuration of one training.

    Args:
        source: a path, JSON text, a mapping, or a :class:`zeropp.Config`.
        arguments: finished ``TrainingArguments``.

    Raises:
        ConfigError: for what zeropp cannot do (with the path of the key), and for everything in which file and
            arguments differ, at once.
    """
    if isinstance(source, Config):
        native = {f.name: getattr(source, f.name) for f in dataclasses.fields(source)}
        matched = _Matched({k: v for k, v in native.items() if k in ("accumulate", "clip", "precision")})
        _fill_native(matched, arguments)
        _refuse_differences(matched)
        config = source
    else:
        matched = _Matched(read_json(source))
        _fill_native(matched, arguments)
        _fill_deepspeed(matched, arguments)
        _refuse_differences(matched)
        for name in ("gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu", "optimizer"):
            matched.keys.pop(name, None)
        matched.keys.pop("gradient_accumulation_steps", None)
        if not matched.keys.get("steps_per_print"):
            matched.keys.pop("steps_per_print", None)
        config = Config.from_json(matched.keys)
    if arguments.fp16 and config.dtype_name is None:
        config = dataclasses.replace(config, precision="fp16")  # autocast has no loss scale over partitioned gradients
    _refuse_unsupported(config, arguments)
    return dataclasses.replace(config, accumulate=1, clip=None)


def _fill_native(matched: _Matched, arguments: Any) -> None:
    if matched.keys.get("accumulate", 1) != 1:
        matched.fill("accumulate", arguments.gradient_accumulation_steps, "--gradient_accumulation_steps")
    if matched.keys.get("clip") is not None:
        matched.fill("clip", arguments.max_grad_norm, "--max_grad_norm")
    if matched.keys.get("precision") == "auto":
        matched.keys["precision"] = "bf16" if arguments.bf16 else "fp16" if arguments.fp16 else None


def _fill_deepspeed(matched: _Matched, arguments: Any) -> None:
    micro, steps = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
    matched.fill("train_micro_batch_size_per_gpu", micro, "--per_device_train_batch_size")
    matched.fill("gradient_accumulation_steps", steps, "--gradient_accumulation_steps")
    matched.fill("train_batch_size", arguments.world_size * micro * steps, "ranks x batch x accumulation")
    matched.fill("gradient_clipping", arguments.max_grad_norm, "--max_grad_norm")
    matched.fill("fp16.enabled", bool(arguments.fp16), "--fp16")
    matched.fill("bf16.enabled", bool(arguments.bf16), "--bf16")
    matched.fill("bfloat16.enabled", bool(arguments.bf16), "--bf16")
    if "optimizer" in matched.keys:
        _fill_optimizer(matched, arguments)
    if "scheduler" in matched.keys:
        raise ConfigError(
            "scheduler: Trainer builds the schedule; remove this section and give --lr_scheduler_type linear (DeepSpeed's "
            "WarmupDecayLR) or constant_with_warmup (WarmupLR with warmup_type 'linear'), with --warmup_steps"
        )


def _fill_optimizer(matched: _Matched, arguments: Any) -> None:
    section = matched.keys["optimizer"]
    kind = str(section.get("type", "")) if isinstance(section, dict) else ""
    if kind.lower() not in _ADAMS:
        raise ConfigError(
            f"optimizer.type: {kind!r}: Trainer builds the optimizer; remove this section and choose with --optim"
        )
    if not str(getattr(arguments.optim, "value", arguments.optim)).startswith("adamw_torch"):
        matched.differs.append(f"- optimizer.type is {kind!r}, and --optim is {arguments.optim!r}")
    section["params"] = dict(section.get("params") or {})
    betas = [arguments.adam_beta1, arguments.adam_beta2]
    matched.fill("optimizer.params.lr", arguments.learning_rate, "--learning_rate")
    matched.fill("optimizer.params.betas", betas, "--adam_beta1, --adam_beta2")
    matched.fill("optimizer.params.eps", arguments.adam_epsilon, "--adam_epsilon")
    matched.fill("optimizer.params.weight_decay", arguments.weight_decay, "--weight_decay")
    for name, value in section["params"].items():
        if name == "adam_w_mode" and value in (True, "auto"):
            continue
        if name not in ("lr", "betas", "eps", "weight_decay", "torch_adam"):
            raise ConfigError(f"optimizer.params.{name}: {value!r} has no counterpart in TrainingArguments; remove it")


def _refuse_differences(matched: _Matched) -> None:
    if matched.differs:
        lines = "\n".join(matched.differs)
        raise ConfigError(
            f'zeropp\'s configuration differs from the training arguments:\n{lines}\nGive "auto" in the file'
        )


def _refuse_unsupported(config: Config, arguments: Any) -> None:
    """Refuse arguments that would act on whole parameters, or twice."""
    names = ("bf16_full_eval", "fp16_full_eval", "deepspeed", "fsdp", "auto_find_batch_size", "bf16", "fp16")
    given = {f"--{name}": bool(getattr(arguments, name, None)) for name in names}
    facts = {
        name: Named(value, name if value else f"arguments without {name}")
        for name, value in {**given, "--zeropp": True}.items()
    }
    compat.check({**facts, "Config.precision": config.dtype_name})
