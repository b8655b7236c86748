# SPDX-License-Identifier: Apache-2.0
"""Build a transformers' model again from its config, and carry over what its state does not hold."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from zeropp.errors import ConfigError
from zeropp.zero.model.parameter import ref_of


def refuse_prepared(model: nn.Module, what: str) -> None:
    """Raise zeropp.ConfigError where a parameter is partitioned, so that its values are not here."""
    for name, parameter in model.named_parameters():
        if ref_of(parameter) is not None:
            raise ConfigError(
                f"{what}: parameter '{name}' is prepared; do this before zeropp.prepare, or with a loaded checkpoint"
            )


def text_config(model: nn.Module) -> Any:
    """Return the config of the language model of a transformers' model; None for any other module."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else None


def on_meta(model: nn.Module, config: Any) -> nn.Module:
    """Return a model of that class with that config, without memory."""
    with torch.device("meta"):
        made: nn.Module = type(model)(config)
    return made


def check_config(model: nn.Module, what: str) -> None:
    """Raise zeropp.ConfigError where the model's config describes other tensors than the model has."""
    expected = {name: tuple(value.shape) for name, value in on_meta(model, model.config).state_dict().items()}
    for name, value in model.state_dict().items():
        if expected.get(name) != tuple(value.shape):
            raise ConfigError(
                f"{what}: '{name}' has shape {tuple(value.shape)}, and the config of {type(model).__name__} describes "
                f"{expected.get(name, 'no such tensor')}, so from_pretrained would not load it; choose others"
            )


def take_rest(made: nn.Module, model: nn.Module) -> None:
    """Copy what a model that was built on meta lacks after its state was loaded: buffers that are not saved, and the generation config."""
    for name, module in made.named_modules():
        theirs = model.get_submodule(name)
        for own, other in (
            (module._parameters, theirs._parameters),
            (vars(module), vars(theirs)),
            (module._buffers, theirs._buffers),
        ):
            for key, value in own.items():
                if isinstance(value, Tensor) and value.is_meta:
                    own[key] = other[key].clone()  # type: ignore[union-attr]
        for key, parameter in module._parameters.items():
            if parameter is not None:
                parameter.requires_grad_(theirs._parameters[key].requires_grad)  # type: ignore[union-attr]
    if hasattr(model, "generation_config"):
        made.generation_config = copy.deepcopy(model.generation_config)
