# SPDX-License-Identifier: Apache-2.0
"""Mistakes get a sentence that names the object, what was seen, what was wanted and the way out; and the next step is
good."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeropp
from ranks import on_cpu_only, on_ranks, shards_tier
from tiny import MODES, Tiny, adam, refused_step, sentence, trains_on, unchanged, values, vector
from torch import Tensor, nn


def prepared(**config: Any) -> tuple[Tiny, Any]:
    torch.manual_seed(0)
    model = Tiny()
    return zeropp.prepare(model, adam(model), zeropp.Config(units=("Linear", "Tiny"), **config))


# -- configuration, model, optimizer ---------------------------------------------------------------------
def config_keys() -> list[str]:
    return [
        sentence(lambda: zeropp.Config(stge=3), zeropp.ConfigError),
        sentence(lambda: zeropp.Config(stage=4), zeropp.ConfigError),
        sentence(lambda: zeropp.Config(host_copy="on"), zeropp.ConfigError),
        sentence(lambda: zeropp.prepare(Tiny(), None, zeropp.Config(units=("Blok",))), zeropp.ConfigError),
    ]


def no_parameters() -> str:
    return sentence(lambda: zeropp.prepare(nn.Tanh()), zeropp.ConfigError)


def not_a_module() -> str:
    return sentence(lambda: zeropp.prepare([nn.Linear(2, 2)]), zeropp.ConfigError)  # type: ignore[type-var]


def on_meta() -> str:
    with torch.device("meta"):
        model = Tiny()
    return sentence(lambda: zeropp.prepare(model), zeropp.ConfigError)


def odd_dtype() -> list[str]:
    complex_model, half = nn.Module(), nn.Linear(2, 2, dtype=torch.float16)
    complex_model.weight = nn.Parameter(torch.zeros(2, dtype=torch.complex32))
    return [
        sentence(lambda: zeropp.prepare(complex_model), zeropp.ConfigError),
        sentence(lambda: zeropp.prepare(half), zeropp.ConfigError),
    ]


def prepared_twice() -> list[str]:
    model, optimizer = prepared()
    again = sentence(lambda: zeropp.prepare(model), zeropp.ConfigError)
    fresh = Tiny()
    reused = sentence(lambda: zeropp.prepare(fresh, optimizer), zeropp.ConfigError)
    part = sentence(lambda: zeropp.prepare(nn.Sequential(model.blocks[0])), zeropp.ConfigError)
    trains_on(model, optimizer)
    return [again, reused, part]


def shared_between_units() -> None:
    """Not a mistake: one weight in two blocks becomes a unit of its own with both as triggers, and is trained
    once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    model, optimizer = zeropp.prepare(model, adam(model), zeropp.Config(units=("Linear",), host_copy="off"))
    model(vector()).sum().backward()
    optimizer.step()
    with zeropp.gathered(model):
        assert model[2].weight is model[0].weight
        assert len(list(model.parameters())) == 5


def optimizer_lacks() -> list[str]:
    model = Tiny()
    few = torch.optim.AdamW(model.blocks[0].parameters())
    lacking = sentence(lambda: zeropp.prepare(model, few), zeropp.ConfigError)
    foreign = sentence(lambda: zeropp.prepare(Tiny(), adam(model)), zeropp.ConfigError)
    last_one = torch.optim.AdamW(model.blocks.parameters())
    lacking_one = sentence(lambda: zeropp.prepare(model, last_one), zeropp.ConfigError)
    too_many = torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.zeros(2))])
    foreign_one = sentence(lambda: zeropp.prepare(model, too_many), zeropp.ConfigError)
    model.scalar.requires_grad_(False)
    frozen = torch.optim.AdamW(model.blocks.parameters())
    # A frozen parameter may be missing; and the refusals left no trace.
    model, optimizer = zeropp.prepare(model, frozen)
    trains_on(model, optimizer)
    return [lacking, foreign, lacking_one, foreign_one]


def optimizer_with_state() -> str:
    model = Tiny()
    optimizer = adam(model)
    model(vector()).backward()
    optimizer.step()
    return sentence(lambda: zeropp.prepare(model, optimizer), zeropp.ConfigError)


def unknown_optimizer() -> str:
    model = Tiny()
    found = sentence(lambda: zeropp.prepare(model, torch.optim.LBFGS(model.parameters())), zeropp.ConfigError)
    trains_on(*zeropp.prepare(model, adam(model)))
    return found


def different_models() -> list[str]:
    """Shape, name, dtype, count, requires_grad: each on the last rank only."""
    last = dist.get_rank() == dist.get_world_size() - 1

    def shape() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5 if last else 6))

    def name() -> nn.Module:
        return nn.ModuleDict({"a" if last else "b": nn.Linear(4, 4)})

    def dtype() -> nn.Module:
        return nn.Linear(4, 4, dtype=torch.bfloat16 if last else torch.float32)

    def count() -> nn.Module:
        return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3 if last else 2)))

    def frozen() -> nn.Module:
        return nn.Linear(4, 4).requires_grad_(not last)

    return [
        sentence(lambda make=make: zeropp.prepare(make()), zeropp.ConfigError)
        for make in (shape, name, dtype, count, frozen)
    ]


def different_configs() -> list[str]:
    """Each mistake is on the last rank only. All ranks raise before they allocate; the models can then be prepared."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    last = rank == ranks - 1
    fp16 = zeropp.Precision(param="fp16", reduce="fp32")
    pairs: list[tuple[Any, Any]] = [
        ({"stage": 3}, {"stage": 2}),
        ({"precision": fp16}, {"precision": zeropp.Precision(param="fp16"), "loss_scale": 8.0}),
        ({}, {"offload": zeropp.Offload(optimizer="nvme", path="/tmp"), "units": (nn.Linear,), "prefetch": 1, "accumulate": 2, "clip": 1.0}),
        ({"ignored": ("scalar",)}, {}),
    ]  # fmt: skip
    found = []
    for plain, other in pairs:
        model = Tiny()
        config = zeropp.Config(**(other if last else plain))
        found.append(sentence(lambda m=model, c=config: zeropp.prepare(m, None, c), zeropp.ConfigError))
        trains_on(*zeropp.prepare(model, adam(model)))
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if last else adam(model)
    found.append(sentence(lambda: zeropp.prepare(model, optimizer), zeropp.ConfigError))
    found.append(sentence(lambda: zeropp.prepare(Tiny(), None if last else optimizer), zeropp.ConfigError))
    return found


def same_configs() -> None:
    """Not a mistake: disks and devices are each host's own, and there are two ways to say one thing."""
    last = dist.get_rank() == dist.get_world_size() - 1
    for plain, other in (
        ({"precision": "bf16"}, {"precision": zeropp.Precision(param="bf16")}),
        ({"units": (Tiny, nn.Linear)}, {"units": {nn.Linear, Tiny}, "device": torch.get_default_device().type}),
        ({"precision": "fp16"}, {"precision": "fp16", "loss_scale": zeropp.LossScale()}),
    ):
        trains = Tiny()
        zeropp.prepare(trains, adam(trains), zeropp.Config(**(other if last else plain)))


def lazy() -> list[str]:
    """A first batch gives the shapes; then all is well."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(1), nn.LazyBatchNorm1d(affine=False))
    found = [sentence(lambda: zeropp.prepare(model), zeropp.ConfigError)]
    found.append(sentence(lambda: zeropp.prepare(model[2]), zeropp.ConfigError))
    found.append(sentence(lambda: zeropp.estimate(model, ranks=2), zeropp.ConfigError))
    model(torch.ones(2, 8))
    zeropp.prepare(model, adam(model))
    return found


def different_values() -> None:
    """Not a mistake: rank 0's values count, buffers' too."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].running_mean.fill_(dist.get_rank() + 1.0)
    torch.manual_seed(0)
    want = nn.Linear(4, 4)
    for config in (zeropp.Config(), zeropp.Config(host_copy="off", units=("Linear",)), zeropp.Config(stage=1)):
        torch.manual_seed(dist.get_rank())
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model[1].running_mean.fill_(dist.get_rank() + 1.0)
        model, _ = zeropp.prepare(model, None, config)
        with zeropp.gathered(model):
            assert torch.equal(model[0].weight, want.weight)
        assert torch.equal(model[1].running_mean, torch.ones(4))


# -- after prepare ---------------------------------------------------------------------------------------
def added_later() -> list[str]:
    model, optimizer = prepared()
    found = [
        sentence(lambda: setattr(model, "late", nn.Parameter(torch.zeros(3))), zeropp.ConfigError),
        sentence(lambda: model.blocks.append(nn.Linear(2, 2)), zeropp.ConfigError),
        sentence(lambda: model.register_parameter("late", nn.Parameter(torch.zeros(3))), zeropp.ConfigError),
        sentence(lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]}), zeropp.ConfigError),
    ]
    model.tanh = nn.Tanh()  # without parameters: fine
    model.note = "text"
    trains_on(model, optimizer)
    return found


def no_backward() -> list[str]:
    model, optimizer = prepared()
    before = values(model)
    found = [sentence(optimizer.step), sentence(lambda: optimizer.clip_grad_norm_(1.0))]
    unchanged(model, before)
    with zeropp.no_sync(model):
        model(vector()).backward()
    found.append(sentence(optimizer.step))
    unchanged(model, before)
    trains_on(model, optimizer)
    return found


def loss_not_scalar(mode: str) -> str:
    model, optimizer = prepared(**MODES[mode])
    found = sentence(lambda: (model(vector()) * torch.ones(3)).backward(), RuntimeError)
    trains_on(model, optimizer)
    return found


def backward_twice(mode: str) -> str:
    """torch's own sentence; and what was reduced once is not reduced twice."""
    model, optimizer = prepared(**MODES[mode])
    loss = model(vector())
    loss.backward()
    found = sentence(loss.backward, RuntimeError)
    trains_on(model, optimizer)
    return found


def nan_gradients(mode: str, clip: bool) -> str:
    """One element on one rank, in one parameter: named, and nothing changes anywhere."""
    model, optimizer = prepared(**MODES[mode], **({"clip": 1.0} if clip else {}))
    trains_on(model, optimizer)
    before = values(model)
    loss = model(vector())
    if dist.get_rank() == dist.get_world_size() - 1:
        loss = loss + 0 * model.blocks[1].weight[0, 0] * float("inf")
    loss.backward()
    found = refused_step(optimizer)
    unchanged(model, before)
    trains_on(model, optimizer)
    return found


def raises_in_forward(mode: str) -> None:
    """A forward that raises in the middle leaves nothing whole and nothing pinned; the next one is good."""
    model, optimizer = prepared(**MODES[mode])

    def boom(*_: Any) -> None:
        raise ZeroDivisionError

    handle = model.blocks[1].register_forward_hook(boom)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            sentence(lambda: model(vector()), ZeroDivisionError)
    handle.remove()
    sentence(lambda: model.blocks[1].weight.sum(), zeropp.PartitionedParameterError)
    trains_on(model, optimizer)


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ZeroDivisionError("in backward")


def raises_in_backward(mode: str) -> str:
    """A backward that raises before any unit went out, then a good step; one that raises after some went out on all
    ranks."""
    model, optimizer = prepared(**MODES[mode])
    before = values(model)
    sentence(lambda: Boom.apply(model(vector())).backward(), ZeroDivisionError)
    unchanged(model, before)
    trains_on(model, optimizer)
    # After the last block's gradients came: a hook on its input raises.
    handle = model.blocks[1].register_forward_hook(lambda m, a, out: Boom.apply(out))
    sentence(lambda: model(vector()).backward(), ZeroDivisionError)
    handle.remove()
    before = values(model)
    try:
        optimizer.zero_grad()
        model(vector()).backward()
    except zeropp.Error as error:
        return str(error)
    optimizer.step()
    optimizer.zero_grad()
    trains_on(model, optimizer)
    return "went on"


def sparse_gradients(mode: str) -> str:
    on_cpu_only("the simulated GPU has no sparse tensors")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8, sparse=True), nn.Linear(8, 1))
    model, _ = zeropp.prepare(model, None, zeropp.Config(units=("Embedding", "Linear"), **MODES[mode]))
    return sentence(lambda: model(torch.tensor([1, 2])).sum().backward(), ValueError)


def clip_twice() -> str:
    model, optimizer = prepared(clip=1.0)
    model(vector()).backward()
    found = sentence(lambda: optimizer.clip_grad_norm_(1.0), zeropp.ConfigError)
    trains_on(model, optimizer)
    return found


def other_norms() -> str:
    model, optimizer = prepared()
    model(vector()).backward()
    return sentence(lambda: optimizer.clip_grad_norm_(1.0, norm_type=0.0), zeropp.ConfigError)


def state_of_the_optimizer() -> list[str]:
    _, optimizer = prepared()
    return [sentence(optimizer.state_dict), sentence(lambda: optimizer.load_state_dict({}))]


def not_prepared() -> list[str]:
    plain = Tiny()
    return [
        sentence(lambda: zeropp.no_sync(plain).__enter__(), zeropp.ConfigError),
        sentence(lambda: zeropp.memory(plain), zeropp.ConfigError),
        sentence(lambda: zeropp.memory(prepared()[0], prepared()[1]), zeropp.ConfigError),
    ]


def closure() -> None:
    """step(closure) runs the closure with gradients on, as torch's optimizers do."""
    model, optimizer = prepared()
    before = values(model)

    def compute() -> Tensor:
        optimizer.zero_grad()
        loss = model(vector())
        loss.backward()
        return loss

    with contextlib.nullcontext(), torch.no_grad():
        loss = optimizer.step(compute)
    assert loss.item() > 0
    assert any(not torch.equal(a, b) for a, b in zip(values(model), before, strict=True))


PER_MODE: dict[str, Callable[[str], Any]] = {
    "loss not scalar": loss_not_scalar,
    "backward twice": backward_twice,
    "NaN gradients": lambda mode: nan_gradients(mode, False),
    "NaN gradients, clip": lambda mode: nan_gradients(mode, True),
    "raises in forward": raises_in_forward,
    "raises in backward": raises_in_backward,
    "sparse gradients": sparse_gradients,
}
CASES: dict[str, Callable[[], Any]] = {
    "config keys": config_keys,
    "no parameters": no_parameters,
    "not a module": not_a_module,
    "on meta": on_meta,
    "odd dtype": odd_dtype,
    "prepared twice": prepared_twice,
    "shared between units": shared_between_units,
    "optimizer lacks": optimizer_lacks,
    "optimizer with state": optimizer_with_state,
    "unknown optimizer": unknown_optimizer,
    "different models": different_models,
    "different configs": different_configs,
    "same configs": same_configs,
    "lazy": lazy,
    "different values": different_values,
    "added later": added_later,
    "no backward": no_backward,
    "clip twice": clip_twice,
    "other norms": other_norms,
    "state of the optimizer": state_of_the_optimizer,
    "not prepared": not_prepared,
    "closure": closure,
    **{f"{name}, {mode}": (lambda f=f, mode=mode: f(mode)) for name, f in PER_MODE.items() for mode in MODES},
}


# Case -> what each of its sentences must say. A list of lists where a case has several.
SAYS: dict[str, list[list[str]]] = {
    "config keys": [
        ["ConfigError: Config.stge: unknown key (value 3)", "did you mean 'stage'?"],
        ["ConfigError: Config.stage: 4 is not allowed; wanted 0, 1, 2 or 3"],
        ["ConfigError: Config.host_copy: 'on' is not allowed", "'auto'", "'off'"],
        ["ConfigError: units: no module of class 'Blok' in the model; it has", "Linear"],
    ],
    "no parameters": [["ConfigError: prepare: Tanh has no parameters, so there is nothing to partition"]],
    "not a module": [
        [
            "ConfigError: prepare: model is [Linear(in_features=2, out_features=2, bias=True)], a list; wanted a torch.nn.Module"
        ]
    ],
    "on meta": [
        [
            "'scalar' is on the meta device and has no values, and Tiny has no reset_parameters()",
            "zeropp.sharded_init()",
        ]
    ],
    "odd dtype": [
        ["'weight' has dtype torch.complex32", "not supported"],
        ["in float16", "loss scale", "precision='bf16'"],
    ],
    "prepared twice": [
        ["parameter 'scalar' belongs to a prepared model already; prepare each model once"],
        ["the optimizer was prepared already"],
        ["parameter '0.weight' belongs to a prepared model already"],
    ],
    "optimizer lacks": [
        ["the optimizer lacks 5 trainable parameters, first 'scalar'", "requires_grad_(False)"],
        ["the optimizer has 7 parameters that are not the model's; build it from model.parameters()"],
        ["the optimizer lacks 1 trainable parameter, 'scalar'; add it, or freeze it with requires_grad_(False)"],
        ["the optimizer has 1 parameter that is not the model's; build it from"],
    ],
    "optimizer with state": [["the optimizer has state already", "before the first step", "zeropp.load"]],
    "unknown optimizer": [
        ["optimizer LBFGS does not combine with Config.stage=", "use one of AdamW, Adam, Lion", "OneBitLamb, Muon"]
    ],
    "different models": [
        ["rank 1's model differs from rank 0's: parameter", "'1.weight' (5, 4)", "'1.weight' (6, 4)"],
        ["'a.weight'", "'b.weight'"],
        ["torch.bfloat16", "torch.float32"],
        ["'2.weight'", "(no more parameters)"],
        ["requires_grad=False", "requires_grad=True"],
    ],
    "different configs": [
        ["ConfigError: prepare: Config.stage is 3 on rank 0 and 2 on rank 1; give every rank the same configuration"],
        [
            "prepare: Config.precision.reduce is 'fp32' on rank 0 and None on rank 1; Config.loss_scale.init is 65536.0 on rank 0 and 8.0 "
            "on rank 1; Config.loss_scale.least",
        ],
        [
            "Config.offload.optimizer.kind is 'device' on rank 0 and 'nvme' on rank 1; Config.units is 'auto' on rank 0 and Linear on rank 1; "
            "Config.prefetch is 'auto' on rank 0 and 1 on rank 1; Config.accumulate is 1 on rank 0 and 2 on rank 1; 1 more key differs; give"
        ],
        ["prepare: Config.ignored is 'scalar' on rank 0 and nothing on rank 1; give"],
        ["prepare: optimizer is AdamW on rank 0 and SGD on rank 1; give every rank the same"],
        ["prepare: optimizer is AdamW on rank 0 and None on rank 1; give every rank"],
    ],
    "lazy": [
        ["ConfigError: prepare: '1.weight' has no shape yet: module '1' is a LazyLinear, which", "run one batch first"],
        ["prepare: 'running_mean' has no shape yet: the model is a LazyBatchNorm1d"],
        ["estimate: '1.weight' has no shape yet"],
    ],
    "added later": [
        ["parameter 'late' was added to Tiny after zeropp.prepare", "add it before prepare"],
        ["parameter '3.weight' was added to ModuleList after zeropp.prepare"],
        ["parameter 'late' was added to Tiny after zeropp.prepare"],
        ["is not one of the model that this optimizer was prepared with"],
    ],
    "no backward": [
        ["optimizer.step: no parameter has a gradient; call loss.backward() first"],
        ["no parameter has a gradient; call loss.backward() first"],
        ["accumulated inside no_sync and not reduced", "outside of zeropp.no_sync(model)"],
    ],
    "loss not scalar": [["grad can be implicitly created only for scalar outputs"]],
    "backward twice": [["backward through the graph a second time"]],
    "NaN gradients": [
        [
            "the gradients of 'blocks.1.weight' (rank 1 before the sum)",
            "are not finite",
            "weights and optimizer state are unchanged",
        ]
    ],
    "raises in backward": [
        [
            "the backward before this one ended by an exception after the gradient of module 'blocks.2' had gone out",
            "restart",
        ]
    ],
    "sparse gradients": [["zero: the gradient of '0.weight' is sparse; ", "sparse=False"]],
    "clip twice": [["Config(clip=...) clips in every step already; use one of them"]],
    "other norms": [["norm_type 0.0 is not allowed; wanted a number above 0, or float('inf')"]],
    "state of the optimizer": [["zeropp.save(path, model, optimizer)"], ["zeropp.load(path, model, optimizer)"]],
    "not prepared": [
        ["Tiny was not prepared; call zeropp.prepare(model, optimizer, zeropp.Config(...)) first"],
        ["Tiny was not prepared"],
        ["zeropp.memory: the optimizer belongs to another model"],
    ],
}

SAYS_OF_GPUS: dict[str, list[list[str]]] = {
    "NaN gradients": [
        [
            "the gradients of 'blocks.1.weight' (on some rank, or in the sum) were not finite",
            "weights and optimizer state are as without it",
        ]
    ],
}


@on_ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_mistakes(case: str) -> None:
    answer = CASES[case]()
    says = SAYS | (SAYS_OF_GPUS if shards_tier() == "device" else {})
    wanted = says.get(case) or says.get(case.split(", ")[0], [])
    if not wanted:
        assert answer is None
        return
    for parts, text in zip(wanted, answer if isinstance(answer, list) else [answer], strict=True):
        assert "Muon, Muon" not in text
        for part in parts:
            assert part in text, f"{part!r} not in {text!r}"
