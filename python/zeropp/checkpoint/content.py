# SPDX-License-Identifier: Apache-2.0
"""Check the content of a manifest, and make version 2 of version 1.

The sum of a manifest says that nobody changed it since it was written. It does not say that what was written is whole,
and anybody can write a manifest with a right sum. So all that a load, a verification and an export rely on is checked
here, once, and a manifest that does not fit together is refused with the name of the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from zeropp.errors import CheckpointError
from zeropp.zero.model.boxes import Box, Boxes, overlapping, problem_of, whole_of

FORMAT = "zeropp checkpoint"
VERSION = 2
READABLE = (1, 2)
MOST_ELEMS = 1 << 62
"""More elements than any tensor has: their bytes still fit 64 bits."""

Parts = list[Boxes]


def part_name(rank: int) -> str:
    """Return the file of one rank."""
    return f"rank-{rank:05d}.safetensors"


def parts_of(one: Mapping[str, Any]) -> Parts:
    """Return the parts of a parameter of a manifest: pieces refer to them by number."""
    if "parts" not in one:
        return [whole_of(one["shape"])]
    return [
        Boxes(
            tuple(one["shape"]),
            tuple(part["shape"]),
            tuple(Box(*(tuple(dims) for dims in box)) for box in part["boxes"]),
        )
        for part in one["parts"]
    ]


def part_json(part: Boxes) -> dict[str, Any]:
    """Return what a manifest says of a part."""
    return {"shape": list(part.shape), "boxes": [[list(b.offset), list(b.size), list(b.at)] for b in part.boxes]}


def part_of_piece(piece: list[int]) -> int:
    """Return the number of the part that a piece is a range of."""
    return piece[3] if len(piece) > 3 else 0


def numbers_of(one: Mapping[str, Any], part: Boxes) -> int:
    """Return how many real numbers a part of a parameter holds: a complex one counts as two."""
    return part.numel * (2 if one.get("complex") else 1)


def problem_of_parts(parts: Parts) -> str:
    """Return what is wrong with the parts of one tensor together, as the end of a sentence; empty if nothing is."""
    if not parts:
        return "has no parts"
    problem = next((found for part in parts if (found := problem_of(part))), "")
    if problem:
        return f"has a part that {problem}"
    boxes = [(box.offset, box.size) for part in parts for box in part.boxes]
    if overlapping(boxes):
        return "has parts that overlap"
    held, wanted = sum(math.prod(size) for _, size in boxes), math.prod(parts[0].whole)
    return "" if held == wanted else f"has {wanted} elements, and its parts hold {held} of them"


# -- kinds of values -----------------------------------------------------------------------------------------------------


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_ELEMS


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_buffers(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_count, value.values()))
    return _is_names(value)


def _is_scaler(value: Any) -> bool:
    names = ("scale", "good_steps", "skipped")
    return value is None or (isinstance(value, dict) and all(_is_number(value.get(name)) for name in names))


def _is_scheduler(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and isinstance(value.get("class"), str) and "state" in value)


def _is_group(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("values"), dict) and _is_names(value.get("parameters"))


def _is_optimizer(value: Any) -> bool:
    if value is None:
        return True
    groups = value.get("groups") if isinstance(value, dict) else None
    return isinstance(groups, list) and isinstance(value.get("class"), str) and all(map(_is_group, groups))


def _is_loaders(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_scheduler, value))


def _is_box(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(map(_is_counts, value))


def _is_part(value: Any) -> bool:
    if not isinstance(value, dict) or not _is_counts(value.get("shape")) or not isinstance(value.get("boxes"), list):
        return False
    return all(map(_is_box, value["boxes"]))


def _is_dtype(value: Any) -> bool:
    return isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype)


def _is_anything(value: Any) -> bool:
    return True


Rows = tuple[tuple[str, Callable[[Any], bool], bool, str], ...]
#: (field, what it may be, whether it has to be there, the same in words)
_FIELDS: Rows = (
    ("step", _is_count, True, "a whole number"),
    ("ranks", _is_count, True, "a whole number"),
    ("stage", _is_count, True, "a whole number"),
    ("groups", _is_count, False, "a whole number"),
    ("files", lambda value: isinstance(value, dict), True, "an object"),
    ("parameters", lambda value: isinstance(value, dict), True, "an object"),
    ("buffers", _is_buffers, True, "names, or names with the number of their file"),
    ("left_out", _is_names, False, "names"),
    ("optimizer", _is_optimizer, True, "null, or a class with groups of parameters"),
    ("steps", lambda value: value is None or _is_count(value), False, "a whole number"),
    ("scaler", _is_scaler, False, "null, or scale, good_steps and skipped"),
    ("scheduler", _is_scheduler, True, "null, or a class and a state"),
    ("loader", _is_loaders, False, "a class and a state for each rank"),
    ("private", lambda value: isinstance(value, list), False, "a list"),
    ("random", lambda value: isinstance(value, list), True, "a list"),
    ("extra", _is_anything, True, "anything"),
)
_FILE: Rows = (
    ("bytes", _is_count, True, "a whole number"),
    ("block_bytes", _is_count, True, "a whole number"),
    ("crc32", _is_counts, True, "whole numbers"),
)
_PARAMETER: Rows = (
    ("names", _is_names, True, "names"),
    ("shape", _is_counts, True, "whole numbers"),
    ("dtype", _is_dtype, True, "a dtype of torch"),
    ("complex", lambda value: isinstance(value, bool), False, "true or false"),
    ("steps", _is_count, False, "a whole number"),
    ("parts", lambda value: isinstance(value, list) and all(map(_is_part, value)), False, "parts of boxes"),
    ("pieces", lambda value: isinstance(value, dict), True, "an object"),
)


def _problem_of_fields(held: Any, rows: Rows) -> str:
    if not isinstance(held, dict):
        return f"is a {type(held).__name__}; wanted an object"
    for field, may_be, needed, words in rows:
        if field not in held and needed:
            return f"lacks '{field}'"
        if field in held and not may_be(held[field]):
            return f"has {field} {str(held[field])[:60]!r}; wanted {words}"
    return ""


# -- the content ---------------------------------------------------------------------------------------------------------


def check(where: str, content: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a manifest as version 2 has it.

    Raises:
        zeropp.CheckpointError: a field is missing or holds something else, or the pieces of a parameter do not make it up;
            names the parameter. ``where`` names the file.
    """
    if content.get("format") != FORMAT or content.get("version") not in READABLE:
        raise CheckpointError(
            f"{where}: format {content.get('format')!r} version {content.get('version')!r}; "
            f"this zeropp reads {FORMAT!r} versions {' and '.join(map(str, READABLE))}"
        )
    _require(where, "the manifest", _problem_of_fields(content, _FIELDS) or _problem_of_ranks(content))
    for name, entry in content["files"].items():
        _require(where, f"file '{name}'", _problem_of_fields(entry, _FILE) or _problem_of_sums(entry))
    files = len(content["files"])
    for name, one in content["parameters"].items():
        problem = _problem_of_fields(one, _PARAMETER) or _problem_of_parameter(name, one, files)
        _require(where, f"'{name}'", problem)
    if isinstance(content["buffers"], list):
        content["buffers"] = dict.fromkeys(content["buffers"], 0)
    most = max(content["buffers"].values(), default=0)
    _require(where, "the manifest", "" if most < files else f"has a buffer in file {most} of {files}")
    return content


def _require(where: str, what: str, problem: str) -> None:
    if problem:
        raise CheckpointError(f"{where}: {what} {problem}; the manifest is damaged, or was not written by zeropp")


def _problem_of_ranks(content: Mapping[str, Any]) -> str:
    ranks = content["ranks"]
    if list(content["files"]) != [part_name(rank) for rank in range(ranks)] or not ranks:
        return f"has ranks {ranks} and other files than those of as many ranks"
    for field in ("random", "loader", "private"):
        if len(content.get(field, content["random"])) != ranks:
            return f"has ranks {ranks} and '{field}' of another number of ranks"
    return ""


def _problem_of_sums(entry: Mapping[str, Any]) -> str:
    size, block, sums = entry["bytes"], entry["block_bytes"], len(entry["crc32"])
    fits = block > 0 and sums == -(-size // block)
    return "" if fits else f"has {sums} sums for {size} bytes in blocks of {block}"


def _problem_of_parameter(name: str, one: Mapping[str, Any], files: int) -> str:
    if name not in one["names"]:
        return f"has other names: {', '.join(one['names'][:3])}"
    if math.prod(one["shape"]) >= MOST_ELEMS:
        return f"has shape {one['shape']}"
    if one.get("complex") and "parts" in one:
        return "is complex and has parts"
    parts = parts_of(one)
    problem = problem_of_parts(parts)
    return problem or _problem_of_values(one, parts, files)


def _problem_of_values(one: Mapping[str, Any], parts: Parts, files: int) -> str:
    numels = [numbers_of(one, part) for part in parts]
    for kind, pieces in one["pieces"].items():
        problem = _problem_of_form(pieces, numels, files) or _problem_of_spans(pieces, numels, whole=not kind)
        if problem:
            return f"{problem} (state '{kind}')" if kind else problem
    return "" if "" in one["pieces"] or not any(numels) else "has no values"


def _problem_of_form(pieces: Any, numels: list[int], files: int) -> str:
    """Return what is wrong with single pieces, of a parameter whose parts have so many elements."""
    if not isinstance(pieces, list) or not all(_is_counts(piece) and len(piece) in (3, 4) for piece in pieces):
        return "has a piece that is not file, begin, end, and part"
    for piece in pieces:
        (file, begin, end), part = piece[:3], part_of_piece(piece)
        if part >= len(numels) or file >= files:
            return f"has a piece of part {part} of {len(numels)} in file {file} of {files}"
        if not begin <= end <= numels[part]:
            return f"has a piece from {begin} to {end} of {numels[part]} elements"
    return ""


def _problem_of_spans(pieces: list[list[int]], numels: list[int], whole: bool) -> str:
    """Return what is wrong with pieces together; ``whole``: they have to hold every element."""
    for part, numel in enumerate(numels):
        at, gap = _without_gap((piece[1], piece[2]) for piece in pieces if part_of_piece(piece) == part)
        if gap == "overlap":
            return f"has pieces that overlap behind element {at}"
        if whole and at != numel:
            return f"has {numel} elements, and its pieces hold elements 0 to {at} without a gap"
    return ""


def _without_gap(spans: Iterable[tuple[int, int]]) -> tuple[int, str]:
    """Return (the end of the pieces that follow each other from 0 on, what ends them: "", "a gap" or "overlap")."""
    at, until, problem = 0, 0, ""
    for begin, end in sorted(spans):
        if begin < until:
            return at, "overlap"
        problem = problem or ("a gap" if begin > at else "")
        at = at if problem else end
        until = end
    return at, problem
