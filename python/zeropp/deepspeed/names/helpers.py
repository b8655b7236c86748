# SPDX-License-Identifier: Apache-2.0
"""Small things of ``deepspeed.utils``, ``deepspeed.runtime.utils`` and their neighbours that scripts call beside the engine."""

from __future__ import annotations

import contextlib
import datetime
import enum
import functools
import gc
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

import zeropp
from zeropp.deepspeed.names.accelerator import CPU_Accelerator, get_accelerator
from zeropp.deepspeed.names.later import not_built
from zeropp.deepspeed.names.zero import GatheredParameters
from zeropp.errors import ConfigError

# -- deepspeed.utils -------------------------------------------------------------------------------------------------------------


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a range of its name in the accelerator's profiler."""

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        get_accelerator().range_push(func.__qualname__)
        try:
            return func(*args, **kwargs)
        finally:
            get_accelerator().range_pop()

    return call


class RepeatingLoader:
    """A loader that begins again at its end."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)  # an empty loader ends, as there


class _InType(TorchFunctionMode):
    """Make torch's constructors return one floating-point type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in (torch.empty, torch.zeros, torch.ones, torch.full) and made.is_floating_point():
            return made.to(self._dtype)
        return made


class OnDevice:
    """Modules built inside have their parameters on ``device``, in ``dtype``; ``"meta"`` gives shapes without memory."""

    def __init__(self, dtype: torch.dtype, device: Any = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, device, enabled
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> OnDevice:
        if self.enabled:
            self._stack.enter_context(_InType(self.dtype))
            self._stack.enter_context(torch.device(self.device))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()


class NoopTimer:
    """DeepSpeed's timers, where nothing is timed."""

    class Timer:
        def start(self, **kwargs: Any) -> None: ...
        def reset(self) -> None: ...
        def stop(self, **kwargs: Any) -> None: ...
        def elapsed(self, **kwargs: Any) -> float:
            return 0.0

        def mean(self) -> float:
            return 0.0

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> Any:
        return self.timer

    def get_timers(self) -> dict[str, Any]:
        return {}

    def log(self, names: Any, **kwargs: Any) -> None: ...
    def get_mean(self, names: Any, normalizer: float = 1.0) -> None: ...


# -- deepspeed.runtime.utils --------------------------------------------------------------------------------------------------------


class DummyOptim:
    """Parameters in one group, of an optimizer that does nothing."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": params}]


class noop_context(contextlib.nullcontext[None]):
    def __init__(self) -> None:
        super().__init__()


def noop_decorator(func: Any) -> Any:
    return func


def ensure_directory_exists(filename: Any) -> None:
    """Makes the folder that the file will lie in."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def set_random_seed(seed: int) -> None:
    """Seed Python, NumPy where it is installed, and torch."""
    random.seed(seed)
    torch.manual_seed(seed % 2**63)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(seed % 2**32)


def is_model_parallel_parameter(p: Any) -> bool:
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def bwc_tensor_model_parallel_rank(mpu: Any = None) -> int:
    """0: a parameter is never split between ranks by the model itself."""
    if mpu is not None:
        raise not_built("tensor parallelism (mpu)", "leave mpu out")
    return 0


def _each(item: Any, change: Callable[[Any], Any]) -> Any:
    """The change made to everything in nested lists, tuples and dicts."""
    if isinstance(item, (list, tuple)):
        return type(item)([_each(one, change) for one in item])
    if isinstance(item, dict):
        return {key: _each(value, change) for key, value in item.items()}
    return change(item)


def copy_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool]) -> Any:
    return _each(item, lambda one: one.to(device) if criterion_func(one) else one)


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Move what the criterion chooses with its storage, and copy everything else that can be copied to the device."""

    def change(one: Any) -> Any:
        if criterion_func is not None and criterion_func(one):
            one.data = one.to(device).data
            return one
        return one.to(device)

    return _each(item, change)


def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2, mpu: Any = None) -> Any:
    """torch's, which takes partitioned parameters too."""
    if mpu is not None:
        raise not_built("tensor parallelism (mpu)", "leave mpu out")
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def get_global_norm(norm_list: Any) -> float:
    """The norm of all, from the norms of parts."""
    return float(sum(float(one) ** 2 for one in norm_list) ** 0.5)


def get_ma_status() -> int:
    return 0 if dist.is_initialized() and dist.get_rank() != 0 else int(get_accelerator().memory_allocated())


def empty_cache() -> None:
    get_accelerator().empty_cache()
    get_accelerator().reset_peak_memory_stats()


def see_memory_usage(message: str, force: bool = False) -> None:
    """Prints on rank 0 what the process holds, and what it held at most since the last call."""
    if not force or (dist.is_initialized() and dist.get_rank() != 0):
        return
    gc.collect()
    here, gib = get_accelerator(), 2**30
    used = CPU.total_memory() - CPU.available_memory()
    print(message)
    print(
        f"MA {here.memory_allocated() / gib:.2f} GB Max_MA {here.max_memory_allocated() / gib:.2f} GB "
        f"CA {here.memory_reserved() / gib:.2f} GB Max_CA {here.max_memory_reserved() / gib:.2f} GB"
    )
    print(f"CPU Virtual Memory: used = {used / gib:.2f} GB, percent = {100 * used / CPU.total_memory():.1f}%")
    here.reset_peak_memory_stats()


CPU: Any = CPU_Accelerator()
"""What this machine's memory is asked of."""

# -- deepspeed.compression.helper, deepspeed.module_inject -------------------------------------------------------------------------------


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """Return the object at a dotted name; a number is an index."""
    found: Any = model
    for part in module_name.split("."):
        found = found[int(part)] if part.isdigit() and not hasattr(found, part) else getattr(found, part)
    return found


def recursive_setattr(model: nn.Module, module_name: str, module: Any) -> None:
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)


def convert_conv1d_to_linear(model: nn.Module, convert_type: type) -> nn.Module:
    """transformers' Conv1D, whose weight is a linear layer's transposed, becomes that layer."""
    whole: Any = getattr(model, "module", model)
    for name, module in list(whole.named_modules()):
        if isinstance(module, convert_type):
            old: Any = module
            weight, bias = old.weight, old.bias
            linear = nn.Linear(weight.shape[0], weight.shape[1], bias=bias is not None)
            linear.weight = nn.Parameter(weight.detach().t().contiguous(), weight.requires_grad)
            if bias is not None:
                linear.bias = bias
            recursive_setattr(whole, name, linear)
    return model


def transpose(data: torch.Tensor) -> torch.Tensor:
    """A matrix, transposed in its own memory."""
    data.reshape(-1).copy_(data.transpose(-1, -2).contiguous().reshape(-1))
    return data.reshape(data.shape[-1], data.shape[-2])


@contextlib.contextmanager
def GatherReplacedLayerParams(params: Any, module: Any, enabled: bool = True) -> Iterator[None]:
    """Nothing to gather beyond ``zero.GatheredParameters``: no layer is replaced by one that is split between ranks."""
    with GatheredParameters(params, enabled=enabled):
        yield


# -- enums, errors, constants that are not plain ---------------------------------------------------------------------------------------------


class OffloadDeviceEnum(str, enum.Enum):
    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, enum.Enum):
    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class ZeroStageEnum(int, enum.Enum):
    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3  # noqa: PIE796  an alias, as there


class DtypeEnum(enum.Enum):
    fp32 = torch.float32
    fp16 = torch.float16
    bf16 = torch.bfloat16
    int8 = torch.int8


class ZeRORuntimeException(Exception):
    pass


DeepSpeedConfigError = ConfigError  # what is raised for a file, by either name


default_pg_timeout = datetime.timedelta(minutes=30)


def enable_universal_checkpoint(param_list: Any) -> None:
    """Not needed: each checkpoint loads on another number of ranks."""


def is_zero_param(parameter: Any) -> bool:
    return isinstance(parameter, torch.Tensor) and hasattr(parameter, "ds_id")


def is_compile_supported() -> bool:
    return True


def get_caller_func(frame: int = 3) -> str:
    return sys._getframe(frame).f_code.co_name


# -- what DeepSpeed's own tests import -----------------------------------------------------------------------------------------------


def required_torch_version(min_version: Any = None, max_version: Any = None) -> bool:
    """True if torch's version is between these two, both included."""
    if min_version is None and max_version is None:
        raise ValueError("required_torch_version: give min_version, max_version, or both")
    low, high = (
        None if one is None else torch.torch_version.TorchVersion(str(one)) for one in (min_version, max_version)
    )
    own = torch.torch_version.TorchVersion(torch.__version__.partition("+")[0])
    return (low is None or own >= low) and (high is None or own <= high)


def is_functorch_transforming() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


def get_gradient_clipping(param_dict: Mapping[str, Any]) -> Any:
    """Return the file's clipping, or the default."""
    return param_dict.get("gradient_clipping", 1.0)


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Give the model with whole parameters; hooks need not go."""
    with zeropp.gathered(getattr(model, "module", model)):
        yield model


# -- deepspeed.utils.groups: all ranks are data parallel ------------------------------------------------------------------------------------


def _same_for_all(value: Any) -> Callable[[], Any]:
    return lambda: value


GROUPS: dict[str, Any] = {
    "mpu": None, "mesh_device": None,
    "_get_zero_param_intra_parallel_group": _same_for_all(None),
    "_zero_param_parallel_is_initialized": _same_for_all(False),
    **dict.fromkeys(("_get_expert_parallel_group_dict", "_get_expert_data_parallel_group_dict"), dict),
    "_get_expert_model_parallel_world_size": _same_for_all(1), "_get_broadcast_src_rank": _same_for_all(0),
}  # fmt: skip
globals().update(GROUPS)
