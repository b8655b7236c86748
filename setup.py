# SPDX-License-Identifier: Apache-2.0
"""Builds zeropp: every csrc/**/*.c becomes one extension, ``zeropp._C``.

One rule, no list: a file's suffix decides its flags (``*_avx2.c``, ``*_neon.c``, ``*_clmul.c``), everything else is
common. ``*_isa.c`` is compiled once for each instruction set (csrc/ops/isa.h). torch is not imported and not needed:
what the extension uses of libtorch it looks up when it is imported. Python is used through its limited API, so one
wheel (cp310-abi3) serves every Python >= 3.10.

Found and used when present, left out when absent: nvcc (``*_cuda.cu`` become fat binaries inside the extension; the
extra ``cuda`` brings one from PyPI) and liburing (linked statically). Variables: ``CC``, ``CFLAGS``, ``LDFLAGS`` as
usual; ``NVCC`` (empty: none); ``ZEROPP_KERNELS=1``: a build without CUDA kernels, or without one of GPU_CODE, fails;
``ZEROPP_JOBS`` compilers at once (2); ``ZEROPP_WERROR=0`` lets warnings pass; ``ZEROPP_LIBURING``: a folder with
include/ and liburing.a in place of the machine's.

``ZEROPP_TARGET=aarch64-linux-gnu.2.28`` builds for another machine, or for an older C library, with the compiler of the
package ``ziglang``; the wheel then is a manylinux wheel. scripts/wheels.py makes all wheels so.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
TARGET = os.environ.get("ZEROPP_TARGET", "")  # machine-linux-gnu.glibc; empty: this machine, and its compiler
OBJECTS = ROOT / "build" / (TARGET or "obj")
IMAGES = ROOT / "build" / "images"  # of GPUs: the same for every target

LIMITED_API = "0x030a0000"
WARNINGS = "-Wall -Wextra -Wshadow -Wpointer-arith -Wstrict-prototypes -Wmissing-prototypes -Wvla".split()
COMMON = "-std=gnu11 -D_GNU_SOURCE -fPIC -fvisibility=hidden -fexceptions".split()
COMMON += "-ffp-contract=off -fno-math-errno -pthread".split()
RELEASE = "-O3 -DNDEBUG".split()
AVX2 = "-mavx2 -mfma -mf16c".split()
AVX512 = AVX2 + "-mavx512f -mavx512bw -mavx512vl -mavx512dq".split()
MACHINE = TARGET.partition("-")[0] or platform.machine().lower()
IS_X86 = MACHINE in ("x86_64", "amd64")
IS_ARM = MACHINE in ("aarch64", "arm64")
# Files of instruction sets: those of this machine with their flags. Those of another are left out.
ONE_ISA = ("_avx2.c", "_avx512.c", "_neon.c", "_clmul.c")
X86_FLAGS = {"_avx2.c": AVX2, "_avx512.c": AVX512, "_clmul.c": ["-mpclmul"]}
ARM_FLAGS: dict[str, list[str]] = {"_neon.c": [], "_clmul.c": ["-mcpu=generic+crc+aes"]}
SUFFIX_FLAGS = X86_FLAGS if IS_X86 else ARM_FLAGS if IS_ARM else {}
ISA_SUFFIX = "_isa.c"
ISA_FLAGS = {
    "scalar": ["-DZPP_ISA=scalar", "-DZPP_LANES=1"],
    **({"avx2": [*AVX2, "-DZPP_ISA=avx2", "-DZPP_LANES=16"]} if IS_X86 else {}),
    **({"avx512": [*AVX512, "-DZPP_ISA=avx512", "-DZPP_LANES=16"]} if IS_X86 else {}),
    **({"neon": ["-DZPP_ISA=neon", "-DZPP_LANES=16"]} if IS_ARM else {}),
}

GPU_CODE = (75, 80, 90, 100, 120)  # machine code for these, and PTX of the last for what comes after
# `ptxas -v` reports a kernel on two lines.
COMPILED = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
SPILLED = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


class BuildError(Exception):
    """A compiler refused a file; the message is its output."""


def unsupported(system: str, machine: str, pointer_bits: int, libc: str) -> str | None:
    """Return why zeropp cannot be built there, None where it can."""
    if system != "Linux":
        return f"zeropp runs on Linux (x86-64 and aarch64), and this is {system}; on Windows use WSL 2, on macOS a Linux VM"
    if pointer_bits != 64 or machine not in ("x86_64", "amd64", "aarch64", "arm64"):
        return f"zeropp runs on 64-bit x86-64 and aarch64, and this Python is {pointer_bits}-bit on {machine}"
    if libc != "glibc":
        return (
            "zeropp needs glibc, as torch's wheels do, and this Python has another C library (musl?); use an image "
            "with glibc, such as Debian's"
        )
    return None


def refuse_unsupported() -> None:
    bits = struct.calcsize("P") * 8
    if reason := unsupported(platform.system(), MACHINE, bits, platform.libc_ver()[0]):
        sys.exit(f"zeropp: {reason}")


def jobs() -> int:
    return int(os.environ.get("ZEROPP_JOBS", "2"))


def version() -> str:
    text = (CSRC / "bind" / "version.h").read_text(encoding="utf-8")
    found = re.search(r'#define ZPP_VERSION "([^"]+)"', text)
    if not found:
        raise BuildError("csrc/bind/version.h: no ZPP_VERSION")
    return found.group(1)


def c_sources() -> list[Path]:
    """Every C file of csrc/, in a fixed order; files of instruction sets that this architecture lacks are left out."""
    found = sorted(CSRC.rglob("*.c"))
    others = tuple(suffix for suffix in ONE_ISA if suffix not in SUFFIX_FLAGS)
    return [path for path in found if not path.name.endswith(others)]


def variants(path: Path) -> dict[str, list[str]]:
    """Return the flags of each object that a C file is compiled to, by the name of its instruction set, "" for one."""
    if path.name.endswith(ISA_SUFFIX):
        return ISA_FLAGS
    return {"": next((flags for suffix, flags in SUFFIX_FLAGS.items() if path.name.endswith(suffix)), [])}


def run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    except FileNotFoundError as error:
        raise BuildError(
            f"{command[0]}: not found. A C compiler is needed to build zeropp: apt-get install gcc (or set CC)"
        ) from error
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(command)}\n{done.stdout}")
    return done.stdout


def quietly(command: list[str]) -> str | None:
    """Output of a command that may be missing or fail: None then."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def compiler() -> list[str]:
    if "CC" in os.environ or not TARGET:
        return shlex.split(os.environ.get("CC", "cc"))
    return [sys.executable, "-m", "ziglang", "cc", "-target", TARGET]


def liburing() -> tuple[list[str], list[str]]:
    """Flags to compile and to link with a static liburing; empty where there is none."""
    if named := os.environ.get("ZEROPP_LIBURING"):
        return ["-DZPP_HAVE_URING=1", f"-I{named}/include"], [f"{named}/liburing.a"]
    if TARGET:
        return [], []  # the machine's own is of another architecture, or needs a newer C library
    libdir = quietly(["pkg-config", "--variable=libdir", "liburing"])
    archive = Path(libdir or "/nonexistent") / "liburing.a"
    if not archive.is_file():
        return [], []
    cflags = quietly(["pkg-config", "--cflags", "liburing"]) or ""
    return ["-DZPP_HAVE_URING=1", *cflags.split()], [str(archive)]


def needs_kernels() -> bool:
    return os.environ.get("ZEROPP_KERNELS") == "1"


def nvcc_path() -> str | None:
    """Return the path of nvcc: of ``NVCC``, a toolkit of this machine or the extra ``cuda``; None without one."""
    if "NVCC" in os.environ:
        return os.environ["NVCC"] or None
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"
    wheels = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu1*/bin/nvcc"), reverse=True)
    found = [str(path) for path in (toolkit, *wheels) if path.is_file()]
    return shutil.which("nvcc") or (found[0] if found else None)


def gpu_flags(nvcc: str) -> list[str]:
    """-gencode for every architecture of GPU_CODE that this nvcc knows."""
    known = (quietly([nvcc, "--list-gpu-code"]) or "").split()
    usable = [arch for arch in GPU_CODE if f"sm_{arch}" in known]
    if not usable:
        raise BuildError(f"{nvcc}: knows none of sm_{GPU_CODE}; wanted CUDA >= 11.8, or NVCC= to build without kernels")
    if needs_kernels() and len(usable) < len(GPU_CODE):
        raise BuildError(
            f"{nvcc}: compiles for sm_{usable} and ZEROPP_KERNELS=1 asks for all of sm_{GPU_CODE}; wanted CUDA 13.0: "
            "pip install 'zeropp[cuda]' brings it, and CUDA_HOME or PATH must name no older one"
        )
    flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in usable]
    return [*flags, f"-gencode=arch=compute_{usable[-1]},code=compute_{usable[-1]}"]


def toolkit_version(nvcc: str) -> int:
    """As the driver counts: 13000 for CUDA 13.0."""
    found = re.search(r"release (\d+)\.(\d+)", quietly([nvcc, "--version"]) or "")
    return int(found.group(1)) * 1000 + int(found.group(2)) * 10 if found else 0


def spills(output: str) -> list[str]:
    """Return "kernel for architecture: bytes" of every kernel that `ptxas -v` reports to keep registers in memory."""
    found, kernel = [], "?"
    for line in output.splitlines():
        if compiled := COMPILED.search(line):
            kernel = f"{compiled[1]} for {compiled[2]}"
        spilled = SPILLED.search(line)
        if spilled and spilled[1] != "0":
            found.append(f"{kernel}: {spilled[1]} bytes stored, {spilled[2]} bytes loaded")
    return found


def refuse_spills(output: str) -> None:
    if found := spills(output):
        raise BuildError(
            f"a CUDA kernel spills registers to memory, wanted none: {'; '.join(found)}. Give it fewer live values, or "
            "more registers by the second number of its __launch_bounds__"
        )


def write_if_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def up_to_date(target: Path, stamp: str) -> bool:
    """True if `target` was made by the same command from inputs (its -MMD file names them) unchanged since."""
    depends = target.with_suffix(".d")
    command = target.with_suffix(".cmd")
    if not (target.exists() and depends.exists() and command.exists() and command.read_text() == stamp):
        return False
    text = depends.read_text(encoding="utf-8").replace("\\\n", " ")
    inputs = text.split(":", 1)[1].split() if ":" in text else []
    made = target.stat().st_mtime_ns
    try:
        return all((ROOT / name).stat().st_mtime_ns < made for name in inputs)
    except FileNotFoundError:
        return False  # a header was removed or renamed


class Builder:
    """Compiles into a folder, only what changed, a few files at once.

    tests/c/run.py makes others of it, with sanitizers and asserts in place of RELEASE.
    """

    def __init__(self, folder: Path = OBJECTS, mode: Sequence[str] = RELEASE) -> None:
        self.folder, self.mode = folder, list(mode)
        self.images = IMAGES if folder == OBJECTS else folder
        self.cc = compiler()
        self.extra = shlex.split(os.environ.get("CFLAGS", ""))
        self.werror = [] if os.environ.get("ZEROPP_WERROR") == "0" else ["-Werror"]
        self.uring_cflags, self.uring_libs = liburing()
        # A system header may define again what the C library of another target defines.
        self.python = ["-isystem", sysconfig.get_paths()["include"]]
        # Which compiler "cc" is belongs to the command: another one must not reuse its objects.
        self.identity = quietly([*self.cc, "--version"]) or ""

    def make(
        self, target: Path, command: list[str], name: str, check: Callable[[str], None] = lambda output: None,
        identity: str = "",
    ) -> Path:  # fmt: skip
        stamp = shlex.join(command) + "\n" + (identity or self.identity)
        if not up_to_date(target, stamp):
            target.parent.mkdir(parents=True, exist_ok=True)
            sys.stdout.write(f"  {name}\n")  # one write: print makes two, and compilers run side by side
            sys.stdout.flush()
            check(run(command))  # one that fails leaves no stamp, so it is not up to date
            target.with_suffix(".cmd").write_text(stamp)
        return target

    def c_objects(self, source: Path) -> list[Path]:
        return [self.c_object(source, variant) for variant in variants(source)]

    def c_object(self, source: Path, variant: str = "") -> Path:
        relative = source.relative_to(ROOT)
        target = self.folder / relative.with_suffix(".o")
        if variant:
            target = target.with_stem(f"{target.stem}_{variant}")
        flags = [*COMMON, *self.mode, *variants(source)[variant], *WARNINGS, *self.werror, *self.uring_cflags]
        if relative.parts[:2] == ("csrc", "bind"):  # the only folder that sees Python
            flags += [f"-DPy_LIMITED_API={LIMITED_API}", *self.python]
        outputs = ["-MMD", "-MF", str(target.with_suffix(".d")), "-c", str(relative), "-o", str(target)]
        name = f"{relative} ({variant})" if variant else str(relative)
        return self.make(target, [*self.cc, *flags, *self.extra, *outputs], name)

    def fatbin(self, nvcc: str, arch: list[str], source: Path) -> Path:
        relative = source.relative_to(ROOT)
        target = self.images / relative.with_suffix(".cu.fatbin")  # X_cuda.c lies beside X_cuda.cu: X_cuda.d is its own
        flags = [*arch, "-O3", "-std=c++17", "-fmad=false", "--threads=2", "-Werror=all-warnings", "-Xptxas=-v"]
        outputs = ["-MMD", "-MF", str(target.with_suffix(".d")), "-fatbin", str(relative), "-o", str(target)]
        name = f"{relative} (for {len(arch) - 1} kinds of GPU, and PTX)"
        # nvcc calls this machine's compiler for its headers, whatever the target: builds for all targets share images.
        return self.make(target, [nvcc, *flags, *outputs], name, refuse_spills, quietly(["cc", "--version"]) or nvcc)

    def embedded(self, nvcc: str, arch: list[str], images: list[tuple[Path, Path]]) -> list[Path]:
        """Objects that hold the fat binaries and the table of them, which csrc/base/cuda_images.h declares."""
        assembly = ['    .section .rodata,"a",@progbits']
        rows = []
        for index, (source, image) in enumerate(images):
            symbol = f"zpp_cuda_image_{index}"
            assembly += [f"    .globl {symbol}", f"    .hidden {symbol}", "    .balign 64", f"{symbol}:"]
            assembly += [f'    .incbin "{image}"']
            rows.append((symbol, source.relative_to(CSRC).as_posix(), image.stat().st_size))
        assembly += ['    .section .note.GNU-stack,"",@progbits', ""]
        table = ["/* Written by setup.py. */", '#include "csrc/base/cuda_images.h"']
        table += [f"extern const unsigned char {symbol}[];" for symbol, _, _ in rows]
        table += [f"const int zpp_cuda_images_toolkit = {toolkit_version(nvcc)};"]
        table += [f"const size_t zpp_cuda_images_count = {len(rows)};"]
        kinds = ", ".join(flag.rpartition("code=")[2] for flag in arch).replace("compute_", "PTX of sm_")
        table += [f'const char zpp_cuda_images_kinds[] = "{kinds}";']
        table += ["const struct zpp_cuda_image zpp_cuda_images[] = {"]
        table += [f'    {{"{name}", {symbol}, {size}u}},' for symbol, name, size in rows]
        table += ["    {0, 0, 0},", "};", ""]
        assembly_path, table_path = self.folder / "cuda_images.S", self.folder / "cuda_images_table.c"
        write_if_changed(assembly_path, "\n".join(assembly))
        write_if_changed(table_path, "\n".join(table))
        objects = [self.folder / "cuda_images.o", self.folder / "cuda_images_table.o"]
        run([*self.cc, "-c", str(assembly_path), "-o", str(objects[0])])
        run([*self.cc, *COMMON, f"-I{ROOT}", "-c", str(table_path), "-o", str(objects[1])])
        return objects

    def cuda_objects(self) -> list[Path]:
        sources = sorted(CSRC.rglob("*_cuda.cu"))
        nvcc = nvcc_path()
        if not nvcc and needs_kernels():
            raise BuildError(
                "no nvcc (PATH, CUDA_HOME, wheels of this Python; an empty NVCC hides all), and ZEROPP_KERNELS=1 asks "
                "for CUDA kernels: pip install 'zeropp[cuda]' brings one, or leave ZEROPP_KERNELS out to build without"
            )
        if not sources or not nvcc:
            return []
        arch = gpu_flags(nvcc)
        return self.embedded(nvcc, arch, [(source, self.fatbin(nvcc, arch, source)) for source in sources])

    def objects(self) -> list[Path]:
        with ThreadPoolExecutor(max_workers=jobs()) as workers:
            cuda = workers.submit(self.cuda_objects)
            compiled = list(workers.map(self.c_objects, c_sources()))
            return [made for objects in compiled for made in objects] + cuda.result()

    def link(self, objects: list[Path], target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        exports = self.folder / "exports.map"  # liburing's symbols stay inside
        write_if_changed(exports, "{ global: PyInit__C; local: *; };\n")
        flags = ["-shared", "-pthread", f"-Wl,--version-script={exports}", "-Wl,-z,relro,-z,now", "-Wl,--gc-sections"]
        flags += ["-s", "-Wl,--build-id=none"] if TARGET else []  # equal bytes from equal sources
        libs = [*self.uring_libs, "-ldl", "-lm"]
        extra = [*self.extra, *shlex.split(os.environ.get("LDFLAGS", ""))]
        partial = target.with_name(target.name + ".part")
        run([*self.cc, *flags, *extra, *map(str, objects), "-o", str(partial), *libs])
        partial.replace(target)  # a process that has the old one mapped keeps it


class BuildExt(build_ext):
    """Builds with Builder in place of distutils' compiler, which knows neither per-file flags nor changed headers."""

    def build_extension(self, ext: Extension) -> None:
        OBJECTS.mkdir(parents=True, exist_ok=True)
        import fcntl  # only here: Windows has none, and is refused by name

        with (OBJECTS / "lock").open("w") as lock:  # two builds in one tree take turns
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                builder = Builder()
                builder.link(builder.objects(), Path(self.get_ext_fullpath(ext.name)))
            except BuildError as error:
                sys.exit(f"zeropp: build failed\n{error}")


class BuildPy(build_py):
    """Copies all modules anew: those of an older build, renamed or newer by their date, must not get into a wheel."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib) / "zeropp", ignore_errors=True)
        super().run()


def wheel_options() -> dict[str, str]:
    options = {"py_limited_api": "cp310"}
    if TARGET:
        glibc = TARGET.partition("-gnu.")[2].replace(".", "_")
        options["plat_name"] = f"manylinux_{glibc}_{MACHINE}"
    return options


if __name__ == "__main__":
    refuse_unsupported()
    setup(
        version=version(),
        ext_modules=[Extension("zeropp._C", sources=["csrc/bind/module.c"], py_limited_api=True)],
        cmdclass={"build_ext": BuildExt, "build_py": BuildPy},
        options={"bdist_wheel": wheel_options()},
    )
