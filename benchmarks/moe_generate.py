# SPDX-License-Identifier: Apache-2.0
"""A token of one sequence of a mixture of experts on NVMe: the experts that it chose, against whole layers.

A Qwen3-MoE of 64 experts, of which a token chooses 8, with the parameters in a file (ZeRO-Infinity) and one rank, one thread. "on
demand" is Config(experts=Experts(cache=...)) with a cache of the experts of one layer alone, so that nearly all are read for every
token; "whole layers" is the same without experts=. The bytes that each reads for a token are counted; their ratio is what can be won
where the disk is the limit. The limit is an engine that reads as many bytes in a row, in blocks of an expert's matrix, with nothing
computed.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import zeropp
from harness import ROOT, Need, Run, alternate
from zeropp.aio import Engine
from zeropp.zero.engine import engine_of

CLAIM = "From NVMe, a token of one sequence reads the experts that it chose: >= 4x faster than whole layers, >= 0.9 of the disk."
NEEDS: tuple[Need, ...] = (Need("transformers", module="transformers", install="pip install -e .[hf]", peer=False),)
EXPERTS, CHOSEN = 64, 8


class Decoder:
    """One model that takes a token at a time."""

    def __init__(self, shape: dict[str, int], folder: str, experts: Any) -> None:
        import transformers

        torch.manual_seed(0)
        config = transformers.Qwen3MoeConfig(
            vocab_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=EXPERTS,
            num_experts_per_tok=CHOSEN, intermediate_size=256, experts_implementation="grouped_mm", **shape,
        )  # fmt: skip
        with zeropp.sharded_init():
            model = transformers.Qwen3MoeForCausalLM(config).eval()
        tiers = zeropp.Offload(params="nvme", path=folder)
        self.model, _ = zeropp.prepare(model, None, zeropp.Config(offload=tiers, experts=experts, device="cpu"))
        self.count = 0
        self.logits = torch.empty(0)

    def token(self) -> float:
        """Take one token; return milliseconds."""
        draw = torch.Generator().manual_seed(self.count)
        ids = torch.randint(0, 512, (1, 1), generator=draw)
        self.count += 1
        started = time.perf_counter()
        with torch.no_grad():
            self.logits = self.model(ids, use_cache=False).logits
        return (time.perf_counter() - started) * 1e3

    def read_bytes(self) -> int:
        return int(engine_of(self.model).params.figures()["read_bytes"])


class Reader:
    """Reads as many bytes, with nothing computed."""

    def __init__(self, engine: Engine, path: Path, read_bytes: int, block_bytes: int, file_bytes: int) -> None:
        self.engine, self.path = engine, path
        self.blocks = [engine.empty(block_bytes // 4) for _ in range(2 * CHOSEN)]
        self.reads, self.places = -(-read_bytes // block_bytes), file_bytes // block_bytes
        for place in range(self.places):
            engine.write(self.blocks[0], path, place * block_bytes).wait()
        self.at = 0

    def read(self) -> float:
        started = time.perf_counter()
        under_way: list[Any] = [None] * len(self.blocks)
        for index in range(self.reads):
            slot, place = index % len(self.blocks), self.at * 7919 % self.places
            if under_way[slot] is not None:
                under_way[slot].wait()
            under_way[slot] = self.engine.read(self.blocks[slot], self.path, place * self.blocks[slot].nbytes)
            self.at += 1
        for future in under_way:
            if future is not None:
                future.wait()
        return (time.perf_counter() - started) * 1e3


def run(bench: Run) -> None:
    torch.set_num_threads(1)
    hidden, inner, layers = (512, 512, 2) if bench.quick else (1024, 512, 4)
    shape = {"hidden_size": hidden, "moe_intermediate_size": inner, "num_hidden_layers": layers}
    expert_bytes = 3 * hidden * inner * 4
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".moe-generate-") as folder, Engine() as engine:
        cache = zeropp.Experts(parallel=1, cache=(CHOSEN + 1) * (expert_bytes + 8192))
        models = {"on demand": Decoder(shape, folder, cache), "whole layers": Decoder(shape, folder, None)}
        moved = {}
        for name, model in models.items():
            model.token()
            before = model.read_bytes()
            for _ in range(4):
                model.token()
            moved[name] = (model.read_bytes() - before) // 4
        some, whole = (model.logits for model in models.values())
        bench.check(torch.allclose(some, whole, rtol=1e-4, atol=1e-5), "logits on demand and of whole layers differ")
        reader = Reader(engine, Path(folder) / "blocks", moved["on demand"], expert_bytes // 3, 256 << 20)
        contenders = {name: model.token for name, model in models.items()} | {"the disk, same bytes": reader.read}
        samples = alternate(contenders, 15 if bench.quick else 11, warmup=2)
        parameters = layers * EXPERTS * 3 * hidden * inner
        bench.compare(
            f"fp32 {parameters / 1e6:.0f}M in {EXPERTS} experts, k {CHOSEN}, 1 token 1 rank", samples, ours="on demand",
            peers=["whole layers"], unit="ms", limit="the disk, same bytes",
            extra={"bytes_on_demand": moved["on demand"], "bytes_whole_layers": moved["whole layers"]},
        )  # fmt: skip
        models.clear()
