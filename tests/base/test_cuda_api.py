# SPDX-License-Identifier: Apache-2.0
"""Our declarations of the CUDA driver agree with the toolkit's header, where one is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def cuda_include() -> Path | None:
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda", nvcc and Path(nvcc).resolve().parents[1]]
    if nvcc:  # a wrapper knows where the real one is
        shown = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-c", "/dev/null"], capture_output=True, text=True).stderr
        homes += re.findall(r"^#\$ TOP=(.+)$", shown, re.MULTILINE)
    for home in filter(None, homes):
        for folder in (Path(home) / "include", Path(home) / "targets" / "x86_64-linux" / "include"):
            if (folder / "cuda.h").is_file():
                return folder
    return None


def numbers() -> dict[str, int]:
    text = (ROOT / "csrc" / "base" / "cuda_api.h").read_text(encoding="utf-8")
    found = {name: int(value) for name, value in re.findall(r"^    (ZPP_CU_\w+) = (\d+),", text, re.MULTILINE)}
    assert len(found) == 7
    return found


def compile_check(include: Path, values: dict[str, int]) -> subprocess.CompletedProcess[str]:
    defines = [f"-D{name}_VALUE={value}" for name, value in values.items()]
    source = str(HERE / "cuda_api_agrees.c")
    command = ["cc", "-std=gnu11", "-fsyntax-only", "-Werror", *defines, f"-I{include}", source]
    return subprocess.run(command, capture_output=True, text=True)


def test_declarations_agree_with_the_header() -> None:
    include = cuda_include()
    if include is None:
        pytest.skip("no CUDA toolkit: no cuda.h to compare with")
    done = compile_check(include, numbers())
    assert done.returncode == 0, done.stderr
    wrong = compile_check(include, numbers() | {"ZPP_CU_NOT_READY": 601})
    assert wrong.returncode != 0 and "ZPP_CU_NOT_READY" in wrong.stderr  # the check can fail
