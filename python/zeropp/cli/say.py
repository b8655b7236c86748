# SPDX-License-Identifier: Apache-2.0
"""How a command refuses: one sentence on standard error, and types of options that argparse lacks."""

from __future__ import annotations

import argparse
import sys

__all__ = ["at_least_one", "refuse"]


def refuse(command: str, error: BaseException | str, status: int = 2) -> int:
    """Print why a command cannot go on; return its exit status."""
    text = " ".join(str(error).split()).removeprefix(f"{command}: ")
    print(f"python -m zeropp {command}: {text}", file=sys.stderr)
    return status


def at_least_one(text: str) -> int:
    """The type of an option that counts something."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; wanted a whole number above 0")
    return value
