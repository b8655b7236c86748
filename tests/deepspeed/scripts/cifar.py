# SPDX-License-Identifier: Apache-2.0
"""The calls of DeepSpeedExamples' cifar10_deepspeed.py: cifar.py RESULT [--dtype T] [--stage N] [--moe]. Images are drawn."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--dtype", default="fp16", choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--stage", default=0, type=int)
    parser.add_argument("--moe", action="store_true")
    parser.add_argument("--moe-param-group", action="store_true")
    return deepspeed.add_config_arguments(parser).parse_args()


def config(args: argparse.Namespace) -> dict:
    return {
        "train_batch_size": 16,
        "steps_per_print": 2000,
        "optimizer": {"type": "Adam", "params": {"lr": 0.003, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.003, "warmup_num_steps": 4}},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "bf16": {"enabled": args.dtype == "bf16"},
        "fp16": {
            "enabled": args.dtype == "fp16", "fp16_master_weights_and_grads": False, "loss_scale": 0, "loss_scale_window": 500,
            "hysteresis": 2, "min_loss_scale": 1, "initial_scale_power": 15,
        },
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": args.stage, "allgather_partitions": True, "reduce_scatter": True, "allgather_bucket_size": 50000000,
            "reduce_bucket_size": 50000000, "overlap_comm": True, "contiguous_gradients": True, "cpu_offload": False,
        },
    }  # fmt: skip


class Net(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 5)
        self.fc1 = nn.Linear(6 * 7 * 7, 32)
        self.experts = (
            deepspeed.moe.layer.MoE(hidden_size=32, expert=nn.Linear(32, 32), num_experts=2) if args.moe else None
        )
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv(x)), 4)
        x = F.relu(self.fc1(x.flatten(1)))
        if self.experts is not None:
            x, _, _ = self.experts(x)
        return self.fc2(x)


def main(args: argparse.Namespace) -> None:
    deepspeed.init_distributed()
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(160) % 10
    images = torch.randn(160, 3, 32, 32, generator=draw) * 0.1 + labels.view(-1, 1, 1, 1) / 5 - 1
    dataset = torch.utils.data.TensorDataset(images, labels)
    if torch.distributed.get_rank() != 0:
        torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        torch.distributed.barrier()
    torch.manual_seed(0)
    net = Net(args)
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    if args.moe_param_group:
        groups = {"params": list(net.parameters()), "name": "parameters"}
        parameters = split_params_into_different_moe_groups_for_optimizer(groups)
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=dataset, config=config(args)
    )
    device = get_accelerator().device_name(engine.local_rank)
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.half if engine.fp16_enabled() else None
    criterion, losses = nn.CrossEntropyLoss(), []
    for _ in range(2):
        for data in loader:
            inputs, wanted = data[0].to(device), data[1].to(device)
            if dtype is not None:
                inputs = inputs.to(dtype)
            loss = criterion(engine(inputs), wanted)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    engine.eval()
    with torch.no_grad():
        test = images.to(device) if dtype is None else images.to(dtype).to(device)
        right = (engine(test).argmax(1) == labels).float().mean().item()
    if engine.local_rank == 0:
        args.result.write_text(json.dumps({"losses": losses, "right": right, "dtype": str(dtype)}))


if __name__ == "__main__":
    main(arguments())
