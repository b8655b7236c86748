# SPDX-License-Identifier: Apache-2.0
"""``python -m zeropp run SCRIPT --zeropp CFG …``: a script written for DeepSpeed, unchanged, in a process where
``import deepspeed`` means zeropp. Under torchrun: ``torchrun … -m zeropp run SCRIPT --zeropp CFG …``."""

from __future__ import annotations

import argparse
import importlib.util
import runpy
import sys
from pathlib import Path

from zeropp.cli.say import refuse
from zeropp.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``run``; all that follows the script is the script's."""
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as in python -m")
    parser.add_argument("script", metavar="SCRIPT", help="the script, unchanged")
    parser.add_argument(
        "arguments",
        metavar="…",
        nargs=argparse.REMAINDER,
        help="its arguments; --zeropp CFG reaches it as --deepspeed CFG",
    )


def run(options: argparse.Namespace) -> int:
    """Runs the script in this process; its exit status is the process's."""
    if not options.module and not Path(options.script).is_file():
        return refuse(
            "run", f"{options.script!r}: there is no such file; wanted a script, or -m and the name of a module"
        )
    if options.module and not _is_module(options.script):
        return refuse("run", f"{options.script!r}: there is no such module; wanted one that `import` finds from here")
    from zeropp.deepspeed_names import install, reach_children

    try:
        install()
        reach_children()
    except ConfigError as error:
        return refuse("run", error)
    sys.argv = [options.script, *map(_for_the_script, options.arguments)]
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


def _for_the_script(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return f"--deepspeed{equals}{value}" if name == "--zeropp" else argument
