# SPDX-License-Identifier: Apache-2.0
"""Training over several dimensions at once, 20 clipped steps, against one process: pipelines and sequences with slices of matrices."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import zeropp
from pipelines import CLIP, Run, net, plain
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

STEPS = 20
BOUND = 2e-5
"""Largest difference of a weight, which 20 steps of AdamW move by up to 2e-2."""


def _mesh(stages: int, data: int, slices: int) -> Any:
    return init_device_mesh("cpu", (stages, data, slices), mesh_dim_names=("pp", "dp", "tp"))


def _sliced(mesh: Any, in_shards: bool) -> nn.Sequential:
    """Return the net of pipelines with every block cut over the ranks of tensor parallelism."""
    plan: dict[str, Any] = {}
    for block in range(1, 7):
        plan |= {f"{block}.up": ColwiseParallel(), f"{block}.down": RowwiseParallel()}
    with zeropp.sharded_init(mesh=mesh) if in_shards else contextlib.nullcontext():
        model = net()
    return zeropp.parallel.tensor(model, mesh["tp"], plan)  # type: ignore[no-any-return]


def _require_parity(mesh: Any, name: str, in_shards: bool = False, **options: Any) -> None:
    wanted, norms = plain(STEPS, mesh.size(1))
    found, own_norms = Run(mesh, name, build=lambda: _sliced(mesh, in_shards), **options).train(STEPS)
    assert own_norms == pytest.approx(norms, rel=1e-4)
    assert found
    for key, values in found.items():
        assert float((values - wanted[key]).abs().max()) <= BOUND, key


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("1F1B", {"stage": 3, "host_copy": "off"}),
        pytest.param("Interleaved1F1B", {"stage": 2}, marks=pytest.mark.slow),
        pytest.param("ZBVZeroBubble", {"stage": 1, "reduce": "each"}, marks=pytest.mark.slow),
    ],
)
@on_ranks(4)
def test_stages_of_slices(name: str, options: dict[str, Any]) -> None:
    """pp 2 x tp 2: each stage has one data rank."""
    _require_parity(_mesh(2, 1, 2), name, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("1F1B", {"stage": 3, "host_copy": "off"}),
        pytest.param("Interleaved1F1B", {"stage": 2, "reduce": "each"}, marks=pytest.mark.slow),
        pytest.param("GPipe", {"stage": 1}, marks=pytest.mark.slow),
    ],
)
@on_ranks(8)
def test_stages_of_slices_over_data_ranks(name: str, options: dict[str, Any]) -> None:
    """pp 2 x dp 2 x tp 2, of a model that no rank has whole."""
    _require_parity(_mesh(2, 2, 2), name, in_shards=True, **options)


@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.slow)])
@on_ranks(4)
def test_sequences_and_slices(stage: int) -> None:
    """sp 2 x tp 2: a Llama on parts of packed sequences, with slices of its matrices."""
    pytest.importorskip("transformers")
    import cut_models

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    want = cut_models.model("llama", 4, 2, "sdpa")
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "sp", "tp"))
    model = zeropp.parallel.tensor(cut_models.model("llama", 4, 2, "sdpa"), mesh["tp"])
    model, ours = zeropp.prepare(model, adam(model), zeropp.Config(stage=stage, host_copy="off"), mesh=mesh)
    handle, plain_adam = zeropp.parallel.ulysses(model, mesh["sp"]), adam(want)
    for step in range(STEPS):
        batch = cut_models.batch("packed", seed=step)
        want(**batch).loss.backward()
        norm = float(nn.utils.clip_grad_norm_(want.parameters(), CLIP))
        plain_adam.step()
        plain_adam.zero_grad()
        model(**handle.shard(batch)).loss.backward()
        assert ours.clip_grad_norm_(CLIP) == pytest.approx(norm, rel=1e-4)
        ours.step()
        ours.zero_grad()
    for name, values in zeropp.full_state_dict(model).items():
        assert float((values - want.state_dict()[name]).abs().max()) <= BOUND, name
