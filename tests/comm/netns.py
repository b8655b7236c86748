# SPDX-License-Identifier: Apache-2.0
"""Make two hosts of one machine: network namespaces joined by a veth pair, each with its addresses. The test makes and removes them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def _bring_up(name: str, link: str, address: str) -> None:
    _ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
    _ip("-n", name, "link", "set", link, "up")
    _ip("-n", name, "link", "set", "lo", "up")


class TwoHosts:
    """Namespaces ``names[0]`` and ``names[1]``, interfaces ``links[0]`` and ``links[1]``, IPv4 ``addresses``, IPv6 ``addresses6``."""

    def __init__(self) -> None:
        mark = f"{os.getpid() % 100000:05d}"
        self.names = [f"zpp{mark}{side}" for side in "ab"]
        self.links = [f"zv{mark}{side}" for side in "ab"]
        self.addresses = ["10.213.7.1", "10.213.7.2"]
        self.addresses6 = ["fd00:213:7::1", "fd00:213:7::2"]

    def __enter__(self) -> TwoHosts:
        try:
            for name in self.names:
                _ip("netns", "add", name)
            peer = ["peer", "name", self.links[1], "netns", self.names[1]]
            _ip("link", "add", self.links[0], "netns", self.names[0], "type", "veth", *peer)
            for name, link, four, six in zip(self.names, self.links, self.addresses, self.addresses6, strict=True):
                _ip("-n", name, "-6", "addr", "add", f"{six}/64", "dev", link, "nodad")
                _bring_up(name, link, four)
        except OSError:
            self.__exit__(None, None, None)
            raise
        return self

    def cut(self) -> None:
        """Take the link of the second host down."""
        _ip("-n", self.names[1], "link", "set", self.links[1], "down")

    def mend(self) -> None:
        """Take the link up again."""
        _ip("-n", self.names[1], "link", "set", self.links[1], "up")
        # Addresses of IPv6 go with the cable.
        _ip("-n", self.names[1], "-6", "addr", "replace", f"{self.addresses6[1]}/64", "dev", self.links[1], "nodad")

    def command(self, side: int) -> list[str]:
        """Return the words to put before a command that is to run on that host."""
        return ["ip", "netns", "exec", self.names[side]]

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


class LossyHosts(TwoHosts):
    """Two hosts with a network that loses packets: lossy.py carries them between a TUN device on each host.

    The file `control` says which packets are lost; :meth:`set` changes it at any time.
    """

    def __init__(self, control: Path) -> None:
        super().__init__()
        self.names = [f"{name}l" for name in self.names]
        self.links = [f"{link}l" for link in self.links]
        self.addresses = ["10.213.8.1", "10.213.8.2"]
        self.control = control
        self.carrier: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LossyHosts:
        self.set(self.control, "lose 0")
        try:
            for name in self.names:
                _ip("netns", "add", name)
            words = [sys.executable, str(Path(__file__).with_name("lossy.py")), str(self.control)]
            for name, link in zip(self.names, self.links, strict=True):
                words += [name, link]
            self.carrier = subprocess.Popen(words, stdout=subprocess.PIPE)
            assert self.carrier.stdout is not None
            if self.carrier.stdout.readline() != b"ready\n":
                raise OSError("no TUN devices here (/dev/net/tun)")
            for name, link, address in zip(self.names, self.links, self.addresses, strict=True):
                _bring_up(name, link, address)
        except OSError:
            self.__exit__(None, None, None)
            raise
        return self

    @staticmethod
    def set(control: Path, words: str) -> None:
        """Lose packets: ``lose 0.02`` that share, either way; ``lose 1`` all; ``lose 1 0`` all from the second host to the first."""
        new = control.with_suffix(f".{os.getpid()}")
        new.write_text(words)
        new.replace(control)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.carrier is not None:
            self.carrier.kill()
            self.carrier.wait()
            assert self.carrier.stdout is not None
            self.carrier.stdout.close()
        super().__exit__(kind, value, trace)


def why_not() -> str | None:
    """Return the reason why this machine cannot have such hosts, or None if it can."""
    if shutil.which("ip") is None:
        return "no ip command (apt-get install iproute2)"
    try:
        with TwoHosts():
            return None
    except OSError as error:
        return f"network namespaces are not permitted here: {error}"
