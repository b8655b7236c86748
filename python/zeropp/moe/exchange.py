# SPDX-License-Identifier: Apache-2.0
"""The exchange of a mixture of experts: tokens to the ranks of their experts, and what these make back to the tokens.

Ranks of one host send nothing. They publish tokens, choices and results in shared memory, or in memory of their GPUs,
and read each other's rows where they lie (csrc/comm/rows.h): DeepSpeed-MoE (Rajbhandari et al. 2022) without its
all-to-alls. Between hosts a token goes once to each host that has some of its experts (hosts.py). All directions are operators of torch
(``torch.ops.zeropp.moe_rows_*`` and ``moe_hosts_*``), so selective checkpointing can keep what they return.
"""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from zeropp import _C
from zeropp.comm.group import arena_tensor, communicator, dtype_code, link_to_job
from zeropp.moe.hosts import Network, Phase, Route, begin, end, register_operators, route
from zeropp.moe.shared import JOIN
from zeropp.ops import checks

__all__ = ["Exchange", "RowPlan", "combine", "dispatch", "keep_exchanges"]

_EMPTY = (0, 0)
_CPU = torch.device("cpu")
_log = logging.getLogger("zeropp")
_numbers = itertools.count(1)
_exchanges: weakref.WeakValueDictionary[int, Exchange] = weakref.WeakValueDictionary()


def _communicator_of(group: dist.ProcessGroup) -> Any:
    comm = communicator(group)
    if group is not dist.group.WORLD:
        link_to_job(comm, dist.get_process_group_ranks(group))
    return comm


class Exchange:
    """The ranks that hold different experts, and the memory in which they publish rows.

    Args:
        group: a torch.distributed group, or its ``_C.Comm``, whose rank r of R has the experts r E / R to
            (r + 1) E / R - 1. None: this rank has all experts, and nothing is exchanged.
        tokens: the form of rows between hosts, as ``zeropp.Comm(tokens=)``.

    Making one is collective over the group. All ranks then run the same layers in the same order; where they do not,
    every rank gets an error that names both sides.
    """

    def __init__(self, group: Any = None, tokens: str = "exact") -> None:
        self.comm: Any = _communicator_of(group) if isinstance(group, dist.ProcessGroup) else group
        self.core: Any = _C.Rows(self.comm)
        self.ranks: int = 1 if self.comm is None else self.comm.ranks
        self.here: int = self.core.ranks
        """Ranks on this host."""
        self.rank: int = 0 if self.comm is None else self.comm.rank
        self.network = Network(self.comm, self.empty, tokens == "int8") if self.here < self.ranks else None
        self.device: torch.device | None = None
        """The GPU in whose memory rows cross, the cpu where they cannot; None: no token of a GPU came yet."""
        self.number = next(_numbers)
        _exchanges[self.number] = self

    def layer(self, name: str) -> int:
        """Return the number of a new layer. All ranks add the same layers in the same order; messages have the name."""
        return int(self.core.add_layer(name))

    def _where(self, device: torch.device) -> torch.device:
        """Return where tokens of a device cross: there, if the ranks can read each other's memory of it, else in host memory.

        The first call with a GPU is collective. In a graph that a compiler makes before it, tokens cross in host memory.
        """
        if device.type == "cpu":
            return _CPU
        if self.device is None and not torch.compiler.is_compiling():
            reason = self.core.open_device(device.type, device.index)
            if self.network is not None:
                reason = self.network.open(device, reason)
            self.device = device if reason is None else _CPU
            if reason is not None:
                _log.warning("zeropp.moe: tokens of %s cross in host memory, which is slow: %s", device, reason)
        return device if device == self.device else _CPU

    def memory_like(self, rows: int, width: int, like: Tensor) -> Tensor:
        """Return memory for a result (rows, width), of the type and device of another tensor."""
        return self.empty(rows, width, like.dtype) if like.is_cpu else like.new_empty(rows, width)

    def empty(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Return memory (rows, width) for what experts make, which the peers of :func:`combine` read without a copy.

        It is memory that was used before where there is some, so touching it costs no page faults.
        """
        if self.here == 1:
            return torch.empty(rows, width, dtype=dtype, device="cpu")
        return arena_tensor(self.comm, (rows, width), dtype, here=True)


class RowPlan(NamedTuple):
    """Places of the rows of one dispatch; :func:`combine` needs it, and ``ends`` is for the experts."""

    ends: Tensor
    """(E / R,) int32: the row after the last one of each of this rank's experts (``offs`` of torch's grouped_mm)."""
    slots: Tensor
    """(T, k) int64: where the row of each assignment lies, rank times 2^32 + row; -1: dropped."""
    taken: Tensor
    """(N, 2) int32: the assignment of its owner that each row came from, and the row; by owner."""
    numbers: Tensor
    """int64: layer, call and format, and how many tokens and rows each rank has (csrc/comm/rows.h)."""
    anchor: Tensor
    """(0, W) of the tokens' type: ties the backward of the dispatch to the combine, also where no row came to this rank."""
    exchange: Exchange
    route: Route | None = None
    """Over several hosts: which tokens went to other ones, and whose came here. Then ``taken`` counts guests as tokens."""


def _local() -> Exchange:
    """Return the exchange of this rank with itself."""
    if not _local_one:
        _local_one.append(Exchange())
        _local_one[0].layer("of one rank")
    return _local_one[0]


_local_one: list[Exchange] = []


def dispatch(
    hidden: Tensor, chosen: Tensor, experts: int, *, exchange: Exchange | None = None, layer: int = 0
) -> tuple[Tensor, RowPlan]:
    """Return the rows of this rank's experts out of the tokens of all ranks, grouped by expert. Differentiable.

    Reads (k + 1) / R rows a token from the peers' memory and writes k / R, and publishes one copy of its own tokens.
    Collective over the exchange's ranks, which may have different numbers of tokens, also none. Tokens on a GPU cross in
    device memory where the ranks' GPUs can read each other's: the host then waits for the choices alone, and :func:`combine`
    and the backward wait for nothing. Elsewhere they are copied to host memory and rows back, and the host waits for both.

    Args:
        hidden: (T, W) tokens; fp32, bf16 or fp16; T may differ between ranks, W and dtype may not.
        chosen: (T, k) int32 or int64: the experts of each token, numbered over all ranks; -1: dropped. 1 <= k <= 64.
        experts: E, of all ranks together: a multiple of the ranks, at most 1024.
        exchange: the ranks that share the experts. None: this rank has all of them.
        layer: the number that ``exchange.layer(name)`` gave.

    Returns:
        ``(rows, plan)``: rows (N, W) of hidden's dtype: expert after expert up to ``plan.ends``, within an expert rank
        after rank, within a rank in order of tokens.

    Raises:
        TypeError, ValueError: a wrong argument, or an expert out of range.
        zeropp.CommError: a peer died, or is at another layer or call, or has another k, width or dtype.
    """
    rows, plan = _dispatch(hidden, chosen, experts, _local() if exchange is None else exchange, layer)
    return rows, plan._replace(ends=plan.ends.to(hidden.device, non_blocking=True))


def _dispatch(hidden: Tensor, chosen: Tensor, experts: int, one: Exchange, layer: int) -> tuple[Tensor, RowPlan]:
    """The dispatch, with the plan's ``ends`` in memory of the host."""
    name = "zeropp.moe.dispatch"
    _check_rows(name, "hidden", hidden)
    if not isinstance(chosen, Tensor):
        raise TypeError(f"{name}: chosen is a {type(chosen).__name__}, wanted a tensor")
    if chosen.dim() != 2 or chosen.shape[0] != hidden.shape[0] or chosen.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{name}: chosen is {chosen.dtype} {tuple(chosen.shape)}, wanted int32 or int64 ({hidden.shape[0]}, k): "
            "the experts of each token"
        )
    checks.check_whole(name, "experts", experts)
    tokens = hidden.contiguous().to(one._where(hidden.device))
    rows, plan = _cross(tokens, chosen.to("cpu", torch.int32).contiguous(), experts, one, layer)
    return rows.to(hidden.device), plan


def _cross(hidden: Tensor, chosen: Tensor, experts: int, one: Exchange, layer: int) -> tuple[Tensor, RowPlan]:
    """The dispatch of tokens where they cross, by choices in memory of the host."""
    if one.network is None:
        return _gather(hidden, chosen, experts, one, layer)
    way = _route(chosen, hidden, experts, one.network, layer)
    ticket = begin(hidden, way, Phase.DISPATCH, one.network)
    return _gather(end(ticket, hidden, way, Phase.DISPATCH, one.network), way.chosen, experts, one, layer, way)


def _route(chosen: Tensor, hidden: Tensor, experts: int, network: Network, layer: int) -> Route:
    """The ways of tokens by choices in memory of the host, where the tokens are."""
    way = route(chosen, hidden, experts, network, layer)
    pairs, slots = (part.to(hidden.device, non_blocking=True) for part in (way.pairs, way.slots))
    return way._replace(pairs=pairs, slots=slots)


def _gather(
    hidden: Tensor, chosen: Tensor, experts: int, one: Exchange, layer: int, way: Route | None = None
) -> tuple[Tensor, RowPlan]:
    """The dispatch within this host."""
    here = experts // one.ranks * one.here if way is not None else experts
    run = _run_dispatch if _is_unwatched(hidden) else torch.ops.zeropp.moe_rows_dispatch.default
    rows, *parts = run(hidden, chosen, here, one.number, layer)
    return rows, RowPlan._make([*parts, one, way])


def _is_unwatched(*tensors: Tensor) -> bool:
    """Return True where nothing looks at operators: no gradient, no compiler, no mode. The call behind one then comes without torch's
    dispatcher, which costs more than a token's rows."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    return all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors)


def combine(rows: Tensor, plan: RowPlan, weights: Tensor | None = None) -> Tensor:
    """Return the weighted sum of what the experts made of each token, at the rank that has the token. Differentiable.

    The weight is applied here, after the experts, so that an expert may be any module. Sums are taken in fp32 in order
    of the choices and rounded once: the same bits on every run, and for every number of ranks. Rows in memory of
    ``exchange.empty`` are read in place; others are copied there first.

    Args:
        rows: (N, W): what the experts made of the rows of :func:`dispatch`, in their order.
        plan: what :func:`dispatch` returned.
        weights: (T, k), of floating dtype, taken as fp32. None, on all ranks: a plain sum.

    Returns:
        (T, W) of the dtype of ``rows``; zero for a token whose choices were all dropped.

    Raises:
        TypeError, ValueError: a wrong argument.
        zeropp.CommError: as :func:`dispatch`.
    """
    name = "zeropp.moe.combine"
    _check_rows(name, "rows", rows)
    if not isinstance(plan, RowPlan):
        raise TypeError(f"{name}: plan is a {type(plan).__name__}, wanted what zeropp.moe.dispatch returns")
    if rows.shape[0] != plan.taken.shape[0]:
        raise ValueError(f"{name}: {rows.shape[0]} rows, wanted {plan.taken.shape[0]} as the dispatch returned")
    if rows.shape[1] != plan.anchor.shape[1]:
        raise ValueError(
            f"{name}: rows of width {rows.shape[1]}, wanted {plan.anchor.shape[1]} as the dispatch returned"
        )
    weighted = weights is not None
    if weights is None:
        weights = torch.empty(0, dtype=torch.float32, device="cpu")
    else:
        wanted = (plan.slots.shape[0] if plan.route is None else plan.route.slots.shape[0], plan.slots.shape[1])
        if weights.shape != wanted:
            raise ValueError(f"{name}: weights has shape {tuple(weights.shape)}, wanted {wanted}")
    where = plan.slots.device
    return _combine(rows.contiguous().to(where), plan, weights.to(where).float().contiguous(), weighted).to(rows.device)


def _combine(rows: Tensor, plan: RowPlan, weights: Tensor, weighted: bool) -> Tensor:
    """The combine of rows where they cross."""
    network = plan.exchange.network
    if plan.route is None or network is None:
        return _sum(rows, plan, weights, weighted)
    if weighted:
        ticket = begin(weights, plan.route, Phase.WEIGHTS, network)
        weights = end(ticket, weights, plan.route, Phase.WEIGHTS, network)
    partial = _sum(rows, plan, weights, weighted)
    return end(begin(partial, plan.route, Phase.COMBINE, network), partial, plan.route, Phase.COMBINE, network)


def _sum(rows: Tensor, plan: RowPlan, weights: Tensor, weighted: bool) -> Tensor:
    """The combine within this host."""
    op = _run_combine if _is_unwatched(rows, weights, plan.anchor) else torch.ops.zeropp.moe_rows_combine.default
    numbers = plan.numbers
    if rows.dtype != plan.anchor.dtype:  # as experts under autocast make
        numbers = numbers.clone()
        numbers[_C.ROWS_DTYPE] = dtype_code(rows.dtype)
    how = (plan.anchor, plan.taken, plan.slots, numbers, weighted, plan.exchange.number)
    result = op(rows.contiguous(), weights, *how)
    assert isinstance(result, Tensor)
    return result


def through(
    exchange: Exchange, layer: int, compute: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, chosen: Tensor,
    weights: Tensor, experts: int, chunks: int | str = "auto", beside: Callable[[], None] | None = None,
) -> Tensor:  # fmt: skip
    """Return the weighted sum of what experts make of each token, (T, W): dispatch, experts and combine. Collective.

    Args:
        compute: ``(rows (N, W), ends (E / R,)) -> (N, W)``: this rank's experts; ``ends`` are in memory of the host.
        chunks: over several hosts, in how many pieces tokens go. Pieces travel while ``compute`` runs on others before them. "auto":
            1 to 4, of at least 2 MiB of tokens each; the ranks agree on it by one more message.
        beside: over several hosts, what to compute while the first piece is on its way. All ranks have it, or none.
    """
    network = exchange.network
    count = 1 if network is None else network.pieces(hidden, chunks)
    if network is None or (count == 1 and beside is None):
        rows, plan = _dispatch(hidden, chosen, experts, exchange, layer)
        return combine(compute(rows, plan.ends), plan, weights)
    sizes = [hidden.shape[0] * (at + 1) // count - hidden.shape[0] * at // count for at in range(count)]
    device, where = hidden.device, exchange._where(hidden.device)
    pieces = [
        _Piece(*part, experts, exchange, network, layer)
        for part in zip(
            hidden.contiguous().to(where).split(sizes), chosen.to("cpu", torch.int32).contiguous().split(sizes),
            weights.float().contiguous().to(where).split(sizes), strict=True,
        )
    ]  # fmt: skip
    pieces[0].leave()
    if beside is not None:
        beside()
    for piece, following in itertools.pairwise([*pieces, None]):
        assert piece is not None
        if following is not None:
            following.leave()
        piece.pass_through(lambda rows, ends: compute(rows.to(device), ends).to(where))
    returned = [piece.returned() for piece in pieces]
    return (returned[0] if count == 1 else torch.cat(returned)).to(device)


class _Piece:
    """Some tokens of a call, on their way to other hosts while those before them are computed."""

    def __init__(
        self, hidden: Tensor, chosen: Tensor, weights: Tensor, experts: int, exchange: Exchange, network: Network,
        layer: int,
    ) -> None:  # fmt: skip
        self.hidden, self.weights, self.experts, self.exchange, self.layer = hidden, weights, experts, exchange, layer
        self.network = network
        self.way = _route(chosen, hidden, experts, network, layer)

    def leave(self) -> None:
        self.tickets = [self._begin(self.hidden, Phase.DISPATCH), self._begin(self.weights, Phase.WEIGHTS)]

    def pass_through(self, compute: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Compute on the rows of this host's experts, and start the way back of what they made."""
        hidden = self._end(self.tickets[0], self.hidden, Phase.DISPATCH)
        weights = self._end(self.tickets[1], self.weights, Phase.WEIGHTS)
        rows, plan = _gather(hidden, self.way.chosen, self.experts, self.exchange, self.layer, self.way)
        self.partial = _sum(compute(rows, plan.ends), plan, weights, weighted=True)
        self.back = self._begin(self.partial, Phase.COMBINE)

    def returned(self) -> Tensor:
        return self._end(self.back, self.partial, Phase.COMBINE)

    def _begin(self, rows: Tensor, phase: int) -> Tensor:
        return begin(rows, self.way, phase, self.network, later=True)

    def _end(self, ticket: Tensor, rows: Tensor, phase: int) -> Tensor:
        return end(ticket, rows, self.way, phase, self.network, later=True)


def keep_exchanges(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what exchanges and routing return, where all else is computed again: torch's selective activation checkpointing.

    A checkpointed layer then exchanges rows twice forward and twice backward, as one that is not checkpointed, in place of four times
    and two (communication-aware checkpointing of DeepSpeed-TED, Singh et al. 2023, section 5.2). A router with noise cannot route
    otherwise when it runs again. Kept are the rows of this rank's experts, (N, W), and the results of its tokens, (T, W)::

        context = functools.partial(create_selective_checkpoint_contexts, zeropp.moe.keep_exchanges)
        y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False, context_fn=context)
    """
    return CheckpointPolicy.MUST_SAVE if op in _kept() else CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def _kept() -> frozenset[Any]:
    ours = torch.ops.zeropp
    exchanges = (ours.moe_rows_dispatch.default, ours.moe_rows_combine.default)
    between_hosts = (ours.moe_hosts_route.default, ours.moe_hosts_begin.default, ours.moe_hosts_end.default)
    return frozenset((*exchanges, *between_hosts, JOIN, ours.moe_gate.default, torch.ops.aten.topk.default))


def _check_rows(name: str, label: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: {label} is a {type(tensor).__name__}, wanted a tensor")
    if tensor.is_meta:
        raise ValueError(f"{name}: {label} is on meta, wanted a tensor with values, on the cpu or a GPU")
    if tensor.dim() != 2 or tensor.shape[1] == 0 or tensor.dtype not in checks.FLOATS:
        raise ValueError(
            f"{name}: {label} is {tensor.dtype} {tuple(tensor.shape)}, wanted rows (N, W) of float32, bfloat16 or float16"
        )


# --- operators -------------------------------------------------------------------------------------------------------
def _run_dispatch(x: Tensor, chosen: Tensor, experts: int, exchange: int, layer: int) -> tuple[Tensor, ...]:
    one, there = _exchanges[exchange], not x.is_cpu
    tokens, width = x.shape
    k = chosen.shape[1]
    form = (tokens, width, k, experts, dtype_code(x.dtype), there)
    n = one.core.dispatch_begin(layer, x.data_ptr(), chosen.data_ptr(), *form)
    rows = one.memory_like(n, width, x)
    ends = torch.empty(experts // one.here, dtype=torch.int32, device="cpu", pin_memory=there)
    taken = torch.empty(n, 2, dtype=torch.int32, device="cpu", pin_memory=there)
    slots = torch.empty(tokens, k, dtype=torch.int64, device="cpu", pin_memory=there)
    numbers = torch.empty(_C.ROWS_NUMBERS + 3 * one.here, dtype=torch.int64, device="cpu")
    one.core.dispatch_end(*(part.data_ptr() for part in (numbers, ends, taken, slots, rows)), there)
    if there:
        taken, slots = (part.to(x.device, non_blocking=True) for part in (taken, slots))
        one.core.take(*(part.data_ptr() for part in (numbers, taken, x, rows)))
    return rows, ends, slots, taken, numbers, x.new_empty(0, width)


def _run_combine(
    rows: Tensor, weights: Tensor, anchor: Tensor, taken: Tensor, slots: Tensor, numbers: Tensor, weighted: bool,
    exchange: int,
) -> Tensor:  # fmt: skip
    one = _exchanges[exchange]
    y = one.memory_like(slots.shape[0], rows.shape[1], rows)
    addresses = (part.data_ptr() for part in (numbers, taken, slots, rows, weights))
    one.core.combine(*addresses, weighted, y.data_ptr(), not rows.is_cpu)
    return y


def _run_combine_backward(
    grad: Tensor, rows: Tensor, weights: Tensor, taken: Tensor, slots: Tensor, numbers: Tensor, weighted: bool,
    of_weights: bool, exchange: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    one, there = _exchanges[exchange], not grad.is_cpu
    grad_rows = one.memory_like(taken.shape[0], grad.shape[1], grad)
    grad_weights = weights.new_empty(slots.shape if of_weights else _EMPTY)
    dots = weights.new_empty(taken.shape[0] if of_weights and there else 0)
    addresses = (part.data_ptr() for part in (numbers, taken, slots, grad, weights))
    outputs = (part.data_ptr() for part in (rows, grad_rows, grad_weights, dots))
    one.core.combine_backward(*addresses, weighted, of_weights, *outputs, there)
    return grad_rows, grad_weights


def _run_dispatch_backward(grad: Tensor, taken: Tensor, slots: Tensor, numbers: Tensor, exchange: int) -> Tensor:
    one = _exchanges[exchange]
    grad_x = one.memory_like(slots.shape[0], grad.shape[1], grad)
    addresses = (part.data_ptr() for part in (numbers, taken, slots, grad, grad_x))
    one.core.dispatch_backward(*addresses, not grad.is_cpu)
    return grad_x


def _fake_dispatch(x: Tensor, chosen: Tensor, experts: int, exchange: int, layer: int) -> tuple[Tensor, ...]:
    n = torch.library.get_ctx().new_dynamic_size()
    one = _exchanges[exchange]
    return (
        x.new_empty((n, x.shape[1])),
        x.new_empty((experts // one.here,), dtype=torch.int32, device="cpu"),
        x.new_empty(chosen.shape, dtype=torch.int64),
        x.new_empty((n, 2), dtype=torch.int32),
        x.new_empty((_C.ROWS_NUMBERS + 3 * one.here,), dtype=torch.int64, device="cpu"),
        x.new_empty((0, x.shape[1])),
    )


def _fake_combine(rows: Tensor, weights: Tensor, anchor: Tensor, taken: Tensor, slots: Tensor, *numbers: Any) -> Tensor:
    return rows.new_empty((slots.shape[0], rows.shape[1]))


def _fake_combine_backward(
    grad: Tensor, rows: Tensor, weights: Tensor, taken: Tensor, slots: Tensor, numbers: Tensor, weighted: bool,
    of_weights: bool, exchange: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    made = grad.new_empty((taken.shape[0], grad.shape[1]))
    return made, weights.new_empty(slots.shape if of_weights else _EMPTY)


def _fake_dispatch_backward(grad: Tensor, taken: Tensor, slots: Tensor, numbers: Tensor, exchange: int) -> Tensor:
    return grad.new_empty((slots.shape[0], grad.shape[1]))


def _dispatch_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, ends, slots, taken, numbers, _ = output
    ctx.exchange = _exchanges[inputs[3]]  # lives as long as this backward may come
    ctx.mark_non_differentiable(ends, slots, taken, numbers)
    ctx.save_for_backward(taken, slots, numbers)


def _dispatch_backward(ctx: Any, grad_rows: Tensor, *_: Any) -> tuple[Any, ...]:
    op = torch.ops.zeropp.moe_rows_dispatch_backward.default
    return op(grad_rows.contiguous(), *ctx.saved_tensors, ctx.exchange.number), None, None, None, None


def _combine_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weights, anchor, taken, slots, numbers, ctx.weighted, exchange = inputs
    ctx.anchor = anchor.dtype
    ctx.exchange = _exchanges[exchange]
    ctx.of_weights = ctx.weighted and ctx.needs_input_grad[1]
    kept = rows if ctx.of_weights else rows.new_empty(0)
    ctx.save_for_backward(kept, weights, taken, slots, numbers)


def _combine_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    op = torch.ops.zeropp.moe_rows_combine_backward.default
    how = (ctx.weighted, ctx.of_weights, ctx.exchange.number)
    grad_rows, grad_weights = op(grad.contiguous(), *ctx.saved_tensors, *how)
    by_weights = grad_weights if ctx.of_weights else None
    return grad_rows, by_weights, grad.new_empty(0, grad.shape[1], dtype=ctx.anchor), None, None, None, None, None


_PLAN = "Tensor taken, Tensor slots, Tensor numbers"
_OPERATORS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "moe_rows_dispatch": (
        "(Tensor x, Tensor chosen, int experts, int exchange, int layer) -> (Tensor rows, Tensor ends, Tensor slots, "
        "Tensor taken, Tensor numbers, Tensor anchor)",
        _run_dispatch, _fake_dispatch,
    ),
    "moe_rows_combine": (
        f"(Tensor rows, Tensor weights, Tensor anchor, {_PLAN}, bool weighted, int exchange) -> Tensor",
        _run_combine, _fake_combine,
    ),
    "moe_rows_combine_backward": (
        f"(Tensor grad, Tensor rows, Tensor weights, {_PLAN}, bool weighted, bool of_weights, int exchange) -> "
        "(Tensor grad_rows, Tensor grad_weights)",
        _run_combine_backward, _fake_combine_backward,
    ),
    "moe_rows_dispatch_backward": (
        f"(Tensor grad, {_PLAN}, int exchange) -> Tensor",
        _run_dispatch_backward, _fake_dispatch_backward,
    ),
}  # fmt: skip

_library = register_operators(_OPERATORS, "CompositeExplicitAutograd")
torch.library.register_autograd(
    "zeropp::moe_rows_dispatch", _dispatch_backward, setup_context=_dispatch_context, lib=_library
)
torch.library.register_autograd(
    "zeropp::moe_rows_combine", _combine_backward, setup_context=_combine_context, lib=_library
)
