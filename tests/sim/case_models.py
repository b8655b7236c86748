# SPDX-License-Identifier: Apache-2.0
"""Compare a model of transformers on the simulated GPU with the CPU. Print the differences and the waits of the host.

python case_models.py MODEL
"""

from __future__ import annotations

import copy
import json
import sys
from typing import Any

import sim
import torch
import transformers

SMALL = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "max_position_embeddings": 64}
WITHOUT_DROPOUT = {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}


def build(name: str) -> Any:
    torch.manual_seed(0)
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=97, n_positions=64, n_embd=64, n_layer=3, n_head=4, **WITHOUT_DROPOUT
        )
        return transformers.GPT2LMHeadModel(config)
    if name == "mixtral":
        experts = {"num_local_experts": 4, "experts_implementation": "eager"}
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL, **experts))
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    if name == "llama checkpointed":
        model.gradient_checkpointing_enable()
    return model


def furthest(wanted: Any, found: Any) -> float:
    """Return the largest difference of two models' gradients, relative to the largest gradient of the parameter."""
    far = 0.0
    for ours, theirs in zip(found.parameters(), wanted.parameters(), strict=True):
        if theirs.grad is not None:
            far = max(far, ((ours.grad.cpu() - theirs.grad).abs().max() / (theirs.grad.abs().max() + 1e-12)).item())
    return far


def main(name: str) -> None:
    wanted = build(name)
    found = copy.deepcopy(wanted).to("sim")
    found.tie_weights()  # .to() between CPU and PrivateUse1 makes new parameters, one a module
    ids = torch.randint(0, 97, (2, 24), generator=torch.Generator().manual_seed(1))
    loss = wanted(input_ids=ids, labels=ids).loss
    loss.backward()
    rows = []
    for lazy in (0, 1):
        sim.set_schedule(lazy, 0)
        found.zero_grad()
        waits: dict[str, int] = {}
        on_device = ids.to("sim")
        with sim.waits_of_the_host(waits):
            ours = found(input_ids=on_device, labels=on_device).loss
            ours.backward()
        rows.append({"loss": abs(ours.item() - loss.item()), "gradients": furthest(wanted, found), "waits": waits})
    print(json.dumps({"rows": rows, "error": sim.first_error()}))


if __name__ == "__main__":
    main(sys.argv[1])
