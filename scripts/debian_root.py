# SPDX-License-Identifier: Apache-2.0
"""Make a Debian root with Python and torch, to try a wheel: of arm64 in emulation, or with an older C library.

    python scripts/debian_root.py FOLDER [--machine aarch64|x86_64] [--suite bookworm] [--torch 2.11.0]
    python scripts/versions.py dist/zeropp-*_aarch64.whl FOLDER/python:here
    PYTHONPATH=<the wheel, unpacked> FOLDER/python examples/demo.py --steps 5

FOLDER/python starts the root's Python in a mount namespace of its own. Programs for arm64 are handed to
qemu-user-static there by binfmt_misc, so that torchrun and subprocesses work too; that needs Linux 6.7. It needs no
rights of root, but user namespaces. The repository, /tmp and the current folder are the same inside.

Debian 11 (bullseye, glibc 2.31) has a Python that is too old for the wheel. The sources of Debian 12's are built there,
by Debian 11's own compiler in a second root, which is removed afterwards.

torch's wheel on PyPI comes with CUDA's libraries: the folder takes 6 GB.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import sys
import tarfile
from pathlib import Path

from debian import call, sources, unpacked

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = {"bookworm": "3.11", "bullseye": "3.11", "trixie": "3.13", "sid": "3.14"}
BUILT = {"bullseye"}  # releases whose own Python is older than 3.10
PACKAGES = ("libstdc++6", "libgomp1", "bash", "coreutils", "libc-bin", "procps", "iproute2")
BUILDING = ("gcc", "libc6-dev", "make", "libffi-dev", "zlib1g-dev", "sed", "grep", "mawk", "findutils", "diffutils")
TAGS = ("2_28", "2_27", "2_26", "2_25", "2_24", "2_18", "2_17")  # manylinux, of the wheels that torch wants
NEEDED = ("safetensors", "tqdm", "rich", "numpy", "matplotlib", "pytest>=8", "pytest-timeout", "hypothesis")
START = r"""#!/bin/sh
# Written by scripts/debian_root.py.
exec unshare --map-root-user --mount --propagation private sh -c '
set -e
EMULATION
for shared in /proc /dev /sys /tmp "REPOSITORY" "$PWD"; do
    [ "$shared" != / ] || continue
    mkdir -p "FILES$shared"
    mount --rbind "$shared" "FILES$shared"
done
PATH=$PATH:/usr/sbin:/sbin
exec chroot FILES /usr/bin/env -C "$PWD" PATH=/usr/local/bin:/usr/bin:/bin PROGRAM "$@"' start "$@"
"""
EMULATION = r"""mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
magic="\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
mask="\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
printf %s ":aarch64:M::$magic:$mask:EMULATOR:F" >/proc/sys/fs/binfmt_misc/register"""


def starter(path: Path, files: Path, program: str, machine: str) -> Path:
    """Write a script that runs ``program`` inside the root ``files``."""
    emulation = "true"
    if machine == "aarch64":
        emulator = shutil.which("qemu-aarch64-static")
        if not emulator:
            sys.exit("no emulator of aarch64 here: apt-get install qemu-user-static")
        emulation = EMULATION.replace("EMULATOR", emulator)
    words = {"EMULATION": emulation, "FILES": str(files), "REPOSITORY": str(ROOT), "PROGRAM": program}
    text = START
    for name, value in words.items():
        text = text.replace(name, value)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


def built_python(folder: Path, machine: str, suite: str) -> Path:
    """Build Debian 12's Python with the compiler of another release; return a folder with usr/local."""
    files = unpacked([*PACKAGES, *BUILDING], machine, folder / "root", suite)
    for name, program in (("sh", "bash"), ("awk", "mawk"), ("cc", "gcc")):  # no package was configured
        (files / "usr/bin" / name).unlink(missing_ok=True)
        (files / "usr/bin" / name).symlink_to(program)
    if not (files / "bin/sh").exists():
        (files / "bin/sh").symlink_to("bash")
    (archive,) = sources("python3.11", folder / "sources", "bookworm").glob("*.orig.tar.*")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    (tree,) = (path.parent for path in folder.glob("*/configure"))
    shell = starter(folder / "bash", files, "/bin/bash", machine)
    steps = "./configure --quiet --without-ensurepip --disable-test-modules && make -s -j2 && make -s install DESTDIR="
    done = folder / "made"
    call([str(shell), "-c", f"cd {tree} && {steps}{done}"], HOME=str(folder))
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--machine", choices=("aarch64", "x86_64"), default="aarch64")
    parser.add_argument("--suite", choices=tuple(PYTHONS), default="bookworm")
    parser.add_argument("--torch", default="2.11.0", metavar="VERSION")
    options = parser.parse_args()
    folder = options.folder.resolve()
    version, built = PYTHONS[options.suite], options.suite in BUILT
    packages = [*PACKAGES, *(("libffi7", "zlib1g") if built else ("python3",))]
    files = unpacked(packages, options.machine, folder, options.suite)
    # No package was configured, so nobody is known by name, and torch asks for the names of the user and of this host.
    (files / "etc/hosts").write_text(f"127.0.0.1 localhost {socket.gethostname()}\n::1 localhost\n", encoding="utf-8")
    (files / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n", encoding="utf-8")
    site = files / "usr/local/lib" / f"python{version}" / ("site-packages" if built else "dist-packages")
    if built:
        shutil.copytree(built_python(folder / "build", options.machine, options.suite), files, dirs_exist_ok=True)
        shutil.rmtree(folder / "build")
    platforms = [
        word for tag in (*TAGS, "") for word in ("--platform", f"manylinux_{tag}_{options.machine}" if tag else "any")
    ]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--only-binary=:all:", "--python-version"]
    pip += [version, *platforms, "--platform", f"manylinux2014_{options.machine}", "--target", str(site)]
    call([*pip, f"torch=={options.torch}", *NEEDED])
    start = starter(folder / "python", files, "python3", options.machine)
    told = "import platform, sys; print(platform.machine(), *platform.libc_ver(), sys.version)"
    print(f"{start}: " + call([str(start), "-c", told]).strip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
