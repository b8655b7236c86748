# SPDX-License-Identifier: Apache-2.0
"""One rank of same_bits.py: ``same_bits_worker.py ORDER.json``. PYTHONPATH chooses the zeropp.

It uses public names only, so that it runs with every revision. An order is ``{"jobs": [...], "out": FOLDER, "scratch": FOLDER}``; a job
is ``{"what": ..., "case": ...}`` and gives one JSON line in ``OUT/RANK.jsonl``:

    plan    which cases to try, for the driver
    probe   whether Config accepts the case
    train   20 steps, everything that a checkpoint then holds, and the steps after it
    load    a checkpoint that another revision saved, and the steps after it

Every number is written so that no bit is lost: losses as hexadecimal, tensors as a hash of their bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import gc
import hashlib
import json
import os
import random
import shutil
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import same_bits_cases as cases
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
STEPS, STEPS_AFTER = 20, 3
CONTEXT = 16
LIMIT_S = 90.0
"""A case that takes longer hangs: the log then says where."""

# What describes the bytes of a checkpoint. Left out is what may differ: versions, sums of whole files, random states, which Python seeds
# by chance.
MANIFEST = ("step", "ranks", "stage", "parameters", "buffers", "optimizer", "scaler", "private")
RANDOM = "/random."


def gpt() -> torch.nn.Module:
    """Return the model of tests/zero: a GPT with tied embeddings."""
    sys.path.insert(0, str(ROOT / "examples"))
    from gpt import GPT, GPTConfig

    return GPT(GPTConfig(layers=2, heads=4, width=48, context=CONTEXT))


def batch(step: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's rows of a sequence that can be learned: each byte is the one before plus a step of its own."""
    draw = torch.Generator().manual_seed(10_000 * step + 100 * micro + dist.get_rank())
    start, by = torch.randint(0, 256, (2, 1), generator=draw), torch.randint(1, 4, (2, 1), generator=draw)
    text = (start + by * torch.arange(CONTEXT + 1)) % 256
    return text[:, :-1], text[:, 1:]


def optimizer_of(name: str, model: torch.nn.Module) -> Any:
    """Return the optimizer of a case; two groups of parameters differ in decay."""
    import zeropp

    every = list(model.parameters())
    groups = [{"params": every[::2]}, {"params": every[1::2], "weight_decay": 0.1}]
    if name == "LAMB":
        return zeropp.optim.LAMB(groups, lr=3e-3)
    if name == "Lion":
        return zeropp.optim.Lion(groups, lr=1e-3)
    if name == "SGD":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    if name == "Adagrad":
        return torch.optim.Adagrad(groups, lr=0.01, lr_decay=0.1)
    if name == "RMSprop":
        return torch.optim.RMSprop(groups, lr=1e-3)
    return torch.optim.AdamW(groups, lr=3e-3, amsgrad=name == "amsgrad")


class Training:
    """A prepared model, and its steps as a user writes them."""

    def __init__(self, case: cases.Case, scratch: str) -> None:
        import zeropp

        config = cases.config(case, scratch)
        torch.manual_seed(0)
        random.seed(0)
        model = gpt()
        self.case = case
        self.model: Any
        self.optimizer: Any
        self.model, self.optimizer = zeropp.prepare(model, optimizer_of(case["optimizer"], model), config)

    def run(self, first: int, last: int) -> list[str]:
        """Take these steps; return their losses, and the norms where clipping is asked for."""
        import zeropp

        figures, accumulates = [], cases.accumulates(self.case)
        micros = 2 if accumulates or self.case["micro"] == "no_sync" else 1
        for step in range(first, last):
            for micro in range(micros):
                holds = not accumulates and micro < micros - 1
                with zeropp.no_sync(self.model) if holds else contextlib.nullcontext():
                    loss = self.model(*batch(step, micro))
                    self.backward(loss if accumulates else loss / micros)
                figures.append(loss.item().hex())
                if accumulates and micro < micros - 1:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
            if self.case["clip"] == "call":
                figures.append(float(self.optimizer.clip_grad_norm_(0.5)).hex())
            self.optimizer.step()
            self.optimizer.zero_grad()
        return figures

    def backward(self, loss: torch.Tensor) -> None:
        if self.case["types"] == "fp16":
            self.optimizer.backward(loss)
        else:
            loss.backward()

    def parameters(self) -> dict[str, str]:
        """Return a digest of every whole parameter and buffer, in the type of the computation."""
        import zeropp

        return {f"model {name}": digest(value) for name, value in zeropp.full_state_dict(self.model).items()}


def digest(value: torch.Tensor) -> str:
    """Return type, shape and a hash of the bytes (without numpy, which torch comes without)."""
    flat = value.detach().cpu().contiguous()
    held = ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size())
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(held).hexdigest()[:20]}"


def held(folder: Path) -> dict[str, str]:
    """Return a digest of all that a checkpoint holds of this rank, and of its manifest (rank 0)."""
    from safetensors.torch import load_file

    found, rank = {}, dist.get_rank()
    newest = folder / (folder / "latest").read_text().strip()
    for name, value in load_file(newest / f"rank-{rank:05d}.safetensors").items():
        if not name.startswith(RANDOM):
            found[f"saved {name}"] = digest(value)
    if rank == 0:
        content = json.loads((newest / "manifest.json").read_text())["content"]
        for key in MANIFEST:
            text = json.dumps(content.get(key), sort_keys=True)
            found[f"manifest {key}"] = hashlib.sha256(text.encode()).hexdigest()[:20]
    return found


def train(case: cases.Case, scratch: str, keep: str | None) -> dict[str, Any]:
    """Train, save, look at what was saved, train on. ``keep``: the folder of a checkpoint that another revision loads."""
    import zeropp

    training = Training(case, scratch)
    record: dict[str, Any] = {"figures": training.run(0, STEPS)}
    record["tensors"] = training.parameters()
    folder = Path(keep or Path(scratch) / "checkpoint")
    zeropp.save(folder, training.model, training.optimizer, step=STEPS)
    record["tensors"] |= held(folder)
    dist.barrier()
    if keep is None and dist.get_rank() == 0:
        shutil.rmtree(folder)
    return record | after(training)


def load(case: cases.Case, scratch: str, folder: str) -> dict[str, Any]:
    """Go on from a checkpoint. The first steps of its own differ from those that were saved, so nothing of them may stay."""
    import zeropp

    training = Training(case, scratch)
    training.run(100, 102)
    found = zeropp.load(folder, training.model, training.optimizer)
    return {"figures": [str(found["step"])], "tensors": {}, **after(training)}


def after(training: Training) -> dict[str, Any]:
    """Return what the steps after the checkpoint give."""
    return {"figures after": training.run(STEPS, STEPS + STEPS_AFTER), "tensors after": training.parameters()}


def probe(case: cases.Case) -> dict[str, Any]:
    cases.config(case, "/tmp")
    return {}


def plan(covers: int, scratch: str) -> dict[str, Any]:
    """Return the cases in pairs that Config, ``prepare`` and a first step accept, and the names of those of CORE that Config refuses."""
    import zeropp

    def accepts(case: cases.Case) -> bool:
        try:
            cases.config(case, scratch)
        except zeropp.ConfigError:
            return False
        return True

    def works(case: cases.Case) -> bool:
        try:
            Training(case, scratch).run(0, 1)
        except zeropp.ConfigError:
            return False
        return True

    found = [case for seed in range(covers) for case in cases.cover(accepts, works, seed)]
    refused = [cases.name_of(case) for case in cases.core() if not accepts(case)]
    return {"cover": list({cases.name_of(case): case for case in found}.values()), "refused": refused}


def do(job: dict[str, Any], scratch: str) -> dict[str, Any]:
    """Do one job. A ConfigError is an answer; its sentence is not compared, because it may be reworded."""
    import zeropp

    try:
        if job["what"] == "plan":
            return {"status": "planned", **plan(job["covers"], scratch)}
        if job["what"] == "probe":
            return {"status": "accepted", **probe(job["case"])}
        if job["what"] == "load":
            return {"status": "ran", **load(job["case"], scratch, job["folder"])}
        return {"status": "ran", **train(job["case"], scratch, job.get("keep"))}
    except zeropp.ConfigError as error:
        return {"status": "refused", "said": str(error)}


@contextlib.contextmanager
def group() -> Iterator[None]:
    """A process group of zeropp's own, as ``prepare`` would begin one."""
    dist.init_process_group("zeropp", timeout=datetime.timedelta(seconds=60))
    yield
    dist.barrier()
    dist.destroy_process_group()


def main(order_path: str) -> int:
    order = json.loads(Path(order_path).read_text())
    if order["hosts"]:
        os.environ["ZEROPP_HOST_ID"] = os.environ["RANK"]  # read when the communicator is made
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    import zeropp  # noqa: F401  (registers the backend)

    gc.freeze()  # what torch made is not looked through again
    with group(), Path(order["out"], f"{os.environ['RANK']}.jsonl").open("a", buffering=1) as out:
        for index, job in enumerate(order["jobs"]):
            out.write(json.dumps({"begun": index}) + "\n")
            faulthandler.dump_traceback_later(LIMIT_S, exit=True)
            try:
                record = do(job, order["scratch"])
            except BaseException:
                out.write(json.dumps({"job": index, "status": "failed", "said": traceback.format_exc()}) + "\n")
                return 1
            out.write(json.dumps({"job": index, **record}) + "\n")
            gc.collect()  # the model's threads and files end here, not within the next case
            dist.barrier()
    faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
