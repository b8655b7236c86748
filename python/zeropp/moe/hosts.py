# SPDX-License-Identifier: Apache-2.0
"""The exchange of a mixture of experts between hosts: a token goes once to each host that has some of its experts.

Within a host ranks read each other's rows where they lie (exchange.py). A token that chose experts of another host goes there as one
row, whatever the number of these experts, to the rank at its owner's place, and is a *guest* of that rank: a row behind the rank's own
tokens, in the memory that the ranks of the host read. It returns as one row, the sum over the experts of that host, and its owner adds
the sums in fp32, in order of the hosts (the hierarchical all-to-all of DeepSpeed-MoE, Rajbhandari et al. 2022, section 5.3). So two
moves are all there is, and each is the gradient of the other one:

    send   (T, W) -> (T + G, W)   own rows, and guests that came
    sum    (T + G, W) -> (T, W)   own rows, plus what came back from each other host

The network carries, each way, a row for each pair of a token and another host that has some of its experts. With
``Comm(tokens="int8")`` the rows are int8 with one fp32 scale s = max |x| / 127 a row (as ZeroQuant's tokens, Yao et al. 2022): s round(x / s)
is off by at most s / 2. The weights stay as they are.

Rows on GPUs stay there, and NCCL moves them. The host plans their ways by the choices alone, and waits for nothing else.
"""

from __future__ import annotations

import collections
import itertools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeropp import _C
from zeropp.comm.group import BYTES, DTYPE_CODES, dtype_code, rows_of
from zeropp.errors import CommError, NotBuiltError

__all__ = ["Network", "Phase", "Route", "begin", "end", "route"]

_ALL_TO_ALL = _C.COMM_COLLECTIVES["all_to_all"]
_MAX = _C.COMM_OPS.index("max")
_FORMAT = ("layer", "call", "width", "dtype", "k", "experts")
_PIECE_BYTES, _MOST_PIECES = 2 << 20, 4
_SCALE_BYTES = 4
"""Of a row of int8."""
_numbers = itertools.count(1)
_networks: weakref.WeakValueDictionary[int, Network] = weakref.WeakValueDictionary()


class Phase:
    """The purposes of a message, which the communicator's errors name (csrc/comm/comm.h: enum zpp_rows_phase)."""

    ROUTE, DISPATCH, WEIGHTS, COMBINE, DISPATCH_BACK, WEIGHTS_BACK, COMBINE_BACK = range(1, 8)


_BACK = {
    Phase.DISPATCH: Phase.DISPATCH_BACK, Phase.WEIGHTS: Phase.WEIGHTS_BACK, Phase.COMBINE: Phase.COMBINE_BACK,
}  # fmt: skip
_SENDS = frozenset((Phase.DISPATCH, Phase.WEIGHTS, Phase.COMBINE_BACK))


class Network:
    """The hosts of the ranks that hold different experts.

    Args:
        comm: ``_C.Comm`` over ranks of several hosts.
        empty: ``(rows, width, dtype) -> Tensor`` in memory that the ranks of this host read.
        narrow: rows travel as int8.
    """

    def __init__(
        self, comm: Any, empty: Callable[[int, int, torch.dtype], Tensor], narrow: bool = False
    ) -> None:  # fmt: skip
        self.comm, self.empty, self.narrow = comm, empty, narrow
        self.ranks: int = comm.ranks
        self.hosts: int = comm.hosts
        self.host_of = torch.tensor(comm.host_of, dtype=torch.int32, device="cpu")
        self.elsewhere = [int(host != comm.host_of[comm.rank]) for host in comm.host_of]
        self.calls: collections.Counter[int] = collections.Counter()
        self.transits: dict[int, _Transit] = {}
        self.nccl: Any = None
        """``_C.Nccl``, which moves rows in memory of GPUs, once tokens came there."""
        self._tickets = itertools.count(1)
        self.number = next(_numbers)
        _networks[self.number] = self

    def open(self, device: torch.device, reason: str | None) -> str | None:
        """Let rows cross in memory of a GPU; return why they cannot. Collective.

        Args:
            reason: why the ranks of this host cannot read each other's rows there; None: they can.
        """
        failed = torch.tensor([reason is not None], dtype=torch.int64, device="cpu")
        self.comm.all_reduce(failed.data_ptr(), 1, DTYPE_CODES[torch.int64], _MAX)
        if failed:
            return reason or "the GPUs of another host cannot read each other's memory"
        try:
            self.nccl = _C.Nccl(self.comm, device.index or 0)
        except NotBuiltError as error:
            return str(error)
        return None

    def memory_like(self, rows: Tensor, count: int, width: int) -> Tensor:
        """Return memory (count, width), of the type and device of ``rows``."""
        return self.empty(count, width, rows.dtype) if rows.is_cpu else rows.new_empty(count, width)

    def pieces(self, hidden: Tensor, chunks: int | str) -> int:
        """Return in how many pieces the tokens of a call go, the same on all ranks; for "auto" collective."""
        if isinstance(chunks, int):
            return chunks
        most = torch.tensor([hidden.numel() * hidden.element_size()], device="cpu")
        self.comm.all_reduce(most.data_ptr(), 1, DTYPE_CODES[torch.int64], _MAX)
        return max(1, min(_MOST_PIECES, int(most) // _PIECE_BYTES))

    def swap(self, out: Tensor, came: Tensor, sends: list[int], receives: list[int], tag: int, later: bool) -> Any:
        """Exchange rows, in order of ranks; return a ``_C.Work`` if ``later``, a ``_C.NcclWork`` of rows on a GPU, else None."""
        dsts, srcs = rows_of(came, receives), rows_of(out, sends)
        if not out.is_cpu:
            return self.nccl.submit_exchange(
                _ALL_TO_ALL, BYTES, 0, dsts, srcs, tag, (out, came), _stream_of(out.device)
            )
        if later:
            return self.comm.submit_exchange(_ALL_TO_ALL, BYTES, 0, dsts, srcs, tag, (out, came))
        self.comm.exchange(_ALL_TO_ALL, BYTES, 0, dsts, srcs, tag)
        return None

    def put(self, transit: _Transit) -> Tensor:
        """Keep what is on its way; return its ticket."""
        own = transit.own
        ticket = own.new_empty(1, dtype=torch.float64)
        if own.is_cpu:
            ticket.fill_(next(self._tickets))
        self.transits[_key(ticket)] = transit._replace(ticket=ticket)
        return ticket

    def take(self, ticket: Tensor) -> _Transit:
        """Return what is there now: of rows on a GPU, for all that its stream gets from now on."""
        transit = self.transits.pop(_key(ticket))
        if transit.work is None:
            return transit
        if ticket.is_cpu:
            transit.work.wait()
        else:
            transit.work.order(_stream_of(ticket.device))
        return transit

    def greet(self, form: list[int], counts: Tensor) -> list[int]:
        """Tell each rank elsewhere how many rows come, and compare the format; return how many come from each."""
        far = [rank for rank, there in enumerate(self.elsewhere) if there]
        mine = torch.tensor([[*form, count] for count in counts[far].tolist()], device="cpu")
        theirs = torch.empty_like(mine)
        self.swap(mine, theirs, self.elsewhere, self.elsewhere, _tag(Phase.ROUTE, form), later=False)
        receives = [0] * self.ranks
        for rank, (*there, count) in zip(far, theirs.tolist(), strict=True):
            if there != form:
                self._diverged(rank, form, there)
            receives[rank] = count
        return receives

    def _diverged(self, rank: int, mine: list[int], theirs: list[int]) -> None:
        """End the group, on all ranks, with an error that shows both sides."""
        names = self.comm.job_ranks
        sides = [
            f"rank {names[at]} is at " + ", ".join(f"{what} {value}" for what, value in zip(_FORMAT, form, strict=True))
            for at, form in sorted([(self.comm.rank, mine), (rank, theirs)])
        ]
        sentence = (
            f"moe: {sides[0]}, but {sides[1]}, in an exchange of rows between hosts; the ranks took different paths: all must run the same "
            "layers in the same order, on tokens of one width and type"
        )
        self.comm.abort(sentence)
        raise CommError(sentence, names[rank])


class Route(NamedTuple):
    """The ways of the tokens of one call: T tokens of this rank, P pairs of a token and another host, G guests."""

    chosen: Tensor
    """(T + G, k) int32: experts of this host, in its numbers; -1: elsewhere, or dropped."""
    pairs: Tensor
    """(P,) int32: the token of each pair, in order of the ranks that take it."""
    slots: Tensor
    """(T, hosts) int64: where the row of each host lies: own rows or those that come back; -1: the host has none."""
    counts: Tensor
    """(2 R + 6,) int64: rows to each rank, rows from each rank, and the format, of which the first two are layer and call."""


class _Transit(NamedTuple):
    """Rows on their way, and all memory that their move reads and writes."""

    work: Any
    """``_C.Work``, ``_C.NcclWork``, or None: they are there."""
    own: Tensor
    """A send: (T + G, W), where guests arrive behind the own rows. A sum: the same, whose guests leave."""
    came: Tensor | None
    """(P, W): a sum's rows from other hosts."""
    sent: Tensor
    codes: Tensor | None = None
    """What comes in fewer bits in place of these rows, or of a send's guests."""
    ticket: Tensor | None = None


def route(chosen: Tensor, hidden: Tensor, experts: int, network: Network, layer: int) -> Route:
    """Return where tokens go, and whose come here. Collective over the network's ranks.

    Args:
        chosen: (T, k) int32.
        hidden: (T, W).
        experts: of all ranks, a multiple of their number.
        layer: the number of the layer.

    Raises:
        ValueError: experts that do not divide, or a choice that is none of them.
        zeropp.CommError: ranks that are at another layer or call, or have another k, width or dtype.
    """
    op = torch.ops.zeropp.moe_hosts_route.default
    return Route(*op(chosen, hidden.shape[1], dtype_code(hidden.dtype), experts, layer, network.number))


def begin(rows: Tensor, way: Route, phase: int, network: Network, later: bool = False) -> Tensor:
    """Start a send or a sum; return its ticket for :func:`end`. Differentiable. ``later``: on the progress thread."""
    result: Tensor = torch.ops.zeropp.moe_hosts_begin.default(rows, *way[1:], phase, later, network.number)
    return result


def end(ticket: Tensor, rows: Tensor, way: Route, phase: int, network: Network, later: bool = False) -> Tensor:
    """Wait for what :func:`begin` started on ``rows``, and return its rows. Differentiable."""
    op = torch.ops.zeropp.moe_hosts_end.default
    result: Tensor = op(ticket, *way[1:], rows.shape[1], rows.dtype, phase, later, network.number)
    return result


def _tag(phase: int, form: list[int]) -> int:
    return int(phase | (form[0] & 0xFFFF) << 8 | (form[1] << 24 & (1 << 64) - 1))


# --- operators -------------------------------------------------------------------------------------------------------
# A ticket is a float64 (1,) whose value is a number, and so is its gradient: the backward of `end` begins the opposite move, and that
# of `begin` ends it. Of rows on a GPU it lies there, so that torch runs both in the thread and on the stream of that GPU. Its address is
# the number then, because to read a value the host would wait.


def _key(ticket: Tensor) -> int:
    return int(ticket) if ticket.is_cpu else ticket.data_ptr()


def _stream_of(device: torch.device) -> int:
    return _C.current_stream(device.type, device.index or 0)


def _run_route(chosen: Tensor, width: int, dtype: int, experts: int, layer: int, network: int) -> tuple[Tensor, ...]:
    net = _networks[network]
    tokens, k = chosen.shape
    if experts < 1 or experts % net.ranks:
        raise ValueError(f"moe: {experts} experts on {net.ranks} ranks, wanted a multiple of {net.ranks}")
    facts = torch.tensor([net.ranks, net.comm.rank, net.hosts, experts, k], device="cpu")
    counts = torch.zeros(2 * net.ranks + len(_FORMAT), dtype=torch.int64, device="cpu")
    given = (facts.data_ptr(), net.host_of.data_ptr(), chosen.data_ptr(), tokens, counts.data_ptr())
    _C.moe_hosts_count(*given)
    sends = counts[: net.ranks]
    there = net.nccl is not None  # pinned, for a GPU
    pairs = torch.empty(int(sends.sum()), dtype=torch.int32, device="cpu", pin_memory=there)
    theirs = torch.empty(len(pairs), k, dtype=torch.int32, device="cpu")
    slots = torch.empty(tokens, net.hosts, dtype=torch.int64, device="cpu", pin_memory=there)
    net.calls[layer] += 1
    form = [layer, net.calls[layer], width, dtype, k, experts]
    receives = net.greet(form, sends)
    counts[net.ranks :] = torch.tensor(receives + form, device="cpu")
    here = torch.empty(tokens + sum(receives), k, dtype=torch.int32, device="cpu")
    _C.moe_hosts_route(*given, *(part.data_ptr() for part in (pairs, theirs, here, slots)))
    net.swap(theirs, here[tokens:], sends.tolist(), receives, _tag(Phase.ROUTE, form), later=False)
    return here, pairs, slots, counts


def _run_begin(
    rows: Tensor, pairs: Tensor, slots: Tensor, counts: Tensor, phase: int, later: bool, network: int
) -> Tensor:
    net = _networks[network]
    every, tokens, width = counts.tolist(), slots.shape[0], rows.shape[1]
    sends, receives, form = every[: net.ranks], every[net.ranks : 2 * net.ranks], every[2 * net.ranks :]
    tag = _tag(phase, form)
    if net.narrow and phase not in (Phase.WEIGHTS, Phase.WEIGHTS_BACK):
        return _begin_narrow(net, rows, pairs, tokens, (sends, receives), phase, tag, later)
    if phase in _SENDS:
        packed, out = (net.memory_like(rows, count, width) for count in (len(pairs), tokens + sum(receives)))
        torch.index_select(rows, 0, pairs, out=packed)
        work = net.swap(packed, out[tokens:], sends, receives, tag, later)
        out[:tokens].copy_(rows)
        transit = _Transit(work, out, None, packed)
    else:
        rows, came = rows.contiguous(), net.memory_like(rows, len(pairs), width)
        transit = _Transit(net.swap(rows[tokens:], came, receives, sends, tag, later), rows, came, rows)
    return net.put(transit)


def _begin_narrow(
    net: Network, rows: Tensor, pairs: Tensor, tokens: int, counts: tuple[list[int], list[int]], phase: int, tag: int, later: bool
) -> Tensor:  # fmt: skip
    sends, receives = counts
    width, is_send = rows.shape[1], phase in _SENDS
    sent = _narrowed(rows.index_select(0, pairs) if is_send else rows[tokens:])
    come = sum(receives) if is_send else len(pairs)
    codes = rows.new_empty(come, width + _SCALE_BYTES, dtype=torch.uint8)
    work = net.swap(sent, codes, *((sends, receives) if is_send else (receives, sends)), tag, later)
    if is_send:
        own = net.memory_like(rows, tokens + come, width)
        own[:tokens].copy_(rows)
        transit = _Transit(work, own, None, sent, codes)
    else:
        transit = _Transit(work, rows.contiguous(), net.memory_like(rows, come, width), sent, codes)
    return net.put(transit)


def _narrowed(rows: Tensor) -> Tensor:
    """Return rows (N, W) as bytes (N, W + 4): int8 codes, and the scale. Rows that are not finite become NaN."""
    if not len(rows):  # torch has no bytes of nothing
        return rows.new_empty(0, rows.shape[1] + _SCALE_BYTES, dtype=torch.uint8)
    values = rows.float()
    scales = values.abs().amax(1, keepdim=True) / 127
    codes = torch.where(scales > 0, values / scales, 0.0).round_().to(torch.int8)
    return torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)], 1)


def _widen(codes: Tensor, rows: Tensor) -> None:
    """Write the values of :func:`_narrowed` to ``rows``."""
    if not len(rows):
        return
    width = rows.shape[1]
    scales = codes[:, width:].contiguous().view(torch.float32)
    rows.copy_(codes[:, :width].view(torch.int8) * scales)


def _run_end(
    ticket: Tensor, pairs: Tensor, slots: Tensor, counts: Tensor, width: int, dtype: torch.dtype, phase: int,
    later: bool, network: int,
) -> Tensor:  # fmt: skip
    net = _networks[network]
    _, own, came, _, codes, _ = net.take(ticket)
    if codes is not None:
        _widen(codes, own[slots.shape[0] :] if came is None else came)
    if came is None:
        return own
    if not own.is_cpu:
        return _summed(own, came, slots)
    tokens = slots.shape[0]
    y = net.empty(tokens, width, dtype)
    given = (own.data_ptr(), came.data_ptr(), slots.data_ptr(), tokens, net.hosts, width, dtype_code(dtype))
    _C.moe_hosts_sum(*given, y.data_ptr())
    return y


def _summed(own: Tensor, came: Tensor, slots: Tensor) -> Tensor:
    """Return the sum over hosts of each token, in fp32 in their order (csrc/ops/moe/hosts.h), on a GPU."""
    tokens = slots.shape[0]
    every = torch.cat([own[:tokens], came])
    places = torch.where(slots < 0, 0, (slots >> 32) * tokens + (slots & 0xFFFFFFFF))
    y = torch.zeros(tokens, own.shape[1], dtype=torch.float32, device=own.device)
    for host in range(slots.shape[1]):
        rows = every.index_select(0, places[:, host]).float()
        y += torch.where(slots[:, host : host + 1] < 0, 0.0, rows)
    return y.to(own.dtype)


def _fake_route(chosen: Tensor, width: int, dtype: int, experts: int, layer: int, network: int) -> tuple[Tensor, ...]:
    here, pairs = (torch.library.get_ctx().new_dynamic_size() for _ in range(2))
    net = _networks[network]
    return (
        chosen.new_empty((here, chosen.shape[1])),
        chosen.new_empty((pairs,)),
        chosen.new_empty((chosen.shape[0], net.hosts), dtype=torch.int64),
        chosen.new_empty((2 * net.ranks + len(_FORMAT),), dtype=torch.int64),
    )


def _fake_begin(rows: Tensor, *_: Any) -> Tensor:
    return rows.new_empty((1,), dtype=torch.float64)


def _fake_end(
    ticket: Tensor, pairs: Tensor, slots: Tensor, counts: Tensor, width: int, dtype: torch.dtype, phase: int,
    later: bool, network: int,
) -> Tensor:  # fmt: skip
    count = torch.library.get_ctx().new_dynamic_size() if phase in _SENDS else slots.shape[0]
    return ticket.new_empty((count, width), dtype=dtype)


def _begin_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, pairs, slots, counts, ctx.phase, ctx.later, network = inputs
    ctx.network, ctx.width, ctx.dtype = _networks[network], rows.shape[1], rows.dtype
    ctx.save_for_backward(pairs, slots, counts)


def _begin_backward(ctx: Any, ticket: Tensor) -> tuple[Any, ...]:
    how = (ctx.width, ctx.dtype, _BACK[ctx.phase], ctx.later, ctx.network.number)
    return torch.ops.zeropp.moe_hosts_end.default(ticket, *ctx.saved_tensors, *how), *(None,) * 6


def _end_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, pairs, slots, counts, _, _, ctx.phase, ctx.later, network = inputs
    ctx.network = _networks[network]
    ctx.save_for_backward(pairs, slots, counts)


def _end_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    how = (_BACK[ctx.phase], ctx.later, ctx.network.number)
    return torch.ops.zeropp.moe_hosts_begin.default(grad.contiguous(), *ctx.saved_tensors, *how), *(None,) * 8


_WAY = "Tensor pairs, Tensor slots, Tensor counts"
_OPERATORS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "moe_hosts_route": (
        "(Tensor chosen, int width, int dtype, int experts, int layer, int network) -> (Tensor here, Tensor pairs, "
        "Tensor slots, Tensor counts)",
        _run_route, _fake_route,
    ),
    "moe_hosts_begin": (
        f"(Tensor rows, {_WAY}, int phase, bool later, int network) -> Tensor", _run_begin, _fake_begin,
    ),
    "moe_hosts_end": (
        f"(Tensor ticket, {_WAY}, int width, ScalarType dtype, int phase, bool later, int network) -> Tensor",
        _run_end, _fake_end,
    ),
}  # fmt: skip


def register_operators(operators: dict[str, tuple[str, Any, Any]], key: str = "CPU") -> torch.library.Library:
    """Register operators: name -> (schema, function, the same for shapes alone); they live as long as the result.

    Args:
        key: torch's name for the devices that have them: the CPU, or all ("CompositeExplicitAutograd").
    """
    library = torch.library.Library("zeropp", "FRAGMENT")
    for name, (schema, run, fake) in operators.items():
        library.define(f"{name}{schema}")
        library.impl(name, run, key)
        torch.library.register_fake(f"zeropp::{name}", fake, lib=library)
    return library


_library = register_operators(_OPERATORS, "CompositeExplicitAutograd")
torch.library.register_autograd("zeropp::moe_hosts_begin", _begin_backward, setup_context=_begin_context, lib=_library)
torch.library.register_autograd("zeropp::moe_hosts_end", _end_backward, setup_context=_end_context, lib=_library)
