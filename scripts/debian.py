# SPDX-License-Identifier: Apache-2.0
"""Libraries of another architecture, from Debian's archive and without root: for wheels and for tests in emulation."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEBIAN = {"x86_64": "amd64", "aarch64": "arm64"}


def call(command: list[str], **variables: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
                          env={**os.environ, **variables})  # fmt: skip
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout[-4000:]}")
    return done.stdout


KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
SOURCES = "deb [signed-by={keys}] http://deb.debian.org/debian {suite} main\n"


def debian_package(name: str, architecture: str, folder: Path, suite: str = "") -> Path:
    """Download a package of another architecture without root: apt keeps what it needs to know in ``folder``.

    ``suite`` names another release of Debian than this machine's, such as "bullseye".
    """
    for part in ("lists/partial", "cache/archives/partial"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / "status").touch()
    options = {
        "Dir::State::lists": folder / "lists", "Dir::State::status": folder / "status", "Dir::Cache": folder / "cache",
        "APT::Architecture": architecture, "APT::Architectures": architecture, "APT::Sandbox::User": "root",
    }  # fmt: skip
    apt = ["apt-get", "-qq", *(part for key, value in options.items() for part in ("-o", f"{key}={value}"))]
    if suite:
        (folder / "sources.list").write_text(SOURCES.format(keys=KEYS, suite=suite), encoding="utf-8")
        apt += ["-o", f"Dir::Etc::SourceList={folder / 'sources.list'}", "-o", "Dir::Etc::SourceParts=/dev/null"]
    call([*apt, "update"])
    subprocess.run([*apt, "download", name], cwd=folder, check=True)
    return next(folder.glob(f"{name}_*_{architecture}.deb"))


def unpacked(name: str, machine: str, folder: Path, suite: str = "") -> Path:
    """Download a package of another architecture and unpack it in ``folder``; return the folder of its files."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        sys.exit(
            f"{name} of {machine} comes from Debian, and there is no apt-get and dpkg-deb here; for liburing, "
            "ZEROPP_LIBURING may name a folder with MACHINE/include and MACHINE/liburing.a"
        )
    package = debian_package(name, DEBIAN[machine], folder / "apt", suite)
    call(["dpkg-deb", "-x", str(package), str(folder / "files")])
    return folder / "files"


def liburing(machine: str) -> Path:
    """Return a folder with include/ and liburing.a of that architecture."""
    if named := os.environ.get("ZEROPP_LIBURING"):
        return Path(named) / machine
    made = ROOT / "build" / "liburing" / machine
    if (made / "liburing.a").is_file():
        return made
    work = made.with_name(f"{machine}-apt")
    files = unpacked("liburing-dev", machine, work)
    made.mkdir(parents=True, exist_ok=True)
    shutil.copytree(files / "usr/include", made / "include", dirs_exist_ok=True)
    headers = made / "include" / f"{machine}-linux-gnu"  # where Debian keeps what differs between architectures
    if headers.is_dir():
        shutil.copytree(headers, made / "include", dirs_exist_ok=True)
    (archive,) = (files / "usr/lib").rglob("liburing.a")
    shutil.copy(archive, made / "liburing.a")
    shutil.rmtree(work)
    return made


def sysroot(machine: str, suite: str = "") -> Path:
    """Return a folder with the C library of that architecture, of this release of Debian or of another one."""
    made = ROOT / "build" / "sysroot" / (f"{machine}-{suite}" if suite else machine)
    if not (made / "done").exists():
        shutil.rmtree(made, ignore_errors=True)
        for package in ("libc6", "libgcc-s1"):
            files = unpacked(package, machine, made / "work", suite)
        shutil.copytree(files, made, symlinks=True, dirs_exist_ok=True)
        shutil.rmtree(made / "work")
        (made / "done").touch()
    return made
