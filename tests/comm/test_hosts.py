# SPDX-License-Identifier: Apache-2.0
"""Ranks on several hosts: this one under several names (``ZEROPP_HOST_ID``), over the loopback interface."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from launch import Outcome, run_ranks

# -- what the ranks do (in processes of their own) ---------------------------------------------------------------------------


def _start(hosts: str, timeout_s: float = 60.0) -> tuple[Any, Any]:
    from datetime import timedelta

    os.environ["ZEROPP_HOST_ID"] = hosts[int(os.environ["RANK"])]
    import torch
    import torch.distributed as dist
    import zeropp  # noqa: F401

    dist.init_process_group("zeropp", timeout=timedelta(seconds=timeout_s))
    return torch, dist


def everything(rank: int, ranks: int, groups: list[str], placements: list[list[Any]], folder: str) -> dict[str, Any]:
    """All kinds of calls for each placement of `groups` that this rank is in, the first of which makes the world, then training."""
    import torch
    import torch.distributed as dist

    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), ranks, rank == 0)
    os.environ["ZEROPP_HOST_ID"] = groups[0][rank]
    import zeropp  # noqa: F401

    dist.init_process_group("zeropp", store=dist.PrefixStore("groups", store), rank=rank, world_size=ranks)
    kinds = {groups[0]: _all_kinds(torch, dist, dist.group.WORLD)}
    for hosts in groups[1:]:
        if rank < len(hosts):
            os.environ["ZEROPP_HOST_ID"] = hosts[rank]
        group = dist.new_group(list(range(len(hosts))))
        if rank < len(hosts):
            kinds[hosts] = _all_kinds(torch, dist, group)
    dist.barrier()
    dist.destroy_process_group()
    return {"kinds": kinds, "training": _train_on_placements(rank, store, placements, folder)}


def _all_kinds(torch: Any, dist: Any, group: Any) -> dict[str, Any]:
    import zeropp

    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    zeropp.traffic(reset=True)
    answer: dict[str, Any] = {"rank": rank}
    ones = torch.full((5000,), float(rank + 1))
    dist.all_reduce(ones, group=group)
    answer["all_reduce"] = ones.unique().tolist()
    half = torch.full((7,), rank + 1, dtype=torch.bfloat16)
    dist.all_reduce(half, op=dist.ReduceOp.AVG, group=group)
    answer["avg"] = half.unique().tolist()
    gathered = torch.empty(ranks, 3)
    dist.all_gather_into_tensor(gathered, torch.full((3,), float(rank)), group=group)
    answer["all_gather"] = gathered[:, 0].tolist()
    part = torch.empty(2)
    dist.reduce_scatter_tensor(part, torch.arange(2.0 * ranks), group=group)
    answer["reduce_scatter"] = part.tolist()
    objects: list[Any] = [None] * ranks
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    answer["objects"] = [entry["rank"] for entry in objects]
    to = [torch.empty(1 + r % 2) for r in range(ranks)]
    dist.all_to_all(to, [torch.full((1 + rank % 2,), float(10 * rank + r)) for r in range(ranks)], group=group)
    answer["all_to_all"] = [t[0].item() for t in to]
    if rank == 0:
        got = torch.empty(4)
        answer["from"] = sorted(dist.recv(got, group=group) for _ in range(ranks - 1))
    else:
        dist.send(torch.full((4,), float(rank)), 0, group=group)
    signs = torch.tensor([1.0, -1.0]).repeat(500)  # one bit and a scale say all of it
    answer["one bit"] = torch.equal(zeropp.comm.OneBitAllReduce(1000, group=group)(signs), signs)
    answer["int8"] = zeropp.comm.Communicator(group).all_reduce_quantised(signs * 127, bits=8).abs().unique().tolist()
    dist.barrier(group=group)
    answer["links"] = sorted(zeropp.traffic())
    return answer


def reduce_for_ever(rank: int, ranks: int, hosts: str, timeout_s: float) -> dict[str, Any]:
    torch, dist = _start(hosts, timeout_s)
    import zeropp

    tensor = torch.zeros(100_000)
    dist.barrier()
    Path(os.environ["ZEROPP_TEST_READY"]).joinpath(str(rank)).touch()
    try:
        while True:
            dist.all_reduce(tensor)
    except zeropp.CommError as error:
        return {"text": str(error), "rank": error.rank, "at": time.time()}


def _train_on_placements(rank: int, store: Any, placements: list[list[Any]], folder: str) -> dict[str, Any]:
    """Return the results of every stage, for each placement ``[hosts, steps]`` that this rank is in; each has its own world."""
    import torch.distributed as dist
    import zeropp

    answer: dict[str, Any] = {}
    for number, (hosts, steps) in enumerate(placements):
        if rank >= len(hosts):
            continue
        os.environ["ZEROPP_HOST_ID"] = hosts[rank]
        world = dist.PrefixStore(f"placement {number}", store)
        dist.init_process_group("zeropp", store=world, rank=rank, world_size=len(hosts))
        zeropp.traffic(reset=True)
        answer[hosts] = {str(stage): _train(rank, stage, steps, f"{folder}/{hosts}-{stage}") for stage in (0, 1, 2, 3)}
        answer[hosts]["filed"] = {
            kind: _train(rank, 3, steps, f"{folder}/{hosts}-{kind}", **_on_disk(f"{folder}/disk-{hosts[rank]}", kind))
            for kind in FILED
            if len(set(hosts)) > 1
        }
        answer[hosts]["delayed"] = _delayed(rank, f"{folder}/disk-{hosts[rank]}")
        if hosts == "aabb":
            answer["failed"] = _update_that_fails(rank, f"{folder}/lost-{hosts[rank]}", f"{folder}/failed")
        answer[hosts]["stored"] = _stored(rank, f"{folder}/disk-{hosts[rank]}")
        answer[hosts]["hpz"] = _secondary(rank, hosts)
        answer[hosts]["plusplus"] = _plusplus(rank)
        answer[hosts]["experts"] = _experts(rank)
        network = sum(row["bytes"] for row in zeropp.traffic().get("network", {}).values())
        answer[hosts]["networked"] = network > 0
        if hosts == "ab":
            answer["refused"] = _refused(folder)
            answer["diverged"] = _diverges(rank)
        dist.destroy_process_group()
    return answer


def _model() -> Any:
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 96), torch.nn.Tanh(), torch.nn.Linear(96, 96), torch.nn.Tanh(), torch.nn.Linear(96, 4)
    )


def _prepared(stage: int, **more: Any) -> tuple[Any, Any]:
    import torch
    import zeropp

    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # Small units would be replicated: each Linear is one of its own, gathered when it is needed.
    return zeropp.prepare(model, optimizer, zeropp.Config(stage=stage, units=[torch.nn.Linear], **more))


FILED = ["params", "half of params", "grads", "everything"]


def _on_disk(folder: str, kind: str) -> dict[str, Any]:
    """Each host has a folder of its own, as it has a disk of its own."""
    import zeropp

    tier = zeropp.Tier("nvme", path=folder, fraction=0.5 if "half" in kind else 1.0)
    kinds = {"everything": ["params", "grads", "optimizer"]}.get(kind, [kind.rpartition(" ")[2]])
    return {"offload": zeropp.Offload(**dict.fromkeys(kinds, tier))}


def _train(rank: int, stage: int, steps: int, path: str, **more: Any) -> dict[str, Any]:
    import torch
    import zeropp

    model, optimizer = _prepared(stage, **more)
    data = torch.Generator().manual_seed(100 + rank)
    losses, norms = [], []
    for step in range(steps):
        if step == steps // 2:  # through a checkpoint, into a model that has other values
            zeropp.save(path, model, optimizer, step=step)
            del model, optimizer
            model, optimizer = _prepared(stage, **more)
            assert zeropp.load(path, model, optimizer)["step"] == step
        x = torch.randn(8, 16, generator=data)
        if step % 3 == 2:  # two micro-steps, one reduction
            with zeropp.no_sync(model):
                torch.nn.functional.mse_loss(model(x[:4]), x[:4, :4].sin()).backward()
        loss = torch.nn.functional.mse_loss(model(x), x[:, :4].sin())
        loss.backward()
        norms.append(optimizer.clip_grad_norm_(1.0) if step % 2 else 0.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with zeropp.gathered(model):
        total = sum(float(value.double().abs().sum()) for value in model.parameters())
    whole = zeropp.full_state_dict(model)
    assert rank or abs(sum(float(value.double().abs().sum()) for value in whole.values()) - total) < 1e-9
    return {"losses": losses, "norms": norms, "sum": total}


def _delayed(rank: int, folder: str) -> dict[str, Any]:
    """Two exact steps and four that are a step behind, then the values: in memory, with what crosses kept on each host, and in files."""
    import torch
    import zeropp

    disk, half = zeropp.Tier("nvme", path=folder), zeropp.Tier("nvme", path=folder, fraction=0.5)
    everything = zeropp.Offload(params=disk, grads=disk, optimizer=half, delayed_update=2)
    memory = zeropp.Offload(optimizer="cpu", delayed_update=2)
    places: dict[str, dict[str, Any]] = {
        "1": {"stage": 1, "offload": memory},
        "2": {"stage": 2, "offload": zeropp.Offload(optimizer=disk, grads=half, delayed_update=2)},
        "hpz": {"stage": 3, "offload": memory, "comm": zeropp.Comm(secondary_shard="host")},
        "files": {"stage": 3, "offload": everything},
    }
    answer = {}
    for name, place in places.items():
        model, optimizer = _prepared(**place)
        data, losses = torch.Generator().manual_seed(rank), []
        for _ in range(6):
            x = torch.randn(8, 16, generator=data)
            loss = torch.nn.functional.mse_loss(model(x), x[:, :4].sin())
            loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            losses.append(loss.item())
        whole = zeropp.full_state_dict(model)
        answer[name] = [*losses, sum(float(value.double().abs().sum()) for value in whole.values())]
        del model, optimizer
    return answer


def _stored(rank: int, folder: str) -> dict[str, list[float]]:
    """Weights in 8 bits, on disk and in memory, whole and in part: what rank's passes give, as many as it likes, and all values."""
    import torch
    import zeropp

    answer = {}
    for kind in ("nvme", "half of nvme", "half of cpu"):
        tier = zeropp.Tier(
            kind.rpartition(" ")[2], path=folder if "nvme" in kind else None, fraction=0.5 if "half" in kind else 1.0
        )
        config = {"precision": zeropp.Precision(stored="int8"), "offload": zeropp.Offload(params=tier)}
        with zeropp.sharded_init():
            model = _model()
        model, _ = zeropp.prepare(model, None, zeropp.Config(units=[torch.nn.Linear], **config))
        data = torch.Generator().manual_seed(5)
        with torch.inference_mode():
            found = [model(torch.randn(8, 16, generator=data)).double().sum().item() for _ in range(5 + rank)][:5]
        whole = zeropp.full_state_dict(model)
        answer[kind] = [*found, sum(float(value.double().abs().sum()) for value in whole.values())]
        del model
    return answer


def _update_that_fails(rank: int, folder: str, saved: str) -> list[str]:
    """The second rank of the second host loses half of its states while they are stepped: return the error of every rank, and where it goes on."""
    import torch
    import zeropp

    place = {"offload": zeropp.Offload(optimizer=zeropp.Tier("nvme", path=folder), delayed_update=0)}
    model, optimizer = _prepared(2, **place)
    heard = []

    def step() -> None:
        model(torch.ones(2, 16)).square().mean().backward()
        optimizer.step()

    step()
    zeropp.save(saved, model, optimizer, step=1)
    states = next(Path(folder).glob(f"zeropp-scratch-*/rank-{rank}/states"))
    whole_bytes = states.stat().st_size
    if rank == 3:
        os.truncate(states, whole_bytes // 2)
    step()
    for _ in range(2):
        try:
            step()
        except zeropp.Error as error:
            heard.append(f"{type(error).__name__}: {error}")
        optimizer.zero_grad()
    if rank == 3:
        os.truncate(states, whole_bytes)
    assert zeropp.load(saved, model, optimizer)["step"] == 1
    step()
    optimizer.flush()
    return heard


def _secondary(rank: int, hosts: str) -> dict[str, Any]:
    """Three steps of several passes, with a copy of the parameters on each host and without: losses, and gathered bytes by link."""
    import torch
    import zeropp

    answer = {}
    for shard in (0, "host"):
        model, optimizer = _prepared(3, comm=zeropp.Comm(secondary_shard=shard), prefetch=0, host_copy="off")
        data = torch.Generator().manual_seed(rank)
        losses = []
        for step in range(3):
            x = torch.randn(8, 16, generator=data)
            if step == 2:
                zeropp.traffic(reset=True)
            with zeropp.no_sync(model):
                model(x[:4]).square().mean().backward()
            loss = torch.nn.functional.mse_loss(model(x), x[:, :4].sin())
            loss.backward()
            if step == 2:
                gathered = {
                    link: kinds["all_gather"]["bytes"]
                    for link, kinds in zeropp.traffic().items()
                    if "all_gather" in kinds
                }
            with torch.no_grad():
                losses += [loss.item(), model(x).sum().item()]
            if step == 1:  # values written outside of a step reach what the host keeps
                with torch.no_grad(), zeropp.gathered(model[2], write=True):
                    model[2].weight.mul_(0.5)
                with torch.no_grad():
                    losses.append(model(x).sum().item())
            optimizer.step()
            optimizer.zero_grad()
        memory = zeropp.memory(model)["cpu"]["params"]
        answer[str(shard)] = {
            "losses": losses,
            "gathered": gathered,
            "held": memory["held"],
            "planned": memory["planned"],
        }
    return answer


BLOCK = 64


def _plusplus(rank: int) -> dict[str, Any]:
    """Steps in 8 and 4 bits, with a read between forward and backward: losses, bytes of the last step, and what they should be."""
    import torch
    import zeropp
    from zeropp.zero.engine import engine_of
    from zeropp.zero.model_state import SHARD

    answer: dict[str, Any] = {}
    formats = {"exact": ("exact", "exact", 0), "quantised": ("int8", "int4", 0), "kept": ("int8", "int4", "host")}
    for name, (params, grads, shard) in formats.items():
        wire = zeropp.Comm(params=params, grads=grads, block_elems=BLOCK, secondary_shard=shard)
        model, optimizer = _prepared(3, comm=wire, prefetch=0, host_copy="off")
        data, losses = torch.Generator().manual_seed(rank), []
        for step in range(4):
            x = torch.randn(8, 16, generator=data)
            zeropp.traffic(reset=True)
            loss = torch.nn.functional.mse_loss(model(x), x[:, :4].sin())
            if step == 1:
                with zeropp.gathered(model):  # exact, also of what is kept for backward
                    losses.append(sum(float(p.double().abs().sum()) for p in model.parameters()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        moved = zeropp.traffic().get("network", {})
        units = engine_of(model).units

        def image(elems: int, bits: int) -> int:
            return (elems * bits // 8 + 4 * -(-elems // BLOCK) + 3) // 4 * 4

        exact = params == "exact"
        answer[name] = {
            "losses": losses,
            "gathered": moved.get("all_gather", {"bytes": 0})["bytes"],
            "reduced": moved.get("reduce_scatter", {"bytes": 0})["bytes"],
            "a gather": sum(4 * u.shard_elems if exact else image(u.shard_elems, 8) for u in units if u.place == SHARD),
            "a reduction": sum(4 * u.shard_elems if exact else image(u.shard_elems, 4) for u in units),
        }
    return answer


def _refused(folder: str) -> str:
    import zeropp

    try:
        _prepared(3, **_on_disk(folder, "params"), comm=zeropp.Comm(secondary_shard="host"))
    except zeropp.ConfigError as error:
        return str(error)
    return "nothing was refused"


def _diverges(rank: int) -> str:
    """Over hosts gathers are collectives: ranks that run different modules get an error."""
    import torch
    import zeropp

    model, _optimizer = _prepared(3)
    try:
        with torch.no_grad():
            model[0](torch.zeros(1, 16)) if rank == 0 else model[2](torch.zeros(1, 96))
            model(torch.zeros(1, 16))
    except zeropp.CommError as error:
        return str(error)
    return "nothing was noticed"


def _experts(rank: int) -> list[float]:
    """Each rank runs experts of its own choice, as many as it likes: their block is one unit, gathered whole where it is entered, so
    that gathers meet. Losses, after each was compared with the plain model's."""
    import torch
    import torch.distributed as dist
    import zeropp

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))

        def forward(self, x: Any, chosen: list[int]) -> Any:
            for one in chosen:
                x = x + self.layers[one](x).tanh()
            return x

    class Mixture(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(Experts() for _ in range(3))

        def forward(self, x: Any, chosen: list[int]) -> Any:
            for block in self.blocks:
                x = block(x, chosen)
            return x.square().mean()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    plain, model = Mixture(), Mixture()
    model.load_state_dict(plain.state_dict())
    sgd, ranks, losses = torch.optim.SGD(model.parameters(), lr=0.1), dist.get_world_size(), []
    model, optimizer = zeropp.prepare(model, sgd, zeropp.Config(stage=3, units=[Experts]))
    data = torch.Generator().manual_seed(rank)
    for step in range(4):
        x, chosen = torch.randn(4, 16, generator=data), [(rank + step) % 4, *([rank % 3] * (rank % 2))]
        loss, wanted = model(x, chosen), plain(x, chosen)
        assert torch.isclose(loss, wanted, rtol=1e-5), (step, loss, wanted)
        loss.backward()
        wanted.backward()
        with torch.no_grad():
            for p in plain.parameters():
                mean = torch.zeros_like(p) if p.grad is None else p.grad / ranks
                dist.all_reduce(mean)
                p -= 0.1 * mean
                p.grad = None
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# -- tests ---------------------------------------------------------------------------------------------------------------------


GROUPS = ["aabb", "aab", "ab"]
PLACEMENTS = [["aabb", 8], ["aaaa", 8], ["ab", 30], ["aa", 30]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    """One launch of four ranks for several tests: starting Python costs more than what they do."""
    return run_ranks(4, everything, GROUPS, PLACEMENTS, str(tmp_path_factory.mktemp("checkpoints")), timeout=300)


@pytest.mark.parametrize("hosts", GROUPS)
def test_torch_distributed(hosts: str, outcomes: list[Outcome]) -> None:
    ranks = len(hosts)
    for outcome in outcomes[:ranks]:
        rank, value = outcome.rank, outcome.value["kinds"][hosts]
        assert value["rank"] == rank
        assert value["all_reduce"] == [ranks * (ranks + 1) / 2]
        assert value["avg"] == [(ranks + 1) / 2]
        assert value["all_gather"] == list(range(ranks))
        assert value["reduce_scatter"] == [2.0 * rank * ranks, (2.0 * rank + 1) * ranks]
        assert value["objects"] == list(range(ranks))
        assert value["one bit"]
        assert value["int8"] == [127.0 * ranks]
        assert value["all_to_all"] == [10.0 * r + rank for r in range(ranks)]
        assert value.get("from", list(range(1, ranks))) == list(range(1, ranks))
        assert "network" in value["links"]


def test_training_over_hosts(outcomes: list[Outcome]) -> None:
    """With one rank a host every sum has the order of one host, so fp32 losses are equal bit for bit in every stage. With more, sums go
    host by host: every stage has the same bits, which are those of one host within rounding."""
    results = [outcome.value["training"] for outcome in outcomes]
    for result in results:
        apart, together = (_plain(result[hosts]) for hosts in ("aabb", "aaaa"))
        assert apart.pop("networked")
        assert not together.pop("networked")
        for kind in FILED:
            assert apart["filed"][kind] == apart["3"], kind  # losses, norms and parameters, bit for bit
        for stage in "0123":
            assert apart[stage]["losses"] == apart["3"]["losses"]
            assert apart[stage]["losses"] == pytest.approx(together[stage]["losses"], rel=1e-5)
    for result in results[:2]:
        apart, together = (_plain(result[hosts]) for hosts in ("ab", "aa"))
        assert apart.pop("networked")
        assert not together.pop("networked")
        for kind, filed in apart.pop("filed").items():
            assert filed == apart["3"], kind
        assert not together.pop("filed")
        assert apart == together
        assert apart["3"]["losses"][-1] < apart["3"]["losses"][0] / 2
        assert "it is a second copy of the parameters in every host's memory" in result["refused"]
        assert "rank 0 is in all_gather" in result["diverged"]
        assert "rank 1 is in all_gather" in result["diverged"]


def test_delayed_updates_over_hosts(outcomes: list[Outcome]) -> None:
    """Every stage and tier has the same bits; with one rank a host they are those of one host, else those within rounding."""
    for result in (outcome.value["training"] for outcome in outcomes):
        for hosts in ("aabb", "aaaa", "ab", "aa"):
            if hosts not in result:
                continue
            first = result[hosts]["delayed"]["1"]
            assert all(one == first for one in result[hosts]["delayed"].values()), (hosts, result[hosts]["delayed"])
            together = result["aaaa" if len(hosts) == 4 else "aa"]["delayed"]["1"]
            assert first == pytest.approx(together, rel=1e-5)
            if hosts == "ab":
                assert first == together


def test_weights_in_fewer_bits_over_hosts(outcomes: list[Outcome]) -> None:
    """Each host has a copy, which its ranks share; the values do not depend on where they lie, nor on who else has them."""
    seen = [r[hosts]["stored"] for r in (o.value["training"] for o in outcomes) for hosts in r if len(hosts) in (2, 4)]
    assert len(seen) == 12
    assert all(values == seen[0]["nvme"] for one in seen for values in one.values()), seen


def test_an_update_that_fails_on_one_rank_of_one_host(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        failed, torn = outcome.value["training"]["failed"]
        assert failed.startswith("TierError: ") and "states" in failed
        assert ("rank 3: " in failed) == (outcome.rank != 3)
        assert "inconsistent, because a step failed half-way" in torn


def test_quantised_parameters_and_gradients_over_hosts(outcomes: list[Outcome]) -> None:
    """qwZ and qgZ. With one rank a host the bits of one host; the network carries images, counted to the byte; with hpZ one gather a
    step instead of two, and the same bits."""
    for rank, result in enumerate(outcome.value["training"] for outcome in outcomes):
        for hosts in ("ab", "aabb"):
            if hosts not in result:
                continue
            seen = result[hosts]["plusplus"]
            exact, quantised, kept = seen["exact"], seen["quantised"], seen["kept"]
            assert quantised["losses"] == kept["losses"] != exact["losses"]
            for how, bound in (("exact", 0.0), ("quantised", 0.1)):
                one = result["aa" if hosts == "ab" else "aaaa"]["plusplus"][how]["losses"]
                if hosts == "ab":
                    assert seen[how]["losses"] == one
                assert seen[how]["losses"] == pytest.approx(one, rel=1e-5 + bound)
            # Besides units there are votes and such, of which there are as many whatever the form. One image from each other host.
            assert exact["gathered"] - quantised["gathered"] == 2 * (exact["a gather"] - quantised["a gather"])
            assert quantised["gathered"] - kept["gathered"] == quantised["a gather"]
            for form in (exact, quantised, kept):
                assert form["reduced"] == form["a reduction"], (rank, hosts)
            assert quantised["a gather"] < 0.3 * exact["a gather"]
            assert quantised["a reduction"] < 0.2 * exact["a reduction"]


def _plain(result: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key not in ("hpz", "plusplus", "delayed", "stored")}


def test_a_second_copy_on_each_host(outcomes: list[Outcome]) -> None:
    """hpZ: the same bits; of the four gathers a unit (two passes, forward and backward) one crosses the network. A copy a host is held,
    1/2 of the parameters a rank where two share a host. On one host it changes nothing."""
    for result in (outcome.value["training"] for outcome in outcomes):
        for hosts in ("aabb", "aaaa", "ab"):
            if hosts not in result:
                continue
            without, kept = result[hosts]["hpz"]["0"], result[hosts]["hpz"]["host"]
            assert kept["losses"] == without["losses"]
            if hosts == "aaaa":
                assert kept["gathered"] == without["gathered"] and kept["held"] == without["held"]
                continue
            far, near = without["gathered"]["network"], kept["gathered"]["network"]
            assert 0 < near < 0.35 * far, (hosts, kept, without)
            ranks_here, ranks = hosts.count("a"), len(hosts)
            a_part = without["planned"] * ranks / ranks_here
            assert kept["planned"] - without["planned"] == pytest.approx(a_part, abs=1)
            assert kept["held"] - without["held"] == pytest.approx(a_part, rel=0.05)


def _signal_when_ready(ready: Path, ranks: int, victim: int, number: int, at: list[float]) -> Any:
    def watch(processes: list[subprocess.Popen[bytes]]) -> None:
        deadline = time.monotonic() + 150
        while len(list(ready.iterdir())) < ranks and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(0.5)
        at.append(time.time())
        processes[victim].send_signal(number)

    return watch


def _survivors(outcomes: list[Outcome], victim: int) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.rank != victim]


@pytest.mark.parametrize("hosts", [pytest.param("ab", marks=pytest.mark.slow), "abab"])
def test_killed_rank_is_named_within_5_s(hosts: str, tmp_path: Path) -> None:
    at: list[float] = []
    ranks, victim = len(hosts), len(hosts) - 1
    watch = _signal_when_ready(tmp_path, ranks, victim, signal.SIGKILL, at)
    env = {"ZEROPP_TEST_READY": str(tmp_path)}
    outcomes = run_ranks(ranks, reduce_for_ever, hosts, 60.0, timeout=60, check=False, env=env, watch=watch)
    for outcome in _survivors(outcomes, victim):
        assert outcome.value is not None, str(outcome)
        assert outcome.value["rank"] == victim, str(outcome)
        assert "died" in outcome.value["text"]
        assert outcome.value["at"] - at[0] < 5.0


@pytest.mark.slow
def test_stopped_rank_is_named_at_the_time_out(tmp_path: Path) -> None:
    at: list[float] = []
    watch = _signal_when_ready(tmp_path, 2, 1, signal.SIGSTOP, at)
    env = {"ZEROPP_TEST_READY": str(tmp_path)}
    outcomes = run_ranks(2, reduce_for_ever, "ab", 5.0, timeout=20, check=False, env=env, watch=watch)
    assert outcomes[0].value["rank"] == 1
    assert "did not come to all_reduce(float32, 100000 elements, sum)" in outcomes[0].value["text"]
