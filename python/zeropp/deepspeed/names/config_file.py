# SPDX-License-Identifier: Apache-2.0
"""A file with zeropp's own keys for frameworks that read DeepSpeed's: what they look for, said by DeepSpeed's keys; the rest stays as
it is, and ``deepspeed.initialize`` reads both."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zeropp.config import Config
from zeropp.config.deepspeed_json import is_deepspeed_key
from zeropp.config.reading import read_json


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
    """The name of a file for ``--deepspeed``: the given one, or a temporary one where that is JSON text or has zeropp's own keys.
    A name of no file stays as it is: the script says what it thinks of it."""
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


__all__ = ["for_frameworks", "readable_by_frameworks"]
