# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer and Fabric on the simulated GPU: the losses of plain torch there, and checkpoints that go on bit for bit."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from data_parallel import data_parallel
from ranks import of_all_ranks, on_ranks
from torch import nn

pytest.importorskip("lightning", reason="lightning is not installed: pip install zeropp[lightning]")

EPOCHS, CLIP = 2, 0.5


def cases() -> Any:
    """Return cases.py, whose data are made on the CPU, as in a user's script. The ranks are those of torchrun."""
    torch.set_default_device("cpu")
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}
    sys.path.insert(0, str(Path(__file__).parent))
    import cases

    return cases


def accelerator() -> Any:
    """Return what Lightning asks of a device that it does not know."""
    import lightning.pytorch as pl

    class Simulated(pl.accelerators.Accelerator):
        def setup_device(self, device: torch.device) -> None:
            assert device.type == "sim"

        def teardown(self) -> None:
            pass

        def get_device_stats(self, device: Any) -> dict[str, Any]:
            return {}

        @staticmethod
        def parse_devices(devices: Any) -> int:
            return int(devices)

        @staticmethod
        def get_parallel_devices(devices: int) -> list[torch.device]:
            return [torch.device("sim", 0)] * devices

        @staticmethod
        def auto_device_count() -> int:
            return 1

        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def name() -> str:
            return "sim"

    return Simulated()


class Loss(nn.Module):
    """A LightningModule's loss, as a module's forward."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self.module.loss(batch)
        return loss


def plain(module: Any, data: Any, accumulate: int, shuffle: bool) -> list[float]:
    """Return this rank's losses: plain torch on the device, data parallel, with clipping and a schedule of epochs."""
    ranks = dist.get_world_size()
    sampler: Any = torch.utils.data.DistributedSampler(data, ranks, dist.get_rank(), shuffle=shuffle)
    ([optimizer], [schedule]) = module.to("sim").configure_optimizers()
    model, losses = data_parallel(Loss(module)), []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for number, batch in enumerate(torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler)):
            steps = (number + 1) % accumulate == 0
            with contextlib.nullcontext() if steps or ranks == 1 else model.no_sync():
                loss = model([one.to("sim") for one in batch])
                (loss / accumulate).backward()
            losses.append(loss.item())
            if steps:
                nn.utils.clip_grad_norm_(module.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()
    return losses


@on_ranks(1, 2, devices=("sim",))
@pytest.mark.parametrize(
    "strategy", ["zeropp", pytest.param("zeropp_stage_2", marks=pytest.mark.slow), "zeropp_stage_3_offload"]
)
def test_trainer_trains_on_the_device(strategy: str) -> None:
    case = cases()
    import lightning.pytorch as pl

    wanted = plain(
        case.make_module(pl.LightningModule), case.DATA, 2, shuffle=True
    )  # as Lightning does unless told otherwise
    folder = Path(of_all_ranks(tempfile.mkdtemp())[0])
    where = {"accelerator": accelerator(), "devices": dist.get_world_size()}
    module = case.make_module(pl.LightningModule)
    case.trainer(folder, strategy, EPOCHS, **where).fit(module, case.batches(), case.batches())
    assert next(module.parameters()).device.type == "sim"
    # Our AdamW and norms round in another order, over a few steps: losses up to 10.
    half = len(wanted) // 2
    assert module.losses == pytest.approx(wanted, abs=1e-5)
    assert sum(wanted[half:]) < sum(wanted[:half])
    again = case.make_module(pl.LightningModule)
    more = {"ckpt_path": folder / "epoch=0.ckpt"}
    case.trainer(folder / "again", strategy, EPOCHS, **where).fit(again, case.batches(), case.batches(), **more)
    assert again.losses == module.losses[half:]
    whole = torch.load(folder / "epoch=1.ckpt", weights_only=True)["state_dict"]
    assert all(one.device.type == "cpu" and one.numel() for one in whole.values())


@on_ranks(1, 2, devices=("sim",))
def test_fabric_trains_on_the_device() -> None:
    case = cases()
    from lightning.fabric import Fabric

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = case.network()

        def loss(self, batch: Any) -> torch.Tensor:
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        forward = loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)]

    wanted = plain(Model(), case.DATA, 1, shuffle=False)
    fabric = Fabric(accelerator=accelerator(), devices=dist.get_world_size(), strategy="zeropp")
    fabric.launch()
    model: Any = Model()
    ([optimizer], [schedule]) = model.configure_optimizers()
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(case.batches())
    losses = []
    for _ in range(EPOCHS):
        for batch in loader:
            assert batch[0].device.type == "sim"
            loss = model(batch)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=CLIP)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        schedule.step()
    assert losses == pytest.approx(wanted, abs=1e-5)
