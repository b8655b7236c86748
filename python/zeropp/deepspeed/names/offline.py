# SPDX-License-Identifier: Apache-2.0
"""Answers to what scripts ask without an engine: the whole fp32 weights of a checkpoint (``deepspeed.utils.zero_to_fp32``), and estimates
of the memory that a model needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import zeropp
from zeropp.checkpoint import offline, sources
from zeropp.config import Config, Offload
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
    """Return the whole weights, fp32, on the CPU; tied ones under all their names. Every byte read is verified."""
    if exclude_frozen_parameters or lazy_mode:
        which = "exclude_frozen_parameters" if exclude_frozen_parameters else "lazy_mode"
        raise ConfigError(
            f"{which}=True is not supported by zeropp; python -m zeropp export writes the file piece by piece"
        )
    return offline.whole_state(_folder(checkpoint_dir, tag), "fp32")


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: Any, tag: str | None = None) -> nn.Module:
    """Load these weights into the model, and return it; a partitioned one stays partitioned."""
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
    """Write safetensors, in files of at most ``max_shard_size``, as ``python -m zeropp export`` does."""
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


# -- estimates of memory, by zeropp.estimate: 16-bit parameters, fp32 master values, Adam -------------------------------------------------
#
# zeropp's ranks compute on CPUs, so what DeepSpeed calls a GPU is a rank whose memory is the host's, and offloading to the CPU changes
# nothing. Buffers are counted, not guessed: ``additional_buffer_factor`` has nothing to multiply.


def model_to_params(model: nn.Module) -> tuple[int, int]:
    """Return the elements of all parameters, tied ones once, and of the module with most of its own."""
    total = sum(one.numel() for one in model.parameters())
    return total, max(sum(one.numel() for one in module.parameters(recurse=False)) for module in model.modules())


class _Layer(nn.Module):
    def __init__(self, elems: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(elems, device="meta"))


def _model(total: int, largest: int) -> nn.Module:
    """Layers of at most the largest one's size, on meta; 4096 of them at most, so that the answer takes less than a second."""
    largest = max(largest, -(-total // 4096))
    sizes = [largest] * (total // largest) + ([total % largest] if total % largest else [])
    return nn.ModuleList(_Layer(elems) for elems in sizes)


def _needs(model: nn.Module, stage: int, per_node: int, nodes: int, disk: bool = False) -> tuple[int, int, int]:
    """Return bytes: of a host's memory, for all its ranks; of a device, which has none; of the largest unit."""
    offload = Offload()
    if disk:
        offload = (
            Offload(optimizer="nvme", path="/nvme")
            if stage < 3
            else Offload(params="nvme", optimizer="nvme", path="/nvme")
        )
    config = Config(stage=stage, precision="bf16", offload=offload, device="cpu")
    found = zeropp.estimate(model, config, ranks=per_node * nodes, hosts=nodes)
    return per_node * sum(found["cpu"].values()), 0, int(found["largest_unit"])


def _all(model: nn.Module, stage: int, per_node: int, nodes: int) -> None:
    total, largest = model_to_params(model)
    print(
        "Estimated memory needed for params, optim states and gradients, with their buffers, in zeropp:\n"
        f"HW: {nodes} host{'s' if nodes > 1 else ''}, {per_node} CPU rank{'s' if per_node > 1 else ''} on each.\n"
        f"SW: Model with {total // 10**6}M total params, {largest // 10**6}M largest layer params.\n"
        "  per host |  per rank | Options"
    )
    for disk in (False, True):
        host, _, _ = _needs(model, stage, per_node, nodes, disk)
        where = "nvme" if disk else "none"
        options = f"offload_optimizer={where}" if stage < 3 else f"offload_param={where}, offload_optimizer={where}"
        print(f" {host / 2**30:7.2f}GB | {host / per_node / 2**30:7.2f}GB | {options}")


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    return _needs(_model(total_params, max(1, total_params // 32)), 2, num_gpus_per_node, num_nodes)[:2]


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    _all(model, 2, num_gpus_per_node, num_nodes)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    _all(_model(total_params, max(1, total_params // 32)), 2, num_gpus_per_node, num_nodes)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Without ``zero_init`` each rank holds the whole model before it is partitioned."""
    model = _model(total_params, largest_layer_params)
    host, device, largest = _needs(model, 3, num_gpus_per_node, num_nodes)
    return host if zero_init else max(host, 4 * total_params * num_gpus_per_node), device, largest


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    _all(model, 3, num_gpus_per_node, num_nodes)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    _all(_model(total_params, largest_layer_params), 3, num_gpus_per_node, num_nodes)
