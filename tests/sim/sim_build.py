# SPDX-License-Identifier: Apache-2.0
"""Build the simulated GPU on demand, below build/sim: the driver (C), and the torch device over it (C++).

python tests/sim/sim_build.py       builds both and prints their paths
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))
import setup as build  # noqa: E402  (setup.py: the same flags, the same rule for files)

FOLDER = ROOT / "build" / (f"sim-{build.TARGET}" if build.TARGET else "sim")
DRIVER = FOLDER / "libsim.so"
DRIVER_SOURCES = ("driver.c", "streams.c", "memory.c", "nccl.c", "kernels.c")
MODULE = "_torch_sim"
TORCH = "2.13"  # the device and test_sim_fsdp2.py use internals of torch, which differ between releases
CXX = os.environ.get("CXX", "c++")
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
    """Build the driver with all kernels of csrc, and return its path."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "driver.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _build_driver()


def _build_driver() -> Path:
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


def why_no_torch_device() -> str:
    """Return why the torch device cannot be built here, or an empty string."""
    if importlib.util.find_spec("torch") is None:
        return "the simulated torch device needs torch"
    version = importlib.metadata.version("torch")
    if not version.startswith(f"{TORCH}."):
        return f"the simulated torch device is written for torch {TORCH}, and this is torch {version}"
    if not shutil.which(CXX):
        return f"the simulated torch device needs a C++ compiler: no {CXX} (CXX= names another)"
    if not (_torch_folder() / "include" / "ATen" / "ATen.h").is_file():
        return f"the simulated torch device needs torch's headers: none in {_torch_folder()}"
    return ""


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec and spec.origin
    return Path(spec.origin).parent


def torch_device() -> Path:
    """Build the torch device over the driver (40 s of processor time, once), and return the path of its module."""
    library, torch = driver(), _torch_folder()
    flags = ["-std=c++20", "-O1", "-fPIC", "-Wall", "-Wno-subobject-linkage", f"-DTORCH_EXTENSION_NAME={MODULE}"]
    folders = [torch / "include", torch / "include" / "torch" / "csrc" / "api" / "include"]
    flags += [*(f"-isystem{path}" for path in folders), f"-I{sysconfig.get_paths()['include']}"]
    headers = [*sorted(HERE.glob("torch_*.h")), HERE / "sim.h", torch / "version.py"]

    def compiled(source: Path) -> Path:
        made = FOLDER / f"{source.stem}-{_digest([source, *headers], flags)}.o"
        if not made.exists():
            build.run([CXX, *flags, "-c", str(source), "-o", str(made.with_suffix(".part"))])
            made.with_suffix(".part").replace(made)
        return made

    with (FOLDER / "lock").open("w") as lock:  # ranks and tests beside each other build it once
        fcntl.flock(lock, fcntl.LOCK_EX)
        with ThreadPoolExecutor(max_workers=build.jobs()) as workers:
            objects = list(workers.map(compiled, sorted(HERE.glob("torch_*.cpp"))))
        target = FOLDER / f"torch-{_digest(objects, [])}" / f"{MODULE}.so"
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            ours = [str(library), f"-Wl,-rpath,{library.parent}"]
            theirs = [
                f"-L{torch / 'lib'}",
                "-ltorch",
                "-ltorch_cpu",
                "-lc10",
                "-ltorch_python",
                f"-Wl,-rpath,{torch / 'lib'}",
            ]
            build.run([CXX, "-shared", *map(str, objects), *ours, *theirs, "-o", str(target.with_suffix(".part"))])
            target.with_suffix(".part").replace(target)
    return target


def _digest(inputs: list[Path], flags: list[str]) -> str:
    digest = hashlib.sha256(" ".join([CXX, *flags]).encode())
    for path in inputs:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    print(driver())
    print(why_no_torch_device() or torch_device())
