# SPDX-License-Identifier: Apache-2.0
"""setup.py compiles again only what changed, finds nvcc, and refuses kernels that spill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("setuptools", reason="setup.py needs it")
ROOT = Path(__file__).resolve().parents[2]


def test_every_object_has_a_record_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """X_cuda.c and X_cuda.cu once shared the file that says how each was made, so both were compiled at every build."""
    monkeypatch.syspath_prepend(str(ROOT))
    import setup

    builder: Any = setup.Builder(tmp_path)
    records: list[Path] = []

    def make(target: Path, command: list[str], *checks: Any) -> Path:
        records.append(target.with_suffix(".cmd"))
        assert str(target.with_suffix(".d")) in command
        return target

    monkeypatch.setattr(builder, "make", make)
    for source in setup.c_sources():
        builder.c_objects(source)
    for source in sorted(setup.CSRC.rglob("*_cuda.cu")):
        builder.fatbin("nvcc", ["-gencode=one"], source)
    assert records and len(set(records)) == len(records)


# What ptxas of CUDA 13.0 prints with -v for two kernels, the second of which spills.
PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'zpp_one' for 'sm_80'
ptxas info    : Function properties for zpp_one
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 35 registers, used 0 barriers, 912 bytes cmem[0]
ptxas info    : Compiling entry function 'zpp_two' for 'sm_120'
ptxas info    : Function properties for zpp_two
    24 bytes stack frame, 40 bytes spill stores, 56 bytes spill loads
ptxas info    : Used 56 registers, used 1 barriers, 24 bytes cumulative stack size
"""


def test_a_kernel_that_spills_fails_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    import setup

    assert setup.spills(PTXAS.split("ptxas info    : Compiling entry function 'zpp_two'")[0]) == []
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f"#!/bin/sh\ncat <<'PTXAS'\n{PTXAS}PTXAS\n")
    nvcc.chmod(0o755)
    source = next(setup.CSRC.rglob("*_cuda.cu"))
    builder = setup.Builder(tmp_path / "objects")
    for _ in range(2):  # the second call must not take the first one's output for good
        with pytest.raises(setup.BuildError) as caught:
            builder.fatbin(str(nvcc), ["-gencode=one"], source)
        assert str(caught.value) == (
            "a CUDA kernel spills registers to memory, wanted none: zpp_two for sm_120: 40 bytes stored, 56 bytes "
            "loaded. Give it fewer live values, or more registers by the second number of its __launch_bounds__"
        )


def test_nvcc_of_the_wheels_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    import setup

    monkeypatch.delenv("NVCC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    monkeypatch.setattr(setup.sysconfig, "get_path", lambda name: str(tmp_path / "packages"))
    assert setup.nvcc_path() is None
    for place in ("packages/nvidia/cu13/bin", "toolkit/bin", ""):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        nvcc = tmp_path / place / "nvcc"
        nvcc.write_text("#!/bin/sh\n")
        nvcc.chmod(0o755)
        assert setup.nvcc_path() == str(nvcc)  # each is preferred to those before
    monkeypatch.setenv("NVCC", "")
    assert setup.nvcc_path() is None
    monkeypatch.setenv("ZEROPP_KERNELS", "1")
    with pytest.raises(setup.BuildError, match=r"no nvcc .* pip install 'zeropp\[cuda\]' brings one"):
        setup.Builder(tmp_path / "objects").cuda_objects()


def test_an_old_nvcc_is_refused_where_kernels_are_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    import setup

    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho sm_75; echo sm_80; echo sm_90\n")
    nvcc.chmod(0o755)
    monkeypatch.delenv("ZEROPP_KERNELS", raising=False)
    assert setup.gpu_flags(str(nvcc))[-1] == "-gencode=arch=compute_90,code=compute_90"
    monkeypatch.setenv("ZEROPP_KERNELS", "1")
    with pytest.raises(setup.BuildError, match=r"compiles for sm_\[75, 80, 90\] .* wanted CUDA 13.0"):
        setup.gpu_flags(str(nvcc))
