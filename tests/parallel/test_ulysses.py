# SPDX-License-Identifier: Apache-2.0
"""Transformers models whose sequences are cut over ranks, against the same model on whole sequences in one process."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from typing import Any

import pytest
from ranks import of_all_ranks, on_ranks

KINDS = ("plain", "packed", "window", "window packed", "padding")
HEADS = ((4, 2), (6, 1), (5, 5))
ALL = [
    (family, impl, kind, heads)
    for family, impl, kind, heads in itertools.product(("llama", "qwen3", "mistral", "gemma"), ("sdpa", "eager"), KINDS, HEADS)
    if ("window" not in kind or family in ("mistral", "gemma")) and (family, impl) != ("gemma", "sdpa")
]  # fmt: skip
"""transformers refuses Gemma2 with sdpa, which has no soft caps."""
SAMPLED = {
    ("llama", "sdpa", "plain", (4, 2)), ("llama", "sdpa", "plain", (6, 1)), ("llama", "eager", "plain", (5, 5)),
    ("llama", "sdpa", "padding", (4, 2)), ("qwen3", "sdpa", "packed", (4, 2)), ("qwen3", "eager", "padding", (6, 1)),
    ("mistral", "sdpa", "window", (4, 2)), ("mistral", "sdpa", "window packed", (6, 1)), ("gemma", "eager", "window packed", (5, 5)),
}  # fmt: skip
CASES = [pytest.param(*case, marks=[] if case in SAMPLED else pytest.mark.slow) for case in ALL]


@pytest.mark.parametrize(("family", "impl", "kind", "heads"), CASES)
@on_ranks(2, pytest.param(4, marks=pytest.mark.slow))
def test_logits_equal_those_of_one_process(family: str, impl: str, kind: str, heads: list[int]) -> None:
    import cut_models
    import torch
    import torch.distributed as dist
    import zeropp.parallel

    ranks, me = dist.get_world_size(), dist.get_rank()
    whole, parts = (cut_models.model(family, *heads, impl, window="window" in kind) for _ in range(2))
    handle = zeropp.parallel.ulysses(parts, dist.group.WORLD)
    batch = cut_models.batch(kind)
    del batch["labels"]
    cut = slice(*cut_models.cuts(ranks)[me : me + 2])
    live = batch["attention_mask"].float() if kind == "padding" else torch.ones(2, cut_models.TOKENS)
    want = whole(**batch).logits
    got = parts(**{name: value[:, cut] for name, value in batch.items()}).logits
    assert torch.equal(got[live[:, cut].bool()], want[:, cut][live[:, cut].bool()])

    (want.square().mean(-1) * live).sum().backward()
    (got.square().mean(-1) * live[:, cut]).sum().backward()
    for p, q in zip(whole.parameters(), parts.parameters(), strict=True):
        dist.all_reduce(q.grad)
        assert float((p.grad - q.grad).abs().max()) <= 1e-6 * max(float(p.grad.abs().max()), 1.0)
    handle.remove()


@pytest.mark.slow
@pytest.mark.skipif(
    getattr(importlib.util.find_spec("deepspeed"), "origin", None) is None,
    reason="DeepSpeed is not installed: pip install -e .[bench]",
)
@on_ranks(2)
def test_beside_deepspeeds() -> None:
    """DeepSpeed 0.19's UlyssesSPAttentionHF drops the mask: it equals one process on plain sequences alone, and ours on all."""
    import cut_models
    import deepspeed.comm
    import torch
    import torch.distributed as dist
    import zeropp.parallel
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    tokens, half, plain = 30, 15, ALL_ATTENTION_FUNCTIONS["sdpa"]  # equal parts, which DeepSpeed needs
    cut = slice(half * dist.get_rank(), half * (dist.get_rank() + 1))
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: (
        None
    )  # an all-reduce in shared memory, which is compiled for minutes on a busy machine
    deepspeed.comm.init_distributed(verbose=False)
    UlyssesSPAttentionHF.register_with_transformers(
        cut_models.model("mistral", 4, 2, "sdpa"), "sdpa", 2, micro_batch_size=2
    )
    theirs = ALL_ATTENTION_FUNCTIONS["sdpa"]
    off = {}
    try:
        for kind in ("plain", "packed", "window", "padding"):
            ALL_ATTENTION_FUNCTIONS["sdpa"] = plain
            whole, parts = (cut_models.model("mistral", 4, 2, "sdpa", window=kind == "window").eval() for _ in range(2))
            batch = {name: value[:, :tokens] for name, value in cut_models.batch(kind).items() if name != "labels"}
            batch.setdefault("position_ids", torch.arange(tokens)[None].expand(2, -1))
            mine = {name: value[:, cut].contiguous() for name, value in batch.items()}
            live = mine["attention_mask"].bool() if kind == "padding" else torch.ones(2, half, dtype=torch.bool)
            with torch.no_grad():
                want = whole(**batch).logits[:, cut][live]
                handle = zeropp.parallel.ulysses(parts, dist.group.WORLD)
                assert torch.equal(parts(**mine).logits[live], want)
                handle.remove()
                ALL_ATTENTION_FUNCTIONS["sdpa"] = theirs
                off[kind] = float((parts(**mine).logits[live] - want).abs().max())
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = plain
    most = {kind: max(one[kind] for one in of_all_ranks(off)) for kind in off}
    assert most.pop("plain") < 1e-6 and min(most.values()) > 0.05, most


@on_ranks(2)
def test_sparse_attention_sees_the_whole_sequence() -> None:
    import cut_models
    import torch
    import torch.distributed as dist
    import zeropp
    import zeropp.parallel

    whole, parts = (cut_models.model("llama", 4, 2, "sdpa") for _ in range(2))
    for model in (whole, parts):
        zeropp.nn.sparsify_attention(model, zeropp.nn.Local(block=16, window=1, causal=True))
    zeropp.parallel.ulysses(parts, dist.group.WORLD)
    cut, ids = slice(*cut_models.cuts(2)[dist.get_rank() :][:2]), cut_models.batch("plain")["input_ids"]
    assert torch.equal(parts(input_ids=ids[:, cut]).logits, whole(input_ids=ids).logits[:, cut])


@pytest.mark.parametrize(
    ("family", "kind"), [("llama", "packed"), pytest.param("qwen3", "padding", marks=pytest.mark.slow)]
)
@on_ranks(4)
def test_parts_of_sequences_and_slices_of_matrices(family: str, kind: str) -> None:
    """sp 2 x tp 2 under stage 3: the loss and the weights after a step are those of one process."""
    import cut_models
    import torch
    import zeropp
    import zeropp.parallel
    from torch.distributed.device_mesh import init_device_mesh

    whole = cut_models.batch(kind)
    want = cut_models.model(family, 4, 2, "sdpa")
    optimizer = torch.optim.SGD(want.parameters(), lr=0.1)
    loss = want(**whole).loss
    loss.backward()
    optimizer.step()
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "sp", "tp"))
    model = zeropp.parallel.tensor(cut_models.model(family, 4, 2, "sdpa"), mesh["tp"])
    model, ours = zeropp.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), zeropp.Config(stage=3, host_copy="off"), mesh=mesh
    )
    handle = zeropp.parallel.ulysses(model, mesh["sp"])
    part = handle.shard(whole)
    found = model(**part).loss
    found.backward()
    ours.step()
    both = of_all_ranks(found.item())  # a rank's share of the loss; ranks of tp have the same one
    assert abs(sum(both) / 4 - loss.item()) < 4e-6 * loss.item()
    for name, value in zeropp.full_state_dict(model).items():
        assert float((value - want.state_dict()[name]).abs().max()) < 4e-6, name
