# SPDX-License-Identifier: Apache-2.0
"""``doctor --device cuda``: each kernel of zeropp against the CPU, parts of the driver, steps of each stage and tier against plain torch,
and the links between GPUs, in one table."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import torch

from zeropp.cli import new_table, refuse, show
from zeropp.cli.device_steps import check_steps
from zeropp.errors import Error, counted, one_line
from zeropp.health.device import Finding, check_device
from zeropp.health.gather import GatherWay, gather_way

_LINK_BYTES, _LINK_TURNS = 64 << 20, 5


def run(name: str, quick: bool, as_json: bool) -> int:
    """Print what was found of every device. Exit status: 0 all is right, 1 something is not, 2 there is no such device."""
    found: dict[str, list[Finding]] = {}
    try:
        for device in _devices(name):
            found[str(device)] = _check(device, quick)
        if not quick:
            for one, finding in _links([torch.device(device) for device in found]):
                found[one].append(finding)
    except (Error, RuntimeError, ValueError) as error:
        return refuse("doctor", one_line(error))
    return _report(found, as_json)


def _report(found: dict[str, list[Finding]], as_json: bool) -> int:
    """Print the findings, and how these GPUs would exchange shards; return the exit status."""
    failed = sum(bool(finding.why) for findings in found.values() for finding in findings)
    way = gather_way([torch.device(device) for device in found])
    if as_json:
        rows = {device: [finding.as_dict() for finding in findings] for device, findings in found.items()}
        print(json.dumps({"devices": rows, "gather": way.as_dict(), "healthy": not failed}))
    else:
        _print(found, way, failed)
    return 1 if failed else 0


def _check(device: torch.device, quick: bool) -> list[Finding]:
    """Try one device by itself."""
    found = check_device(device, quick)
    return found if quick else [*found, *check_steps(device)]


def _devices(name: str) -> list[torch.device]:
    """Return the device of that name, or all of its kind where it has no number."""
    device = torch.device(name)
    if device.type == "cpu":
        raise ValueError("--device cpu is not allowed; wanted a GPU, such as cuda or cuda:0")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"--device {name}: torch finds no GPU ({torch.__version__}); `python -m zeropp env` says what there is"
        )
    if device.index is not None:
        return [device]
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    return [torch.device(device.type, index) for index in range(count)]


def _links(devices: list[torch.device]) -> Iterator[tuple[str, Finding]]:
    """Yield each pair of GPUs: whether one can map the other's memory, the copy's bandwidth, and its bytes."""
    for one in devices:
        for other in devices:
            if one == other:
                continue
            maps = torch.cuda.can_device_access_peer(one, other)
            gb_per_s, right = _copy(one, other)
            name = f"link to {other}: {gb_per_s:.1f} GB/s{'' if maps else ', through the host'}"
            why = "" if right else "a copy has other bytes than its source"
            yield str(one), Finding(name=name, why=why, instead="use one GPU, or another pair" if why else "")


def _copy(one: torch.device, other: torch.device) -> tuple[float, bool]:
    source = torch.arange(_LINK_BYTES // 4, dtype=torch.int32, device=one)
    target = source.to(other)
    torch.cuda.synchronize(other)
    began = time.perf_counter()
    for _ in range(_LINK_TURNS):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(one)
    torch.cuda.synchronize(other)
    seconds = time.perf_counter() - began
    return _LINK_BYTES * _LINK_TURNS / seconds / 1e9, torch.equal(target.cpu(), source.cpu())


def _print(found: dict[str, list[Finding]], way: GatherWay, failed: int) -> None:
    for device, findings in found.items():
        table = new_table(device)
        for name in ("what", "found", "instead"):
            table.add_column(name, overflow="fold")
        for finding in findings:
            table.add_row(finding.name, finding.why or "right", finding.instead)
        show(table)
    show(str(way))
    all_of = counted(sum(map(len, found.values())), "check")
    show(f"{failed} of {all_of} failed" if failed else f"healthy: {all_of}, all right")
