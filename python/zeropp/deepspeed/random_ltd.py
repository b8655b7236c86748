# SPDX-License-Identifier: Apache-2.0
"""``deepspeed.runtime.data_pipeline.data_routing.helper`` for scripts: zeropp's layers drop tokens by hooks, so nothing is wrapped."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from zeropp.efficiency.token_drop import dropping_layers
from zeropp.errors import ConfigError
from zeropp.zero.engine import engine_of

M = TypeVar("M")


def convert_to_random_ltd(model: M, convert_type: type | tuple[type, ...]) -> M:
    """Check that the layers that drop tokens are of this class, and return the model or engine as it is: ``initialize`` has put the
    hooks there.

    Raises:
        zeropp.ConfigError: the configuration does not enable random-LTD, or its layers are of another class.
    """
    plain = _module_of(model)
    efficiency = engine_of(plain).config.efficiency
    if efficiency is None or efficiency.token_drop is None:
        raise ConfigError(
            "convert_to_random_ltd: data_efficiency.data_routing.random_ltd is not enabled in the configuration; enable it there, which "
            "deepspeed.initialize reads, or leave out this call"
        )
    for number, name, layer in dropping_layers(plain, efficiency.token_drop)[0]:
        if not isinstance(layer, convert_type):
            kinds = convert_type if isinstance(convert_type, tuple) else (convert_type,)
            raise ConfigError(
                f"convert_to_random_ltd: layer {number}, '{name}', is a {type(layer).__name__}; wanted "
                f"{' or '.join(kind.__name__ for kind in kinds)}, or other numbers in random_ltd_layer_id"
            )
    return model


def save_without_random_ltd(model: Any) -> OrderedDict[str, Any]:
    """Return the state dict of a model or an engine; its names never have a wrapper's."""
    return remove_random_ltd_state_dict(_module_of(model).state_dict())


def remove_random_ltd_state_dict(state_dict: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return a state dict that DeepSpeed saved with its wrappers under the names of the plain model."""
    return OrderedDict((name.replace(".random_ltd_layer", ""), value) for name, value in state_dict.items())


def _module_of(model: Any) -> nn.Module:
    module: nn.Module = getattr(model, "module", model)
    return module
