# SPDX-License-Identifier: Apache-2.0
"""The cost of experts before a run, for ``zeropp.estimate``: a rank's parts of them, and the batch at which bringing tokens to experts
moves as much as bringing experts to tokens.

A layer of E experts with P elements lies on R ranks; a token of H elements chooses k experts. By chance it goes to (R - 1) h other
ranks, h = 1 - C(E - E/R, k) / C(E, k), and a row comes back from each. Whole experts would come from R - 1 ranks instead:

    tokens    2 T (R - 1) h H        weights    P (R - 1) / R        equal at    T = P / (2 R h H)

of T tokens a rank; with P = 3 E I H that is 3 E I / (2 R h) (ZeRO-Prefill).
"""

from __future__ import annotations

import collections
import math
from typing import Any

from torch import nn

from zeropp.config import Config
from zeropp.errors import ConfigError
from zeropp.moe.division import Division, parts_of_layer
from zeropp.moe.experts import ExpertLayer, expert_layers

_CHOICES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k", "k")
"""What models call the number of experts that a token chooses: in their configuration, or in the router or layer of experts."""
_WIDTHS = ("hidden_size", "hidden_dim", "hidden")


def planned_division(
    model: nn.Module, config: Config, ranks: int, sharers: int = 1, of_data_rank: int = 1, of_stage: bool = False
) -> Division | None:
    """Return how the experts would be divided, with the part of the first rank, without a process group.

    Args:
        ranks: that partition the rest of the model.
        sharers: how many hold the same tokens.
        of_data_rank: how many of these are one rank for ZeRO; 1 where they are among ``ranks``.
        of_stage: the model is a stage of a pipeline; None is returned where it has no experts.

    Raises:
        zeropp.ConfigError: the model has no plan for its experts, or they do not divide.
    """
    layers = expert_layers(model, required=not of_stage)
    if not layers:
        return None
    chosen: Any = config.experts
    counts = chosen.ranks_of(ranks * of_data_rank, [(layer.name, layer.experts) for layer in layers], sharers)
    parts: dict[nn.Parameter, nn.Parameter] = {}
    for layer, count in zip(layers, counts, strict=True):
        if count > 1 or chosen.slices > 1 or chosen.cache is not None:
            parts.update(parts_of_layer(layer, count, chosen.slices, None, of_data_rank))
    return Division(layers, counts, chosen.slices, chosen.chunks, {}, parts, chosen.cache, chosen.offload)


def exchange_figures(model: nn.Module, division: Division, elem_bytes: int) -> dict[str, Any]:
    """Return ``parameters`` of all experts, ``of_a_token``: of those that one chooses, and of the layers whose experts lie on several ranks
    ``token_bytes``: what one token moves in a forward, there and back; ``weight_bytes``: what a rank would gather instead;
    ``crossing``: tokens a rank at which both are equal. The last three are left out where all experts lie on each rank.

    Args:
        elem_bytes: of an element of tokens and weights.
    """
    size = {layer.name: sum(_elems(layer, key) for key in layer.keys) for layer in division.layers}
    tokens = weights = used = 0.0
    for layer, ranks in zip(division.layers, division.ranks, strict=True):
        choices = _named(model, layer, _CHOICES)
        used += size[layer.name] * choices / layer.experts
        if ranks > 1:
            width = _named(model, layer, _WIDTHS)
            tokens += 2 * (ranks - 1) * hit(layer.experts, ranks, choices) * width * elem_bytes
            weights += size[layer.name] * (ranks - 1) / ranks * elem_bytes
    found: dict[str, Any] = {"parameters": sum(size.values()), "of_a_token": round(used)}
    if tokens:
        found.update(token_bytes=round(tokens), weight_bytes=round(weights), crossing=round(weights / tokens))
    return found


def received_bytes(model: nn.Module, division: Division, tokens: float, sharers: int, elem_bytes: int) -> float:
    """Return the bytes of rows that a rank receives in the forward and the backward of all layers.

    Args:
        tokens: of the rank.
        sharers: ranks that hold the same tokens. Each exchanges the rows of some, and they gather what came back.
        elem_bytes: of an element of a row.
    """
    total = 0.0
    for layer, ranks in zip(division.layers, division.ranks, strict=True):
        if ranks > 1:
            choices, width = _named(model, layer, _CHOICES), _named(model, layer, _WIDTHS)
            there_and_back = 2 * (ranks - 1) * hit(layer.experts, ranks, choices) * tokens / sharers
            total += 2 * (there_and_back + tokens * (sharers - 1) / sharers) * width * elem_bytes
    return total


def alike_layers(model: nn.Module) -> dict[tuple[int, int, int], int]:
    """Return (experts, choices, elements of all experts) of each kind of layer that expert parallelism can divide, and how many there are;
    nothing for a model without such layers."""
    try:
        layers = expert_layers(model)
    except ConfigError:
        return {}
    kinds = [
        (layer.experts, _named(model, layer, _CHOICES), sum(_elems(layer, key) for key in layer.keys))
        for layer in layers
    ]
    return dict(collections.Counter(kinds))


def _elems(layer: ExpertLayer, key: str) -> int:
    parameter = layer.module._parameters[key]
    assert parameter is not None
    return parameter.numel()


def hit(experts: int, ranks: int, choices: int) -> float:
    """Return the chance that a token which chooses so many experts chose one of a given rank."""
    if ranks >= experts:  # in slices: a rank has a part of one expert
        return choices / experts
    return 1 - math.comb(experts - experts // ranks, choices) / math.comb(experts, choices)


def _named(model: nn.Module, layer: ExpertLayer, names: tuple[str, ...]) -> int:
    """Return a number of a layer: out of the configuration of its module, the layer around it, that one's parts, or the model."""
    around = layer.block
    configs = [getattr(one, "config", None) for one in (layer.module, around, model)]
    text = [one.get_text_config() if hasattr(one, "get_text_config") else one for one in configs if one is not None]
    for one in (*text, around, *around.children(), layer.module):
        for name in names:
            value = getattr(one, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    raise ConfigError(
        f"estimate: neither the configuration of the model nor '{layer.name}' and what stands around it says {' or '.join(names)}; give the "
        "layer one of these attributes"
    )
