# SPDX-License-Identifier: Apache-2.0
"""A step of Hugging Face's Trainer on a small Llama, two CPU ranks, one thread a rank: zeropp against Trainer's own ways.

The same script for all: Trainer with its fused AdamW, clipping at 1, and one other argument (``zeropp=``, ``deepspeed=``,
``fsdp=``, or none: DDP). A step is all between two calls of ``on_step_begin``: data, forward, backward, norm, update,
schedule. Contenders are launched at once and take turns, as in step.py; losses of the first steps must agree before
time counts.

DeepSpeed and FSDP2 are run where Accelerate knows them on accelerators only: their workers tell it that the backend of
this machine is gloo.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Client, Connection
from typing import Any

import step
from harness import Need, Run, alternate

CLAIM = "a step of Hugging Face's Trainer with zeropp takes less time than with DeepSpeed and with FSDP2"
NEEDS = (
    Need("DeepSpeed", module="deepspeed"),
    Need("transformers", module="transformers", install="pip install -e .[hf]"),
    Need("accelerate", module="accelerate", install="pip install -e .[hf]"),
)

LAYERS, WIDTH, HEADS, CONTEXT, VOCABULARY = 6, 256, 4, 128, 4096
SEQUENCES = 1  # a rank and step
LEARNING_RATE = 1e-3
PARAMETERS = "8M"

PEERS = step.PEERS
OURS = {f"stage {stage}": ("zeropp", stage) for stage in (3, 2, 1)}

# --- a rank ---------------------------------------------------------------------------------------------------------


def build_model() -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=CONTEXT, use_cache=False,
        )
    )  # fmt: skip


def texts(count: int) -> Any:
    """Rows of tokens with a skewed distribution, so that there is something to learn."""
    import torch

    odds = 1.0 / (torch.arange(VOCABULARY) + 10.0)
    draw = torch.Generator().manual_seed(0)
    rows = torch.multinomial(odds, count * CONTEXT, replacement=True, generator=draw).view(count, CONTEXT)
    return [{"input_ids": row, "labels": row} for row in rows]


def tell_accelerate() -> None:
    """The backend of this machine, for the two peers that Accelerate runs on accelerators only."""
    from accelerate.state import DistributedType, PartialState

    PartialState._prepare_backend = lambda self, *_, **__: ("gloo", DistributedType.MULTI_CPU)


def with_fsdp() -> dict[str, Any]:
    import torch.distributed as dist
    from accelerate.state import DistributedType, PartialState

    dist.init_process_group("gloo")
    tell_accelerate()
    PartialState()._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # FSDP is looked up under this type
    return {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}


def with_deepspeed(stage: int) -> dict[str, Any]:
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    tell_accelerate()
    return {
        "deepspeed": {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_optimization": {
                "stage": stage, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
            },
            "zero_allow_untested_optimizer": True,
        }
    }  # fmt: skip


#: What each contender adds to the arguments of Trainer.
ARGUMENTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "ddp": lambda _: {"use_cpu": True},
    "zeropp": lambda stage: {"use_cpu": True, "zeropp": {"stage": stage}},
    "fsdp2": lambda _: with_fsdp(),
    "deepspeed": with_deepspeed,
}


def train(args: dict[str, Any]) -> int:
    """Worker: one rank of one contender. Steps when the parent asks, and answers with [(ms, loss), ...]."""
    with tempfile.TemporaryDirectory(prefix="zeropp-bench-") as folder:
        return train_in(folder, args)


def train_in(folder: str, args: dict[str, Any]) -> int:
    import torch
    import torch.distributed as dist

    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    import transformers

    library: Any = transformers
    if args["library"] == "zeropp":
        import zeropp.hf as library
    arguments = library.TrainingArguments(
        output_dir=folder, per_device_train_batch_size=SEQUENCES, max_steps=10**6, max_grad_norm=1.0,
        learning_rate=LEARNING_RATE, weight_decay=0.1, lr_scheduler_type="constant", logging_strategy="no",
        save_strategy="no", report_to=[], disable_tqdm=True, seed=7, **ARGUMENTS[args["library"]](args["stage"]),
    )  # fmt: skip
    turns: Any = None

    class Trainer(library.Trainer):  # type: ignore[misc]
        def compute_loss(self, *given: Any, **more: Any) -> Any:
            loss = super().compute_loss(*given, **more)
            turns.loss = loss.detach()
            return loss

    class Turns(transformers.TrainerCallback):  # type: ignore[misc]
        """Stops at the beginning of a step until it is this contender's turn."""

        loss: Any = None

        def __init__(self, parent: Connection) -> None:
            self.parent, self.left, self.started = parent, 0, 0
            self.figures: list[tuple[float, float]] = []

        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            now = time.perf_counter_ns()
            if self.loss is not None:
                self.figures.append(((now - self.started) / 1e6, float(self.loss)))
            if self.left == 0:
                if self.figures:
                    self.parent.send(self.figures)
                self.figures = []
                self.left = self.parent.recv()
                control.should_training_stop = self.left == 0  # after this step
                dist.barrier()
            self.left -= 1
            self.started = time.perf_counter_ns()

    with Client(args["address"], authkey=bytes.fromhex(args["key"])) as parent:
        turns = Turns(parent)
        trainer = Trainer(model=build_model(), args=arguments, train_dataset=texts(512), callbacks=[turns])
        parent.send((args["contender"], int(os.environ["RANK"]), os.getpid()))
        trainer.train()
        dist.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()
    return int(trainer.state.global_step)


# --- the parent -----------------------------------------------------------------------------------------------------


def run(bench: Run) -> None:
    ours = {"stage 3": OURS["stage 3"]} if bench.quick else OURS
    with step.launched(bench, {**ours, **PEERS}) as teams:
        step.check_losses(bench, {name: step.first_losses(team) for name, team in teams.items()})
        turns = {name: partial(team.turn, 2) for name, team in teams.items()}
        samples = alternate(turns, rounds=3 if bench.quick else 10, warmup=0)
    for name in ours:
        bench.compare(f"Trainer {name} {PARAMETERS} 2 ranks", samples, ours=name, peers=list(PEERS), unit="ms")
