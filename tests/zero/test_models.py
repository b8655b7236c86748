# SPDX-License-Identifier: Apache-2.0
"""More ways of building and driving a model: parameters in lists, scalars, several types in one module, parametrizations,
hooks of others, another order each step, the whole model compiled. Equal to DDP as in test_parity.py; and what cannot work is refused
with a sentence."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zeropp
import zoo
from parity import STEPS, Case, U, checkpointing, language, rows, run, two_backwards, vector
from ranks import of_all_ranks, on_ranks
from tiny import sentence
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


class Lists(nn.Module):
    """Parameters outside of layers: a list, a dict, one that is a scalar, one that is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([torch.randn(8, 8) * 0.1 for _ in range(3)])
        self.named = nn.ParameterDict({"scale": torch.ones(8), "shift": torch.zeros(8)})
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        for row in self.rows:
            x = x + (x @ row).tanh()
        y = x * self.named["scale"] + self.named["shift"]
        return (y * self.scalar).pow(2).mean() + self.empty.sum()


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Linear(8, 8))
        self.second = parametrizations.weight_norm(nn.Linear(8, 8), dim=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()).pow(2).mean()


class Recursive(nn.Module):
    """A tree of modules of one class, each called again inside another's forward."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.own = nn.Linear(8, 8)
        self.children_ = nn.ModuleList(Recursive(depth - 1) for _ in range(2 if depth else 0))

    def walk(self, x: Tensor) -> Tensor:
        x = self.own(x).tanh()
        for child in self.children_:
            x = x + child(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.walk(x)


class Loss(nn.Module):
    """A loss of any module that returns a tensor."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).float().pow(2).mean()


class MixedTypes(nn.Module):
    """float32, bfloat16 and integers in one module, and a buffer that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Parameter((torch.randn(8, 8) * 0.3).bfloat16(), requires_grad=False)
        self.high = nn.Parameter(torch.randn(8, 8) * 0.3)
        self.table = nn.Parameter(torch.arange(8), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return (x[:, self.table] @ self.high + (x.bfloat16() @ self.low).float()).pow(2).mean() / self.seen


class Transposed(nn.Module):
    """Parameters that are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.first.weight = nn.Parameter((torch.randn(8, 8) * 0.3).t())
        self.second = nn.Linear(8, 4)
        self.second.weight = nn.Parameter((torch.randn(8, 8) * 0.3)[::2])

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()).pow(2).mean()


class Ordered(nn.Module):
    """Another order from call to call; some blocks are left out, some run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        orders = ((0, 1, 2, 3), (3, 1, 0), (2, 2, 0, 1), (1, 3, 1, 3), (0, 1, 2, 3))
        order = orders[self.calls % len(orders)]
        self.calls += 1
        for i in order:
            x = x + self.blocks[i](x).tanh()
        return x.pow(2).mean()


class Converting(nn.Module):
    """Converts its layers in every forward, to what they are; also in the forward that a checkpoint repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def layer(self, index: int, x: Tensor) -> Tensor:
        self.layers[index] = self.layers[index].to(torch.float32).to("cpu").float()
        return self.layers[index](x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        for index in range(2):
            x = checkpoint(self.layer, index, x, use_reentrant=False)
        return x.pow(2).mean()


class Normalised(nn.Module):
    """Running statistics are buffers; train and eval differ."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).pow(2).mean()


def with_hooks(model: nn.Module) -> None:
    """Register hooks of every kind before prepare; deepcopy keeps them."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(_times_one)
            module.register_forward_hook(_doubled)
            module.register_full_backward_hook(_halved)


def _times_one(module: nn.Module, args: Any) -> Any:
    return tuple(a * 1.0 for a in args)


def _doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output + module.bias * 0.5  # reads a parameter in a hook


def _halved(module: nn.Module, grads: Any, _: Any) -> Any:
    return tuple(None if g is None else g * 0.5 for g in grads)


def hooked_later(model: nn.Module, step: int) -> Tensor:
    """Register the same hooks on a prepared model; between the second and the third step once more."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    if step in (0, 2):
        with_hooks(inner)
    return vector(model, step)


def compiled(model: nn.Module, step: int) -> Tensor:
    """torch.compile around the whole model, as people write it."""
    if "_compiled" not in model.__dict__:
        model.__dict__["_compiled"] = torch.compile(model, backend="eager")
    loss = model.__dict__["_compiled"](rows(step))
    loss.backward()
    return loss


def evaluated(model: nn.Module, step: int) -> Tensor:
    """train() and eval() in turns, under no_grad and inference_mode."""
    model.eval()
    with torch.no_grad():
        first = model(rows(step))
    with torch.inference_mode():
        assert torch.equal(first, model(rows(step)))
    model.train()
    return vector(model, step)


UNUSED: dict[str, Any] = {"find_unused_parameters": True}
TWO_STAGES: dict[str, dict[str, Any]] = {"stage 2": {"stage": 2}, "gather": {"host_copy": "off", "prefetch": 0}}
TABLE: dict[str, Case] = {
    "parameters in lists, a scalar, an empty one": Case(Lists, vector),
    "weight_norm": Case(Parametrized, vector),
    "weight_norm, every Linear a unit": Case(Parametrized, vector, units=("ParametrizedLinear",)),
    "modules in modules of their own class": Case(lambda: Loss(Recursive()), vector),
    "several types in one module": Case(MixedTypes, vector),
    "another order each step": Case(Ordered, vector, ddp=UNUSED),
    "running statistics, train and eval": Case(Normalised, evaluated, ddp={"broadcast_buffers": False}),
    "hooks of others": Case(Normalised, vector, setup=with_hooks, ddp={"broadcast_buffers": False}),
    "hooks of others, after prepare": Case(
        Normalised, hooked_later, units=("Linear",), ddp={"broadcast_buffers": False}
    ),
    "layers converted to what they are": Case(
        Converting, two_backwards, modes=TWO_STAGES, units=("Linear",), tolerance=4 * U
    ),
    "switch transformers, checkpoint, non-reentrant": Case(
        zoo.switch, language, setup=checkpointing(False), modes=TWO_STAGES, ddp=UNUSED
    ),
    "the whole model compiled": Case(Ordered, compiled, ddp=None),
}


@on_ranks(2)
@pytest.mark.parametrize("case", TABLE)
def test_equal_to_ddp(case: str) -> None:
    losses = of_all_ranks(run(TABLE[case])["losses"])
    assert len(losses[0]) == STEPS and losses[0] != losses[1]


READS = "reads its values outside of the model's forward and backward; use `with zeropp.gathered(parameter):`"
SENTENCES = {
    "complex": "prepare: parameter 'weight' has dtype torch.complex32, which is not supported",
    "requires_grad": "requires_grad of parameter '1.weight' cannot become True after zeropp.prepare: it was frozen there",
    **dict.fromkeys(("half", "to", "pickle", "torch.save", "deepcopy"), READS),
}


def prepared() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    return zeropp.prepare(model, optimizer, zeropp.Config(host_copy="off", units=("Linear",)))


@on_ranks(2)
def test_refusals() -> None:
    """Each with a sentence that says what and the way out; the model trains on."""
    model, optimizer = prepared()
    frozen = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)
    zeropp.prepare(frozen, None, zeropp.Config(host_copy="off"))
    imaginary = nn.Module()
    imaginary.weight = nn.Parameter(torch.zeros(4, dtype=torch.complex32))
    acts: dict[str, Callable[[], Any]] = {
        "complex": lambda: zeropp.prepare(imaginary, None),
        "half": lambda: model.half(),
        "to": lambda: model.to(torch.float64),
        "pickle": lambda: pickle.dumps(next(model.parameters())),
        "torch.save": lambda: torch.save(model, io.BytesIO()),
        "requires_grad": lambda: frozen[1].weight.requires_grad_(True),
        "deepcopy": lambda: copy.deepcopy(model),
    }
    assert acts.keys() == SENTENCES.keys()
    for name, act in acts.items():
        told = sentence(act, zeropp.Error)
        assert SENTENCES[name] in told, told
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_conversions() -> None:
    """At stages 0 to 2 parameters are whole, and are converted without a check: the next step refuses them."""
    told: list[str] = []
    for stage in (0, 1, 2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        adam = torch.optim.AdamW(model.parameters())
        model, optimizer = zeropp.prepare(model, adam, zeropp.Config(stage=stage))

        def act(model: nn.Module = model, optimizer: Any = optimizer) -> None:
            model.double().float()
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()

        told.append(sentence(act, zeropp.Error))
    replaced, *refused = told
    assert "the data of parameter '0.weight' was replaced after zeropp.prepare (model.to, half, cuda" in replaced
    assert all("p.data of parameter '0.weight' cannot be replaced" in sentence for sentence in refused), told


@on_ranks(2)
def test_parameters_that_are_not_contiguous() -> None:
    """Memory becomes contiguous, values stay: the same steps as a model that was so before, and shapes and strides are true."""
    losses = []
    for make in (lambda p: p, lambda p: nn.Parameter(p.detach().clone(memory_format=torch.contiguous_format))):
        torch.manual_seed(0)
        model = Transposed()
        for module in (model.first, model.second):
            module.weight = make(module.weight)
        model, optimizer = zeropp.prepare(model, torch.optim.AdamW(model.parameters()), zeropp.Config(host_copy="off"))
        seen = []
        for step in range(3):
            seen.append(vector(model, step).item())
            optimizer.step()
            optimizer.zero_grad()
        with zeropp.gathered(model):
            assert all(p.is_contiguous() for p in model.parameters())
        losses.append(seen)
    assert losses[0] == losses[1]


@on_ranks(2)
def test_torch_func_grad() -> None:
    """torch.func.grad through functional_call, by a tensor that stands in for one parameter, against the plain model."""
    answers = []
    for how in (prepared, _plain):
        model = how()[0]

        def loss(weight: Tensor, model: nn.Module = model) -> Tensor:
            return torch.func.functional_call(model, {"0.weight": weight}, (rows(0),)).pow(2).mean()

        answers.append(torch.func.grad(loss)(torch.eye(8)))
    assert torch.equal(*answers) and answers[0].abs().sum() > 0


def _plain() -> tuple[nn.Module, None]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), None
