# SPDX-License-Identifier: Apache-2.0
"""Checks of the C sources: warnings of gcc and clang, clang's static analyser, the layers, and the form of a file.

    python scripts/lint_c.py [FILE ...]      all of csrc/, tests/c/ and tests/sim/ if none is named

The analyser and the second compiler are used where they are installed, and named where they are not.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import setup as build  # noqa: E402  (setup.py: the same flags, the same rule for files)

# base <- ops, comm, aio <- zero <- bind, and comm calls ops: what a folder of csrc/ may include besides itself.
MAY_INCLUDE = {
    "base": set[str](),
    "ops": {"base"},
    "comm": {"base", "ops"},
    "aio": {"base"},
    "zero": {"base", "ops", "comm", "aio"},
    "bind": {"base", "ops", "comm", "aio", "zero"},
}
KNOWS_PYTHON = {"bind"}
MAX_COLUMNS = 120
MAX_LINES = 700
INCLUDE = re.compile(r'^\s*#\s*include\s+(["<])([^">]+)[">]', re.MULTILINE)


def files(patterns: Iterable[str]) -> list[Path]:
    return sorted(path for pattern in patterns for path in ROOT.glob(pattern))


def area_of(path: Path) -> str | None:
    parts = path.relative_to(ROOT).parts
    return parts[1] if parts[0] == "csrc" and len(parts) > 2 else None


def form(path: Path) -> list[str]:
    """Header, width, length."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    name = path.relative_to(ROOT)
    faults = []
    if path.suffix != ".def" and "SPDX-License-Identifier: Apache-2.0" not in "\n".join(lines[:3]):
        faults.append(f"{name}:1: no SPDX line; wanted Apache-2.0 in the first comment")
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_COLUMNS:
            faults.append(f"{name}:{number}: {len(line)} columns, at most {MAX_COLUMNS} wanted")
        if "\t" in line or line != line.rstrip():
            faults.append(f"{name}:{number}: a tab, or blanks at the end")
    if len(lines) > MAX_LINES:
        faults.append(f"{name}: {len(lines)} lines, at most {MAX_LINES} wanted; one idea a file")
    if not text.endswith("\n"):
        faults.append(f"{name}: no newline at the end")
    return faults


def layers(path: Path) -> list[str]:
    """The arrow: no include against it, and neither Python nor torch below bind."""
    area = area_of(path)
    if area is None:
        return []
    faults = []
    name = path.relative_to(ROOT)
    for quote, target in INCLUDE.findall(path.read_text(encoding="utf-8")):
        if quote == "<":
            if area not in KNOWS_PYTHON and re.match(r"Python\.h|torch/|ATen/|c10/", target):
                faults.append(f"{name}: includes <{target}>; only csrc/bind may know Python or torch")
            continue
        resolved = (path.parent / target).resolve()
        other = area_of(resolved) if resolved.is_relative_to(ROOT) else None
        if other is not None and other != area and other not in MAY_INCLUDE.get(area, set()):
            faults.append(f"{name}: includes {target} of csrc/{other}; csrc/{area} stands below it")
        if area in KNOWS_PYTHON:
            continue
        if other == "bind":
            faults.append(f"{name}: includes {target}; nothing below csrc/bind may know Python or torch")
    return faults


def flags_for(path: Path, isa_flags: list[str]) -> list[str]:
    flags = [*build.COMMON, *isa_flags, *build.WARNINGS, "-Werror"]
    uring, _ = build.liburing()
    if area_of(path) in KNOWS_PYTHON:
        flags += [f"-DPy_LIMITED_API={build.LIMITED_API}", f"-I{sysconfig.get_paths()['include']}"]
    return [*flags, *uring]


def output_of_each(path: Path, before: list[str], after: list[str]) -> list[str]:
    """Return what a compiler says about a file, once for each instruction set that the file is compiled for."""
    commands = [[*before, *flags_for(path, flags), *after, str(path)] for flags in build.variants(path).values()]
    return [fault for command in commands for fault in output_of(command)]


def output_of(command: list[str]) -> list[str]:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    return [f"{command[0]}: {done.stdout}"] if done.returncode != 0 or done.stdout.strip() else []


# gcc needs -O1 for its flow-sensitive warnings (maybe-uninitialized); clang gives all warnings before it optimizes.
COMPILERS = {"gcc": ["-O1", "-c", "-o", "/dev/null"], "clang": ["-fsyntax-only"]}


def compiler_check(compiler: str) -> Callable[[Path], list[str]]:
    return lambda path: output_of_each(path, [compiler], COMPILERS[compiler])


def analyzer_check(path: Path) -> list[str]:
    quiet = ["--analyze", "--analyzer-output", "text", "-Xclang", "-analyzer-werror"]
    # Who owns a counted object or a list's node is beyond this checker; AddressSanitizer sees what is really freed.
    without = ["-Xclang", "-analyzer-disable-checker=unix.Malloc"]
    return output_of_each(path, ["clang"], [*quiet, *without, "-o", "/dev/null"])


def main() -> int:
    named = [Path(name).resolve() for name in sys.argv[1:]]
    everything = named or files(
        ["csrc/**/*.[ch]", "csrc/**/*.def", "csrc/**/*.cu", "tests/c/*.[ch]", "tests/sim/*.[ch]", "tests/fuzz/*.c"]
    )
    elsewhere = set(build.CSRC.rglob("*.c")) - set(
        build.c_sources()
    )  # of another architecture: no compiler for them here
    sources = [path for path in everything if path.suffix == ".c" and path not in elsewhere]
    checks: list[tuple[str, Callable[[Path], list[str]], list[Path]]] = [
        ("form", form, everything),
        ("layers", layers, everything),
    ]
    for compiler in COMPILERS:
        if shutil.which(compiler):
            checks.append((f"{compiler} -Werror", compiler_check(compiler), sources))
        else:
            print(f"{compiler}: not installed, skipped")
    if shutil.which("clang"):
        checks.append(("clang --analyze", analyzer_check, [path for path in sources if area_of(path)]))
    failed = 0
    with ThreadPoolExecutor(max_workers=build.jobs()) as workers:
        for name, check, paths in checks:
            faults = [fault for found in workers.map(check, paths) for fault in found]
            print(f"{name}: {len(paths)} files, {len(faults)} faults")
            for fault in faults:
                print(fault)
            failed += len(faults)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
