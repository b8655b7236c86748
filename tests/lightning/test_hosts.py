# SPDX-License-Identifier: Apache-2.0
"""Lightning and Fabric over two hosts: two network namespaces, a rank or a torchrun agent in each."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import two_networks

pytest.importorskip("lightning", reason="lightning is not installed: pip install zeropp[lightning]")

SCRIPT = Path(__file__).with_name("hosts_script.py")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(one for one in sys.path if one)}
FP32 = 5e-6  # the same fp32 numbers, added in another order


@pytest.mark.slow  # tests/hf/test_hosts.py is a sample that is not
@pytest.mark.parametrize("way", ["ranks", "agents"])
def test_losses_equal_ddp(way, tmp_path):
    with two_networks.hosts() as two:
        if way == "ranks":
            done = [two_networks.launch(two, SCRIPT, tmp_path, env=ENVIRONMENT, timeout=120, kind="lightning")]
        else:
            done = two_networks.agents(two, SCRIPT, tmp_path, env=ENVIRONMENT, timeout=200)
    assert not any(one.returncode for one in done), "\n".join(
        f"{one.stdout}\n{one.stderr or ''}"[-4000:] for one in done
    )
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(found["ddp"]) > 10 and found["ddp"] == pytest.approx(found["zeropp"], abs=FP32)
        assert found["again"] == found["zeropp"][4:8], "the second epoch, from the first one's file"
        assert found["fabric ddp"] == pytest.approx(found["fabric zeropp"], abs=FP32)
        assert "network" in found["links"]
