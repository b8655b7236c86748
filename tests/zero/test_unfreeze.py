# SPDX-License-Identifier: Apache-2.0
"""Gradual unfreezing of what was frozen at prepare, in both ways that people write it: the optimizer has all
parameters from the beginning, or gets the unfrozen ones by ``add_param_group``. Beside plain torch doing the same (gradients and
losses the same bits, a step within the bound of helpers/parity.py), and beside zeropp itself where everything was trainable at
``prepare`` and was frozen after it. Then the refusals, and the memory."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from parity import LR, average, rows, same_gradients, same_values, snapshot
from ranks import on_ranks, shards_tier
from tiny import sentence
from torch import Tensor, nn
from training import STAGES
from zoo import Mlp

SCHEDULE = (("head",), ("head",), ("head", "blocks.2"), ("head", "blocks.1", "blocks.2"), ("",), ("head", "blocks.1"))
"""What trains in each step, by the beginning of its name: the head, more and more, all, and less again."""
Make = Callable[[list[Any]], torch.optim.Optimizer]


class Net(nn.Module):
    """A norm with weights of its own, blocks, a head."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Mlp(width) for _ in range(3))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).float().pow(2).mean()


def adamw(params: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LR)


def sgd(params: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=LR, momentum=0.9)


def adagrad(params: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=LR, initial_accumulator_value=0.1)


def freeze(model: nn.Module, step: int) -> None:
    """In both spellings."""
    for number, (name, p) in enumerate(model.named_parameters()):
        wanted = name.startswith(SCHEDULE[step])
        if wanted != p.requires_grad and number % 2:
            p.requires_grad = wanted
        elif wanted != p.requires_grad:
            p.requires_grad_(wanted)


def begin(model: nn.Module, way: str, make: Make) -> torch.optim.Optimizer:
    freeze(model, 0)
    return make([p for p in model.parameters() if way == "all" or p.requires_grad])


def unfreeze(model: nn.Module, optimizer: Any, step: int, way: str) -> None:
    """``add_param_group`` before or after the parameters are unfrozen."""
    if step % 2:
        freeze(model, step)
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    new = [p for name, p in model.named_parameters() if name.startswith(SCHEDULE[step]) and id(p) not in known]
    if way == "added" and new:
        optimizer.add_param_group({"params": new, "lr": LR / 2})
    if not step % 2:
        freeze(model, step)


def like_torch(config: dict[str, Any], way: str, make: Make) -> None:
    """Six steps; the reference goes on from zeropp's values after each, so that each is one step's rounding at most."""
    torch.manual_seed(0)
    reference = Net()
    model = copy.deepcopy(reference)
    theirs = begin(reference, way, make)
    model, ours = zeropp.prepare(model, begin(model, way, make), zeropp.Config(**config))
    for step in range(len(SCHEDULE)):
        what = f"step {step}"
        unfreeze(reference, theirs, step, way)
        unfreeze(model, ours, step, way)
        want, got = reference(rows(step)), model(rows(step))
        assert got.item() == want.item(), (what, got.item(), want.item())
        want.backward()
        got.backward()
        average(reference)
        _, gradients = snapshot(model, grads=True)
        same_gradients(what, gradients, {n: p.grad for n, p in reference.named_parameters()}, 0.0)
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e-2)
        assert abs(ours.clip_grad_norm_(1e-2) - norm.item()) <= 1e-6 * norm.item()
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
        values, _ = snapshot(model)
        same_values(f"after {what}", values, {n: p.detach() for n, p in reference.named_parameters()}, True)
        with torch.no_grad():
            for name, p in reference.named_parameters():
                p.copy_(values[name])


# -- beside zeropp itself ----------------------------------------------------------------------------------------------
Settings = tuple[dict[str, Any], Make]
fewer = {"param": "bf16", "state": "int8"}
TWINS: dict[str, Settings] = {
    "bf16": ({"stage": 2, "precision": "bf16"}, adamw),
    "bf16, gathering": ({"host_copy": "off", "prefetch": 0, "precision": "bf16"}, sgd),
    "fp16, stage 0": ({"stage": 0, "precision": "fp16", "loss_scale": 128.0}, adamw),
    "int8 states": ({"stage": 1, "precision": zeropp.Precision(**fewer)}, adamw),
    "bf16 states of Adagrad": ({"precision": zeropp.Precision(state="bf16")}, adagrad),
    "no masters": ({"stage": 1, "precision": zeropp.Precision(param="bf16", master="bf16")}, adamw),
    "sums in bf16": ({"stage": 0, "precision": zeropp.Precision(reduce="bf16")}, adamw),
    "sums in fp32": ({"stage": 2, "precision": zeropp.Precision(param="bf16", reduce="fp32")}, adamw),
    "int8 both ways": ({"comm": zeropp.Comm(params="int8", grads="int8"), "prefetch": 0}, adamw),
    "few buckets": ({"stage": 2, "bucket_bytes": 1}, adamw),
    "accumulate": ({"host_copy": "off", "prefetch": 0, "accumulate": 2}, adamw),
    "accumulate, stage 1": ({"stage": 1, "accumulate": 2}, sgd),
    "LAMB": ({"stage": 1}, lambda params: zeropp.optim.LAMB(params, lr=LR)),
    "Muon": ({}, lambda params: _muon(params)),
    "Lion": ({"stage": 2}, lambda params: zeropp.optim.Lion(params, lr=LR)),
    "clipped in the step": ({"stage": 3, "clip": 1e-2}, adamw),
}


def _muon(params: list[Any]) -> torch.optim.Optimizer:
    """Matrices are Muon's; the rest AdamW's."""
    groups = [{"params": [p for p in params if p.ndim == 2]}]
    groups.append({"params": [p for p in params if p.ndim != 2], "use_muon": False})
    return zeropp.optim.Muon(groups, lr=LR)


def rounded() -> nn.Module:
    """Values that bf16 and fp16 have: a master that is made late is then the same."""
    torch.manual_seed(0)
    return Net().bfloat16().half().float()


def run_steps(model: Any, optimizer: Any, steps: range, config: dict[str, Any], way: str = "all") -> None:
    micro = config.get("accumulate", 1)
    for step in steps:
        unfreeze(model, optimizer, step, way)
        for part in range(micro):
            optimizer.backward(model(rows(100 * part + step)))
            optimizer.step()
            optimizer.zero_grad()


KINDS = {"SGD": "momentum_buffer", "Adagrad": "sum"}


def states(model: nn.Module, optimizer: Any) -> dict[str, Tensor | None]:
    """Of every parameter, the first that its optimizer keeps."""
    kind = KINDS.get(type(optimizer).__mro__[2].__name__, "exp_avg")
    return {name: zeropp.get_full(p, kind) for name, p in model.named_parameters()}


def same_states(ours: dict[str, Tensor | None], theirs: dict[str, Tensor | None]) -> None:
    """No state is as good as one of zeros: that of a step that did not come."""
    for name, one in theirs.items():
        other = ours[name]
        if one is None or other is None:
            left = other if one is None else one
            assert left is None or not left.any(), name
        else:
            assert torch.equal(one, other), name


def twins(config: dict[str, Any], make: Make) -> None:
    late, backward_step = rounded(), rounded()
    late, ours = zeropp.prepare(late, begin(late, "all", make), zeropp.Config(**config))
    backward_step, theirs = zeropp.prepare(
        backward_step, make(list(backward_step.parameters())), zeropp.Config(**config)
    )
    for step in range(len(SCHEDULE)):
        run_steps(late, ours, range(step, step + 1), config)
        run_steps(backward_step, theirs, range(step, step + 1), config)
        same_values(f"after step {step}", snapshot(late)[0], snapshot(backward_step)[0], False)
    same_states(states(late, ours), states(backward_step, theirs))


# -- checkpoints, memory, what frameworks do -----------------------------------------------------------------------------
PARITY: dict[str, tuple[dict[str, Any], str, Make]] = {
    **{f"{name}, {way}": (config, way, adamw) for name, config in STAGES.items() for way in ("all", "added")},
    "stage 2, SGD, added": ({"stage": 2}, "added", sgd),
    "stage 3, Adagrad": ({"stage": 3}, "all", adagrad),
}


@on_ranks(2)
@pytest.mark.parametrize("case", PARITY)
def test_equal_to_torch(case: str) -> None:
    like_torch(*PARITY[case])


#: Beside others that go the same ways.
RARE = (
    "sums in bf16",
    "sums in fp32",
    "few buckets",
    "Lion",
    "clipped in the step",
    "accumulate, stage 1",
    "no masters",
)


@on_ranks(2)
@pytest.mark.parametrize("case", [pytest.param(one, marks=[pytest.mark.slow] if one in RARE else []) for one in TWINS])
def test_equal_to_what_was_frozen_after_prepare(case: str) -> None:
    twins(*TWINS[case])


@on_ranks()
@pytest.mark.parametrize(
    "case, ranks",
    [
        ("stage 0, added", 1),
        ("stage 3, all", 1),
        ("bf16", 1),
        ("accumulate", 1),
        pytest.param("bf16", 3, marks=pytest.mark.slow),
        pytest.param("LAMB", 3, marks=pytest.mark.slow),
    ],
)
def test_on_other_numbers_of_ranks(case: str) -> None:
    if case in PARITY:
        like_torch(*PARITY[case])
    else:
        twins(*TWINS[case])


@on_ranks("2 hosts")
@pytest.mark.parametrize("stage", [0, 2])
def test_over_hosts(stage: int) -> None:
    like_torch({"stage": stage}, "added" if stage == 0 else "all", adamw)


@on_ranks("2 hosts")
def test_over_hosts_in_bf16() -> None:
    twins({"precision": "bf16"}, adamw)


@contextlib.contextmanager
def one_folder() -> Iterator[str]:
    """For all ranks."""
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        yield folders[0]
        dist.barrier()


@on_ranks(2)
def test_checkpoints() -> None:
    """Saved before a unfreeze and after it, loaded into models that have unfrozen more and less, at another stage."""
    with one_folder() as folder:
        for make, first, second in ((adamw, "bf16", "bf16"), (sgd, None, None)):
            _checkpoints(f"{folder}/{make.__name__}", make, first, second)


def _checkpoints(folder: str, make: Make, first: str | None, second: str | None) -> None:
    config: dict[str, Any] = {"host_copy": "off", "prefetch": 0, "precision": first}
    other: dict[str, Any] = {"stage": 1, "precision": second}
    model = rounded()
    model, optimizer = zeropp.prepare(model, begin(model, "all", make), zeropp.Config(**config))
    run_steps(model, optimizer, range(2), config)
    zeropp.save(f"{folder}/frozen", model, optimizer)
    run_steps(model, optimizer, range(2, 4), config)
    zeropp.save(f"{folder}/thawed", model, optimizer)
    run_steps(model, optimizer, range(4, 6), config)
    wanted, kept = snapshot(model)[0], states(model, optimizer)
    # A fresh process, frozen as at the beginning: what had states gets them, and the next step unfreezes it again.
    fresh = rounded()
    fresh, again = zeropp.prepare(fresh, begin(fresh, "all", make), zeropp.Config(**other))
    zeropp.load(f"{folder}/thawed", fresh, again)
    assert not fresh.blocks[2].into.weight.requires_grad
    run_steps(fresh, again, range(4, 6), other)
    same_values("from a checkpoint with more", snapshot(fresh)[0], wanted, False)
    same_states(states(fresh, again), kept)
    # Back to before the unfreeze, in a model that has unfrozen all: states are forgotten, also those of torch's own optimizer.
    zeropp.load(f"{folder}/frozen", fresh, again)
    run_steps(fresh, again, range(2, 6), other)
    same_values("from a checkpoint with less", snapshot(fresh)[0], wanted, False)
    same_states(states(fresh, again), kept)


@on_ranks(2)
def test_added_groups_in_checkpoints() -> None:
    """With ``add_param_group`` the groups are part of the checkpoint, as in torch: add them, then load."""
    with one_folder() as folder:
        assert "with the groups that optimizer.add_param_group had added by then" in _added_groups(folder)
        told = _into_nvme(folder)
    assert "'blocks.2.into.weight' was trained there, and is frozen here: " in told
    reason = "'nvme' does not combine with unfreezing: files are laid out in prepare; leave the parameter trainable"
    assert f"Config.offload.optimizer.kind: {reason}" in told


def _added_groups(folder: str) -> str:
    config: dict[str, Any] = {"stage": 2}
    model = rounded()
    model, optimizer = zeropp.prepare(model, begin(model, "added", adamw), zeropp.Config(**config))
    run_steps(model, optimizer, range(3), config, "added")
    zeropp.save(f"{folder}/added", model, optimizer)
    run_steps(model, optimizer, range(3, 6), config, "added")
    fresh = rounded()
    fresh, again = zeropp.prepare(fresh, begin(fresh, "added", adamw), zeropp.Config(**config))
    told = sentence(lambda: zeropp.load(f"{folder}/added", fresh, again), zeropp.CheckpointError)
    unfreeze(fresh, again, 2, "added")
    zeropp.load(f"{folder}/added", fresh, again)
    run_steps(fresh, again, range(3, 6), config, "added")
    same_values("after load", snapshot(fresh)[0], snapshot(model)[0], False)
    return told


def _into_nvme(folder: str) -> str:
    """Where what was trained cannot be."""
    model = rounded()
    model, optimizer = zeropp.prepare(model, begin(model, "all", adamw), zeropp.Config(stage=1))
    run_steps(model, optimizer, range(3), {})
    zeropp.save(f"{folder}/all", model, optimizer)
    nvme = zeropp.Config(offload=zeropp.Offload(optimizer=zeropp.Tier("nvme", path=folder)))
    other = rounded()
    other, its = zeropp.prepare(other, begin(other, "all", adamw), nvme)
    return sentence(lambda: zeropp.load(f"{folder}/all", other, its), zeropp.CheckpointError)


@on_ranks(2)
def test_memory() -> None:
    """What is held while most is frozen and after all is unfrozen, beside the estimates of both."""
    found = []
    for config in ({"stage": 0}, {"stage": 1, "precision": "bf16"}, {"stage": 2}, {"host_copy": "off", "prefetch": 0}):
        model, chosen = Net(128), zeropp.Config(**config)  # type: ignore[arg-type]
        for names in (SCHEDULE[0], SCHEDULE[4]):
            for name, p in model.named_parameters():
                p.requires_grad_(name.startswith(names))
            found.append({"said": zeropp.estimate(model, chosen, ranks=dist.get_world_size())["cpu"]})
        model, optimizer = zeropp.prepare(model, begin(model, "all", adamw), chosen)
        for at, step in ((-2, 0), (-1, 4)):
            for _ in range(2):
                unfreeze(model, optimizer, step, "all")
                model(torch.randn(4, 128)).backward()
                optimizer.step()
                optimizer.zero_grad()
            found[at]["held"] = {k: v["held"] for k, v in zeropp.memory(model, optimizer)[shards_tier()].items()}
    for one in found:  # a frozen parameter costs nothing
        for kind in ("params", "grads", "master", "optimizer"):
            said, held = one["said"][kind], one["held"][kind]
            assert said == pytest.approx(held, rel=0.03, abs=1024), (kind, one)


@on_ranks(2)
def test_between_two_optimizers() -> None:
    """A framework's second run: another optimizer, which has what was unfrozen since; frozen ones may be in no group."""
    model = rounded()
    model, first = zeropp.prepare(model, begin(model, "added", adamw), zeropp.Config(stage=2))
    run_steps(model, first, range(2), {}, "added")
    freeze(model, 3)
    model, second = _again(model, adamw([p for p in model.parameters() if p.requires_grad]))
    before = snapshot(model)[0]
    run_steps(model, second, range(3, 4), {}, "added")
    freeze(model, 5)  # blocks.2 has room, and is in no group of the next one
    model, third = _again(model, sgd([p for p in model.parameters() if p.requires_grad]))
    middle = snapshot(model)[0]
    model(rows(0)).backward()
    third.step()
    third.zero_grad()
    after = snapshot(model)[0]
    moved = {name for name, value in after.items() if not torch.equal(value, middle[name])}
    assert {name.rpartition(".")[0] for name in moved} <= {"head", "blocks.1.into", "blocks.1.out"} and moved
    assert not torch.equal(before["blocks.2.into.weight"], middle["blocks.2.into.weight"])
    unfreeze(model, third, 4, "added")  # all
    run_steps(model, third, range(4, 5), {}, "added")
    last = snapshot(model)[0]
    assert all(not torch.equal(last[name], after[name]) for name in ("blocks.2.into.weight", "blocks.0.into.weight"))


def _again(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
    from zeropp.zero.prepare import attach

    attach(model, optimizer)
    return model, optimizer


@on_ranks(2)
def test_inside_no_sync() -> None:
    """Thawed between two micro-steps: the gradients of before are there, those of the unfrozen ones from then on."""
    torch.manual_seed(0)
    reference = Net()
    model = copy.deepcopy(reference)
    begin(reference, "all", sgd)
    model, optimizer = zeropp.prepare(model, begin(model, "all", sgd), zeropp.Config(stage=2))
    with zeropp.no_sync(model):
        model(rows(0)).backward()
    freeze(model, 3)
    model(rows(1)).backward()
    reference(rows(0)).backward()
    freeze(reference, 3)
    reference(rows(1)).backward()
    average(reference)
    wanted = {n: p.grad for n, p in reference.named_parameters()}
    same_gradients("after two", snapshot(model, grads=True)[1], wanted, 0.0)
    optimizer.step()


@on_ranks(2)
def test_few_buckets_frozen_after() -> None:
    """The unit that is reduced first is frozen after ``prepare``: those behind it do not wait until the end of the backward."""
    model, config = Net(64), zeropp.Config(stage=2, bucket_bytes=1)
    said = zeropp.estimate(model, config, ranks=dist.get_world_size())["cpu"]["buckets"]
    model, optimizer = zeropp.prepare(model, adamw(list(model.parameters())), config)
    model.head.requires_grad_(False)
    model(torch.randn(4, 64)).backward()
    optimizer.step()
    assert 0 < zeropp.memory(model)[shards_tier()]["buckets_peak"]["held"] <= said


def check_refusals(told: dict[str, str]) -> None:
    reasons = {
        "states on nvme": "Config.offload.optimizer.kind: 'nvme' does not combine with unfreezing: files are laid out in prepare",
        "parameters on nvme": "Config.offload.params.kind: 'nvme' does not combine with unfreezing: files are laid out in prepare",
        "step in backward": "Config.step_in_backward: True does not combine with unfreezing: the units of the step are laid out in prepare",
        "one bit": "optimizer OneBitAdam does not combine with unfreezing: its states are laid out in prepare",
    }
    begin = "ConfigError: requires_grad of parameter '{}' cannot become True after zeropp.prepare: it was frozen there, and "
    end = "; leave the parameter trainable until prepare, and freeze it after"
    for name, reason in reasons.items():
        for case in (name, f"{name}, added"):
            assert told[case] == begin.format("norm.weight") + reason + end, told[case]
    assert (
        told["whole"]
        == begin.format("head.weight")
        + "a model that was frozen and without an optimizer in prepare does not combine with unfreezing: nothing in it is made to be trained"
        + end
    )
    assert (
        told["float16"].startswith(begin.format("0.weight") + "Precision.param: ")
        and "float16 needs a loss scale" in told["float16"]
    )
    assert (
        "a parameter of shape (2, 2) is not one of the model that this optimizer was prepared with" in told["foreign"]
    )
    assert "a parameter of shape (8,) for Muon, wanted real matrices" in told["muon"]
    assert "some parameters appear in more than one parameter group" in told["twice"]
    for stage in (0, 3):
        assert "parameter 'norm.weight' requires grad, and is in no group" in told[f"no group, stage {stage}"]
        assert "optimizer.add_param_group({'params': [...]})" in told[f"no group, stage {stage}"]
    assert "parameter 'blocks.1.into.weight' was unfrozen inside a forward" in told["inside"]


@on_ranks(2)
def test_refusals() -> None:
    """Each with the parameter's name, the reason and the way out; the model trains on."""
    told: dict[str, str] = {}
    with one_folder() as folder:
        nvme = zeropp.Tier("nvme", path=folder)
        settings: dict[str, tuple[dict[str, Any], Make]] = {
            "states on nvme": ({"offload": zeropp.Offload(optimizer=nvme)}, adamw),
            "parameters on nvme": ({"offload": zeropp.Offload(params=nvme)}, adamw),
            "step in backward": ({"step_in_backward": True}, adamw),
            "one bit": ({"stage": 1}, lambda params: zeropp.optim.OneBitAdam(params, lr=LR)),
        }
        for name, (config, make) in settings.items():
            model = Net()
            model, optimizer = zeropp.prepare(model, begin(model, "added", make), zeropp.Config(**config))
            told[name] = sentence(lambda model=model: model.norm.weight.requires_grad_(True), zeropp.ConfigError)
            told[f"{name}, added"] = sentence(
                lambda model=model, optimizer=optimizer: optimizer.add_param_group({"params": [model.norm.weight]}),
                zeropp.ConfigError,
            )
            model(rows(0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    model = Net()
    model, optimizer = zeropp.prepare(model, begin(model, "added", _muon), zeropp.Config(stage=1))
    told["muon"] = sentence(lambda: optimizer.add_param_group({"params": model.norm.parameters()}), zeropp.ConfigError)
    optimizer.add_param_group({"params": model.norm.parameters(), "use_muon": False})
    model.norm.requires_grad_(True)
    model(rows(0)).backward()
    optimizer.step()
    whole = Net().requires_grad_(False)
    zeropp.prepare(whole, None, zeropp.Config(host_copy="off"))
    told["whole"] = sentence(lambda: whole.head.weight.requires_grad_(True), zeropp.ConfigError)
    low = nn.Sequential(nn.Linear(8, 8).half().requires_grad_(False), nn.Linear(8, 8))
    zeropp.prepare(low, None, zeropp.Config(host_copy="off"))
    told["float16"] = sentence(lambda: low[0].weight.requires_grad_(True), zeropp.ConfigError)
    for stage in (0, 3):
        model = Net()
        model, optimizer = zeropp.prepare(model, begin(model, "added", adamw), zeropp.Config(stage=stage))
        foreign = nn.Linear(2, 2)
        told["foreign"] = sentence(
            lambda optimizer=optimizer, foreign=foreign: optimizer.add_param_group({"params": foreign.parameters()}),
            zeropp.ConfigError,
        )
        told["twice"] = sentence(
            lambda optimizer=optimizer, model=model: optimizer.add_param_group({"params": [model.head.bias]}),
            ValueError,
        )
        assert len(optimizer.param_groups) == 1
        model.norm.requires_grad_(True)
        model(rows(0)).backward()
        told[f"no group, stage {stage}"] = sentence(optimizer.step, zeropp.ConfigError)
        optimizer.add_param_group({"params": model.norm.parameters()})
        optimizer.step()
        optimizer.zero_grad()
    model = Net()
    model, optimizer = zeropp.prepare(model, begin(model, "all", adamw), zeropp.Config(stage=0))
    block = model.blocks[1]
    hook = block.register_forward_pre_hook(lambda *_: block.requires_grad_(True) and None)
    model(rows(0)).backward()
    hook.remove()
    told["inside"] = sentence(optimizer.step, zeropp.Error)
    optimizer.zero_grad()
    for _ in range(2):
        model(rows(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    check_refusals(told)


@on_ranks(2, alone=True, devices=("cpu", "sim"))
def test_on_one_rank_only() -> None:
    """The last rank alone unfreezes: an error on every rank within seconds, and no wait."""
    model = Net()
    model, optimizer = zeropp.prepare(model, begin(model, "all", adamw), zeropp.Config(stage=2))
    if dist.get_rank() == dist.get_world_size() - 1:
        model.blocks.requires_grad_(True)

    def step() -> None:
        model(rows(0)).backward()
        optimizer.step()

    told = sentence(step, zeropp.CommError)
    assert "the gradient of module 'blocks.2'" in told and "rank 1" in told
