# SPDX-License-Identifier: Apache-2.0
"""`python -m zeropp env`: the table, the JSON, and what it says when something is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from zeropp import _C
from zeropp.cli import env, main


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zeropp", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **variables})


def test_json_has_what_was_found() -> None:
    done = run("env", "--json", ZEROPP_CPU="scalar")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["zeropp"] == _C.version()
    assert found["torch"] == torch.__version__
    assert torch.__version__.startswith(found["torch_stable_abi"].rsplit(".", 1)[0])
    assert found["cpu"]["level"] == "scalar" and found["cpu"]["detected"] == _C.cpu_detected()
    assert found["cpu"]["kernels"]["adam"]["in_use"] == "scalar"
    assert found["cpu"]["kernels"]["adam"]["variants"][0] == "scalar"
    assert set(found["io_uring"]) == {"built", "kernel", "why_not"}


def test_table_names_every_row() -> None:
    done = run("env", COLUMNS="200")
    assert done.returncode == 0, done.stderr
    for what in ("zeropp", "torch", "CPU level", "adam", "CUDA kernels", "CUDA driver", "NCCL", "io_uring"):
        assert what in done.stdout
    assert done.stderr == ""


def test_env_starts_no_gpu() -> None:
    script = (
        "import sys; from zeropp.cli import main; main(['env', '--json'])\n"
        "import torch; assert not torch.cuda.is_initialized()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_missing_driver_is_a_row_and_not_a_traceback() -> None:
    done = run("env", "--json", ZEROPP_CUDA_DRIVER="/nowhere/libcuda.so.1")
    assert done.returncode == 0, done.stderr
    driver = json.loads(done.stdout)["cuda_driver"]
    assert driver["version"] is None
    assert "the NVIDIA driver was not found (/nowhere/libcuda.so.1" in driver["why_not"]


def test_a_wrong_cpu_level_is_refused_at_import() -> None:
    done = run("env", ZEROPP_CPU="avx3")
    assert done.returncode != 0
    assert "ValueError: ZEROPP_CPU=avx3: wanted scalar" in done.stderr


def test_versions_read_as_people_write_them() -> None:
    assert env.cuda_version_text(13010) == "13.1"
    assert env.needed_driver(13000) == "CUDA 13.0, driver R580 or later"
    assert env.needed_driver(12080) == "CUDA 12.0, driver R525 or later"


def test_table_says_what_the_kernels_need() -> None:
    found: dict[str, Any] = env.collect()
    found["cuda_kernels"], found["cuda_kernels_need"] = ["ops/adam/adam_cuda.cu"], env.needed_driver(13000)
    found["io_uring"] = {"built": True, "kernel": False, "why_not": "Operation not permitted"}
    table = dict(env.rows(found))
    assert table["CUDA kernels"] == "ops/adam/adam_cuda.cu"
    assert table["  they need"] == "CUDA 13.0, driver R580 or later"
    assert table["io_uring"] == "refused by the kernel (Operation not permitted): pread instead"


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["nonsense"])
    assert "invalid choice: 'nonsense'" in capsys.readouterr().err
