# SPDX-License-Identifier: Apache-2.0
"""``zeropp.trace(path)``: what zeropp did when, for https://ui.perfetto.dev and chrome://tracing.

    with zeropp.trace("trace.json"):
        for batch in batches:
            ...  # a few steps

Spans come from C (csrc/base/timeline.h): modules' forwards, backwards, steps, gathers, reductions, waits, and requests to
files. Without a trace they cost one load each.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import distributed

from zeropp import _C
from zeropp.errors import ConfigError

CAPACITY = 1 << 18


class trace:
    """Keep a timeline inside the block, and write it at its end.

    Args:
        path: a JSON file in Chrome's trace event format. With several ranks each writes its own:
            ``trace.json`` becomes ``trace.rank-0.json``, ``trace.rank-1.json``; times of one host agree.
        capacity: spans that are kept at most, 88 bytes each; what has no room is counted in ``otherData.dropped``.

    Attributes:
        file: what was written, after the block.

    Kinds of spans (``cat``): ``forward`` (a module that needs units), ``backward``, ``step`` (the time when shards are
    written), ``gather``, ``reduce``, ``wait`` (for a peer, a gather, a reduction, a file; ``name`` says which), ``read`` and
    ``write`` (requests to files, from submission to end). ``args.bytes``: bytes moved. ``otherData.reductions_hidden``: the
    share of the time of reductions that costs nothing: they ran while this rank waited for messages of other ranks, or it waited
    for other ranks afterwards, as long or longer.

    Raises:
        zeropp.Error: a trace is being taken in this process already. zeropp.ConfigError: an unusable path or capacity.
    """

    def __init__(self, path: str | os.PathLike[str], *, capacity: int = CAPACITY) -> None:
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
            raise ConfigError(f"trace: capacity {capacity!r} is not allowed; wanted a whole number of spans above 0")
        self._rank, ranks = _who()
        target = Path(path)
        self.file = target if ranks == 1 else target.with_name(f"{target.stem}.rank-{self._rank}{target.suffix}")
        if not self.file.parent.is_dir():
            raise ConfigError(f"trace: {self.file.parent} is no folder; make it first")
        self._capacity = capacity

    def __enter__(self) -> trace:
        _C.timeline_start(self._capacity)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        spans, dropped = _C.timeline_stop()
        events = [{"ph": "M", "name": "process_name", "pid": self._rank, "args": {"name": f"rank {self._rank}"}}]
        for number, span in enumerate(spans):
            events += _events(number, self._rank, *span)
        other = {"dropped": dropped, "reductions_hidden": _hidden(spans)}
        whole = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}
        self.file.write_text(json.dumps(whole, separators=(",", ":")), encoding="utf-8")


def _who() -> tuple[int, int]:
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


_FOR_MESSAGES = ("for a receive", "for a send")
_FOR_OTHERS = ("for the other ranks", "until all ranks step")


def _hidden(spans: list[Any]) -> float | None:
    """Return the share of the time of reductions that no rank waited for; None: nothing was reduced."""
    threads: dict[int, list[tuple[int, int, str, str]]] = {}
    for kind, name, thread, began, ended, _ in spans:
        if kind in ("wait", "reduce"):
            threads.setdefault(thread, []).append((began, -ended, kind, name))
    found = [_hidden_in(sorted(own)) for own in threads.values()]
    whole = sum(one for one, _ in found)
    return sum(hidden for _, hidden in found) / whole if whole else None


def _hidden_in(spans: list[tuple[int, int, str, str]]) -> tuple[int, int]:
    """Return (the time of reductions, how much of it was hidden) in one thread, whose spans (begin, -end, kind, name) are in order."""
    whole = hidden = left = until = 0
    waits = ""
    for began, minus_ended, kind, name in spans:
        took = -minus_ended - began
        if kind == "wait":
            if name in _FOR_OTHERS:  # it came early, although it had reduced first
                hidden, left = hidden + min(left, took), max(0, left - took)
            if -minus_ended > until:
                until, waits = -minus_ended, name
                left = 0 if name == "for reductions" else left
            continue
        whole += took
        if -minus_ended <= until:
            hidden += took if waits in _FOR_MESSAGES else 0
            left += took if waits == "for reductions" else 0
    return whole, hidden


def _events(
    number: int, rank: int, kind: str, name: str, thread: int, began_ns: int, ended_ns: int, size_bytes: int
) -> list[dict[str, Any]]:
    """Requests to files overlap, so they are a pair of asynchronous events; the rest nests within its thread."""
    common: dict[str, Any] = {"name": name, "cat": kind, "pid": rank, "tid": thread, "ts": began_ns / 1e3}
    if size_bytes:
        common["args"] = {"bytes": size_bytes}
    if kind not in ("read", "write"):
        return [{**common, "ph": "X", "dur": (ended_ns - began_ns) / 1e3}]
    end = {"name": name, "cat": kind, "pid": rank, "tid": thread, "ts": ended_ns / 1e3, "ph": "e", "id": number}
    return [{**common, "ph": "b", "id": number}, end]
