# SPDX-License-Identifier: Apache-2.0
"""Quantised collectives from Python: the Communicator, the DDP hook, the communication of FSDP2.

What travels is counted, what comes out is compared with the operators of zeropp.ops or with a bound that half a scale gives.
"""

from __future__ import annotations

from typing import Any

import pytest
from launch import run_ranks

STEPS = 24


def _wire(elems: int, bits: int, block_elems: int) -> int:
    return (elems if bits == 8 else (elems + 1) // 2) + 4 * -(-elems // block_elems)


def _counted(kind: str, before: dict[str, Any]) -> tuple[int, int]:
    """(bytes, of which from other nodes) since `before`, and nothing of any other kind."""
    import zeropp

    after = zeropp.comm.all_traffic()["shm"]
    moved = {name: row["bytes"] - before.get(name, {}).get("bytes", 0) for name, row in after.items()}
    assert [name for name, count in moved.items() if count and name != kind] == []
    far = after[kind].get("far_bytes", 0) - before.get(kind, {}).get("far_bytes", 0)
    return moved[kind], far


def _of_rank(rank: int, elems: int, dtype: Any) -> Any:
    import torch

    return (torch.randn(elems, generator=torch.Generator().manual_seed(100 + rank)) * 0.1).to(dtype)


def through_communicator(rank: int, ranks: int) -> bool:
    import torch
    import torch.distributed as dist
    import zeropp

    dist.init_process_group("gloo")
    comm = zeropp.comm.Communicator()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for bits, block in ((8, 256), (4, 64)):
            elems = 5003
            fmt: dict[str, int] = {"bits": bits, "block_elems": block}
            values = [_of_rank(r, elems * ranks, dtype) for r in range(ranks)]
            coded = [[zeropp.ops.quantise(one, **fmt) for one in tensor.chunk(ranks)] for tensor in values]

            before = zeropp.comm.all_traffic()["shm"]
            gathered = torch.empty(elems * ranks, dtype=dtype)
            comm.all_gather_quantised(gathered, values[rank].chunk(ranks)[0], **fmt)
            assert torch.equal(gathered, torch.cat([row[0].dequantise(dtype) for row in coded]))
            assert _counted("all_gather", before) == ((ranks - 1) * _wire(elems, bits, block), 0)
            if bits == 8:  # bf16 would move 2 bytes an element: exactly a half, and the scales
                assert _wire(elems, bits, block) - 4 * -(-elems // block) == elems * 2 // 2

            before = zeropp.comm.all_traffic()["shm"]
            mine, wanted = torch.empty(elems, dtype=dtype), torch.empty(elems, dtype=dtype)
            comm.reduce_scatter_quantised(mine, values[rank], "avg", **fmt)
            zeropp.ops.quant_sum_([row[rank] for row in coded], wanted, factor=1 / ranks)
            assert torch.equal(mine, wanted)
            assert _counted("reduce_scatter", before) == ((ranks - 1) * _wire(elems, bits, block), 0)

            before = zeropp.comm.all_traffic()["shm"]
            comm.reduce_scatter_quantised(mine, values[rank], "avg", node_ranks=1, **fmt)
            bytes_ = (ranks - 1) * _wire(elems, bits, block)
            assert torch.equal(mine, wanted) and _counted("reduce_scatter", before) == (bytes_, bytes_)

            whole = [zeropp.ops.quantise(tensor, **fmt) for tensor in values]
            mean = zeropp.ops.Quantised.empty(elems * ranks, **fmt)
            zeropp.ops.quant_reduce_(whole, mean, factor=1 / ranks)
            tensor = values[rank].clone()
            assert torch.equal(comm.all_reduce_quantised(tensor, "avg", **fmt), mean.dequantise(dtype))
    with pytest.raises(ValueError, match="bits"):
        comm.all_reduce_quantised(torch.zeros(8), bits=3)
    with pytest.raises(ValueError, match="int32"):
        comm.all_reduce_quantised(torch.zeros(8, dtype=torch.int32))
    return True


def _model() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 16))


def _train(model: Any, rank: int, steps: int) -> list[float]:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = torch.Generator().manual_seed(7 + rank)
    goal = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(steps):
        inputs = torch.randn(32, 64, generator=data)
        loss = (model(inputs) - torch.tanh(inputs @ goal)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def through_ddp(rank: int, ranks: int, backend: str) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    import zeropp
    from torch.nn.parallel import DistributedDataParallel as DDP

    dist.init_process_group(backend)
    answers: dict[str, Any] = {}
    for bits in (0, 8, 4):
        model = DDP(_model())
        if bits:
            model.register_comm_hook(None, zeropp.comm.ddp_hook(bits=bits, block_elems=64))
        inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(rank))
        before = zeropp.comm.all_traffic().get("shm", {})
        model(inputs).square().mean().backward()
        after = zeropp.comm.all_traffic().get("shm", {})
        moved = after.get("all_reduce", {}).get("bytes", 0) - before.get("all_reduce", {}).get("bytes", 0)
        answers[f"{bits}"] = torch.cat([p.grad.flatten() for p in model.parameters()]).tolist()
        answers[f"{bits} bytes"] = moved
        model.zero_grad()
        answers[f"{bits} losses"] = _train(model, rank, STEPS)
        del model
    with pytest.raises(zeropp.ConfigError, match="bits is 2, wanted 8 or 4"):
        zeropp.comm.ddp_hook(bits=2)
    dist.destroy_process_group()
    return answers


def through_fsdp2(rank: int, ranks: int, backend: str) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    import zeropp
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group(backend)
    answers: dict[str, Any] = {}
    for how in ("exact", "int8", "int4"):
        model = _model()
        shapes = [[p.shape for p in layer.parameters()] for layer in model if isinstance(layer, torch.nn.Linear)]
        for layer in model:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer)
        fully_shard(model)
        if how != "exact":
            zeropp.comm.fsdp2_hooks(model, params=how, grads=how, block_elems=64)
        before = zeropp.comm.all_traffic().get("shm", {})
        answers[how] = _train(model, rank, STEPS)
        after = zeropp.comm.all_traffic().get("shm", {})
        answers[f"{how} bytes"] = [
            after.get(kind, {}).get("bytes", 0) - before.get(kind, {}).get("bytes", 0)
            for kind in ("all_gather", "reduce_scatter")
        ]
        padded = [sum(-(-shape[0] // ranks) * shape.numel() // shape[0] for shape in unit) for unit in shapes]
        if how != "exact":
            answers[f"{how} wire"] = sum(_wire(elems, 8 if how == "int8" else 4, 64) for elems in padded) * (ranks - 1)
        weights = [p.full_tensor() for p in model.parameters()]  # the same on all ranks, and never quantised
        spread = [w.clone() for w in weights]
        for w in spread:
            dist.broadcast(w, 0)
        assert all(torch.equal(a, b) for a, b in zip(weights, spread, strict=True))
    with pytest.raises(zeropp.ConfigError, match="params is 'int2', wanted 'exact', 'int8' or 'int4'"):
        zeropp.comm.fsdp2_hooks(model, params="int2")
    with pytest.raises(zeropp.ConfigError, match="no module of Linear is sharded; call fully_shard on it first"):
        zeropp.comm.fsdp2_hooks(torch.nn.Linear(2, 2), params="int8")
    dist.destroy_process_group()
    return answers


@pytest.mark.parametrize("ranks", [2, 3])
def test_communicator(ranks: int) -> None:
    for outcome in run_ranks(ranks, through_communicator, timeout=200):
        assert outcome.value is True


WORLDS = pytest.mark.parametrize(("ranks", "backend"), [(2, "gloo"), pytest.param(3, "zeropp", marks=pytest.mark.slow)])


@WORLDS
def test_ddp_hook(ranks: int, backend: str) -> None:
    import torch

    outcomes = [outcome.value for outcome in run_ranks(ranks, through_ddp, backend, timeout=200)]
    for bits, levels in ((8, 127), (4, 7)):
        exact, seen = torch.tensor(outcomes[0]["0"]), torch.tensor(outcomes[0][f"{bits}"])
        # Half a scale of each rank's gradient, of which none is above 4 x the greatest mean here, then half a scale of the mean.
        bound = 0.5 * float(exact.abs().max()) * 5 / levels
        assert 0 < float((seen - exact).abs().max()) <= bound
        assert all(outcome[f"{bits}"] == outcomes[0][f"{bits}"] for outcome in outcomes)
        # Each rank reads about 2 (N - 1) / N of the tensor; all together exactly that.
        assert sum(o[f"{bits} bytes"] for o in outcomes) == 2 * (ranks - 1) * _wire(exact.numel(), bits, 64)
        for one in outcomes:
            assert one[f"{bits} losses"][-1] < one[f"{bits} losses"][0] * 0.9
            assert abs(one[f"{bits} losses"][-1] / one["0 losses"][-1] - 1) < (0.01 if bits == 8 else 0.05)


@WORLDS
def test_fsdp2_hooks(ranks: int, backend: str) -> None:
    outcomes = [outcome.value for outcome in run_ranks(ranks, through_fsdp2, backend, timeout=200)]
    for one in outcomes:
        for how, slack in (("int8", 0.01), ("int4", 0.08)):
            assert one[how] != one["exact"] and one[how][-1] < one[how][0] * 0.9
            assert abs(one[how][-1] / one["exact"][-1] - 1) < slack
            gathered, scattered = one[f"{how} bytes"]
            assert scattered == one[f"{how} wire"] * STEPS
            assert gathered == 2 * one[f"{how} wire"] * STEPS  # forward and backward
