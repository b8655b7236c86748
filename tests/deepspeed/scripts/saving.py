# SPDX-License-Identifier: Apache-2.0
"""How FastChat, LLaVA and Qwen save adapters: saving.py RESULT. A parameter that has ``ds_id`` is gathered, any other one is copied."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import zero
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn


def as_fastchat(param: Any) -> torch.Tensor:
    if hasattr(param, "ds_id"):
        assert param.ds_status == ZeroParamStatus.NOT_AVAILABLE
        with zero.GatheredParameters([param]):
            return param.data.detach().cpu().clone()
    return param.detach().cpu().clone()


def as_llava(param: Any, said: list[str], name: str) -> torch.Tensor:
    if hasattr(param, "ds_id"):
        if param.ds_status == ZeroParamStatus.NOT_AVAILABLE:
            said.append(name)
        with zero.GatheredParameters([param]):
            param = param.data.detach().cpu().clone()
    else:
        param = param.detach().cpu().clone()
    return param


def saved(stage: int) -> dict[str, Any]:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    model[0].weight.requires_grad_(False)
    whole = {name: value.detach().clone() for name, value in model.named_parameters()}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5),
        config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}},
    )
    engine.backward(engine(torch.ones(2, 8)).sum())
    engine.step()
    said: list[str] = []
    first = {name: as_fastchat(p) for name, p in model.named_parameters()}
    second = {name: as_llava(p, said, name) for name, p in model.named_parameters()}
    return {
        "same": all(torch.equal(first[name], second[name]) for name in whole),
        "shapes": [list(first[name].shape) == list(whole[name].shape) for name in whole],
        "frozen": torch.equal(first["0.weight"], whole["0.weight"]),
        "trained": not torch.equal(first["1.weight"], whole["1.weight"]),
        "split": said,
        "numel": [getattr(p, "ds_numel", None) for p in model.parameters()],
        "ds_shape": [list(getattr(p, "ds_shape", ())) for p in model.parameters()],
        "ids": len({getattr(p, "ds_id", None) for p in model.parameters()}),
    }


if __name__ == "__main__":
    found = {f"stage {stage}": saved(stage) for stage in (2, 3)}
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
