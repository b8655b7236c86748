# SPDX-License-Identifier: Apache-2.0
"""Trainer over two hosts: two network namespaces, a rank or a torchrun agent in each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import two_networks
from launch_hf import ENVIRONMENT

pytest.importorskip("transformers", reason="transformers is not installed: pip install zeropp[hf]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install zeropp[hf]")

SCRIPT = Path(__file__).with_name("hosts_script.py")
FP32 = 5e-6  # the same fp32 numbers, added in another order


@pytest.mark.parametrize("way", ["ranks", pytest.param("agents", marks=pytest.mark.slow)])
def test_losses_norms_and_learning_rates_equal_ddp(way, tmp_path):
    with two_networks.hosts() as two:
        if way == "ranks":
            done = [two_networks.launch(two, SCRIPT, tmp_path, env=ENVIRONMENT, timeout=120, kind="hf")]
        else:
            done = two_networks.agents(two, SCRIPT, tmp_path, env=ENVIRONMENT, timeout=200)
    assert not any(one.returncode for one in done), "\n".join(
        f"{one.stdout}\n{one.stderr or ''}"[-4000:] for one in done
    )
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(found["stock"]) == 4 and found["again"] == found["zeropp"]
        for ours, stock in zip(found["zeropp"], found["stock"], strict=True):
            assert ours == pytest.approx(stock, abs=FP32)
        assert found["apart"] < FP32 and found["again apart"] == 0.0
        assert "network" in found["links"] and found["local"] == 0, "each is the first rank of its host"
