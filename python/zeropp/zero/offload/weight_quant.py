# SPDX-License-Identifier: Apache-2.0
"""Weights in 8 or 4 bits on NVMe or in host memory, for a model that is only evaluated: ``Precision(stored="int8")`` (the weight
quantisation of ZeRO-Inference, Aminabadi et al. 2022). docs/design/0024.

Matrices of linear layers, and of experts that are held as one three-dimensional parameter, are kept as codes with an fp32 scale
for every BLOCK_ELEMS elements, and become numbers of the model's own kind when their unit is needed (csrc/zero/offload/unit_file_qcopy.c);
everything else is kept as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from torch import nn

from zeropp.config import Tier
from zeropp.errors import Error
from zeropp.zero.model_state import ModelState, Unit
from zeropp.zero.offload.param_file import ParamFile
from zeropp.zero.offload.storage import FileStorage

BLOCK_ELEMS = 64
BITS = {"int8": 8, "int4": 4}


def matrices(model: nn.Module) -> set[nn.Parameter]:
    """Return the weights of linear layers and of experts that nothing else uses: a head that is the embedding, too, stays as it is."""
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


def kept_bytes(
    params: Iterable[tuple[nn.Parameter, int]], elem_bytes: int, matrices: set[nn.Parameter], bits: int
) -> int:
    """Return the bytes of the parameters of one unit: codes and scales of those in ``matrices``, the others as they are.

    Args:
        params: (parameter, elements).
        elem_bytes: of an element that is kept as it is.
    """
    return sum(quantised_bytes(n, bits) if p in matrices else n * elem_bytes for p, n in params)


class QuantisedParams(ParamFile):
    """Parameters of which the matrices are quantised copies, in a scratch file or in memory. A copy on each host.

    Args:
        tier: as for :class:`ParamFile`; kind "cpu": in memory, and there is no file.
        quantised: what :func:`matrices` returned.
    """

    copy_each_host = True

    def __init__(self, engine: ModelState, tier: Tier, storage: FileStorage, quantised: set[nn.Parameter]) -> None:
        name = engine.config.stored_name
        assert name is not None
        self._name, self._quantised = name, quantised
        super().__init__(engine, tier, storage)

    def require_exact(self, what: str) -> None:
        _refuse(what, self._name)

    def refuse_training(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                what = f"backward reached parameter '{name}'"
                parameter.register_post_accumulate_grad_hook(functools.partial(_refuse, what, self._name))

    def _planned(self, units: list[Unit], whole_bytes: int) -> tuple[float, float]:
        resident_end = self.resident_end()
        exact = [unit for unit in units if self.address_of(unit) < resident_end]
        values = sum(entry.numel * unit.dtype.itemsize for unit in exact for entry in unit.params)
        qcopies = sum(self._qcopy_bytes(unit) for unit in units if self.address_of(unit) >= resident_end)
        in_file = 0.0 if self.in_memory else qcopies * self.fraction
        return values + qcopies - in_file, in_file

    def _qcopy_bytes(self, unit: Unit) -> int:
        params = ((entry.shown, entry.numel) for entry in unit.params)
        return kept_bytes(params, unit.dtype.itemsize, self._quantised, BITS[self._name])

    def bytes_in_file(self, units: list[Unit]) -> int:
        seen = self.figures()
        return int(seen["qcopies_bytes"]) - int(seen["qcopies_held_bytes"])

    def _own_bytes_in_file(self, engine: ModelState, units: list[Unit]) -> int:
        return self.bytes_in_file(units) // self.ranks


def _refuse(what: str, stored: str, _: object = None) -> None:
    """Raise zeropp.Error. The third argument is the parameter of a gradient hook."""
    raise Error(
        f"{what}, but this model's weights are kept in {stored} for inference (Precision(stored={stored!r})) and are rounded; "
        "prepare it without, or go back to the checkpoint that it came from"
    )
