# SPDX-License-Identifier: Apache-2.0
"""The sum of sparse tensors over ranks (torch's COO layout), as gradients of ``nn.Embedding(sparse=True)`` under DDP.

Ranks may hold different numbers of elements at different places. Shapes go first and are compared; then every rank sends its
coalesced indices and values to every other one, and all add in rank order: ``(r0 + r1) + r2``, the same bits on each.
Bytes that a rank reads: the indices and values of all others.
"""

from __future__ import annotations

from typing import Any

import torch

from zeropp import _C
from zeropp.comm.group import BYTES, OP_CODES, dtype_code
from zeropp.errors import CommError

_DIMS = 16
_ALL_TO_ALL = _C.COMM_COLLECTIVES["all_to_all"]


def all_reduce_sparse(core: Any, tensor: torch.Tensor, op: int) -> torch.Tensor:
    """Put the sum ("avg": the mean) over all ranks in `tensor`, and return it coalesced. Blocks."""
    if op not in (OP_CODES["sum"], OP_CODES["avg"]):
        name = _C.COMM_OPS[op] if op >= 0 else "premul_sum"
        raise ValueError(f"zeropp: {name} of a sparse tensor; sparse tensors can only be summed or averaged")
    with torch.no_grad():
        mine = tensor.detach().coalesce()
        total = _summed(core, mine, _counts(core, mine))
        if op == OP_CODES["avg"]:
            total = total / core.ranks
        if total.dtype != tensor.dtype:
            total = total.to(tensor.dtype)
        tensor.copy_(total)
    return total


def _counts(core: Any, mine: torch.Tensor) -> list[int]:
    """Return how many elements each rank has. All else must be equal: every rank raises for the same pair that
    differs."""
    if mine.dim() > _DIMS:
        raise ValueError(f"zeropp: all_reduce of a sparse tensor with {mine.dim()} dimensions, at most {_DIMS} work")
    code = dtype_code(mine.dtype) if not mine.is_complex() else -mine.element_size()
    words = [mine._nnz(), code, mine.sparse_dim(), mine.dim(), *mine.shape, *[0] * (_DIMS - mine.dim())]
    here = torch.tensor(words)
    there = torch.empty(core.ranks, len(words), dtype=torch.int64)
    core.all_gather(there.data_ptr(), here.data_ptr(), here.numel() * here.element_size())
    for rank, words in enumerate(there.tolist()):
        if words[1:] != there[0, 1:].tolist():
            sides = [f"rank {r} has shape {tuple(w[4 : 4 + w[3]])} with {w[2]} sparse dimensions and dtype code {w[1]}"
                     for r, w in ((0, there[0].tolist()), (rank, words))]  # fmt: skip
            raise CommError(f"zeropp: all_reduce of sparse tensors: {sides[0]}, but {sides[1]}; they must agree", rank)
    return [int(count) for count in there[:, 0]]


def _everyones(core: Any, mine: torch.Tensor, counts: list[int], axis: int) -> list[torch.Tensor]:
    """This rank's tensor to all, theirs here; they differ in length along `axis`, which goes first on the way."""
    source = mine.movedim(axis, 0).contiguous()
    taken = [source.new_empty((count, *source.shape[1:])) for count in counts]
    core.exchange(_ALL_TO_ALL, BYTES, 0, [_piece(t) for t in taken], [_piece(source)] * core.ranks)
    return [t.movedim(0, axis) for t in taken]


def _piece(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def _summed(core: Any, mine: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """16-bit values are added in fp32 and rounded once, by the caller."""
    indices = _everyones(core, mine.indices(), counts, 1)
    values = _everyones(core, mine.values(), counts, 0)
    half = mine.dtype in (torch.bfloat16, torch.float16)
    total: torch.Tensor | None = None
    for index, value in zip(indices, values, strict=True):
        wide = value.float() if half else value
        part = torch.sparse_coo_tensor(index, wide, mine.shape, is_coalesced=True, check_invariants=False)
        total = part if total is None else total + part
    assert total is not None
    return total.coalesce()
