# SPDX-License-Identifier: Apache-2.0
"""The table of what does not combine: against the verdicts recorded before it, against the documentation, and in its form."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from zeropp import compat
from zeropp.errors import ConfigError

DOC = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"


def test_what_was_allowed_stays_allowed_and_what_was_refused_stays_refused():
    """Every pair of values of Config, samples of more, and every value with every optimizer, in a process without other engines."""
    script = Path(__file__).with_name("combinations.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    printed = subprocess.run(
        [sys.executable, script, "--print"], capture_output=True, text=True, timeout=200, env=environment
    )
    assert printed.returncode == 0, printed.stderr
    recorded, found = json.loads(script.with_suffix(".json").read_text()), json.loads(printed.stdout)
    assert recorded.keys() == found.keys()
    differ = {name: (line, found[name]) for name, line in recorded.items() if line != found[name]}
    assert not differ, differ


@pytest.mark.quick
def test_the_documentation_has_the_table():
    """The table in docs/compatibility.md is `zeropp.compat.markdown()`."""
    text = DOC.read_text()
    assert text.endswith(compat.markdown()), 'write it: python -c "from zeropp import compat; print(compat.markdown())"'


@pytest.mark.parametrize("row", compat.ROWS, ids=lambda row: f"{row.option}-{row.other}")
def test_every_row_says_what_is_wrong_and_a_way_out(row):
    assert row.reason and row.way_out and row.option != row.other
    for sentence in (row.reason, row.way_out):
        assert not sentence.endswith(".") and not re.search(
            r"not (yet )?(built|implemented|supported|allowed)", sentence
        )


def test_a_row_needs_both_options_and_its_conditions():
    facts = {"Config.step_in_backward": True, "Config.offload.grads.kind": "nvme"}
    assert compat.clash(facts) == "" and compat.clash({**facts, "Config.accumulate": 4}) == ""
    assert compat.clash({**facts, "Config.accumulate": 1}).startswith(
        "Config.step_in_backward: True does not combine with Config.offload.grads.kind='nvme' and Config.accumulate=1: a gradient lives until"
    )


def test_named_values_are_said_by_their_words():
    facts = {"Config.stage": 3, compat.OPTIMIZER: compat.Named("OneBitAdam", "optimizer Mine")}
    with pytest.raises(
        ConfigError, match=r"^Config\.stage: 3 does not combine with optimizer Mine: it sends .*; use stage"
    ):
        compat.check(facts)
    compat.check(facts, only=["Precision.state"])
    assert compat.clash({**facts, compat.TRAINED_DTYPE: "float64"}, only=[compat.OPTIMIZER]).startswith(
        "optimizer Mine does not combine with dtype of a trained parameter='float64': its arithmetic is in fp32; use "
    )


@pytest.mark.parametrize(
    "facts, says",
    [
        ({"Config.host_copy": "off", "Config.offload.params.kind": "nvme", "ranks": 2}, "share what they read"),
        ({"Config.host_copy": "off", "Precision.stored": "int8", "ranks": 2}, "share what they read"),
        ({"Config.comm.secondary_shard": "host", "ranks of a host": compat.Named((2, 4), "2 ranks here, 4 there")}, "4 there"),
        ({"Config.comm.secondary_shard": "host", "Precision.stored": "int8", "hosts": 2}, "whole copy"),
    ],
)  # fmt: skip
def test_ranks_and_hosts(facts, says):
    assert says in compat.clash(facts)
    alone = {name: 1 if name in ("ranks", "hosts") else value for name, value in facts.items()}
    alone |= {"ranks of a host": (2, 2)} if "ranks of a host" in alone else {}
    assert compat.clash(alone) == ""
