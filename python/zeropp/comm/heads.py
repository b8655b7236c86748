# SPDX-License-Identifier: Apache-2.0
"""The exchange of heads for tokens of DeepSpeed-Ulysses (arXiv 2309.14509): csrc/comm/heads.h says what moves.

Each rank of a group has part of a sequence, with all heads; attention wants the whole sequence, and can do with some of the heads.
:func:`to_heads` gives a rank the whole sequence for its heads, :func:`to_tokens` gives it all heads of its tokens back. Both are
differentiable: each is the gradient of the other.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from zeropp import _C
from zeropp.comm.group import BYTES, communicator, dtype_code
from zeropp.errors import CommError, ConfigError

Spans = tuple[tuple[int, int], ...]
"""By rank: the first head that it computes, and the first one after it."""


@dataclass(frozen=True)
class Cut:
    """How a sequence lies over the ranks of a group: ``lengths[r]`` tokens on rank r.

    Attributes:
        core: the ``_C.Comm`` of the exchange; None: that of the group.
    """

    group: Any
    lengths: tuple[int, ...]
    core: Any = None

    @property
    def rank(self) -> int:
        return self.group.rank()  # type: ignore[no-any-return]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def slice_of(self, rank: int) -> slice:
        first = sum(self.lengths[:rank])
        return slice(first, first + self.lengths[rank])


def query_spans(heads: int, ranks: int) -> Spans:
    """Share the heads of the queries: as evenly as they go."""
    cuts = [heads * rank // ranks for rank in range(ranks + 1)]
    return tuple(itertools.pairwise(cuts))


def key_spans(spans: Spans, groups: int) -> Spans:
    """Return the heads of keys and values that the queries of `spans` look at, ``groups`` queries to each. A head may be several
    ranks'."""
    return tuple((first // groups, -(-end // groups)) for first, end in spans)


def to_heads(cut: Cut, tensors: Sequence[Tensor], spans: Sequence[Spans]) -> tuple[Tensor, ...]:
    """Return each tensor's own heads of all tokens.

    Args:
        cut: the group, and how many tokens each rank has.
        tensors: (batch, heads, own tokens, width) each, of one floating dtype, in one exchange; widths and heads may differ.
        spans: of each tensor.

    Returns:
        (batch, own heads, all tokens, width) each, laid out as (batch, tokens, heads, width).
    """
    return _ToHeads.apply(cut, tuple(spans), *tensors)  # type: ignore[no-any-return]


def to_tokens(cut: Cut, tensor: Tensor, spans: Spans) -> Tensor:
    """Return all heads of this rank's tokens, (batch, heads, own tokens, width), laid out as (batch, tokens, heads, width), of the own
    heads of all tokens."""
    return _ToTokens.apply(cut, spans, tensor)  # type: ignore[no-any-return]


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cut: Cut, spans: tuple[Spans, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.cut, ctx.spans, ctx.heads = cut, spans, [one.shape[1] for one in tensors]
        return _exchange(cut, spans, tensors, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *_exchange(ctx.cut, ctx.spans, grads, ctx.heads)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cut: Cut, spans: Spans, tensor: Tensor) -> Tensor:
        ctx.cut, ctx.spans = cut, spans
        return _exchange(cut, (spans,), (tensor,), [spans[-1][1]])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, None, _exchange(ctx.cut, (ctx.spans,), (grad,), None)[0]


def _exchange(
    cut: Cut, spans: tuple[Spans, ...], tensors: Sequence[Tensor], heads: list[int] | None
) -> tuple[Tensor, ...]:
    """Exchange to tokens, where each tensor has so many heads in all, or to heads, where ``heads`` is None."""
    check(cut, tensors, cut.tokens if heads else cut.lengths[cut.rank])
    tensors = [one if one.stride(-1) == 1 else one.contiguous() for one in tensors]
    results = []
    for at, one in enumerate(tensors):
        first, end = spans[at][cut.rank]
        shape = (one.shape[0], cut.lengths[cut.rank], heads[at]) if heads else (one.shape[0], cut.tokens, end - first)
        results.append(one.new_empty(*shape, one.shape[3]).transpose(1, 2))
    if tensors[0].is_cpu:
        _exchange_here(cut, spans, tensors, results, heads)
    else:
        _exchange_on_device(cut, spans, tensors, results, heads)
    return tuple(results)


@contextlib.contextmanager
def named_in_job(cut: Cut) -> Iterator[None]:
    """Have errors of the group's own communicator name the rank of the job, too, where the group is a part of the job; ``cut.core``
    does so itself."""
    try:
        yield
    except CommError as error:
        ranks = dist.get_process_group_ranks(cut.group)
        if (
            cut.core is not None
            or error.rank is None
            or not 0 <= error.rank < len(ranks)
            or len(ranks) == dist.get_world_size()
        ):
            raise
        job_rank = ranks[error.rank]
        named = type(error)(f"{error} (rank {error.rank} of this group is rank {job_rank} of the job)", rank=job_rank)
        raise named from error


def gather_tokens(cut: Cut, tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that is cut over tokens, (batch, own tokens, ...) -> (batch, all tokens, ...). Collective."""
    part = tensor.detach().to("cpu").contiguous()
    parts = [part.new_empty(part.shape[0], length, *part.shape[2:]) for length in cut.lengths]
    core = communicator(cut.group) if cut.core is None else cut.core
    mine = (part.data_ptr(), part.numel() * part.element_size())
    with named_in_job(cut):
        core.exchange(
            _C.COMM_COLLECTIVES["all_to_all"], BYTES, 0,
            [(one.data_ptr(), one.numel() * one.element_size()) for one in parts], [mine] * len(parts),
        )  # fmt: skip
    return torch.cat(parts, 1).to(tensor.device)


def check(cut: Cut, tensors: Sequence[Tensor], tokens: int) -> None:
    """Raise zeropp.ConfigError for tensors that are not this rank's part of the sequence."""
    one = tensors[0]
    for tensor in tensors:
        if tensor.dim() != 4 or tensor.shape[2] != tokens or tensor.shape[0] != one.shape[0]:
            raise ConfigError(
                f"ulysses: a tensor of shape {tuple(tensor.shape)} on rank {cut.rank} of a sequence of {list(cut.lengths)} tokens a rank; "
                f"wanted (batch, heads, {tokens}, width), one batch; a rank's part of a sequence keeps its length from the model's input on"
            )
        if tensor.dtype != one.dtype or not tensor.is_floating_point():
            raise ConfigError(f"ulysses: q, k and v of {one.dtype} and {tensor.dtype}; wanted one floating-point dtype")


def _exchange_here(
    cut: Cut, spans: tuple[Spans, ...], tensors: Sequence[Tensor], results: Sequence[Tensor], heads: list[int] | None
) -> None:
    """Through the arena, in C."""
    core = communicator(cut.group) if cut.core is None else cut.core
    with named_in_job(cut):
        core.heads(_words(cut, spans, tensors, results, heads))


def _words(
    cut: Cut, spans: tuple[Spans, ...], tensors: Sequence[Tensor], results: Sequence[Tensor], heads: list[int] | None
) -> bytes:
    """Return the words of an exchange: to tokens, dtype, batch, tensors; lengths; and of each tensor the address and the strides of
    batch, head and token, in bytes, of its cut and of its whole form, its heads, the bytes of its width, and where each rank's heads
    begin and end."""
    words = [int(heads is not None), dtype_code(tensors[0].dtype), tensors[0].shape[0], len(tensors), *cut.lengths]
    for at, (source, result) in enumerate(zip(tensors, results, strict=True)):
        mine, whole = (result, source) if heads else (source, result)
        words += _place(mine) + _place(whole)
        words += [mine.shape[1], source.shape[3] * source.element_size()]
        words += [first for first, _ in spans[at]] + [end for _, end in spans[at]]
    return struct.pack(f"{len(words)}q", *words)


def _place(tensor: Tensor) -> list[int]:
    size = tensor.element_size()
    batch, head, token, _ = tensor.stride()
    return [tensor.data_ptr(), batch * size, head * size, token * size]


def _exchange_on_device(
    cut: Cut, spans: tuple[Spans, ...], tensors: Sequence[Tensor], results: Sequence[Tensor], heads: list[int] | None
) -> None:
    """Exchange on a GPU: kernels pack into one buffer and read from another (csrc/comm/heads_cuda.cu), and the group's own all-to-all
    carries it between the ranks."""
    device, me, ranks = tensors[0].device, cut.rank, len(cut.lengths)
    words = _words(cut, spans, tensors, results, heads)

    def elements(source: int, to: int) -> int:
        tokens, of = cut.lengths[to if heads else source], source if heads else to
        rows = sum((own[of][1] - own[of][0]) * one.shape[3] for own, one in zip(spans, tensors, strict=True))
        return 0 if source == to else tensors[0].shape[0] * tokens * rows

    sizes = [[elements(me, r) for r in range(ranks)], [elements(r, me) for r in range(ranks)]]
    sent, came = (tensors[0].new_empty(sum(size)) for size in sizes)
    _C.heads_on_device(device.type, device.index or 0, me, ranks, words, sent.data_ptr(), False)
    dist.all_to_all_single(came, sent, sizes[1], sizes[0], group=cut.group)
    _C.heads_on_device(device.type, device.index or 0, me, ranks, words, came.data_ptr(), True)
