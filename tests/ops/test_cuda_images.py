# SPDX-License-Identifier: Apache-2.0
"""Every CUDA kernel that C launches is in a file that was compiled and embedded, and every file is. No GPU needed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from zeropp import _C


def test_every_kernel_that_is_launched_is_embedded(root: Path) -> None:
    sources = sorted((root / "csrc").rglob("*_cuda.cu"))
    defined = {name for path in sources for name in re.findall(r"^KERNEL (zpp_\w+)\(", path.read_text(), re.MULTILINE)}
    launched = set()
    for path in (root / "csrc").rglob("*.c"):
        launched |= set(re.findall(r'"(zpp_\w+_cuda\w*)"', path.read_text()))
    assert sources and launched == defined
    images = [source for source, _ in _C.cuda_images()]
    if not images:
        pytest.skip("nvcc: this build was made without it")
    assert sorted(images) == [path.relative_to(root / "csrc").as_posix() for path in sources]


def test_every_operator_has_a_cuda_kernel_but_those_named() -> None:
    """The test lists the operators without a CUDA kernel; torch's CPU build dispatches nothing to CUDA, so the table is compared."""
    missing = {name for name, _, _, cuda in _C.op_table() if not cuda}
    moments = {"moments_encode_", "moments_decode_"}  # outside of steps only: checkpoints, which are on the CPU
    swiglu = {name for name in missing if name.startswith("swiglu")}  # experts on a GPU compute it by torch
    assert missing == moments | swiglu
