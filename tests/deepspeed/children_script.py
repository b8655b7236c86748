# SPDX-License-Identifier: Apache-2.0
"""A script that says ``import deepspeed`` at its top, and so do all interpreters that it starts: children_script.py FOLDER."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import deepspeed
import torch

QUESTION = (
    "import sys, json, importlib.util, importlib.metadata\n"
    "found = importlib.util.find_spec('deepspeed')\n"
    "there = None if found is None else [found.origin, importlib.metadata.version('deepspeed')]\n"
    "print(json.dumps([there, getattr(sys, 'marked', None), 'children' in str(sys.path)]))\n"
)


class Rows(torch.utils.data.Dataset):
    """Each row says whose deepspeed its worker has, and in which process."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[str, int]:
        return deepspeed.__zeropp__, os.getpid()


def answer(rank: int, folder: str, name: str) -> None:
    import_once_more = importlib.import_module("deepspeed.comm")
    assert import_once_more.ReduceOp is not None
    (Path(folder) / name).write_text(
        json.dumps([deepspeed.__zeropp__, importlib.metadata.version("deepspeed"), os.getpid()])
    )


def asked(*options: str) -> list:
    done = subprocess.run([sys.executable, *options, "-c", QUESTION], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def main(folder: str) -> None:
    def forkserver() -> None:
        process = multiprocessing.get_context("forkserver").Process(target=answer, args=(0, folder, "forkserver"))
        process.start()
        process.join()

    with ThreadPoolExecutor() as pool:  # each child imports torch: side by side
        spawned = pool.submit(torch.multiprocessing.spawn, answer, (folder, "spawn"))
        served = pool.submit(forkserver)
        plain, isolated = pool.submit(asked), pool.submit(asked, "-I")
        loader = torch.utils.data.DataLoader(Rows(), num_workers=1, batch_size=None, multiprocessing_context="spawn")
        rows = list(loader)
        spawned.result(), served.result()
    found = {name: json.loads((Path(folder) / name).read_text()) for name in ("spawn", "forkserver")}
    found |= {"loader": rows[0], "plain": plain.result(), "isolated": isolated.result(), "here": os.getpid()}
    (Path(folder) / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
