# SPDX-License-Identifier: Apache-2.0
"""Cases of test_hosts.py, each rank on a host of its own: Trainer over DDP and with zeropp, a checkpoint, and on from there.
hosts_script.py FOLDER"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import two_networks

two_networks.enter()

import torch  # noqa: E402
import zeropp  # noqa: E402
from cases import apart, logged, train, whole  # noqa: E402
from models import llama  # noqa: E402

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    steps = {"max_steps": 4, "gradient_accumulation_steps": 1}
    saves = {**steps, "save_strategy": "steps", "save_steps": 2}
    stock = train(folder, "stock", llama(), **steps)
    ours = train(folder, "zeropp", llama(), {"stage": 3}, **saves)
    again = train(folder, "zeropp", llama(), {"stage": 3}, str(folder / "zeropp" / "checkpoint-2"), **saves)
    found = {
        "stock": logged(stock), "zeropp": logged(ours), "again": logged(again),
        "apart": apart(whole(ours.model), whole(stock.model)), "again apart": apart(whole(ours.model), whole(again.model)),
        "links": sorted(zeropp.traffic()), "local": ours.args.local_process_index,
    }  # fmt: skip
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
