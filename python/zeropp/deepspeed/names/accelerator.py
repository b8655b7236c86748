# SPDX-License-Identifier: Apache-2.0
"""``deepspeed.accelerator``: one object that answers the questions of DeepSpeed's abstract accelerator, on CPU and on CUDA.

Where DeepSpeed's CPU accelerator answers with something that no caller can use (the local rank as text, no device at all), the answer
here is the usable one of the same meaning.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from zeropp.deepspeed.names.later import BUILDERS
from zeropp.errors import ConfigError


class DeepSpeedAccelerator:
    """The common methods of both kinds of accelerator."""

    supports_nvtx_domain = False
    _name: str
    _communication_backend_name: str

    def __init__(self) -> None:
        self._compile_backend = "inductor"

    # How much of the work is done when a call returns: all of it on a CPU.
    def is_synchronized_device(self) -> bool:
        return self._name == "cpu"

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def random(self) -> Any:
        return torch.random

    def communication_backend_name(self) -> str:
        return self._communication_backend_name

    def prefer_triton_grouped_mm(self) -> bool:
        return False

    def unpin_memory(self, tensor: torch.Tensor) -> None:
        """Nothing to do: torch unpins memory when it frees it."""

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def op_builder_dir(self) -> str:
        return "deepspeed.ops.op_builder"

    def get_op_builder(self, class_name: str) -> Any:
        return BUILDERS.get(class_name)

    def create_op_builder(self, class_name: str) -> Any:
        builder = self.get_op_builder(class_name)
        return None if builder is None else builder()

    def build_extension(self) -> Any:
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, current_env: MutableMapping[str, str], local_accelerator_ids: Any) -> None:
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def get_compile_backend(self) -> str:
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        known = torch._dynamo.list_backends(exclude_tags=())
        if backend not in known:
            raise ValueError(f"set_compile_backend: {backend!r} is unknown; wanted one of {', '.join(known)}")
        self._compile_backend = backend

    def __getattr__(self, name: str) -> Any:
        from zeropp.deepspeed.names.tree import missing

        raise AttributeError(missing(f"deepspeed.get_accelerator().{name}", dir(type(self))))


class CPU_Accelerator(DeepSpeedAccelerator):
    """A rank is a process on this machine's CPUs; its memory is what is resident of the process."""

    _name = "cpu"
    _communication_backend_name = "gloo"

    def __init__(self) -> None:
        super().__init__()
        self._peak_bytes = 0
        self.reset_peak_memory_stats()

    # -- devices
    def device_name(self, device_index: int | None = None) -> str:
        return "cpu"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device("cpu")

    def set_device(self, device_index: int) -> None:
        """All ranks of a machine share the one CPU device."""

    def current_device(self) -> int:
        return int(os.environ.get("LOCAL_RANK") or 0)

    def current_device_name(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        """LOCAL_SIZE where a launcher sets it, else the number of NUMA nodes that have processors."""
        said = int(os.environ.get("LOCAL_SIZE") or 0)
        if said > 0:
            return said
        lists = {one.read_text().strip() for one in Path("/sys/devices/system/node").glob("node[0-9]*/cpulist")}
        return max(1, len(lists - {""}))

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing is under way when a call returns."""

    # -- random numbers
    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        torch.set_rng_state(new_state)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.get_rng_state()

    def manual_seed(self, seed: int) -> Any:
        return torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def default_generator(self, device_index: int | None = None) -> torch.Generator:
        return torch.default_generator

    # -- streams and graphs: a CPU has none
    Stream = Event = None

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext()

    def current_stream(self, device_index: int | None = None) -> None:
        return None

    default_stream = current_stream

    def create_graph(self) -> None:
        return None

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        return contextlib.nullcontext()

    def replay_graph(self, graph: Any) -> None:
        """Nothing was captured."""

    # -- memory
    def empty_cache(self) -> None:
        """torch keeps no cache of host memory."""

    def memory_allocated(self, device_index: int | None = None) -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        resident: int = pages * os.sysconf("SC_PAGE_SIZE")
        self._peak_bytes = max(self._peak_bytes, resident)
        return resident

    memory_reserved = memory_cached = get_rss = memory_allocated

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most that any question about memory has seen since the last reset."""
        self.memory_allocated()
        return self._peak_bytes

    max_memory_reserved = max_memory_cached = max_memory_allocated

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        self._peak_bytes = 0
        self.memory_allocated()

    reset_max_memory_allocated = reset_max_memory_cached = reset_rss = reset_peak_memory_stats

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        resident = self.memory_allocated()
        return {"allocated_bytes.all.current": resident, "allocated_bytes.all.peak": self._peak_bytes}

    def total_memory(self, device_index: int | None = None) -> int:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def available_memory(self, device_index: int | None = None) -> int:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    # -- types
    def is_available(self) -> bool:
        return True

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float, torch.bfloat16, *([torch.float16] if self.is_fp16_supported() else [])]

    def is_triton_supported(self) -> bool:
        return False

    BFloat16Tensor, ByteTensor, DoubleTensor = torch.BFloat16Tensor, torch.ByteTensor, torch.DoubleTensor
    FloatTensor, HalfTensor = torch.FloatTensor, torch.HalfTensor
    IntTensor, LongTensor = torch.IntTensor, torch.LongTensor

    # -- the rest
    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """The tensor itself: memory is pinned for a device, and there is none."""
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None:
        """No profiler of ranges on a CPU."""

    def range_pop(self, domain: Any = None) -> None:
        """No profiler of ranges on a CPU."""

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        return callback()

    def export_envs(self) -> list[str]:
        return []


class CUDA_Accelerator(DeepSpeedAccelerator):
    """torch.cuda by DeepSpeed's names."""

    _name = "cuda"
    _communication_backend_name = "nccl"

    # Called as torch.cuda has them, and looked up there when they are asked for.
    _SAME = frozenset(
        "set_device current_device device_count synchronize manual_seed manual_seed_all initial_seed stream current_stream "
        "default_stream Stream Event empty_cache memory_allocated max_memory_allocated reset_max_memory_allocated memory_stats "
        "reset_peak_memory_stats memory_reserved max_memory_reserved is_available is_bf16_supported".split()
    )
    _RENAMED: ClassVar[dict[str, str]] = {  # deprecated in torch, with these successors
        "memory_cached": "memory_reserved",
        "max_memory_cached": "max_memory_reserved",
        "reset_max_memory_cached": "reset_peak_memory_stats",
    }
    _TENSORS: ClassVar[dict[str, torch.dtype]] = {
        "BFloat16Tensor": torch.bfloat16, "ByteTensor": torch.uint8, "DoubleTensor": torch.double, "FloatTensor": torch.float,
        "HalfTensor": torch.half, "IntTensor": torch.int, "LongTensor": torch.long,
    }  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        if name in self._TENSORS:
            return functools.partial(torch.tensor, dtype=self._TENSORS[name], device="cuda")
        there = self._RENAMED.get(name, name)
        if there in self._SAME:
            return getattr(torch.cuda, there)
        return super().__getattr__(name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._SAME, *self._RENAMED, *self._TENSORS})

    # -- devices
    def device_name(self, device_index: int | None = None) -> str:
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device("cuda") if device_index is None else torch.device("cuda", device_index)

    def current_device_name(self) -> str:
        return f"cuda:{torch.cuda.current_device()}"

    def communication_backend_version(self) -> Any:
        return torch.cuda.nccl.version()

    # -- random numbers
    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)

    def default_generator(self, device_index: int) -> torch.Generator:
        torch.cuda.init()  # fills the tuple
        return torch.cuda.default_generators[device_index]

    # -- memory
    def total_memory(self, device_index: int | None = None) -> int:
        return int(torch.cuda.get_device_properties(device_index).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        return int(torch.cuda.mem_get_info(device_index)[0])

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """A pinned tensor. torch always makes a copy of the same shape, which both options allow."""
        return tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    # -- types
    def is_fp16_supported(self) -> bool:
        return self._least(7)

    def supported_dtypes(self) -> list[torch.dtype]:
        low = [(self.is_fp16_supported(), torch.half), (self.is_bf16_supported(), torch.bfloat16)]
        return [torch.float, *(dtype for has, dtype in low if has)]

    def is_triton_supported(self) -> bool:
        return self.is_available() and self._least(8)

    def _least(self, major: int) -> bool:
        return torch.cuda.get_device_capability()[0] >= major

    # -- graphs and ranges
    def create_graph(self) -> Any:
        return torch.cuda.CUDAGraph()

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        return torch.cuda.graph(graph, pool, stream)

    def replay_graph(self, graph: Any) -> None:
        graph.replay()

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> Any:
        """torch's ranges have neither domain nor category."""
        return torch.cuda.nvtx.range_push(msg)

    def range_pop(self, domain: Any = None) -> Any:
        return torch.cuda.nvtx.range_pop()

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        return torch.cuda._lazy_call(callback)

    def export_envs(self) -> list[str]:
        return ["NCCL"]


_KINDS: dict[str, type[DeepSpeedAccelerator]] = {"cpu": CPU_Accelerator, "cuda": CUDA_Accelerator}
_chosen: DeepSpeedAccelerator | None = None


def get_accelerator() -> Any:
    """The one of this process: what the environment's DS_ACCELERATOR says, else CUDA where torch has it, else the CPU."""
    global _chosen
    if _chosen is None:
        name = os.environ.get("DS_ACCELERATOR") or ("cuda" if torch.cuda.is_available() else "cpu")
        if not is_current_accelerator_supported(name):
            raise ConfigError(f"DS_ACCELERATOR: {name!r} is not supported by zeropp; wanted one of {', '.join(_KINDS)}")
        _chosen = _KINDS[name]()
    return _chosen


def set_accelerator(accel_obj: Any) -> None:
    """Answer with this object from now on."""
    global _chosen
    _chosen = accel_obj


def is_current_accelerator_supported(name: str | None = None) -> bool:
    return (get_accelerator()._name if name is None else name) in _KINDS


__all__ = [
    "CPU_Accelerator", "CUDA_Accelerator", "DeepSpeedAccelerator", "get_accelerator", "is_current_accelerator_supported",
    "set_accelerator",
]  # fmt: skip
