# SPDX-License-Identifier: Apache-2.0
"""Experts cut or joined after training (Z-code: Kim et al. 2021, "Scalable and Efficient MoE Training for Multitask Multilingual
Models", sections 4.3 and 4.4).

    prune       of every layer's E experts those with the most tokens stay; their rows of the router, too
    aggregate   the experts of several models of one architecture side by side; what they share is their mean

The results are plain models of their class, so ``save_pretrained`` and ``from_pretrained`` work.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from zeropp.config.values import whole, wrong
from zeropp.errors import ConfigError
from zeropp.moe.balance import experts_of
from zeropp.moe.plain import on_meta, refuse_prepared, take_rest, text_config

M = TypeVar("M", bound=nn.Module)


def prune(model: M, keep: int, load: Mapping[str, Tensor]) -> M:
    """Return a model of ``keep`` experts a layer, those that were given the most tokens; the model stays as it is.

    Args:
        model: a transformers' model whose experts are tensors of E entries (all that :func:`zeropp.moe.load` counts), not prepared.
        keep: experts of every layer, from the experts a token (k) to E. In a model with groups of experts (DeepSeek-V3) every group
            keeps as many as the others.
        load: tokens by layer and expert, (E,) for every name, as :func:`zeropp.moe.load` returns them.

    Raises:
        zeropp.ConfigError: a ``keep`` that cannot be, a load that does not fit the model, or a model of another kind.
    """
    layout = _Layout(model, "zeropp.moe.prune")
    whole("zeropp.moe.prune: keep", keep, 1, f"experts of a layer, of {layout.experts}")
    if not layout.k <= keep <= layout.experts:
        raise wrong(
            "zeropp.moe.prune: keep", keep, f"{layout.k} (experts a token) to {layout.experts} (experts of a layer)"
        )
    if keep % layout.groups or (layout.groups > 1 and keep // layout.groups * layout.open_groups < layout.k):
        raise wrong(
            "zeropp.moe.prune: keep",
            keep,
            f"a multiple of {layout.groups}, the groups of experts, with k in the open ones",
        )
    kept = {name: _most_used(layout, name, load, keep) for name in layout.layers}
    values = {name: layout.cut(name, value, kept) for name, value in model.state_dict().items()}
    return layout.build(model, keep, layout.groups, values)


def aggregate(models: Sequence[M]) -> M:
    """Return a model that has the experts of all models, layer by layer and in their order; the models stay as they are.

    Routers are joined as the experts are, and every other floating tensor is the mean of the models' (computed in fp64). A group of
    experts (DeepSeek-V3) stays a group. The result is a start for training on, not a model of the same function: a token still goes
    to k experts, of all that there are.

    Args:
        models: two or more of one transformers' class and with the same shapes, not prepared.

    Raises:
        zeropp.ConfigError: fewer than two models, or models that do not fit together.
    """
    models = list(models)
    if len(models) < 2:
        raise ConfigError(f"zeropp.moe.aggregate: {len(models)} models given; wanted at least two")
    layout = _Layout(models[0], "zeropp.moe.aggregate")
    states = [model.state_dict() for model in models]
    for number, (model, state) in enumerate(zip(models, states, strict=True)):
        refuse_prepared(model, "zeropp.moe.aggregate")
        _check_alike(f"zeropp.moe.aggregate: model {number}", models[0], states[0], model, state)
    values = {name: layout.join(name, [state[name] for state in states]) for name in states[0]}
    groups = layout.groups * len(models) if layout.groups > 1 else 1
    return layout.build(models[0], layout.experts * len(models), groups, values)


def _check_alike(
    what: str, first: nn.Module, wanted: Mapping[str, Tensor], model: nn.Module, state: Mapping[str, Tensor]
) -> None:
    if type(model) is not type(first) or state.keys() != wanted.keys():
        raise ConfigError(
            f"{what} is a {type(model).__name__} with other tensors; wanted a {type(first).__name__} as model 0"
        )
    for name, value in state.items():
        if value.shape != wanted[name].shape:
            raise ConfigError(
                f"{what} has '{name}' of shape {tuple(value.shape)}; wanted {tuple(wanted[name].shape)} as model 0"
            )


class _Layout:
    """Which tensors of a model have an entry for each expert, and which fields of its config say how many there are."""

    def __init__(self, model: nn.Module, what: str) -> None:
        refuse_prepared(model, what)
        self.what = what
        self.layers = list(experts_of(model))
        self.config = text_config(model)
        if not self.layers or self.config is None:
            raise ConfigError(
                f"{what}: {type(model).__name__} is no transformers' model with experts that zeropp.moe.load counts"
            )
        counts = {int(model.get_submodule(name).num_experts) for name in self.layers}  # type: ignore[arg-type]
        if len(counts) > 1:
            raise ConfigError(
                f"{what}: the layers have different numbers of experts {sorted(counts)}; wanted one number"
            )
        self.experts = counts.pop()
        self.k = int(self.config.num_experts_per_tok)
        self.groups, self.open_groups = (
            int(getattr(self.config, "n_group", 1) or 1),
            int(getattr(self.config, "topk_group", 1) or 1),
        )
        self.fields = [
            name for name, value in vars(self.config).items()
            if "experts" in name and value == self.experts and "shared" not in name and "per_tok" not in name
        ]  # fmt: skip
        small = on_meta(model, self._with(model.config, self.experts + self.groups, self.groups)).state_dict()
        self.places = self._places(model.state_dict(), small)

    def _with(self, config: Any, experts: int, groups: int) -> Any:
        made = copy.deepcopy(config)
        text = made.get_text_config()
        for name in self.fields:
            setattr(text, name, experts)
        if self.groups != groups:
            text.n_group = groups
        return made

    def _places(self, state: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, tuple[str, int]]:
        """Return for every tensor with entries of experts its layer and the dimension: the one that grows with their number."""
        found = {}
        for name, value in state.items():
            if name not in other or other[name].shape == value.shape:
                continue
            dims = [d for d, (a, b) in enumerate(zip(value.shape, other[name].shape, strict=True)) if a != b]
            found[name] = (self._layer_of(name), dims[0])
            if len(dims) > 1 or value.shape[dims[0]] != self.experts:
                raise ConfigError(
                    f"{self.what}: '{name}' of shape {tuple(value.shape)} has no entry for each of {self.experts} experts"
                )
        missing = [name for name in self.layers if not any(one.startswith(f"{name}.") for one in found)]
        if missing:
            raise ConfigError(f"{self.what}: no field of the config sets the number of experts of '{missing[0]}'")
        return found

    def _layer_of(self, name: str) -> str:
        """Return the layer whose experts or router a tensor belongs to: the one with the longest common path."""
        parts = name.split(".")

        def common(layer: str) -> int:
            return next((i for i, (a, b) in enumerate(zip(parts, layer.split("."))) if a != b), len(layer))  # noqa: B905

        return max(self.layers, key=common)

    def cut(self, name: str, value: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        """Return the entries of the kept experts; a copy of what has none."""
        if name not in self.places:
            return value.clone()
        layer, dim = self.places[name]
        return value.index_select(dim, kept[layer].to(value.device))

    def join(self, name: str, values: list[Tensor]) -> Tensor:
        """Return all models' entries of experts, or the mean of what they share."""
        if name in self.places:
            return torch.cat(values, self.places[name][1])
        if not values[0].is_floating_point():
            return values[0].clone()
        return torch.stack([value.double() for value in values]).mean(0).to(values[0].dtype)

    def build(self, model: M, experts: int, groups: int, values: dict[str, Tensor]) -> M:
        """Return a model of the same class with another number of experts and these values."""
        made: Any = on_meta(model, self._with(model.config, experts, groups))
        made.load_state_dict(values, assign=True)
        made.tie_weights()
        take_rest(made, model)
        return made.train(model.training)  # type: ignore[no-any-return]


def _most_used(layout: _Layout, name: str, counts: Mapping[str, Tensor], keep: int) -> Tensor:
    """Return the numbers of the experts that stay, ascending; ties to the lower number."""
    what = f"zeropp.moe.prune: load['{name}']"
    if name not in counts:
        raise ConfigError(f"{what} is missing; wanted what zeropp.moe.load(model) returns")
    tokens = torch.as_tensor(counts[name])
    if tokens.shape != (layout.experts,):
        raise ConfigError(f"{what} has shape {tuple(tokens.shape)}; wanted ({layout.experts},)")
    size, most = layout.experts // layout.groups, keep // layout.groups
    order = tokens.view(layout.groups, size).argsort(dim=1, descending=True, stable=True)[:, :most]
    numbers: Tensor = order + size * torch.arange(layout.groups, device=order.device)[:, None]
    return numbers.flatten().sort().values
