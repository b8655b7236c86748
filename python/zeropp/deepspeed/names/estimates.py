# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's estimates of memory, by ``zeropp.estimate``: 16-bit parameters, fp32 master values, Adam.

zeropp's ranks compute on CPUs, so what DeepSpeed calls a GPU is a rank whose memory is the host's, and offloading to the CPU changes
nothing. Buffers are counted, not guessed: ``additional_buffer_factor`` has nothing to multiply.
"""

from __future__ import annotations

import torch
from torch import nn

import zeropp
from zeropp.config import Config, Offload


def model_to_params(model: nn.Module) -> tuple[int, int]:
    """(elements of all parameters, tied ones once; of the module with most of its own)."""
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
    """(bytes of a host's memory, of all its ranks; of a device: none; of the largest unit)."""
    offload = Offload()
    if disk:
        offload = (
            Offload(optimizer="nvme", path="/nvme")
            if stage < 3
            else Offload(params="nvme", optimizer="nvme", path="/nvme")
        )
    config = Config(stage=stage, precision="bf16", offload=offload)
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
