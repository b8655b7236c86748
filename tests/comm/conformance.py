# SPDX-License-Identifier: Apache-2.0
"""Requirements of the backend "zeropp", one function a subject, each called on every rank of a running group.

test_process_group.py runs all of them in one launch a world size. Every function computes what it expects in plain torch.
"""

from __future__ import annotations

import copy
import tempfile
import traceback
from collections.abc import Callable

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

SUBJECTS: dict[str, Callable[[int, int], None]] = {}


def subject(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
    SUBJECTS[function.__name__] = function
    return function


def same(seen: torch.Tensor, wanted: torch.Tensor) -> None:
    assert seen.dtype == wanted.dtype and torch.equal(seen, wanted), f"{seen} is not {wanted}"


def of_rank(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return random values of a rank, which every rank can compute."""
    generator = torch.Generator().manual_seed(1000 * rank + sum(shape))
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def rank_order_sum(ranks: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return ((r0 + r1) + r2) + ..., in fp32 for 16-bit elements, rounded once."""
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = of_rank(0, *shape, dtype=dtype).to(wide)
    for rank in range(1, ranks):
        total = total + of_rank(rank, *shape, dtype=dtype).to(wide)
    return total.to(dtype)


def sentence(call: Callable[[], object], kind: type[BaseException] = ValueError) -> str:
    """Return the message of a call that is refused."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("no error")


SIZES = [(1,), (3,), (7, 11), (5000,), (70001,), (3, 200, 333)]


@subject
def sums_equal_rank_order_bit_for_bit(rank: int, ranks: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64):
        for shape in SIZES:
            tensor = of_rank(rank, *shape, dtype=dtype)
            dist.all_reduce(tensor)
            same(tensor, rank_order_sum(ranks, *shape, dtype=dtype))


@subject
def same_bits_every_time(rank: int, ranks: int) -> None:
    first = of_rank(rank, 50021)
    dist.all_reduce(first)
    for repeat in range(5):
        again = of_rank(rank, 50021)
        dist.all_reduce(again, async_op=repeat % 2 == 1)
        dist.barrier()
        same(again, first)


@subject
def reduce_operations(rank: int, ranks: int) -> None:
    values = torch.stack([of_rank(r, 301, dtype=torch.int64) for r in range(ranks)])
    bits = {
        dist.ReduceOp.MIN: values.amin(0),
        dist.ReduceOp.MAX: values.amax(0),
        dist.ReduceOp.PRODUCT: values.prod(0),
    }
    for op, fold in (
        (dist.ReduceOp.BAND, torch.bitwise_and),
        (dist.ReduceOp.BOR, torch.bitwise_or),
        (dist.ReduceOp.BXOR, torch.bitwise_xor),
    ):
        folded = values[0]
        for r in range(1, ranks):
            folded = fold(folded, values[r])
        bits[op] = folded
    for op, wanted in bits.items():
        tensor = values[rank].clone()
        dist.all_reduce(tensor, op=op)
        same(tensor, wanted)
    mean = of_rank(rank, 4001)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    torch.testing.assert_close(mean, rank_order_sum(ranks, 4001) / ranks)
    factors = [0.5 * (r + 1) for r in range(ranks)]
    scaled = sum(of_rank(r, 4001) * factors[r] for r in range(ranks))
    for factor in (factors[rank], torch.tensor([factors[rank]])):
        premul = dist._make_nccl_premul_sum(factor)
        for blocking in (True, False):
            tensor = of_rank(rank, 4001)
            work = dist.all_reduce(tensor, op=premul, async_op=not blocking)
            if not blocking:
                work.wait()
            torch.testing.assert_close(tensor, scaled)
        part, source = torch.empty(4001), of_rank(rank, 4001).repeat(ranks)
        dist.reduce_scatter_tensor(part, source, op=premul)
        torch.testing.assert_close(part, scaled)
        same(source, of_rank(rank, 4001).repeat(ranks))
    flags = torch.tensor([rank == 0, True, False])
    dist.all_reduce(flags, op=dist.ReduceOp.SUM)
    same(flags, torch.tensor([True, True, False]))
    pairs = torch.full((5,), complex(rank, 1))
    dist.all_reduce(pairs)
    same(pairs, torch.full((5,), complex(sum(range(ranks)), ranks)))


@subject
def special_values(rank: int, ranks: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensor = torch.tensor(
            [float("nan"), float("inf"), float("-inf") if rank else float("inf"), 0.0, -0.0] * 20, dtype=dtype
        )
        dist.all_reduce(tensor)
        wanted = [float("nan"), float("inf"), float("nan") if ranks > 1 else float("inf"), 0.0, -0.0]
        torch.testing.assert_close(tensor, torch.tensor(wanted * 20, dtype=dtype), equal_nan=True, rtol=0, atol=0)
        least = torch.tensor([1.0, float("nan")] if rank == 0 else [2.0, 3.0], dtype=dtype)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        assert least[0] == 1.0 and least[1].isnan()


@subject
def not_contiguous(rank: int, ranks: int) -> None:
    tensor = of_rank(rank, 40, 60).t()
    dist.all_reduce(tensor)
    same(tensor, rank_order_sum(ranks, 40, 60).t())
    wide = torch.zeros(ranks * 3, 8)[:, ::2]
    dist.all_gather_into_tensor(wide, of_rank(rank, 3, 4))
    same(wide, torch.cat([of_rank(r, 3, 4) for r in range(ranks)]))
    column = of_rank(0, 9, 4).clone() if rank == 0 else torch.zeros(9, 4)
    dist.broadcast(column[:, 1], src=0)
    same(column[:, 1], of_rank(0, 9, 4)[:, 1])
    later = of_rank(rank, 30, 20).t()
    dist.all_reduce(later, async_op=True).wait()
    same(later, rank_order_sum(ranks, 30, 20).t())


@subject
def all_gather(rank: int, ranks: int) -> None:
    for dtype in (torch.float32, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn):
        for shape in SIZES:
            mine = of_rank(rank, *shape).to(dtype)
            pieces = [torch.empty_like(mine) for _ in range(ranks)]
            dist.all_gather(pieces, mine)
            whole = torch.empty((ranks, *shape), dtype=dtype)
            dist.all_gather_into_tensor(whole, mine)
            for r in range(ranks):
                wanted = of_rank(r, *shape).to(dtype).view(torch.uint8)
                same(pieces[r].view(torch.uint8), wanted)
                same(whole[r].view(torch.uint8), wanted)


@subject
def reduce_scatter(rank: int, ranks: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        for length in (1, 5, 1003, 60001):
            source = of_rank(rank, ranks * length, dtype=dtype)
            wanted = rank_order_sum(ranks, ranks * length, dtype=dtype)[rank * length : (rank + 1) * length]
            output = torch.empty(length, dtype=dtype)
            dist.reduce_scatter_tensor(output, source)
            same(output, wanted)
            dist.reduce_scatter(output, list(source.clone().split(length)))
            same(output, wanted)
            inside = source.clone()
            dist.reduce_scatter_tensor(inside[rank * length : (rank + 1) * length], inside)
            same(inside[rank * length : (rank + 1) * length], wanted)


@subject
def one_to_all_and_back(rank: int, ranks: int) -> None:
    for root in range(ranks):
        for shape in SIZES:
            tensor = of_rank(rank, *shape)
            dist.broadcast(tensor, src=root)
            same(tensor, of_rank(root, *shape))
            tensor = of_rank(rank, *shape)
            dist.reduce(tensor, dst=root)
            same(tensor, rank_order_sum(ranks, *shape) if rank == root else of_rank(rank, *shape))
            mine = of_rank(rank, *shape)
            pieces = [torch.empty_like(mine) for _ in range(ranks)] if rank == root else None
            dist.gather(mine, pieces, dst=root)
            if pieces is not None:
                for r in range(ranks):
                    same(pieces[r], of_rank(r, *shape))
            handed = [of_rank(r + 50, *shape) for r in range(ranks)] if rank == root else None
            dist.scatter(mine, handed, src=root)
            same(mine, of_rank(rank + 50, *shape))


@subject
def all_to_all(rank: int, ranks: int) -> None:
    for rows in (1, 3, 4001):
        source = torch.stack([torch.full((rows, 3), 100.0 * rank + r) for r in range(ranks)]).view(ranks * rows, 3)
        output = torch.empty_like(source)
        dist.all_to_all_single(output, source)
        same(output, torch.cat([torch.full((rows, 3), 100.0 * r + rank) for r in range(ranks)]))
        back = torch.empty_like(source)
        dist.all_to_all_single(back, output)
        same(back, source)  # twice is where it began
    sizes = [[(5 * a + 3 * b) % 7 * 2000 for b in range(ranks)] for a in range(ranks)]  # from a to b; some are 0
    source = torch.cat([torch.full((sizes[rank][r],), 10.0 * rank + r) for r in range(ranks)])
    into = [sizes[r][rank] for r in range(ranks)]
    output = torch.empty(sum(into))
    dist.all_to_all_single(output, source, into, sizes[rank])
    same(output, torch.cat([torch.full((into[r],), 10.0 * r + rank) for r in range(ranks)]))
    pieces = [torch.empty(r + 1) for r in range(ranks)]
    dist.all_to_all(pieces, [torch.full((rank + 1,), float(rank)) for _ in range(ranks)])
    for r in range(ranks):
        same(pieces[r], torch.full((r + 1,), float(r)))


@subject
def send_and_receive(rank: int, ranks: int) -> None:
    if ranks == 1:
        return
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    for length in (1, 5000, 600001):
        works = [dist.isend(torch.full((length,), float(rank + tag)), right, tag=tag) for tag in range(3)]
        for tag in (2, 0, 1):
            room = torch.empty(length)
            assert dist.recv(room, left, tag=tag) == left
            same(room, torch.full((length,), float(left + tag)))
        for work in works:
            work.wait()
    operations = [
        dist.P2POp(dist.isend, torch.full((4,), float(rank)), right),
        dist.P2POp(dist.irecv, room := torch.empty(4), left),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    same(room, torch.full((4,), float(left)))
    if rank == 0:
        seen = {dist.recv(torch.empty(1)) for _ in range(ranks - 1)}
        assert seen == set(range(1, ranks))
    else:
        dist.send(torch.ones(1), 0)


@subject
def asynchronous_in_any_mixture(rank: int, ranks: int) -> None:
    tensors = [of_rank(rank, 10 + 3000 * (k % 3)) for k in range(30)]
    works = []
    for k, tensor in enumerate(tensors):
        work = dist.all_reduce(tensor, async_op=k % 4 != 0)
        works.append(work)
        if k % 7 == 0:
            dist.barrier()
    for k, work in enumerate(works):
        if work is not None:
            work.wait()
            assert work.is_completed() and work.is_success() and work.exception() is None
        same(tensors[k], rank_order_sum(ranks, 10 + 3000 * (k % 3)))
    tensor = of_rank(rank, 7)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    same(future.wait()[0], rank_order_sum(ranks, 7))
    doubled = dist.all_reduce(of_rank(rank, 7), async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    same(doubled.wait(), rank_order_sum(ranks, 7) * 2)


@subject
def coalesced(rank: int, ranks: int) -> None:
    with dist._coalescing_manager():
        tensors = [of_rank(rank, n) for n in (3, 4000)]
        for tensor in tensors:
            dist.all_reduce(tensor)
    for tensor, n in zip(tensors, (3, 4000), strict=True):
        same(tensor, rank_order_sum(ranks, n))
    with dist._coalescing_manager(async_ops=True) as manager:
        outputs = [torch.empty(ranks * n) for n in (3, 4000)]
        for output, n in zip(outputs, (3, 4000), strict=True):
            dist.all_gather_into_tensor(output, of_rank(rank, n))
    manager.wait()
    for output, n in zip(outputs, (3, 4000), strict=True):
        same(output, torch.cat([of_rank(r, n) for r in range(ranks)]))
    for later in (False, True):
        twice = of_rank(rank, 5)
        work = dist.all_reduce_coalesced([twice, twice], async_op=later)
        if later:
            assert len(work.wait()) == 2  # what torch gives here is a future
        same(twice, rank_order_sum(ranks, 5))


@subject
def both_spellings(rank: int, ranks: int) -> None:
    """torch calls a group by older and newer names, options by position, by keyword or not at all."""
    group = dist.group.WORLD
    whole, mine = torch.cat([of_rank(r, 5) for r in range(ranks)]), of_rank(rank, 5)
    wide, total = of_rank(rank, 5 * ranks), rank_order_sum(ranks, 5 * ranks)[5 * rank : 5 * rank + 5]
    there = torch.cat([of_rank(r, 5 * ranks)[5 * rank : 5 * rank + 5] for r in range(ranks)])
    for later in (True, False):
        gather, scatter = c10d.AllgatherOptions(), c10d.ReduceScatterOptions()
        exchange = c10d.AllToAllOptions()
        for options in (gather, scatter, exchange):
            options.asyncOp = later
        for name in ("_allgather_base", "all_gather_single"):
            for args in (((), {}), ((gather,), {}), ((), {"opts": gather})):
                output = torch.empty(5 * ranks)
                getattr(group, name)(output, mine, *args[0], **args[1]).wait()
                same(output, whole)
        for name in ("_reduce_scatter_base", "reduce_scatter_single"):
            for args in (((), {}), ((scatter,), {}), ((), {"opts": scatter})):
                output = torch.empty(5)
                getattr(group, name)(output, wide, *args[0], **args[1]).wait()
                same(output, total)
        for name in ("alltoall_base", "all_to_all_single"):
            for args in (((), {}), ((exchange,), {}), ((), {"opts": exchange})):
                output = torch.empty(5 * ranks)
                getattr(group, name)(output, wide, [], [], *args[0], **args[1]).wait()
                same(output, there)
        for name in ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"):
            outputs = [torch.empty(5 * ranks), torch.empty(5 * ranks)]
            getattr(group, name)(outputs, [mine, mine + 1], opts=gather).wait()
            same(outputs[0], whole)
            same(outputs[1], whole + 1)
        for name in ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"):
            outputs = [torch.empty(5), torch.empty(5)]
            getattr(group, name)(outputs, [wide, wide], opts=scatter).wait()
            same(outputs[0], total)
            same(outputs[1], total)


@subject
def objects(rank: int, ranks: int) -> None:
    everything: list[object] = [None] * ranks
    dist.all_gather_object(everything, {"rank": rank, "text": "x" * (rank * 50000)})
    assert everything == [{"rank": r, "text": "x" * (r * 50000)} for r in range(ranks)]
    one = [rank, "a"]
    dist.broadcast_object_list(one, src=ranks - 1)
    assert one == [ranks - 1, "a"]
    mine: list[object] = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(ranks)] if rank == 0 else None, src=0)
    assert mine == [f"for {rank}"]


@subject
def groups(rank: int, ranks: int) -> None:
    members = list(range(0, ranks, 2))
    group = dist.new_group(members)
    if rank in members:
        tensor = torch.full((3,), float(rank))
        dist.all_reduce(tensor, group=group)
        same(tensor, torch.full((3,), float(sum(members))))
        dist.barrier(group)
    part = dist.group.WORLD.split_group(list(range(ranks)), group_name="all")
    assert part is not None
    part.barrier().wait()
    part.monitored_barrier()
    part.shutdown()


@subject
def device_mesh_and_dtensor(rank: int, ranks: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (ranks,))
    whole = of_rank(0, 8, 6)
    spread = distribute_tensor(whole, mesh, [Shard(0)])
    same(spread.full_tensor(), whole)
    same(spread.redistribute(mesh, [Replicate()]).to_local(), whole)
    same(spread.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
    torch.testing.assert_close(spread.sum().full_tensor(), whole.sum())


@subject
def functional_collectives(rank: int, ranks: int) -> None:
    world = dist.group.WORLD
    same(funcol.wait_tensor(funcol.all_reduce(of_rank(rank, 9), "sum", world)), rank_order_sum(ranks, 9))
    gathered = funcol.wait_tensor(funcol.all_gather_tensor(of_rank(rank, 9), 0, world))
    same(gathered, torch.cat([of_rank(r, 9) for r in range(ranks)]))
    scattered = funcol.wait_tensor(funcol.reduce_scatter_tensor(of_rank(rank, 9 * ranks), "sum", 0, world))
    same(scattered, rank_order_sum(ranks, 9 * ranks)[9 * rank : 9 * rank + 9])
    funcol.wait_tensor(funcol.all_to_all_single(of_rank(rank, 2 * ranks), None, None, world))
    same(funcol.wait_tensor(funcol.broadcast(of_rank(rank, 4), 0, world)), of_rank(0, 4))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def graph(x: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(x, "sum", world) + 1

    same(graph(of_rank(rank, 4)), rank_order_sum(ranks, 4) + 1)


def _net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


def _whole_gradients(ranks: int) -> list[torch.Tensor]:
    """Return the gradients of the mean over ranks, computed in one process."""
    net = _net()
    sum((net(of_rank(r, 4, 16)).square().mean() for r in range(ranks)), torch.zeros(())).div(ranks).backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


@subject
def ddp(rank: int, ranks: int) -> None:
    for bucket_mb in (25, 1e-4):  # one bucket, and one a parameter
        net = nn.parallel.DistributedDataParallel(_net(), bucket_cap_mb=bucket_mb)
        for _ in range(2):
            net.zero_grad()
            net(of_rank(rank, 4, 16)).square().mean().backward()
        for parameter, wanted in zip(net.parameters(), _whole_gradients(ranks), strict=True):
            torch.testing.assert_close(parameter.grad, wanted)


@subject
def ddp_with_a_comm_hook(rank: int, ranks: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    net = nn.parallel.DistributedDataParallel(_net())
    net.register_comm_hook(None, fp16_compress_hook)
    net(of_rank(rank, 4, 16)).square().mean().backward()
    for parameter, wanted in zip(net.parameters(), _whole_gradients(ranks), strict=True):
        torch.testing.assert_close(parameter.grad, wanted, rtol=2e-2, atol=2e-3)


@subject
def fsdp2_and_checkpoint(rank: int, ranks: int) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    net = _net()
    fully_shard(net[0])
    fully_shard(net)
    net(of_rank(rank, 4, 16)).square().mean().backward()
    for parameter, wanted in zip(net.parameters(), _whole_gradients(ranks), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), wanted)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    torch.optim.AdamW(net.parameters(), lr=1e-2).step()
    before = {name: value.full_tensor().clone() for name, value in net.state_dict().items()}
    folder: list[object] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    dcp.save({"net": net.state_dict()}, checkpoint_id=str(folder[0]))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    dcp.load({"net": net.state_dict()}, checkpoint_id=str(folder[0]))
    for name, value in net.state_dict().items():
        same(value.full_tensor(), before[name])


@subject
def sparse_sums(rank: int, ranks: int) -> None:
    """Other places and other numbers of elements on each rank, rank 1 none; duplicates add up; dense dimensions; blocking and later."""
    import zeropp

    def of(r: int, dtype: torch.dtype, dense: tuple[int, ...]) -> torch.Tensor:
        count = 0 if r == 1 else 3 + r
        places = torch.stack([(torch.arange(count) * (r + 1)) % 7, torch.arange(count) % 2])
        return torch.sparse_coo_tensor(places, of_rank(r, count, *dense).to(dtype), (7, 2, *dense))

    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for dense in ((), (3,)):
            wide = torch.float32 if dtype == torch.bfloat16 else dtype
            total = sum(
                (of(r, dtype, dense).to_dense().to(wide) for r in range(1, ranks)),
                of(0, dtype, dense).to_dense().to(wide),
            )
            for later in (False, True):
                tensor = of(rank, dtype, dense)
                work = dist.all_reduce(tensor, async_op=later)
                if later:
                    work.wait()
                torch.testing.assert_close(tensor.to_dense(), total.to(dtype))
    mean = of(rank, torch.float32, ())
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    wanted = sum((of(r, torch.float32, ()).to_dense() for r in range(1, ranks)), of(0, torch.float32, ()).to_dense())
    torch.testing.assert_close(mean.to_dense(), wanted / ranks)
    longer = int(rank > 0 and rank == ranks - 1)
    try:
        dist.all_reduce(torch.sparse_coo_tensor(torch.zeros(1, 1), torch.ones(1), (4 + longer,)))
    except zeropp.CommError as error:
        assert (
            f"rank 0 has shape (4,) with 1 sparse dimensions and dtype code 0, but rank {ranks - 1} has shape (5,)"
            in str(error)
        )
    else:
        assert ranks == 1, "no error"

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(20, 4, sparse=True), nn.Linear(4, 2)

        def forward(self, at: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.out(self.table(at))
            return out

    torch.manual_seed(0)
    plain = Words()
    net = nn.parallel.DistributedDataParallel(copy.deepcopy(plain))
    at = [torch.randint(0, 20, (6,), generator=torch.Generator().manual_seed(r)) for r in range(ranks)]
    net(at[rank]).square().mean().backward()
    torch.stack([plain(rows).square().mean() for rows in at]).mean().backward()
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(ours.grad.to_dense(), theirs.grad.to_dense())


@subject
def refusals(rank: int, ranks: int) -> None:
    import zeropp

    assert "bor of float32" in sentence(lambda: dist.all_reduce(torch.ones(3), op=dist.ReduceOp.BOR))
    assert "avg of int64" in sentence(lambda: dist.all_reduce(torch.ones(3, dtype=torch.int64), op=dist.ReduceOp.AVG))
    assert "to_dense" in sentence(lambda: dist.group.WORLD.allreduce([torch.eye(3).to_sparse_csr()]))
    assert "to_dense" in sentence(lambda: dist.group.WORLD.broadcast([torch.eye(3).to_sparse()]))

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner: torch.Tensor) -> torch.Tensor:
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined, no-any-return]

        @classmethod
        def __torch_dispatch__(cls, *_: object, **__: object) -> torch.Tensor:
            raise AssertionError("nothing is computed here")

    hollow = Wrapper(torch.ones(3))  # has no memory of its own: what reads it there would crash
    for call in (
        dist.all_reduce,
        lambda t: dist.broadcast(t, 0),
        lambda t: dist.scatter(t, [t] * ranks if rank == 0 else None),
    ):
        assert "on a Wrapper, whose elements lie in other tensors" in sentence(lambda call=call: call(hollow))
    group, pair = dist.group.WORLD, [torch.ones(3), torch.ones(3)]
    for call in (group.allreduce, group.broadcast, group.reduce):
        assert "of a list of 2 tensors, wanted one" in sentence(lambda call=call: call(pair))
    assert "of a list of 0 tensors, wanted one" in sentence(lambda: group.allreduce([]))
    assert "max of a sparse tensor" in sentence(lambda: dist.all_reduce(torch.eye(3).to_sparse(), op=dist.ReduceOp.MAX))
    assert "torch.float8_e4m3fn is not a dtype" in sentence(
        lambda: dist.all_reduce(torch.ones(3).to(torch.float8_e4m3fn))
    )
    assert "on meta" in sentence(lambda: dist.all_reduce(torch.ones(3, device="meta")))
    door = zeropp.comm.Communicator()
    rows = [0] * ranks + [3]
    assert f"source of 3 rows for {ranks} ranks cannot be parted as {rows}" in sentence(
        lambda: door.all_to_all(torch.ones(ranks), torch.ones(3), source_rows=rows)
    )
    too_large = torch.empty(3 * ranks + 1)
    assert f"wanted one dtype and 3 x {ranks} elements" in sentence(
        lambda: dist.group.WORLD._allgather_base(too_large, torch.ones(3))
    )


@subject
def traffic_is_what_the_algorithms_say(rank: int, ranks: int) -> None:
    import zeropp

    def bytes_of(kind: str, call: Callable[[], object]) -> int:
        before = zeropp.comm.all_traffic()["shm"][kind]["bytes"]
        call()
        return zeropp.comm.all_traffic()["shm"][kind]["bytes"] - before

    for elems in (1000, 100_000):  # small and large take different ways
        tensor = torch.ones(elems)
        assert (
            bytes_of("all_gather", lambda t=tensor: dist.all_gather_into_tensor(torch.empty(ranks * t.numel()), t))
            == (ranks - 1) * 4 * elems
        )
        source = torch.ones(elems * ranks)
        assert (
            bytes_of("reduce_scatter", lambda s=source: dist.reduce_scatter_tensor(torch.empty(s.numel() // ranks), s))
            == (ranks - 1) * 4 * elems
        )
        reduced = bytes_of("all_reduce", lambda t=tensor: dist.all_reduce(t))
        assert reduced == ((ranks - 1) * 4 * elems if elems == 1000 else 2 * (ranks - 1) * 4 * elems // ranks)
        assert bytes_of("broadcast", lambda t=tensor: dist.broadcast(t, src=0)) == (4 * elems if rank else 0)
        output = torch.empty(elems * ranks)
        assert (
            bytes_of("all_to_all", lambda o=output, s=source: dist.all_to_all_single(o, s)) == (ranks - 1) * 4 * elems
        )


@subject
def to_one_and_from_one_by_the_direct_door(rank: int, ranks: int) -> None:
    import zeropp

    door, root = zeropp.comm.Communicator(), ranks - 1
    for elems in (100, 40_000):
        mine = of_rank(rank, elems)
        door.reduce(mine, root)
        same(mine, rank_order_sum(ranks, elems) if rank == root else of_rank(rank, elems))
        everybody = torch.cat([of_rank(r, elems) for r in range(ranks)])
        whole = torch.empty(ranks, elems) if rank == root else None
        door.gather(whole, of_rank(rank, elems), root)
        if whole is not None:
            same(whole.flatten(), everybody)
        same(door.scatter(torch.empty(elems), whole, root), of_rank(rank, elems))
        if rank == 0:
            for to in range(1, ranks):
                door.send(of_rank(to, elems), to, tag=to)
        else:
            same(door.recv(torch.empty(elems), 0, tag=rank), of_rank(rank, elems))
    # What is wrong on one rank alone is said before anybody waits.
    one, odd = torch.ones(3), torch.ones(3 * ranks + 1)
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: door.gather(one, one, ranks), f"gather: root {ranks}, wanted a rank of the group, 0..{ranks - 1}"),
        (lambda: door.gather(None, one, rank), f"gather: output is None on rank {rank}, the root, wanted a tensor"),
        (lambda: door.scatter(one, odd, rank), f"and {3 * ranks + 1} elements, wanted {3 * ranks}"),
        (lambda: door.scatter(one, torch.ones(3 * ranks).double(), rank), "wanted one dtype"),
    ]
    for call, said in wrong:
        assert said in sentence(call), (sentence(call), said)


@subject
def arena_tensors(rank: int, ranks: int) -> None:
    import zeropp

    door = zeropp.comm.Communicator()
    for elems in (100, 40_000, 1_500_001):
        tensor = door.empty(elems)
        tensor.copy_(of_rank(rank, elems))
        door.all_reduce(tensor)
        same(tensor, rank_order_sum(ranks, elems))
        tensor.copy_(of_rank(rank, elems))
        gathered = door.all_gather(torch.empty(elems * ranks), tensor)
        same(gathered, torch.cat([of_rank(r, elems) for r in range(ranks)]))
        source = zeropp.comm.empty(elems * ranks)
        source.copy_(of_rank(rank, elems * ranks))
        output = door.reduce_scatter(torch.empty(elems), source)
        same(output, rank_order_sum(ranks, elems * ranks)[rank * elems : (rank + 1) * elems])
        tensor.copy_(of_rank(rank, elems))
        mixed = tensor if rank % 2 else tensor.clone()  # one rank in the arena, one not
        door.all_reduce(mixed)
        same(mixed, rank_order_sum(ranks, elems))
        door.broadcast(tensor, root=ranks - 1)
        same(tensor, of_rank(ranks - 1, elems) if (ranks - 1) % 2 == 0 else rank_order_sum(ranks, elems))
        for memory in (door.empty, torch.empty):  # to rank r: r more rows than to rank 0
            rows = [elems // 8 + r for r in range(ranks)]
            sent = memory(sum(rows), 2)
            sent.copy_(of_rank(rank, sum(rows), 2))
            received = door.all_to_all(torch.empty(ranks * rows[rank], 2), sent, [rows[rank]] * ranks, rows)
            same(received, torch.cat([of_rank(r, sum(rows), 2).split(rows)[rank] for r in range(ranks)]))
            even = door.all_to_all(torch.empty(ranks * 3), sent.view(-1)[: ranks * 3].contiguous())
            same(even, torch.cat([of_rank(r, sum(rows), 2).view(-1)[3 * rank : 3 * rank + 3] for r in range(ranks)]))
    matrix = door.empty(3, 5, dtype=torch.bfloat16)
    assert matrix.shape == (3, 5) and matrix.dtype == torch.bfloat16
    assert door.empty((2, 0)).shape == (2, 0)


def run_all(rank: int, ranks: int) -> dict[str, str]:
    """Return each subject's outcome: "ok", or what it raised. Stop at the first failure, after which the ranks no longer agree."""
    import zeropp  # noqa: F401

    dist.init_process_group("zeropp")
    outcomes = dict.fromkeys(SUBJECTS, "not reached")
    for name, check in SUBJECTS.items():
        try:
            check(rank, ranks)
        except BaseException:
            outcomes[name] = traceback.format_exc()
            break
        outcomes[name] = "ok"
    dist.destroy_process_group()
    return outcomes
