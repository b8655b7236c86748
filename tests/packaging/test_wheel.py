# SPDX-License-Identifier: Apache-2.0
"""One wheel for every Python >= 3.10: its tag, its symbols, and that its C module loads where there is no torch."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools", reason="building a wheel without isolation needs setuptools here")

LOAD = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("zeropp._C", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.version(), module.cpu_level())
try:
    module.load_torch()
except ImportError as error:
    print("ImportError:", error)
"""


def call(*command: object, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=280, env={**environment, **variables}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    older = root / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / "zeropp"
    older.mkdir(parents=True, exist_ok=True)
    (older / "of_an_older_build.py").touch()
    (older / "errors.py").write_text("raise ImportError('of an older build')\n")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    call(*pip, "--wheel-dir", folder, root)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def unpacked(wheel: Path) -> Path:
    folder = wheel.parent / "unpacked"
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def other_pythons() -> list[str]:
    """Interpreters of other versions: on PATH, and in pyenv's folder."""
    names = [f"python3.{minor}" for minor in range(10, 16)]
    found = [path for path in map(shutil.which, names) if path]
    installed = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found += [str(path) for path in sorted(installed.glob("3.1*/bin/python"))]
    versions: dict[str, str] = {}
    for python in found:
        asked = subprocess.run([python, "-c", "import sys; print(sys.version_info[1])"], capture_output=True, text=True)
        if asked.returncode == 0:  # pyenv's shims exist for versions that are not chosen
            versions.setdefault(asked.stdout.strip(), python)
    versions.pop(str(sys.version_info[1]), None)
    return list(versions.values())


def test_tag_and_contents(wheel: Path, unpacked: Path) -> None:
    assert re.fullmatch(r"zeropp-[\d.]+-cp310-abi3-linux_\w+\.whl", wheel.name)
    assert (unpacked / "zeropp" / "_C.abi3.so").is_file()
    assert (unpacked / "zeropp" / "py.typed").is_file()
    assert not (unpacked / "zeropp" / "of_an_older_build.py").exists()
    assert "older build" not in (unpacked / "zeropp" / "errors.py").read_text()
    metadata = next(unpacked.glob("*.dist-info/METADATA")).read_text()
    assert "Requires-Dist: torch>=2.11" in metadata
    assert "Requires-Python: >=3.10" in metadata


def test_only_the_stable_interface(wheel: Path) -> None:
    pytest.importorskip("abi3audit", reason="abi3audit is not installed: pip install zeropp[test]")
    call(sys.executable, "-m", "abi3audit", "--strict", wheel)


def test_needs_no_library_beyond_libc(unpacked: Path) -> None:
    """liburing is inside; torch, CUDA's driver and NCCL are looked up when they are used."""
    if not shutil.which("readelf"):
        pytest.skip("readelf is not installed")
    needed = re.findall(r"NEEDED.*\[(.*)\]", call("readelf", "-d", unpacked / "zeropp" / "_C.abi3.so"))
    assert needed and all(re.match(r"(libc|libm|libdl|libpthread|ld-linux.*|libgcc_s)\.so", name) for name in needed)


def test_loads_in_other_pythons(unpacked: Path) -> None:
    pythons = other_pythons()
    if not pythons:
        pytest.skip("no other Python >= 3.10 is installed")
    for python in pythons:
        lines = call(python, "-c", LOAD, unpacked / "zeropp" / "_C.abi3.so").splitlines()
        assert re.fullmatch(r"[\d.]+ (scalar|avx2|avx512|neon)", lines[0]), (python, lines)
        if len(lines) > 1:  # no torch there
            assert "torch" in lines[1], (python, lines)


def test_a_cpu_without_avx2_takes_plain_c(unpacked: Path) -> None:
    emulator = shutil.which("qemu-x86_64-static")
    if not emulator or platform.machine() != "x86_64":
        pytest.skip("an emulator of x86-64 on x86-64 is wanted: apt-get install qemu-user-static")
    python = Path(sys.executable).resolve()
    module = unpacked / "zeropp" / "_C.abi3.so"
    assert call(emulator, "-cpu", "Nehalem", python, "-S", "-c", LOAD, module).split()[1] == "scalar"


def test_import_without_torch_says_what_to_install(unpacked: Path) -> None:
    hide = "import sys; sys.modules['torch'] = None; import zeropp"
    done = subprocess.run(
        [sys.executable, "-c", hide], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(unpacked)}
    )
    assert done.returncode == 1
    assert "zeropp needs torch >= 2.11, and there is none: pip install torch" in done.stderr


def test_a_torch_that_lacks_a_library_says_so_itself(unpacked: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudnn.so.9: cannot open shared object file')\n")
    done = subprocess.run(
        [sys.executable, "-c", "import zeropp"], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{unpacked}"},
    )  # fmt: skip
    assert done.returncode == 1
    assert "ImportError: libcudnn.so.9" in done.stderr and "there is none" not in done.stderr


@pytest.mark.slow
def test_builds_without_nvcc_and_liburing(root: Path, tmp_path: Path) -> None:
    """In a copy of the tree, so that the objects of this one stay."""
    for name in ("csrc", "python"):
        shutil.copytree(root / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, tmp_path / name)
    lacking = {"NVCC": "", "PKG_CONFIG_LIBDIR": str(tmp_path / "none"), "PKG_CONFIG_PATH": ""}
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=tmp_path, env={**os.environ, **lacking}, capture_output=True, text=True, timeout=290,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    ask = "import zeropp; from zeropp import _C; print(_C.cuda_images(), _C.uring()[0])"
    assert call(sys.executable, "-c", ask, PYTHONPATH=str(tmp_path / "python")).split() == ["[]", "False"]
