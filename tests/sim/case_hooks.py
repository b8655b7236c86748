# SPDX-License-Identifier: Apache-2.0
"""Record on which thread and stream the hooks of a training pass run. Print what each hook saw, as JSON."""

from __future__ import annotations

import json
import threading
from typing import Any

import sim
import torch

SEEN: dict[str, list[Any]] = {}
MAIN = threading.get_ident()
Queue = torch.autograd.Variable._execution_engine.queue_callback


def note(name: str) -> None:
    thread = "caller" if threading.get_ident() == MAIN else "backward thread"
    SEEN[name] = [thread, torch.accelerator.current_stream().stream_id]


def unpack(tensor: torch.Tensor) -> torch.Tensor:
    note("unpack")
    return tensor


def first_hook(grad: torch.Tensor) -> None:
    note("tensor hook")
    Queue(lambda: note("queue_callback"))


def main() -> None:
    first, second = torch.nn.Linear(8, 8).to("sim"), torch.nn.Linear(8, 8).to("sim")
    first.weight.register_post_accumulate_grad_hook(lambda p: note("post-accumulate hook"))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        h = first(torch.ones(4, 8, device="sim")).relu()
    h.register_hook(first_hook)
    side = torch.Stream(device="sim")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = second(h)
        y.register_hook(lambda grad: note("tensor hook of the side stream"))
        late = torch.nn.Parameter(torch.ones(8, device="sim"))
        late.register_post_accumulate_grad_hook(lambda p: note("post-accumulate hook of the side stream"))
        loss = (y * late).sum()
    torch.accelerator.current_stream().wait_stream(side)
    waits: dict[str, int] = {}
    with sim.waits_of_the_host(waits):
        loss.backward()
    reasons: dict[str, int] = {}
    with sim.waits_of_the_host(reasons):
        loss.item()
    print(json.dumps({"seen": SEEN, "side": side.stream_id, "waits": waits, "reasons": reasons}))


if __name__ == "__main__":
    main()
