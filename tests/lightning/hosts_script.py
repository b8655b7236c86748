# SPDX-License-Identifier: Apache-2.0
"""Cases of test_hosts.py, each rank on a host of its own: Lightning's Trainer under DDP and zeropp, resumed; and Fabric.
hosts_script.py FOLDER"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import two_networks

two_networks.enter()

import lightning.pytorch as pl  # noqa: E402
import torch  # noqa: E402
import zeropp  # noqa: E402
from cases import batches, by_value, make_module, trainer  # noqa: E402
from lightning.fabric import Fabric  # noqa: E402

if __name__ == "__main__":
    folder, found = Path(sys.argv[1]), {}
    for name in ("ddp", "zeropp"):
        module = make_module(pl.LightningModule)
        trainer(folder / name, name, 2, devices=1, num_nodes=2).fit(module, batches(), batches())
        found[name] = module.losses + module.seen
    again = make_module(pl.LightningModule)
    first = folder / "zeropp" / "epoch=0.ckpt"
    trainer(folder / "again", "zeropp", 2, devices=1, num_nodes=2).fit(again, batches(), batches(), ckpt_path=first)
    found["again"] = again.losses
    for name in ("ddp", "zeropp"):
        run = Fabric(accelerator="cpu", devices=1, num_nodes=2, strategy=name)
        run.launch()
        found[f"fabric {name}"] = by_value(run)
    found["links"] = sorted(zeropp.traffic())
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
