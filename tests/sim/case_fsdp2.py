# SPDX-License-Identifier: Apache-2.0
"""Train once for each schedule as one rank of torch's own FSDP2, unmodified. Print the losses as JSON.

python case_fsdp2.py RANK RANKS FOLDER SABOTAGE SCHEDULE...     SABOTAGE: a name of SABOTAGES, or "none"
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import sim
import torch
from fsdp2_model import build, data
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group

# --- FSDP2 without one of its waits ----------------------------------------------------------------------------------


def copy_out_before_all_gather() -> None:
    kept = collectives.foreach_all_gather_copy_out
    group.foreach_all_gather_copy_out = lambda result, *rest: kept(result._replace(all_gather_event=None), *rest)


class NeverWaits(torch.Stream):
    """A stream that waits for no other."""

    def wait_stream(self, other: torch.Stream) -> None:
        pass


def reduce_scatter_before_copy_in() -> None:
    kept = collectives.foreach_reduce

    def foreach_reduce(params: Any, grads: Any, mesh: Any, stream: torch.Stream, *rest: Any, **also: Any) -> Any:
        unordered = NeverWaits(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )
        return kept(params, grads, mesh, unordered, *rest, **also)

    group.foreach_reduce = foreach_reduce


def all_gather_before_copy_out() -> None:
    group.FSDPParamGroup._wait_all_gather_streams_on_event = lambda self, event: None


def step_before_reductions() -> None:
    kept = group.FSDPParamGroup.finalize_backward

    def finalize_backward(self: Any) -> None:
        self.comm_ctx._last_post_reduce_events = {}
        self.comm_ctx.reduce_scatter_states.clear()
        self._post_reduce_event = None
        kept(self)

    group.FSDPParamGroup.finalize_backward = finalize_backward


SABOTAGES: dict[str, Callable[[], None]] = {
    "copy-out before all-gather": copy_out_before_all_gather,
    "reduce-scatter before copy-in": reduce_scatter_before_copy_in,
    "all-gather before copy-out": all_gather_before_copy_out,
    "step before reductions": step_before_reductions,
}


def train(rank: int, ranks: int, lazy: int) -> list[float]:
    sim.restart_stream_pool()
    model = build().to("sim")
    mesh = torch.distributed.device_mesh.init_device_mesh("sim", (ranks,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    sim.set_schedule(lazy, 0)
    losses = []
    for x in data(rank):
        loss = (model(x.to("sim")) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def main() -> None:
    rank, ranks, folder, sabotage = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    sim.init_process_group(folder, rank, ranks)
    if sabotage != "none":
        SABOTAGES[sabotage]()
    losses = []
    for lazy in sys.argv[5:]:
        losses.append(train(rank, ranks, int(lazy, 0)))
        sim.finish()
    print(json.dumps({"losses": losses, "error": sim.first_error()}), flush=True)
    os._exit(0)  # without the end of torch.distributed, which meets the other rank once more


if __name__ == "__main__":
    main()
