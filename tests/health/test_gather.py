# SPDX-License-Identifier: Apache-2.0
"""Which way Comm(gather="auto") is, as ``doctor`` tells it: on this machine, which has no GPU, by functions of torch that answer otherwise."""

from __future__ import annotations

import pytest
import torch
from zeropp import _C
from zeropp.health.gather import gather_way

GPUS = [torch.device("cuda", index) for index in range(3)]


def test_copies_where_all_gpus_map_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    monkeypatch.setattr(_C, "nccl_version", lambda: 22809)
    said = "shards on GPUs: Comm(gather='auto') is 'copy', because each of 3 GPUs of this host can map the memory of the others"
    assert str(gather_way(GPUS)) == f"{said} (over several hosts it is 'nccl'); NCCL 2.28.9 is found"


def test_nccl_where_two_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one.index, other.index) != (2, 0))
    assert gather_way(GPUS).why == "cuda:2 cannot map the memory of cuda:0"
    assert gather_way(GPUS).way == "nccl"


def test_nccl_over_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    way = gather_way(GPUS, hosts=2)
    assert (way.way, way.why) == ("nccl", "GPUs of 2 hosts cannot map each other's memory")
