# SPDX-License-Identifier: Apache-2.0
"""Check that all ranks prepare the same thing, before anything is allocated: ranks that disagree would call different collectives.

The configuration costs one all-gather of 16 bytes a rank, the model one of 8 bytes a parameter.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

import torch

from zeropp.comm.collective import all_gather
from zeropp.config import Config, LossScale, Precision
from zeropp.errors import ConfigError, counted, ranks_named
from zeropp.zero.model.units import UnitPlan

__all__ = ["check_same_config", "check_same_lines", "check_same_model", "gather_bytes"]

LEFT_OUT = frozenset({"device", "path"})
"""Fields that may differ from rank to rank: each host names its own disks, each rank its own device."""
_MOST_DIFFERENCES = 4
_MISTAKE = "mistake"


def check_same_config(
    comm: Any, config: Config, optimizer: Any, device: torch.device, mistake: ConfigError | None
) -> None:
    """Check that all ranks have the same configuration, class of optimizer and type of device. Collective.

    Args:
        mistake: what this rank has found wrong before, or None.

    Raises:
        zeropp.ConfigError: the mistake of this rank or of another, which is named; or each key that differs, its values and who has them.
    """
    facts = dict(_facts("Config", config))
    facts["optimizer"] = "None" if optimizer is None else type(optimizer).__name__
    facts["type of device"] = device.type
    facts[_MISTAKE] = "" if mistake is None else str(mistake)
    text = json.dumps(facts).encode()
    hashes = gather_bytes(comm, hashlib.sha256(text).digest()[:16])
    if len(set(hashes)) == 1:
        if mistake is None:
            return
        raise mistake
    sizes = [int.from_bytes(one, "little") for one in gather_bytes(comm, len(text).to_bytes(8, "little"))]
    texts = gather_bytes(comm, text.ljust(max(sizes)))  # JSON may end in spaces
    found = [json.loads(one) for one in texts]
    if mistake is not None:
        raise mistake
    for rank, one in enumerate(found):
        if one[_MISTAKE]:
            raise ConfigError(f"prepare: rank {rank} cannot prepare its model: {one[_MISTAKE]}")
    raise ConfigError(_differences(found))


def _differences(facts: list[dict[str, str]]) -> str:
    """`prepare: Config.stage is 3 on rank 0 and 2 on ranks 1 and 2; ...`"""
    found = []
    for key in dict.fromkeys(key for one in facts for key in one):
        who: dict[str, list[int]] = {}
        for rank, one in enumerate(facts):
            who.setdefault(one.get(key, "None"), []).append(rank)
        if len(who) > 1:
            values = [f"{value} on {ranks_named(ranks)}" for value, ranks in who.items()]
            found.append(f"{key} is {', '.join(values[:-1])} and {values[-1]}")
    rest = len(found) - _MOST_DIFFERENCES
    more = "" if rest <= 0 else f"; {counted(rest, 'more key')} {'differs' if rest == 1 else 'differ'}"
    return (
        f"prepare: {'; '.join(found[:_MOST_DIFFERENCES])}{more}; give every rank the same configuration and optimizer"
    )


def _facts(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield (path of a key, its value as text), for all keys of a configuration and of what stands in it."""
    for field in dataclasses.fields(value):
        if field.name in LEFT_OUT:
            continue
        inner, name = getattr(value, field.name), f"{path}.{field.name}"
        if path == "Config" and field.name == "precision" and not isinstance(inner, Precision):
            inner = Precision(param=inner)  # the short form of the same thing
        if field.name == "shared_by" and inner is not None:
            inner = f"{inner.size()} ranks"  # each set of ranks with the same tokens names its own
        if path == "Config" and field.name == "loss_scale" and inner is None:
            inner = LossScale()
        if dataclasses.is_dataclass(inner):
            yield from _facts(name, inner)
        else:
            yield name, _text(inner)


def _text(value: Any) -> str:
    """Return a text that is equal on every rank for equal values: a class by its name, a set of classes in order."""
    if isinstance(value, (tuple, list)):
        return ", ".join(sorted(map(_text, value))) or "nothing"
    if isinstance(value, Mapping):
        return ", ".join(f"{key!r}: {_text(value[key])}" for key in sorted(value, key=repr))
    return value.__name__ if isinstance(value, (type, FunctionType)) else repr(value)


def gather_bytes(comm: Any, mine: bytes) -> list[bytes]:
    """Return all ranks' byte strings of one length."""
    source = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    every = torch.empty(len(mine) * comm.ranks, dtype=torch.uint8, device="cpu")
    all_gather(comm, every, source)
    data = bytes(every.tolist())
    return [data[r * len(mine) : (r + 1) * len(mine)] for r in range(comm.ranks)]


def _description(plan: UnitPlan, i: int) -> bytes:
    p = plan.params[i]
    return f"'{plan.names[i][0]}' {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}".encode()


def check_same_model(comm: Any, plans: list[UnitPlan]) -> None:
    """Check that all ranks prepare the same parameters; all of them raise the first that differs."""
    check_same_lines(comm, [_description(plan, i) for plan in plans for i in range(len(plan.params))], "parameter")


def check_same_lines(comm: Any, lines: list[bytes], what: str) -> None:
    """Check that lines of text are equal on all ranks; ``what`` names the object of a line."""
    digests = [hashlib.sha256(line).digest()[:8] for line in lines]
    counts = [int.from_bytes(b, "little") for b in gather_bytes(comm, len(lines).to_bytes(8, "little"))]
    most = max(counts)
    if not most:
        return
    names = comm.job_ranks
    table = gather_bytes(comm, b"".join(digests).ljust(8 * most, b"\0"))
    for rank, row in enumerate(table):
        if row == table[0]:
            continue
        at = next(i for i in range(most) if row[8 * i : 8 * i + 8] != table[0][8 * i : 8 * i + 8])
        line = lines[at] if at < len(lines) else f"(no more {what}s)".encode()
        seen = [b.rstrip(b"\0").decode(errors="replace") for b in gather_bytes(comm, line[:256].ljust(256, b"\0"))]
        raise ConfigError(
            f"prepare: rank {names[rank]}'s model differs from rank {names[0]}'s: {what} {at} is {seen[rank]} there and {seen[0]} on "
            f"rank {names[0]}; "
            "build the same model on every rank"
        )
