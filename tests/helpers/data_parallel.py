# SPDX-License-Identifier: Apache-2.0
"""torch's data parallelism on any device, to compare with: DistributedDataParallel, or its arithmetic where gloo has no such device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Averaged(nn.Module):
    """Take rank 0's values, and average each gradient over the ranks when autograd has added it, by way of the host."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self._syncs, self._follows = module, True, True
        for parameter in module.parameters():
            _take_from_rank_0(parameter)
            trained = parameter.requires_grad
            parameter.requires_grad_(True).register_post_accumulate_grad_hook(self._average)
            parameter.requires_grad_(trained)  # torch refuses hooks of what is frozen, and it may be trained later

    def forward(self, *args: Any, **options: Any) -> Any:
        """Run the module; its buffers are rank 0's, unless the forward before was one without a backward that averages."""
        for buffer in self.module.buffers() if self._follows else ():
            _take_from_rank_0(buffer)
        self._follows = self._syncs and torch.is_grad_enabled()
        return self.module(*args, **options)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add gradients up on each rank."""
        self._syncs = False
        yield
        self._syncs = True

    def _average(self, parameter: torch.Tensor) -> None:
        if self._syncs and parameter.grad is not None:
            values = parameter.grad.cpu() / dist.get_world_size()
            dist.all_reduce(values)
            parameter.grad.copy_(values)


@torch.no_grad()
def _take_from_rank_0(tensor: torch.Tensor) -> None:
    values = tensor.detach().cpu().contiguous()
    dist.broadcast(values, 0)
    tensor.copy_(values)


def data_parallel(model: nn.Module, **options: Any) -> Any:
    """Return the model on several ranks, whose gradients are averages; on one rank the model itself.

    ``options`` are those of DistributedDataParallel."""
    if dist.get_world_size() == 1:
        return model
    on_cpu = all(parameter.is_cpu for parameter in model.parameters())
    return DistributedDataParallel(model, **options) if on_cpu else Averaged(model)
