# SPDX-License-Identifier: Apache-2.0
"""``python -m zeropp analyse DATASET PATH``: the difficulty of every sample, for curriculum sampling (docs/efficiency.md).

DATASET is a folder that ``datasets`` saved, or ``package.module:function``, a function without arguments that returns the
dataset. A metric that is a function is named alike.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from zeropp.cli import refuse
from zeropp.data.analysis import analyse
from zeropp.data.metrics import NAMED
from zeropp.errors import ConfigError, Error, NotBuiltError, counted, one_line

_WANTED = "wanted package.module:function"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``analyse``."""
    parser.add_argument("dataset", metavar="DATASET", help="package.module:function, or a folder that datasets saved")
    parser.add_argument("path", metavar="PATH", help="folder of the index")
    parser.add_argument(
        "--metric", action="append", default=[], metavar="NAME=METRIC",
        help=f"{', '.join(NAMED)}, or package.module:function of a sample; again for each metric (seqlen=seqlen)",
    )  # fmt: skip
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="processes that read and measure (0)")
    parser.add_argument("--tokens", default="input_ids", metavar="KEY", help="of the tokens in a sample (input_ids)")


def run(options: argparse.Namespace) -> int:
    """Analyse, and print each metric's range. Exit status: 0, or 2 where something cannot be used."""
    sys.path.insert(0, "")
    try:
        metrics = dict(_metric_of(one) for one in options.metric or ["seqlen=seqlen"])
        index = analyse(
            _dataset_of(options.dataset), metrics, options.path, workers=options.workers, tokens=options.tokens,
            progress=sys.stderr.isatty(),
        )  # fmt: skip
    except Error as error:
        return refuse("analyse", error)
    print(f"{index.path}: {counted(index.samples, 'sample')}")
    for name in index.metrics:
        values, order = index.values(name), index.order(name)
        least, middle, most = (float(values[order[place]]) for place in (0, index.samples // 2, index.samples - 1))
        print(f"  {name:20} least {least:g}, median {middle:g}, most {most:g}")
    return 0


def _metric_of(said: str) -> tuple[str, Any]:
    name, _, metric = said.partition("=")
    if not name or not metric:
        raise ConfigError(f"--metric {said}: wanted NAME=METRIC, such as length=seqlen")
    return name, _function(metric) if ":" in metric else metric


def _function(what: str) -> Any:
    module, _, name = what.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:
        raise ConfigError(f"{what}: {type(error).__name__}: {one_line(error)}; {_WANTED}") from error


def _dataset_of(what: str) -> Any:
    if not Path(what).exists():
        made = _function(what)
        try:
            return made()
        except Exception as error:
            raise ConfigError(f"{what}: raised {type(error).__name__}: {one_line(error)}") from error
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise NotBuiltError(f"{what}: reading a saved dataset needs datasets: pip install datasets") from error
    try:
        return datasets.load_from_disk(what)
    except Exception as error:
        raise ConfigError(f"{what}: datasets cannot load it: {one_line(error)}; {_WANTED}") from error
