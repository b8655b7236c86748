# SPDX-License-Identifier: Apache-2.0
"""The commands of ``python -m zeropp``: one module each, with ``add_arguments`` and ``run``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

COMMANDS = {
    "run": "a script written for DeepSpeed, unchanged: in this process `import deepspeed` means zeropp",
    "env": "what zeropp found on this machine: torch, CPU level, kernels, CUDA driver, NCCL, io_uring",
    "doctor": "under torchrun: latency and bandwidth of every pair of ranks, and which rank or link is slow or dead; with --device: is a GPU right",
    "config": "what every key of a configuration file does here, DeepSpeed's too, and what is not supported",
    "estimate": "bytes that a run will hold and move, and the bandwidth that it needs, before it runs",
    "layout": "which dimensions, stage and micro-batch for a cluster, and what the others lose by",
    "bench-io": "the best I/O settings of a disk, and how near its limit they come",
    "analyse": "the difficulty of every sample of a dataset, for curriculum sampling",
    "plot": "pictures of results of benchmarks, and of the metrics of a run",
    "verify": "is every byte of a checkpoint as it was saved",
    "export": "a checkpoint as safetensors files in the Hugging Face layout",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: what follows ``python -m zeropp``; the process's own if None.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m zeropp", description="zeropp's command line.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules = {name: importlib.import_module(f"zeropp.cli.{name.replace('-', '_')}") for name in COMMANDS}
    for name, help_text in COMMANDS.items():
        modules[name].add_arguments(commands.add_parser(name, help=help_text, description=help_text))
    options = parser.parse_args(arguments)
    status: int = modules[options.command].run(options)
    return status


def refuse(command: str, error: BaseException | str, status: int = 2) -> int:
    """Print why a command cannot go on; return its exit status."""
    text = " ".join(str(error).split()).removeprefix(f"{command}: ")
    print(f"python -m zeropp {command}: {text}", file=sys.stderr)
    return status


def new_table(title: str | None = None, **options: Any) -> Table:
    """Return a table of rich without lines; most commands print none, so rich is loaded here."""
    from rich.table import Table

    return Table(title=title, title_justify="left", box=None, **options)


def show(*parts: Table | str) -> None:
    """Print tables and lines on standard output, in the terminal's width."""
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False, markup=False)
    for part in parts:
        console.print(part)


def at_least_one(text: str) -> int:
    """Read an option that counts something: an argument of argparse's ``type``."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; wanted a whole number above 0")
    return value
