# SPDX-License-Identifier: Apache-2.0
"""Read text that every machine has: the source of Python's standard library; or any folder or file.

A folder is read file by file in the order of its sorted names, and split by file: each file goes to training or
validation by a hash of its name, so that no validation file is seen in training, and every rank and every run splits
alike.
"""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path

import torch
from torch import Tensor

SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "__pycache__",
    "turtledemo",
    "lib-dynload",
}
VALIDATION_PERCENT = 5


class Text:
    """Training and validation bytes, one 1-D uint8 tensor each."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = Path(path) if path else Path(sysconfig.get_paths()["stdlib"])
        if not self.path.exists():
            raise SystemExit(
                f"DATA={self.path}: no such file or folder; "
                "name one that holds text, or leave DATA empty for Python's own source"
            )
        parts: dict[bool, list[bytes]] = {True: [], False: []}
        if self.path.is_file():
            whole = self.path.read_bytes()
            cut = len(whole) * (100 - VALIDATION_PERCENT) // 100
            parts[False].append(whole[:cut])
            parts[True].append(whole[cut:])
        else:
            for name in self._files(standard_library=not path):
                validation = zlib.crc32(name.encode()) % 100 < VALIDATION_PERCENT
                parts[validation].append((self.path / name).read_bytes())
        self.train = self._tensor(parts[False])
        self.validation = self._tensor(parts[True])

    def _files(self, *, standard_library: bool) -> list[str]:
        pattern = "*.py" if standard_library else "*"
        found = (file.relative_to(self.path) for file in self.path.rglob(pattern) if file.is_file())
        return sorted(
            str(name) for name in found if not (standard_library and SKIPPED_FOLDERS.intersection(name.parts))
        )

    def _tensor(self, parts: list[bytes]) -> Tensor:
        whole = bytearray(b"\n".join(parts))
        if len(whole) < 65536:
            raise SystemExit(
                f"DATA={self.path}: {len(whole)} bytes on one side of the split, which is too little to learn from; "
                "give at least 2 MB of text, in several files or in one"
            )
        return torch.frombuffer(whole, dtype=torch.uint8)

    def batch(
        self, step: int, *, rank: int, ranks: int, batch: int, context: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of `step`, each (batch, context). They depend on the step alone, so a resumed run sees what it
        would have seen."""
        draw = torch.Generator().manual_seed(step * ranks + rank)
        starts = torch.randint(len(self.train) - context - 1, (batch,), generator=draw)
        return self._windows(self.train, starts, context, device)

    def validation_batches(
        self, *, rank: int, ranks: int, batch: int, context: int, device: torch.device, bytes_total: int = 1 << 18
    ) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's part of the validation text: consecutive windows, evenly spread, the same number of batches on
        every rank."""
        windows_there = (len(self.validation) - 1) // context
        batches = max(1, min(bytes_total // context, windows_there) // (batch * ranks))
        windows = batches * batch * ranks
        starts = torch.linspace(0, len(self.validation) - context - 1, windows).long()
        mine = starts[rank::ranks].split(batch)
        return [self._windows(self.validation, part, context, device) for part in mine]

    @staticmethod
    def _windows(text: Tensor, starts: Tensor, context: int, device: torch.device) -> tuple[Tensor, Tensor]:
        index = starts[:, None] + torch.arange(context + 1)
        rows = text[index].long().to(device)
        return rows[:, :-1], rows[:, 1:]
