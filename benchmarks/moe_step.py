# SPDX-License-Identifier: Apache-2.0
"""A training step of a small Qwen3-MoE on two CPU ranks, one thread a rank: Config(experts=2) against the peers' ways.

Four layers of width 512, 32 experts of 256, of which a token takes 4; 2 sequences of 256 tokens a rank, fp32, AdamW. All load the same
files. Contenders are launched at once and take turns, as in step.py, at most four at a time, so that they fit into memory; losses of the
first steps must agree before time counts. The peers:

  transformers EP   from_pretrained with DistributedConfig(fsdp_size=2, ep_size=2), over gloo
  AutoEP            DeepSpeed's expert_parallel at stage 3, over gloo; one method of transformers 5.23 takes a default, which AutoEP needs
  stage 3           zeropp without experts=: weights of experts travel, not tokens
  DDP, FSDP2        torch's, over gloo

Rows are wall milliseconds, CPU milliseconds of the rank that took more, which do not count waiting, and memory: the peak of two steps,
anonymous and shared pages of both ranks.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import step
from harness import Need, Run, alternate
from turns import alone

CLAIM = "a Qwen3-MoE's step with experts=2: >= 1.2x transformers' EP, AutoEP and stage 3, 2x DDP, 2.5x FSDP2; the least memory"
NEEDS = (
    Need("DeepSpeed", module="deepspeed"),
    Need("transformers", module="transformers", install="pip install -e .[hf]"),
)

OURS = "experts=2"
PEERS = (("transformers EP", "AutoEP"), ("stage 3", "DDP", "FSDP2"))
VOCABULARY, SEQUENCES, CONTEXT, LEARNING_RATE = 4096, 2, 256, 1e-3
STEPS = 3
"""That are timed in a turn, after one that is not."""

# --- a rank ---------------------------------------------------------------------------------------------------------


def load(folder: str, **how: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how).train()


def adamw(parameters: Any) -> Any:
    import torch

    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


Step = Callable[[Any], float]


def plain(model: Any, *optimizers: Any) -> Step:
    def run(ids: Any) -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return float(loss.detach())

    return run


def start_zeropp(folder: str, experts: int | None) -> Step:
    import torch.distributed as dist
    import zeropp
    import zeropp.hf  # registers the implementation of experts

    dist.init_process_group("zeropp")
    with zeropp.sharded_init():
        model = load(folder, experts_implementation="zeropp")
    config = zeropp.Config(stage=3, experts=experts)
    return plain(*zeropp.prepare(model, adamw(model.parameters()), config))


def start_ep(folder: str) -> Step:
    """Expert parallel and FSDP2 of transformers. Parameters of two meshes need an optimizer each."""
    import torch.distributed as dist
    from transformers.distributed import DistributedConfig

    dist.init_process_group("gloo")
    model = load(folder, distributed_config=DistributedConfig(fsdp_size=2, ep_size=2))
    meshes: dict[str, list[Any]] = {}
    for parameter in model.parameters():
        meshes.setdefault(str(getattr(parameter, "device_mesh", None)), []).append(parameter)
    return plain(model, *(adamw(group) for group in meshes.values()))


def start_autoep(folder: str) -> Step:
    import deepspeed
    from transformers.utils import output_capturing

    def get(self: Any, key: Any, default: Any = None) -> Any:
        """What _CanRecordRegistry.get does, with the default that AutoEP passes."""
        found = dict.get(self, key, default)
        return found if isinstance(key, str) else dict.get(self, str(key.__class__), found)

    output_capturing._CanRecordRegistry.get = get  # type: ignore[method-assign,assignment]
    deepspeed.init_distributed("gloo", verbose=False)
    model = load(folder)
    betas = {"lr": LEARNING_RATE, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}
    config = {
        "train_micro_batch_size_per_gpu": SEQUENCES, "gradient_clipping": 0.0, "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": betas}, "zero_allow_untested_optimizer": True, "steps_per_print": 10**9,
        "expert_parallel": {"enabled": True, "autoep_size": 2, "preset_model": "qwen3_moe"},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def run(ids: Any) -> float:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return run


def start_ddp(folder: str) -> Step:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(load(folder), gradient_as_bucket_view=True)
    return plain(model, adamw(model.parameters()))


def start_fsdp2(folder: str) -> Step:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model = load(folder)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    return plain(model, adamw(model.parameters()))


STARTS: dict[str, Callable[[str], Step]] = {
    OURS: partial(start_zeropp, experts=2), "stage 3": partial(start_zeropp, experts=None),
    "transformers EP": start_ep, "AutoEP": start_autoep, "DDP": start_ddp, "FSDP2": start_fsdp2,
}  # fmt: skip


def batch_of(number: int, rank: int) -> Any:
    """Tokens with a skewed distribution, so that there is something to learn; the same for every contender."""
    import torch

    draw = torch.Generator().manual_seed(1000 * number + rank)
    odds = 1.0 / (torch.arange(VOCABULARY) + 10.0)
    return torch.multinomial(odds, SEQUENCES * CONTEXT, replacement=True, generator=draw).view(SEQUENCES, CONTEXT)


def train(args: dict[str, Any]) -> int:
    """Worker: one rank of one contender."""
    import torch

    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    rank = int(os.environ["RANK"])
    run = STARTS[args["library"]](args["folder"])
    return step.answer(args, lambda number: batch_of(number, rank), run)


# --- the parent -----------------------------------------------------------------------------------------------------


def save_model(folder: str) -> None:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1024, moe_intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, head_dim=64, num_experts=32, num_experts_per_tok=4,
        norm_topk_prob=True, use_cache=False,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def cpu_ms(pid: int) -> float:
    """Return the CPU time of a process until now, in steps of the system's clock, 10 ms."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return 1e3 * (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def turn(team: step.Team) -> tuple[float, float]:
    """Return wall milliseconds of a step, and CPU milliseconds of the rank that took more."""
    before = {pid: cpu_ms(pid) for pid in team.pids.values()}
    wall = team.turn(STEPS)
    return wall, max(cpu_ms(pid) - start for pid, start in before.items()) / (STEPS + 1)


def peak_mib(team: step.Team) -> float:
    """Return the peak over two steps of what both ranks hold, MiB."""
    peak = 0.0
    team.ask(2)
    while not team.answered():
        ranks = [step.pss_mib(pid) for pid in team.pids.values()]
        peak = max(peak, sum(rank["Pss_Anon"] + rank["Pss_Shmem"] for rank in ranks))
    team.answer()
    return peak


def run(bench: Run) -> None:
    with tempfile.TemporaryDirectory(prefix="zeropp-bench-") as folder:
        save_model(folder)
        for peers in ((),) if alone() else PEERS:
            measure(bench, folder, peers)


def measure(bench: Run, folder: str, peers: tuple[str, ...]) -> None:
    contenders = {name: (name, 3) for name in (OURS, *peers)}
    with step.launched(bench, contenders, more={"folder": folder}) as teams:
        step.check_losses(bench, {name: step.first_losses(team) for name, team in teams.items()})
        turns = {name: partial(turn, team) for name, team in teams.items()}
        samples = alternate(turns, rounds=3 if bench.quick else 7, warmup=0)
        peaks = alternate({name: partial(peak_mib, team) for name, team in teams.items()}, rounds=1, warmup=0)
    case = "55M 2 x 256 tokens a rank, 2 ranks"
    for at, what in enumerate(("wall", "cpu")):
        figures = {name: [pair[at] for pair in of] for name, of in samples.items()}
        bench.compare(f"{case}, {what}", figures, ours=OURS, peers=peers, unit="ms")
    bench.compare(f"{case}, memory", peaks, ours=OURS, peers=peers, unit="MiB")
