# SPDX-License-Identifier: Apache-2.0
"""Build the simulated GPU: the driver (C), and the torch device over it (C++). Both are made on demand, below build/sim.

python tests/sim/sim_build.py       builds both and prints their paths
"""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))
import setup as build  # noqa: E402  (setup.py: the same flags, the same rule for files)

FOLDER = ROOT / "build" / "sim"
DRIVER = FOLDER / "libsim.so"
DRIVER_SOURCES = ("driver.c", "streams.c", "memory.c", "nccl.c", "kernels.c")
KERNEL = re.compile(r"^KERNEL (\w+)\(const __grid_constant__ (struct \w+) \w+\)", re.MULTILINE)
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
DEFINITION = re.compile(r"^(?:#define\s+(\w+)|[A-Za-z_].*?\b(\w+)\()")


def _text_with_headers(source: Path, seen: set[Path]) -> str:
    """Return the text of a file and of all headers that it includes by quotes."""
    if source in seen or not source.is_file():
        return ""
    seen.add(source)
    text = source.read_text(encoding="utf-8")
    headers = [_text_with_headers((source.parent / name).resolve(), seen) for name in INCLUDE.findall(text)]
    return "".join(headers) + text


def _bodies(text: str) -> dict[str, str]:
    """Return each function and macro of a text with what stands between it and the next one."""
    bodies: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        found = DEFINITION.match(line)
        kernel = re.match(r"KERNEL (\w+)", line)
        if kernel or found:
            name = kernel[1] if kernel else found[1] or found[2]
            line = line.partition(name)[2]
        bodies[name] = bodies.get(name, "") + line + "\n"
    return bodies


def kernels_with_barriers(source: Path) -> set[str]:
    """Return the functions from which a call of __syncthreads can be reached, so that threads have to take turns."""
    bodies = _bodies(_text_with_headers(source, set()))
    found, before = {"__syncthreads"}, set[str]()
    while found != before:
        before = set(found)
        found |= {name for name, body in bodies.items() if before & set(re.findall(r"\w+", body))}
    return found


def _kernels_as_c(source: Path) -> str:
    barriers = kernels_with_barriers(source)
    lines = [
        f"/* SPDX-License-Identifier: Apache-2.0. Written by tests/sim/sim_build.py: {source.name} as C. */",
        f'#include "{HERE / "kernel.h"}"',
        f'#include "{source}"',
        *(
            f"SIM_KERNEL({name}, {argument}, {'true' if name in barriers else 'false'})"
            for name, argument in KERNEL.findall(source.read_text(encoding="utf-8"))
        ),
    ]
    return "\n".join([*lines, ""])


def driver() -> Path:
    """Build the driver with all kernels of csrc/ops, and return its path."""
    builder = build.Builder(FOLDER, ["-O1", "-g"])
    flags = [*builder.cc, *build.COMMON, "-ffunction-sections", "-fdata-sections", *builder.mode]

    def compiled(source: Path) -> Path:
        target = FOLDER / f"{source.stem}.o"
        exported = ["-fvisibility=default"] if source.parent == HERE else []
        outputs = ["-MMD", "-MF", str(target.with_suffix(".d")), "-c", str(source), "-o", str(target)]
        return builder.make(
            target, [*flags, *exported, *build.WARNINGS, "-Werror", *outputs], f"simulated GPU: {source.name}"
        )

    sources = [*(HERE / name for name in DRIVER_SOURCES), build.CSRC / "base" / "dtype.c"]
    for kernels in sorted(build.CSRC.rglob("*_cuda.cu")):
        generated = FOLDER / f"{kernels.stem}_kernels.c"
        build.write_if_changed(generated, _kernels_as_c(kernels))
        sources.append(generated)
    with ThreadPoolExecutor(max_workers=build.jobs()) as workers:
        objects = list(workers.map(compiled, sources))
    newest = max(path.stat().st_mtime_ns for path in objects)
    if not DRIVER.exists() or DRIVER.stat().st_mtime_ns < newest:
        partial = DRIVER.with_suffix(".part")
        build.run(
            [
                *builder.cc,
                "-shared",
                "-pthread",
                "-Wl,-z,defs",
                "-Wl,--gc-sections",
                *map(str, objects),
                "-o",
                str(partial),
                "-lm",
            ]
        )
        partial.replace(DRIVER)
    return DRIVER


if __name__ == "__main__":
    print(driver())
