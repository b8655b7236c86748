# SPDX-License-Identifier: Apache-2.0
"""``python -m zeropp run SCRIPT --zeropp CFG …``: a script written for DeepSpeed, unchanged, in a process where
``import deepspeed`` means zeropp. Under torchrun: ``torchrun … -m zeropp run SCRIPT --zeropp CFG …``."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import runpy
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zeropp.cli import refuse
from zeropp.config import Config
from zeropp.config.deepspeed_json import is_deepspeed_key
from zeropp.config.reading import read_json
from zeropp.deepspeed.names import install, reach_children
from zeropp.errors import ConfigError

_FLAG = "--zeropp"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``run``; all that follows the script is the script's."""
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as in python -m")
    parser.add_argument(
        _FLAG,
        metavar="CFG",
        dest="for_accelerate",
        help="before SCRIPT: reaches an Accelerator() without arguments, as `accelerate launch --deepspeed_config_file` does",
    )
    parser.add_argument("script", metavar="SCRIPT", help="the script, unchanged")
    parser.add_argument(
        "arguments",
        metavar="…",
        nargs=argparse.REMAINDER,
        help="its arguments; --zeropp CFG reaches it as --deepspeed CFG; CFG is DeepSpeed's JSON or zeropp's, a file or text",
    )


def run(options: argparse.Namespace) -> int:
    """Runs the script in this process; its exit status is the process's."""
    if not options.module and not Path(options.script).is_file():
        return refuse(
            "run", f"{options.script!r}: there is no such file; wanted a script, or -m and the name of a module"
        )
    no_module = f"{options.script!r}: there is no such module; wanted one that `import` finds from here"
    if options.module and not _is_module(options.script.partition(".")[0]):
        return refuse("run", no_module)
    with contextlib.ExitStack() as files:
        try:
            install()
            arguments = _for_the_script(options.arguments, files)
            if options.for_accelerate is not None:
                _tell_accelerate(options.for_accelerate, files)
        except ConfigError as error:
            return refuse("run", error)
        if options.module and not _is_module(options.script):  # after install: it imports the parent packages
            return refuse("run", no_module)
        reach_children()
        sys.argv = [options.script, *arguments]
        if options.module:
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(options.script).resolve().parent))
            runpy.run_path(options.script, run_name="__main__")
    return 0


def _is_module(name: str) -> bool:
    """True if ``python -m`` would find it. Its parent packages are imported, as there."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name):
            return False
        raise  # a parent is there, and imports what is not
    except ValueError:  # no name at all, or one without a spec
        return name in sys.modules
    finally:
        sys.path.pop(0)


def _for_the_script(arguments: list[str], files: contextlib.ExitStack) -> list[str]:
    """Return the arguments with ``--zeropp`` by DeepSpeed's name, with a file that frameworks can read."""
    said: list[str] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name == _FLAG:
            value = files.enter_context(readable_by_frameworks(value)) if equals else value
            said.append(f"--deepspeed{equals}{value}")
        elif said[-1:] == ["--deepspeed"] and arguments[len(said) - 1] == _FLAG:
            said.append(files.enter_context(readable_by_frameworks(argument)))
        else:
            said.append(argument)
    return said


def _tell_accelerate(source: str, files: contextlib.ExitStack) -> None:
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = files.enter_context(readable_by_frameworks(source))


# A file with zeropp's own keys, for frameworks that read DeepSpeed's: the keys that they look for are added, and deepspeed.initialize reads
# both.


def for_frameworks(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with the sections that Trainer and Accelerate look for. A file of DeepSpeed's keys alone is unchanged.

    Raises:
        zeropp.ConfigError: a key that is not supported, with its path.
    """
    own = {name: value for name, value in keys.items() if not is_deepspeed_key(name)}
    if not own or "zero_optimization" in keys:
        return dict(keys)
    Config.from_json(own)
    said = {name: value for name, value in keys.items() if name != "stage"}
    said["zero_optimization"] = {"stage": own.get("stage", Config().stage)}
    for theirs, ours in (("gradient_accumulation_steps", "accumulate"), ("gradient_clipping", "clip")):
        said.setdefault(theirs, said.pop(ours, None) or "auto")  # "auto": the framework's own, as without zeropp
    if "train_batch_size" not in said:
        said.setdefault("train_micro_batch_size_per_gpu", "auto")
    return said


@contextlib.contextmanager
def readable_by_frameworks(source: str) -> Iterator[str]:
    """Give the name of a file for ``--deepspeed``: the given one, or a temporary one where that is JSON text or has zeropp's own keys.
    A name of no file stays as it is, and the script reports it."""
    text = source.lstrip().startswith("{")
    keys = read_json(source) if text or Path(source).is_file() else {}
    said = for_frameworks(keys)
    if said == keys and not text:
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="zeropp-") as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(said), encoding="utf-8")
        yield str(path)
