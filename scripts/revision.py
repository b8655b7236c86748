# SPDX-License-Identifier: Apache-2.0
"""Another revision of this repository, built beside the tree: ``scripts/same_bits.py`` and ``benchmarks/run.py --against`` share it.

A revision is unpacked into ``build/against/SHORTHASH/`` and built there. The folder is reused: the build compiles nothing again as long as
the compiler is the same. ``make clean`` removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / "build" / "against"


class RevisionError(Exception):
    """A revision cannot be found or built; the message says why."""


@dataclass(frozen=True)
class Tree:
    """A source tree with its C module built."""

    name: str
    folder: Path

    @property
    def python(self) -> Path:
        """Return the folder to put on PYTHONPATH."""
        return self.folder / "python"


def checkout(rev: str, cache: Path = CACHE) -> Tree:
    """Return the tree of a revision, unpacked and built under ``cache``.

    Raises:
        RevisionError: git does not know the revision, or it does not build.
    """
    name = _git("rev-parse", "--short", "--verify", "--quiet", "--end-of-options", f"{rev}^{{commit}}", unknown=rev)
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{name}.lock").open("w") as lock:  # two tools that want the same revision take turns
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = cache / name
        if not folder.is_dir():
            _unpack(name, folder)
        build(folder, os.environ if _has_gpu() else {**os.environ, "NVCC": ""})
    return Tree(name, folder)


def this_tree() -> Tree:
    """Return the tree that this file belongs to, with its C module brought up to date."""
    build(ROOT)
    return Tree("this tree", ROOT)


def build(folder: Path, env: os._Environ[str] | dict[str, str] = os.environ) -> None:
    """Compile what changed in a tree.

    Raises:
        RevisionError: with the end of the compiler's output.
    """
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(
        command, cwd=folder, env=dict(env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode != 0:
        raise RevisionError(f"{folder}: setup.py build_ext ended with status {done.returncode}:\n{done.stdout[-3000:]}")


def _unpack(name: str, folder: Path) -> None:
    """Unpack beside the target and rename, so that a folder that is there is whole."""
    partial = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
    try:
        archive = subprocess.run(["git", "archive", "--format=tar", name], cwd=ROOT, stdout=subprocess.PIPE, check=True)
        subprocess.run(["tar", "-x", "-C", str(partial)], input=archive.stdout, check=True)
        partial.chmod(0o755)
        partial.rename(folder)
    except subprocess.CalledProcessError as error:
        raise RevisionError(f"revision {name}: cannot be unpacked: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _git(*words: str, unknown: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    except OSError as error:
        raise RevisionError(f"revision {unknown!r}: git cannot be run ({error}); install git") from error
    if done.returncode != 0 or not done.stdout.strip():
        said = done.stderr.strip() or "git knows no such commit"
        raise RevisionError(f"revision {unknown!r}: {said}; wanted a commit, branch or tag of {ROOT}")
    return done.stdout.strip()


def _has_gpu() -> bool:
    """Without a GPU the kernels for it would be minutes of compiling for nothing."""
    return Path("/dev/nvidiactl").exists()
