# SPDX-License-Identifier: Apache-2.0
"""A rank that is killed, in one phase of a pipeline or beside tensor and sequence parallelism: all others name it within seconds.

Ranks of a job meet in several groups, and the killed one is in some of them only (csrc/comm/linked.c).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from launch import run_ranks, survivors
from ranks import simulated

WITHIN_S = 5.0
AT_STEP = 1
CLIP = 1.0
Strike = Callable[[], None]
PHASES = ("receive", "forward", "send", "backward", "gather", "reduction", "clip", "step", "save")
SAMPLED = {("receive", 2, "zeropp"), ("reduction", 2, "zeropp"), ("save", 1, "zeropp"), ("backward", 3, "gloo")}


@contextlib.contextmanager
def before(owner: Any, name: str, strike: Strike, after: int) -> Iterator[None]:
    """Strike before a call of a method, the one after so many others."""
    original, calls = getattr(owner, name), [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] > after:
            strike()
        return original(*args, **kwargs)

    with mock.patch.object(owner, name, call):
        yield


def place_of(phase: str, run: Any) -> tuple[Any, str, int]:
    """Return the method in which a rank of a pipeline dies in a phase, and after how many calls: in the second micro-batch."""
    from zeropp.zero.engine import engine_of

    engine, stage = engine_of(run.chunks), run.stages[0]
    return {
        "receive": (stage, "get_bwd_recv_ops" if stage.is_first else "get_fwd_recv_ops", 1),
        "forward": (stage, "forward_one_chunk", 1),
        "send": (stage, "get_fwd_send_ops" if stage.is_first else "get_bwd_send_ops", 1),
        "backward": (stage, "backward_maybe_with_nosync", 1),
        "gather": (run.chunks[0][4], "forward", 1),  # units before it are gathered, and those after it not
        "reduction": (run.schedule._zeropp, "_require_backwards", 0),
        "clip": (engine.strategy, "measure", 0),
        "step": (engine.schedule, "run", 0),
    }[phase]


def outcome_of(body: Callable[[], None]) -> dict[str, Any]:
    import zeropp

    try:
        body()
    except zeropp.CommError as error:
        return {"at": time.time(), "rank": error.rank, "text": str(error)}
    return {"at": 0.0, "rank": None, "text": "no error"}


def striker(folder: str) -> Strike:
    def strike() -> None:
        Path(folder, "killed").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    return strike


def pipeline_rank(rank: int, ranks: int, phase: str, victim: int, folder: str, backend: str) -> dict[str, Any]:
    import torch
    from rank import use_of_the_environment

    use_of_the_environment()
    import torch.distributed as dist
    import zeropp
    from pipelines import Run, mesh_of

    torch.set_num_threads(1)
    dist.init_process_group(backend)
    run = Run(mesh_of(2, ranks // 2), "1F1B", stage=3, host_copy="off")
    strike, dies = striker(folder), rank == victim

    def train(step: int) -> None:
        run.forward_backward(step)
        run.optimizer.clip_grad_norm_(CLIP)
        run.optimizer.step()
        run.optimizer.zero_grad()

    def body() -> None:
        for step in range(AT_STEP):
            train(step)
        if phase != "save":
            owner, name, after = place_of(phase, run)
            with before(owner, name, strike, after) if dies else contextlib.nullcontext():
                train(AT_STEP)
        elif dies:
            strike()
        zeropp.save(Path(folder, "checkpoint"), run.chunks, run.optimizer)

    return outcome_of(body)


def tensor_rank(rank: int, ranks: int, victim: int, folder: str) -> dict[str, Any]:
    """tp x dp: the victim dies before the collective of tensor parallelism that ends a block."""
    import torch
    from rank import use_of_the_environment

    use_of_the_environment()
    import torch.distributed as dist
    import zeropp

    sys.path.insert(0, str(Path(__file__).parent))
    test_tensor = importlib.import_module("test_tensor")
    torch.set_num_threads(1)
    dist.init_process_group("zeropp" if torch.get_default_device().type == "cpu" else "simulated")
    mesh = test_tensor._mesh()
    model = test_tensor._cut(mesh)
    model, optimizer = zeropp.prepare(
        model, test_tensor._adam(model), zeropp.Config(stage=3, host_copy="off"), mesh=mesh
    )

    def body() -> None:
        test_tensor._train(model, optimizer, mesh, 1)
        strikes = before(model.layers[1].down, "forward", striker(folder), 0)
        with strikes if rank == victim else contextlib.nullcontext():
            test_tensor._train(model, optimizer, mesh, 1)

    return outcome_of(body)


def sequence_rank(rank: int, ranks: int, victim: int, folder: str) -> dict[str, Any]:
    """sp x dp: the victim dies before the exchange of its second layer's attention."""
    import cut_models
    import torch
    import torch.distributed as dist
    import zeropp
    import zeropp.parallel
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("zeropp")
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "sp"))
    model = cut_models.model("llama", 4, 2, "sdpa")
    model, optimizer = zeropp.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), zeropp.Config(stage=3, host_copy="off"), mesh=mesh
    )
    part = zeropp.parallel.ulysses(model, mesh["sp"]).shard(cut_models.batch("plain"))

    def train() -> None:
        model(**part).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def body() -> None:
        train()
        strikes = before(model.model.layers[1].self_attn.o_proj, "forward", striker(folder), 0)
        with strikes if rank == victim else contextlib.nullcontext():
            train()

    return outcome_of(body)


def require_named(victim: int, place: str, folder: Path, body: Callable[..., Any], *args: Any, **options: Any) -> None:
    outcomes = run_ranks(4, body, *args, check=False, **{"timeout": 90, **options})
    assert outcomes[victim].code == -signal.SIGKILL, str(outcomes[victim])
    killed_at = float((folder / "killed").read_text())
    for outcome in survivors(outcomes, victim):
        value = outcome.value
        assert value["rank"] == victim, value
        assert f"rank {victim} (process " in value["text"] and "died" in value["text"], value
        assert place in value["text"], value
        assert value["at"] - killed_at < WITHIN_S, value


CASES = [(phase, victim, "zeropp") for phase in PHASES for victim in (1, 2)] + [
    ("backward", 3, "gloo"),
    ("clip", 0, "gloo"),
]


@pytest.mark.parametrize(
    ("phase", "victim", "backend"),
    [pytest.param(*case, marks=() if case in SAMPLED else pytest.mark.slow) for case in CASES],
)
def test_in_every_phase_of_a_pipeline(phase: str, victim: int, backend: str, tmp_path: Path) -> None:
    """Two stages of two data ranks: ranks 0, 1 and 2, 3."""
    place = f"(rank {victim} of the job is rank {victim // 2} of the pipeline)"
    require_named(victim, place, tmp_path, pipeline_rank, phase, victim, str(tmp_path), backend)


@pytest.mark.parametrize("victim", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_beside_tensor_parallelism(victim: int, tmp_path: Path) -> None:
    require_named(victim, "", tmp_path, tensor_rank, victim, str(tmp_path))


@pytest.mark.parametrize("victim", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_beside_parts_of_sequences(victim: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    require_named(victim, "", tmp_path, sequence_rank, victim, str(tmp_path))


def on_gpus(hosts: str) -> dict[str, Any]:
    """Return options of ranks with a simulated GPU each, on hosts of these names."""
    env = {**simulated("sim"), "ZEROPP_TEST_DEVICE": "sim"}
    return {"env": env, "env_of": [{"ZEROPP_HOST_ID": host} for host in hosts], "timeout": 240}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "phase", "victim"),
    [
        ("aabb", "backward", 2),
        ("aabb", "clip", 1),
        ("abab", "gather", 2),
        ("abab", "reduction", 3),
        ("abab", "step", 1),
    ],
)
def test_in_a_pipeline_on_gpus_of_two_hosts(hosts: str, phase: str, victim: int, tmp_path: Path) -> None:
    """The data ranks of a stage are on one host, whose GPUs copy, or on both, where NCCL moves what they exchange."""
    place = f"(rank {victim} of the job is rank {victim // 2} of the pipeline)"
    require_named(victim, place, tmp_path, pipeline_rank, phase, victim, str(tmp_path), "gloo", **on_gpus(hosts))


@pytest.mark.slow
@pytest.mark.parametrize(("hosts", "victim"), [("aabb", 3), ("abab", 1)])
def test_beside_slices_on_gpus_of_two_hosts(hosts: str, victim: int, tmp_path: Path) -> None:
    require_named(victim, "", tmp_path, tensor_rank, victim, str(tmp_path), **on_gpus(hosts))
