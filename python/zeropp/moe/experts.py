# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts models as they are: which modules hold experts, and a forward over the experts of this rank.

Experts are found by the model's ``ep_plan``, never by the name of a class: transformers names there the modules that take
``(hidden (T, H), index (T, k), weights (T, k))`` and the parameters whose first dimension is the experts. With ``Config(experts=n)``
each rank holds 1/n of them. The module's parameters keep name and shape ``(E, ...)``; inside its forward it has in their place those of
this rank's experts, as transformers' own expert parallelism does, so that every ``experts_implementation`` works on them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zeropp.errors import ConfigError
from zeropp.moe.beside import SharedExperts
from zeropp.moe.exchange import Exchange, combine, dispatch, through
from zeropp.moe.layer import Experts
from zeropp.moe.on_demand import DemandLayer
from zeropp.moe.products import swiglu_expert, swiglu_experts
from zeropp.moe.shared import Sharers, once

NAME = "zeropp"
DISPATCHES = "ep_dispatch_experts"
"""transformers' style of a module that holds experts."""
HOLDS = "grouped_gemm"
"""transformers' style of a parameter whose first dimension is the experts."""


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of one layer, as the model has them."""

    name: str
    module: nn.Module
    keys: tuple[str, ...]
    """Names, in the module, of the parameters whose first dimension is the experts."""
    experts: int
    block: nn.Module
    """What the module stands in."""


def expert_layers(model: nn.Module, required: bool = True) -> list[ExpertLayer]:
    """Return the layers of a model that hold experts, in the order of its modules. ``required`` False: there may be none.

    Raises:
        zeropp.ConfigError: the model has no plan for its experts, or one that does not fit it, or adapters on its experts.
    """
    layers = []
    modules = dict(model.named_modules())  # of a stage of a pipeline: under the names of the whole model
    for prefix, plan in _plans(model):
        for name, module in modules[prefix].named_modules():
            if _style(plan, name) == DISPATCHES:
                path = f"{prefix}.{name}" if prefix else name
                layers.append(_layer(plan, name, path, module, modules[path.rpartition(".")[0]]))
    if required and not layers:
        raise no_experts(model)
    return layers


def no_experts(model: nn.Module) -> ConfigError:
    """Return the error for a model without a layer that holds experts."""
    return ConfigError(
        f"Config.experts: {type(model).__name__} has no module that its ep_plan names as '{DISPATCHES}', so that there are no experts to "
        "divide among ranks; leave Config.experts at None, which partitions experts as any parameter is"
    )


def _plans(model: nn.Module) -> list[tuple[str, Mapping[str, str]]]:
    """Return (name, plan) of the outermost modules that have a plan; the plan's names begin there."""
    found: list[tuple[str, Mapping[str, str]]] = []
    for name, module in model.named_modules():
        plan = (
            getattr(module, "ep_plan", None) if hasattr(type(module), "ep_plan") else None
        )  # wrappers hand on what is inside
        inside = any(not outer or name.startswith(f"{outer}.") for outer, _ in found)
        if isinstance(plan, Mapping) and plan and not inside:
            found.append((name, plan))
    return found


def _style(plan: Mapping[str, str], name: str) -> str | None:
    """Return the style that a plan gives to a module or parameter; layers stand in plans with ``*`` for their number."""
    return plan.get(name) or plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))


def _layer(plan: Mapping[str, str], name: str, path: str, module: nn.Module, block: nn.Module) -> ExpertLayer:
    keys = tuple(key for key in module._parameters if _style(plan, f"{name}.{key}") == HOLDS)
    if not keys and hasattr(module, "base_layer"):
        raise ConfigError(
            f"Config.experts: '{path}' is a {type(module).__name__} around experts, as PEFT's target_parameters make, which is not supported; "
            "leave Config.experts at None, or train other modules (target_modules)"
        )
    sizes = {key: module._parameters[key].shape[0] for key in keys}  # type: ignore[union-attr]
    experts = getattr(module, "num_experts", None)
    if not keys or set(sizes.values()) != {experts}:
        raise ConfigError(
            f"Config.experts: '{path}' has num_experts {experts}, and parameters with {sizes or 'no'} experts; wanted parameters whose first "
            f"dimension is the experts, named as '{HOLDS}' in the model's ep_plan"
        )
    return ExpertLayer(path, module, keys, next(iter(sizes.values())), block)


# -- forward -----------------------------------------------------------------------------------------------------------


class ExpertsForward:
    """The forward of a module of which this rank holds some experts: rows come from all ranks, and their outputs go back.

    Args:
        layer: the module.
        exchange: of the ranks that hold different experts.
        local: the parameters of this rank's experts, by name.
        slices: of an expert, which are experts here: a token that chose one chose all its slices, with the same weight.
        chunks: pieces in which tokens go to other hosts.
        sharers: the ranks that hold the same tokens, each of which routes some of them.
    """

    def __init__(
        self, layer: ExpertLayer, exchange: Exchange, local: Mapping[str, nn.Parameter], slices: int = 1,
        chunks: int | str = "auto", sharers: Sharers | None = None,
    ) -> None:  # fmt: skip
        self._module = weakref.ref(layer.module)
        self._inner: Callable[..., Tensor] = layer.module.__dict__.get("forward") or type(layer.module).forward
        self._bound = "forward" in layer.module.__dict__
        self._signature = inspect.signature(layer.module.forward)
        self.local, self.slices, self.chunks = dict(local), slices, chunks
        self.experts = layer.experts * slices
        self.exchange, self.layer = exchange, exchange.layer(layer.name)
        self.sharers = sharers
        self.beside: SharedExperts | None = None
        """What is computed while tokens are on their way to other hosts; None: nothing."""
        self.demand: DemandLayer | None = None
        """Where experts are read from without gradients; None: out of the parameters."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden, index, weights = self._signature.bind(*args, **kwargs).args
        return once(self.sharers, self._routed, hidden, index, weights)

    def _routed(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        module = self._module()
        assert module is not None
        if self.slices > 1:
            index = (index.unsqueeze(-1) * self.slices + torch.arange(self.slices, device=index.device)).flatten(1)
            weights = weights.repeat_interleave(self.slices, 1)
        with local_experts(module, self.experts // self.exchange.ranks, self.local):
            y = through(
                self.exchange,
                self.layer,
                functools.partial(self._outputs, module),
                hidden,
                index,
                weights,
                self.experts,
                self.chunks,
                None if self.beside is None else self.beside.compute_ahead,
            )
            return y.to(hidden.dtype)

    def _outputs(self, module: nn.Module, rows: Tensor, ends: Tensor) -> Tensor:
        if self.demand is None or torch.is_grad_enabled():
            return outputs_of(module, self._compute, rows, ends, self.exchange)
        outputs = self.exchange.memory_like(rows.shape[0], rows.shape[1], rows)
        plain = not isinstance(module, Experts) and _is_gated_silu(module, rows)
        for values, part in self.demand.each(ends):
            if plain:  # for few rows what the module does around its products takes longer than they
                swiglu_expert(rows[part], values["gate_up_proj"][0], values["down_proj"][0], outputs[part])
                continue
            with local_experts(module, 1, values):
                end = torch.full((1,), part.stop - part.start, dtype=torch.int32, device="cpu")
                outputs[part] = outputs_of(module, self._compute, rows[part], end)
        return outputs

    def _compute(self, *given: Tensor) -> Tensor:
        return self._inner(*given) if self._bound else self._inner(self._module(), *given)


@contextlib.contextmanager
def local_experts(module: Any, experts: int, local: Mapping[str, Tensor]) -> Iterator[None]:
    """Let a module see this rank's experts alone."""
    whole = {key: module._parameters[key] for key in local}
    count = module.num_experts
    module._parameters.update(local)
    module.num_experts = experts
    try:
        yield
    finally:
        module._parameters.update(whole)
        module.num_experts = count


def outputs_of(
    module: nn.Module, compute: Callable[..., Tensor], rows: Tensor, ends: Tensor, exchange: Exchange | None = None
) -> Tensor:
    """Return the outputs of a module's experts, (N, H), for rows that are grouped by expert; differentiable.

    Args:
        module: this rank's experts; those parameters are in it now.
        compute: its forward.
        rows: (N, H).
        ends: (E,) int32: the row at which each expert's rows end; in memory of the host, or where rows are.
        exchange: which takes the outputs back to the tokens.
    """
    count = rows.shape[0]
    if torch.compiler.is_compiling():  # a graph cannot ask whether there are rows, so the last expert has one more
        rows, ends = torch.cat((rows, rows.new_zeros(1, rows.shape[1]))), torch.cat((ends[:-1], ends[-1:] + 1))
    elif not count:  # the gradients of experts without a token are zeros on this rank too, as in one process
        rows, ends = rows.new_zeros(1, rows.shape[1]), torch.ones_like(ends)
    if isinstance(module, Experts):
        return module.grouped(rows, ends)[:count]
    ends = ends.to(rows.device, non_blocking=True)
    if getattr(getattr(module, "config", None), "_experts_implementation", None) == NAME:
        outputs = grouped(module, rows, ends, exchange)
    else:
        outputs = compute(rows, _experts_of(rows, ends).unsqueeze(1), rows.new_ones(rows.shape[0], 1))
    return outputs[:count]


def _experts_of(rows: Tensor, ends: Tensor) -> Tensor:
    """Return the expert of each row, (N,) int64; ``ends`` are the rows at which experts end."""
    return torch.searchsorted(ends.long(), torch.arange(rows.shape[0], device=rows.device), right=True)


def grouped(module: nn.Module, rows: Tensor, ends: Tensor, exchange: Exchange | None = None) -> Tensor:
    """Return what :func:`outputs_of` does, by a product over all experts, of a module with the flags of transformers'
    ``use_experts_implementation``; gated experts with SiLU go through one expert after the other."""
    found: Any = module
    if rows.is_cpu and _is_gated_silu(found, rows):
        return swiglu_experts(rows, ends, found.gate_up_proj, found.down_proj, exchange=exchange)
    kind = "gate_up_proj" if found.has_gate else "up_proj"
    inner = _product(found, kind, rows, ends)
    outputs = _product(found, "down_proj", found._apply_gate(inner) if found.has_gate else found.act_fn(inner), ends)
    return found.post_expert_norm(outputs) if found.has_post_expert_norm else outputs


def _is_gated_silu(module: Any, rows: Tensor) -> bool:
    """Return True for experts silu(x G) * (x U) D, without biases and with nothing behind them."""
    if torch.compiler.is_compiling() or not module.has_gate:
        return False
    if module.has_bias or module.is_transposed or not module.is_concatenated or module.has_post_expert_norm:
        return False
    plain = getattr(type(module)._apply_gate, "__name__", "") == "_default_apply_gate"
    same = {rows.dtype} == {module.gate_up_proj.dtype, module.down_proj.dtype}
    return plain and same and type(module.act_fn).__name__ in ("SiLU", "SiLUActivation")


def _product(module: Any, key: str, rows: Tensor, ends: Tensor) -> Tensor:
    weight: Tensor = getattr(module, key)
    product = _grouped_mm(rows.to(weight.dtype), weight if module.is_transposed else weight.mT, ends)
    return product + getattr(module, f"{key}_bias")[_experts_of(rows, ends)] if module.has_bias else product


def _grouped_mm(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    # torch's compiler knows the shapes of grouped_mm in bf16 alone.
    if torch.compiler.is_compiling() and weight.dtype != torch.bfloat16:
        result: Tensor = torch.ops.transformers.grouped_mm_fallback(rows, weight, ends)
        return result
    return nn.functional.grouped_mm(rows, weight, offs=ends)


# -- transformers' registries ------------------------------------------------------------------------------------------


def experts_forward(module: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Compute all experts of a module on this rank: ``experts_implementation="zeropp"``."""
    count: Any = module.num_experts
    rows, plan = dispatch(hidden, index, count)
    return combine(grouped(module, rows, plan.ends), plan, weights).to(hidden.dtype)


_of_comm: weakref.WeakKeyDictionary[Any, Exchange] = weakref.WeakKeyDictionary()
"""By process group: its exchange under transformers' expert parallelism."""


class EpImplementation:
    """zeropp's exchange under transformers' own expert parallelism: ``DistributedConfig(ep_implementation="zeropp")``.

    Args:
        experts: a module with this rank's experts.
        ep_mesh: of the ranks that hold different experts.
        tp_mesh: of the ranks that hold the same batch, each of which routes some of its tokens.
    """

    def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        self._module, self._forward = weakref.ref(experts), experts.forward
        group = ep_mesh.get_group()
        if group not in _of_comm:
            _of_comm[group] = Exchange(group)
        self._exchange = _of_comm[group]
        self._sharers = None if tp_mesh.size() == 1 else Sharers(tp_mesh)
        if self._sharers is not None and self._exchange.ranks % self._sharers.ranks:
            raise ConfigError(
                f'ep_implementation="{NAME}": {self._exchange.ranks} ranks with different experts (ep_size), and {self._sharers.ranks} with the same '
                "batch (tp_size); wanted a multiple"
            )
        self._layer = self._exchange.layer(type(experts).__name__)

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return once(self._sharers, self._routed, hidden, index, weights)

    def _routed(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        module: Any = self._module()
        experts = module.num_experts * self._exchange.ranks
        y = through(
            self._exchange, self._layer, lambda rows, ends: outputs_of(module, self._forward, rows, ends, self._exchange),
            hidden, index, weights, experts,
        )  # fmt: skip
        return y.to(hidden.dtype)
