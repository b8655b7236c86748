# SPDX-License-Identifier: Apache-2.0
"""examples/elastic_gpt.py under torchrun with ranks that die: the run goes on with those that are left, and its losses are those
of a run that nothing happened to."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from warm import Process, start
from zeropp import elastic
from zeropp.errors import ConfigError

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "elastic_gpt.py"
SAVE_EVERY = 4
Started = Process | subprocess.Popen[bytes]


def environment(**more: object) -> dict[str, str]:
    paths = os.pathsep.join(one for one in sys.path if one)
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": paths,
        **{key: str(value) for key, value in more.items()},
    }


class Node:
    """One torchrun with its ranks, as one machine of a job would have it."""

    def __init__(self, job: Job, ranks: int) -> None:
        launch = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:3", "--nproc-per-node", str(ranks),
            "--max-restarts", "1000", "--monitor-interval", "0.1", "--rdzv-backend", "c10d", "--rdzv-id", "elastic",
            "--rdzv-endpoint", f"localhost:{job.port}", "--rdzv-conf", "is_host=0,last_call_timeout=1,keep_alive_interval=1",
            "--local-addr=127.0.0.1",
        ]  # fmt: skip
        self.process = subprocess.Popen(
            [*launch, *job.script], stdout=job.log, stderr=subprocess.STDOUT, start_new_session=True,
            env=environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1),  # docs/elastic.md: machines that come later
        )  # fmt: skip

    def ranks(self) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        children = [int(one) for one in path.read_text().split()] if path.exists() else []
        return [pid for pid in children if b"elastic_gpt" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def kill(self) -> None:
        """The machine is gone: its torchrun, which takes its ranks with it."""
        self.process.kill()
        self.process.wait()


class Job:
    """Machines that come and go; the store that they meet at is this process."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps, self.nodes = folder, steps, list[Node]()
        self.alone: list[Started] = []
        self.log = (folder / "log.txt").open("w")
        self.data = folder / "text"
        sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        self.data.write_bytes(b"".join(one.read_bytes() for one in sources)[: 2 << 20])
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            self.port = probe.getsockname()[1]
        self.store = torch.distributed.TCPStore("localhost", self.port, is_master=True, wait_for_workers=False)

        options = {
            "out": folder, "data": self.data, "steps": steps, "save-every": SAVE_EVERY, "layers": 2, "width": 32, "context": 32,
            "batch": 10, "micro-batch": 3,
        }  # fmt: skip
        self.script = [str(EXAMPLE), *(f"--{name}={value}" for name, value in options.items())]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.alone:
            process.kill()
            process.wait()
        for node in self.nodes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.process.pid, signal.SIGKILL)
            node.kill()
        self.log.close()

    def start(self, ranks: int) -> Node:
        self.nodes.append(Node(self, ranks))
        return self.nodes[-1]

    def start_rank(self, rank: int, ranks: int) -> Started:
        """Start a rank as torchrun would, over the store that all starts share."""
        told = environment(
            RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks, MASTER_ADDR="localhost",
            MASTER_PORT=self.port, TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RUN_ID="elastic",
        )  # fmt: skip
        process = start(self.script, slot=rank, stdout=self.log, stderr=subprocess.STDOUT, env=told)
        self.alone.append(process)
        return process

    def rows(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def wait(self, until: Callable[[], bool], limit_s: float = 100) -> None:
        deadline = time.monotonic() + limit_s
        while not until():
            assert time.monotonic() < deadline, (self.rows()[-3:], Path(self.log.name).read_text()[-6000:])
            time.sleep(0.05)

    def finished(self) -> bool:
        return any(row["step"] == self.steps for row in self.rows())


def undisturbed(job: Job) -> list[float]:
    """The losses of one rank of plain PyTorch: the whole batch at once."""
    sys.path.insert(0, str(EXAMPLE.parent))
    from gpt import GPT, GPTConfig, learning_rate
    from text import Text

    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, heads=4, width=32, context=32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    text, losses = Text(job.data), []
    for step in range(job.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, job.steps, 2e-3)
        loss = model(*text.batch(step, rank=0, ranks=1, batch=10, context=32, device=torch.device("cpu")))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_curve(job: Job) -> None:
    """Every step is there, those that were done again too, and each lost at most the steps since a checkpoint."""
    rows = job.rows()
    wanted = undisturbed(job)
    assert {row["step"] for row in rows} == set(range(1, job.steps + 1))
    for row in rows:  # fp32 sums in another order, which steps of AdamW amplify
        assert row["loss"] == pytest.approx(wanted[row["step"] - 1], rel=2e-4 if row["step"] <= 80 else 2e-2), row
    for before, after in itertools.pairwise(rows):
        if after["process"] == before["process"]:
            assert after["step"] == before["step"] + 1
        else:  # a background save may have been on its way, besides the steps since it began
            assert after["step"] == after["start"] + 1 and after["start"] % SAVE_EVERY == 0
            assert before["step"] - 2 * SAVE_EVERY <= after["start"] <= before["step"] + 1


@pytest.mark.timeout(240)
def test_ranks_that_are_left_go_on(tmp_path):
    """Restart ranks as torchrun does, without torchrun: three ranks over a store, one is killed, two are started anew over that store."""
    with Job(tmp_path, steps=40) as job:
        first = [job.start_rank(rank, 3) for rank in range(3)]
        job.wait(lambda: len(job.rows()) > 10)
        first[2].kill()
        assert all(one.wait(60) not in (0, None) for one in first)  # told, and ended
        assert "zeropp.errors.CommError: comm: rank 2" in Path(job.log.name).read_text()
        second = [job.start_rank(rank, 2) for rank in range(2)]
        assert [one.wait(100) for one in second] == [0, 0], Path(job.log.name).read_text()[-6000:]
        rows = job.rows()
        assert {row["ranks"] for row in rows} == {3, 2} and {row["start"] > 0 for row in rows if row["ranks"] == 2} == {
            True
        }
        check_curve(job)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_machine_that_dies_leaves_a_run_that_goes_on(tmp_path):
    """Three ranks on two machines; one machine is killed; the two ranks that are left finish from the checkpoint."""
    with Job(tmp_path, steps=80) as job:
        left, dies = job.start(2), job.start(1)
        job.wait(lambda: any(row["ranks"] == 3 and row["start"] + 10 < row["step"] for row in job.rows()))
        dies.kill()
        job.wait(job.finished)
        assert left.process.wait(30) == 0
        rows = job.rows()
        ranks = [row["ranks"] for row in rows]
        assert ranks[-1] == 2 and 3 in ranks and max(row["start"] for row in rows if row["ranks"] == 2) > 0
        check_curve(job)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_die_every_few_seconds(tmp_path):
    """Ranks are killed at random, a machine leaves, another comes: 1 to 4 ranks, and one curve."""
    chance = random.Random(0)
    with Job(tmp_path, steps=240) as job:
        job.start(2)
        leaves = job.start(1)
        for round_ in range(5):
            seen = len(job.rows())
            job.wait(lambda seen=seen: len(job.rows()) > seen + chance.randrange(1, 25))
            if round_ == 1:
                leaves.kill()
            elif round_ == 3:
                job.start(2)
            else:
                alive = [pid for node in job.nodes if node.process.poll() is None for pid in node.ranks()]
                with contextlib.suppress(ProcessLookupError):
                    os.kill(chance.choice(alive), signal.SIGKILL)
        job.wait(job.finished, limit_s=200)
        assert {2, 3, 4} <= {row["ranks"] for row in job.rows()}
        check_curve(job)


@pytest.mark.parametrize("batch, micro_batch", [(1, 1), (7, 3), (24, 12), (10, 100), (97, 2)])
def test_shares_are_the_batch_whatever_the_ranks(batch, micro_batch):
    """Every sequence counts 1/batch, on every number of ranks; no micro-batch is larger than allowed, none is empty."""
    for ranks in range(1, min(batch, 12) + 1):
        shares = [elastic.share(batch, micro_batch, rank=rank, ranks=ranks) for rank in range(ranks)]
        assert len({len(one) for one in shares}) == 1
        assert len(shares[0]) == math.ceil(math.ceil(batch / ranks) / micro_batch)
        counted = [0.0] * batch
        for one in shares:
            for part in one:
                assert 1 <= len(part.sequences) <= micro_batch
                for i in part.sequences:
                    counted[i] += part.weight / len(part.sequences) / len(one) / ranks
        assert counted == pytest.approx([1 / batch] * batch)


@pytest.mark.parametrize(
    "arguments, says",
    [
        ((0, 1, 0, 1), "elastic.share: batch 0 is not allowed; wanted a whole number >= 1"),
        ((8, 2.0, 0, 1), "elastic.share: micro_batch 2.0 is not allowed; wanted a whole number >= 1"),
        ((8, 2, 3, 3), "elastic.share: rank 3 of 3 is not allowed; wanted 0 <= rank < ranks"),
        ((8, 2, 3, None), "elastic.share: rank=3 with ranks=None; give both, or neither"),
        ((2, 2, 0, 3), "elastic.share: batch 2 is less than the 3 ranks; raise it, or start fewer ranks (--nnodes MIN:2)"),
    ],
)  # fmt: skip
def test_what_cannot_be_shared(arguments, says):
    batch, micro_batch, rank, ranks = arguments
    with pytest.raises(ConfigError) as raised:
        elastic.share(batch, micro_batch, rank=rank, ranks=ranks)
    assert says in str(raised.value)
