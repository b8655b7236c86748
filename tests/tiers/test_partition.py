# SPDX-License-Identifier: Apache-2.0
"""Activations that the ranks of a group hold alike, shared out: the bits of holding them whole, at 1/n of the bytes."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from disk import scratch
from ranks import on_ranks
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from training import CONTEXT, checkpointed, gpt
from zeropp import Offload
from zeropp.nn import Partition, partition_activations
from zeropp.zero.engine import engine_of

ROWS, WIDTH, LAYERS = 16, 64, 3
INPUT_BYTES = ROWS * CONTEXT * WIDTH * 4  # of a block


def same_batch(step: int) -> tuple[Tensor, Tensor]:
    """On every rank."""
    draw = torch.Generator().manual_seed(step)
    text = torch.randint(0, 256, (ROWS, CONTEXT + 1), generator=draw)
    return text[:, :-1], text[:, 1:]


def replicated(how: str) -> Any:
    model = gpt(width=WIDTH, layers=LAYERS)
    if how != "plain":
        checkpointed(model, how == "reentrant")
    return model


def gradients(model: nn.Module) -> list[Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def equal(got: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(got) == len(wanted) > 0
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@on_ranks(2)
def test_equal_to_whole() -> None:
    """Both kinds of checkpointing and none, a group of its own, a graph that is kept, and two passes before a backward."""
    ranks, own = dist.get_world_size(), dist.new_group(list(range(dist.get_world_size())))
    for how in ("plain", "checkpoint", "reentrant"):
        model = replicated(how)
        model(*same_batch(0)).backward()
        wanted = gradients(model)
        for group, check in ((None, True), (own, False)):
            with partition_activations(group, min_bytes=1 << 12, check=check) as part:
                loss = model(*same_batch(0))
            assert part.whole_bytes >= LAYERS * INPUT_BYTES
            assert part.whole_bytes / ranks <= part.kept_bytes <= part.whole_bytes / ranks + 64 * len(part._sums)
            assert part.gathered_bytes == 0
            loss.backward()
            equal(gradients(model), wanted)
            part._bury()
            assert part.gathered_bytes >= LAYERS * INPUT_BYTES and not part._alive and part._ahead_bytes == 0
            if how == "checkpoint":
                assert part.gathered_bytes == part.whole_bytes, "each storage once, however many views of it"
    model = replicated("plain")
    with partition_activations(min_bytes=1 << 12):
        loss = model(*same_batch(0))
    loss.backward(retain_graph=True)
    equal(gradients(model), wanted)
    loss.backward()
    equal(gradients(model), wanted)
    with partition_activations(min_bytes=1 << 12) as part:
        losses = [model(*same_batch(step)) for step in (0, 1)]
    losses[1].backward()
    gradients(model)
    losses[0].backward()
    equal(gradients(model), wanted)
    part._bury()
    assert not part._alive
    dist.destroy_process_group(own)


@on_ranks(2)
def test_counted() -> None:
    """The inputs of checkpointed blocks are gone from memory after forward, but for 1/n; parameters stay where they are."""
    for how, shared in (("checkpoint", False), ("checkpoint", True), ("reentrant", True)):
        model = replicated(how)
        seen: list[StorageWeakRef] = []
        for block in model.blocks[1:]:  # the first one's input is the embedding's output, which nothing holds either
            block.register_forward_pre_hook(
                lambda _, args, to=seen: to.append(StorageWeakRef(args[0].untyped_storage()))
            )
        if shared:
            with partition_activations(min_bytes=1) as part:
                loss = model(*same_batch(0))
            weights = sum(p.numel() * 4 for p in model.parameters())
            assert (
                LAYERS * INPUT_BYTES <= part.whole_bytes < LAYERS * INPUT_BYTES + weights + 4 * ROWS * CONTEXT * 256 * 4
            )
        else:
            loss = model(*same_batch(0))
        gc.collect()
        assert len(seen) == LAYERS - 1
        assert [one.expired() for one in seen] == [shared] * len(seen), (how, shared)
        del loss
    weight = nn.Parameter(torch.ones(64, 64))
    x = torch.ones(32, 64, requires_grad=True)
    with partition_activations(min_bytes=1) as part:
        y = nn.functional.linear(x, weight)
    assert part.whole_bytes == x.numel() * 4, "the weight is a parameter, and so is its transpose"
    y.sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, torch.full((64, 64), 32.0))


class Sliced(nn.Module):
    """Tensor slicing as Megatron's: each rank has some columns of the first matrix, and those rows of the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        up, down = torch.randn(4 * WIDTH, WIDTH) * 0.1, torch.randn(WIDTH, 4 * WIDTH) * 0.1
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.up = nn.Parameter(up.chunk(ranks)[rank].clone())
        self.down = nn.Parameter(down.chunk(ranks, dim=1)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(nn.functional.linear(_Copied.apply(x), self.up))
        return x + _Summed.apply(nn.functional.linear(hidden, self.down))


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@on_ranks(2)
def test_sliced_tensors() -> None:
    """Values inside a layer differ between ranks, its input does not: checkpointed layers partition their inputs. Without
    checkpoints every rank says what differs, and `keep` names it."""
    layers = [Sliced() for _ in range(LAYERS)]
    values = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(5))

    def run(saved: bool, x: Tensor) -> Tensor:
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False) if saved else layer(x)
        return x.square().mean()

    def found() -> list[Tensor]:
        return [grad for layer in layers for grad in gradients(layer)]

    run(True, values).backward()
    wanted = found()
    with partition_activations(min_bytes=1 << 12) as part:
        loss = run(True, values)
    assert part.kept_bytes * dist.get_world_size() == part.whole_bytes > LAYERS * values.numel() * 4
    loss.backward()
    equal(found(), wanted)
    with partition_activations(min_bytes=1 << 12):
        loss = run(False, values)
    with pytest.raises(
        zeropp.Error, match=r"tensor \d+ that autograd saved is not the same on all ranks.*rank 1 \d+ bytes"
    ):
        loss.backward()
    del loss
    found()
    with partition_activations(min_bytes=1 << 12, keep=lambda tensor: tensor.shape[-1] != WIDTH) as part:
        loss = run(False, values)
    assert part.whole_bytes >= LAYERS * values.numel() * 4
    loss.backward()
    equal(found(), wanted)


@on_ranks(2)
def test_different_orders() -> None:
    """Ranks that run their backwards in different orders all raise, and no gradient is a mixture."""
    model = replicated("checkpoint")
    passes = []
    for step in (0, 1):
        with partition_activations(min_bytes=1 << 12):
            passes.append(model(*same_batch(step)))
    with pytest.raises(zeropp.Error, match="is not the same on all ranks"):
        passes[dist.get_rank() % 2].backward()
    passes.clear()
    model.zero_grad()
    with partition_activations(min_bytes=1 << 12):
        model(*same_batch(0)).backward()


@on_ranks(2)
def test_ctrl_c_is_not_lost() -> None:
    """No Python code of ours runs where a part is freed, as in test_activations.py; a gather that is not needed any more ends."""
    weights = [torch.ones(1, requires_grad=True) for _ in range(4)]
    with partition_activations(min_bytes=1) as part:
        y = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
        for weight in weights:
            y = y * weight
        loss = y.sum()

    class GivenUp(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise RuntimeError("given up")

    with partition_activations(min_bytes=1) as given_up:
        z = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
        for weight in weights:
            z = z * weight
        last = (GivenUp.apply(z) * weights[0]).sum()
    with pytest.raises(RuntimeError, match="given up"):
        last.backward()
    assert given_up._ahead_bytes > 0, "gathers are under way"
    ran: list[str] = []
    sys.setprofile(lambda frame, event, _: ran.append(frame.f_code.co_name) if event == "call" else None)
    del loss, y, last, z
    sys.setprofile(None)
    assert not ran
    if (
        torch.get_default_device().type != "cpu"
    ):  # the engine's thread of a GPU keeps the graph that failed until its next one
        torch.ones(1, requires_grad=True).sum().backward()
    for one in (part, given_up):
        one._bury()
        assert not one._alive and one._ahead_bytes == 0
    assert len(given_up._orphans) > 0
    dist.barrier()


@on_ranks(2)
def test_beside_the_disk() -> None:
    """With Offload(activations="nvme") each rank writes its part; the context may be opened around the model or in it."""

    class Inside(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model, self.shared = model, False

        def forward(self, *args: Tensor) -> Tensor:
            if not self.shared:
                return self.model(*args)
            with partition_activations() as part:
                loss: Tensor = self.model(*args)
            parts.append(part)
            return loss

    parts: list[Partition] = []

    def train(path: str, shared: str, **config: Any) -> tuple[list[Any], int]:
        inner = replicated("checkpoint")
        model = Inside(inner) if shared == "inside" else inner
        adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
        offload = Offload(activations="nvme", path=path, checksums=True)
        model, adam = zeropp.prepare(model, adam, zeropp.Config(offload=offload, **config))
        seen: list[Any] = []
        file_bytes = 0
        for step in range(2):
            if shared == "inside":
                model.shared = True
                loss = model(*same_batch(step))
            elif shared == "around":
                with partition_activations() as part:
                    loss = model(*same_batch(step))
                parts.append(part)
            else:
                loss = model(*same_batch(step))
            tier = engine_of(model).activations
            assert tier.in_file
            file_bytes = tier.figures()["file_bytes"]
            loss.backward()
            seen += [loss.item(), adam.clip_grad_norm_(1.0)]
            adam.step()
            adam.zero_grad()
            del loss
        return seen, file_bytes

    with scratch() as path, pytest.MonkeyPatch.context() as patch:
        patch.setattr("zeropp.zero.offload.activations.MIN_BYTES", 1 << 10)
        for config in ({"stage": 1}, {"stage": 3, "host_copy": "off"}):
            wanted, whole = train(path, "no", **config)
            for shared in ("around", "inside"):
                parts.clear()
                got, file_bytes = train(path, shared, **config)
                assert got == wanted, (config, shared)
                last = parts[-1]
                assert last.whole_bytes >= LAYERS * INPUT_BYTES
                assert whole - last.whole_bytes + last.kept_bytes == file_bytes, (config, shared)
