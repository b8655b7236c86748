# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a real model under ``prepare(..., mesh=)``: a pipeline of two stages whose matrices are DTensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import zeropp
from checkpoint.models import group
from launch import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B
from zeropp.checkpoint import offline

MICRO = 2


def llama(seed: int) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=65, hidden_size=32, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            attn_implementation="sdpa", use_cache=False, tie_word_embeddings=False,
        )
    )  # fmt: skip


def make(shape: list[int], seed: int) -> tuple[Any, Any, Any]:
    """Return chunks, optimizer and one step of training."""
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("pp", "dp", "tp"))
    model = llama(seed)
    if shape[2] > 1:
        zeropp.parallel.tensor(model, mesh["tp"])
    chunks: Any = zeropp.parallel.cut(model, mesh["pp"], Schedule1F1B) if shape[0] > 1 else model
    optimizer = torch.optim.AdamW(chunks.parameters(), lr=1e-3, eps=1e-3)
    chunks, optimizer = zeropp.prepare(chunks, optimizer, zeropp.Config(stage=3, host_copy="off"), mesh=mesh)
    draw = torch.Generator().manual_seed(mesh.get_local_rank("dp"))
    ids = torch.randint(0, 65, (2 * MICRO, 8), generator=draw)

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def step() -> None:
        if shape[0] > 1:
            schedule.step(*((ids,) if stage.is_first else ()), target=ids if stage.is_last else None)
        else:
            loss_of(chunks(input_ids=ids).logits, ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    if shape[0] > 1:
        stage = zeropp.parallel.stages(chunks, mesh["pp"])[0]
        schedule = zeropp.parallel.pipeline(Schedule1F1B(stage, MICRO, loss_fn=loss_of))
    return chunks, optimizer, step


def save(rank: int, ranks: int, path: str, shape: list[int]) -> None:
    with group(ranks):
        chunks, optimizer, step = make(shape, 0)
        step()
        zeropp.save(path, chunks, optimizer, step=1)
        step()
        whole = zeropp.full_state_dict(chunks)
        if rank == 0:
            torch.save(whole, Path(path) / "after.pt")


def resume(rank: int, ranks: int, path: str, shape: list[int]) -> None:
    with group(ranks):
        chunks, optimizer, step = make(shape, 7)
        zeropp.load(path, chunks, optimizer)
        step()  # the moments and the number of steps came along
        whole, wanted = zeropp.full_state_dict(chunks), torch.load(Path(path) / "after.pt")
        assert sorted(whole) == sorted(wanted)
        for name, values in wanted.items():
            assert (whole[name] - values).abs().max() < 2e-6, name  # fp32, steps of 1e-3; sums in another order


@pytest.mark.parametrize(
    "saved, read",
    [
        ([2, 1, 2], [1, 1, 1]),
        pytest.param([1, 2, 2], [2, 2, 1], marks=pytest.mark.slow),
        pytest.param([2, 2, 1], [1, 2, 2], marks=pytest.mark.slow),
    ],
)
def test_a_real_model_is_saved_whole_and_read_in_another_layout(
    tmp_path: Path, saved: list[int], read: list[int]
) -> None:
    """Both layouts have the same data ranks, so the step after a load is that of the job that saved."""
    run_ranks(saved[0] * saved[1] * saved[2], save, str(tmp_path), saved, timeout=150)
    names = set(llama(0).state_dict())
    assert set(offline.whole_state(tmp_path, None)) == names
    run_ranks(read[0] * read[1] * read[2], resume, str(tmp_path), read, timeout=150)
