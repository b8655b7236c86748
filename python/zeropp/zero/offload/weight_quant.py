# SPDX-License-Identifier: Apache-2.0
"""Weights in 8 or 4 bits on NVMe or in host memory, for a model that is only evaluated: ``Precision(stored="int8")`` (the weight
quantisation of ZeRO-Inference, Aminabadi et al. 2022). docs/design/0024.

Matrices of linear layers, and of experts that are held as one three-dimensional parameter, are kept as codes with an fp32 scale
for every BLOCK_ELEMS elements, and become numbers of the model's own kind when their unit is needed (csrc/zero/offload/unit_file_qcopy.c);
everything else is kept as it is.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from zeropp.errors import Error
from zeropp.zero.model_state import Unit

BLOCK_ELEMS = 64
BITS = {"int8": 8, "int4": 4}


def matrices(model: nn.Module) -> set[nn.Parameter]:
    """The weights of linear layers and of experts that nothing else uses: a head that is the embedding, too, stays as it is."""
    uses: dict[nn.Parameter, bool] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                uses[parameter] = uses.get(parameter, True) and _multiplies(module, key, parameter)
    return {parameter for parameter, multiplied in uses.items() if multiplied and parameter.is_floating_point()}


def _multiplies(module: nn.Module, key: str, parameter: nn.Parameter) -> bool:
    """True if that parameter of the module is a matrix that activations are multiplied with, or a stack of them."""
    if parameter.ndim == 2:
        return key == "weight" and _is_linear(module)
    return parameter.ndim == 3 and _is_experts(module)


def _is_linear(module: nn.Module) -> bool:
    """torch's, and transformers' (whose GPT-2 has matrices the other way round)."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _is_experts(module: nn.Module) -> bool:
    """transformers' (MixtralExperts, GptOssExperts, JetMoeParallelExperts, ...): of all its models these classes hold stacks of matrices, one
    an expert, and other classes three-dimensional parameters that are positions, queries, kernels. Biases have two dimensions."""
    return any(cls.__name__.endswith("Experts") for cls in type(module).__mro__)


def quantised_bytes(elems: int, bits: int) -> int:
    """Return the bytes of a matrix's codes and scales."""
    return -(-elems * bits // 8) + 4 * -(-elems // BLOCK_ELEMS)


def kept_bytes(units: list[Unit], quantised: set[nn.Parameter], bits: int) -> int:
    """Return the bytes of these units: of codes and scales of ``quantised``, and of the other parameters as they are."""
    total = 0
    for unit in units:
        for entry in unit.params:
            if entry.param in quantised:
                total += quantised_bytes(entry.numel, bits)
            else:
                total += entry.numel * unit.dtype.itemsize
    return total


def refuse_training(model: nn.Module, stored: str) -> None:
    """A backward that reaches a parameter raises: its gradient would be of rounded weights, and nobody could take it."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_Refusal(name, stored))


class _Refusal:
    def __init__(self, name: str, stored: str) -> None:
        self._name, self._stored = name, stored

    def __call__(self, parameter: torch.Tensor) -> None:
        refuse(f"backward reached parameter '{self._name}'", self._stored)


def refuse(what: str, stored: Any) -> NoReturn:
    """Raises zeropp.Error."""
    raise Error(
        f"{what}, but this model's weights are kept in {stored} for inference (Precision(stored={stored!r})) and are rounded; "
        "prepare it without, or go back to the checkpoint that it came from"
    )
