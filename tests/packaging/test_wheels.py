# SPDX-License-Identifier: Apache-2.0
"""The wheels of a release: two architectures, an old C library, equal bytes from equal sources (scripts/wheels.py)."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

for needed in ("ziglang", "auditwheel", "elftools", "abi3audit"):
    pytest.importorskip(needed, reason=f"{needed} is not installed: pip install 'zeropp[wheels]' brings it")


@pytest.fixture(scope="module")
def script(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("wheels", root / "scripts" / "wheels.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make(root: Path, out: Path, *machines: str) -> list[str]:
    command = [sys.executable, "scripts/wheels.py", "--no-kernels", "--out", str(out), "--machine", *machines]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_both_architectures_pass_the_audit(root: Path, tmp_path: Path, script: ModuleType) -> None:
    lines = make(root, tmp_path, "x86_64", "aarch64")
    wheels = sorted(tmp_path.glob("*.whl"))
    assert [path.name.split("-", 2)[2] for path in wheels] == [
        "cp310-abi3-manylinux_2_28_aarch64.whl",
        "cp310-abi3-manylinux_2_28_x86_64.whl",
    ]
    assert len(lines) == 2  # a line a wheel, and none of a fault
    assert script.faults(wheels[0], "aarch64") == []
    assert script.faults(wheels[0], "x86_64") == ["machine EM_AARCH64, wanted EM_X86_64"]
    script.GLIBC = (2, 2)
    assert any("symbol version GLIBC_2.3" in fault for fault in script.faults(wheels[1], "x86_64"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_builds_of_one_commit_have_equal_bytes(root: Path, tmp_path: Path) -> None:
    first = make(root, tmp_path / "first", "x86_64")
    copy = tmp_path / "copy"  # another folder, and nothing of an older build
    subprocess.run(["git", "clone", "--quiet", str(root), str(copy)], check=True)
    changed = subprocess.run(["git", "diff", "HEAD", "--binary"], cwd=root, capture_output=True, check=True).stdout
    if changed:
        subprocess.run(["git", "apply", "--index"], cwd=copy, input=changed, check=True)
    assert make(copy, tmp_path / "second", "x86_64") == first


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_c_code_runs_with_an_old_c_library(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Debian 11's glibc 2.31. Its Python is too old for the wheel, so C programs run in the wheel's place."""
    monkeypatch.syspath_prepend(str(root / "scripts"))
    if platform.machine() != "x86_64" or not shutil.which("apt-get"):
        pytest.skip("the C library of Debian 11 for x86-64 comes by apt-get")
    from debian import liburing, sysroot

    libraries = sysroot("x86_64", "bullseye") / "lib" / "x86_64-linux-gnu"
    variables = {
        "ZEROPP_TARGET": "x86_64-linux-gnu.2.28",
        "ZEROPP_LIBURING": str(liburing("x86_64")),
        "ZEROPP_EMULATOR": f"{libraries / 'ld-2.31.so'} --library-path {libraries}",
    }
    done = subprocess.run(
        [sys.executable, "tests/c/run.py", "--only", "test_ops_adam", "test_comm_p2p", "test_aio_engine"],
        cwd=root, env={**os.environ, **variables}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "3 passed, 0 failed", done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_loads(root: Path, tmp_path: Path) -> None:
    make(root, tmp_path, "x86_64")
    (wheel,) = tmp_path.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    subprocess.run([*pip, str(tmp_path / "site"), str(wheel)], check=True)
    code = "import sys; sys.path.insert(0, sys.argv[1]); import zeropp; print(zeropp.__file__, zeropp._C.version())"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "site")], capture_output=True, text=True, check=True
    )
    assert str(tmp_path / "site") in done.stdout
