# SPDX-License-Identifier: Apache-2.0
"""``python -m zeropp run SCRIPT --zeropp CFG …``: a script written for DeepSpeed, unchanged, in a process where
``import deepspeed`` means zeropp. Under torchrun: ``torchrun … -m zeropp run SCRIPT --zeropp CFG …``."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import runpy
import sys
from pathlib import Path

from zeropp.cli.say import refuse
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
    from zeropp.deepspeed.names import install, reach_children

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
    """``--zeropp`` by DeepSpeed's name, with a file that frameworks can read."""
    from zeropp.deepspeed.names.config_file import readable_by_frameworks

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
    from zeropp.deepspeed.names.config_file import readable_by_frameworks

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = files.enter_context(readable_by_frameworks(source))
