# SPDX-License-Identifier: Apache-2.0
"""Models come and go: memory, files and mappings with them; evaluation, copies, generation, several models at once."""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
import zoo
from data_parallel import data_parallel
from ranks import on_ranks, shards_tier
from tiny import MODES, Tiny, vector
from torch import Tensor, nn

ALL: dict[str, dict[str, Any]] = {**MODES, "stage 1": {"stage": 1}, "stage 2": {"stage": 2}, "stage 0": {"stage": 0}}
MB = 1 << 20


def rss_bytes() -> int:
    with open("/proc/self/smaps_rollup") as rollup:  # noqa: PTH123
        return next(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Rss:"))


def held() -> dict[str, int]:
    """Return what a process can leak: open files, mappings, those of them that are shared memory, resident bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what malloc keeps for later is not a leak
    with open("/proc/self/maps") as lines:  # noqa: PTH123
        maps = lines.readlines()
    return {
        "fds": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        "maps": len(maps),
        "shared": sum("memfd" in line for line in maps),
        "rss": rss_bytes(),
    }


class Wide(nn.Module):
    """18 MB of parameters, so that a model that stays is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(768, 768) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.pow(2).mean()


def _train_once(config: dict[str, Any]) -> list[Any]:
    model = Wide()
    model, optimizer = zeropp.prepare(model, torch.optim.AdamW(model.parameters()), zeropp.Config(**config))
    model(torch.randn(2, 768)).backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    return [weakref.ref(model), weakref.ref(optimizer)]


def freed(mode: str) -> None:
    """The last reference goes, and with it every byte: also with gradients that were never stepped."""
    for _ in range(3):
        _train_once(ALL[mode])
    dist.barrier()
    before = held()
    for dead in _train_once(ALL[mode]):
        gc.collect()
        assert dead() is None, "model or optimizer is still referenced"
    model, optimizer = zeropp.prepare(*_fresh(), zeropp.Config(**ALL[mode]))
    model(torch.randn(2, 768)).backward()
    del model, optimizer
    dist.barrier()
    after = held()
    dist.barrier()
    assert after["fds"] <= before["fds"], (before, after)
    assert after["shared"] <= before["shared"], (before, after)
    assert after["rss"] < before["rss"] + 4 * MB, (before, after)


def _fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Wide()
    return model, torch.optim.AdamW(model.parameters())


def cycles(mode: str) -> dict[str, Any]:
    """30 models one after the other. The first ones fill caches (torch's, malloc's), so it is 10 to 30 that must not grow."""
    seen = []
    for cycle in range(30):
        _train_once(ALL[mode])
        if shards_tier() == "device":
            gc.collect()  # each page of a simulated GPU is an open file, so it has room for few models that are not freed yet
        if cycle in (9, 29):
            dist.barrier()
            seen.append(held())
            dist.barrier()
    backward_step, late = seen
    assert late["fds"] <= backward_step["fds"], seen
    assert late["shared"] <= backward_step["shared"], seen
    assert late["maps"] <= backward_step["maps"] + 4, seen
    assert late["rss"] < backward_step["rss"] + 8 * MB, (
        seen
    )  # one model is 18 MB of parameters, 72 with gradients and moments
    return {"early": backward_step, "late": late}


def steps(mode: str) -> dict[str, Any]:
    """200 steps of a trained GPT, with evaluation and gathering between: no growth after the first 40."""
    from training import batch, gpt

    model = gpt()
    model, optimizer = zeropp.prepare(model, torch.optim.AdamW(model.parameters()), zeropp.Config(**ALL[mode]))
    seen = []
    for step in range(200):
        model(*batch(step)).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            with torch.no_grad():
                model(*batch(step))
            with zeropp.gathered(model):
                sum(p.sum().item() for p in model.parameters())
        if step in (39, 199):
            seen.append(held())
    assert seen[1]["fds"] == seen[0]["fds"] and seen[1]["maps"] <= seen[0]["maps"] + 4, seen
    assert seen[1]["rss"] < seen[0]["rss"] + 2 * MB, seen
    return {"early": seen[0], "late": seen[1]}


def many_steps(mode: str, on_disk: tuple[str, ...] = ()) -> dict[str, Any]:
    """2,000 small steps hold what 500 held: memory, descriptors, mappings, and the files of what lives on disk."""
    from training import batch, gpt

    folders = [tempfile.mkdtemp() if on_disk and dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    offload = zeropp.Offload(path=folders[0], **dict.fromkeys(on_disk, "nvme")) if on_disk else zeropp.Offload()
    model = gpt(width=16, layers=2)
    config = zeropp.Config(offload=offload, **ALL[mode])
    model, optimizer = zeropp.prepare(model, torch.optim.AdamW(model.parameters()), config)
    seen = []
    for step in range(2000):
        model(*batch(step % 50, rows=1)).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step in (499, 1999):
            dist.barrier()
            files = sorted(Path(folders[0]).rglob("*")) if folders[0] is not None else []
            seen.append(held() | {"files": [(str(one), one.stat().st_size, one.stat().st_blocks) for one in files]})
            dist.barrier()
    del model, optimizer
    dist.barrier()
    if folders[0] is not None and dist.get_rank() == 0:
        shutil.rmtree(folders[0])
    backward_step, late = seen
    assert late["fds"] == backward_step["fds"] and late["shared"] == backward_step["shared"], seen
    assert late["maps"] <= backward_step["maps"] + 2, seen
    assert late["files"] == backward_step["files"] and bool(backward_step["files"]) == bool(on_disk), seen
    assert late["rss"] < backward_step["rss"] + MB, seen  # 700 bytes a step would be more
    return {"early": backward_step, "late": late}


def prepared(mode: str) -> tuple[Tiny, Any, Tiny]:
    torch.manual_seed(0)
    plain = Tiny()
    model = copy.deepcopy(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    units = {"units": ("Linear", "Tiny")}
    return (*zeropp.prepare(model, optimizer, zeropp.Config(**units, **ALL[mode])), plain)


def evaluation(mode: str) -> None:
    """eval, no_grad, inference_mode, before, between and after steps: the values of a plain model, and nothing left whole."""
    from zeropp.zero.engine import engine_of
    from zeropp.zero.model_state import SHARD

    model, optimizer, plain = prepared(mode)
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    ddp = data_parallel(plain)
    for step in range(3):
        for guard in (torch.no_grad, torch.inference_mode):
            with guard():
                model.eval(), plain.eval()
                assert torch.equal(model(vector(step)), plain(vector(step))), (step, guard)
                model.train(), plain.train()
                assert torch.equal(model.blocks[1](vector(step)), plain.blocks[1](vector(step))), (step, guard)
            assert not [u.name for u in engine_of(model).units if u.place == SHARD and u.core.full]
        model(vector(step)).backward()
        ddp(vector(step)).backward()
        optimizer.step(), adam.step()
        optimizer.zero_grad(), adam.zero_grad()
        with torch.no_grad(), zeropp.gathered(model):
            for p, q in zip(plain.parameters(), model.parameters(), strict=True):
                assert (p - q).abs().max() < 1e-6
                p.copy_(q)


def copies(mode: str) -> None:
    """deepcopy, pickle and state_dict inside gathered() give a plain model: own values, no hooks, no unit."""
    model, optimizer, _ = prepared(mode)
    with zeropp.gathered(model):
        twin = copy.deepcopy(model)
        stream = io.BytesIO()
        torch.save(model.state_dict(), stream)
        values = {n: p.detach().clone() for n, p in model.named_parameters()}
    stream.seek(0)
    saved = torch.load(stream, weights_only=True)
    fresh = Tiny()
    fresh.load_state_dict(saved)
    for other in (twin, fresh):
        for name, p in other.named_parameters():
            assert type(p) is nn.Parameter and torch.equal(p, values[name]), name
            assert not p._post_accumulate_grad_hooks, name
    with torch.no_grad():
        want = model(vector())
        assert torch.equal(twin(vector()), want)
    twin(vector()).backward()  # trains alone
    assert all(p.grad is not None for p in twin.parameters())
    model(vector()).backward()
    optimizer.step()
    for name, p in twin.named_parameters():
        assert torch.equal(p, values[name]), f"the copy shares memory with the model: {name}"
    zeropp.prepare(twin, torch.optim.AdamW(twin.parameters()))  # and can be prepared itself


def several(mode: str) -> None:
    """Several models as in RLHF: a policy that trains, a reference that is frozen, a reward model without optimizer, all in one loss."""
    torch.manual_seed(0)
    plain = [Tiny() for _ in range(3)]
    plain[1].requires_grad_(False)
    config = zeropp.Config(units=("Linear", "Tiny"), **ALL[mode])
    ours = [copy.deepcopy(m) for m in plain]
    adam = torch.optim.AdamW(plain[0].parameters(), lr=1e-2)
    _, optimizer = zeropp.prepare(ours[0], torch.optim.AdamW(ours[0].parameters(), lr=1e-2), config)
    for m in ours[1:]:
        zeropp.prepare(m, None, config)
    ddp = data_parallel(plain[0])
    for step in range(3):
        losses = []
        for policy, (reference, reward) in ((ddp, plain[1:]), (ours[0], ours[1:])):
            with torch.no_grad():
                far = reference(vector(step))
            with torch.no_grad():
                good = reward(vector(step + 1))
            losses.append((policy(vector(step)) - far) ** 2 - good)
        assert torch.equal(*losses), step
        for loss in losses:
            loss.backward()
        with zeropp.gathered(ours[0], grads=True):
            for p, q in zip(plain[0].parameters(), ours[0].parameters(), strict=True):
                assert torch.equal(p.grad, q.grad), step
        optimizer.step(), adam.step()
        optimizer.zero_grad(), adam.zero_grad()
        with torch.no_grad(), zeropp.gathered(ours[0]):
            for p, q in zip(plain[0].parameters(), ours[0].parameters(), strict=True):
                p.copy_(q)
    # One of them goes, the others work on.
    del ours[1]
    gc.collect()
    with torch.no_grad():
        assert torch.equal(ours[0](vector()), plain[0](vector()))


def gradients_into_inputs(mode: str) -> None:
    """A loss of one prepared model that flows through another: both get their gradients, in one backward."""
    torch.manual_seed(0)

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.layer(x))

    plain = [Body(), Tiny()]
    ours = [copy.deepcopy(m) for m in plain]
    for m in ours:
        zeropp.prepare(m, None, zeropp.Config(units=("Linear", type(m)), **ALL[mode]))
    ours[1](ours[0](vector())).backward()
    plain[1](plain[0](vector())).backward()
    for m, n in zip(plain, ours, strict=True):
        with zeropp.gathered(n, grads=True):
            for p, q in zip(m.parameters(), n.parameters(), strict=True):
                p.grad.div_(dist.get_world_size())
                dist.all_reduce(p.grad)
                assert torch.equal(p.grad, q.grad)


def generation(mode: str) -> None:
    """Hugging Face's generate with its cache, greedy and sampled: the tokens of the plain model. Then it trains."""
    torch.manual_seed(0)
    plain = zoo.llama()
    plain.config.use_cache = True
    model, optimizer = zeropp.prepare(
        ours := copy.deepcopy(plain), torch.optim.AdamW(ours.parameters()), zeropp.Config(**ALL[mode])
    )
    ids = torch.randint(0, 300, (2, 5), generator=torch.Generator().manual_seed(dist.get_rank()))
    for sample in (False, True):
        tokens = []
        for m in (plain, model):
            torch.manual_seed(1)
            tokens.append(
                m.eval().generate(ids, max_new_tokens=12, do_sample=sample, pad_token_id=0, eos_token_id=None)
            )
        assert torch.equal(*tokens), tokens
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


def without_the_model(mode: str) -> None:
    """An optimizer that outlives its model says so."""
    model, optimizer, _ = prepared(mode)
    model(vector()).backward()
    kept = model.blocks[0].weight
    del model
    gc.collect()
    try:
        optimizer.step()
    except zeropp.Error as error:
        sentence = str(error)
    if ALL[mode].get("stage", 3) == 3:
        try:
            kept.sum()
        except zeropp.PartitionedParameterError as error:
            sentence += " | " + str(error)
    assert "the model" in sentence and "gone" in sentence, sentence


PER_MODE = {
    "freed": (freed, ALL),
    "cycles": (cycles, ("host copy", "gather", "stage 2")),
    "steps": (steps, ("host copy", "prefetch", "stage 1")),
    "evaluation": (evaluation, ALL),
    "copies": (copies, ALL),
    "several": (several, ("host copy", "gather", "prefetch")),
    "gradients into inputs": (gradients_into_inputs, ("host copy", "gather", "prefetch", "stage 2")),
    "generation": (generation, ("host copy", "gather", "prefetch")),
    "without the model": (without_the_model, ("host copy", "gather", "stage 1")),
}
CASES = {f"{name}, {mode}": (lambda f=f, mode=mode: f(mode)) for name, (f, modes) in PER_MODE.items() for mode in modes}


@on_ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_lifetime(case: str) -> None:
    CASES[case]()


@pytest.mark.slow
@pytest.mark.timeout(900)
@on_ranks(
    2, cold=True, alone=True, test_s=250.0
)  # a rank that was forked shares pages with its parent, and grows when it writes to them
@pytest.mark.parametrize(
    "mode, on_disk",
    [("host copy", []), ("gather", []), ("host copy", ["optimizer"])],
    ids=["host copy", "gather", "states on nvme"],
)
def test_two_thousand_steps_hold_what_five_hundred_held(mode: str, on_disk: list[str]) -> None:
    many_steps(mode, tuple(on_disk))
