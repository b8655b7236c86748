# SPDX-License-Identifier: Apache-2.0
"""A loop and a file for DeepSpeed on the simulated GPU: the losses of plain torch there, and a checkpoint that goes on bit for bit."""

from __future__ import annotations

import contextlib
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from data_parallel import data_parallel
from ranks import of_all_ranks, on_ranks
from torch import nn
from zeropp.deepspeed.names.modules import initialize

STEPS, MICRO, ROWS, RATE, CLIP = 5, 2, 4, 1e-2, 0.5
HOST = {"device": "cpu"}
CASES: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3, offloaded": {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST},
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.last(torch.relu(self.norm(self.first(x)))) - y).square().mean()


def model() -> Model:
    torch.manual_seed(1)
    with torch.device("cpu"):  # as in a user's script
        return Model().to("sim")


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * number + dist.get_rank())
    x = torch.randn(ROWS, 8, generator=draw, device="cpu")
    return x.to("sim"), x[:, :1].to("sim")


def plain() -> list[float]:
    """Return this rank's losses: plain torch on the device, data parallel."""
    trained = data_parallel(model())
    optimizer = torch.optim.AdamW(trained.parameters(), lr=RATE, weight_decay=0.01)
    losses = []
    for number in range(STEPS * MICRO):
        steps = (number + 1) % MICRO == 0
        with contextlib.nullcontext() if steps or dist.get_world_size() == 1 else trained.no_sync():
            loss = trained(*batch(number))
            (loss / MICRO).backward()
        losses.append(loss.item())
        if steps:
            torch.nn.utils.clip_grad_norm_(trained.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return losses


@on_ranks(1, 2, devices=("sim",))
@pytest.mark.parametrize("case", CASES)
def test_a_deepspeed_loop_equals_plain_torch_on_the_device(case: str) -> None:
    wanted = plain()
    folder = of_all_ranks(tempfile.mkdtemp())[0]
    file = {
        "train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": MICRO, "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.01}}, "zero_optimization": CASES[case],
    }  # fmt: skip

    def trained(engine: Any, first: int) -> list[float]:
        losses = []
        for number in range(first, STEPS * MICRO):
            loss = engine(*batch(number))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if number == 2 * MICRO - 1 and not first:
                engine.save_checkpoint(folder)
        return losses

    engine = initialize(model=model(), config=file)[0]
    assert engine.device.type == "sim"
    losses = trained(engine, 0)
    # Our AdamW and norms round in another order, over five steps: losses of about 1.
    assert losses == pytest.approx(wanted, abs=2e-6)
    assert sum(losses[-4:]) < sum(losses[:4])
    again = initialize(model=model(), config=file)[0]
    again.load_checkpoint(folder)
    assert trained(again, 2 * MICRO) == losses[2 * MICRO :]
