# SPDX-License-Identifier: Apache-2.0
"""Every upstream method that zeropp.hf overrides still exists, with the signature it was overridden for.

A failure here names the method that moved upstream: read its new source, adapt python/zeropp/hf/, then the table below.
"""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install zeropp[hf]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install zeropp[hf]")
from accelerate import Accelerator  # noqa: E402
from zeropp.accelerate import ZeroppAccelerator  # noqa: E402
from zeropp.hf.trainer import ZeroppTrainer  # noqa: E402

TRAINER = {
    "_build_accelerator_args": "self, **kwargs",
    "_finalize_training": "self, trial, num_train_samples, start_time",
    "_get_dataloader": "self, dataset, description, batch_size, sampler_fn=None, is_training=False, dataloader_key=None",
    "get_total_train_batch_size": "self, args",
    "get_tp_size": "self",
    "prediction_step": "self, model, inputs, prediction_loss_only, ignore_keys=None",
    "_has_mixed_mesh_grads": "self, model",
    "_load_best_model": "self",
    "_load_from_checkpoint": "self, resume_from_checkpoint, model=None",
    "_load_optimizer_and_scheduler": "self, checkpoint",
    "_save_optimizer_and_scheduler": "self, output_dir",
    "_wrap_model": "self, model, training=True, dataloader=None",
    "create_accelerator_and_postprocess": "self",
    "create_optimizer": "self, model=None",
    "get_batch_samples": "self, epoch_iterator, num_batches, device",
    "evaluation_loop": "self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix='eval'",
    "hyperparameter_search": "self, hp_space=None, compute_objective=None, n_trials=20, direction='minimize', backend=None, "
    "hp_name=None, **kwargs",
    "log": "self, logs, start_time=None",
    "save_model": "self, output_dir=None, _internal_call=False",
}
ACCELERATOR = {
    "backward": "self, loss, **kwargs",
    "clip_grad_value_": "self, parameters, clip_value",
    "clip_grad_norm_": "self, parameters, max_norm, norm_type=2",
    "gather": "self, tensor",
    "get_state_dict": "self, model, unwrap=True",
    "load_state": "self, input_dir=None, load_kwargs=None, **load_model_func_kwargs",
    "save_state": "self, output_dir=None, safe_serialization=True, **save_model_func_kwargs",
    "no_sync": "self, model",
    "prepare": "self, *args, device_placement=None",
    "prepare_model": "self, model, device_placement=None, evaluation_mode=False",
    "prepare_optimizer": "self, optimizer, device_placement=None",
}


def plain(function) -> str:
    """A signature without annotations."""
    found = inspect.signature(function)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values()]
    return str(found.replace(parameters=parameters, return_annotation=inspect.Signature.empty))[1:-1]


def overridden(ours, theirs) -> set[str]:
    return {name for name, one in vars(ours).items() if inspect.isfunction(one) and hasattr(theirs, name)} - {
        "__init__"
    }


@pytest.mark.parametrize("name", sorted(TRAINER))
def test_trainer(name):
    assert plain(getattr(transformers.Trainer, name)) == TRAINER[name]


@pytest.mark.parametrize("name", sorted(ACCELERATOR))
def test_accelerator(name):
    assert plain(getattr(Accelerator, name)) == ACCELERATOR[name]


def test_the_tables_name_everything_that_is_overridden():
    assert overridden(ZeroppTrainer, transformers.Trainer) == set(TRAINER)
    assert overridden(ZeroppAccelerator, Accelerator) == set(ACCELERATOR)


def test_arguments():
    base = transformers.TrainingArguments
    assert isinstance(inspect.getattr_static(base, "place_model_on_device"), property)
    assert "deepspeed" in base._VALID_DICT_FIELDS and plain(base.__post_init__) == "self" == plain(base.to_dict)


def test_importing_zeropp_loads_neither_framework_and_little_beside_them():
    """The code that shards is loaded when a model is prepared; milliseconds are benchmarks/import_time.py's."""
    code = (
        "import sys, zeropp\n"
        "print([m for m in ('transformers', 'accelerate', 'lightning') if m in sys.modules])\n"
        "from transformers import Trainer\n"
        "before = set(sys.modules)\n"
        "from zeropp.hf import Trainer, TrainingArguments\n"
        "print(sorted(m for m in set(sys.modules) - before if not m.startswith('zeropp.hf')))\n"
        "from zeropp.hf import Seq2SeqTrainer\n"
        "print(Seq2SeqTrainer.__mro__[2].__module__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    wanted = [
        "[]",
        "['zeropp.accelerate', 'zeropp.checkpoint', 'zeropp.errors', 'zeropp.zero']",
        "transformers.trainer_seq2seq",
    ]
    assert done.stdout.splitlines() == wanted, done.stdout + done.stderr
