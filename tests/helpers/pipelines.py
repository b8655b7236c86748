# SPDX-License-Identifier: Apache-2.0
"""A small pipeline of torch's schedules over ZeRO, and the same training by data parallelism alone and by plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import zeropp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import schedules as torch_schedules
from zeropp.comm.job import JobRanks, over
from zeropp.parallel.mesh import ranks_along
from zeropp.zero.prepare import prepare_over

MICRO, ROWS, WIDTH, CLASSES, CLIP = 4, 2, 16, 20, 0.1
BOUND = 2e-5
"""A step of AdamW moves a weight by about lr = 1e-3; where a gradient is near zero, its rounding turns up in that move."""


Data = Callable[[int, int, int], tuple[Tensor, Tensor]]
Build = Callable[[], nn.Sequential]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(6)), nn.Linear(WIDTH, CLASSES))


def batch(step: int, data_rank: int, micro: int = MICRO) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + data_rank)
    rows = micro * ROWS
    return torch.randn(rows, WIDTH, generator=draw), torch.randint(0, CLASSES, (rows,), generator=draw)


loss_of = nn.functional.cross_entropy


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def alone(
    mesh: DeviceMesh, steps: int, build: Build = net, data: Data = batch, **options: Any
) -> tuple[dict[str, Tensor], list[float]]:
    """Return weights and norms of data parallelism alone, which the data ranks of each stage run for themselves."""
    ranks = JobRanks(over(ranks_along(mesh, ("dp",))).data)
    model = build()
    model, optimizer = prepare_over(ranks, model, adam(model), zeropp.Config(accumulate=MICRO, **options))
    norms = []
    for step in range(steps):
        x, y = data(step, mesh.get_local_rank("dp"), MICRO)
        for rows, classes in zip(x.chunk(MICRO), y.chunk(MICRO), strict=True):
            loss_of(model(rows), classes).backward()
        norms.append(optimizer.clip_grad_norm_(CLIP))
        optimizer.step()
        optimizer.zero_grad()
    return zeropp.full_state_dict(model), norms


def plain(
    steps: int, data_ranks: int, micro: int = MICRO, build: Build = net, data: Data = batch
) -> tuple[dict[str, Tensor], list[float]]:
    """Return weights and norms of one process on the joined batch."""
    model = build()
    optimizer, norms = adam(model), []
    for step in range(steps):
        for data_rank in range(data_ranks):
            x, y = data(step, data_rank, micro)
            for rows, classes in zip(x.chunk(micro), y.chunk(micro), strict=True):
                (loss_of(model(rows), classes) / (micro * data_ranks)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), norms


class Run:
    """A pipeline of all ranks: ``build`` makes the whole model, ``data`` the batch of a step and a data rank."""

    def __init__(
        self, mesh: DeviceMesh, name: str, micro: int = MICRO, reduce: str = "last", loss: str | None = None,
        scale_grads: bool = True, loss_fn: Any = loss_of, build: Build = net, data: Data = batch, gather: str | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        kind = getattr(torch_schedules, f"Schedule{name}")
        self.mesh, self.micro, self.data = mesh, micro, data
        chunks = zeropp.parallel.cut(build(), mesh["pp"], kind)
        self.chunks, self.optimizer = zeropp.prepare(chunks, adam(chunks), zeropp.Config(**options), mesh=mesh)
        self.stages = zeropp.parallel.stages(self.chunks, mesh["pp"])
        stages = self.stages if len(self.stages) > 1 else self.stages[0]
        schedule = kind(stages, micro, loss_fn=loss_fn, scale_grads=scale_grads)
        self.schedule = zeropp.parallel.pipeline(schedule, reduce=reduce, loss=loss, gather=gather)

    def forward_backward(self, step: int) -> list[Tensor]:
        x, y = self.data(step, self.mesh.get_local_rank("dp"), self.micro)
        last = any(stage.is_last for stage in self.stages)
        losses: list[Tensor] = []
        given = (x,) if any(stage.is_first for stage in self.stages) else ()
        self.schedule.step(*given, target=y if last else None, losses=losses if last else None)
        return losses

    def train(self, steps: int) -> tuple[dict[str, Tensor], list[float]]:
        norms = []
        for step in range(steps):
            self.forward_backward(step)
            norms.append(self.optimizer.clip_grad_norm_(CLIP))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return zeropp.full_state_dict(self.chunks), norms


def mesh_of(stages: int, data_ranks: int) -> DeviceMesh:
    return init_device_mesh("cpu", (stages, data_ranks), mesh_dim_names=("pp", "dp"))


def require_close(found: dict[str, Tensor], wanted: dict[str, Tensor], bound: float) -> None:
    for name, values in found.items():
        assert float((values.cpu() - wanted[name].cpu()).abs().max()) <= bound, name
