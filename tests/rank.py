# SPDX-License-Identifier: Apache-2.0
"""One rank of a launch: `rank.py TESTS ANSWERS` runs the bodies of the tests in TESTS (ranks.py) and appends a JSON line to ANSWERS when
a test begins, and another when it ended."""

from __future__ import annotations

import datetime
import faulthandler
import functools
import importlib.util
import inspect
import json
import os
import re
import sys
import time
import traceback
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

import pytest
import torch
import torch.distributed as dist


def load(path: Path) -> ModuleType:
    """Return the module of a test file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def use(device: str) -> None:
    """Make a device that of new tensors. The simulated GPU becomes torch's before zeropp is imported."""
    if device.startswith("sim"):
        importlib.import_module("sim").register_backend()
        torch.set_default_device("sim")
        sum_on_the_host()
    if device == "sim-offload":
        offload_by_default()


def use_of_the_environment() -> None:
    """Use the device of ``pytest --device``, in a rank that a test started with :func:`ranks.taking_the_device`."""
    use(os.environ.get("ZEROPP_TEST_DEVICE", ""))


def sum_on_the_host() -> None:
    """Let what a test exchanges itself go through the host: gloo has no collectives on a simulated GPU."""

    def wrap(collective: Any) -> Any:
        @functools.wraps(collective)
        def call(*args: Any, **keywords: Any) -> Any:
            tensors, spec = torch.utils._pytree.tree_flatten((args, keywords))
            here = [one.cpu() if isinstance(one, torch.Tensor) else one for one in tensors]
            args, keywords = torch.utils._pytree.tree_unflatten(here, spec)
            work = Received(collective(*args, **keywords), list(zip(tensors, here, strict=True)))
            if keywords.get("async_op"):
                return work
            work.arrive()
            return None

        return call

    for name in ("all_gather", "all_gather_into_tensor", "all_reduce", "broadcast"):
        setattr(dist, name, wrap(getattr(dist, name)))
    between_two_on_the_host()


def between_two_on_the_host() -> None:
    """Let what two ranks send each other, as the stages of a pipeline do, go through the host."""
    c10d: Any = dist.distributed_c10d
    isend, irecv = c10d.isend, c10d.irecv

    def send(tensor: torch.Tensor, *args: Any, **keywords: Any) -> Any:
        return isend(tensor.cpu(), *args, **keywords)

    def receive(tensor: torch.Tensor, *args: Any, **keywords: Any) -> Any:
        moved = tensor.cpu()
        return Received(irecv(moved, *args, **keywords), [(tensor, moved)])

    def batch(ops: list[Any]) -> list[Any]:
        peers = ({"group_src" if one.op is receive else "group_dst": one.group_peer} for one in ops)
        return [one.op(one.tensor, group=one.group, tag=one.tag, **to) for one, to in zip(ops, peers, strict=True)]

    for module in (dist, c10d):
        module.isend, module.irecv, module.batch_isend_irecv = send, receive, batch


class Received:
    """What comes through the host: it is on the device after wait()."""

    def __init__(self, work: Any, tensors: list[tuple[Any, Any]]) -> None:
        self._work, self._tensors = work, tensors

    def wait(self) -> None:
        self._work.wait()
        self.arrive()

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def arrive(self) -> None:
        for tensor, moved in self._tensors:
            if moved is not tensor:
                tensor.detach().copy_(moved)


def offload_by_default() -> None:
    """Let configurations that say nothing of tiers keep shards and states on the host."""
    config = importlib.import_module("zeropp.config")
    plain = config.Config.__init__

    def initialise(self: Any, *args: Any, **options: Any) -> None:
        if "offload" not in options and options.get("stage", 3) > 0:
            params = {"params": "cpu"} if options.get("stage", 3) == 3 else {}
            options["offload"] = config.Offload(optimizer="cpu", **params)
        plain(self, *args, **options)

    config.Config.__init__ = initialise


def is_refused(error: BaseException, test: dict[str, Any], device: str) -> str:
    """Return the sentence of zeropp where it refuses what is not supported on the device yet, and the test may be refused."""
    said = str(error) if type(error).__name__ in ("ConfigError", "NotBuiltError") else ""
    pattern = test["refused"] or ("" if device == "cpu" else "not supported yet")
    return said if pattern and re.search(pattern, said) else ""


def run(test: dict[str, Any], module: ModuleType, answers: TextIO, device: str) -> bool:
    """Run one test. False if it failed: what it leaves behind would be seen by the next one."""

    def answer(**found: Any) -> None:
        answers.write(json.dumps({"id": test["id"], **found}) + "\n")

    answer(begun=True)
    faulthandler.dump_traceback_later(test["seconds"], exit=True)
    started = time.monotonic()
    skipped: dict[str, str] = {}
    try:
        inspect.unwrap(getattr(module, test["function"]))(**test["params"])
    except pytest.skip.Exception as reason:
        skipped["skipped"] = str(reason)
    except BaseException as error:
        said = is_refused(error, test, device)
        if not said:
            answer(error=traceback.format_exc())
            return False
        if not test["refused"]:
            skipped["skipped"] = f"{device}: {said}"
    else:
        if test["refused"]:
            answer(error=f"wanted a zeropp.ConfigError with '{test['refused']}' on {device}, and the test passed")
            return False
    answer(seconds=round(time.monotonic() - started, 2), **skipped)
    return True


def main(order: Path, answers: Path) -> int:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    wanted = json.loads(order.read_text())
    use(wanted["device"])
    module = load(Path(wanted["file"]))
    dist.init_process_group(wanted["backend"], timeout=datetime.timedelta(seconds=60))
    with answers.open("a", buffering=1) as out:
        for test in wanted["tests"]:
            if not run(test, module, out, wanted["device"]):
                return 1
            dist.barrier()
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
