# SPDX-License-Identifier: Apache-2.0
"""Step every optimizer's operator on the simulated GPU and on the CPU. Print which of them differ, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import sim
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import zeropp  # after sim, whose variables it reads
from helpers import step_calls

Tensors = list[torch.Tensor]
SCALE, TAKEN, SKIPPED = torch.tensor([0.37]), *(torch.tensor([word], dtype=torch.int32) for word in (0, 1))


def variants(op: str) -> dict[str, dict[str, Any]]:
    scaled = step_calls.STEPS[op][2]
    return {
        "number": {"grad_scale": 0.37} if scaled else {},
        "words": {"skip": TAKEN, **({"grad_scale": SCALE} if scaled else {})},
        "skipped": {"skip": SKIPPED},
    }


def moved(value: Any) -> Any:
    return value.to("sim") if isinstance(value, torch.Tensor) else value


def same(wanted: Tensors, found: Tensors) -> bool:
    return all(torch.equal(one, other.cpu()) for one, other in zip(wanted, found, strict=True))


def step(op: str, kind: str, variant: str, waits: dict[str, int]) -> bool:
    more = variants(op)[variant]
    wanted = step_calls.call(op, step_calls.tensors_of(op, kind), **more)
    lists = {name: [moved(x) for x in tensors] for name, tensors in step_calls.tensors_of(op, kind).items()}
    more = {name: moved(value) for name, value in more.items()}
    with sim.waits_of_the_host(waits):
        found = step_calls.call(op, lists, **more)
    return same(wanted, found)


def norm(waits: dict[str, int]) -> bool:
    tensors = step_calls.tensors_of("adam_step_", "fp32")["grads"]
    tensors[3][70] = float("inf")
    on_device = [moved(tensor) for tensor in tensors]
    with sim.waits_of_the_host(waits):
        found = zeropp.ops.norm_squares(on_device)
    return same(list(zeropp.ops.norm_squares(tensors)), list(found))


def codec(kind: str) -> bool:
    """Encode and decode a moment, which a GPU leaves to the CPU."""
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    results = []
    for device in ("cpu", "sim"):
        codes = torch.zeros(1000, dtype=step_calls.KINDS[kind]).to(device)
        scales = torch.zeros(step_calls.moments_scales(1000) if kind == "int8" else 0).to(device)
        back = torch.zeros(1000).to(device)
        zeropp.ops.moments_encode_(values.to(device), codes, scales, stream=3, step=2)
        zeropp.ops.moments_decode_(codes, scales, back)
        results.append([codes, scales, back])
    return same(*results)


def main() -> None:
    differ, waits = [], dict[str, int]()
    for lazy in (0, 1):
        sim.set_schedule(lazy, 0)
        for op, kind in step_calls.CASES:
            differ += [[op, kind, v, lazy] for v in ("number", "words", "skipped") if not step(op, kind, v, waits)]
        differ += [] if norm(waits) else [["norm_squares", lazy]]
        differ += [["moments", kind, lazy] for kind in ("bf16", "int8") if not codec(kind)]
    cases = [list(case) for case in step_calls.CASES]
    print(json.dumps({"cases": cases, "differ": differ, "waits": waits, "error": sim.first_error()}))


if __name__ == "__main__":
    main()
