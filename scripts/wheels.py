# SPDX-License-Identifier: Apache-2.0
"""Build the wheels of a release on one x86-64 Linux machine, and check them.

    python scripts/wheels.py [--out dist] [--machine x86_64 aarch64] [--no-kernels] [--twice]

Each wheel serves every Python >= 3.10 (cp310-abi3) and every Linux with glibc >= 2.28 of its architecture. The compiler
is the package ``ziglang``, which brings the C libraries of other machines; nvcc is the machine's or that of the extra
``cuda``; liburing is Debian's static library of the architecture. Two builds of one commit have equal bytes: the times
in a wheel are those of the commit (or of SOURCE_DATE_EPOCH), and the modes of its files are fixed. ``--twice`` builds
the commit again in a clone, in another folder and under another umask and time zone, and names the files that differ.

ZEROPP_LIBURING names a folder with include/ and MACHINE/liburing.a where the machine has no apt.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import tempfile
import zipfile
from io import BytesIO
from pathlib import Path

from debian import call, liburing

ROOT = Path(__file__).resolve().parents[1]
GLIBC = (2, 28)
MACHINES = ("x86_64", "aarch64")
LARGEST_MB = 12


def build(machine: str, out: Path, kernels: bool) -> Path:
    """Build one wheel; ``kernels``: without the CUDA kernels it fails."""
    variables = {
        "ZEROPP_TARGET": f"{machine}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}",
        "ZEROPP_LIBURING": str(liburing(machine)),
        "SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH") or call(["git", "log", "-1", "--format=%ct"]).strip(),
        "PYTHONHASHSEED": "0",
        "ZEROPP_KERNELS": "1" if kernels else "0",
    }
    if not kernels:
        variables["NVCC"] = ""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir"]
    made = out / machine
    shutil.rmtree(made, ignore_errors=True)
    call([*pip, str(made), "."], **variables)
    (wheel,) = made.glob("*.whl")
    placed = out / wheel.name
    fix_modes(wheel, placed)
    shutil.rmtree(made)
    return placed


def fix_modes(wheel: Path, target: Path) -> None:
    """Write a wheel again, with modes that do not depend on the umask under which the sources were checked out."""
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as made:
        for entry in source.infolist():
            entry.external_attr = (0o100755 if entry.filename.endswith(".so") else 0o100644) << 16
            made.writestr(entry, source.read(entry.filename))


def differences(first: Path, second: Path) -> list[str]:
    """Return what differs between two wheels; empty where their bytes are equal."""
    if first.read_bytes() == second.read_bytes():
        return []
    with zipfile.ZipFile(first) as one, zipfile.ZipFile(second) as other:
        named = [set(one.namelist()), set(other.namelist())]
        found = [f"{name} is in one build only" for name in sorted(named[0] ^ named[1])]
        for name in sorted(named[0] & named[1]):
            left, right = one.getinfo(name), other.getinfo(name)
            if one.read(name) != other.read(name):
                found.append(f"{name}: other bytes in the second build")
            elif (left.date_time, left.external_attr) != (right.date_time, right.external_attr):
                found.append(f"{name}: another time or mode in the second build")
    return found or ["order or compression of the files"]


def differences_of_second_build(wheels: list[Path], machines: list[str], kernels: bool) -> list[str]:
    """Build the commit of this tree again in a clone, and return what differs."""
    with tempfile.TemporaryDirectory(prefix="zeropp-second-build-") as folder:
        clone, out = Path(folder) / "another" / "clone", Path(folder) / "dist"
        before = os.umask(0o077)
        try:
            call(["git", "clone", "--quiet", str(ROOT), str(clone)])
            command = [sys.executable, str(clone / "scripts" / "wheels.py"), "--out", str(out), "--machine", *machines]
            same_liburing = os.environ.get("ZEROPP_LIBURING", str(ROOT / "build" / "liburing"))
            call([*command, *([] if kernels else ["--no-kernels"])], TZ="Asia/Kathmandu", ZEROPP_LIBURING=same_liburing)
        finally:
            os.umask(before)
        return [f"{wheel.name}: {found}" for wheel in wheels for found in differences(wheel, out / wheel.name)]


def faults(wheel: Path, machine: str) -> list[str]:
    """Return what is wrong with the C module of a wheel: its machine, symbols, relocations and size."""
    from elftools.elf.dynamic import DynamicSection
    from elftools.elf.elffile import ELFFile
    from elftools.elf.gnuversions import GNUVerNeedSection

    module = ELFFile(BytesIO(zipfile.ZipFile(wheel).read("zeropp/_C.abi3.so")))
    found = []
    wanted = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}[machine]
    if module["e_machine"] != wanted:
        found.append(f"machine {module['e_machine']}, wanted {wanted}")
    for section in module.iter_sections():
        if isinstance(section, DynamicSection):
            tags = [tag.entry.d_tag for tag in section.iter_tags()]
            found += ["text relocations"] if "DT_TEXTREL" in tags else []
            needed = {tag.needed for tag in section.iter_tags("DT_NEEDED")}
            allowed = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-aarch64.so.1",
                       "ld-linux-x86-64.so.2"}  # fmt: skip
            found += [f"needs {name}" for name in sorted(needed - allowed)]
        if isinstance(section, GNUVerNeedSection):
            for _, versions in section.iter_versions():
                for version in versions:
                    name = version.name.removeprefix("GLIBC_")
                    numbers = tuple(int(part) for part in name.split(".")) if name[0].isdigit() else None
                    if numbers is None or numbers[:2] > GLIBC:
                        found.append(f"symbol version {version.name}, wanted at most GLIBC_{GLIBC[0]}.{GLIBC[1]}")
    exported = [
        symbol.name
        for symbol in module.get_section_by_name(".dynsym").iter_symbols()
        if symbol["st_shndx"] != "SHN_UNDEF" and symbol["st_info"]["bind"] != "STB_LOCAL"
    ]
    if exported != ["PyInit__C"]:
        found.append(f"exports {exported}, wanted PyInit__C alone")
    if wheel.stat().st_size > LARGEST_MB * 2**20:
        found.append(f"{wheel.stat().st_size / 2**20:.1f} MiB, wanted at most {LARGEST_MB}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--machine", nargs="+", choices=MACHINES, default=MACHINES)
    parser.add_argument("--no-kernels", action="store_true", help="leave the CUDA kernels out, to try a build")
    parser.add_argument("--twice", action="store_true", help="build the commit again in a clone, and compare")
    options = parser.parse_args()
    if options.twice and call(["git", "status", "--porcelain"]):
        sys.exit("--twice builds the commit again in a clone, and this tree has changes; commit them first")
    os.environ.pop("CC", None)  # the compiler is ziglang, whatever the machine's is called
    options.out = options.out.resolve()
    status, wheels = 0, []
    for machine in options.machine:
        wheel = build(machine, options.out, not options.no_kernels)
        wheels.append(wheel)
        wrong = faults(wheel, machine)
        audit = call([sys.executable, "-m", "auditwheel", "show", str(wheel)])
        if f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}" not in audit:
            wrong.append("auditwheel does not call it manylinux: " + " ".join(audit.split()))
        call([sys.executable, "-m", "abi3audit", "--strict", str(wheel)])
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        print(f"{wheel.name}  {wheel.stat().st_size / 2**20:.2f} MiB  sha256 {digest[:16]}")
        for fault in wrong:
            print(f"  {fault}")
            status = 1
    if options.twice:
        found = differences_of_second_build(wheels, list(options.machine), not options.no_kernels)
        print("\n".join(found) or "a second build, in another folder, has equal bytes")
        status = status or bool(found)
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
