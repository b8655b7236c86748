# SPDX-License-Identifier: Apache-2.0
"""The ratchet of scripts/lint_structure.py: what it counts, and that it fails above a ceiling."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("lizard", reason="the structure lint needs lizard: pip install -e .[lint]")
pytest.importorskip("networkx", reason="the structure lint needs networkx: pip install -e .[lint]")


@pytest.fixture
def lint(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("lint_structure", root / "scripts" / "lint_structure.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(lint: ModuleType, monkeypatch: pytest.MonkeyPatch, ceilings: Path, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["lint_structure.py", *arguments])
    monkeypatch.setattr(lint, "CEILINGS", ceilings)
    status: int = lint.main()
    return status


def test_a_figure_above_its_ceiling_fails(
    lint: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A figure equal to its ceiling passes, one above fails and is named; ``--lower`` never raises a ceiling."""
    ceilings = tmp_path / "structure.toml"
    monkeypatch.setattr(lint, "FIGURES", {"loops": lambda: ["a.c", "b.c"], "words": lambda: 17.5})
    text = '[denied]\nwords = []\n\n[ceilings]\n"loops" = {}\n"words" = 20\n'
    ceilings.write_text(text.format(2))
    assert run(lint, monkeypatch, ceilings) == 0
    ceilings.write_text(text.format(1))
    assert run(lint, monkeypatch, ceilings) == 1
    assert "'loops' is above its ceiling" in capsys.readouterr().out
    assert run(lint, monkeypatch, ceilings, "--lower") == 0
    assert ceilings.read_text() == '[denied]\nwords = []\n\n[ceilings]\n"loops" = 1\n"words" = 17.5\n'


def test_a_denied_word_fails(lint: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A word of the deny-list is found inside of names, and not inside of other words."""
    source = tmp_path / "wake.c"
    source.write_text("int zpp_wake_unit(int awakened); /* wake is a word of prose */\n")
    monkeypatch.setattr(lint, "ROOT", tmp_path)
    monkeypatch.setattr(lint, "C_FILES", (source,))
    monkeypatch.setattr(lint, "PYTHON_FILES", ())
    assert lint.denied_names(["wake", "awake"]) == ["wake.c: wake.c", "wake.c: zpp_wake_unit"]
    assert lint.denied_names([]) == []


def test_cycles_and_repetition(lint: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two C files that call each other are a cycle; six equal lines are a repetition, five are none."""
    body = "".join(f"    total_bytes[{index}] += first_{index}(total_bytes, {index});\n" for index in range(6))
    (tmp_path / "a.c").write_text(f"void zpp_a(void) {{\n{body}    zpp_b();\n}}\n")
    (tmp_path / "b.c").write_text(f"void zpp_b(void) {{\n{body}    zpp_a();\n}}\n")
    (tmp_path / "c.c").write_text(f"static void zpp_a(void) {{\n{body.partition(chr(10))[2]}\n}}\n")
    files = tuple(sorted(tmp_path.glob("*.c")))
    monkeypatch.setattr(lint, "ROOT", tmp_path)
    monkeypatch.setattr(lint, "C_FILES", files)
    monkeypatch.setattr(lint, "CODE", list(files))
    assert lint.c_cycles() == [["a.c", "b.c"]]
    assert lint.repeated(by_shape=False) == ["a.c:2 ~ b.c:2"]


def test_an_import_of_a_higher_layer_is_found(
    lint: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module may import its own layer and lower ones, the frameworks the public names, and a module in no layer nothing imports."""
    texts = {
        "__init__.py": "from zeropp.zero import engine\n",
        "aio.py": "from zeropp import _C\nfrom zeropp.comm import group\nif TYPE_CHECKING:\n    from zeropp.zero import engine\n",
        "comm/group.py": "from zeropp.errors import Error\nimport zeropp.new\n",
        "errors.py": "",
        "hf/trainer.py": "import zeropp\n",
        "new.py": "import zeropp.zero.engine\n",
        "zero/engine.py": "def f():\n    import zeropp\n",
    }
    for name, text in texts.items():
        (tmp_path / "zeropp" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "zeropp" / name).write_text(text)
    monkeypatch.setattr(lint, "PACKAGE", tmp_path / "zeropp")
    monkeypatch.setattr(lint, "PYTHON_FILES", sorted((tmp_path / "zeropp").rglob("*.py")))
    assert lint.climbing_imports() == [
        "zeropp.aio -> zeropp.zero.engine", "zeropp.comm.group -> zeropp.new", "zeropp.zero.engine -> zeropp",
    ]  # fmt: skip
