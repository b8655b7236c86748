# SPDX-License-Identifier: Apache-2.0
"""The calls of DeepSpeed-Chat's first step (supervised fine-tuning, with LoRA layers of its own) and of its saving functions:
chat_sft.py RESULT FOLDER [--zero_stage N] [--offload]. The language model is a small one."""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import deepspeed.comm as dist
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.compression.helper import recursive_getattr, recursive_setattr
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.q_proj, self.out = nn.Linear(16, 16), nn.Linear(16, 32)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.q_proj(self.embed(words))))


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Inner()

    def gradient_checkpointing_enable(self) -> None:
        self.checkpoints = True

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, use_cache: bool = True) -> SimpleNamespace:
        scores = self.model(input_ids)
        return SimpleNamespace(loss=F.cross_entropy(scores[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()))


class LowRank(nn.Module):
    def __init__(self, weight: nn.Parameter, dim: int, bias: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        try:
            rows, columns = weight.ds_shape
        except AttributeError:
            rows, columns = weight.shape
        self.lora_right_weight = nn.Parameter(torch.zeros(columns, dim))
        self.lora_left_weight = nn.Parameter(torch.zeros(dim, rows))
        nn.init.kaiming_uniform_(self.lora_right_weight, a=math.sqrt(5))
        self.weight.requires_grad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias) + x @ self.lora_right_weight @ self.lora_left_weight

    def fuse(self) -> None:
        self.weight.data += torch.matmul(self.lora_left_weight.t(), self.lora_right_weight.t())


def to_fetch(parameters: list) -> list:
    return [p for p in parameters if hasattr(p, "ds_id") and p.ds_status == ZeroParamStatus.NOT_AVAILABLE]


def to_low_rank(model: nn.Module) -> nn.Module:
    for name in [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and "q_proj" in name]:
        old = recursive_getattr(model, name)
        recursive_setattr(model, name, LowRank(old.weight, 4, old.bias).to(old.weight.device).to(old.weight.dtype))
    return model


def fused(model: nn.Module) -> nn.Module:
    for name in [name for name, module in model.named_modules() if isinstance(module, LowRank)]:
        module = recursive_getattr(model, name)
        split = hasattr(module.weight, "ds_id")
        parts = to_fetch([module.weight, module.bias, module.lora_left_weight, module.lora_right_weight])
        with deepspeed.zero.GatheredParameters(parts, modifier_rank=0, enabled=split):
            module.fuse()
    return model


def save(model: nn.Module, rank: int, path: Path, stage: int) -> None:
    whole = model.module if hasattr(model, "module") else model
    if stage != 3:
        if rank == 0:
            torch.save(whole.state_dict(), path)
        return
    found = {}
    for name, value in whole.named_parameters():
        if hasattr(value, "ds_id"):
            with deepspeed.zero.GatheredParameters(to_fetch([value]), enabled=True):
                copied = value.data.cpu()
        else:
            copied = value.cpu()
        if rank == 0 and "lora" not in name:
            found[name] = copied
    if rank == 0:
        torch.save(found, path)


def groups_of(model: nn.Module) -> list:
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    low = [p for n, p in named if "lora" in n]
    plain = [p for n, p in named if "lora" not in n and "bias" not in n]
    bias = [p for n, p in named if "bias" in n]
    return [
        {"params": plain, "weight_decay": 0.1},
        {"params": low, "weight_decay": 0.1, "lr": 5e-3},
        {"params": bias, "weight_decay": 0.0},
    ]


def config(args: argparse.Namespace) -> dict:
    device = "cpu" if args.offload else "none"
    return {
        "train_micro_batch_size_per_gpu": 4,
        "train_batch_size": 4 * torch.distributed.get_world_size(),
        "steps_per_print": 10,
        "zero_optimization": {
            "stage": args.zero_stage, "overlap_comm": True, "offload_param": {"device": device}, "offload_optimizer": {"device": device},
            "stage3_param_persistence_threshold": 1e4, "stage3_max_live_parameters": 3e7, "stage3_prefetch_bucket_size": 3e7,
            "memory_efficient_linear": False,
        },
        "bfloat16": {"enabled": True}, "gradient_clipping": 1.0, "prescale_gradients": False, "wall_clock_breakdown": False,
        "hybrid_engine": {"enabled": False, "max_out_tokens": 512},
        "tensorboard": {"enabled": False, "output_path": "none", "job_name": "step1"},
    }  # fmt: skip


def rows(batch: list) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.stack([one[0] for one in batch]), "labels": torch.stack([one[0] for one in batch])}


def main(args: argparse.Namespace) -> None:
    get_accelerator().set_device(args.local_rank)
    device = torch.device(get_accelerator().device_name(), args.local_rank)
    deepspeed.init_distributed()
    rank = torch.distributed.get_rank()
    torch.manual_seed(9)
    get_accelerator().manual_seed_all(9)
    torch.distributed.barrier()
    assert dist.get_world_size() == torch.distributed.get_world_size()
    model = to_low_rank(Causal())
    words = (torch.randint(32, (64, 1), generator=torch.Generator().manual_seed(2)) + 3 * torch.arange(8)) % 32
    data = torch.utils.data.TensorDataset(words)
    loader = DataLoader(data, collate_fn=rows, sampler=DistributedSampler(data), batch_size=4)

    def evaluation() -> float:
        model.eval()
        losses = 0
        for step, batch in enumerate(loader):  # noqa: B007
            with torch.no_grad():
                losses += model(**{key: value.to(device) for key, value in batch.items()}).loss.float()
        losses = losses / (step + 1)
        torch.distributed.all_reduce(losses, op=torch.distributed.ReduceOp.SUM)
        return (losses / torch.distributed.get_world_size()).item()

    kind = DeepSpeedCPUAdam if args.offload else FusedAdam
    optimizer = kind(groups_of(model), lr=1e-2, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    model, optimizer, _, schedule = deepspeed.initialize(
        model=model, optimizer=optimizer, args=args, config=config(args), lr_scheduler=schedule, dist_init_required=True
    )
    model.gradient_checkpointing_enable()
    before = evaluation()
    for _ in range(2):
        model.train()
        for batch in loader:
            loss = model(**{key: value.to(device) for key, value in batch.items()}, use_cache=False).loss
            model.backward(loss)
            model.step()
    assert isinstance(model.model, Inner)
    after = evaluation()
    model.tput_timer.update_epoch_count()
    model = fused(model)
    save(model, rank, args.folder / "pytorch_model.bin", args.zero_stage)
    if rank == 0:
        names = sorted(torch.load(args.folder / "pytorch_model.bin"))
        weight = torch.load(args.folder / "pytorch_model.bin")["model.q_proj.weight"]
        args.result.write_text(
            json.dumps({"before": before, "after": after, "names": names, "shape": list(weight.shape)})
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", -1)))
    parser.add_argument("--zero_stage", type=int, default=0)
    parser.add_argument("--offload", action="store_true")
    main(deepspeed.add_config_arguments(parser).parse_args())
