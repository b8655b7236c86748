# SPDX-License-Identifier: Apache-2.0
"""zeropp under Hugging Face's Trainer: other imports, and the flag ``--zeropp config.json``.

    from zeropp.hf import Trainer, TrainingArguments      # in place of: from transformers import ...

:func:`ArgumentsFor` and :func:`TrainerFor` do the same for any subclass (SFTConfig and SFTTrainer, ...). Nothing of
transformers is patched; the model stays the object it was. Without the flag these classes are the plain ones.
"""

from __future__ import annotations

from zeropp.accelerate import ZeroppAccelerator
from zeropp.hf.arguments import ArgumentsFor, Seq2SeqTrainingArguments, TrainingArguments
from zeropp.hf.report import MemoryTable
from zeropp.hf.trainer import Seq2SeqTrainer, Trainer, TrainerFor

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
