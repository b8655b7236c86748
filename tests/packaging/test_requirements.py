# SPDX-License-Identifier: Apache-2.0
"""The requirements of zeropp are what it needs: torch, safetensors, tqdm and rich, whatever else a machine has."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOOKS_FOR_NUMPY = {
    "deepspeed/names/helpers.py",
    "checkpoint/random_state.py",
}  # its generator is saved and seeded where it is there


def test_numpy_is_no_requirement() -> None:
    """torch comes without numpy, and ``tensor.numpy()`` fails then: an error on the day of the first checkpoint."""
    wanted = re.search(r"^dependencies = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert wanted is not None
    names = {re.split("[>=<]", name.strip(' "'))[0] for name in wanted[1].split(",")}
    assert names == {"torch", "safetensors", "tqdm", "rich"}
    package = ROOT / "python" / "zeropp"
    uses = re.compile(r"\.numpy\(|from_numpy|^\s*(import|from) numpy", re.MULTILINE)
    found = {str(path.relative_to(package)) for path in package.rglob("*.py") if uses.search(path.read_text())}
    assert found == LOOKS_FOR_NUMPY
