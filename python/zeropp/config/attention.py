# SPDX-License-Identifier: Apache-2.0
"""The section ``sparse_attention`` of DeepSpeed's JSON, which is also how ``efficiency.attention`` is written in JSON.

DeepSpeed removed it after 0.18.9. Keys and their defaults are those of that version's JSON; its classes have one other default
(BigBird's random blocks: 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeropp.config.values import nearest, whole, wrong
from zeropp.errors import ConfigError, shown

Section = dict[str, Any]

_HEADS = {"block": 16, "different_layout_per_head": False}
_GLOBALS = {"global_block_indices": [0], "global_block_end_indices": None}
_ROWS = {"attention": "bidirectional", "horizontal_global_attention": False}
#: The keys of each mode, with their defaults. DeepSpeed reads no ``attention`` for the last two; here they follow it, too.
MODES: dict[str, Section] = {
    "fixed": {**_HEADS, "num_local_blocks": 4, "num_global_blocks": 1, **_ROWS, "num_different_global_patterns": 1},
    "dense": _HEADS,
    "variable": {**_HEADS, "num_random_blocks": 0, "local_window_blocks": [4], **_GLOBALS, **_ROWS},
    "bigbird": {
        **_HEADS,
        "num_random_blocks": 0,
        "num_sliding_window_blocks": 3,
        "num_global_blocks": 1,
        "attention": "bidirectional",
    },
    "bslongformer": {**_HEADS, "num_sliding_window_blocks": 3, **_GLOBALS, "attention": "bidirectional"},
}
_ATTENTION = ("unidirectional", "bidirectional")
_LEAST = {"num_random_blocks": 0, "global_block_indices": 0}


def read_section(section: Any, path: str) -> Section:
    """Return a section with all keys of its mode, ``mode`` included.

    Raises:
        zeropp.ConfigError: an unknown key, a value that cannot be, or values that contradict one another.
    """
    if not isinstance(section, Mapping):
        raise wrong(path, section, 'a section such as {"mode": "fixed", "block": 64}')
    mode = section.get("mode", "fixed")
    if mode not in MODES:
        raise wrong(f"{path}.mode", mode, f"one of {', '.join(MODES)}{nearest(mode, MODES)}")
    defaults = MODES[mode]
    for key, value in section.items():
        if key != "mode" and key not in defaults:
            known = ", ".join(defaults)
            raise ConfigError(
                f"{path}.{key}: unknown key (value {shown(value)}) of mode {mode!r}; known are {known}{nearest(key, defaults)}"
            )
    read = {"mode": mode, **defaults, **section}
    for key, default in defaults.items():
        _check_value(f"{path}.{key}", key, read[key], default)
    _check_together(read, path)
    return read


def _check_value(path: str, key: str, value: Any, default: Any) -> None:
    least = _LEAST.get(key, 1)
    if key == "attention":
        if value not in _ATTENTION:
            raise wrong(path, value, " or ".join(_ATTENTION))
    elif key == "block":
        if value not in (16, 32, 64, 128):
            raise wrong(path, value, "16, 32, 64 or 128")
    elif isinstance(default, bool):
        if not isinstance(value, bool):
            raise wrong(path, value, "true or false")
    elif isinstance(default, list) or default is None:
        if value is not None or default is not None:
            _check_numbers(path, value, least)
    else:
        whole(path, value, least, "blocks")


def _check_numbers(path: str, value: Any, least: int) -> None:
    if not isinstance(value, (list, tuple)) or not value:
        raise wrong(path, value, "a list of whole numbers")
    for one in value:
        whole(path, one, least, "numbers of blocks")


def _check_together(read: Section, path: str) -> None:
    """Refuse what DeepSpeed's classes refuse."""
    if read.get("horizontal_global_attention") and read["attention"] == "unidirectional":
        raise wrong(f"{path}.horizontal_global_attention", True, "false where attention is unidirectional")
    if read["mode"] == "fixed":
        local, own, patterns = (
            read[f"num_{name}"] for name in ("local_blocks", "global_blocks", "different_global_patterns")
        )
        if local % own:
            raise wrong(f"{path}.num_global_blocks", own, f"a number that divides num_local_blocks, {local}")
        if patterns > local // own:
            raise wrong(f"{path}.num_different_global_patterns", patterns, f"at most {local // own}: {local} / {own}")
        if patterns > 1 and not read["different_layout_per_head"]:
            raise wrong(f"{path}.different_layout_per_head", False, f"true for {patterns} global patterns")
    _check_ends(read, path)


def _check_ends(read: Section, path: str) -> None:
    ends = read.get("global_block_end_indices")
    if ends is None:
        return
    begins = read["global_block_indices"]
    if len(begins) != len(ends) or any(begin >= end for begin, end in zip(begins, ends, strict=True)):
        raise wrong(f"{path}.global_block_end_indices", ends, f"a larger number for each of global_block_indices, {list(begins)}")  # fmt: skip


def check_attention(value: Any, path: str) -> Any:
    """Return ``Efficiency.attention`` as it is kept: one pattern or section, or a dict of them by the layer's number."""
    if not isinstance(value, Mapping):
        return _one(value, path)
    if value and all(_is_layer(key) for key in value):
        return {int(layer): _one(one, f"{path}[{layer}]") for layer, one in value.items()}
    return read_section(value, path)


def _is_layer(key: object) -> bool:
    return (isinstance(key, int) and not isinstance(key, bool) and key >= 0) or (
        isinstance(key, str) and key.isdecimal()
    )


def _one(value: Any, path: str) -> Any:
    if isinstance(value, Mapping):
        return read_section(value, path)
    if callable(getattr(value, "layout", None)) and hasattr(value, "causal") and not isinstance(value, type):
        return value
    raise wrong(
        path, value, "a pattern such as zeropp.nn.Longformer(block=64), or a mapping of layers' numbers to patterns"
    )
