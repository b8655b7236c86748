# SPDX-License-Identifier: Apache-2.0
"""The techniques that act inside a prepared model, attached by ``prepare``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from zeropp.config import Config, wrong
from zeropp.config.efficiency import last_value
from zeropp.efficiency import attention, layer_drop, token_drop
from zeropp.errors import ConfigError


def _check_length(model: nn.Module, config: Config) -> None:
    """Refuse a schedule that ends above the longest sequence of a Hugging Face model, which would never be reached."""
    assert config.efficiency is not None
    schedule = config.efficiency.seq_length
    theirs = getattr(model, "config", None)
    theirs = theirs.get_text_config() if theirs is not None and hasattr(theirs, "get_text_config") else theirs
    most = getattr(theirs, "max_position_embeddings", None)
    longest = last_value(schedule)
    if isinstance(most, int) and most > 0 and longest is not None and longest > most:
        raise wrong(
            "Config.efficiency.seq_length", schedule, f"an end of at most {most}, the longest sequence of the model"
        )


def _refuse_curriculum(model: nn.Module, config: Config) -> None:
    raise ConfigError(
        "Config.efficiency.curriculum: it orders the samples of a loader that zeropp makes, and prepare makes none; use "
        "zeropp.initialize(training_data=), or give the loader a batch_sampler=zeropp.data.CurriculumSampler(...)"
    )


#: By the field of ``Efficiency``: what refuses a model or a configuration before anything is partitioned, and what attaches to the
#: model, given its engine, when all other hooks are in place.
TECHNIQUES: dict[str, tuple[Callable[[nn.Module, Config], None], Callable[[nn.Module, Any], None]]] = {
    "curriculum": (_refuse_curriculum, lambda model, engine: None),
    "seq_length": (_check_length, lambda model, engine: None),
    "attention": (attention.check, attention.attach),
    # Its hook on outputs comes after that of layer_drop, which is attached later and goes first.
    "token_drop": (token_drop.check, token_drop.attach),
    "layer_drop": (layer_drop.check, layer_drop.attach),
}


def check(model: nn.Module, config: Config) -> None:
    """Raise zeropp.ConfigError for a model that a technique which is asked for does not fit."""
    for name, (check_one, _) in TECHNIQUES.items():
        if config.efficiency is not None and getattr(config.efficiency, name) is not None:
            check_one(model, config)


def attach(model: nn.Module, engine: Any) -> None:
    """Attach what ``engine.config.efficiency`` asks for."""
    asked = engine.config.efficiency
    if asked is None:
        return
    engine.clock.watch(model)
    for name, (_, attach_one) in TECHNIQUES.items():
        if getattr(asked, name) is not None:
            attach_one(model, engine)
