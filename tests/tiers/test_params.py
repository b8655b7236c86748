# SPDX-License-Identifier: Apache-2.0
"""Parameters on NVMe: equal to parameters in memory bit for bit, streamed, saved, loaded, counted, and whole or refused
after storage failed."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from disk import change, full_disk, scratch
from parity import ORDERS, in_order
from ranks import on_cpu_only, on_ranks, shards_tier
from training import Recipe, batch, goes_on_from_each, gpt, ours, same, train
from zeropp import Offload, Tier
from zeropp.zero.engine import engine_of
from zoo import ReadFromOutside


def nvme(path: str, fraction: float = 1.0, states: bool = False, states_fraction: float = 1.0) -> dict[str, Any]:
    optimizer = Tier("nvme", path=path, fraction=states_fraction) if states else Tier()
    return {"stage": 3, "offload": Offload(params=Tier("nvme", path=path, fraction=fraction), optimizer=optimizer)}


def prepared(width: int = 48, **config: Any) -> tuple[Any, Any]:
    model = gpt(width=width)
    return zeropp.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3), zeropp.Config(**config))


def equal_to_memory(recipe: Recipe, **config: Any) -> None:
    """Losses, norms and parameters: parameters in the file, whole and in part, beside states in memory and in a file."""
    with scratch() as path:
        wanted = ours(recipe, stage=3, **config)
        for fraction, states, states_fraction in (
            (1.0, False, 1.0),
            (0.4, False, 1.0),
            (1.0, True, 1.0),
            (0.6, True, 0.5),
        ):
            got = ours(recipe, **nvme(path, fraction, states, states_fraction), **config)
            same(f"fraction {fraction}, states in a file: {states} ({states_fraction})", got, wanted)


@on_ranks(1, 2)
def test_fp32() -> None:
    equal_to_memory(Recipe(steps=4, clip=0.5, micro=2))


@on_ranks(1, 2)
def test_bf16() -> None:
    equal_to_memory(Recipe(steps=4, clip=0.5, micro=2), precision="bf16")


@on_ranks(1, 2)
def test_without_prefetch() -> None:
    equal_to_memory(Recipe(steps=2, micro=3, config={"accumulate": 3, "clip": 0.5}), prefetch=0)


@on_ranks(1, 2)
def test_shards_of_whole_pages() -> None:
    """The model is large enough that shards begin at pages, and that a step takes several windows."""
    with scratch() as path:
        runs = []
        for tiers in ({"stage": 3}, nvme(path), nvme(path, 0.7, states=True)):
            model, optimizer = prepared(512, **tiers)
            runs.append((train(model, optimizer, 0, 2), [v.sum() for v in zeropp.full_state_dict(model).values()]))
            del model, optimizer
        assert runs[0] == runs[1] == runs[2]


@on_ranks(1, 2)
def test_backwards_in_any_order() -> None:
    """Two forwards before the first backward, and weights read outside of their modules: the same bits as in memory."""
    with scratch() as path:
        for order in ORDERS:
            runs = []
            for tiers in ({"stage": 3}, nvme(path), nvme(path, 0.5)):
                torch.manual_seed(0)
                model = ReadFromOutside()
                adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
                model, adam = zeropp.prepare(model, adam, zeropp.Config(units=("Linear",), **tiers))
                losses = []
                for step in range(2):
                    losses.append(in_order(order, True)(model, step))
                    adam.step()
                    adam.zero_grad()
                runs.append((losses, list(zeropp.full_state_dict(model).values())))
                del model, adam
            for losses, values in runs[1:]:
                assert losses == runs[0][0], order
                assert all(torch.equal(a, b) for a, b in zip(values, runs[0][1], strict=True)), order


@on_ranks(1, 2)
def test_frozen_units() -> None:
    """Parameters that are not trained are read like the others, and never written."""
    with scratch() as path:
        runs = []
        for tiers in ({"stage": 3}, nvme(path)):
            model = gpt()
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("blocks.1" in name)
            adam = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
            model, adam = zeropp.prepare(model, adam, zeropp.Config(**tiers))
            runs.append(train(model, adam, 0, 3))
            del model, adam
        assert runs[0] == runs[1]


@on_ranks(1, 2)
def test_checkpoints() -> None:
    """Saved from the file and loaded into memory, and the other way: goes on as it was."""
    with scratch() as path:
        saved = Path(path) / "ckpt"
        for precision, tiers in ((None, [{"stage": 2}, nvme(path)]), ("bf16", [nvme(path, 0.3, True), nvme(path)])):
            held = [{"precision": precision, **tier} for tier in tiers]
            goes_on_from_each(saved, prepared, {"precision": precision, "stage": 3}, held, 5)


@on_ranks(1, 2)
def test_writing_whole_parameters() -> None:
    """gathered(write=True) and load_full_state_dict reach the file; a change without write=True is an error."""
    with scratch() as path:
        runs = []
        for tier in ({"stage": 3}, nvme(path), nvme(path, 0.5, states=True)):
            model, optimizer = prepared(precision="bf16", **tier)
            train(model, optimizer, 0, 2)
            weight = model.blocks[1].down.weight
            with zeropp.gathered(weight, write=True):
                weight.data[0].fill_(0.25)
            losses = train(model, optimizer, 2, 4)
            values = {name: value * 0.5 for name, value in zeropp.full_state_dict(model).items()}
            zeropp.load_full_state_dict(model, values)
            losses += train(model, optimizer, 4, 5)
            runs.append((losses, list(zeropp.full_state_dict(model).values())))
            shared = dist.get_world_size() > 1 and torch.get_default_device().type == "cpu"
            if shared or "offload" in tier:
                changes = pytest.raises(zeropp.PartitionedParameterError, match="pass write=True")
                with changes, zeropp.gathered(weight), torch.no_grad():
                    weight.mul_(1.0)
            del model, optimizer, weight
        for losses, values in runs[1:]:
            assert losses == runs[0][0]
            assert all(torch.equal(a, b) for a, b in zip(values, runs[0][1], strict=True))


@on_ranks(1, 2)
def test_reading_released_parameters() -> None:
    """Outside of a pass a parameter refuses reads; inside it is whole; afterwards its memory is given back."""
    with scratch() as path:
        model, optimizer = prepared(128, **nvme(path))
        assert zeropp.memory(model)[shards_tier()]["params"]["held"] < 1 << 16, "replicated small ones only"
        weight = model.blocks[0].up.weight
        with pytest.raises(zeropp.PartitionedParameterError, match=r"blocks\.0\.up\.weight"):
            weight.sum()
        with zeropp.gathered(weight):
            assert weight.abs().sum() > 0
        with torch.no_grad():
            wanted = model(*batch(0)).item()
        assert wanted == model(*batch(0)).item()
        tier = zeropp.zero.engine.engine_of(model).params
        whole = sum(p.numel() for p in model.parameters()) * 4
        assert tier.figures()["acquired_bytes"] == 0, "a pass that has ended holds nothing"
        assert tier.figures()["acquired_peak_bytes"] <= whole + (1 << 16)
        del model, optimizer, weight, tier


@on_ranks(1, 2)
def test_a_unit_at_a_time() -> None:
    """With room for no unit ahead, no more is in memory than the blocks in use, however many there are."""
    with scratch() as path:
        peaks = []
        for layers in (2, 6):
            model = gpt(width=128, layers=layers)
            adam = torch.optim.AdamW(model.parameters())
            model, adam = zeropp.prepare(model, adam, zeropp.Config(prefetch=0, **nvme(path, states=True)))
            train(model, adam, 0, 2)
            tier = zeropp.zero.engine.engine_of(model).params
            peaks.append(tier.figures()["acquired_peak_bytes"])
            del model, adam, tier
        assert peaks[0] == peaks[1], peaks
        block = 12 * 128 * 128 * 4
        assert peaks[0] < 2 * block, (peaks, block)


@on_ranks(1, 2)
def test_kept_for_the_backward() -> None:
    """Units that the forward ends with stay for the backward, as many as may be read ahead; a forward whose backward never comes
    takes their room back."""
    with scratch() as path:
        block = 12 * 128 * 128 * 4
        losses, loads = [], []
        for prefetch in (0, 2 * block + (1 << 18)):
            model = gpt(width=128, layers=6)
            adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
            model, adam = zeropp.prepare(model, adam, zeropp.Config(prefetch=prefetch, **nvme(path, states=True)))
            tier = engine_of(model).params
            seen = train(model, adam, 0, 2)
            before = tier.figures()
            seen += train(model, adam, 2, 3)
            after = tier.figures()
            loads.append(after["loads"] - before["loads"])
            assert after["acquired_bytes"] == 0 and after["acquired_peak_bytes"] <= 5 * block, (after, block)
            for step in (3, 4, 3):
                seen.append(model(*batch(step)).item())
                assert tier.figures()["acquired_bytes"] <= prefetch
            seen += train(model, adam, 3, 5)
            assert tier.figures()["acquired_bytes"] == 0
            losses.append(seen)
            del model, adam, tier
        assert losses[0] == losses[1]
        if dist.get_world_size() == 1:  # others may be late, and find it there
            assert loads[0] - loads[1] >= 2, loads


@on_ranks(1, 2)
def test_memory_and_traffic() -> None:
    """Each tier holds what was planned; bytes to and from the disk equal the formulas."""
    ranks = dist.get_world_size()
    with scratch() as path:
        for precision, bytes_ in ((None, 4), ("bf16", 2)):
            for fraction in (1.0, 0.5):
                model, optimizer = prepared(256, precision=precision, **nvme(path, fraction))
                train(model, optimizer, 0, 1)
                seen = zeropp.memory(model, optimizer)
                for tier in ("cpu", "nvme"):
                    one = seen[tier]["params"]
                    assert abs(one["held"] - one["planned"]) <= 0.03 * one["planned"] + 32768, (tier, one)
                filed = seen["nvme"]["params"]["held"] * ranks
                assert filed > 0.9 * fraction * bytes_ * 12 * 256 * 256 * 2
                dist.barrier()
                zeropp.traffic(reset=True)
                dist.barrier()
                train(model, optimizer, 1, 2)
                mine = zeropp.traffic()["nvme"]
                both = torch.tensor([mine["read"]["bytes"], mine["write"]["bytes"]])
                dist.all_reduce(both)
                read, written = both.tolist()
                slack = 0.05 * filed + (1 << 16)
                passes = 3 if precision is None else 2  # fp32: the step reads what it updates
                assert written <= filed + slack and written >= 0.95 * filed, (written, filed)
                assert read >= (passes - 1) * filed, (read, filed)
                assert read <= (passes + ranks - 1) * filed + slack, (read, filed)
                del model, optimizer


# -- a model that is only evaluated ----------------------------------------------------------------------------------
@on_ranks(1, 2)
def test_inference() -> None:
    """Without an optimizer, under inference_mode and no_grad: the values of the plain model, every byte read once a pass and
    host, ahead of need, and no more in memory than the bound of what is ahead and the blocks in use."""
    with scratch() as path:
        for fraction, precision in ((1.0, None), (0.5, "bf16")):
            plain = gpt(width=128, layers=6, dtype=torch.bfloat16 if precision else torch.float32).eval()
            model = gpt(width=128, layers=6)
            block = 12 * 128 * 128 * (2 if precision else 4)
            config = {**nvme(path, fraction), "precision": precision, "prefetch": 2 * block + (1 << 14)}
            model, _ = zeropp.prepare(model, None, zeropp.Config(**config))
            model.eval()
            tier = engine_of(model).params
            for mode in (torch.inference_mode, torch.no_grad):
                with mode():
                    model(*batch(0))  # the order of reading is recorded
                    before = tier.figures()
                    dist.barrier()
                    assert torch.equal(model(*batch(1)), plain(*batch(1)))
                    dist.barrier()
                    after = tier.figures()
                read = torch.tensor(after["read_bytes"] - before["read_bytes"])
                dist.all_reduce(read)
                filed = after["mapping_bytes"] - after["resident_bytes"]
                most = filed + 256 * 128 * 4  # the head is the embedding, and comes twice
                assert filed <= int(read) <= dist.get_world_size() * most, (read, filed)
                assert after["acquired_bytes"] == 0 and after["acquired_peak_bytes"] <= 5 * block, (after, block)
            del model, plain, tier


@on_ranks(1, 2)
def test_one_call_at_a_time() -> None:
    """A call from a second thread is refused where it would take the units from under the first; one after the other is fine."""
    with scratch() as path:
        model, _ = zeropp.prepare(gpt(), None, zeropp.Config(**nvme(path)))
        model.eval()
        inside, leave = threading.Event(), threading.Event()

        def stay(*_: Any) -> None:
            inside.set()
            leave.wait(60)

        handle = model.blocks[0].register_forward_pre_hook(stay)
        results = []

        def call(model: Any) -> None:
            with torch.no_grad():
                results.append(model(*batch(0)))

        first = threading.Thread(target=call, args=(model,))
        first.start()
        assert inside.wait(60)
        with pytest.raises(zeropp.Error, match="a call in another thread goes on"):
            call(model)
        leave.set()
        first.join(60)
        call(model)
        assert len(results) == 2 and torch.equal(*results)
        handle.remove()
        del model


@on_ranks(1, alone=True)
def test_under_a_limit_that_memory_exceeds() -> None:
    """The limit is on private writable memory (RLIMIT_DATA), half of the model more than the process has. Plain PyTorch
    cannot even make the model; from disk it computes, and what it computes is right. On one rank: those of a host share
    pages, which that limit does not count."""
    on_cpu_only("the limit is on memory of the process")
    layers, width = 12, 2048
    inputs = torch.linspace(-1, 1, width).reshape(1, width)

    def make() -> Any:
        torch.manual_seed(0)
        return torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))

    with scratch() as path, torch.inference_mode():
        wanted = make()(inputs)
        ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: what is freed does not count any more
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # or the memory of earlier models would be there for the next
        rows = Path("/proc/self/status").read_text().splitlines()
        now = next(int(row.split()[1]) << 10 for row in rows if row.startswith("VmData"))
        before = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (now + layers * width * width * 4 // 2, before[1]))
        try:
            with pytest.raises(RuntimeError, match="allocate memory"):
                make()(inputs)
            gc.collect()  # its traceback holds what was made
            with torch.inference_mode(False):
                with zeropp.sharded_init(path=path):
                    model = make()
                config = zeropp.Config(prefetch=8 << 20, **nvme(path))
                model, _ = zeropp.prepare(model, None, config)
            got = [model(inputs) for _ in range(2)]
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)
        assert torch.equal(got[0], wanted) and torch.equal(got[1], wanted)
        del model


# -- storage that fails --------------------------------------------------------------------------------------------------
@on_ranks(1, 2)
def test_no_room() -> None:
    """The disk is full (here: files may not grow): prepare raises on every rank, and nothing is left. The same model
    can be prepared otherwise."""
    from zeropp.zero.offload import param_file

    with scratch() as path:
        model = gpt()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        with (
            full_disk(param_file, 0, 1 << 16),
            pytest.raises(zeropp.TierError, match=r"params.*bytes at offset 0") as caught,
        ):
            zeropp.prepare(model, optimizer, zeropp.Config(**nvme(path)))
        if dist.get_rank() == 0:
            assert caught.value.path.endswith("params") and caught.value.bytes_wanted > 1 << 16
        else:
            assert "rank 0" in str(caught.value)
        dist.barrier()
        assert not list(Path(path).iterdir())
        del caught
        model, optimizer = zeropp.prepare(model, optimizer, zeropp.Config(stage=3))
        train(model, optimizer, 0, 1)


def the_file(model: Any) -> Path:
    path: Path = zeropp.zero.engine.engine_of(model).params.path
    return path


@on_ranks(1, 2)
def test_a_read_that_fails() -> None:
    """The file loses its end: a forward raises, naming file and offset, and nothing is lost once the file is whole."""
    with scratch() as path:
        wanted = train(*prepared(128, stage=3), 0, 3)
        model, optimizer = prepared(128, **nvme(path))
        assert train(model, optimizer, 0, 1) == wanted[:1]
        file = the_file(model)
        values, first = file.read_bytes(), dist.get_rank() == 0
        dist.barrier()
        if first:
            os.truncate(file, len(values) // 2)
        dist.barrier()
        with pytest.raises(zeropp.TierError, match=r"params\".*at offset \d+") as caught:
            model(*batch(1))
        assert caught.value.path == str(file) and caught.value.offset_bytes is not None
        del caught
        dist.barrier()
        if first:
            with file.open("r+b") as again:
                again.write(values)
        dist.barrier()
        assert train(model, optimizer, 1, 3) == wanted[1:]
        del model, optimizer


@on_ranks(1, 2)
def test_checksums_of_all_tiers() -> None:
    """Every byte of a state that a step reads from any tier is checked, after checkpoints and whole values were written too, and
    the losses are those of memory. A page of parameters that changes on the disk is an error in forward, on every rank, that
    names it."""
    from zeropp.zero.offload import activations

    precision = None if dist.get_world_size() == 1 else "bf16"
    kinds = dict.fromkeys(("params", "grads", "optimizer", "activations"), "nvme")
    with scratch() as path, pytest.MonkeyPatch.context() as patch:
        patch.setattr(activations, "MIN_BYTES", 1 << 12)
        patch.setattr(activations, "WAITING_BYTES", 1 << 14)
        wanted = train(*prepared(stage=3, precision=precision), 0, 3)
        model, optimizer = prepared(stage=3, precision=precision, offload=Offload(**kinds, path=path, checksums=True))
        assert train(model, optimizer, 0, 2) == wanted[:2]
        zeropp.save(Path(path) / "ckpt", model, optimizer, step=2)
        weight = next(p for p in model.parameters() if p.ndim == 2)
        with zeropp.gathered(weight, write=True):
            weight.data[0].fill_(0.25)
        train(model, optimizer, 2, 3)
        zeropp.load(Path(path) / "ckpt", model, optimizer)
        assert train(model, optimizer, 2, 3) == wanted[2:]
        engine = engine_of(model)
        tiers: list[Any] = [engine.params, engine.grads, engine.states, engine.activations]
        del engine
        before = [tier.figures() for tier in tiers]
        train(model, optimizer, 4, 5)
        for tier, first in zip(tiers, before, strict=True):
            seen = tier.figures()
            read, checked = (seen[kind] - first[kind] for kind in ("read_bytes", "checked_bytes"))
            # The bytes that round a unit of parameters up to pages belong to no rank, and were never written.
            rounding = 4096 * (seen["loads"] - first["loads"]) if tier is tiers[0] else 0
            others_read = (
                tier is tiers[0] and dist.get_world_size() > 1
            )  # what is read is read for all ranks, by any of them
            assert read - rounding <= checked <= read and (read > 0 or others_read), (tier, first, seen)
            assert seen["sums_bytes"] > 0
        file = the_file(model)
        dist.barrier()
        if dist.get_rank() == 0:
            change(file, file.stat().st_size // 8192 * 4096)
        dist.barrier()
        with pytest.raises(zeropp.TierError, match=r"params\" does not hold what was written: \d+ bytes at offset \d+"):
            train(model, optimizer, 5, 6)
        del model, optimizer, weight, tiers, tier


@on_ranks(1, 2)
def test_a_step_that_fails() -> None:
    """A step that cannot write all parameters raises on every rank, inconsistent states are neither stepped nor saved, and
    the last checkpoint restores the training."""
    with scratch() as path:
        saved = Path(path) / "ckpt"
        for states in (False, True):
            wanted = train(*prepared(512, stage=3), 0, 4)
            model, optimizer = prepared(512, **nvme(path, states=states))
            assert train(model, optimizer, 0, 2) == wanted[:2]
            zeropp.save(saved, model, optimizer, step=2)
            file, first = the_file(model), dist.get_rank() == 0
            whole_bytes = file.stat().st_size
            loss = model(*batch(2))
            loss.backward()
            dist.barrier()
            if first:
                os.truncate(file, whole_bytes * 5 // 6)
            dist.barrier()
            with pytest.raises(zeropp.TierError, match=r"params\".*at offset \d+"):
                optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            if first:
                os.truncate(file, whole_bytes)
            dist.barrier()
            with pytest.raises(zeropp.Error, match="inconsistent, because a step failed half-way"):
                train(model, optimizer, 3, 4)
            optimizer.zero_grad()
            with pytest.raises(zeropp.Error, match="inconsistent, because a step failed half-way"):
                zeropp.save(saved, model, optimizer, step=3)
            assert zeropp.load(saved, model, optimizer)["step"] == 2
            assert train(model, optimizer, 2, 4) == wanted[2:]
            del model, optimizer, loss


@on_ranks(1, 2)
def test_refusals() -> None:
    with scratch() as path:
        with pytest.raises(zeropp.ConfigError, match=r"offload\.params\.kind.*Config\.stage=2"):
            zeropp.Config(**{**nvme(path), "stage": 2})
        on_cpu_only("other refusals come first there (test_sim_offload.py)")
        if dist.get_world_size() > 1:
            with pytest.raises(zeropp.ConfigError, match="the ranks of a host share what they read"):
                prepared(host_copy="off", **nvme(path))
            own = Path(path) / f"folder-{dist.get_rank()}"
            with pytest.raises(zeropp.ConfigError, match="read by all ranks of a host, so give them the same folder"):
                prepared(**nvme(str(own)))
            assert not list(own.iterdir())
        file = Path(path) / f"file-{dist.get_rank()}"
        file.touch()
        with pytest.raises(zeropp.TierError, match="file-"):
            prepared(**nvme(str(file)))
