# SPDX-License-Identifier: Apache-2.0
"""Cases of test_initialize.py on each rank: a loop written for DeepSpeed, against plain PyTorch. Run under torchrun:
cases.py FOLDER."""

from __future__ import annotations

import faulthandler
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zeropp
from torch import nn

DRAW = torch.Generator().manual_seed(1)
INPUTS = torch.randn(96, 16, generator=DRAW)
DATA = torch.utils.data.TensorDataset(INPUTS, INPUTS[:, :1] * 2)
ACCUMULATE, LR, CLIP = 2, 1e-2, 0.5


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 1))


def settings(stage: int) -> dict[str, Any]:
    return {
        "train_batch_size": 4 * ACCUMULATE * 2,
        "gradient_accumulation_steps": ACCUMULATE,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": [0.9, 0.99], "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": LR, "warmup_num_steps": 3, "warmup_type": "linear"},
        },
        "zero_optimization": {"stage": stage},
    }


def plain() -> list[list[float]]:
    """The training of the file, written out: both ranks' batches in one process."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.1)
    samplers = [torch.utils.data.DistributedSampler(DATA, 2, rank) for rank in range(2)]
    loaders = [torch.utils.data.DataLoader(DATA, 4, sampler=one) for one in samplers]
    rows = []
    for step, pair in enumerate(zip(*loaders, strict=True)):
        loss = sum(nn.functional.mse_loss(model(x), y) for x, y in pair) / 2
        (loss / ACCUMULATE).backward()
        if step % ACCUMULATE:
            optimizer.param_groups[0]["lr"] = LR * min(
                1.0, max(0, step // ACCUMULATE - 1) / 3
            )  # its first step is number 0
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), CLIP))
            optimizer.step()
            optimizer.zero_grad()
            rows.append([float(loss.detach()), norm, optimizer.param_groups[0]["lr"]])
    return rows


def steps(engine: Any, loader: Any, first: int, last: int) -> list[list[float]]:
    rows = []
    for index, (x, y) in enumerate(loader):
        if not first <= index < last:
            continue
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        boundary, rate = engine.is_gradient_accumulation_boundary(), engine.get_lr()[0]
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if boundary:
            rows.append([float(mean) / 2, engine.get_global_grad_norm(), rate])
    return rows


class Signs(torch.optim.Optimizer):
    """An element-wise optimizer of the user's own."""

    def __init__(self, params: Any, speed: float) -> None:
        super().__init__(params, {"lr": speed})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            held = self.state[p].setdefault("held", torch.zeros_like(p))
            held.mul_(0.9).add_(p.grad)
            p.sub_(held.sign() * 0.01 + held * 0.1)


def own_optimizer(stage: int) -> float:
    """How far two ranks are from plain PyTorch after three steps."""
    keys = {**settings(stage), "gradient_accumulation_steps": 1, "train_batch_size": 8, "gradient_clipping": 0}
    del keys["optimizer"], keys["scheduler"]
    trained, plain, inputs = network(), network(), torch.ones(4, 16)
    engine, _, _, _ = zeropp.initialize(
        model=trained,
        optimizer=Signs(trained.parameters(), 1.0),
        config={**keys, "zero_allow_untested_optimizer": True},
    )
    reference = Signs(plain.parameters(), 1.0)
    for _ in range(3):
        engine.backward(engine(inputs).mean())
        engine.step()
        reference.zero_grad()
        plain(inputs).mean().backward()
        reference.step()
    found = zeropp.full_state_dict(engine.module)
    return max(float((found[name] - value).abs().max()) for name, value in plain.state_dict().items())


def by_hand() -> dict[str, Any]:
    """Gradients that no_sync holds back, and those that are summed over both ranks."""
    engine, _, _, _ = zeropp.initialize(model=network(), config={**settings(2), "gradient_allreduce_op": "sum"})
    inputs, plain = torch.ones(4, 16), network()
    with engine.no_sync():
        engine.backward(engine(inputs).mean())
    engine.set_gradient_accumulation_boundary(True)
    found: dict[str, Any] = {}
    try:
        engine.allreduce_gradients()
    except zeropp.Error as error:
        found["held"] = str(error)
    engine.backward(engine(inputs).mean())
    engine.allreduce_gradients()
    plain(inputs).mean().backward()
    whole = zeropp.get_full(engine.module[3].bias, "grad")
    assert whole is not None and plain[3].bias.grad is not None
    found["sum"] = [float(whole), 2 * float(plain[3].bias.grad)]  # two halves a rank, two ranks
    return found


def main() -> None:
    faulthandler.dump_traceback_later(150, exit=True)  # a hang says where
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    found: dict[str, Any] = {"plain": plain()}
    for stage in (1, 2, 3):
        engine, optimizer, loader, scheduler = zeropp.initialize(
            model=network(), config=settings(stage), training_data=DATA
        )
        assert isinstance(optimizer, torch.optim.AdamW) and scheduler is engine.lr_scheduler
        assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (16, 4)
        rows = steps(engine, loader, 0, 6)
        engine.save_checkpoint(folder / f"stage-{stage}", client_state={"epoch": 3})
        rows += steps(engine, loader, 6, 12)
        found[f"stage {stage}"] = rows
        again, _, loader, _ = zeropp.initialize(model=network(), config=settings(stage), training_data=DATA)
        where, state = again.load_checkpoint(folder / f"stage-{stage}")
        assert where is not None and where.endswith("global_step3") and state == {"epoch": 3}, (where, state)
        found[f"stage {stage} again"] = steps(again, loader, 6, 12)
        assert again.global_steps == 6 and math.isfinite(again.get_global_grad_norm())
    found["reduced by hand"] = by_hand()
    found["own optimizer"] = [own_optimizer(stage) for stage in (0, 1, 3)]
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
