# SPDX-License-Identifier: Apache-2.0
"""The manifest of a checkpoint, and the folders that checkpoints lie in. Format: docs/checkpoint-format.md."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeropp.checkpoint.content import check
from zeropp.errors import CheckpointError
from zeropp.files.disk import aside

MANIFEST = "manifest.json"
LATEST = "latest"
SPARE = ".spare"
SCALES = ".scales"
"""What the name of a state in 8 bits is followed by where its scales are meant."""


def steps_in(root: Path) -> list[tuple[int, Path]]:
    """Return (number, folder) of every finished checkpoint in a folder, lowest first.

    One that was about to be replaced on a file system that cannot exchange names still counts, until the new one has
    its name.
    """
    found: dict[int, Path] = {}
    for one in root.glob("step-*"):
        if re.fullmatch(r"step-[0-9]+", one.name) and one.is_dir():
            found[int(one.name[5:])] = one
    for one in root.glob(".step-*.old"):
        match = re.fullmatch(r"\.step-([0-9]+)\.old", one.name)
        if match and one.is_dir():
            found.setdefault(int(match[1]), one)
    return sorted(found.items())


def leftovers_in(root: Path) -> list[Path]:
    """Return what dead saves left: it is never loaded, and only takes room on the disk."""
    finished = {folder for _, folder in steps_in(root)}
    kinds = ("partial", "parts", "old", "removed")
    return [one for kind in kinds for one in sorted(root.glob(f".step-*.{kind}")) if one not in finished]


def candidates(path: Path) -> list[Path]:
    """Checkpoints in the order of preference: the one named, or the one of ``latest``, then the highest number first.

    Raises:
        zeropp.CheckpointError: none there.
    """
    if (path / MANIFEST).exists():
        return [path]
    folders = [folder for _, folder in reversed(steps_in(path))]
    with contextlib.suppress(OSError, ValueError):  # a damaged `latest` is as good as none
        name = (path / LATEST).read_text(encoding="utf-8").strip()
        named = [folder for folder in folders if folder in (path / name, aside(path / name))]
        folders = [*named, *(folder for folder in folders if folder not in named)]
    if not folders:
        what = "no step-* folder and no manifest.json in it" if path.exists() else "no such folder"
        raise CheckpointError(f"{path}: no checkpoint there ({what}); give the folder that zeropp.save wrote to")
    return folders


def none_good(damaged: Mapping[Path, str]) -> CheckpointError:
    """Return the error where all checkpoints are damaged. ``damaged``: what is wrong with each, newest first."""
    what = "; ".join(f"{folder.name} is damaged: {wrong}" for folder, wrong in damaged.items())
    if len(damaged) == 1:
        return CheckpointError(f"{what}; restore it from a copy")
    return CheckpointError(f"none of {len(damaged)} checkpoints is good: {what}; restore one of them from a copy")


def manifest_text(content: Mapping[str, Any]) -> str:
    """Return the file: the content and its sum."""
    return json.dumps({"sha256": _digest(content), "content": content}, separators=(",", ":"))


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, separators=(",", ":"), sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the verified content of a manifest.

    Raises:
        zeropp.CheckpointError: it is missing, damaged, does not fit together, or is of a version that this zeropp does not
            know.
    """
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing, so the checkpoint was never finished or was damaged since") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: damaged at offset {error.start}: not UTF-8") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        whole = json.loads(text)
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path}: damaged at offset {error.pos}: {error.msg}") from error
    if not isinstance(whole, dict) or not isinstance(whole.get("content"), dict):
        raise CheckpointError(f"{path}: is not a manifest of zeropp")
    content: dict[str, Any] = whole["content"]
    if _digest(content) != whole.get("sha256"):
        raise CheckpointError(
            f"{path}: damaged somewhere in its {len(text)} bytes: its sha256 does not match its content"
        )
    return check(str(path), content)
