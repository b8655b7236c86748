# SPDX-License-Identifier: Apache-2.0
"""Where zeropp cannot be built, one sentence says what is supported; an sdist builds with nothing but setuptools."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools", reason="setup.py needs it")


@pytest.mark.parametrize(
    ("machine", "part"),
    [
        (("Linux", "x86_64", 64, "glibc"), None),
        (("Linux", "aarch64", 64, "glibc"), None),
        (("Darwin", "arm64", 64, ""), "this is Darwin; on Windows use WSL 2, on macOS a Linux VM"),
        (("Windows", "amd64", 64, ""), "this is Windows"),
        (("Linux", "i686", 32, "glibc"), "this Python is 32-bit on i686"),
        (("Linux", "x86_64", 32, "glibc"), "this Python is 32-bit on x86_64"),
        (("Linux", "riscv64", 64, "glibc"), "this Python is 64-bit on riscv64"),
        (("Linux", "x86_64", 64, ""), "needs glibc, as torch's wheels do"),
    ],
)
def test_what_is_not_supported_is_named(
    root: Path, monkeypatch: pytest.MonkeyPatch, machine: tuple[str, str, int, str], part: str | None
) -> None:
    monkeypatch.syspath_prepend(str(root))
    import setup

    said = setup.unsupported(*machine)
    assert (said is None) == (part is None)
    assert part is None or part in str(said)


def test_another_system_is_refused_before_anything_is_compiled(root: Path) -> None:
    code = (
        "import platform, runpy, sys; platform.system = lambda: 'Darwin'; sys.argv = ['setup.py', 'build_ext']\n"
        "sys.modules['fcntl'] = None; runpy.run_path('setup.py', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "zeropp: zeropp runs on Linux (x86-64 and aarch64), and this is Darwin; on Windows use WSL 2, on macOS a Linux VM"
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_sdist_builds_from_an_empty_environment(root: Path, tmp_path: Path) -> None:
    sdist = [sys.executable, "setup.py", "-q", "sdist", "--dist-dir", str(tmp_path)]
    subprocess.run(sdist, cwd=root, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    empty = tmp_path / "empty"
    subprocess.run([sys.executable, "-m", "venv", str(empty)], check=True)
    python = empty / "bin" / "python"
    done = subprocess.run([str(python), "-m", "pip", "install", "-q", "setuptools>=77"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no package index: {done.stderr.strip().splitlines()[-1]}")
    pip = [str(python), "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    built = subprocess.run(
        [*pip, str(source)], capture_output=True, text=True, env={"NVCC": "", "PATH": "/usr/bin:/bin"}
    )
    assert built.returncode == 0, built.stderr
    assert len(list(tmp_path.glob("zeropp-*-cp310-abi3-linux_*.whl"))) == 1
