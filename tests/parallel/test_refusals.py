# SPDX-License-Identifier: Apache-2.0
"""What cannot work with sequences that are cut over ranks, and a rank that dies: who hears it, and how it is named."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
from launch import run_ranks
from ranks import of_all_ranks, on_ranks


@on_ranks(4)
def test_what_cannot_work_is_refused_by_name() -> None:
    import cut_models
    import torch
    import torch.distributed as dist
    import transformers
    import zeropp
    import zeropp.parallel
    from torch.distributed.device_mesh import init_device_mesh

    group = dist.group.WORLD
    with pytest.raises(
        zeropp.ConfigError,
        match=r"4 ranks share the sequence, but LlamaForCausalLM has 2 heads.*at most 2.*context_parallel",
    ):
        zeropp.parallel.ulysses(cut_models.model("llama", 2, 2, "sdpa"), group)
    with pytest.raises(zeropp.ConfigError, match="Linear has no attention of transformers' interface"):
        zeropp.parallel.ulysses(torch.nn.Linear(2, 2), group)
    config = transformers.LlamaConfig(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=8, vocab_size=8
    )
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(
        zeropp.ConfigError, match="layer 1 of LlamaForCausalLM is linear_attention, which carries a state"
    ):
        zeropp.parallel.ulysses(transformers.LlamaForCausalLM(config), group)
    hybrid = cut_models.model("llama", 4, 2, "sdpa")
    hybrid.model.layers[1].mixer = type("ToyMambaMixer", (torch.nn.Module,), {})()
    with pytest.raises(
        zeropp.ConfigError, match=r"model\.layers\.1\.mixer of LlamaForCausalLM is ToyMambaMixer, which carries a state"
    ):
        zeropp.parallel.ulysses(hybrid, group)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    model = cut_models.model("llama", 4, 2, "sdpa")
    with pytest.raises(zeropp.ConfigError, match=r'wanted one of them, as mesh\["sp"\]'):
        zeropp.parallel.ulysses(model, mesh)
    handle = zeropp.parallel.ulysses(model, mesh["sp"])
    with pytest.raises(zeropp.ConfigError, match="attached to a group already"):
        zeropp.parallel.ulysses(model, group)
    batch = cut_models.batch("plain", seed=dist.get_rank())  # a batch of its own on each rank
    first = 2 * (dist.get_rank() // 2)
    with pytest.raises(
        zeropp.ConfigError, match=f"rank {first + 1} and rank {first} of the job.*have different batches"
    ):
        handle.shard(batch)
    rows = 1 + dist.get_rank() % 2
    with pytest.raises(zeropp.ConfigError, match=f"rank {first + 1} of the job has rows: 2, and rank {first}: 1"):
        model(input_ids=batch["input_ids"][:rows])
    with pytest.raises(zeropp.ConfigError, match="output_attentions"):
        model(input_ids=batch["input_ids"], output_attentions=True)
    with pytest.raises(zeropp.ConfigError, match=r"attention_mask of LlamaForCausalLM is \(2, 1, 31, 31\)"):
        model(input_ids=batch["input_ids"], attention_mask=torch.ones(2, 1, 31, 31))
    with pytest.raises(zeropp.ConfigError, match="a sequence of 1 tokens for 2 ranks"):
        handle.shard({"input_ids": torch.ones(2, 1, dtype=torch.long)})
    with pytest.raises(zeropp.ConfigError, match="past_key_values in training"):
        model.train()(input_ids=batch["input_ids"], past_key_values=transformers.DynamicCache())
    of_all_ranks(None)


def until_killed(rank: int, ranks: int) -> dict[str, Any] | None:
    """Train with sp 2 on four ranks, of which rank 1 dies in the second step; it is the first one of its sequence."""
    import cut_models
    import torch.distributed as dist
    import zeropp
    import zeropp.parallel
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("zeropp")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sp", "dp"))
    model = cut_models.model("llama", 4, 2, "sdpa")
    handle = zeropp.parallel.ulysses(model, mesh["sp"])
    part = handle.shard(cut_models.batch("plain"))
    model(**part).loss.backward()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank != 3:
        return None
    begun = time.monotonic()
    try:
        model(**part)
    except zeropp.CommError as error:
        return {"text": str(error), "rank": error.rank, "seconds": time.monotonic() - begun}
    return {"text": "no error"}


def test_a_killed_rank_is_named_by_its_rank_of_the_job() -> None:
    outcomes = run_ranks(4, until_killed, timeout=90, check=False)
    found = outcomes[3].value
    assert outcomes[1].code == -signal.SIGKILL and found["rank"] == 1, found
    assert found["text"].startswith("comm: rank 1 (process") and "ranks 1 and 3" in found["text"], found
    assert "of the job" not in found["text"], found
    assert found["seconds"] < 5
