# SPDX-License-Identifier: Apache-2.0
"""``python -m zeropp layout MODEL``: dimensions, stage, offload and micro-batch for a cluster, and what each other choice loses by."""

from __future__ import annotations

import argparse
import dataclasses
import json

from zeropp.cli import at_least_one, refuse
from zeropp.cli.estimate import build
from zeropp.errors import ConfigError, Error
from zeropp.parallel.layout import LINKS, layout, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``layout``."""
    parser.add_argument(
        "model", metavar="MODEL", help="a Hugging Face folder, its config.json, or package.module:function"
    )
    parser.add_argument(
        "--ranks", type=at_least_one, required=True, metavar="N", help="how many, on all hosts together"
    )
    parser.add_argument("--hosts", type=at_least_one, default=1, metavar="N", help="with as many ranks each (1)")
    parser.add_argument("--memory", type=float, required=True, metavar="GB", help="of a rank")
    parser.add_argument("--host-memory", type=float, metavar="GB", help="of a host; default: four times its ranks'")
    parser.add_argument("--sequence", type=at_least_one, required=True, metavar="TOKENS", help="of a sequence")
    parser.add_argument("--batch", type=at_least_one, required=True, metavar="N", help="sequences of a step")
    parser.add_argument("--tflops", type=float, required=True, help="that a rank's computation reaches")
    usual = ", ".join(f"{name}={speed:g}" for name, speed in LINKS.items())
    parser.add_argument("--links", nargs="*", default=[], metavar="NAME=GB/S", help=f"of links ({usual})")
    parser.add_argument("--json", action="store_true", help="one JSON list instead of a table")


def run(options: argparse.Namespace) -> int:
    """Print the choice and the runners-up. Exit status: 0, or 2 where nothing fits or an option cannot be used."""
    try:
        found = layout(
            build(options.model), ranks=options.ranks, hosts=options.hosts, memory=options.memory * 1e9, sequence=options.sequence,
            batch=options.batch, tflops=options.tflops, links=dict(_link_of(one) for one in options.links),
            host_memory=None if options.host_memory is None else options.host_memory * 1e9,
        )  # fmt: skip
    except (Error, OSError, ValueError) as error:
        return refuse("layout", error)
    listed = [{**dataclasses.asdict(one), "mesh": one.mesh} for one in found]
    print(json.dumps(listed) if options.json else table(found, options.sequence, options.batch))
    return 0


def _link_of(said: str) -> tuple[str, float]:
    name, _, speed = said.partition("=")
    try:
        return name, float(speed)
    except ValueError:
        raise ConfigError(
            f"--links {said}: {speed!r} is not a number; wanted 10^9 bytes a second, as in network=50"
        ) from None
