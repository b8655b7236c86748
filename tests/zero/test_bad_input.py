# SPDX-License-Identifier: Apache-2.0
"""Mistakes get a sentence that names the object, what was seen, what was wanted and the way out; and the next step is
good."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from bad_input_cases import CASES

# Case -> what each of its sentences must say. A list of lists where a case has several.
SAYS: dict[str, list[list[str]]] = {
    "config keys": [
        ["ConfigError: Config.stge: unknown key (value 3)", "did you mean 'stage'?"],
        ["ConfigError: Config.stage: 4 is not allowed; wanted 0, 1, 2 or 3"],
        ["ConfigError: Config.host_copy: 'on' is not allowed", "'auto'", "'off'"],
        ["ConfigError: units: no module of class 'Blok' in the model; it has", "Linear"],
    ],
    "no parameters": [["ConfigError: prepare: Tanh has no parameters, so there is nothing to partition"]],
    "not a module": [
        [
            "ConfigError: prepare: model is [Linear(in_features=2, out_features=2, bias=True)], a list; wanted a torch.nn.Module"
        ]
    ],
    "on meta": [
        [
            "'scalar' is on the meta device and has no values, and Tiny has no reset_parameters()",
            "zeropp.sharded_init()",
        ]
    ],
    "odd dtype": [
        ["'weight' has dtype torch.complex32", "not supported"],
        ["in float16", "loss scale", "precision='bf16'"],
    ],
    "prepared twice": [
        ["parameter 'scalar' belongs to a prepared model already; prepare each model once"],
        ["the optimizer was prepared already"],
        ["parameter '0.weight' belongs to a prepared model already"],
    ],
    "optimizer lacks": [
        ["the optimizer lacks 5 trainable parameters, first 'scalar'", "requires_grad_(False)"],
        ["the optimizer has 7 parameters that are not the model's; build it from model.parameters()"],
        ["the optimizer lacks 1 trainable parameter, 'scalar'; add it, or freeze it with requires_grad_(False)"],
        ["the optimizer has 1 parameter that is not the model's; build it from"],
    ],
    "optimizer with state": [["the optimizer has state already", "before the first step", "zeropp.load"]],
    "unknown optimizer": [
        ["optimizer LBFGS does not combine with Config.stage=", "use one of AdamW, Adam, Lion", "OneBitLamb, Muon"]
    ],
    "different models": [
        ["rank 1's model differs from rank 0's: parameter", "'1.weight' (5, 4)", "'1.weight' (6, 4)"],
        ["'a.weight'", "'b.weight'"],
        ["torch.bfloat16", "torch.float32"],
        ["'2.weight'", "(no more parameters)"],
        ["requires_grad=False", "requires_grad=True"],
    ],
    "different configs": [
        ["ConfigError: prepare: Config.stage is 3 on rank 0 and 2 on rank 1; give every rank the same configuration"],
        [
            "prepare: Config.precision.reduce is 'fp32' on rank 0 and None on rank 1; Config.loss_scale.init is 65536.0 on rank 0 and 8.0 "
            "on rank 1; Config.loss_scale.least",
        ],
        [
            "Config.offload.optimizer.kind is 'device' on rank 0 and 'nvme' on rank 1; Config.units is 'auto' on rank 0 and Linear on rank 1; "
            "Config.prefetch is 'auto' on rank 0 and 1 on rank 1; Config.accumulate is 1 on rank 0 and 2 on rank 1; 1 more key differs; give"
        ],
        ["prepare: Config.ignored is 'scalar' on rank 0 and nothing on rank 1; give"],
        ["prepare: optimizer is AdamW on rank 0 and SGD on rank 1; give every rank the same"],
        ["prepare: optimizer is AdamW on rank 0 and None on rank 1; give every rank"],
    ],
    "lazy": [
        ["ConfigError: prepare: '1.weight' has no shape yet: module '1' is a LazyLinear, which", "run one batch first"],
        ["prepare: 'running_mean' has no shape yet: the model is a LazyBatchNorm1d"],
        ["estimate: '1.weight' has no shape yet"],
    ],
    "added later": [
        ["parameter 'late' was added to Tiny after zeropp.prepare", "add it before prepare"],
        ["parameter '3.weight' was added to ModuleList after zeropp.prepare"],
        ["parameter 'late' was added to Tiny after zeropp.prepare"],
        ["is not one of the model that this optimizer was prepared with"],
    ],
    "no backward": [
        ["optimizer.step: no parameter has a gradient; call loss.backward() first"],
        ["no parameter has a gradient; call loss.backward() first"],
        ["accumulated inside no_sync and not reduced", "outside of zeropp.no_sync(model)"],
    ],
    "loss not scalar": [["grad can be implicitly created only for scalar outputs"]],
    "backward twice": [["backward through the graph a second time"]],
    "NaN gradients": [
        [
            "the gradients of 'blocks.1.weight' (rank 1 before the sum)",
            "are not finite",
            "weights and optimizer state are unchanged",
        ]
    ],
    "raises in backward": [
        [
            "the backward before this one ended by an exception after the gradient of module 'blocks.2' had gone out",
            "restart",
        ]
    ],
    "sparse gradients": [["zero: the gradient of '0.weight' is sparse; ", "sparse=False"]],
    "clip twice": [["Config(clip=...) clips in every step already; use one of them"]],
    "other norms": [["norm_type 0.0 is not allowed; wanted a number above 0, or float('inf')"]],
    "state of the optimizer": [["zeropp.save(path, model, optimizer)"], ["zeropp.load(path, model, optimizer)"]],
    "not prepared": [
        ["Tiny was not prepared; call zeropp.prepare(model, optimizer, zeropp.Config(...)) first"],
        ["Tiny was not prepared"],
        ["zeropp.memory: the optimizer belongs to another model"],
    ],
}


@pytest.fixture(scope="module")
def outcomes(run_ranks: Callable[..., Any], selected: Callable[[str], list[str]]) -> Any:
    return run_ranks("bad_input_cases", selected("case"), ranks=2)


@pytest.mark.parametrize("case", CASES)
def test_mistakes(case: str, outcomes: Any) -> None:
    answers = outcomes[case].check()
    wanted = SAYS.get(case) or SAYS.get(case.split(", ")[0], [])
    for rank, answer in enumerate(answers):
        sentences = answer if isinstance(answer, list) else [answer]
        if not wanted:
            assert answer is None
            continue
        for says, text in zip(wanted, sentences, strict=True):
            assert "Muon, Muon" not in text
            for part in says:
                assert part in text, f"rank {rank}: {part!r} not in {text!r}"
