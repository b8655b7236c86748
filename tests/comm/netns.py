# SPDX-License-Identifier: Apache-2.0
"""Two hosts of one machine: network namespaces joined by a veth pair, each with addresses of its own, made and removed by the test."""

from __future__ import annotations

import os
import shutil
import subprocess
from types import TracebackType


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


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
            _ip(
                "link",
                "add",
                self.links[0],
                "netns",
                self.names[0],
                "type",
                "veth",
                "peer",
                "name",
                self.links[1],
                "netns",
                self.names[1],
            )
            for name, link, four, six in zip(self.names, self.links, self.addresses, self.addresses6, strict=True):
                _ip("-n", name, "addr", "add", f"{four}/24", "dev", link)
                _ip("-n", name, "-6", "addr", "add", f"{six}/64", "dev", link, "nodad")
                _ip("-n", name, "link", "set", link, "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except OSError:
            self.__exit__(None, None, None)
            raise
        return self

    def cut(self) -> None:
        """Take the second host's end of the cable out."""
        _ip("-n", self.names[1], "link", "set", self.links[1], "down")

    def mend(self) -> None:
        """Put it back."""
        _ip("-n", self.names[1], "link", "set", self.links[1], "up")
        # Addresses of IPv6 go with the cable.
        _ip("-n", self.names[1], "-6", "addr", "replace", f"{self.addresses6[1]}/64", "dev", self.links[1], "nodad")

    def command(self, side: int) -> list[str]:
        """What to put before a command that is to run on that host."""
        return ["ip", "netns", "exec", self.names[side]]

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


def why_not() -> str | None:
    """Why this machine cannot have such hosts; None if it can."""
    if shutil.which("ip") is None:
        return "no ip command (apt-get install iproute2)"
    try:
        with TwoHosts():
            return None
    except OSError as error:
        return f"network namespaces are not permitted here: {error}"
