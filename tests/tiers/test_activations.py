# SPDX-License-Identifier: Apache-2.0
"""Activations on NVMe: equal to activations in memory bit for bit, written and read behind the computation, counted, and
an error where storage fails."""

from __future__ import annotations

import gc
import itertools
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zeropp
from disk import scratch
from ranks import on_ranks, shards_tier
from torch import Tensor, nn
from training import batch, checkpointed, gpt
from zeropp import Offload, Tier
from zeropp.zero.engine import engine_of
from zeropp.zero.offload import activations

ROWS = 16


def tier_of(model: nn.Module) -> Any:
    return engine_of(model).activations


def holders(tier: Any) -> dict[str, Any]:
    """Return what still holds storages in the file, two levels up; nothing after the graphs are freed."""
    alive = [saved for saved in (place() for place in list(tier._alive.values())) if saved is not None]
    views = [one for saved in alive for one in gc.get_referrers(saved) if one is not alive]
    above = [one for view in views for one in gc.get_referrers(view) if one is not views]
    if not alive:
        return {}
    sizes = [(saved.index, saved.bytes, saved.source is None) for saved in alive]
    return {"held": sizes, "by": [repr(one)[:200] for one in views], "and by": [repr(one)[:200] for one in above]}


def train(how: str = "plain", steps: int = 2, layers: int = 2, **config: Any) -> tuple[list[Any], Any]:
    """Losses and parameters, and what the tier counted."""
    model = gpt(width=64, layers=layers)
    if how != "plain":
        checkpointed(model, how == "reentrant")
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, adam = zeropp.prepare(model, adam, zeropp.Config(**{"stage": 3, **config}))
    seen: list[Any] = []
    for step in range(steps):
        loss = model(*batch(step, rows=ROWS))
        loss.backward()
        seen += [loss.item(), adam.clip_grad_norm_(1.0)]
        adam.step()
        adam.zero_grad()
        del loss
    figures = tier_of(model).figures() | holders(tier_of(model)) if tier_of(model).in_file else None
    return seen + [value.tolist() for value in zeropp.full_state_dict(model).values()], figures


@on_ranks(1, 2)
def test_equal_to_memory() -> None:
    """All of what autograd saves, or the inputs of checkpointed blocks, beside every other tier."""
    with scratch() as path:
        for how, config, beside in (
            ("plain", {"stage": 1}, False), ("plain", {"precision": "bf16"}, True), ("checkpoint", {}, True),
            ("reentrant", {"stage": 3, "host_copy": "off"}, False),
        ):  # fmt: skip
            others = {"params": "nvme", "optimizer": "nvme"} if beside else {}
            wanted, _ = train(how, **config)
            got, figures = train(how, offload=Offload(activations="nvme", path=path, **others), **config)
            assert got == wanted, (how, config)
            left = figures["file_bytes"], figures["ahead_bytes"]
            assert figures["written_bytes"] > 0 and left == (0, 0), (how, config, figures)
        half = Offload(activations=Tier("nvme", path=path, fraction=0.5))
        assert train("plain", offload=half)[0] == train("plain")[0]


@on_ranks(1, 2)
def test_every_combination() -> None:
    """Each kind of state in memory or in a file, all sixteen ways, in fp32 and bf16: the same bits."""
    kinds = ("params", "grads", "optimizer", "activations")
    with scratch() as path, pytest.MonkeyPatch.context() as patch:
        patch.setattr(activations, "MIN_BYTES", 1 << 12)
        for precision in (None, "bf16"):
            wanted, _ = train(precision=precision)
            for count in range(1, len(kinds) + 1):
                for filed in itertools.combinations(kinds, count):
                    offload = Offload(**dict.fromkeys(filed, "nvme"), path=path)
                    got, figures = train(precision=precision, offload=offload)
                    assert got == wanted, (filed, precision)
                    assert figures is None or figures["written_bytes"] > 0


@on_ranks(1)
def test_read_back() -> None:
    """With room for nothing ahead, all is written and read; the memory that waits is bounded, and does not grow with
    the depth."""
    with scratch() as path, pytest.MonkeyPatch.context() as patch:
        patch.setattr(activations, "WAITING_BYTES", 1)
        patch.setattr(activations, "MIN_BYTES", 1 << 10)
        peaks = []
        for layers in (2, 6):
            for how in ("plain", "checkpoint"):
                wanted, _ = train(how, layers=layers)
                got, figures = train(how, layers=layers, offload=Offload(activations="nvme", path=path))
                assert got == wanted, (how, layers)
                assert figures["read_bytes"] >= 0.5 * figures["written_bytes"] > 0
                if how == "plain":
                    peaks.append(figures["waiting_peak_bytes"])
        assert peaks[0] == peaks[1], peaks


@on_ranks(1)
def test_counted() -> None:
    """The inputs of checkpointed blocks and nothing else: rows x context x width x 4 bytes each; the file's part of
    them is the fraction."""
    with scratch() as path, pytest.MonkeyPatch.context() as patch:
        patch.setattr(activations, "MIN_BYTES", 1 << 12)
        for fraction, layers in ((1.0, 4), (0.5, 4)):
            tier = Tier("nvme", path=path, fraction=fraction)
            model = gpt(width=64, layers=layers)
            checkpointed(model, False)
            model, _ = zeropp.prepare(model, None, zeropp.Config(offload=Offload(activations=tier)))
            input_bytes = ROWS * 16 * 64 * 4
            tail = model.norm, model.head  # what is not checkpointed keeps its own
            hidden = [one.register_forward_pre_hook(lambda *_: None) for one in tail]
            zeropp.traffic(reset=True)
            loss = model(*batch(0, rows=ROWS))
            held = zeropp.memory(model)["nvme"]["activations"]["held"]
            outputs = ROWS * 16 * 256 * 4  # log-probabilities
            wanted = fraction * (layers * input_bytes + 2 * input_bytes + outputs)
            assert abs(held - wanted) <= max(0.03 * wanted, (1 - fraction) * outputs), (held, wanted)
            loss.backward()
            del loss
            assert zeropp.memory(model)["nvme"]["activations"]["held"] == 0
            assert zeropp.memory(model)[shards_tier()]["activations"]["held"] <= wanted
            assert zeropp.traffic()["nvme"]["write"]["bytes"] <= wanted + (1 << 17)
            for one in hidden:
                one.remove()
            del model, tail


class Steps(nn.Module):
    """A forward that is a function."""

    def __init__(self, run: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(256))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, self.weight)


def offloading(run: Callable[[Tensor, Tensor], Tensor], path: str) -> Any:
    model, _ = zeropp.prepare(Steps(run), None, zeropp.Config(offload=Offload(activations="nvme", path=path)))
    return model


@on_ranks(1)
def test_graphs() -> None:
    """Views of one storage move once, with their strides; a graph may be kept, dropped, or changed under."""
    with scratch() as path:
        strides = []

        class Look(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                ctx.save_for_backward(x.t(), x[::2, 3:], x.view(-1)[:7])
                return x * 2

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Tensor:
                for seen, wanted in zip(
                    ctx.saved_tensors, (values.t(), values[::2, 3:], values.view(-1)[:7]), strict=True
                ):
                    assert torch.equal(seen, wanted) and seen.stride() == wanted.stride()
                    strides.append(seen.stride())
                return gradient * 2

        values = torch.randn(256, 256)
        model = offloading(lambda x, w: Look.apply((x * 1.0) * w), path)
        loss = model(values).sum()
        figures = tier_of(model).figures()
        size = values.numel() * 4
        assert figures["file_bytes"] == 2 * size, "x * 1 and its product, once each"
        for _ in range(2):
            model.weight.grad = None
            loss.backward(retain_graph=True)
            with zeropp.gathered(model.weight, grads=True):
                assert torch.equal(model.weight.grad, 2 * values.sum(0)), "twice"
        assert len(strides) == 6
        del loss
        gc.collect()
        assert tier_of(model).figures()["file_bytes"] == 0
        model(values)  # its graph is dropped
        assert tier_of(model).figures()["file_bytes"] == 0
        with torch.no_grad():
            model(values)

        def change(x: Tensor, w: Tensor) -> Tensor:
            y = x * 1.0
            z = y * w
            y.add_(1.0)
            return z

        changing = offloading(change, path)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            changing(values).sum().backward()
        del model, changing


@on_ranks(1)
def test_what_is_given_stays() -> None:
    """A batch may be a few rows of all there is to learn from, in a list or a dictionary: autograd keeps views of the whole."""
    with scratch() as path:
        everything = torch.randn(4096, 256)
        rows = everything[32:64]
        for given, times in (
            ({"rows": [rows]}, lambda given, w: given["rows"][0] * w),
            (((rows,), None), lambda given, w: given[0][0] * w),
        ):
            model = offloading(times, path)
            model(given).sum().backward()
            assert tier_of(model).figures()["written_bytes"] == 0
            del model


@on_ranks(1)
def test_ctrl_c_is_not_lost() -> None:
    """No Python code of ours runs where a saved tensor is freed: a pending Ctrl-C would be raised there, and Python drops such an
    exception."""
    with scratch() as path:
        model = offloading(lambda x, w: (x * w) * w, path)
        loss = model(torch.randn(256, 256)).sum()
        ran = []
        sys.setprofile(lambda frame, event, _: ran.append(frame.f_code.co_name) if event == "call" else None)
        del loss
        sys.setprofile(None)
        assert not ran
        assert tier_of(model).figures()["file_bytes"] == 0
        del model


@on_ranks(1)
def test_compiled() -> None:
    """A compiled model's activations move as well, and torch does not compile what moves them: it made half-built objects, whose
    clean-up wrote to the screen."""
    with scratch() as path, pytest.MonkeyPatch.context() as patch:
        ignored: list[Any] = []
        patch.setattr(sys, "unraisablehook", ignored.append)
        seen = []
        for offload in (Offload(), Offload(activations="nvme", path=path)):
            model = gpt(width=64)
            adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
            model, adam = zeropp.prepare(model, adam, zeropp.Config(stage=3, offload=offload))
            model.compile(backend="aot_eager")
            loss = model(*batch(0, rows=ROWS))
            loss.backward()
            seen.append([loss.item(), adam.clip_grad_norm_(1.0)])
            written = offload.activations.kind != "nvme" or tier_of(model).figures()["written_bytes"]
            del loss, model, adam
        assert seen[0] == seen[1] and written
        gc.collect()
        assert not ignored


@on_ranks(1)
def test_storage_that_fails() -> None:
    """A full disk stops the forward, a file that lost its end the backward: file, offset, and what was wanted."""
    with scratch() as path, pytest.MonkeyPatch.context() as patch:
        patch.setattr(activations, "WAITING_BYTES", 1)
        values = torch.randn(1024, 256)

        def many(x: Tensor, w: Tensor) -> Tensor:
            for _ in range(6):
                x = x * w
            return x

        model = offloading(many, path)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, before[1]))
        try:
            with pytest.raises(zeropp.TierError, match="activations") as caught:
                model(values)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert caught.value.path.endswith("activations") and caught.value.bytes_wanted
        del caught
        zeropp.save(Path(path) / "ckpt", model, step=1)  # a forward that stops tears nothing
        model(values[:64]).sum().backward()
        model = offloading(many, path)
        loss = model(values).sum()
        tier_of(model)._io.flush()  # or a write that is late makes the file long again
        os.truncate(tier_of(model).path, 1 << 20)
        with pytest.raises(zeropp.TierError, match=r"activations\".*at offset \d+"):
            loss.backward()
        model(values).sum().backward()  # a new pass is whole
        del model, loss


@on_ranks(1)
def test_many_steps() -> None:
    """Memory, descriptors and the file stay as they are."""
    with scratch() as path:
        model = gpt(width=64, layers=2)
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
        offload = Offload(activations="nvme", path=path)
        model, adam = zeropp.prepare(model, adam, zeropp.Config(offload=offload))
        seen = []
        for step in range(30):
            loss = model(*batch(step, rows=ROWS))
            loss.backward()
            adam.step()
            adam.zero_grad()
            del loss
            if step in (9, 29):
                file = tier_of(model).path.stat().st_size
                seen.append((file, len(list(Path("/proc/self/fd").iterdir())), len(tier_of(model)._alive)))
        assert seen[0] == seen[1], seen
        del model, adam
