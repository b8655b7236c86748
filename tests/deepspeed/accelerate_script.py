# SPDX-License-Identifier: Apache-2.0
"""A raw Accelerate loop that does not mention zeropp: accelerate_script.py FOLDER [--deepspeed CFG]."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--deepspeed")
    options = parser.parse_args()
    if options.deepspeed:
        plugin = DeepSpeedPlugin(hf_ds_config=options.deepspeed)
        accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=2)
    else:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    inputs = torch.randn(96, 16, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :1] * 2)
    loader = torch.utils.data.DataLoader(data, 4)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    rows: list[list[float]] = []

    def steps(first: int) -> None:
        for index, (x, y) in enumerate(loader):
            if index < first:
                continue
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5) if accelerator.sync_gradients else None
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            mean = float(accelerator.reduce(loss.detach(), "mean"))
            rows.append([mean] if norm is None else [mean, float(norm), float(optimizer.param_groups[0]["lr"])])

    steps(0)
    accelerator.save_state(str(options.folder / "state"))
    steps(6)
    length = len(rows)
    accelerator.load_state(str(options.folder / "state"))
    steps(6)
    whole = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        torch.save(whole, options.folder / "whole.pt")
        (options.folder / "result.json").write_text(json.dumps({"rows": rows[:length], "again": rows[length:]}))


if __name__ == "__main__":
    main()
