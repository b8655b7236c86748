# SPDX-License-Identifier: Apache-2.0
"""Run scripts on two hosts: network namespaces joined by a cable (tests/comm/netns.py), a rank in each, or a torchrun agent in each.

with two_networks.hosts() as two:
    done = two_networks.launch(two, "script.py", ..., env=environment, timeout=100, kind="hf")    # the script calls enter() first
    done = two_networks.agents(two, "script.py", ..., env=environment, timeout=100)
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import warm

sys.path.insert(0, str(Path(__file__).parent / "comm"))
from netns import TwoHosts, why_not

VARIABLE = "ZEROPP_TEST_TWO_NETWORKS"
_CLONE_NEWNET = 0x40000000


@contextmanager
def hosts() -> Iterator[TwoHosts]:
    """Yield two hosts, or skip the test and say why this machine has none."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with TwoHosts() as two:
        yield two


def _variables(two: TwoHosts, side: int) -> dict[str, str]:
    return {"MASTER_ADDR": two.addresses[0], "GLOO_SOCKET_IFNAME": two.links[side]}


def enter() -> None:
    """Become the only rank of a host. Call it in a rank that :func:`launch` started, before it has a socket or a thread."""
    given = os.environ.get(VARIABLE)
    if given is None:
        return
    rank = os.environ["RANK"]
    name, address, link = given.split(";")[int(rank)].split(",")
    with Path("/run/netns", name).open("rb") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns({name})")
    os.environ.update(
        MASTER_ADDR=address,
        GLOO_SOCKET_IFNAME=link,
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        GROUP_RANK=rank,
        GROUP_WORLD_SIZE="2",
    )


def launch(
    two: TwoHosts, *command: Any, env: Mapping[str, str], timeout: float, kind: str
) -> subprocess.CompletedProcess[str]:
    """Start two ranks, each on a host, from a process that has imported the modules of ``kind``."""
    sides = (f"{two.names[side]},{two.addresses[0]},{two.links[side]}" for side in range(2))
    return warm.launch(2, *command, env={**env, VARIABLE: ";".join(sides)}, timeout=timeout, kind=kind)


def agents(
    two: TwoHosts, *command: Any, env: Mapping[str, str], timeout: float
) -> list[subprocess.CompletedProcess[str]]:
    """Run ``torchrun --nnodes 2``: an agent on each host, one rank each."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--master-port=29578"]
    started = []
    for side in range(2):
        where = [f"--master-addr={two.addresses[0]}", f"--node-rank={side}", f"--local-addr={two.addresses[side]}"]
        line = [*two.command(side), *words, *where, *map(str, command)]
        started.append(
            subprocess.Popen(
                line, env={**env, **_variables(two, side)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    done = []
    try:
        for process in started:
            out = process.communicate(timeout=timeout)[0]
            done.append(subprocess.CompletedProcess(list(map(str, command)), process.returncode, out))
    finally:
        for process in started:
            if process.poll() is None:
                process.terminate()  # which ends its ranks, too
                process.wait(timeout=30)
    return done
