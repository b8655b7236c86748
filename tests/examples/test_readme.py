# SPDX-License-Identifier: Apache-2.0
"""Check the pages: the README's example is the file that runs, and the files that pages name exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(one for one in sys.path if one), "OMP_NUM_THREADS": "1"}


# Pages that name files of other projects: torch, DeepSpeed and scripts for them.
OTHERS = {"docs/conformance.md", "docs/from-deepspeed.md"}
FOLDERS = ("", "docs", "docs/design", "csrc", "python", "benchmarks")
PAGES = sorted({str(page.relative_to(ROOT)) for folder in FOLDERS for page in (ROOT / folder).glob("*.md")} - OTHERS)

BLOCK = next(
    block
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    if "prepare(" in block
)

APART = """
if torch.distributed.is_initialized():
    seen = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(seen, (inputs[0, 0].item(), float(norm)))
    assert len({first for first, _ in seen}) == len(seen), f"ranks drew the same inputs: {seen}"
    assert len({norm for _, norm in seen}) == 1, seen
"""


def test_the_readmes_example_is_the_file():
    assert (ROOT / "examples" / "quickstart.py").read_text() == BLOCK


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_example_runs(ranks, tmp_path):
    """The README's block, and at its end: each rank drew inputs of its own. One line is printed, whole."""
    script = tmp_path / "quickstart.py"
    script.write_text(BLOCK + APART)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *launch, str(script)],
        capture_output=True, text=True, timeout=200, env=ENVIRONMENT, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.fullmatch(
        r"loss \d+\.\d{3}, gradient norm \d+\.\d\d, \{'planned': [\d.]+, 'held': [\d.]+\}\n", done.stdout
    ), done.stdout
    assert (tmp_path / "out" / "quickstart" / "latest").read_text() == "step-20\n"


def test_the_first_script_runs(tmp_path):
    """docs/start.md's script, as one process."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "start.md").read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", block], capture_output=True, text=True, timeout=200, env=ENVIRONMENT, cwd=tmp_path
    )
    assert done.stdout == "10\n", done.stderr[-3000:]


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_exists(page):
    text = (ROOT / page).read_text()
    links = re.findall(r"\]\(((?!http|#)[^)]+)\)", text)
    names = re.findall(r"`((?:csrc|python|tests|benchmarks|docs|examples)/[\w./-]+)`", text)
    for link in links:
        assert (ROOT / page).parent.joinpath(link.partition("#")[0]).exists(), link
    for name in names:
        assert (ROOT / name).exists(), name
