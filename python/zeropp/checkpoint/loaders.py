# SPDX-License-Identifier: Apache-2.0
"""The states of loaders in a checkpoint: the place of each rank in its data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from zeropp.checkpoint.plain import to_plain
from zeropp.errors import CheckpointError, ConfigError, counted, what_it_is


def check(loader: Any) -> None:
    """Refuse a loader that has no state.

    Raises:
        zeropp.ConfigError: as said.
    """
    if loader is not None and not all(
        callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict")
    ):
        raise ConfigError(
            f"save, load: loader is {what_it_is(loader)}; wanted state_dict and load_state_dict, which torchdata's StatefulDataLoader and "
            "zeropp.data's samplers have"
        )


def describe(loader: Any, loose: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return what the manifest says of this rank's loader; its tensors go to ``loose``."""
    return {"class": type(loader).__name__, "state": to_plain(loader.state_dict(), "loader", loose)}


def check_fit(loader: Any, content: Mapping[str, Any], ranks: int, folder: Path) -> None:
    """Refuse a checkpoint whose loaders cannot go on as this one.

    Raises:
        zeropp.CheckpointError: there is no loader in it, another class's, or one for each of another number of ranks.
    """
    if loader is None:
        return
    check(loader)
    saved = content.get("loader")
    kinds = sorted({"no loader" if one is None else one["class"] for one in saved or [None]})
    if kinds != [type(loader).__name__]:
        raise CheckpointError(
            f"{folder}: holds {' and '.join(kinds)}, and a {type(loader).__name__} is to be restored; give the loader that was saved, or "
            "leave loader= out"
        )
    if len(saved or []) != ranks and not getattr(loader, "state_is_global", False):
        raise CheckpointError(
            f"{folder}: its {kinds[0]} was saved by {counted(len(saved or []), 'rank')}, each with a place of its own in the data, and now "
            f"there {'is 1' if ranks == 1 else f'are {ranks}'}: the places cannot be split. Start as many ranks as then; or leave loader= "
            "out and set the loader's place; or take a zeropp.data.CurriculumSampler, whose place is the step, as loader="
        )


def restore(loader: Any, content: Mapping[str, Any], rank: int, plain: Callable[[int, Any], Any]) -> None:
    """Let this rank's loader go on; do nothing where there is none.

    Args:
        plain: reads data of a rank's file, given the rank and what the manifest has.
    """
    if loader is None:
        return
    saved = content["loader"]
    place = rank if rank < len(saved) else 0
    loader.load_state_dict(plain(place, saved[place]["state"]))
