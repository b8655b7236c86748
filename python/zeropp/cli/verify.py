# SPDX-License-Identifier: Apache-2.0
"""``python -m zeropp verify CKPT`` checks that every byte of a checkpoint is as it was saved. It needs no model, no ranks, no GPU."""

from __future__ import annotations

import argparse
import json

from zeropp.checkpoint.offline import Finding, verify
from zeropp.cli import refuse
from zeropp.errors import Error, counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``verify``."""
    parser.add_argument("checkpoint", help="a folder that zeropp.save wrote to, or one step-* folder in it")
    parser.add_argument("--json", action="store_true", help="one JSON object a checkpoint instead of lines")


def run(options: argparse.Namespace) -> int:
    """Print one line a checkpoint, newest first. Exit status: 0 all good, 1 one is damaged, 2 there is none."""
    try:
        findings = verify(options.checkpoint)
    except Error as error:
        return refuse("verify", error)
    for finding in findings:
        print(json.dumps(_as_dict(finding)) if options.json else _as_line(finding))
    return 1 if any(finding.wrong for finding in findings) else 0


def _as_dict(finding: Finding) -> dict[str, object]:
    return {
        "path": str(finding.folder), "good": finding.wrong is None, "wrong": finding.wrong, "step": finding.step,
        "ranks": finding.ranks, "stage": finding.stage, "bytes": finding.file_bytes, "latest": finding.latest,
    }  # fmt: skip


def _as_line(finding: Finding) -> str:
    latest = " (latest)" if finding.latest else ""
    if finding.wrong is not None:
        return f"damaged {finding.folder}{latest}: {finding.wrong}"
    return (
        f"good    {finding.folder}{latest}: {finding.file_bytes or 0:,} bytes of {counted(finding.ranks or 0, 'rank')}, "
        f"stage {finding.stage}"
    )
