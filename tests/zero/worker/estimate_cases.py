# SPDX-License-Identifier: Apache-2.0
"""Compare zeropp.estimate of a model on meta with what zeropp.memory and zeropp.traffic measure of the same
model in training: within 3%."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
import zeropp
from torch import Tensor, nn
from zeropp.zero.engine import engine_of

SETTINGS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0}, "stage 1": {"stage": 1}, "stage 2": {"stage": 2}, "stage 3": {"stage": 3},
    "gathering": {"host_copy": "off", "prefetch": 0},
    "gathering bf16": {"host_copy": "off", "prefetch": 0, "precision": "bf16"},
    "stage 1 bf16": {"stage": 1, "precision": "bf16"}, "SGD": {"host_copy": "off", "prefetch": 0},
    "int8 states": {"stage": 1, "precision": zeropp.Precision(param="bf16", state="int8")},
    "bf16 states": {"host_copy": "off", "prefetch": 0, "precision": zeropp.Precision(state="bf16")},
    "few buckets": {"stage": 2, "bucket_bytes": 1}, "nvme": {"host_copy": "off", "prefetch": 0, "precision": "bf16"},
    "nvme parameters": {}, "nvme half the parameters, bf16": {"precision": "bf16"}, "nvme gradients": {"stage": 2},
    "nvme everything": {"precision": "bf16"}, "nvme everything, delayed": {"precision": "bf16"},
    "delayed": {"stage": 2, "offload": zeropp.Offload(optimizer="cpu", delayed_update=0)},
    "reduce fp32": {"stage": 1, "precision": zeropp.Precision(param="bf16", reduce="fp32")},
    "reduce bf16": {"stage": 2, "precision": zeropp.Precision(reduce="bf16")},
    "bf16 masters": {"stage": 0, "precision": zeropp.Precision(param="bf16", master="bf16", accumulate="fp32")},
    "stored int8 on nvme": {"precision": zeropp.Precision(stored="int8")},
    "stored int8 on nvme, most of it": {"precision": zeropp.Precision(stored="int8")},
    "stored int8, half of it": {
        "precision": zeropp.Precision(stored="int8"), "offload": zeropp.Offload(params=zeropp.Tier("cpu", fraction=0.5)),
    },
    "stored int4": {"precision": zeropp.Precision(stored="int4"), "offload": zeropp.Offload(params="cpu")},
    "hpZ": {"host_copy": "off", "prefetch": 0, "comm": zeropp.Comm(secondary_shard="host")},
    "int8": {"prefetch": 0, "comm": zeropp.Comm(params="int8", grads="int8")},
    "inside the backward": {"stage": 2, "step_in_backward": True},
    "nvme gradients, inside the backward": {"stage": 2, "step_in_backward": True, "accumulate": 2},
    "nvme gradients of three backwards": {"stage": 2, "accumulate": 3},
    "nvme gradients in 8 bits": {"stage": 2, "comm": zeropp.Comm(grads="int8")},
    "nvme everything, delayed Lion": {},
    "int4 gradients, stage 2, bf16": {"stage": 2, "precision": "bf16", "comm": zeropp.Comm(grads="int4")},
}  # fmt: skip


HOSTS_CASES = (
    "stage 0", "stage 1 bf16", "gathering", "hpZ", "int8", "inside the backward", "delayed", "nvme everything, delayed",
    "nvme half the parameters, bf16",
    "stored int8 on nvme, most of it", "stored int8, half of it",
)  # fmt: skip
OPTIMIZERS = {"SGD": "SGD with momentum", "nvme everything, delayed Lion": "Lion"}
STORED = tuple(name for name in SETTINGS if name.startswith("stored"))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    """A tied embedding and head, blocks, a small norm, something frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(1000, 128)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.norm = nn.LayerNorm(128)
        self.head = nn.Linear(128, 1000, bias=False)
        self.head.weight = self.tokens.weight
        self.blocks[0].requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def offload(name: str, path: str) -> zeropp.Offload:
    whole, half = zeropp.Tier("nvme", path=path), zeropp.Tier("nvme", path=path, fraction=0.5)
    return {
        "nvme": zeropp.Offload(optimizer=zeropp.Tier("nvme", path=path, fraction=0.75)),
        "nvme parameters": zeropp.Offload(params=whole),
        "nvme half the parameters, bf16": zeropp.Offload(params=half),
        "nvme gradients": zeropp.Offload(grads=whole),
        "nvme gradients, inside the backward": zeropp.Offload(grads=half),
        "nvme gradients of three backwards": zeropp.Offload(grads=whole),
        "nvme gradients in 8 bits": zeropp.Offload(grads=whole),
        "nvme everything, delayed Lion": zeropp.Offload(params=whole, grads=half, optimizer=whole, delayed_update=0),
        "stored int8 on nvme": zeropp.Offload(params=whole),
        "stored int8 on nvme, most of it": zeropp.Offload(params=zeropp.Tier("nvme", path=path, fraction=0.75)),
        "nvme everything": zeropp.Offload(params=whole, grads=whole, optimizer=whole),
        "nvme everything, delayed": zeropp.Offload(params=whole, grads=half, optimizer=whole, delayed_update=0),
    }[name]


def compare(name: str, folder: str, hosts: int = 1) -> dict[str, Any]:
    keywords = dict(SETTINGS[name])
    if "nvme" in name:
        keywords["offload"] = offload(name, folder)
    config = zeropp.Config(**keywords)
    kind = "none" if name in STORED else OPTIMIZERS.get(name, "AdamW")
    with torch.device("meta"):
        said = zeropp.estimate(Net(), config, ranks=dist.get_world_size(), hosts=hosts, optimizer=kind)
    torch.manual_seed(0)
    model = Net()
    if name in STORED:
        model, optimizer = zeropp.prepare(model, None, config)
        zeropp.traffic(reset=True)
        with torch.no_grad():
            model(torch.arange(8).view(2, 4))
        return measured(said, model, optimizer)
    weights = [p for p in model.parameters() if p.requires_grad]
    made = {
        "SGD with momentum": lambda: torch.optim.SGD(weights, 0.01, momentum=0.9),
        "Lion": lambda: zeropp.optim.Lion(weights, lr=1e-3),
        "AdamW": lambda: torch.optim.AdamW(weights),
    }
    model, optimizer = zeropp.prepare(model, made[kind](), config)
    for step in range(3):
        if step == 2:
            optimizer.zero_grad()
            optimizer.flush()  # so that what is counted is one update, whole
            dist.barrier()
            zeropp.traffic(reset=True)
        tier = engine_of(model).grads
        for micro in range(config.accumulate):
            if micro and tier.in_file:
                tier.require_whole()  # so small a model's would be found in memory otherwise
            model(torch.arange(8).view(2, 4) + step).float().pow(2).mean().backward()
        optimizer.step()
    if "nvme" in name:  # in memory a flush would gather once more
        optimizer.flush()
    return measured(said, model, optimizer, config.accumulate)


def measured(said: dict[str, Any], model: nn.Module, optimizer: Any, micro: int = 1) -> dict[str, Any]:
    moved: dict[str, int] = {}
    seen = zeropp.traffic()
    network = sum(counts["bytes"] for counts in seen.get("network", {}).values())
    disk = torch.tensor(sum(counts["bytes"] for counts in seen.pop("nvme", {}).values()), dtype=torch.int64)
    dist.all_reduce(disk)
    for kinds in seen.values():
        for what, counts in kinds.items():
            moved[what] = moved.get(what, 0) + counts["bytes"]
    found = zeropp.memory(model, optimizer)
    held = {what: sizes["held"] for what, sizes in found["cpu"].items()}
    held["buckets"] = held["buckets_peak"]
    in_file = {what: sizes["held"] for what, sizes in found.get("nvme", {}).items()}
    return {
        "said": said, "held": held, "nvme": in_file, "disk": int(disk) / dist.get_world_size(), "gathered": moved.get("all_gather", 0),
        "reduced": (moved.get("reduce_scatter", 0) + moved.get("all_reduce", 0)) // micro, "parameters": found["parameters"],
        "network": network,
    }  # fmt: skip


def run(name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)  # what lies there is for all
        found = compare(name, folders[0])
        dist.barrier()
        return found


CASES = {name: (lambda name=name: run(name)) for name in SETTINGS}
