# SPDX-License-Identifier: Apache-2.0
"""The memory of a process, and its peak."""

from __future__ import annotations

import threading
import time
from pathlib import Path


def resident_bytes() -> int:
    """Anonymous memory only: pages of the libraries come and go as they like."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status: no RssAnon")


class Peak:
    """Highest resident memory while the block runs, sampled every 0.2 ms."""

    def __enter__(self) -> Peak:
        self.bytes, self._on = 0, True
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while self._on:
            self.bytes = max(self.bytes, resident_bytes())
            time.sleep(0.0002)

    def __exit__(self, *error: object) -> None:
        self.bytes = max(self.bytes, resident_bytes())
        self._on = False
        self._thread.join()
