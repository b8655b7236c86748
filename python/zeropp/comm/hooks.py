# SPDX-License-Identifier: Apache-2.0
"""Quantised communication inside stock torch: a DDP communication hook, and the communication of FSDP2.

Users reach these as :func:`zeropp.comm.ddp_hook` and :func:`zeropp.comm.fsdp2_hooks`; both run on any backend of torch.distributed,
because only the group's store is used, and the bytes go through zeropp's own communicator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch._C._distributed_c10d import ReduceOp

from zeropp import _C
from zeropp.comm.group import OP_CODES, communicator, dtype_code
from zeropp.comm.process_group import _Done, _Pending
from zeropp.errors import ConfigError, NotBuiltError

BITS = {"int8": 8, "int4": 4}
_AVERAGES = {hash(ReduceOp.SUM): "sum", hash(ReduceOp.AVG): "avg"}


def _submit(
    core: Any, coll: str, op: str, output: torch.Tensor, source: torch.Tensor, elems: int, bits: int, block_elems: int
) -> Any:
    """Return the collective on the progress thread of the group: a ``_C.Work``, which keeps the tensors alive."""
    code, dtype = _C.COMM_COLLECTIVES[coll], dtype_code(output.dtype)
    to, at = output.data_ptr(), source.data_ptr()
    return core.submit_quant(code, dtype, OP_CODES[op], to, at, elems, bits, block_elems, 0, (output, source))


def check_format(name: str, bits: int, block_elems: int) -> None:
    """Check the options before anything is registered, so that the error is not one of a backward thread."""
    if bits not in (4, 8):
        raise ConfigError(f"{name}: bits is {bits!r}, wanted 8 or 4")
    if isinstance(block_elems, bool) or not isinstance(block_elems, int) or block_elems < 16 or block_elems % 16:
        raise ConfigError(f"{name}: block_elems is {block_elems!r}, wanted a multiple of 16, at least 16")


def _wanted(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cpu:
        raise NotBuiltError(
            f"{name}: a tensor on {tensor.device}; quantised collectives work on cpu only, not yet there"
        )
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"{name}: {tensor.dtype} cannot be quantised; wanted float32, bfloat16 or float16")
    return tensor


# -- DDP -------------------------------------------------------------------------------------------------------------------


def ddp_hook(*, bits: int = 8, block_elems: int = 256) -> Callable[[Any, Any], Any]:
    """Return a communication hook that averages DDP's gradients in 8 or 4 bits: ``model.register_comm_hook(group, zeropp.comm.ddp_hook(bits=8))``.

    `group` is the one that DDP uses; None: the world. Gradients are quantised on the way to the rank that adds them and on the way
    back, in blocks with an fp32 scale: 1/2 or 1/4 of bf16's bytes, 1/4 or 1/8 of fp32's, plus 4 bytes a block. Every rank gets the
    same bits. A block with an infinity or a NaN comes out as NaN.

    Raises:
        zeropp.ConfigError: bits other than 8 and 4, blocks that are no multiple of 16; in backward, gradients of another dtype than
            float32, bfloat16 or float16.
    """
    name = "zeropp.comm.ddp_hook"
    check_format(name, bits, block_elems)

    def quantised_all_reduce(state: Any, bucket: Any) -> Any:
        core = communicator(state)
        gradients = _wanted(name, bucket.buffer())
        work = _submit(core, "all_reduce_quant", "avg", gradients, gradients, gradients.numel(), bits, block_elems)
        finished: Any = torch.futures.Future()

        def result(_: Any) -> torch.Tensor:
            work.wait()  # finished: this raises its error, if it has one
            return gradients

        answer = finished.then(result)
        work.on_done(lambda: finished.set_result(None))
        return answer

    quantised_all_reduce.__annotations__.clear()  # DDP compares annotations with types, and these are strings
    return quantised_all_reduce


# -- FSDP2 -----------------------------------------------------------------------------------------------------------------


def _fsdp2_classes() -> tuple[type, type, type]:
    """Return (FSDPModule, AllGather, ReduceScatter) of this torch."""
    try:
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    except ImportError as error:
        raise NotBuiltError(
            f"zeropp.comm.fsdp2_hooks: torch {torch.__version__} has no custom communication in FSDP2; "
            "wanted torch 2.11 or newer"
        ) from error
    return FSDPModule, AllGather, ReduceScatter


def _allocate(self: Any, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device=device)


def _make_all_gather(base: type, bits: int, block_elems: int) -> Any:
    name = "zeropp.comm.fsdp2_hooks(params=...)"

    def gather(
        self: Any, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        if input_tensor.dtype == torch.uint8:
            raise ConfigError(
                f"{name}: one fully_shard group has parameters of several dtypes, which FSDP2 gathers as bytes; "
                "give it a MixedPrecisionPolicy(param_dtype=...) or wrap them apart"
            )
        core = communicator(group)
        source, output = _wanted(name, input_tensor), _wanted(name, output_tensor)
        elems = source.numel()
        work = _submit(core, "all_gather_quant", "sum", output, source, elems, bits, block_elems)
        pending = _Pending([work], [output])
        if async_op:
            return pending
        pending.wait()
        return None

    return type("QuantisedAllGather", (base,), {"allocate": _allocate, "__call__": gather})()


def _make_reduce_scatter(base: type, bits: int, block_elems: int) -> Any:
    name = "zeropp.comm.fsdp2_hooks(grads=...)"

    def scatter(
        self: Any, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        reduce = _AVERAGES.get(hash(op))
        if reduce is None:
            raise ConfigError(
                f"{name}: FSDP2 asks for reduce operation {op}, wanted SUM or AVG; with set_gradient_divide_factor call "
                "set_force_sum_reduction_for_comms(True), too"
            )
        core = communicator(group)
        source, output = _wanted(name, input_tensor), _wanted(name, output_tensor)
        elems = output.numel()
        work = _submit(core, "reduce_scatter_quant", reduce, output, source, elems, bits, block_elems)
        pending = _Pending([work], [output])
        if async_op:
            return pending
        pending.wait()
        return _Done([output])

    return type("QuantisedReduceScatter", (base,), {"allocate": _allocate, "__call__": scatter})()


def fsdp2_hooks(module: nn.Module, params: str = "exact", grads: str = "exact", *, block_elems: int = 256) -> None:
    """Quantise what stock FSDP2 sends, in every ``fully_shard``-ed part of `module`: ``fsdp2_hooks(model, params="int8", grads="int8")``.

    Args:
        module: after ``fully_shard``.
        params: "exact", "int8" or "int4": the all-gather of parameters (qwZ of ZeRO++). Every rank computes with the same rounded
            values; the shards that the optimizer updates stay exact.
        grads: "exact", "int8" or "int4": the reduce-scatter of gradients, summed in fp32 (qgZ). The all-reduce of HSDP stays exact.
        block_elems: elements that share a scale, a multiple of 16; a smaller block is closer to exact and sends more scales.

    Raises:
        zeropp.ConfigError: an argument that is none of these; nothing in `module` is sharded; later, a group of mixed dtypes.
        zeropp.NotBuiltError: a torch whose FSDP2 takes no custom communication; later, tensors on an accelerator.
    """
    name = "zeropp.comm.fsdp2_hooks"
    for what, value in (("params", params), ("grads", grads)):
        if value != "exact" and value not in BITS:
            raise ConfigError(f"{name}: {what} is {value!r}, wanted 'exact', 'int8' or 'int4'")
    check_format(name, 8, block_elems)
    fsdp_module, all_gather, reduce_scatter = _fsdp2_classes()
    sharded = [cast(Any, one) for one in module.modules() if isinstance(one, fsdp_module)]
    if not sharded:
        raise ConfigError(f"{name}: no module of {type(module).__name__} is sharded; call fully_shard on it first")
    gather = _make_all_gather(all_gather, BITS[params], block_elems) if params in BITS else None
    scatter = _make_reduce_scatter(reduce_scatter, BITS[grads], block_elems) if grads in BITS else None
    for one in sharded:
        if gather is not None:
            one.set_custom_all_gather(gather)
        if scatter is not None:
            one.set_custom_reduce_scatter(scatter)
