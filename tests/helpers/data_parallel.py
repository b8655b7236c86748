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
    """Take rank 0's values, and average the gradients over the ranks at the end of each backward, by way of the host.

    As with DistributedDataParallel, parts of a gradient are added on each rank before they are averaged, and a parameter that some
    ranks do not use gets their average, too.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self._syncs, self._follows, self._queued = module, True, True, False
        for parameter in module.parameters():
            _take_from_rank_0(parameter)

    def forward(self, *args: Any, **options: Any) -> Any:
        """Run the module; its buffers are rank 0's, unless the forward before was one without a backward that averages."""
        for buffer in self.module.buffers() if self._follows else ():
            _take_from_rank_0(buffer)
        self._follows = self._syncs and torch.is_grad_enabled()
        outputs = self.module(*args, **options)
        for output in torch.utils._pytree.tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(self._queue)
        return outputs

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add gradients up on each rank."""
        self._syncs = False
        yield
        self._syncs = True

    def _queue(self, _: torch.Tensor) -> None:
        """Average when the backward that reaches an output has ended, and with it those that it runs inside."""
        if self._syncs and not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._average)

    @torch.no_grad()
    def _average(self) -> None:
        self._queued = False
        parameters = [one for one in self.module.parameters() if one.requires_grad]
        used = torch.tensor([float(one.grad is not None) for one in parameters], device="cpu")
        dist.all_reduce(used)
        for parameter, ranks in zip(parameters, used.tolist(), strict=True):
            if not ranks:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
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
