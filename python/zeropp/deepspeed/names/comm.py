# SPDX-License-Identifier: Apache-2.0
"""``deepspeed.comm``: torch.distributed by DeepSpeed's names and arguments. Whatever backend the process group has serves them."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import init_device_mesh

from zeropp.deepspeed.names.accelerator import get_accelerator
from zeropp.deepspeed.names.later import not_built
from zeropp.deepspeed.names.logs import logger


def _same(function: Callable[..., Any], **names: str) -> Callable[..., Any]:
    """torch's function with DeepSpeed's names of arguments. ``log_name`` and ``debug`` are labels of its communication log; ``prof=True``
    asks for that log, which does not exist here."""

    @functools.wraps(function)
    def call(*args: Any, prof: bool = False, log_name: Any = None, debug: Any = None, **kwargs: Any) -> Any:
        if prof:
            raise not_built("log of communication (prof=True)", "leave it out; zeropp.traffic and zeropp.trace measure")
        return function(*args, **{names.get(name, name): value for name, value in kwargs.items()})

    return call


broadcast = _same(dist.broadcast)
broadcast_object_list = _same(dist.broadcast_object_list)
all_gather = _same(dist.all_gather)
all_gather_object = _same(dist.all_gather_object)
all_gather_into_tensor = _same(dist.all_gather_into_tensor, tensor="input_tensor")
all_reduce = inference_all_reduce = _same(dist.all_reduce)
reduce = _same(dist.reduce)
reduce_scatter = _same(dist.reduce_scatter)
reduce_scatter_tensor = _same(dist.reduce_scatter_tensor, tensor="input", output_tensor="output")
all_to_all = _same(dist.all_to_all)
all_to_all_single = _same(dist.all_to_all_single, tensor="input")
gather = _same(dist.gather)
scatter = _same(dist.scatter)
barrier = _same(dist.barrier)
send, recv, isend, irecv = map(_same, (dist.send, dist.recv, dist.isend, dist.irecv))
allgather_fn, reduce_scatter_fn = all_gather_into_tensor, reduce_scatter_tensor
get_rank, get_world_size, is_available = dist.get_rank, dist.get_world_size, dist.is_available
destroy_process_group, ProcessGroup = dist.destroy_process_group, dist.ProcessGroup


class _All:
    """Several pieces of work, waited for together."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> bool:
        for one in self._works:
            one.wait()
        return True

    def is_completed(self) -> bool:
        return all(one.is_completed() for one in self._works)


def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor], op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False, **labels: Any
) -> Any:
    works = [all_reduce(one, op=op, group=group, async_op=async_op, **labels) for one in tensors]
    return _All(works) if async_op else None


def all_gather_coalesced(
    output_tensors: Sequence[torch.Tensor],
    input_tensors: Sequence[torch.Tensor],
    group: Any = None,
    async_op: bool = False,
) -> Any:
    works = [
        dist.all_gather_into_tensor(whole, part, group=group, async_op=async_op)
        for whole, part in zip(output_tensors, input_tensors, strict=True)
    ]
    return _All(works) if async_op else None


def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False, **labels: Any) -> Any:
    """torch has it for gloo; other backends, zeropp's too, name a missing rank when their barrier's time is over."""
    if dist.get_backend(group) == "gloo":
        return _same(dist.monitored_barrier)(group, timeout, wait_all_ranks, **labels)
    return barrier(group, **labels)


def _true() -> bool:
    return True


has_all_gather_into_tensor = has_reduce_scatter_tensor = has_all_reduce_coalesced = has_coalescing_manager = _true


def has_comm_data() -> bool:
    """False: nothing is logged."""
    return False


def new_group(ranks: Sequence[int]) -> Any:
    return dist.new_group(list(ranks))


def get_world_group() -> Any:
    return dist.group.WORLD


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    return dist.get_global_rank(dist.group.WORLD if group is None else group, group_rank)  # type: ignore[arg-type]


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    return dist.get_process_group_ranks(group)


def get_local_rank() -> int:
    """As the launcher said it."""
    return int(os.environ.get("LOCAL_RANK") or 0)


def initialize_mesh_device(mesh_shape: Any, mesh_dim_names: Any) -> Any:
    name = get_accelerator().device_name()
    return init_device_mesh(name, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def configure(
    deepspeed_config: Any = None,
    enabled: Any = None,
    prof_all: Any = None,
    prof_ops: Any = None,
    verbose: Any = None,
    debug: Any = None,
) -> None:
    """Refuse DeepSpeed's log of communication where it is switched on; do nothing else."""
    said = getattr(getattr(deepspeed_config, "comms_config", None), "comms_logger_enabled", None)
    if enabled or prof_all or prof_ops or said:
        raise not_built(
            "log of communication (comm.configure)", "leave it off; zeropp.traffic and zeropp.trace measure"
        )


def _on(*names: str) -> Callable[[], bool]:
    """True on a service whose variables are set."""
    return lambda: any(name in os.environ for name in names)


in_aml, in_aws_sm, in_dlts = _on("AZUREML_EXPERIMENT_ID"), _on("SM_TRAINING_ENV"), _on("DLTS_JOB_ID")


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = None,
    verbose: bool = True,
    timeout: Any = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start a process group where none runs.

    Args:
        dist_backend: torch's name of one; None: the accelerator's, gloo without. "nccl" without a GPU is gloo.
        auto_mpi_discovery: where neither torchrun nor the arguments say rank and size, they are Open MPI's, if it started this process.
        distributed_port: for that case, of rank 0; where MASTER_PORT does not say.
        verbose: a line of the logger.
        timeout: a timedelta; None: torch's.
        init_method: torch's URL; None: the environment.
        dist_init_required: False: none is begun. True where one runs: an error.
        config: of DeepSpeed's logging of collectives, which is not built; zeropp.traffic() counts them.
        rank, world_size: in place of the environment's; -1: those.
    """
    if dist.is_initialized():
        is_initialized()
        return
    if dist_init_required is False:
        return
    if auto_mpi_discovery and "RANK" not in os.environ:
        _rank_of_mpi(distributed_port)
    place = _place(init_method, rank, world_size)
    if timeout is not None:
        place["timeout"] = timeout
    backend = _backend(dist_backend)
    if verbose:
        logger.info("Initializing the process group with backend %s", backend or "of the accelerator")
    dist.init_process_group(backend, **place)
    is_initialized()


def _place(init_method: str | None, rank: int, world_size: int) -> dict[str, Any]:
    """Return the arguments by which torch finds the other ranks: a group of one where neither they nor torchrun say anything."""
    known: dict[str, Any] = {name: value for name, value in (("rank", rank), ("world_size", world_size)) if value >= 0}
    if init_method is None and not known and "WORLD_SIZE" not in os.environ:
        return {"init_method": None, "store": torch._C._distributed_c10d.HashStore(), "rank": 0, "world_size": 1}
    return {"init_method": init_method or "env://", **known}


def _backend(wanted: str | None) -> str | None:
    """Return the backend that this machine can run; None: torch's for the accelerator."""
    if wanted == "nccl" and not torch.cuda.is_available():  # many scripts name it
        logger.warning("init_distributed: nccl needs a GPU, and this machine has none; the backend is gloo")
        return "gloo"
    return wanted or (None if torch.accelerator.is_available() else "gloo")


def _rank_of_mpi(port: int | None) -> None:
    """Set torchrun's variables under mpirun, on one host or where MASTER_ADDR is set."""
    if "OMPI_COMM_WORLD_RANK" not in os.environ:
        return
    for name, source in (("RANK", "RANK"), ("WORLD_SIZE", "SIZE"), ("LOCAL_RANK", "LOCAL_RANK")):
        os.environ.setdefault(name, os.environ[f"OMPI_COMM_WORLD_{source}"])
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(port or 29500))


def is_initialized() -> bool:
    """True if a process group runs. Accelerate calls this while it builds its state. On a machine without a GPU it names no
    backend for DeepSpeed, and would take each rank for the only one; there this function names the backend."""
    if not dist.is_initialized():
        return False
    state = sys.modules.get("accelerate.state")
    if state is not None and not torch.accelerator.is_available():
        known = state.PartialState._shared_state
        if known and known.get("backend") is None:
            known["backend"] = dist.get_backend()
    return True
