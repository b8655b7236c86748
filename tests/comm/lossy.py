# SPDX-License-Identifier: Apache-2.0
"""Lose packets between two hosts, for netns.LossyHosts: carry what two TUN devices send, each in its own network namespace.

    lossy.py CONTROL NAMESPACE DEVICE NAMESPACE DEVICE

CONTROL is a file: "lose SHARE" or "lose SHARE SIDE", SIDE 0 or 1 being the host that receives nothing; it is read again
when it changes. One seed decides which packets are lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import select
import struct
import sys
from pathlib import Path

TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 1, 0x1000, 0x40000000
MOST_BYTES = 1 << 16


def open_tun(namespace: str, device: str) -> int:
    """Open a new TUN device in that namespace. The device stays there; the returned file is its other end."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/var/run/netns", namespace).open() as where:
        if libc.setns(where.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI))
    return tun


def carry(control: Path, tuns: list[int]) -> None:
    chance = random.Random(7)
    seen, shares = None, [0.0, 0.0]  # of what goes to each side
    while True:
        ready, _, _ = select.select(tuns, [], [], 0.02)
        now = control.stat()
        changed = (now.st_ino, now.st_mtime_ns)  # two changes may have one time: the clock of files ticks every few ms
        if changed != seen:
            seen, words = changed, control.read_text().split()
            sides = [int(words[2])] if len(words) > 2 else [0, 1]
            shares = [float(words[1]) if side in sides else 0.0 for side in range(2)]
        for tun in ready:
            to = 1 - tuns.index(tun)
            for _ in range(64):
                try:
                    packet = os.read(tun, MOST_BYTES)
                except BlockingIOError:
                    break
                if chance.random() >= shares[to]:
                    with contextlib.suppress(OSError):  # the device is down: lost, too
                        os.write(tuns[to], packet)


if __name__ == "__main__":
    ends = [open_tun(*sys.argv[at : at + 2]) for at in (2, 4)]
    print("ready", flush=True)
    carry(Path(sys.argv[1]), ends)
