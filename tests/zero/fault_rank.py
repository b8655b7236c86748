# SPDX-License-Identifier: Apache-2.0
"""`fault_rank.py WHAT WHERE MODE FAILED_RANK FILE [DEVICE]`: train until one rank is killed, stopped or goes its own way; survivors
write what they saw.

WHAT: kill, stop, raise (an exception that ends the process), extra (one backward more than the others), leave
(returns early), lost (the next copy of its GPU finds that a kernel wrote to an illegal address).
WHERE: forward, backward, step. FILE gets one JSON object: error class, rank blamed, sentence, and the wall clock.
"""

from __future__ import annotations

import ctypes
import datetime
import importlib
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zeropp
from rank import use
from tiny import MODES, Tiny, vector
from zeropp.zero.engine import engine_of

AT_STEP = 3
WAYS = {**MODES, "offload": {"offload": zeropp.Offload(params="cpu", optimizer="cpu")}}
ILLEGAL_ADDRESS = 700


def strike(what: str, file: Path) -> None:
    file.write_text(json.dumps({"struck": time.time()}))
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "lost":
        driver = importlib.import_module("sim").driver
        ctypes.c_int.in_dll(driver, "sim_faults").value = ILLEGAL_ADDRESS  # its first field is fail_copy
    if what == "raise":
        raise ZeroDivisionError("the failed rank's own mistake")


def arm(what: str, where: str, model: Any, file: Path) -> None:
    """From now on the failed rank strikes when it comes to `where`."""
    if where == "forward":
        model.blocks[1].register_forward_hook(lambda *_: strike(what, file))
    elif where == "backward":

        def on_output(module: Any, args: Any, out: torch.Tensor) -> None:
            out.register_hook(lambda grad: strike(what, file))

        model.blocks[1].register_forward_hook(on_output)
    else:
        schedule = engine_of(model).schedule
        run = schedule.run

        def between(optimizer: Any) -> None:
            strike(what, file)
            run(optimizer)

        schedule.run = between


def train(what: str, where: str, mode: str, failed_rank: bool, file: Path) -> None:
    torch.manual_seed(0)
    model = Tiny()
    model, optimizer = zeropp.prepare(
        model, torch.optim.AdamW(model.parameters()), zeropp.Config(units=("Linear", "Tiny"), **WAYS[mode])
    )
    for step in range(200):
        if failed_rank and step == AT_STEP:
            if what == "leave":
                file.write_text(json.dumps({"struck": time.time()}))
                return
            if what != "extra":
                arm(what, where, model, file)
        model(vector(step)).backward()
        if failed_rank and what == "extra" and step == AT_STEP:
            file.write_text(json.dumps({"struck": time.time()}))
            model(vector(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def main(what: str, where: str, mode: str, failed_rank: int, file: Path, device: str = "cpu") -> int:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    use(device)
    timeout = 4.0 if what == "stop" else 30.0
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))
    try:
        train(what, where, mode, dist.get_rank() == failed_rank, file)
    except zeropp.Error as error:
        row = {
            "error": type(error).__name__,
            "rank": getattr(error, "rank", None),
            "text": str(error),
            "at": time.time(),
        }
        file.write_text(json.dumps({**(json.loads(file.read_text()) if file.exists() else {}), **row}))
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4], int(sys.argv[4]), Path(sys.argv[5]), *sys.argv[6:]))
