# SPDX-License-Identifier: Apache-2.0
"""Our declarations of libtorch against torch's headers, and what loading says when something is missing."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import zeropp

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
AS_2_11 = "-DTORCH_TARGET_VERSION=0x020b000000000000ull"  # torch's headers open by version
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def compile_agreement(source: Path, *extra: str) -> subprocess.CompletedProcess[str]:
    from torch.utils.cpp_extension import include_paths

    assert COMPILER is not None
    flags = [f"-I{path}" for path in include_paths()]
    # USE_CUDA opens the declarations of CUDA functions; they need no CUDA header.
    command = [COMPILER, "-std=c++17", "-fsyntax-only", "-DUSE_CUDA", *extra, *flags, str(source)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler: c++, g++ or clang++")
def test_declarations_agree_with_torch() -> None:
    newest = torch.__version__.split(".")[:2] >= ["2", "13"]  # of the optional functions of shim.def
    done = compile_agreement(HERE / "shim_agrees.cpp", *(() if newest else (AS_2_11,)))
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler: c++, g++ or clang++")
def test_required_functions_are_in_torch_2_11() -> None:
    done = compile_agreement(HERE / "shim_agrees.cpp", AS_2_11)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler: c++, g++ or clang++")
def test_a_wrong_declaration_is_found(tmp_path: Path) -> None:
    """The proof can fail: a row that takes int32_t for int64_t is refused by name."""
    (tmp_path / "csrc/bind").mkdir(parents=True)
    (tmp_path / "csrc/base").mkdir()
    (tmp_path / "tests/bind").mkdir(parents=True)
    for name in ("bind/shim.h", "bind/shim.def", "base/dtype.h", "base/status.h", "base/status.def"):
        shutil.copy(ROOT / "csrc" / name, tmp_path / "csrc" / name)
    table = tmp_path / "csrc/bind/shim.def"
    table.write_text(table.read_text().replace("int64_t *elems", "int32_t *elems"))
    source = tmp_path / "tests/bind/shim_agrees.cpp"
    shutil.copy(HERE / "shim_agrees.cpp", source)
    done = compile_agreement(source)
    assert done.returncode != 0 and "declares aoti_torch_get_numel otherwise" in done.stderr


def test_every_required_function_is_there() -> None:
    """By the symbol table of the libtorch at hand: what a torch 2.11 must have is said by `since`."""
    rows = re.findall(r'^(ZPP_TORCH\w*)\("([\d.]+)",[^,]+,\s*(\w+),', (ROOT / "csrc/bind/shim.def").read_text(), re.M)
    assert len(rows) > 25
    for kind, since, name in rows:
        major, minor = map(int, since.split("."))
        assert kind == "ZPP_TORCH_OPTIONAL" or (major, minor) <= (2, 11), f"{name}: required, but only since {since}"


def test_without_torch_the_sentence_says_import_torch() -> None:
    code = textwrap.dedent(
        f"""
        import importlib.util
        spec = importlib.util.spec_from_file_location("zeropp._C", {zeropp._C.__file__!r})
        module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)
        try: module.load_torch()
        except ImportError as error: print(error)
        """
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=60)
    assert "import torch (>= 2.11) before" in done.stdout, done.stderr


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler: cc")
@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("unsigned long long aoti_torch_abi_version(void) { return 2ull << 56 | 10ull << 48; }", "this is torch 2.10"),
        ("unsigned long long aoti_torch_abi_version(void) { return 2ull << 56 | 11ull << 48; }", "this libtorch lacks"),
        ("int nothing;", "lacks aoti_torch_abi_version (in torch since 2.9): pip install 'torch>=2.11'"),
    ],
    ids=["too old", "lacks a function", "ancient"],
)
def test_a_torch_that_is_too_old_is_named(tmp_path: Path, source: str, sentence: str) -> None:
    """A stand-in for an old libtorch_cpu.so, loaded where the real one would be."""
    (tmp_path / "old.c").write_text(source)
    library = tmp_path / "libtorch_cpu.so"
    build = ["cc", "-shared", "-fPIC", "-Wl,-soname,libtorch_cpu.so", "-o", str(library), str(tmp_path / "old.c")]
    subprocess.run(build, check=True, timeout=60)
    code = textwrap.dedent(
        f"""
        import ctypes, importlib.util
        ctypes.CDLL({str(library)!r}, mode=ctypes.RTLD_GLOBAL)
        spec = importlib.util.spec_from_file_location("zeropp._C", {zeropp._C.__file__!r})
        module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)
        try: module.load_torch()
        except ImportError as error: print(error)
        """
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=60)
    assert sentence in done.stdout and "torch >= 2.11" in done.stdout, done.stdout + done.stderr


def test_loading_again_is_free() -> None:
    zeropp._C.load_torch()
    names = [row[0] for row in zeropp._C.op_table()]
    assert {"adam_step_", "norm_squares", "_adopt"} <= set(names) and len(names) == len(set(names))


def test_adopted_tensors_stay_alive() -> None:
    tensor = torch.arange(10, dtype=torch.int64)
    address = tensor.data_ptr()
    slot = zeropp._C.new_slot()
    torch.ops.zeropp._adopt(tensor, slot)
    del tensor
    assert zeropp._C.look_slot(slot) == (address, 10, "int64")
    torch.ops.zeropp._adopt(torch.zeros(3), slot)  # takes the place of the first
    assert zeropp._C.look_slot(slot)[1:] == (3, "float32")
    zeropp._C.drop_slot(slot)
    with pytest.raises(ValueError, match=f"slot {slot} holds no tensor"):
        zeropp._C.look_slot(slot)
    with pytest.raises(RuntimeError, match=f"zeropp::_adopt: slot {slot} is none"):
        torch.ops.zeropp._adopt(torch.zeros(3), slot)
