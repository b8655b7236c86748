# SPDX-License-Identifier: Apache-2.0
"""scripts/release.py: what keeps a tree from being released, and that a wheel runs in an empty environment."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest


def script(root: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, root / "scripts" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def release(root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(root / "scripts"))
    return script(root, "release")


@pytest.fixture
def wheels(root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(root / "scripts"))
    return script(root, "wheels")


def write_wheel(path: Path, mode: int = 0o644, second: int = 0, **files: str) -> Path:
    with zipfile.ZipFile(path, "w") as made:
        for name, text in files.items():
            entry = zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, second))
            entry.external_attr = mode << 16
            made.writestr(entry, text)
    return path


def test_what_differs_between_two_builds_is_named(wheels: ModuleType, tmp_path: Path) -> None:
    first = write_wheel(tmp_path / "a", module="1", text="same", gone="")
    second = write_wheel(tmp_path / "b", module="2", text="same")
    assert wheels.differences(first, second) == [
        "gone is in one build only",
        "module: other bytes in the second build",
    ]
    later = write_wheel(tmp_path / "c", second=2, module="1", text="same", gone="")
    assert wheels.differences(first, later)[0] == "gone: another time or mode in the second build"


def test_a_wheel_does_not_depend_on_the_umask(wheels: ModuleType, tmp_path: Path) -> None:
    made = []
    for mode in (0o600, 0o664):
        built = write_wheel(tmp_path / f"built-{mode}", mode, **{"zeropp/_C.abi3.so": "c", "zeropp/errors.py": "e"})
        wheels.fix_modes(built, tmp_path / f"{mode}.whl")
        made.append(tmp_path / f"{mode}.whl")
    assert wheels.differences(*made) == []
    assert [entry.external_attr >> 16 for entry in zipfile.ZipFile(made[0]).infolist()] == [0o100755, 0o100644]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A clean tree that is version 1.2.3."""
    for name, text in (
        ("csrc/bind/version.h", '#define ZPP_VERSION "1.2.3"\n'),
        ("docs/CHANGELOG.md", "# C\n\n## 1.2.3\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    return tmp_path


def test_a_tree_that_fits_has_no_fault(release: ModuleType, tree: Path) -> None:
    assert release.tree_faults(tree, "1.2.3") == []


def test_every_fault_is_named(release: ModuleType, tree: Path) -> None:
    assert release.tree_faults(tree, "1.2") == ["version '1.2', wanted MAJOR.MINOR.PATCH"]
    version, changelog = release.tree_faults(tree, "1.3.0")
    assert version == "csrc/bind/version.h has another version, wanted 1.3.0"
    assert changelog == 'docs/CHANGELOG.md begins with "1.2.3", wanted "1.3.0" and perhaps a date'
    (tree / "docs/CHANGELOG.md").write_text("# C\n\n## 1.2.3 (not released)\n")
    subprocess.run(["git", "-C", str(tree), "tag", "v1.2.3"], check=True)
    dirty, unreleased, tagged = release.tree_faults(tree, "1.2.3")
    assert dirty == "the tree is not clean: 1 files, the first is docs/CHANGELOG.md"
    assert '"1.2.3 (not released)"' in unreleased
    assert tagged == "the tag v1.2.3 exists"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_wheel_runs_the_quickstart_in_an_empty_environment(release: ModuleType, root: Path, tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="building a wheel without isolation needs setuptools here")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(tmp_path),
    ]
    subprocess.run([*pip, str(root)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert release.try_wheel(wheel, sys.executable, tmp_path / "empty").startswith(str(tmp_path))
