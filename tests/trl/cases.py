# SPDX-License-Identifier: Apache-2.0
"""Cases of test_trl.py on each rank: TRL's trainers, stock (DDP over gloo) and with zeropp, in one process. Run under
torchrun: cases.py FOLDER CASE..."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import torch
import torch.distributed as dist
import transformers
import trl
import zeropp
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from zeropp.hf import ArgumentsFor, TrainerFor

LINES = [f"the number {i} comes before {i + 1} and after {i - 1}" for i in range(64)]


def configurations(folder: Path) -> dict[str, dict[str, Any]]:
    disk = {"kind": "nvme", "path": str(folder / "scratch")}
    return {
        "stage 1": {"stage": 1},
        "stage 2": {"stage": 2},
        "zeropp": {"stage": 3, "host_copy": "off"},
        "on disk": {"stage": 3, "offload": {"params": disk, "optimizer": disk}},
    }


def tokenizer() -> Any:
    """Bytes are tokens: nothing is learned, nothing is downloaded."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {name: i for i, name in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    plain = Tokenizer(models.BPE(vocab=words, merges=[]))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def save_model(folder: Path) -> None:
    """Tied embeddings, whose weight TRL reads outside of the head."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=259, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)


def model(folder: Path, kind: str) -> Any:
    """From a folder, because the reference model is read from where the policy was."""
    where = folder / f"model-{os.environ['RANK']}"
    if kind == "reward":
        torch.manual_seed(5)  # the head is not in the file
        return transformers.AutoModelForSequenceClassification.from_pretrained(where, num_labels=1, dtype="float32")
    return transformers.AutoModelForCausalLM.from_pretrained(where, dtype="float32")


def lora() -> Any:
    import peft

    torch.manual_seed(7)
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def train(folder: Path, kind: str, name: str, config: Any, peft_config: Any = None, **more: Any) -> Any:
    trainer_class, arguments_class = {
        "sft": (trl.SFTTrainer, trl.SFTConfig),
        "dpo": (trl.DPOTrainer, trl.DPOConfig),
        "grpo": (trl.GRPOTrainer, trl.GRPOConfig),
        "kto": (trl.KTOTrainer, trl.KTOConfig),
        "reward": (trl.RewardTrainer, trl.RewardConfig),
    }[kind]
    wanted = {
        "output_dir": str(folder / name), "max_steps": 3, "per_device_train_batch_size": 2,
        "logging_steps": 1, "report_to": "none", "use_cpu": True, "bf16": False, "disable_tqdm": True, "seed": 3,
        "save_strategy": "no", "learning_rate": 1e-3, "gradient_checkpointing": False, **more,
    }  # fmt: skip
    if config is not None:
        trainer_class, arguments_class = TrainerFor(trainer_class), ArgumentsFor(arguments_class)
        wanted["zeropp"] = config
    given: dict[str, Any] = {"peft_config": peft_config} if peft_config is not None else {}
    if kind == "sft":
        data = {"text": LINES}
    elif kind == "dpo":
        data = {"prompt": LINES, "chosen": [" yes it is"] * 64, "rejected": [" no"] * 64}
    elif kind == "kto":
        data = {"prompt": LINES, "completion": [" yes it is", " no"] * 32, "label": [True, False] * 32}
    elif kind == "reward":
        data = {"chosen": [f"{line}, yes it is" for line in LINES], "rejected": [f"{line}, no" for line in LINES]}
    else:
        data = {"prompt": LINES}
        given["reward_funcs"] = lambda completions, **kwargs: [float(len(set(one))) for one in completions]
    trainer = trainer_class(
        model=model(folder.parent, kind), args=arguments_class(**wanted), train_dataset=datasets.Dataset.from_dict(data),
        processing_class=tokenizer(), **given,
    )  # fmt: skip
    torch.manual_seed(11)
    trainer.train()
    return trainer


def logged(trainer: Any) -> list[list[float]]:
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return [[float(row[kind]) for kind in ("loss", "grad_norm", "learning_rate")] for row in rows]


def whole(one: Any) -> dict[str, torch.Tensor]:
    try:
        return zeropp.full_state_dict(one)
    except zeropp.ConfigError:
        return {k: v.detach().clone() for k, v in one.state_dict().items()}


def both(folder: Path, kind: str, **more: Any) -> dict[str, Any]:
    """Stock, and every way to hold the state."""
    found: dict[str, Any] = {"apart": {}}
    stock: Any = None
    for name, config in {"stock": None, **configurations(folder)}.items():
        peft_config = lora() if more.get("peft_config") else None
        trainer = train(folder, kind, name, config, **{**more, "peft_config": peft_config})
        found[name] = logged(trainer)
        weights = whole(trainer.model)
        stock = weights if config is None else stock
        found["apart"][name] = max(float((weights[k] - stock[k]).abs().max()) for k in stock)
        if config is not None:
            trainer.save_model(str(folder / name / "final"))
            torch.distributed.barrier()
            found["files"] = sorted(path.name for path in (folder / name / "final").glob("*.safetensors"))
    return found


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "sft": lambda folder: both(folder, "sft", max_length=64),
    "sft_lora": lambda folder: both(folder, "sft", max_length=64, peft_config=True),
    "sft_checkpointing": lambda folder: both(folder, "sft", max_length=64, gradient_checkpointing=True),
    "dpo": lambda folder: both(folder, "dpo"),
    "kto": lambda folder: both(folder, "kto"),
    "reward": lambda folder: both(folder, "reward"),
    "grpo": lambda folder: both(folder, "grpo", num_generations=2, max_completion_length=6, beta=0.1),
}


def main() -> None:
    folder = Path(sys.argv[1])
    save_model(folder / f"model-{os.environ['RANK']}")
    for case in sys.argv[2:]:
        try:
            answer: Any = CASES[case](folder / case)
        except Exception:
            answer = {"error": traceback.format_exc()}
        (folder / f"{case}.{os.environ['RANK']}.json").write_text(json.dumps(answer))
        if "error" in answer:
            raise SystemExit(f"{case}: {answer['error']}")
    dist.destroy_process_group()  # gloo's threads may drop tensors until then, and the interpreter is about to go


if __name__ == "__main__":
    main()
