# SPDX-License-Identifier: Apache-2.0
"""``deepspeed.moe.layer.MoE`` and ``deepspeed.moe.utils`` over :class:`zeropp.moe.MoE`.

The experts, the gate and the losses are those of zeropp.moe with the options of DeepSpeed 0.19.8's gates. Three things differ: a
second expert is drawn, and tokens are dropped at random, while training alone; tokens that ``used_token`` excludes count for no loss;
and a batch may have fewer tokens than ``min_capacity``.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zeropp.config.values import whole, wrong
from zeropp.moe import gate as gates
from zeropp.moe import layer as layers

_NOISE: dict[str | None, Any] = {None: None, "None": None, "Jitter": "jitter", "RSample": "gumbel"}


class MoE(nn.Module):
    """DeepSpeed's layer of experts: ``forward(hidden_states, used_token=None)`` returns (output, l_aux, exp_counts).

    ``ep_size`` names the group of its parameters. Which ranks hold which experts is the configuration's choice; without one they are
    partitioned as any parameters are, with the same gradients. A state dict of DeepSpeed's layer with ``ep_size`` 1 can be loaded.

    Raises:
        zeropp.ConfigError: an option that cannot be, or expert tensor parallelism.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        _check(num_experts, ep_size, noisy_gate_policy, enable_expert_tensor_parallelism)
        if use_tutel:
            warnings.warn(
                "deepspeed.moe.layer.MoE: use_tutel has no meaning here; zeropp's kernels route the tokens",
                stacklevel=2,
            )
        factors = (capacity_factor, eval_capacity_factor) if drop_tokens else (None, None)
        noise = _NOISE[noisy_gate_policy]
        gate = gates.Gate(
            capacity=factors[0],
            eval_capacity=factors[1],
            least=max(1, min_capacity),
            drop=_drop(k, use_rts) if drop_tokens else "order",
            noise=noise if k == 1 or noise == "jitter" else None,  # theirs samples top-1's logits alone
            second="sample" if k == 2 and top2_2nd_expert_sampling else "best",
            balance="gshard" if k == 2 else "switch",
        )
        self.use_residual, self.num_experts, self.ep_size = bool(use_residual), num_experts, ep_size
        self.num_local_experts, self.expert_group_name = num_experts // ep_size, f"ep_size_{ep_size}"
        self.deepspeed_moe = layers.MoE(
            hidden_size, num_experts, k, expert=expert, gate=gate, residual=expert if use_residual else None
        )
        for parameter in self.deepspeed_moe.experts.parameters():
            parameter.allreduce, parameter.group_name = False, self.expert_group_name  # type: ignore[attr-defined]
        self._register_load_state_dict_pre_hook(self._read_theirs)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Nothing to do: zeropp makes the groups of ranks in ``prepare``."""

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return (output, l_aux, exp_counts) of tokens (..., H); ``used_token``, of as many elements as tokens, is 0 for those to ignore."""
        mask = None if used_token is None else used_token.reshape(hidden_states.shape[:-1]).bool()
        output = self.deepspeed_moe(hidden_states, mask)
        return output, self.deepspeed_moe.balance_loss, self.deepspeed_moe.counts

    def _read_theirs(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Turn the entries of DeepSpeed's layer into ours: experts one by one into tensors of all of them."""
        for theirs, ours in (
            ("mlp.", "residual."),
            ("coefficient.", "coefficient."),
            ("deepspeed_moe.gate.wg.", "gate."),
        ):
            for name in [name for name in state if name.startswith(f"{prefix}{theirs}")]:
                rest = name.removeprefix(f"{prefix}{theirs}")
                state[f"{prefix}deepspeed_moe.{ours}{rest}"] = state.pop(name)
        each = f"{prefix}deepspeed_moe.experts.deepspeed_experts."
        parts = sorted({name.removeprefix(f"{each}0.") for name in state if name.startswith(f"{each}0.")})
        for part in parts:
            values = [state.pop(f"{each}{e}.{part}") for e in range(self.num_experts) if f"{each}{e}.{part}" in state]
            state[f"{prefix}deepspeed_moe.experts.{part.replace('.', '_')}"] = torch.stack(values)


def _check(num_experts: int, ep_size: int, noisy_gate_policy: str | None, expert_tensor_parallelism: bool) -> None:
    whole("MoE.num_experts", num_experts, 1, "experts")
    whole("MoE.ep_size", ep_size, 1, "ranks that hold different experts")
    if num_experts % ep_size:
        raise wrong("MoE.ep_size", ep_size, f"a divisor of num_experts = {num_experts}")
    if noisy_gate_policy not in _NOISE:
        raise wrong("MoE.noisy_gate_policy", noisy_gate_policy, "None, 'Jitter' or 'RSample'")
    if expert_tensor_parallelism:
        raise wrong("MoE.enable_expert_tensor_parallelism", True, "False")


def _drop(k: int, use_rts: bool) -> Any:
    """Return what DeepSpeed's gate of so many choices drops."""
    return "score" if k > 2 else "random" if k == 1 and use_rts else "order"


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return whether a model has a layer of experts, and how many experts the first one has."""
    found = next((one for one in m.modules() if isinstance(one, MoE)), None)
    return found is not None, 0 if found is None else found.num_experts


def is_moe_param(param: Any) -> bool:
    """True for a parameter that is marked as an expert's own."""
    return not getattr(param, "allreduce", True)


def is_moe_param_group(param_group: Mapping[str, Any]) -> bool:
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(params: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the parameters that all tokens share, and those of experts."""
    return [one for one in params if not is_moe_param(one)], [one for one in params if is_moe_param(one)]


def split_params_grads_into_shared_and_expert_params(group: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients of the parameters that all tokens share, and those of experts, each of its parameter's type.

    Parameters without a gradient are left out. A prepared model refuses the read of a gradient that is partitioned, and names what to
    call in its place.
    """
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for one in group:
        if (gradient := one.grad) is not None:
            found[is_moe_param(one)].append(gradient.to(one.dtype))
    return found


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Any, max_group_size: int | float | None = 178956971
) -> list[Any]:
    """Return the groups, each without its experts' parameters, and then groups of those alone (``moe`` is True, ``name`` their group).

    Args:
        param_groups: a group, or several; one that has experts' parameters needs a ``name``.
        max_group_size: parameters of an experts' group, in elements; None: any.
    """
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    found: list[Any] = []
    for group in groups:
        group["params"], experts = split_params_into_shared_and_expert_params(list(group["params"]))
        for name in dict.fromkeys(one.group_name for one in experts):
            mine = [one for one in experts if one.group_name == name]
            found += [{**group, "name": name, "moe": True, "params": part} for part in _parts(mine, max_group_size)]
    return groups + found


def _parts(params: list[Any], most: int | float | None) -> list[list[Any]]:
    """Return the parameters in lists of at most ``most`` elements; a larger one is a list of its own."""
    parts: list[list[Any]] = [[]]
    size = 0
    for one in params:
        if parts[-1] and most is not None and size + one.numel() > most:
            parts.append([])
            size = 0
        parts[-1].append(one)
        size += one.numel()
    return parts


def configure_moe_param_groups(model_parameters: list[Any]) -> list[Any]:
    """Return groups for an optimizer, of a list of parameters or of groups; groups that know experts already are left as they are."""
    if model_parameters and isinstance(model_parameters[0], nn.Parameter):
        return split_params_into_different_moe_groups_for_optimizer(
            {"params": model_parameters, "name": "dense-params"}
        )
    if any("moe" in group for group in model_parameters):
        return model_parameters
    return split_params_into_different_moe_groups_for_optimizer(model_parameters)
