# SPDX-License-Identifier: Apache-2.0
"""docs/reference: every public name has an example there, and every example runs as it stands, in one process.

python tests/packaging/test_reference.py [TEXT]      run the examples whose names contain TEXT, and show what fails
"""

from __future__ import annotations

import doctest
import importlib
import io
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
NEEDS = {"zeropp.hf": "transformers", "zeropp.accelerate": "accelerate", "zeropp.lightning": "lightning"}
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def examples(page: Path) -> tuple[str, dict[str, str]]:
    """Return the lines that every example of a page begins with, and the examples by their names."""
    head, *parts = re.split(r"^## (.+)\n", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    code = [re.findall(r"^```pycon\n(.*?)^```", text, re.MULTILINE | re.DOTALL) for text in (head, *parts[1::2])]
    first, *others = ["".join(blocks) for blocks in code]
    return first, dict(zip(parts[::2], others, strict=True))


def public(module_name: str) -> dict[str, Any]:
    """Return what a module offers, by name; names of types for annotations are left out."""
    module = importlib.import_module(module_name)
    own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module_name]
    names = [key for key in getattr(module, "__all__", own) if not key.startswith("_")]
    return {name: getattr(module, name) for name in names if type(getattr(module, name)).__name__ != "TypeVar"}


def run(page: Path, name: str) -> str:
    """Run one example in a folder of its own; return what differs, or nothing."""
    import torch

    first, all_of_page = examples(page)
    test = doctest.DocTestParser().get_doctest(first + all_of_page[name], {}, f"{page.stem}.{name}", str(page), 0)
    said = io.StringIO()
    here = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="zeropp-example-") as folder:
        os.chdir(folder)
        try:
            doctest.DocTestRunner(optionflags=OPTIONS, verbose=False).run(test, out=said.write)
        finally:
            os.chdir(here)
            test.globs.clear()
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
    return said.getvalue()


def runnable(wanted: str = "") -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        try:
            importlib.import_module(NEEDS.get(page.stem, "torch"))
        except ImportError:
            continue
        yield from ((page, name) for name in examples(page)[1] if wanted in f"{page.stem}.{name}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_public_name_has_an_example(page: Path) -> None:
    """Names that another page shows already, such as zeropp.config.Config, have theirs there."""
    pytest.importorskip(NEEDS.get(page.stem, "torch"))
    first, there = examples(page)
    elsewhere = public("zeropp").values() if page.stem != "zeropp" else ()
    wanted = {name for name, value in public(page.stem).items() if not any(value is one for one in elsewhere)}
    assert not wanted - there.keys(), f"{page.name}: these have no example"
    assert not there.keys() - public(page.stem).keys(), f"{page.name}: these are no public names"
    for name, code in there.items():
        assert re.search(rf"\b{re.escape(name)}\b", first + code), f"{page.name}: the example of {name} does not use it"


def test_every_package_has_a_page() -> None:
    zeropp = importlib.import_module("zeropp")
    inner = {"zeropp.zero"}  # for this project's own modules
    pages = {page.stem for page in PAGES}
    shown_there = {"zeropp.errors"}  # all of its names stand in zeropp
    packages = {f"zeropp.{name}" for name in zeropp._MODULES} - inner - shown_there
    assert packages | {"zeropp", "zeropp.health"} == pages


@pytest.mark.timeout(320)
def test_examples_run(tmp_path: Path) -> None:
    """In a process of its own: the examples make groups and register names with other libraries."""
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, cwd=tmp_path, env=alone, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "python"))
    logging.disable(logging.WARNING)
    failed = 0
    for page, name in runnable(*sys.argv[1:]):
        if said := run(page, name):
            failed += 1
            print(said)
    sys.exit(failed and 1)
