# SPDX-License-Identifier: Apache-2.0
"""Activations on NVMe make the process smaller."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

GROWS = """
import sys
from pathlib import Path
import torch, zeropp
from torch import nn
torch.set_num_threads(1)
layers = [layer for _ in range(24) for layer in (nn.Linear(256, 256), nn.GELU())]
model = nn.Sequential(*layers)
adam = torch.optim.AdamW(model.parameters())
offload = zeropp.Offload(activations="nvme", path=sys.argv[1]) if sys.argv[2] == "nvme" else zeropp.Offload()
model, adam = zeropp.prepare(model, adam, zeropp.Config(stage=1, offload=offload))
def held(kind):
    return next(int(row.split()[1]) << 10 for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(kind))
inputs = torch.ones(4096, 256)
before = held("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
for _ in range(2):
    model(inputs).square().mean().backward()
    adam.step()
    adam.zero_grad()
print(held("VmHWM") - before)
"""


def test_a_process_grows_by_a_part_of_what_it_keeps_in_memory(tmp_path: Path) -> None:
    """192 MiB are saved for backward, 4 MiB a storage; the kernel says what the process grew by at its peak."""
    grown = {}
    for kind in ("memory", "nvme"):
        command = [sys.executable, "-c", GROWS, str(tmp_path), kind]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        grown[kind] = int(done.stdout)
    assert grown["memory"] > 180 << 20, grown
    assert grown["nvme"] < 0.5 * grown["memory"], grown
