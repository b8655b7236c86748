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


def call(command: list[str], folder: Path = ROOT, **variables: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder,
                          env={**os.environ, **variables})  # fmt: skip
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout[-4000:]}")
    return done.stdout


KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
SOURCES = "{kind} [signed-by={keys}] http://deb.debian.org/debian {suite} main\n"


def apt(folder: Path, machine: str, suite: str = "", kind: str = "deb") -> list[str]:
    """Return the words that call apt-get for another architecture; it keeps what it needs to know in ``folder``.

    No root is needed. ``suite`` names another release of Debian than this machine's, such as "bullseye"; ``kind`` is
    "deb" for packages, "deb-src" for sources.
    """
    for part in ("lists/partial", "cache/archives/partial"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / "status").touch()
    options = {
        "Dir::State::lists": folder / "lists", "Dir::State::status": folder / "status", "Dir::Cache": folder / "cache",
        "APT::Architecture": DEBIAN[machine], "APT::Architectures": DEBIAN[machine], "APT::Sandbox::User": "root",
        "Debug::NoLocking": "1",
    }  # fmt: skip
    if suite:
        (folder / "sources.list").write_text(SOURCES.format(kind=kind, keys=KEYS, suite=suite), encoding="utf-8")
        options |= {"Dir::Etc::SourceList": folder / "sources.list", "Dir::Etc::SourceParts": Path("/dev/null")}
    words = ["apt-get", "-qq", *(part for key, value in options.items() for part in ("-o", f"{key}={value}"))]
    call([*words, "update"])
    return words


def unpacked(names: list[str], machine: str, folder: Path, suite: str = "") -> Path:
    """Download packages of another architecture and what they need, and unpack them; return the folder of their files."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        sys.exit(
            f"{names[0]} of {machine} comes from Debian, and there is no apt-get and dpkg-deb here; for liburing, "
            "ZEROPP_LIBURING may name a folder with MACHINE/include and MACHINE/liburing.a"
        )
    call([*apt(folder, machine, suite), "install", "--download-only", "--no-install-recommends", "--yes", *names])
    for package in sorted((folder / "cache/archives").glob("*.deb")):
        call(["dpkg-deb", "-x", str(package), str(folder / "files")])
    return folder / "files"


def sources(name: str, folder: Path, suite: str) -> Path:
    """Download the sources of a package; return the folder that holds its archives."""
    call([*apt(folder, "x86_64", suite, "deb-src"), "source", "--download-only", name], folder=folder)
    return folder


def liburing(machine: str) -> Path:
    """Return a folder with include/ and liburing.a of that architecture."""
    if named := os.environ.get("ZEROPP_LIBURING"):
        return Path(named) / machine
    made = ROOT / "build" / "liburing" / machine
    if (made / "liburing.a").is_file():
        return made
    work = made.with_name(f"{machine}-apt")
    files = unpacked(["liburing-dev"], machine, work)
    (made / "include").mkdir(parents=True, exist_ok=True)
    # The headers of the C library came along, and the compiler has its own. Debian keeps what differs between
    # architectures in a folder of its own.
    for folder in (files / "usr/include", files / f"usr/include/{machine}-linux-gnu"):
        for header in [*folder.glob("liburing.h"), *folder.glob("liburing/*.h")]:
            target = made / "include" / header.relative_to(folder)
            target.parent.mkdir(exist_ok=True)
            shutil.copy(header, target)
    (archive,) = (files / "usr/lib").rglob("liburing.a")
    shutil.copy(archive, made / "liburing.a")
    shutil.rmtree(work)
    return made


def sysroot(machine: str, suite: str = "") -> Path:
    """Return a folder with the C library of that architecture, of this release of Debian or of another one."""
    made = ROOT / "build" / "sysroot" / (f"{machine}-{suite}" if suite else machine)
    if not (made / "done").exists():
        shutil.rmtree(made, ignore_errors=True)
        files = unpacked(["libc6", "libgcc-s1"], machine, made / "work", suite)
        shutil.copytree(files, made, symlinks=True, dirs_exist_ok=True)
        shutil.rmtree(made / "work")
        (made / "done").touch()
    return made
