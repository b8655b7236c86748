# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts as a layer (Shazeer et al. 2017; GShard, Lepikhin et al. 2021; DeepSpeed-MoE, Rajbhandari et al. 2022).

    y_t = sum_j w_tj Expert_{e_tj}(x_t)                   routed; gate.py chooses e and w
        + Shared(x_t)                                      with shared= (DeepSeekMoE)
    y_t = a_t routed_t + (1 - a_t) Residual(x_t)           with residual= (PR-MoE, section 4.1), (a, 1 - a) = softmax(C x_t)

The parameters of all experts lie in tensors of E entries, as those of transformers' experts do, so that one is a range of a tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from zeropp.config.values import whole, wrong
from zeropp.errors import ConfigError, what_it_is
from zeropp.moe.gate import Gate, Router, Routes
from zeropp.moe.products import swiglu_experts
from zeropp.ops.checks import FLOATS
from zeropp.ops.moe import moe_combine, moe_dispatch, moe_plan, swiglu


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))`` without biases (Shazeer 2020), gate and up in one matrix (2I, H)."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(2 * intermediate, hidden))
        self.down_proj = nn.Parameter(torch.empty(hidden, intermediate))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.kaiming_uniform_(parameter, a=5**0.5)  # as torch.nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        both = F.linear(x, self.gate_up_proj)
        if both.device.type == "cpu" and both.dtype in FLOATS:
            return F.linear(swiglu(both), self.down_proj)
        gate, up = both.chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down_proj)


class Experts(nn.Module):
    """E experts of one class; every parameter and buffer of theirs is one tensor of E entries, named with "_" for ".".

    Args:
        expert: a module, of which every expert is a copy with the same values, or a callable that makes one, called E times.
        experts: E.
    """

    def __init__(self, expert: nn.Module | Callable[[], nn.Module], experts: int) -> None:
        super().__init__()
        made = [expert] * experts if isinstance(expert, nn.Module) else [expert() for _ in range(experts)]
        for one in made:
            if not isinstance(one, nn.Module):
                raise ConfigError(f"MoE.expert: it made {what_it_is(one)}; wanted a torch.nn.Module")
        self.num_experts = experts
        # In a tuple, because the template is no child; without memory, because each call replaces all of its tensors.
        self._template = (copy.deepcopy(made[0]).to("meta"),)
        self._names = {name.replace(".", "_"): name for name, _ in self._tensors(made[0])}
        if not dict(made[0].named_parameters()) or len(self._names) < len(self._tensors(made[0])):
            raise ConfigError(
                f"MoE.expert: {type(made[0]).__name__} has no parameters, or two with one name but for dots"
            )
        for own, name in self._names.items():
            parts = [dict(self._tensors(one))[name] for one in made]
            stacked = torch.stack([part.detach() for part in parts])
            if isinstance(parts[0], nn.Parameter):
                self.register_parameter(own, nn.Parameter(stacked, requires_grad=parts[0].requires_grad))
            else:
                self.register_buffer(own, stacked)

    @staticmethod
    def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
        return [*module.named_parameters(), *module.named_buffers()]

    def reset_parameters(self) -> None:
        """Draw every expert's values by the ``reset_parameters`` of its modules."""
        device = getattr(self, next(iter(self._names))).device
        one = copy.deepcopy(self._template[0]).to_empty(device=device)
        for index in range(self.num_experts):
            for module in one.modules():
                if next(module.parameters(recurse=False), None) is not None:
                    if not hasattr(module, "reset_parameters"):
                        raise ConfigError(
                            f"MoE.expert: {type(module).__name__} has no reset_parameters() to draw values"
                        )
                    module.reset_parameters()  # type: ignore[operator]
            with torch.no_grad():
                for own, name in self._names.items():
                    if own in self._parameters:
                        getattr(self, own)[index] = one.get_parameter(name)

    def extra_repr(self) -> str:
        return f"{self.num_experts} of {type(self._template[0]).__name__}"

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return (T, H): the weighted sum of what the chosen experts make of each token.

        Args:
            hidden_states: (T, H).
            top_k_index: (T, k) int: experts; -1: dropped.
            top_k_weights: (T, k) floating.
        """
        count = self.num_experts
        chosen = top_k_index.to(torch.int32)
        # What is dropped goes to one more, which nobody computes.
        plan = moe_plan(chosen.where(chosen >= 0, count), count + 1)
        rows = moe_dispatch(hidden_states, plan)
        ends = plan.kept[:count].cumsum(0)
        out = torch.cat([self.grouped(rows, ends), rows.new_zeros(int(plan.kept[count]), rows.shape[1])])
        return moe_combine(out, plan, top_k_weights.float()).to(hidden_states.dtype)

    def grouped(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Return what the experts make of their rows, (N, H); those of expert e end at row ends[e]; N = ends[-1]."""
        stacks = {name: getattr(self, own).unbind(0) for own, name in self._names.items()}
        parts = [0, *ends.tolist()]
        if self._are_fused(rows):
            both: Any = (self.gate_up_proj, self.down_proj)
            return swiglu_experts(rows[: parts[-1]], ends, *both)
        made = [
            self._one(rows[parts[e] : parts[e + 1]], {name: stack[e] for name, stack in stacks.items()})
            for e in range(len(ends))
        ]
        return torch.cat(made)

    def _are_fused(self, rows: Tensor) -> bool:
        """Return whether these are SwiGLU experts of the rows' type in host memory, whose products need no memory between them."""
        return (
            isinstance(self._template[0], SwiGLU)
            and rows.device.type == "cpu"
            and rows.dtype == self.gate_up_proj.dtype
            and not torch.is_autocast_enabled("cpu")
        )

    def _one(self, rows: Tensor, values: dict[str, Tensor]) -> Tensor:
        if not len(rows):
            return rows
        out = functional_call(self._template[0], values, (rows,))
        out = out[0] if isinstance(out, tuple) else out
        if not isinstance(out, Tensor) or out.shape != rows.shape:
            seen = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else what_it_is(out)
            raise ConfigError(
                f"MoE.expert: {type(self._template[0]).__name__} made {seen} of tokens of shape {tuple(rows.shape)}; wanted their shape"
            )
        return out

    def train(self, mode: bool = True) -> Experts:
        self._template[0].train(mode)
        return super().train(mode)

    @torch.no_grad()
    def select(self, kept: Tensor) -> None:
        """Keep only the experts with these numbers, in their order."""
        for own in self._names:
            old = getattr(self, own)
            new = old[kept.to(old.device)].clone()
            setattr(self, own, nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new)
        self.num_experts = len(kept)


class MoE(nn.Module):
    """A layer of E experts, of which each token goes to k; no token is dropped, unless the gate has a capacity.

    Args:
        hidden: width H of a token.
        experts: E, 1 to 1023.
        k: experts a token, 1 to min(E, 64).
        intermediate: width of the experts, which are SwiGLU; default 4 H. Not with ``expert``.
        expert: a module that maps (N, H) to (N, H), of which every expert is a copy with the same values, or a callable that makes
            one for each expert. It sees the rows of one expert alone, in any number above 0.
        gate: how tokens choose experts; see :class:`Gate`.
        shared: a module that every token passes, whose output is added (DeepSeekMoE, Dai et al. 2024), or the width of a SwiGLU.
        residual: the same, but mixed with the experts' output by two learned weights that sum to 1 (PR-MoE, Rajbhandari et al. 2022,
            section 4.1).

    Raises:
        zeropp.ConfigError: a value that cannot be, or ``expert`` and ``intermediate`` together.
    """

    def __init__(
        self,
        hidden: int,
        experts: int,
        k: int = 1,
        *,
        intermediate: int | None = None,
        expert: nn.Module | Callable[[], nn.Module] | None = None,
        gate: Gate = Gate(),  # noqa: B008  frozen
        shared: nn.Module | int | None = None,
        residual: nn.Module | int | None = None,
    ) -> None:
        super().__init__()
        whole("MoE.hidden", hidden, 1, "width of a token")
        if not isinstance(gate, Gate):
            raise wrong("MoE.gate", gate, "a zeropp.moe.Gate")
        if expert is not None and intermediate is not None:
            raise wrong("MoE.intermediate", intermediate, "None beside expert=, which has a width of its own")
        if expert is not None and not callable(expert):
            raise wrong("MoE.expert", expert, "a torch.nn.Module, or a callable that makes one")
        if intermediate is not None:
            whole("MoE.intermediate", intermediate, 1, "width of an expert")
        self.hidden = hidden
        self.gate = Router(hidden, experts, k, gate)
        self.experts = Experts(expert or (lambda: SwiGLU(hidden, intermediate or 4 * hidden)), experts)
        self.shared = _branch("MoE.shared", shared, hidden)
        self.residual = _branch("MoE.residual", residual, hidden)
        self.coefficient = None if residual is None else nn.Linear(hidden, 2)
        self._routes: Routes | None = None

    @property
    def ep_plan(self) -> dict[str, str]:
        """Which modules and parameters ``Config(experts=)`` divides among ranks, in transformers' terms."""
        parameters = {f"experts.{name}": "grouped_gemm" for name, _ in self.experts.named_parameters()}
        return {"experts": "ep_dispatch_experts", **parameters}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_routes": None}  # losses are part of a graph, which cannot be copied

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return (..., H) of x's dtype.

        Args:
            x: (..., H), fp32, bf16 or fp16.
            mask: (...) bool or integers: where it is 0, such as at padding, a token goes to no expert, and counts neither for a loss
                nor for a capacity; its routed part is 0. ``shared`` and ``residual`` compute it.

        Raises:
            ValueError, TypeError: a mask of another shape, type or device, or tokens of another width.
        """
        if x.shape[-1] != self.hidden:
            raise ValueError(f"MoE: x has shape {tuple(x.shape)}, wanted (..., {self.hidden})")
        tokens = x.reshape(-1, self.hidden)
        if mask is None:
            routed = self._routed(tokens)
        else:
            _check_mask(mask, x)
            used = mask.reshape(-1).nonzero().squeeze(1)
            routed = torch.zeros_like(tokens).index_copy(0, used, self._routed(tokens[used]))
        y = routed.view(x.shape)
        if self.residual is not None and self.coefficient is not None:
            share = F.softmax(self.coefficient(x), dim=-1)
            y = y * share[..., :1] + _first(self.residual(x)) * share[..., 1:]
        return y if self.shared is None else y + _first(self.shared(x))

    def _routed(self, tokens: Tensor) -> Tensor:
        routes = self._routes = self.gate(tokens)
        out: Tensor = self.experts(tokens, routes.chosen, routes.weights)
        return out

    @property
    def balance_loss(self) -> Tensor:
        """Scalar fp32 of the last forward, differentiable: least where all experts get as many tokens. Add a hundredth of it."""
        return self._last().balance_loss

    @property
    def z_loss(self) -> Tensor:
        """Scalar fp32 of the last forward, differentiable: keeps the logits small. Add a thousandth of it (ST-MoE, section 3.3)."""
        return self._last().z_loss

    @property
    def counts(self) -> Tensor:
        """(E,) int64 of the last forward: assignments of each expert, before any was dropped."""
        return self._last().counts

    def _last(self) -> Routes:
        if self._routes is None:
            raise RuntimeError(
                "MoE: there was no forward yet, so there are no losses; read them after the model's forward"
            )
        return self._routes


def _branch(path: str, given: nn.Module | int | None, hidden: int) -> nn.Module | None:
    if given is None or isinstance(given, nn.Module):
        return given
    whole(path, given, 1, "width of a SwiGLU, or a torch.nn.Module")
    return SwiGLU(hidden, given)


def _first(output: Any) -> Tensor:
    value: Tensor = output[0] if isinstance(output, tuple) else output
    return value


def _check_mask(mask: Tensor, x: Tensor) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"MoE: mask is {what_it_is(mask)}, wanted a tensor")
    if mask.shape != x.shape[:-1] or mask.is_floating_point() or mask.device != x.device:
        raise ValueError(
            f"MoE: mask is {mask.dtype} {tuple(mask.shape)} on {mask.device}, wanted bool or integers {tuple(x.shape[:-1])} on {x.device}"
        )
