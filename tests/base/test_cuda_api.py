# SPDX-License-Identifier: Apache-2.0
"""Our declarations of the CUDA driver and of NCCL agree with their own headers, where these are installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
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


def nccl_include() -> Path | None:
    """torch's wheels bring it; NCCL_HOME names another."""
    packages = Path(sysconfig.get_path("purelib")) / "nvidia" / "nccl"
    for home in filter(None, (os.environ.get("NCCL_HOME"), packages, "/usr")):
        if (Path(home) / "include" / "nccl.h").is_file():
            return Path(home) / "include"
    return None


def numbers(header: str, prefix: str, count: int) -> dict[str, int]:
    text = (ROOT / "csrc" / header).read_text(encoding="utf-8")
    found = {name: int(value) for name, value in re.findall(rf"^    ({prefix}\w+) = (\d+),", text, re.MULTILINE)}
    assert len(found) == count
    return found


def compile_check(source: str, includes: list[Path], values: dict[str, int]) -> subprocess.CompletedProcess[str]:
    defines = [f"-D{name}_VALUE={value}" for name, value in values.items()]
    folders = [f"-I{include}" for include in includes]
    command = ["cc", "-std=gnu11", "-fsyntax-only", "-Werror", *defines, *folders, str(HERE / source)]
    return subprocess.run(command, capture_output=True, text=True)


def test_declarations_agree_with_the_header() -> None:
    include = cuda_include()
    if include is None:
        pytest.skip("no CUDA toolkit: no cuda.h to compare with")
    values = numbers("base/cuda_api.h", "ZPP_CU_", 27)
    done = compile_check("cuda_api_agrees.c", [include], values)
    assert done.returncode == 0, done.stderr
    wrong = compile_check("cuda_api_agrees.c", [include], values | {"ZPP_CU_NOT_READY": 601})
    assert wrong.returncode != 0 and "ZPP_CU_NOT_READY" in wrong.stderr  # the check can fail


def test_declarations_of_nccl_agree_with_the_header() -> None:
    include, toolkit = nccl_include(), cuda_include()
    if include is None or toolkit is None:
        pytest.skip("no nccl.h to compare with (NCCL_HOME), or no CUDA toolkit, which it includes")
    values = numbers("comm/nccl/nccl_api.h", "ZPP_NCCL_", 15)
    done = compile_check("nccl_api_agrees.c", [include, toolkit], values)
    assert done.returncode == 0, done.stderr
    wrong = compile_check("nccl_api_agrees.c", [include, toolkit], values | {"ZPP_NCCL_AVG": 5})
    assert wrong.returncode != 0 and "ZPP_NCCL_AVG" in wrong.stderr
