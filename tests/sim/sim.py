# SPDX-License-Identifier: Apache-2.0
"""Make the simulated GPU torch's device "sim", with a process group over its NCCL. Import this after torch.

sim_build.why_no_torch_device() says whether it can be built.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import time
import types
from collections.abc import Iterator
from typing import Any

import sim_build
import torch
import torch.distributed as dist


def _load() -> Any:
    spec = importlib.util.spec_from_file_location(sim_build.MODULE, sim_build.torch_device())
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_sim = _load()
driver = ctypes.CDLL(str(sim_build.DRIVER))
os.environ.setdefault(
    "ZEROPP_CUDA_DRIVER", str(sim_build.DRIVER)
)  # so zeropp, which is imported later, uses this device
os.environ.setdefault("ZEROPP_NCCL", str(sim_build.DRIVER))

set_schedule, finish, counts, host_waits = _sim.set_schedule, _sim.finish, _sim.counts, _sim.host_waits
current_handle, stream_number, first_error, view_of = (
    _sim.current_handle,
    _sim.stream_number,
    _sim.first_error,
    _sim.view_of,
)

#: The next new stream of torch is the pool's first again, so that the streams of the next case have the same numbers.
restart_stream_pool = _sim.restart_stream_pool


def _device_module() -> types.ModuleType:
    """Return what stands at torch.sim, as torch.cuda does for CUDA."""
    module: Any = types.ModuleType("torch.sim")
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.device = lambda device=None: contextlib.nullcontext()
    module.synchronize = lambda device=None: torch.accelerator.synchronize()
    module.current_stream = lambda device=None: torch.accelerator.current_stream()
    module.Stream = lambda device=None, priority=0: torch.Stream(device="sim")
    module.Event = lambda enable_timing=False, **options: torch.Event(device="sim")
    module.stream = lambda stream: stream if stream is not None else contextlib.nullcontext()
    module.manual_seed = module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()  # its numbers are the CPU's
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.memory_allocated = lambda device=None: torch.accelerator.memory_allocated()
    module.max_memory_allocated = lambda device=None: torch.accelerator.max_memory_allocated()
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module


torch.utils.rename_privateuse1_backend("sim")
torch._register_device_module("sim", _device_module())
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


@contextlib.contextmanager
def waits_of_the_host(found: dict[str, int]) -> Iterator[None]:
    """Put the host's waits inside the block into `found`, by reason."""
    before = host_waits()
    yield
    found.update(
        {name: count - before.get(name, 0) for name, count in host_waits().items() if count > before.get(name, 0)}
    )


# --- collectives ---------------------------------------------------------------------------------------------------


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


class _Config(ctypes.Structure):  # ncclConfig_t as of 2.14
    _fields_ = [("bytes", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint)]
    _fields_ += [("blocking", ctypes.c_int), ("cluster", ctypes.c_int)]


_FIRST_DEVICE, _SUM, _AVG, _CLUSTER_DEFAULT = 40, 0, 4, -(1 << 31)
_DTYPES = {torch.float32: 7, torch.bfloat16: 9, torch.float16: 6, torch.float64: 8, torch.int64: 4, torch.int32: 2}


def _check(result: int, what: str) -> None:
    if result:
        raise RuntimeError(f"sim: {what} failed with {result}")


@contextlib.contextmanager
def _context() -> Iterator[None]:
    """Make the device's context current in this thread."""
    context = ctypes.c_void_p()
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), _FIRST_DEVICE)
    driver.cuCtxPushCurrent_v2(context)
    yield
    driver.cuCtxPopCurrent_v2(ctypes.byref(context))
    driver.cuDevicePrimaryCtxRelease_v2(_FIRST_DEVICE)


class Group(dist.ProcessGroup):
    """Collectives on the device's current stream, as torch's NCCL without async_op: wait() has nothing to do."""

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)
        unique_id = _UniqueId()
        if rank == 0:
            _check(driver.ncclGetUniqueId(ctypes.byref(unique_id)), "ncclGetUniqueId")
            store.set("sim_id", bytes(unique_id).hex())
        unique_id = _UniqueId.from_buffer_copy(bytes.fromhex(store.get("sim_id").decode()))
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21400, 0, _CLUSTER_DEFAULT)
        self._comm = ctypes.c_void_p()
        with _context():
            driver.ncclCommInitRankConfig(ctypes.byref(self._comm), ranks, unique_id, rank, ctypes.byref(config))
        store.add("sim_joined", 1)
        while store.add("sim_joined", 0) < ranks:
            time.sleep(0.01)

    def _run(self, function: str, out: torch.Tensor, source: torch.Tensor, elems: int, *arguments: int) -> _Done:
        if not (out.is_contiguous() and source.is_contiguous()):
            raise ValueError(f"sim: {function} of tensors that are not contiguous")
        memory = [ctypes.c_void_p(source.data_ptr()), ctypes.c_void_p(out.data_ptr())]
        stream = ctypes.c_void_p(current_handle())
        with _context():
            call = getattr(driver, function)
            rest = [ctypes.c_int(_DTYPES[source.dtype]), *map(ctypes.c_int, arguments), self._comm, stream]
            _check(call(*memory, ctypes.c_size_t(elems), *rest), function)
        return _Done([out])

    @staticmethod
    def _operator(opts: Any) -> int:
        return _AVG if opts is not None and opts.reduceOp == dist.ReduceOp.AVG else _SUM

    def all_gather_single(self, out: torch.Tensor, source: torch.Tensor, *unused: Any, **also: Any) -> _Done:
        return self._run("ncclAllGather", out, source, source.numel())

    def reduce_scatter_single(self, out: torch.Tensor, source: torch.Tensor, opts: Any = None, **unused: Any) -> _Done:
        return self._run("ncclReduceScatter", out, source, out.numel(), self._operator(opts))

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def allgather_into_tensor_coalesced(self, outs: list[Any], sources: list[Any], *unused: Any, **also: Any) -> _Done:
        for out, source in zip(outs, sources, strict=True):
            self.all_gather_single(out, source)
        return _Done(outs)

    def reduce_scatter_tensor_coalesced(
        self, outs: list[Any], sources: list[Any], opts: Any = None, **unused: Any
    ) -> _Done:  # fmt: skip
        for out, source in zip(outs, sources, strict=True):
            self.reduce_scatter_single(out, source, opts)
        return _Done(outs)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None, **unused: Any) -> _Done:
        return self._run("ncclAllReduce", tensors[0], tensors[0], tensors[0].numel(), self._operator(opts))

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None, **unused: Any) -> _Done:
        return self._run("ncclBroadcast", tensors[0], tensors[0], tensors[0].numel(), opts.rootRank if opts else 0)

    def scatter(self, outputs: list[torch.Tensor], sources: list[list[torch.Tensor]], opts: Any = None) -> _Done:
        out = outputs[0]
        root = opts.rootRank if opts else 0
        mine = torch.cat([one.reshape(-1) for one in sources[0]]) if self.rank() == root else out.new_empty(0)
        every = mine if self.rank() == root else out.new_empty(out.numel() * self.size())
        self._run("ncclBroadcast", every, every, every.numel(), root)
        out.copy_(every.view(self.size(), -1)[self.rank()].view(out.shape))
        return _Done([out])

    def alltoall_base(
        self, out: torch.Tensor, source: torch.Tensor, out_splits: list[int], splits: list[int], *unused: Any, **also: Any
    ) -> _Done:  # fmt: skip
        """Send one part to each rank, as torch's NCCL does: one group of sends and receives."""
        source = source.contiguous()
        if not out.is_contiguous():
            raise ValueError("sim: all_to_all into a tensor that is not contiguous")
        kind, stream = ctypes.c_int(_DTYPES[source.dtype]), ctypes.c_void_p(current_handle())
        with _context():
            _check(driver.ncclGroupStart(), "ncclGroupStart")
            for function, tensor, sizes in (("ncclSend", source, splits), ("ncclRecv", out, out_splits)):
                for peer, part in enumerate(tensor.split(sizes or [tensor.shape[0] // self.size()] * self.size())):
                    if not part.numel():
                        continue
                    memory, count = ctypes.c_void_p(part.data_ptr()), ctypes.c_size_t(part.numel())
                    _check(
                        getattr(driver, function)(memory, count, kind, ctypes.c_int(peer), self._comm, stream), function
                    )
            _check(driver.ncclGroupEnd(), "ncclGroupEnd")
        return _Done([out])

    def barrier(self, *unused: Any, **also: Any) -> _Done:
        done = self.allreduce([torch.zeros(1, device="sim")])
        finish()
        return done

    def getBackendName(self) -> str:
        return "sim"

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    _set_group_name = setGroupName
    _name = ""

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_desc(self, description: str) -> None:
        pass

    @property
    def group_desc(self) -> str:
        return ""


class _Done(dist.Work):
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, *unused: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self._tensors)
        return future


def register_backend() -> None:
    """Make the backend "simulated", whose collectives run on the device, known to torch.distributed."""

    def make(store: Any, rank: int, ranks: int, timeout: Any) -> Group:
        return Group(store, rank, ranks)

    dist.Backend.register_backend("simulated", make, devices=["sim", "cpu"])


def init_process_group(folder: str, rank: int, ranks: int) -> None:
    """Start torch.distributed on the device, for ranks that meet in a folder."""
    register_backend()
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("simulated", store=store, rank=rank, world_size=ranks)
