# SPDX-License-Identifier: Apache-2.0
"""Make an arm64 Debian root with Python and torch that runs in emulation, to try the wheel for aarch64.

    python scripts/aarch64_root.py FOLDER [--torch 2.11.0]
    python scripts/versions.py dist/zeropp-*_aarch64.whl FOLDER/python:here
    PYTHONPATH=<the wheel, unpacked> FOLDER/python examples/demo.py --steps 5

FOLDER/python starts the root's Python in a mount namespace of its own, where binfmt_misc hands arm64 programs to
qemu-user-static, so that torchrun and subprocesses work too. It needs no rights of root, but user namespaces and Linux
6.7. The repository, /tmp and the current folder are the same inside. torch's wheel comes with CUDA's libraries: the
folder takes 6 GB.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from debian import call, unpacked

ROOT = Path(__file__).resolve().parents[1]
SUITE, PYTHON = "bookworm", "3.11"
PACKAGES = ("python3", "libstdc++6", "libgomp1", "bash", "coreutils", "libc-bin", "procps", "iproute2")
TAGS = ("2_28", "2_27", "2_26", "2_25", "2_24", "2_18", "2_17")  # manylinux, of the wheels that torch wants
NEEDED = ("safetensors", "tqdm", "rich", "numpy", "matplotlib", "pytest>=8", "pytest-timeout", "hypothesis")
START = r"""#!/bin/sh
# Written by scripts/aarch64_root.py.
exec unshare --map-root-user --mount --propagation private sh -c '
set -e
mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
magic="\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
mask="\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
printf %s ":aarch64:M::$magic:$mask:EMULATOR:F" >/proc/sys/fs/binfmt_misc/register
for shared in /proc /dev /sys /tmp "REPOSITORY" "$PWD"; do
    [ "$shared" != / ] || continue
    mkdir -p "FILES$shared"
    mount --rbind "$shared" "FILES$shared"
done
PATH=$PATH:/usr/sbin:/sbin
exec chroot FILES /usr/bin/env -C "$PWD" PATH=/usr/local/bin:/usr/bin:/bin /usr/bin/python3 "$@"' start "$@"
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch", default="2.11.0", metavar="VERSION")
    options = parser.parse_args()
    folder = options.folder.resolve()
    emulator = shutil.which("qemu-aarch64-static")
    if not emulator:
        sys.exit("no emulator of aarch64 here: apt-get install qemu-user-static")
    files = unpacked(list(PACKAGES), "aarch64", folder, SUITE)
    # No package was configured, so nobody is known by name, and torch asks for the names of the user and of this host.
    (files / "etc/hosts").write_text("127.0.0.1 localhost\n::1 localhost\n", encoding="utf-8")
    (files / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n", encoding="utf-8")
    site = files / "usr/local/lib" / f"python{PYTHON}" / "dist-packages"
    platforms = [word for tag in (*TAGS, "") for word in ("--platform", f"manylinux_{tag}_aarch64" if tag else "any")]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--only-binary=:all:", "--python-version"]
    pip += [PYTHON, *platforms, "--platform", "manylinux2014_aarch64", "--target", str(site)]
    call([*pip, f"torch=={options.torch}", *NEEDED])
    start = folder / "python"
    words = {"EMULATOR": emulator, "FILES": str(files), "REPOSITORY": str(ROOT)}
    text = START
    for name, value in words.items():
        text = text.replace(name, value)
    start.write_text(text, encoding="utf-8")
    start.chmod(0o755)
    print(
        f"{start}: " + call([str(start), "-c", "import platform, sys; print(platform.machine(), sys.version)"]).strip()
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
