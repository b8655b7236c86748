# SPDX-License-Identifier: Apache-2.0
"""What benchmarks of a step over a mesh of two dimensions share: the model, the meshes, the ways of ours, and the turns.

All contenders live in the same four processes, one thread each, and take turns there.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from turns import TWINS

RANKS = 4
CHECKED = 3
"""Steps whose results must agree before anything is timed."""
TOLERANCE = 1e-4
"""Of fp32 sums in another order, over a few steps."""
WAYS = {"stage 3": (3, "auto"), "stage 3, gathers": (3, "off"), "stage 2": (2, "auto")}
"""The stage and host_copy of each row of ours."""


def mlp_blocks(width: int, blocks: int) -> Any:
    """Return residual blocks of a norm and two matrices; the same values at each call."""
    import torch
    from torch import Tensor, nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(blocks)))


def measured(names: tuple[str, str], measure: Callable[[Any, Any], Mapping[str, Any]], cases: list[Any]) -> list[Any]:
    """Return what ``measure(case, pair)`` finds for each case, on this rank.

    Args:
        names: of the dimensions. ``pair`` has two meshes of 2 x 2 with these names: of gloo's groups, and of ours.
    """
    import torch
    import torch.distributed as dist
    import zeropp  # noqa: F401  (its backend)
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    gloo = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    fast = init_device_mesh("cpu", (2, 2), mesh_dim_names=names, backend_override=dict.fromkeys(names, "zeropp"))
    rows = [measure(case, (gloo, fast)) for case in cases]
    dist.barrier()
    return rows


def in_turns(name: str, calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, Any]:
    """Return milliseconds of the slowest rank, by contender, and what they disagree about, of steps that return numbers."""
    import torch
    import torch.distributed as dist

    seen = {each: torch.tensor([call() for _ in range(CHECKED)]) for each, call in calls.items()}
    first = seen["stage 3"]
    wrong = next(
        (f"{name}: {each} {found.tolist()}, stage 3 {first.tolist()}" for each, found in seen.items()
         if not torch.allclose(found, first, rtol=TOLERANCE)), "",
    )  # fmt: skip
    order, rng = list(calls), random.Random(name)  # the same on every rank
    samples: dict[str, list[float]] = {each: [] for each in order}
    for _ in range(rounds):
        rng.shuffle(order)
        for each in order:
            with TWINS.turn():
                dist.barrier()
                start = time.perf_counter_ns()
                calls[each]()
                took = torch.tensor((time.perf_counter_ns() - start) / 1e6)
                dist.all_reduce(took, dist.ReduceOp.MAX)
            samples[each].append(float(took))
    return {"wrong": wrong, "samples": samples}
