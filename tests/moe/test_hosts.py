# SPDX-License-Identifier: Apache-2.0
"""The exchange of rows between hosts (one machine under several names), against a loop over tokens in fp64."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from expert_layer import BOUND, EPS, EXPERTS, WIDTH, K, Layer
from ranks import of_all_ranks, on_cpu_only, on_ranks


def exchange_over(hosts: str, tokens: str = "exact") -> Any:
    """Return an exchange over all ranks, on hosts with these names."""
    on_cpu_only("GPUs are of one host")
    import torch.distributed as dist
    import zeropp

    os.environ["ZEROPP_HOST_ID"] = hosts[dist.get_rank()]
    try:
        return zeropp.moe.Exchange(dist.new_group(list(range(len(hosts)))), tokens)
    finally:
        del os.environ["ZEROPP_HOST_ID"]


def network_bytes(exchange: Any) -> int:
    return int(sum(row["network_bytes"] for row in exchange.comm.traffic().values()))


def check(layer: Layer, results: list[torch.Tensor]) -> None:
    for mine, want in zip(results, layer.wanted(), strict=True):
        scale = float(want.abs().max()) if want.numel() else 0.0
        torch.testing.assert_close(mine.double(), want, rtol=BOUND, atol=BOUND * scale)


class _Kept(dict):  # type: ignore[type-arg]
    """Transits that stay when they end: opcheck calls an operator several times with the same ticket."""

    def pop(self, ticket: int) -> Any:  # type: ignore[override]
        kept = self[ticket]
        return kept._replace(own=kept.own.detach().clone())


@on_ranks(4)
def test_torch_sees_the_operators_between_hosts() -> None:
    """Schemas, shapes without values, and gradients; every call is one of all ranks, so they make equally many."""
    import torch.distributed as dist
    from zeropp.moe import hosts

    exchange = exchange_over("aabb")
    number, network = exchange.layer("checked"), exchange.network
    network.transits = _Kept()
    check, ours = torch.library.opcheck, torch.ops.zeropp
    layer = Layer("uneven", dist.get_rank(), 4)
    hidden, chosen = layer.x[dist.get_rank()].float().requires_grad_(), layer.chosen[dist.get_rank()].int()
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    check(ours.moe_hosts_route.default, (chosen, WIDTH, 0, EXPERTS, number, network.number), test_utils=tests)
    way = hosts.route(chosen, hidden, EXPERTS, network, number)
    for phase in (hosts.Phase.DISPATCH, hosts.Phase.COMBINE):
        rows = hidden if phase == hosts.Phase.DISPATCH else torch.ones(len(way.chosen), WIDTH, requires_grad=True)
        check(ours.moe_hosts_begin.default, (rows, *way[1:], phase, False, network.number), test_utils=tests)
        ticket = hosts.begin(rows, way, phase, network).detach().requires_grad_()
        arguments = (ticket, *way[1:], WIDTH, torch.float32, phase, False, network.number)
        check(ours.moe_hosts_end.default, arguments, test_utils=tests)


CASES = ["uneven", "one_without_tokens", "none_for_the_last", "all_for_one", "dropped"]


@pytest.mark.parametrize("hosts", ["aabb", "abba", "abcd", pytest.param("abbb", marks=pytest.mark.slow)])
@on_ranks(4)
def test_a_layer_is_the_loop_over_tokens(hosts: str) -> None:
    import torch.distributed as dist

    exchange = exchange_over(hosts)
    assert (exchange.ranks, exchange.here) == (4, hosts.count(hosts[dist.get_rank()]))
    number = exchange.layer("of the test")
    for case in CASES:
        layer = Layer(case, dist.get_rank(), 4)
        first = layer.run(layer.here(), exchange, number)
        check(layer, first)
        for mine, again in zip(first, layer.run(layer.here(), exchange, number), strict=True):
            assert torch.equal(mine, again)


@pytest.mark.parametrize(("hosts", "tokens"), [("ab", "exact"), ("aabb", "exact"), ("aabb", "int8")])
@on_ranks(4)
def test_a_token_goes_once_to_each_host(hosts: str, tokens: str) -> None:
    """Bytes over the network: of each pair of a token and another host a row each way, forward and backward, and what says so. A row is
    WIDTH fp32, or as many codes and a scale."""
    import torch.distributed as dist

    if dist.get_rank() >= len(hosts):
        dist.new_group(list(range(len(hosts))))
        return
    rank, ranks = dist.get_rank(), len(hosts)
    exchange = exchange_over(hosts, tokens)
    number = exchange.layer("counted")
    layer = Layer("uneven", rank, ranks)
    per, other = EXPERTS // ranks, [r for r in range(ranks) if hosts[r] != hosts[rank]]
    of_host = torch.tensor([hosts[e // per] == "a" for e in range(EXPERTS)])
    before = network_bytes(exchange)
    layer.run(layer.here(), exchange, number)
    here = exchange.comm.host_ranks
    guests_from = other if len(here) == 1 else [r for r in other if r % 2 == rank % 2]

    def pairs(owner: int) -> int:
        on_a = of_host[layer.chosen[owner]]
        return int((on_a if hosts[owner] == "b" else ~on_a).any(1).sum())

    guests, sent = sum(map(pairs, guests_from)), pairs(rank)
    row = WIDTH * 4 if tokens == "exact" else WIDTH + 4
    rows = 2 * (guests + sent) * row  # there and back, forward and backward
    meta = (
        7 * 8 * len(other) + guests * K * (4 + 4) + sent * K * 4
    )  # formats; choices and weights; the weights' gradients
    assert network_bytes(exchange) - before == rows + meta
    assert sent < int((layer.chosen[rank] >= 0).sum())


@pytest.mark.parametrize("hosts", ["aabb", "abcd"])
@on_ranks(4)
def test_int8_rows_are_off_by_half_a_code(hosts: str) -> None:
    """y = sum_j w_j (2 x) and its gradients. A row that goes to a host and back is off by max|x| / 254 times 2 there, and by 1 / 254 of the
    largest of that host's sum on the way back, a gradient by the same; rows of this host are exact, and so are weights' gradients of them."""
    import torch.distributed as dist
    import zeropp

    rank = dist.get_rank()
    exchange, plain = exchange_over(hosts, "int8"), exchange_over(hosts)
    number = exchange.layer("codes"), plain.layer("exact")
    layer = Layer("uneven", rank, 4)
    found = []
    for one, at in ((exchange, number[0]), (plain, number[1])):
        x, weights = layer.here()[:2]
        rows, plan = zeropp.moe.dispatch(x, layer.chosen[rank], EXPERTS, exchange=one, layer=at)
        y = zeropp.moe.combine(rows * 2, plan, weights)
        found.append([y.detach(), *torch.autograd.grad(y, (x, weights), layer.grads[rank])])
    host_of = [hosts[e * 4 // EXPERTS] for e in range(EXPERTS)]
    away = torch.tensor([[host_of[e] != hosts[rank] for e in row] for row in layer.chosen[rank].tolist()])
    weights, x, grad = layer.weights[rank], layer.x[rank], layer.grads[rank]
    heavy = (weights * away).sum(1, keepdim=True)
    code = 1.01 / 254  # and fp32's roundings, and what a code there adds to the largest on the way back
    largest = x.abs().amax(1, keepdim=True)
    bounds = [
        2 * heavy * largest * 2 * code,
        2 * heavy * grad.abs().amax(1, keepdim=True) * 2 * code,
        away
        * (
            2
            * WIDTH
            * code
            * (
                grad.abs().amax(1, keepdim=True) * x.abs().mean(1, keepdim=True)
                + largest * grad.abs().mean(1, keepdim=True)
            )
        ),
    ]
    for mine, exact, bound in zip(*found, bounds, strict=True):
        error = (mine - exact).abs()
        assert (error <= bound + BOUND * exact.abs().max()).all(), (error - bound).max()
        assert away.any() and error.max() > 0


@pytest.mark.parametrize("chunks", [3, "auto"])
@on_ranks(4)
def test_pieces_are_the_whole(chunks: int | str) -> None:
    import torch.distributed as dist
    from zeropp.moe.exchange import through

    exchange = exchange_over("aabb")
    number = exchange.layer("in pieces")
    layer = Layer("one_without_tokens", dist.get_rank(), 4)
    results = []
    for pieces in (chunks, chunks):
        x, weights, gate_up, down = leaves = layer.here()

        def compute(rows: Any, ends: Any, gate_up: Any = gate_up, down: Any = down) -> Any:
            from zeropp.moe.products import swiglu_experts

            return swiglu_experts(rows, ends, gate_up, down, exchange=exchange)

        y = through(exchange, number, compute, x, layer.chosen[layer.rank], weights, EXPERTS, pieces)
        results.append([y.detach(), *torch.autograd.grad(y, leaves, layer.grads[layer.rank])])
        check(layer, results[-1])
    assert all(torch.equal(mine, again) for mine, again in zip(*results, strict=True))


@on_ranks(4)
def test_16_bit_rows_are_rounded_once_a_host() -> None:
    import torch.distributed as dist
    import zeropp

    exchange = exchange_over("aabb")
    number = exchange.layer("bits")
    for dtype in (torch.bfloat16, torch.float16):
        layer = Layer("uneven", dist.get_rank(), 4)
        x, weights, chosen = layer.x[layer.rank].to(dtype), layer.weights[layer.rank], layer.chosen[layer.rank]
        rows, plan = zeropp.moe.dispatch(x, chosen, EXPERTS, exchange=exchange, layer=number)
        y = zeropp.moe.combine(rows * 2, plan, weights)
        want = (2 * weights.double()).sum(1, keepdim=True) * x.double()
        rounding = EPS * 8 + 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(y.double(), want, rtol=rounding, atol=rounding)


@pytest.mark.parametrize(
    ("what", "sentences"),
    [
        ("k", ["k 2, experts 8", "k 1, experts 8"]),
        ("layer", ["route #1 of experts' layer 0", "route #1 of experts' layer 1"]),
        ("phase", ["combine #1 of experts' layer 0", "route #1 of experts' layer 1"]),
    ],
)
@on_ranks(2, alone=True)
def test_ranks_that_differ_are_shown_both(what: str, sentences: list[str]) -> None:
    import torch.distributed as dist
    import zeropp

    exchange = exchange_over("ab")
    layers = [exchange.layer("first"), exchange.layer("second")]
    other = dist.get_rank() == 1
    chosen = torch.zeros(4, 1 if other and what == "k" else 2, dtype=torch.long)

    def run() -> None:
        layer = layers[1 if other and what == "layer" else 0]
        rows, plan = zeropp.moe.dispatch(torch.randn(4, 16), chosen, 8, exchange=exchange, layer=layer)
        if other and what == "phase":
            zeropp.moe.dispatch(torch.randn(4, 16), chosen, 8, exchange=exchange, layer=layers[1])
        zeropp.moe.combine(rows, plan)

    with pytest.raises(zeropp.CommError) as info:
        run()
    assert all(sentence in str(info.value) for sentence in sentences), str(info.value)
    said = of_all_ranks(str(info.value))
    assert all(sentence in one for sentence in sentences for one in said), said


@on_ranks(2)
def test_misuse_is_refused() -> None:
    import zeropp

    exchange = exchange_over("ab")
    number = exchange.layer("misused")
    with pytest.raises(ValueError, match="7 experts on 2 ranks, wanted a multiple of 2"):
        zeropp.moe.dispatch(torch.zeros(1, 4), torch.zeros(1, 1).long(), 7, exchange=exchange, layer=number)
    with pytest.raises(ValueError, match=r"chosen\[1\] is 8, wanted -1 or an expert 0 to 7"):
        zeropp.moe.dispatch(torch.zeros(1, 4), torch.tensor([[0, 8]]), 8, exchange=exchange, layer=number)


@on_ranks("2 hosts")
def test_training_with_int8_tokens() -> None:
    """A loss that is near to that of exact tokens, and not the same; the router and the experts of all ranks get gradients near to theirs.

    Of a gradient's norm an error of 1/254 of each row's largest in four moves a layer leaves a few hundredths at most."""
    import torch.distributed as dist
    import zeropp
    from expert_parity import reference
    from moe_models import batch, build, loss_of

    losses, gradients, _ = reference("Mixtral", 2, steps=1)
    for experts, tokens, most in ((2, "exact", 1e-5), (2, "int8", 0.05)):
        config = zeropp.Config(experts=experts, comm=zeropp.Comm(tokens=tokens))
        model = build("Mixtral", "grouped_mm")
        model, _ = zeropp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
        loss = loss_of(model, batch(0, dist.get_rank()))
        loss.backward()
        assert abs(sum(of_all_ranks(loss.item())) / 2 - losses[0]) <= most * losses[0]
        off = []
        for path, parameter in model.named_parameters():
            gradient = zeropp.get_full(parameter, "grad")
            off.append(float((gradient - gradients[0][path]).norm() / gradients[0][path].norm()))
        assert max(off) <= most, max(off)
        assert tokens == "exact" or max(off) > 1e-4


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks("2 hosts")
def test_training_equals_one_process(stage: int) -> None:
    """Two hosts with half of the experts each, whose parameters nobody else has."""
    from expert_parity import parity

    parity("Mixtral", 2, stage=stage)


@pytest.mark.parametrize("hosts", ["aabb", "abab"])
@on_ranks(4, alone=True)
def test_training_in_groups_over_hosts_equals_one_process(hosts: str) -> None:
    """aabb: tokens stay on a host, and experts are partitioned over hosts; abab: tokens go to other hosts, experts stay."""
    import torch.distributed as dist
    from expert_parity import parity

    os.environ["ZEROPP_HOST_ID"] = hosts[dist.get_rank()]
    for stage in (3, 2, 1, 0):
        parity("Mixtral", 2, stage=stage)
    parity("Mixtral", 4, stage=3)
