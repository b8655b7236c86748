# SPDX-License-Identifier: Apache-2.0
"""Use freed device memory again, and print as JSON what readers of it see."""

from __future__ import annotations

import json

import sim
import torch

ELEMS = 128
LAZY_SIDE = 0b10  # stream 1, the first of the pool, is lazy; the default stream is eager


def read_after_free(record: bool) -> float:
    """Return what a side stream reads from a tensor that the default stream frees, and allocates again."""
    sim.set_schedule(LAZY_SIDE, 0)
    sim.restart_stream_pool()
    side, out = torch.Stream(device="sim"), torch.zeros(ELEMS, device="sim")
    tensor = torch.ones(ELEMS, device="sim")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        out.copy_(tensor)
    if record:
        tensor.record_stream(side)
    del tensor
    again = torch.full((ELEMS,), 7.0, device="sim")
    torch.accelerator.current_stream().wait_stream(side)
    value = out.cpu()[0].item()
    del again
    return value


def fresh_memory() -> bool:
    return bool(torch.empty(ELEMS, device="sim").cpu().isnan().all())


def reused_memory() -> bool:
    """The next owner on the same stream sees NaN and not the old values."""
    old = torch.ones(ELEMS, device="sim")
    address = old.data_ptr()
    del old
    new = torch.empty(ELEMS, device="sim")
    return new.data_ptr() == address and bool(new.cpu().isnan().all())


def late_copies() -> list[float]:
    """Return what the host reads from pinned memory before and after it waits for a copy, with a lazy stream."""
    sim.set_schedule(~0 & (1 << 64) - 1, 0)
    pinned = torch.zeros(ELEMS, pin_memory=True)
    pinned.copy_(torch.ones(ELEMS, device="sim"), non_blocking=True)
    early = pinned[0].item()
    torch.accelerator.current_stream().synchronize()
    return [early, pinned[0].item()]


def autocast() -> list[str]:
    layer = torch.nn.Linear(4, 4).to("sim")
    with torch.autocast("sim", torch.bfloat16):
        out = layer(torch.ones(2, 4, device="sim"))
        return [str(out.dtype), str(torch.softmax(out, -1).dtype)]


def main() -> None:
    found = {
        "without record_stream": read_after_free(False),
        "with record_stream": read_after_free(True),
        "fresh is NaN": fresh_memory(),
        "reused is NaN": reused_memory(),
        "late copies": late_copies(),
        "autocast": autocast(),
        "error": sim.first_error(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
