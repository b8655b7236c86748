# SPDX-License-Identifier: Apache-2.0
"""``import zeropp`` after Lightning makes the names known; before it, it loads nothing of Lightning."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("lightning", reason="lightning is not installed: pip install zeropp[lightning]")


def test_import_zeropp_after_lightning_registers():
    code = (
        "import lightning.pytorch as pl, zeropp\n"
        "from lightning.pytorch.strategies import StrategyRegistry\n"
        "print('zeropp_stage_2' in StrategyRegistry.available_strategies())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250)
    assert done.stdout.strip() == "True", done.stderr[-2000:]
