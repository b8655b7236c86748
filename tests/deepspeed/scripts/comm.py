# SPDX-License-Identifier: Apache-2.0
"""Every collective of deepspeed.comm once, by DeepSpeed's names of arguments: comm.py RESULT. For two ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.utils import groups


def values(tensor: torch.Tensor) -> list[float]:
    return tensor.tolist()


def main() -> dict[str, object]:
    deepspeed.init_distributed()
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    mine, both = torch.full((2,), float(rank + 1)), torch.tensor([1.0, 2.0, 3.0, 4.0])
    found: dict[str, object] = {}

    def keep(name: str, tensor: torch.Tensor) -> None:
        found[name] = values(tensor)

    tensor = mine.clone()
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False, log_name="loss")
    keep("all_reduce", tensor)
    tensor = mine.clone()
    dist.inference_all_reduce(tensor, op=dist.ReduceOp.MAX)
    keep("inference_all_reduce", tensor)
    tensors = [mine.clone(), mine.clone() * 10]
    dist.all_reduce_coalesced(tensors, async_op=True).wait()
    keep("all_reduce_coalesced", torch.stack(tensors))
    tensor = mine.clone()
    dist.broadcast(tensor, src=1, debug="here")
    keep("broadcast", tensor)
    named = [rank]
    dist.broadcast_object_list(named, src=1)
    found["broadcast_object_list"] = named
    tensors = [torch.zeros(2), torch.zeros(2)]
    dist.all_gather(tensors, mine)
    keep("all_gather", torch.stack(tensors))
    for name in ("all_gather_into_tensor", "allgather_fn"):
        whole = torch.zeros(4)
        getattr(dist, name)(whole, mine)
        keep(name, whole)
    whole = torch.zeros(4)
    dist.all_gather_into_tensor(output_tensor=whole, tensor=mine)
    keep("all_gather by name", whole)
    wholes = [torch.zeros(4)]
    dist.all_gather_coalesced(wholes, [mine])
    keep("all_gather_coalesced", wholes[0])
    objects = [None, None]
    dist.all_gather_object(objects, rank)
    found["all_gather_object"] = objects
    part = torch.zeros(2)
    dist.reduce_scatter_tensor(output_tensor=part, tensor=both.clone())
    keep("reduce_scatter_tensor", part)
    dist.reduce_scatter_fn(part, both.clone())
    keep("reduce_scatter_fn", part)
    dist.reduce_scatter(part, list(both.clone().chunk(2)))
    keep("reduce_scatter", part)
    tensor = mine.clone()
    dist.reduce(tensor, dst=0)
    found["reduce"] = values(tensor) if rank == 0 else [3.0, 3.0]
    whole = torch.zeros(2)
    dist.all_to_all_single(whole, torch.tensor([10.0, 20.0]) + rank)
    keep("all_to_all_single", whole)
    dist.all_to_all_single(output=whole, tensor=torch.tensor([10.0, 20.0]) + rank)
    keep("all_to_all_single by name", whole)
    tensors = [torch.zeros(1), torch.zeros(1)]
    dist.all_to_all(tensors, list((torch.tensor([10.0, 20.0]) + rank).chunk(2)))
    keep("all_to_all", torch.stack(tensors))
    tensors = [torch.zeros(2), torch.zeros(2)] if rank == 0 else None
    dist.gather(mine, gather_list=tensors, dst=0)
    found["gather"] = values(torch.stack(tensors)) if rank == 0 else [[1.0, 1.0], [2.0, 2.0]]
    part = torch.zeros(2)
    dist.scatter(part, scatter_list=list(both.chunk(2)) if rank == 0 else None, src=0)
    keep("scatter", part)
    for send, recv in ((dist.send, dist.recv), (dist.isend, dist.irecv)):
        part = torch.zeros(2)
        first = send(mine, 1) if rank == 0 else recv(part, 0)
        if send is dist.isend:
            first.wait()
        found[f"point {send is dist.isend}"] = [1.0, 1.0] if rank == 0 else values(part)
    dist.barrier()
    dist.monitored_barrier()
    assert (
        dist.has_all_gather_into_tensor() and dist.is_initialized() and dist.get_world_size(dist.get_world_group()) == 2
    )
    assert (
        dist.get_rank(dist.new_group([0, 1])) == rank and dist.get_global_rank(dist.get_world_group(), other) == other
    )
    assert dist.get_all_ranks_from_group(dist.new_group(range(2))) == [0, 1] and dist.get_local_rank() == rank
    assert groups._get_data_parallel_world_size() == 2 and groups._get_data_parallel_rank() == rank
    assert groups._get_sequence_parallel_world_size() == 1 and groups._get_sequence_parallel_rank() == 0
    assert dist.get_world_size(groups._get_data_parallel_group()) == 2 and groups.mpu is None
    mesh = dist.initialize_mesh_device((2, 1), ("data_parallel", "sequence_parallel"))
    found["mesh"] = [mesh.get_local_rank("data_parallel") == rank, mesh.size(1)]
    try:
        dist.all_reduce(mine.clone(), prof=True)
    except ValueError as error:
        found["prof"] = str(error)
    return found


if __name__ == "__main__":
    path = Path(sys.argv[1])
    found = main()
    (path if dist.get_rank() == 0 else path.with_suffix(".1.json")).write_text(json.dumps(found))
