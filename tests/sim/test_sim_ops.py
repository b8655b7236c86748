# SPDX-License-Identifier: Apache-2.0
"""Test the optimizers' operators on the simulated GPU: the CPU's bits, with numbers and with words, and no wait of the host."""

from __future__ import annotations

import pytest
import sim_build
from test_sim_torch import run

WHY_NOT = sim_build.why_no_torch_device()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it can be built")


def test_operators_have_the_bits_of_the_cpu() -> None:
    sim_build.torch_device()  # before any time limit of the case runs
    found = run("case_ops.py")
    assert len(found["cases"]) == 18
    assert found["differ"] == []
    assert found["waits"] == {} and not found["error"]


OFTEN = ("AdamW", "torch's RMSprop", "AdamW, states in 8 bits")


def test_optimizers_train_to_the_bits_of_the_cpu() -> None:
    found = run("case_optimizers.py", *OFTEN)
    assert found["differences"] == dict.fromkeys(OFTEN, 0.0) and not found["error"]


@pytest.mark.slow
def test_every_optimizer_trains_to_the_bits_of_the_cpu() -> None:
    found = run("case_optimizers.py")
    assert len(found["differences"]) == 16
    assert set(found["differences"].values()) == {0.0} and not found["error"]
