# SPDX-License-Identifier: Apache-2.0
"""Peak memory of a part of a process, by kind, watched from a process of its own: a thread would wait for the
interpreter's lock just while memory grows."""

from __future__ import annotations

import os
import subprocess
import sys
from types import TracebackType

_WATCH = """
import sys, time
pid, peak, begun = sys.argv[1], {}, False
def now():
    kinds = {}
    for line in open(f"/proc/{pid}/smaps_rollup"):
        key, _, value = line.partition(":")
        if key in ("Pss", "Pss_Anon", "Pss_Shmem", "Pss_File"):
            kinds[key] = int(value.split()[0]) / 1024
    return kinds
import select
base = now()
print("watching", flush=True)
own = base
while not select.select([sys.stdin], [], [], 0)[0]:
    start = time.monotonic()
    seen = now()
    if seen["Pss_Anon"] + seen["Pss_Shmem"] > own["Pss_Anon"] + own["Pss_Shmem"]:
        own = seen
    time.sleep(max(0.005, 3 * (time.monotonic() - start)))
print(own["Pss_Anon"] + own["Pss_Shmem"], base["Pss_Anon"] + base["Pss_Shmem"], flush=True)
"""


class PeakMemory:
    """Anonymous and shared memory of this process while the block runs, proportional set size: pages that several
    processes share count once over all of them. Pages of files, which the kernel takes back as it likes, do not count.
    """

    peak_mib: float
    base_mib: float
    """At the beginning of the block."""

    def __enter__(self) -> PeakMemory:
        self._watch = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WATCH, str(os.getpid())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._watch.stdout is not None
        self._watch.stdout.readline()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        said, _ = self._watch.communicate("end\n")
        if error is None:
            self.peak_mib, self.base_mib = map(float, said.split())
