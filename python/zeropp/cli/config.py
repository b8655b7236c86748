# SPDX-License-Identifier: Apache-2.0
"""``python -m zeropp config FILE``: what every key of a configuration does here, and what is not supported."""

from __future__ import annotations

import argparse
import dataclasses
import json
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from zeropp.cli import at_least_one, refuse
from zeropp.config import Config
from zeropp.config.deepspeed_json import is_deepspeed_key
from zeropp.config.deepspeed_keys import left_out
from zeropp.config.reading import read_json
from zeropp.deepspeed import schedules
from zeropp.deepspeed.optimizers import explain
from zeropp.errors import ConfigError, counted

#: Sections that other functions read: `zeropp.initialize` and the Trainer.
_ELSEWHERE = {
    "optimizer": "zeropp.initialize builds it ({}); Trainer compares it with its arguments",
    "scheduler": "zeropp.initialize builds it ({}); for Trainer give --lr_scheduler_type",
    "steps_per_print": "zeropp.initialize logs a line every so many steps; for Trainer give --logging_steps",
}
#: Keys that `zeropp.initialize` follows at a value that `zeropp.prepare` has no counterpart of.
_BY_ENGINE = {
    ("gradient_allreduce_op", "sum"): "zeropp.initialize sums gradients over the ranks; elsewhere they are averaged",
    (
        "zero_optimization.ignore_unused_parameters",
        False,
    ): "zeropp.initialize refuses a step to which a trained parameter gave no gradient",
}
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a configuration, zeropp's or DeepSpeed's; or JSON text")
    parser.add_argument(
        "--ranks", type=at_least_one, default=1, metavar="N", help="world size, for batch sizes (default: 1)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(options: argparse.Namespace) -> int:
    """Exit status: 0, 1 where a key is refused or keys do not go together, 2 where the file cannot be read."""
    try:
        keys = read_json(options.file)
    except ConfigError as error:
        return refuse("config", error)
    rows: list[dict[str, Any]] = []
    accepted: dict[str, Any] = {}
    for path, value, alone in _pieces(keys):
        state, said = _explain(path, value, alone, options.ranks)
        rows.append({"key": path, "value": value, "state": state, "said": said})
        followed = path.startswith(tuple(_ELSEWHERE)) or said in _BY_ENGINE.values()
        if state in ("used", "changes nothing") and not followed:
            _merge(accepted, alone)
    rows += [{"key": path, "value": None, "state": "left out", "said": said} for path, said in _notes(keys)]
    refused = [row["key"] for row in rows if row["state"] == "refused"]
    # Without the refused keys it would be another configuration than the file asks for.
    config, problem = (None, _refusal(refused)) if refused else _whole(accepted, options.ranks)
    if options.json:
        print(json.dumps({"keys": rows, "config": config, "problem": problem}, indent=1, default=str))
    else:
        _show(rows, config, problem)
    return int(problem is not None)


def _refusal(refused: list[str]) -> str:
    return f"no configuration: {counted(len(refused), 'key')} refused ({', '.join(refused)}); mend or remove {'it' if len(refused) == 1 else 'them'}"


def _notes(keys: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what a DeepSpeed file leaves out, where DeepSpeed's documentation, code or an earlier release have another default."""
    return left_out(keys) if any(is_deepspeed_key(name) for name in keys) else iter(())


def _pieces(keys: Mapping[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield (path, value, the smallest configuration that has this key)."""
    stage = keys.get("zero_optimization", {}).get("stage", 0) if isinstance(keys.get("zero_optimization"), dict) else 0
    for name, value in keys.items():
        if name == "zero_optimization" and isinstance(value, dict):
            for key, inner in value.items():
                yield f"{name}.{key}", inner, {name: {"stage": stage, key: inner}}
        else:
            yield name, value, {name: value, **({"stage": stage} if name == "optimizer" else {})}


def _explain(path: str, value: Any, alone: dict[str, Any], ranks: int) -> tuple[str, str]:
    """Return the state of one key and what it does."""
    if path in ("optimizer", "scheduler"):
        try:
            what = explain(value, alone["stage"]) if path == "optimizer" else schedules.explain(value)
            return "used", _ELSEWHERE[path].format(what)
        except ConfigError as error:
            return "refused", str(error)
    if path in _ELSEWHERE:
        return "used", _ELSEWHERE[path]
    if isinstance(value, (str, bool)) and (path, value) in _BY_ENGINE:
        return "used", _BY_ENGINE[path, value]
    if value == "auto":
        return "auto", "Trainer fills it from its arguments; elsewhere zeropp's default stands"
    return _read_alone(path, alone, ranks)


def _read_alone(path: str, alone: dict[str, Any], ranks: int) -> tuple[str, str]:
    """Read the smallest configuration that has the key."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = Config.from_json(alone, ranks=1 if path in _BATCH else ranks)
        except ConfigError as error:
            return "refused", str(error)
    if caught:
        return "changes nothing", str(caught[0].message).partition("in zeropp: ")[2]
    if path in _BATCH:
        return "used", "batch = micro-batch x accumulation x ranks"
    changed = ["stage"] if path == "zero_optimization.stage" else _changed(found, is_deepspeed_key(next(iter(alone))))
    if changed:
        return "used", ", ".join(f"Config.{name} = {getattr(found, name)!r}" for name in changed)
    return "used", "what zeropp does anyway"


def _changed(found: Config, deepspeed: bool) -> list[str]:
    """Return the fields in which a configuration differs from one that says nothing but the stage."""
    plain = Config.from_json({"zero_optimization": {"stage": found.stage}} if deepspeed else {})
    return [f.name for f in dataclasses.fields(Config) if getattr(found, f.name) != getattr(plain, f.name)]


def _merge(into: dict[str, Any], alone: Mapping[str, Any]) -> None:
    for name, value in alone.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            into[name] = {**into[name], **value}
        else:
            into[name] = value


def _whole(accepted: Mapping[str, Any], ranks: int) -> tuple[dict[str, Any] | None, str | None]:
    """Return the configuration of all accepted keys together, or why they do not go together."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = Config.from_json(accepted, ranks=ranks)
        except ConfigError as error:
            return None, f"together: {error}"
    return dataclasses.asdict(found), None


def _show(rows: list[dict[str, Any]], config: dict[str, Any] | None, problem: str | None) -> None:
    wide = max((len(row["key"]) for row in rows), default=0)
    for row in rows:
        print(f"{row['key']:<{wide}}  {row['state']:<15}  {row['said']}")
    print()
    if problem is not None:
        print(problem)
    elif config is not None:
        print("zeropp.Config(" + ", ".join(f"{name}={value!r}" for name, value in config.items()) + ")")
