# SPDX-License-Identifier: Apache-2.0
"""Build and run the C tests: every tests/c/test_*.c is a program over the part of csrc/ that knows no Python.

    python tests/c/run.py                          plain, asserts on
    python tests/c/run.py --flavor asan tsan       under sanitizers (asan: AddressSanitizer and UBSan)
    python tests/c/run.py --fuzz 20                every tests/fuzz/*.c for 20 seconds, with clang's libFuzzer; without clang,
                                                   test_comm_fuzz* (the same targets, no coverage) under AddressSanitizer
    python tests/c/run.py --only test_base_pool -- nested_runs_stay_in_their_thread

tests/c/lib_*.c become shared libraries beside the programs, and so does the simulated GPU (tests/sim); tests load them
at run time.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tests" / "sim"))
import sim_build  # noqa: E402

import setup as build  # noqa: E402  (setup.py: the same flags, the same rule for files)

PRODUCT = ("base", "ops", "comm", "aio", "zero")
TIME_LIMIT_S = 600  # TSan is 20 times slower than plain
LAST_LINES = 60  # of a program that failed: a report of TSan has two stacks
ARCHIVER = [sys.executable, "-m", "ziglang", "ar"] if build.TARGET else ["ar"]
EMULATOR = shlex.split(os.environ.get("ZEROPP_EMULATOR", ""))  # runs programs of another architecture
EMULATED_MACHINE = ["-DTEST_MACHINE_BYTES=(1L << 30)"] if EMULATOR else []  # harness.h
WRONG = "-fno-sanitize-recover=all -fno-omit-frame-pointer".split()
FLAVORS = {
    "plain": ["-O2", "-g"],
    "asan": ["-O1", "-g", "-fsanitize=address,undefined", *WRONG],
    "tsan": ["-O1", "-g", "-fsanitize=thread", *WRONG],
    "fuzz": ["-O1", "-g", "-fsanitize=fuzzer-no-link,address,undefined", *WRONG],
}
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=1:allow_user_segv_handler=1:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1:allocator_may_return_null=1",
}


@dataclass(frozen=True)
class Result:
    """The end of one program."""

    flavor: str
    name: str
    ok: bool
    seconds: float
    output: str


def programs() -> list[Path]:
    found = sorted((ROOT / "tests" / "c").glob("test_*.c"))
    return [path for path in found if build.IS_X86 or '"emulated_cpu.h"' not in path.read_text(encoding="utf-8")]


def fuzz_targets() -> list[Path]:
    return sorted((ROOT / "tests" / "fuzz").glob("*.c"))


def product_sources() -> list[Path]:
    return [path for path in build.c_sources() if path.relative_to(build.CSRC).parts[0] in PRODUCT]


class Flavor:
    """The product compiled in one way, and the programs linked with it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = ROOT / "build" / "c" / (f"{name}-{build.TARGET}" if build.TARGET else name)
        page_bytes = os.sysconf("SC_PAGESIZE")
        pages = [] if page_bytes == 4096 else [f"-DTEST_PAGE_BYTES={page_bytes}"]
        self.builder = build.Builder(self.folder, [*FLAVORS[name], *pages])
        self.programs = build.Builder(self.folder, [*FLAVORS[name], *pages, *EMULATED_MACHINE])
        if name == "fuzz":
            self.builder.cc = self.programs.cc = ["clang"]
        self.product = self.folder / "product.a"

    def compile_product(self) -> None:
        with ThreadPoolExecutor(max_workers=build.jobs()) as workers:
            compiled = list(workers.map(self.builder.c_objects, product_sources()))
            objects = [made for several in compiled for made in several]
            list(workers.map(self._library, sorted((ROOT / "tests" / "c").glob("lib_*.c"))))
        self._beside(sim_build.driver())
        # An archive, so that a program links only the layers below what it tests.
        newest = max(path.stat().st_mtime_ns for path in objects)
        members = self.product.with_suffix(".members")
        wanted = "\n".join(map(str, objects))  # an object of a source that is gone must not stay in the archive
        known = members.read_text() if members.exists() and self.product.exists() else ""
        if known != wanted or self.product.stat().st_mtime_ns < newest:
            self.product.unlink(missing_ok=True)
            build.run([*ARCHIVER, "rcs", str(self.product), *map(str, objects)])
            members.write_text(wanted)

    def _beside(self, library: Path) -> None:
        """Put a link to a library beside the programs. The simulated GPU is plain in all flavors: it is no product."""
        link = self.folder / library.name
        if not link.is_symlink() or link.resolve() != library.resolve():  # a link of another checkout tests another GPU
            link.unlink(missing_ok=True)
            link.symlink_to(library)

    def _library(self, source: Path) -> Path:
        target = self.folder / f"{source.stem}.so"
        command = [*self.builder.cc, *build.COMMON, "-fvisibility=default", "-O1", "-g", *build.WARNINGS, "-Werror"]
        outputs = ["-MMD", "-MF", str(target.with_suffix(".d")), "-shared", "-o", str(target), str(source)]
        return self.builder.make(target, [*command, *outputs], f"{source.name} -> {target.name}")

    def link(self, source: Path) -> Path:
        """Link the program of one test, again whenever an object is newer."""
        target = self.folder / source.stem
        made = self.programs.c_object(source)
        inputs = [made, self.product]
        if not target.exists() or any(path.stat().st_mtime_ns > target.stat().st_mtime_ns for path in inputs):
            mode = ["-fsanitize=fuzzer,address,undefined" if flag.startswith("-fsanitize=fuzzer") else flag
                    for flag in FLAVORS[self.name]]  # fmt: skip
            libs = [*self.builder.uring_libs, "-ldl", "-lm"]
            build.run([*self.builder.cc, *mode, "-pthread", *map(str, inputs), "-o", str(target), *libs])
        return target


def fixed_addresses() -> list[str]:
    """Return the words that switch address randomisation off, where possible: TSan needs fixed addresses for its shadow."""
    setarch = shutil.which("setarch")
    if setarch and subprocess.run([setarch, "-R", "true"], capture_output=True).returncode == 0:
        return [setarch, "-R"]
    return []


def run_program(flavor: str, program: Path, arguments: list[str]) -> Result:
    command = [*EMULATOR, *(fixed_addresses() if flavor == "tsan" else []), str(program), *arguments]
    started = time.monotonic()
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIME_LIMIT_S,
            env={**os.environ, **OPTIONS},
            cwd=program.parent,
        )
        output, ok = done.stdout.decode(errors="replace"), done.returncode == 0
        if done.returncode < 0:
            output += f"\nended by signal {-done.returncode}\n"
    except subprocess.TimeoutExpired as late:
        output, ok = (late.stdout or b"").decode(errors="replace") + f"\nstill running after {TIME_LIMIT_S} s\n", False
    return Result(flavor, program.name, ok, time.monotonic() - started, output)


def run_flavor(name: str, only: list[str], arguments: list[str]) -> list[Result]:
    """Build a flavor, then link and run its programs, as many at once as compilers; the largest sources begin first."""
    flavor = Flavor(name)
    flavor.compile_product()
    sources = [source for source in programs() if not only or source.stem in only]

    def link_and_run(source: Path) -> Result:
        result = run_program(name, flavor.link(source), arguments)
        print(f"{name}: {result.name}: {'ok' if result.ok else 'FAILED'} ({result.seconds:.1f} s)", flush=True)
        if not result.ok:
            print(result.output, flush=True)
        return result

    with ThreadPoolExecutor(max_workers=build.jobs()) as workers:
        return list(workers.map(link_and_run, sorted(sources, key=lambda source: -source.stat().st_size)))


def fuzz(seconds: int) -> list[Result]:
    targets = fuzz_targets()
    if not targets:
        print("fuzz: no tests/fuzz/*.c: nothing of csrc/ parses bytes from outside yet", flush=True)
        return []
    if not shutil.which("clang"):
        print(
            "fuzz: no clang, so no libFuzzer: the deterministic driver runs instead (apt-get install clang)", flush=True
        )
        os.environ["FUZZ_SECONDS"] = str(seconds)
        return run_flavor("asan", ["test_comm_fuzz", "test_comm_fuzz_net"], [])
    flavor = Flavor("fuzz")
    flavor.compile_product()
    results = []
    for source in targets:
        program = flavor.link(source)
        corpus = flavor.folder / f"{source.stem}_corpus"
        corpus.mkdir(exist_ok=True)
        result = run_program("fuzz", program, [f"-max_total_time={seconds}", "-verbosity=0", str(corpus)])
        results.append(result)
        print(f"fuzz: {result.name}: {'ok' if result.ok else 'FAILED'} ({result.seconds:.1f} s)", flush=True)
        if not result.ok:
            print(result.output, flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description="Builds and runs the C tests.")
    parser.add_argument("--flavor", nargs="+", default=["plain"], choices=["plain", "asan", "tsan"])
    parser.add_argument("--only", nargs="+", default=[], metavar="PROGRAM")
    parser.add_argument("--fuzz", type=int, metavar="SECONDS")
    parser.add_argument("cases", nargs="*", help="cases of the programs; all if none")
    options = parser.parse_args()
    try:
        if options.fuzz is not None:
            results = fuzz(options.fuzz)
        else:
            results = [result for name in options.flavor for result in run_flavor(name, options.only, options.cases)]
    except build.BuildError as error:
        print(error)
        return 1
    failed = [result for result in results if not result.ok]
    for result in failed:  # again, where a long log is read first: at its end
        print(f"FAILED: {result.flavor} {result.name}, its last lines:")
        print("\n".join(result.output.splitlines()[-LAST_LINES:]), flush=True)
    print(f"{len(results) - len(failed)} passed, {len(failed)} failed", flush=True)
    return 1 if failed or (options.fuzz is None and not results) else 0


if __name__ == "__main__":
    sys.exit(main())
