# SPDX-License-Identifier: Apache-2.0
"""The public surface, held against a snapshot: names, signatures, Config's fields, operators, commands, variables, exceptions.

    python tests/packaging/test_public_api.py      record the surface of this tree in public_api.json

What stands in the snapshot is a promise to users: a change that removes or alters a line breaks scripts. A new line is recorded
together with the change that adds it. The keys of DeepSpeed's JSON have a snapshot of their own (tests/config), and so has the
format of checkpoints (tests/checkpoint).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SNAPSHOT = Path(__file__).with_name("public_api.json")
MODULES = (
    *("zeropp", "zeropp.aio", "zeropp.comm", "zeropp.config", "zeropp.data", "zeropp.elastic", "zeropp.errors"),
    *("zeropp.health", "zeropp.moe", "zeropp.nn", "zeropp.ops", "zeropp.optim", "zeropp.parallel"),
    "zeropp.process_group",
)
FRAMEWORKS = {"zeropp.hf": "transformers", "zeropp.accelerate": "accelerate", "zeropp.lightning": "lightning"}
Surface = dict[str, str]


def signature(value: Any) -> str:
    """Return names, kinds and defaults of the arguments; annotations may name what is private."""
    try:
        arguments = inspect.signature(value)
    except (TypeError, ValueError):
        return "(...)"
    plain = [item.replace(annotation=inspect.Parameter.empty) for item in arguments.parameters.values()]
    text = str(inspect.Signature(plain))
    return re.sub(r"<(\S+)( object)? at 0x\w+>", r"<\1>", text)


def of_class(name: str, value: type) -> Surface:
    found = {name: f"class{signature(value)}"}
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            default = "" if field.default is dataclasses.MISSING else f" = {field.default!r}"
            found[f"{name}.{field.name}"] = f"field: {field.type}{default}"
    for key, member in vars(value).items():
        if key.startswith("_") or f"{name}.{key}" in found:
            continue
        member = getattr(member, "__func__", member)
        found[f"{name}.{key}"] = f"method{signature(member)}" if callable(member) else type(member).__name__
    return found


def of_module(name: str) -> Surface:
    module = importlib.import_module(name)
    default = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == name]
    found: Surface = {}
    for key in sorted(set(getattr(module, "__all__", default))):
        value = getattr(module, key)
        if key.startswith("_"):
            continue
        if inspect.isclass(value):
            found.update(of_class(f"{name}.{key}", value))
        else:
            found[f"{name}.{key}"] = f"function{signature(value)}" if callable(value) else type(value).__name__
    return found


def of_exceptions() -> Surface:
    errors = importlib.import_module("zeropp.errors")
    classes = {key: value for key, value in vars(errors).items() if inspect.isclass(value) and not key.startswith("_")}
    return {f"except {key}": " < ".join(base.__name__ for base in value.__mro__) for key, value in classes.items()}


def of_operators() -> Surface:
    import torch

    importlib.import_module("zeropp.ops")
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("zeropp::")]
    return {f"torch.ops.{schema.name}": str(schema) for schema in schemas}


def of_commands() -> Surface:
    cli = importlib.import_module("zeropp.cli")
    found = {}
    for command in cli.COMMANDS:
        parser = argparse.ArgumentParser()
        importlib.import_module(f"zeropp.cli.{command.replace('-', '_')}").add_arguments(parser)
        for action in parser._actions:
            words = " ".join(action.option_strings) or action.dest
            found[f"python -m zeropp {command} {words}"] = f"{action.nargs} {action.choices} {action.default}"
    return found


def of_variables() -> Surface:
    """Return the environment variables that the C core and the package read."""
    files = [
        path for folder in ("csrc", "python") for path in (ROOT / folder).rglob("*") if path.suffix in (".c", ".py")
    ]
    names = {name for path in files for name in re.findall(r'"(ZEROPP_[A-Z_]+)"', path.read_text())}
    return {f"${name}": "variable" for name in names}


def surface() -> Surface:
    found = {**of_exceptions(), **of_operators(), **of_commands(), **of_variables()}
    for name in (*MODULES, *FRAMEWORKS):
        found.update(of_module(name))
    return dict(sorted(found.items()))


def test_public_surface_is_the_recorded_one() -> None:
    """Nothing public is renamed, removed or altered; what is new is recorded."""
    for framework in FRAMEWORKS.values():
        pytest.importorskip(framework)
    if sys.version_info[:2] != (3, 11):
        pytest.skip("signatures are written differently by other versions of Python; the snapshot is of 3.11")
    # In a process of its own: transformers rewrites the types of fields when it parses arguments.
    printed = subprocess.run([sys.executable, __file__, "--print"], capture_output=True, text=True, timeout=200)
    assert printed.returncode == 0, printed.stderr
    recorded, found = json.loads(SNAPSHOT.read_text()), json.loads(printed.stdout)
    broken = [
        f"{name}: recorded {text}; found {found.get(name)}"
        for name, text in recorded.items()
        if found.get(name) != text
    ]
    assert not broken, "the public surface changed:\n" + "\n".join(broken)
    added = sorted(found.keys() - recorded.keys())
    assert not added, f"new public names; record them with python {Path(__file__).relative_to(ROOT)}: {added}"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "python"))
    text = json.dumps(surface(), indent=0) + "\n"
    if "--print" in sys.argv:
        print(text)
    else:
        SNAPSHOT.write_text(text)
