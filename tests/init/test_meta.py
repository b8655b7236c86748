# SPDX-License-Identifier: Apache-2.0
"""Models on the meta device: prepare draws their values, shard by shard. The cases are in meta_cases.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import zeropp
from warm import launch

CASES = Path(__file__).with_name("meta_cases.py")
# The ranks import what this process imports, and the cases beside theirs.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(CASES.parent), *sys.path])}


@pytest.mark.parametrize(
    ("ranks", "cases"), [(1, "values,loaded,refuses"), (2, "values,loaded,refuses"), (2, "memory")]
)
def test_ranks(ranks, cases):
    done = launch(ranks, CASES, cases, "--group", timeout=120, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-4000:]


def test_a_model_of_transformers():
    """The model's own _init_weights sets all values, buffers included."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    plain = transformers.AutoModelForCausalLM.from_config(config)
    model, _ = zeropp.prepare(model, None, zeropp.Config())
    values = zeropp.full_state_dict(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert 0.015 < float(values["model.layers.0.mlp.up_proj.weight"].std()) < 0.025
    assert bool((values["model.norm.weight"] == 1).all())
    for name, buffer in plain.named_buffers():
        assert torch.equal(dict(model.named_buffers())[name], buffer), name
    zeropp.load_full_state_dict(model, plain.state_dict(), strict=False)
    ids = torch.arange(12).view(1, 12)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)
