# SPDX-License-Identifier: Apache-2.0
"""``python -m zeropp plot FILE...`` draws results of benchmarks, and the metrics of runs, as pictures."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropp.cli import refuse

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
BETTER, WORSE = "#2a7f62", "#b5651d"
LOG_FROM = 20.0  # ratios above this are drawn on a logarithmic axis
# The panels of a run: a title, and the keys of its rows that belong there. Every other number gets a panel of its own.
PANELS = (
    ("memory, bytes", ("memory_bytes", "gathered_bytes", "device_bytes", "pinned_bytes")),
    ("states, bytes", ("params_bytes", "grads_bytes", "master_bytes", "optimizer_bytes", "planned_bytes")),
    ("bytes a step", ("disk_read_bytes", "disk_written_bytes", "shm_bytes", "network_bytes")),
    ("seconds a step", ("step_s", "forward_s", "backward_s", "optimizer_s", "wait_s")),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``plot``."""
    parser.add_argument("files", nargs="+", type=Path, help="benchmarks/results/*.jsonl, or the metrics.jsonl of a run")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the pictures; default: this one")
    parser.add_argument("--format", choices=("png", "svg", "pdf"), default="png")
    parser.add_argument("--case", default="", metavar="TEXT", help="of benchmarks: the cases whose names contain this")


def run(options: argparse.Namespace) -> int:
    """Draw one picture a benchmark and one a run, and print their paths. Exit status: 0, or 2 where a file is no such file."""
    try:
        import matplotlib
    except ImportError:
        return refuse("plot", "matplotlib is not installed; pip install matplotlib")
    options.out.mkdir(parents=True, exist_ok=True)
    for path in options.files:
        try:
            drawn = pictures(path, options.case)
        except (OSError, ValueError) as error:
            return refuse("plot", error)
        for name, figure in drawn.items():
            target = options.out / f"{name}.{options.format}"
            # The same rows give the same file: text stays text, and neither names nor dates are made up.
            with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
                figure.savefig(target, metadata={"Date": None} if options.format == "svg" else None)
            print(target)
    return 0


def pictures(path: Path, case: str = "") -> dict[str, Figure]:
    """Return the pictures of a file by their names.

    Args:
        path: lines of JSON objects: rows of benchmarks have ``bench``, ``case`` and ``ratio``; rows of a run have ``step``.
        case: of the rows of benchmarks, those whose ``case`` contains this text.

    Raises:
        ValueError: a line is no JSON object, its object is neither, or no row has such a case.
    """
    rows = read(path)
    if all("bench" in row for row in rows):
        chosen = of_case(path, rows, case)
        names = dict.fromkeys(row["bench"] for row in chosen)
        drawn = {name: ratios(name, newest(chosen, name)) for name in names if newest(chosen, name)}
        if drawn:
            return drawn
    elif all("step" in row for row in rows):
        return {path.stem if path.stem != "metrics" else f"{path.absolute().parent.name}-metrics": run_of(rows)}
    raise ValueError(
        f"{path}: its rows are neither results of a benchmark ('bench', 'case', 'ratio') nor metrics of a run ('step'); "
        "benchmarks/run.py --json and the training examples write such files"
    )


def of_case(path: Path, rows: list[Row], case: str) -> list[Row]:
    """Return the rows whose case contains a text; a text that no case contains is an error that lists them."""
    chosen = [row for row in rows if case in str(row.get("case"))]
    if not chosen:
        cases = dict.fromkeys(str(row.get("case")) for row in rows)
        raise ValueError(f"{path}: no case contains {case!r}; there are {', '.join(cases)}")
    return chosen


def read(path: Path) -> list[Row]:
    """Return the objects of a file of JSON lines."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not JSON ({error.msg}); wanted one object a line") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: a {type(row).__name__}; wanted one object a line")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path}: no rows; wanted one JSON object a line")
    return rows


def newest(rows: list[Row], bench: str) -> list[Row]:
    """Return the last row of each case and peer that has a ratio."""
    found = {(row.get("case"), row.get("peer_name")): row for row in rows if row["bench"] == bench and row.get("ratio")}
    return list(found.values())


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def ratios(title: str, rows: list[Row]) -> Figure:
    """Draw the ratios of a benchmark as bars, with their quartiles; above 1, zeropp is better."""
    figure = _figure(9, 0.32 * len(rows) + 1.0)
    axes = figure.add_subplot()
    values = [float(row["ratio"]) for row in rows]
    low = [max(row["ratio"] - row.get("ratio_low", row["ratio"]), 0.0) for row in rows]
    high = [max(row.get("ratio_high", row["ratio"]) - row["ratio"], 0.0) for row in rows]
    axes.barh(range(len(rows)), values, xerr=[low, high], color=[BETTER if value >= 1 else WORSE for value in values])
    for place, value in enumerate(values):
        axes.annotate(
            f"{value:.3g}", (0, place), xycoords=axes.get_yaxis_transform(), xytext=(4, 0),
            textcoords="offset points", va="center", fontsize=7, color="white",
        )  # fmt: skip
    axes.set_yticks(range(len(rows)), [f"{row.get('case')} : {row.get('peer_name')}" for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=0.8)
    if max(values) > LOG_FROM:
        axes.set_xscale("log")
    axes.set_xlabel("ratio to the peer (above 1: zeropp is better), median and quartiles", fontsize=8)
    axes.set_title(title, fontsize=10)
    return figure


def _series(rows: list[Row], key: str) -> list[tuple[str, list[float], list[float]]]:
    """Return name, steps and values of a key: one series, or one a rank where the values are lists."""
    usable = [row for row in rows if key in row]
    first = usable[0][key]
    steps = [float(row["step"]) for row in usable]
    if isinstance(first, list):
        return [(f"{key}, rank {rank}", steps, [float(row[key][rank]) for row in usable]) for rank in range(len(first))]
    return [(key, steps, [float(row[key]) for row in usable])]


def _drawable(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(_drawable(one) for one in value)
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _keys(rows: list[Row]) -> list[str]:
    """Return the keys of a run's numbers, in the order of the rows."""
    found = dict.fromkeys(key for row in rows for key, value in row.items() if _drawable(value))
    return [key for key in found if key != "step"]


def _panels(rows: list[Row]) -> list[tuple[str, list[str]]]:
    """Return the panels of a run: titles, and the keys in each."""
    title_of = {key: title for title, members in PANELS for key in members}
    panels: dict[str, list[str]] = {}
    for key in _keys(rows):
        panels.setdefault(title_of.get(key, key), []).append(key)
    return sorted(panels.items(), key=lambda panel: panel[0] != panel[1][0])  # numbers of their own first


def run_of(rows: list[Row]) -> Figure:
    """Draw every number of a run over its steps, related ones in one panel."""
    panels = _panels(rows)
    if not panels:
        raise ValueError("rows of a run without a number besides 'step'; wanted for example 'loss'")
    figure = _figure(8, 2.2 * len(panels))
    for at, (title, members) in enumerate(panels, 1):
        axes = figure.add_subplot(len(panels), 1, at)
        for name, steps, values in (series for key in members for series in _series(rows, key)):
            axes.plot(steps, values, label=name, linewidth=1.0)
        axes.set_ylabel(title, fontsize=8)
        if len(axes.lines) > 1:
            axes.legend(fontsize=7)
    axes.set_xlabel("step", fontsize=8)
    return figure
