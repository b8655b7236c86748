# SPDX-License-Identifier: Apache-2.0
"""Training, evaluation and generation of models whose sequences are cut over ranks, under ZeRO, against one process."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import of_all_ranks, on_ranks

STEPS = 3


def _one_process(steps: list[list[Any]], kind: str = "AdamW", lr: float = 1e-3) -> tuple[Any, list[float]]:
    """Train on whole batches; a step's loss is the mean over its tokens."""
    import cut_models
    import torch

    model = cut_models.model("llama", 4, 2, "sdpa")
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=lr)
    losses = []
    for micro in steps:
        total = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in micro)
        loss = sum(model(**batch, num_items_in_batch=total).loss for batch in micro)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_trains_as_one_process(stage: int) -> None:
    import cut_models
    import torch
    import torch.distributed as dist
    import zeropp
    import zeropp.parallel

    steps = [[cut_models.batch("packed" if step else "plain", seed=step, rows=2)] for step in range(STEPS)]
    want, losses = _one_process(steps)
    model = cut_models.model("llama", 4, 2, "sdpa")
    model, optimizer = zeropp.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), zeropp.Config(stage=stage, clip=0.5, host_copy="off")
    )
    handle = zeropp.parallel.ulysses(model, dist.group.WORLD)
    for [batch], loss in zip(steps, losses, strict=True):
        part = handle.shard(batch)
        assert part["input_ids"].shape[1] < cut_models.TOKENS
        ours = model(**part).loss
        ours.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert abs(sum(of_all_ranks(ours.item())) / 2 - loss) < 2e-6 * abs(loss)
    for name, value in zeropp.full_state_dict(model).items():
        assert float((value - want.state_dict()[name]).abs().max()) < 2e-6, name


@on_ranks(4)
def test_two_samples_of_two_ranks_each_and_two_micro_batches() -> None:
    """dp 2 x sp 2, accumulate 2: every token of a step counts the same, wherever it is."""
    import cut_models
    import torch
    import zeropp
    import zeropp.parallel
    from torch.distributed.device_mesh import init_device_mesh
    from torch.utils.data import DataLoader

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    samples = [{name: one[0] for name, one in cut_models.batch("packed", seed=at, rows=1).items()} for at in range(8)]
    for at, sample in enumerate(samples):
        sample["labels"][: 3 * at] = -100  # as different numbers of tokens as there are samples
    whole = DataLoader(samples, batch_size=1)
    batches = list(whole)
    # DistributedSampler deals samples out in turn: data coordinate 0 has samples 0, 2, 4, ..., and 1 has 1, 3, 5, ...
    want, losses = _one_process([batches[:4], batches[4:]])
    model = cut_models.model("llama", 4, 2, "sdpa")
    handle = zeropp.parallel.ulysses(model, mesh["sp"])
    model, optimizer = zeropp.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), zeropp.Config(stage=2, accumulate=2, clip=0.5)
    )
    zeropp.nn.tile_sequence(model)
    seen = []
    for part in handle.loader(whole, accumulate=2):
        loss = model(**part).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    assert len(seen) == 4
    every = of_all_ranks(seen)
    for step, loss in enumerate(losses):
        ours = sum(row[2 * step] + row[2 * step + 1] for row in every) / 8
        assert abs(ours - loss) < 2e-6 * abs(loss)
    for name, value in zeropp.full_state_dict(model).items():
        assert float((value - want.state_dict()[name]).abs().max()) < 4e-6, name


@pytest.mark.parametrize("how", ["recomputed", "offloaded", "tiled", "compiled"])
@on_ranks(2)
def test_composes_with_what_saves_memory(how: str) -> None:
    import cut_models
    import torch
    import torch.distributed as dist
    import zeropp
    import zeropp.parallel

    batch = cut_models.batch("packed")
    want, [loss] = _one_process(
        [[batch]], "SGD", 0.1
    )  # AdamW's first step is near the sign of a gradient, however small
    model = cut_models.model("llama", 4, 2, "sdpa").train()
    offload = zeropp.Offload(activations="cpu") if how == "offloaded" else None
    handle = zeropp.parallel.ulysses(model, dist.group.WORLD)
    if how in ("recomputed", "offloaded"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model, optimizer = zeropp.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        zeropp.Config(stage=3, clip=0.5, **({"offload": offload} if offload else {})),
    )
    if how == "tiled":
        zeropp.nn.tile_sequence(model, mlp_tile=5, loss_tile=4)
    if how == "compiled":
        for layer in model.model.layers:
            layer.compile(backend="eager")
    part = handle.shard(batch)
    ours = model(**part).loss
    if how == "recomputed":  # another sequence, of other lengths, between this forward and its backward
        with torch.no_grad():
            cut = slice(0, 3) if dist.get_rank() == 0 else slice(3, cut_models.TOKENS)
            model(input_ids=batch["input_ids"][:, cut])
    ours.backward()
    optimizer.step()
    assert abs(sum(of_all_ranks(ours.item())) / 2 - loss) < 2e-6 * abs(loss)
    for name, value in zeropp.full_state_dict(model).items():
        assert float((value - want.state_dict()[name]).abs().max()) < 2e-6, name


@on_ranks(2)
def test_evaluates_and_generates() -> None:
    import cut_models
    import torch
    import torch.distributed as dist
    import zeropp.parallel

    whole, parts = (cut_models.model("llama", 4, 2, "sdpa").eval() for _ in range(2))
    handle = zeropp.parallel.ulysses(parts, dist.group.WORLD)
    batch = cut_models.batch("plain")
    with torch.no_grad():
        want = whole(**batch)
        got = parts(**handle.shard(batch))
        cut = slice(0, 15) if dist.get_rank() == 0 else slice(15, cut_models.TOKENS)
        by_hand = parts(input_ids=batch["input_ids"][:, cut], labels=batch["labels"][:, cut])
    assert torch.equal(got.logits, want.logits[:, cut])
    assert abs(sum(of_all_ranks(got.loss.item())) / 2 - want.loss.item()) < 1e-6
    assert by_hand.loss.item() == pytest.approx(got.loss.item(), rel=1e-6)  # labels are shifted over the cut
    for cached in (True, False):
        how: dict[str, Any] = dict(max_new_tokens=5, do_sample=False, use_cache=cached, pad_token_id=0)
        prompt = batch["input_ids"][:, :8]
        if cached:
            tokens = parts.generate(prompt, **how)
        else:
            with handle.whole():
                tokens = parts.generate(prompt, **how)
        assert torch.equal(tokens, whole.generate(prompt, **how))
    handle.remove()
    with torch.no_grad():
        assert torch.equal(parts(**batch).logits, want.logits)


@on_ranks(2)
def test_ulysses_attention_is_that_of_the_whole_sequence() -> None:
    import functools

    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    import zeropp.parallel

    attention = functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    torch.manual_seed(0)
    whole = [torch.randn(3, heads, 20, 16, requires_grad=True) for heads in (6, 2, 2)]
    cut = slice(0, 7) if dist.get_rank() == 0 else slice(7, 20)
    parts = [one.detach()[:, :, cut].clone().requires_grad_() for one in whole]
    want = attention(*whole)
    for lengths in (None, (7, 13)):
        got = zeropp.parallel.ulysses_attention(attention, *parts, group=dist.group.WORLD, lengths=lengths)
        assert torch.equal(got, want[:, :, cut])
    want.square().sum().backward()
    got.square().sum().backward()
    for one, part in zip(whole, parts, strict=True):
        assert torch.allclose(part.grad, one.grad[:, :, cut], rtol=1e-6, atol=1e-6)
