# SPDX-License-Identifier: Apache-2.0
"""``deepspeed.utils.zero_to_fp32``: the whole fp32 weights of a checkpoint that ``engine.save_checkpoint`` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import zeropp
from zeropp.checkpoint import offline, sources
from zeropp.errors import ConfigError
from zeropp.zero.prepare import is_prepared


def _folder(checkpoint_dir: Any, tag: str | None) -> Path:
    root = Path(checkpoint_dir)
    if tag is None:
        latest = root / "latest"
        if not latest.is_file():
            raise ValueError(f"Unable to find 'latest' file at {latest}")
        tag = latest.read_text(encoding="utf-8").strip()
    if not (root / tag).is_dir():
        raise FileNotFoundError(f"Directory '{root / tag}' doesn't exist")
    return root / tag


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Any, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, torch.Tensor]:
    """The whole weights, fp32, on the CPU; tied ones under all their names. Every byte read is verified."""
    if exclude_frozen_parameters or lazy_mode:
        which = "exclude_frozen_parameters" if exclude_frozen_parameters else "lazy_mode"
        raise ConfigError(
            f"{which}=True is not supported by zeropp; python -m zeropp export writes the file piece by piece"
        )
    return offline.whole_state(_folder(checkpoint_dir, tag), "fp32")


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: Any, tag: str | None = None) -> nn.Module:
    """The model with these weights; a partitioned one stays so."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    if is_prepared(model):
        zeropp.load_full_state_dict(model, state, strict=False)
    else:
        model.cpu().load_state_dict(state, strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Any,
    output_dir: Any,
    max_shard_size: Any = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """``python -m zeropp export``: safetensors, in files of at most ``max_shard_size``."""
    if exclude_frozen_parameters or not safe_serialization:
        raise ConfigError(
            "convert_zero_checkpoint_to_fp32_state_dict: zeropp writes safetensors of all parameters; give safe_serialization=True "
            "and leave exclude_frozen_parameters out"
        )
    offline.export(_folder(checkpoint_dir, tag), output_dir, dtype="fp32", file_bytes=_bytes(max_shard_size))


def _bytes(size: Any) -> int:
    if isinstance(size, str):
        number, unit = size[:-2], size[-2:].upper()
        return int(float(number) * {"KB": 10**3, "MB": 10**6, "GB": 10**9}[unit])
    return sources.FILE_BYTES if size is None else int(size)


def _no_such_file(checkpoint_dir: Any, *args: Any) -> Any:
    raise FileNotFoundError(
        f"{checkpoint_dir}: zeropp's checkpoints have other files (docs/checkpoint-format.md); python -m zeropp export reads them"
    )
