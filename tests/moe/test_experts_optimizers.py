# SPDX-License-Identifier: Apache-2.0
"""LAMB, Muon and the one-bit optimizers over ranks with different experts, against one process on the joined batch."""

from __future__ import annotations

import moe_models
import pytest
import torch
import zeropp
from expert_optimizers import (
    LAMB_BOUND,
    MUON_BOUND,
    ONE_BIT,
    PAPERS,
    MuonOfEach,
    close,
    lamb,
    muon,
    one_bit_follows_its_paper,
    one_process,
    trained,
)
from ranks import on_ranks
from zeropp.comm.job import JobRanks

SLOW = pytest.mark.slow
STAGES = [0, pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW), 3]


@on_ranks(pytest.param(1, marks=SLOW), 2, pytest.param(4, marks=SLOW))
@pytest.mark.parametrize("stage", STAGES)
def test_lamb(stage: int, ranks: int) -> None:
    """A parameter of experts has the trust ratio of one process in any layout."""
    wanted = one_process("Mixtral", lamb, ranks)
    for experts in {1, min(2, ranks), ranks}:
        close(trained("Mixtral", lamb, zeropp.Config(stage=stage, experts=experts)), wanted, LAMB_BOUND)


@on_ranks(4)
@pytest.mark.parametrize("make", ["lamb", "muon"])
def test_two_parts_of_two_ranks(make: str) -> None:
    """Quick: one layout of four ranks, in which a group has two."""
    ours, plain, bound = (lamb, lamb, LAMB_BOUND) if make == "lamb" else (muon, MuonOfEach, MUON_BOUND)
    close(trained("Mixtral", ours, zeropp.Config(stage=3, experts=2)), one_process("Mixtral", plain, 4), bound)


@on_ranks(2)
def test_lamb_over_slices() -> None:
    wanted = one_process("Mixtral", lamb, 2)
    for parallel in (1, 2):
        experts = zeropp.Experts(parallel=parallel, slices=2)
        close(trained("Mixtral", lamb, zeropp.Config(stage=2, experts=experts)), wanted, LAMB_BOUND)


@on_ranks(pytest.param(1, marks=SLOW), 2, pytest.param(4, marks=SLOW))
@pytest.mark.parametrize("stage", STAGES)
def test_muon(stage: int, ranks: int) -> None:
    """Each expert is a matrix."""
    wanted = one_process("Mixtral", MuonOfEach, ranks)
    for experts in {1, min(2, ranks), ranks}:
        close(trained("Mixtral", muon, zeropp.Config(stage=stage, experts=experts)), wanted, MUON_BOUND)


@on_ranks(2)
def test_muon_with_slices_is_refused() -> None:
    model = moe_models.build("Mixtral")
    config = zeropp.Config(stage=2, experts=zeropp.Experts(parallel=2, slices=2))
    with pytest.raises(zeropp.ConfigError, match=r"Experts.slices: 2 does not combine with optimizer Muon"):
        zeropp.prepare(model, muon(model), config)


# -- one bit -------------------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("kind", ONE_BIT)
@pytest.mark.parametrize("stage", [0, 2])
def test_one_bit_experts_of_one_rank(kind: str, stage: int) -> None:
    """Experts that one rank has are sent nowhere, so one step behind the freeze is that of one process; the rest is compressed."""
    wanted = trained("Mixtral", ONE_BIT[kind], zeropp.Config(stage=0), JobRanks())
    got = trained("Mixtral", ONE_BIT[kind], zeropp.Config(stage=stage, experts=2))
    experts = [name for name in wanted if ".experts." in name]
    close({name: got[name] for name in experts}, {name: wanted[name] for name in experts}, LAMB_BOUND)
    assert any(not torch.equal(got[name], wanted[name]) for name in wanted if name not in experts)


@on_ranks(4)
@pytest.mark.parametrize("kind", PAPERS)
def test_one_bit_follows_its_paper(kind: str) -> None:
    one_bit_follows_its_paper(kind)
