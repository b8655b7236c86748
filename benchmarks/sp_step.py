# SPDX-License-Identifier: Apache-2.0
"""A training step of a small Llama whose sequences are cut over ranks, one thread a rank: zeropp at stage 3 against DeepSpeed's ZeRO-3.

Both train the same model of transformers from the same seed, with sdpa, on the same parts of the same sequences: ours with
zeropp.parallel.ulysses, DeepSpeed 0.19.8 over gloo with UlyssesSPAttentionHF and its ``mpu``. Positions and shifted labels are made before the
cut, and each rank divides its sum of losses so that the mean over the ranks is that over the tokens: both are given the same batch. Sequences
are plain, because DeepSpeed's drops masks. sp 2 on two ranks, and sp 2 x dp 2 on four; AdamW, fp32.

Contenders are launched at once and take turns, as in step.py; losses of the first steps must agree before time counts. Rows
are wall milliseconds, and CPU milliseconds of the rank that took more, which do not count waiting.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import step
from harness import Need, Run, alternate
from moe_step import turn
from turns import alone

CLAIM = "a step of stage 3 on parts of sequences takes at most 1 / 1.15 of DeepSpeed ZeRO-3's with Ulysses"
NEEDS = (
    Need("DeepSpeed", module="deepspeed"),
    Need("transformers", module="transformers", install="pip install -e .[hf]"),
)

SP, VOCABULARY, LEARNING_RATE = 2, 4096, 1e-3
OURS, PEER = "stage 3", "DeepSpeed ZeRO-3 with Ulysses"


@dataclass(frozen=True)
class Case:
    """Tokens of a whole sequence, of which each data rank has one."""

    ranks: int
    tokens: int
    width: int

    @property
    def name(self) -> str:
        return f"width {self.width}, {self.tokens} tokens, sp {SP}" + (
            f" x dp {self.ranks // SP}" if self.ranks > SP else ""
        )


def cases(quick: bool) -> list[Case]:
    first = Case(2, 1024, 256)
    return [first] if quick else [first, Case(2, 2048, 128), Case(4, 1024, 256)]


# --- a rank ---------------------------------------------------------------------------------------------------------

Step = Callable[[dict[str, Any]], float]


def build(width: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=4,
        num_attention_heads=width // 64, num_key_value_heads=width // 128, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def adamw(model: Any) -> Any:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def start_zeropp(width: int) -> Step:
    import torch.distributed as dist
    import zeropp
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("zeropp")
    names = ("dp", "sp")
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size() // SP, SP), mesh_dim_names=names, backend_override=dict.fromkeys(names, "zeropp")
    )
    model = build(width)
    model, optimizer = zeropp.prepare(model, adamw(model), zeropp.Config(stage=3), mesh=mesh)
    zeropp.parallel.ulysses(model, mesh["sp"])

    def run(batch: dict[str, Any]) -> float:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return run


def start_deepspeed(width: int) -> Step:
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    deepspeed.init_distributed("gloo", verbose=False)
    model = build(width)
    mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", SP, micro_batch_size=1)
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True, "sequence_parallel_size": SP, "steps_per_print": 10**9,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config, mpu=mpu)

    def run(batch: dict[str, Any]) -> float:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return run


STARTS = {"zeropp": start_zeropp, "deepspeed": start_deepspeed}


def part_of(number: int, rank: int, ranks: int, tokens: int) -> dict[str, Any]:
    """Return this rank's part of its sequence: tokens with a skewed distribution, so that there is something to learn."""
    import torch

    draw = torch.Generator().manual_seed(1000 * number + rank // SP)
    odds = 1.0 / (torch.arange(VOCABULARY) + 10.0)
    ids = torch.multinomial(odds, tokens + 1, replacement=True, generator=draw)[None]
    part = slice(tokens // SP * (rank % SP), tokens // SP * (rank % SP + 1))
    labels = ids[:, 1:][:, part].contiguous()
    return {
        "input_ids": ids[:, :-1][:, part].contiguous(), "position_ids": torch.arange(tokens)[None, part],
        "labels": labels, "shift_labels": labels, "num_items_in_batch": tokens * (ranks // SP) / ranks,
    }  # fmt: skip


def train(args: dict[str, Any]) -> int:
    """Worker: one rank of one contender."""
    import torch

    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    run = STARTS[args["library"]](args["width"])
    return step.answer(args, lambda number: part_of(number, rank, ranks, args["tokens"]), run)


# --- the parent -----------------------------------------------------------------------------------------------------


def run(bench: Run) -> None:
    contenders = {OURS: ("zeropp", 3)} if alone() else {OURS: ("zeropp", 3), PEER: ("deepspeed", 3)}
    for case in cases(bench.quick):
        more = {"tokens": case.tokens, "width": case.width}
        with step.launched(bench, contenders, case.ranks, more=more) as teams:
            step.check_losses(bench, {name: step.first_losses(team) for name, team in teams.items()})
            turns = {name: partial(turn, team) for name, team in teams.items()}
            samples = alternate(turns, rounds=5 if bench.quick else 9, warmup=0)
        for at, what in enumerate(("wall", "cpu")):
            figures = {name: [pair[at] for pair in of] for name, of in samples.items()}
            bench.compare(f"{case.name}, {what}", figures, ours=OURS, peers=[PEER], unit="ms")
