# SPDX-License-Identifier: Apache-2.0
"""zeropp under Hugging Face's Trainer: other imports, and the flag ``--zeropp config.json``.

    from zeropp.hf import Trainer, TrainingArguments      # in place of: from transformers import ...

:func:`ArgumentsFor` and :func:`TrainerFor` do the same for any subclass (SFTConfig and SFTTrainer, ...). Nothing of
transformers is patched; the model stays the object it was. Without the flag these classes are the plain ones.
"""

from __future__ import annotations

from typing import Any

import zeropp
from zeropp.accelerate import ZeroppAccelerator
from zeropp.hf import arguments, trainer
from zeropp.hf.arguments import ArgumentsFor, TrainingArguments
from zeropp.hf.report import MemoryTable
from zeropp.hf.trainer import Trainer, TrainerFor

zeropp._register_with_transformers()

Seq2SeqTrainer: Any
"""transformers.Seq2SeqTrainer with ZeRO."""

Seq2SeqTrainingArguments: Any
"""transformers.Seq2SeqTrainingArguments with the field ``zeropp``."""


def __getattr__(name: str) -> Any:
    """Make one of the two classes above when it is first read."""
    if name == "Seq2SeqTrainer":
        return trainer.Seq2SeqTrainer
    if name == "Seq2SeqTrainingArguments":
        return arguments.Seq2SeqTrainingArguments
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "ArgumentsFor",
    "MemoryTable",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "Trainer",
    "TrainerFor",
    "TrainingArguments",
    "ZeroppAccelerator",
]
