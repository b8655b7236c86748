# SPDX-License-Identifier: Apache-2.0
"""A GPU that a rank is to compute on: whether it is there, whether another rank has it, and how a model comes to it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from zeropp import _C
from zeropp.errors import ConfigError, NotBuiltError
from zeropp.zero.model.init import is_sharded
from zeropp.zero.model.same import gather_bytes

_CPU_INSTEAD = "or train on the CPU with zeropp.Config(device='cpu')"
# The oldest driver (Linux, data center branch) that runs kernels of a CUDA major version: NVIDIA's minor-version
# compatibility, so 13.1 kernels run wherever 13.0 ones do.
_OLDEST_DRIVER = {11: "R450", 12: "R525", 13: "R580"}


def cuda_version_text(version: int) -> str:
    """13010 is CUDA 13.1."""
    return f"{version // 1000}.{version % 1000 // 10}"


def needed_driver(toolkit: int) -> str:
    """Return the driver that kernels made by this toolkit need."""
    major = toolkit // 1000
    return f"CUDA {major}.0, driver {_OLDEST_DRIVER.get(major, 'of that CUDA')} or later"


def require_gpu(device: torch.device, kernels: bool) -> None:
    """Raise zeropp.ConfigError where a CUDA device cannot be used in this process; other devices pass.

    Args:
        device: with its index.
        kernels: True if zeropp's own kernels run there.
    """
    if device.type != "cuda":
        return
    if not torch.backends.cuda.is_built():
        raise _unusable(device, "this torch is built without CUDA", "install a CUDA build of torch")
    try:
        driver = _C.cuda_driver()
    except NotBuiltError as error:
        raise _unusable(device, f"there is no driver ({error})", "install NVIDIA's driver") from error
    if not torch.cuda.is_available():
        found = (
            f"the driver has CUDA {cuda_version_text(driver)}, torch wants {torch.version.cuda}, and torch finds no GPU"
        )
        raise _unusable(device, found, "update the driver, or look at CUDA_VISIBLE_DEVICES")
    if kernels:
        _require_kernels(device, driver)
    count = torch.cuda.device_count()
    if device.index >= count:
        raise ConfigError(
            f"prepare: this rank is to compute on {device}, and the machine has {count} GPUs that this process sees; start at most "
            f"{count} ranks here (torchrun --nproc-per-node {count}), or name the GPU with zeropp.Config(device='cuda:0')"
        )


def _require_kernels(device: torch.device, driver: int) -> None:
    toolkit = _C.cuda_toolkit()
    if not _C.cuda_images():
        raise _unusable(
            device, "this build of zeropp has no CUDA kernels", "install a wheel, or build where nvcc is found"
        )
    if driver // 1000 < toolkit // 1000:
        found = f"the driver has CUDA {cuda_version_text(driver)}, and the kernels of this build need {needed_driver(toolkit)}"
        raise _unusable(device, found, "update the driver")


def _unusable(device: torch.device, found: str, instead: str) -> ConfigError:
    return ConfigError(f"prepare: the model is to compute on {device}, but {found}; {instead}, {_CPU_INSTEAD}")


def refuse_shared(device: torch.device, comm: Any, asked: bool) -> None:
    """Collective: raise zeropp.ConfigError on every rank where two ranks have one CUDA GPU.

    Args:
        asked: True if this rank's configuration names the GPU: then it is meant.
    """
    if comm is None:
        return
    alone = asked or device.type != "cuda"
    mine = b"\0" * 16 if alone else hashlib.sha256(_identity(device).encode()).digest()[:16]
    every = gather_bytes(comm, mine)
    for rank, one in enumerate(every):
        first = every.index(one)
        if first != rank and any(one):
            raise ConfigError(
                f"prepare: ranks {first} and {rank} compute on the same GPU ({device} of rank {comm.rank}); start one rank a GPU, give "
                "each the GPU cuda:LOCAL_RANK, or say that it is meant with zeropp.Config(device='cuda:0')"
            )


def _identity(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def bring(
    model: nn.Module, device: torch.device, ignored: set[nn.Parameter], parts: Iterable[nn.Parameter] = ()
) -> None:
    """Move to an accelerator what ``prepare`` does not move unit by unit; do nothing on the CPU.

    ``parts``: this rank's parts of parameters that ranks divide, which the model does not have.
    """
    if device.type != "cpu":
        bring_parameters([*model.parameters(), *parts], device)
        bring_rest(model, device, ignored)


def bring_parameters(parameters: Iterable[nn.Parameter], device: torch.device) -> None:
    """Make parameters of the CPU ones of the device where ``parameter.data = ...`` cannot do it later.

    torch allows that between the CPU and CUDA, so there each unit goes to the GPU when it is filled, and the whole model is never there.
    Parameters stay the same objects.
    """
    if device.type in ("cpu", "cuda"):
        return
    for parameter in parameters:
        if parameter.device.type == "cpu":
            _swap(parameter, device)


def _swap(parameter: nn.Parameter, device: torch.device) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        one = torch.zeros((), dtype=parameter.dtype, device=device)
        # The values of a sharded parameter are elsewhere.
        values = one.expand(parameter.shape) if is_sharded(parameter) else parameter.detach().to(device)
        new = nn.Parameter(values, requires_grad=parameter.requires_grad)
        new.__class__ = parameter.__class__
        new.__dict__.update(parameter.__dict__)
        torch.utils.swap_tensors(parameter, new)


def bring_rest(model: nn.Module, device: torch.device, ignored: set[nn.Parameter]) -> None:
    """Move what no unit has to the device: buffers, and the parameters that the configuration leaves alone."""
    moved: dict[torch.Tensor, torch.Tensor] = {}  # a buffer that two modules share stays one
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type != device.type:
                module._buffers[name] = moved.setdefault(buffer, buffer.to(device))
    for parameter in ignored:
        if parameter.device.type != device.type:
            parameter.data = parameter.data.to(device)
