# SPDX-License-Identifier: Apache-2.0
"""zeropp.initialize: a loop and a file written for DeepSpeed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import zeropp
from torch import nn
from warm import launch

CASES = Path(__file__).with_name("cases.py")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(one for one in sys.path if one)}
SMALL = {"train_batch_size": 4, "zero_optimization": {"stage": 2}}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("initialize")
    done = launch(2, CASES, folder, timeout=200, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_deepspeed_loop_equals_plain_pytorch(stage, found):
    """Losses, norms and learning rates; fp32, another order of sums. Then a checkpoint goes on bit for bit."""
    for one in found:
        for ours, plain in zip(one[f"stage {stage}"], one["plain"], strict=True):
            assert ours == pytest.approx(plain, rel=1e-4, abs=1e-6)
        assert len(one["plain"]) == 6 and one["plain"][-1][0] < one["plain"][0][0]
        assert one[f"stage {stage} again"] == one[f"stage {stage}"][3:]


def test_gradients_are_reduced_by_backward_and_summed_where_asked(found):
    for one in found:
        assert "engine.allreduce_gradients: gradients of the last backward" in one["reduced by hand"]["held"]
        ours, plain = one["reduced by hand"]["sum"]
        assert ours == pytest.approx(plain)


def test_an_optimizer_of_the_users_own_steps_on_two_ranks(found):
    assert all(max(one["own optimizer"]) < 1e-6 for one in found)


def model():
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def test_what_the_file_leaves_out_is_given_in_python(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(SMALL))

    class Arguments:
        deepspeed_config = str(tmp_path / "ds.json")

    plain = model()
    engine, _, loader, scheduler = zeropp.initialize(
        Arguments(), plain, lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
    )  # fmt: skip
    assert engine.module is plain and loader is None and type(scheduler).__name__ == "StepLR"
    assert engine.in_features == 4 and engine.zero_optimization_stage() == 2
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    assert engine.global_steps == 1 and engine.get_lr() == [pytest.approx(0.01)]
    engine.save_16bit_model(tmp_path / "whole")
    assert (tmp_path / "whole" / "model.safetensors").exists()
    with pytest.warns(UserWarning, match="no file .*latest"):
        assert engine.load_checkpoint(tmp_path / "nothing") == (None, {})


def test_fp16_skips_a_step_that_overflows():
    """The scale starts at 2**16, with which these gradients are not finite; then it halves."""
    keys = {**SMALL, "precision": "fp16", "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, _, _, _ = zeropp.initialize(model=model(), config=keys)
    before = engine.weight.detach().clone()
    for _ in range(2):
        engine.backward(engine(torch.full((4, 4), 30.0)).float().sum() * 100)
        engine.step()
    assert engine.skipped_steps == 2 and torch.equal(engine.weight, before)
    engine.backward(engine(torch.full((1, 4), 1e-2)).float().sum())
    engine.step()
    assert engine.skipped_steps == 2 and engine.global_steps == 3 and not torch.equal(engine.weight, before)


def test_a_cycle_moves_rates_and_betas_and_goes_on_from_a_checkpoint(tmp_path):
    cycle = {"type": "OneCycle", "params": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 2}}
    keys = {**SMALL, "gradient_clipping": 0, "optimizer": {"type": "Adam", "params": {"lr": 0.5}}, "scheduler": cycle}
    plain, inputs = model(), torch.arange(8.0).view(2, 4)
    optimizer = torch.optim.AdamW(plain.parameters(), weight_decay=0.0)
    rates, betas = [0.01, 0.055, 0.1, 0.055, 0.01, 0.01], [0.8, 0.85, 0.8, 0.85, 0.9, 0.9]

    def steps(engine, first, last):
        for step in range(first, last):
            engine.backward(engine(inputs).square().mean())
            engine.step()
            assert step < 5 and engine.get_lr() == [pytest.approx(rates[step + 1])]

    engine, _, _, _ = zeropp.initialize(model=model(), config=keys)
    steps(engine, 0, 3)
    engine.save_checkpoint(tmp_path)
    steps(engine, 3, 5)
    again, _, _, _ = zeropp.initialize(model=model(), config=keys)
    again.load_checkpoint(tmp_path)
    steps(again, 3, 5)
    for rate, beta in zip(rates[:5], betas, strict=False):
        optimizer.param_groups[0].update(lr=rate, betas=(beta, 0.99))
        optimizer.zero_grad()
        plain(inputs).square().mean().backward()
        optimizer.step()
    assert torch.equal(again.module.weight, engine.module.weight)
    assert torch.allclose(engine.module.weight, plain.weight, rtol=1e-5, atol=1e-6)


def test_a_model_that_was_evaluated_first_is_trained_at_its_own_stage(tmp_path):
    """TRL gives a reference model's engine stage 0 and no optimizer, and may train the same model later."""
    trained, plain, inputs = model(), model(), torch.ones(2, 4)
    look, optimizer, _, _ = zeropp.initialize(model=trained, config={**SMALL, "zero_optimization": {"stage": 0}})
    assert optimizer is None
    with torch.no_grad():
        assert torch.equal(look.eval()(inputs), plain(inputs))
    engine, _, _, _ = zeropp.initialize(
        model=trained.train(), optimizer=torch.optim.SGD(trained.parameters(), 0.1), config=SMALL
    )
    assert zeropp.zero.engine.engine_of(trained).stage == engine.zero_optimization_stage() == 2
    with pytest.raises(zeropp.ConfigError, match="initialized before with stage 2, and keeps it; now 0 is wanted"):
        zeropp.initialize(model=trained, config={**SMALL, "zero_optimization": {"stage": 0}})
    with pytest.raises(zeropp.ConfigError, match="initialized before with optimizer on 'device'"):
        offload = {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
        zeropp.initialize(model=trained, config={**SMALL, "zero_optimization": offload})
    alone, _, _, _ = zeropp.initialize(model=model(), config={**SMALL, "zero_optimization": {"stage": 0}})
    alone(inputs).sum().backward()
    assert zeropp.get_full(alone.weight, "grad").tolist() == [[2.0] * 4] * 2, "gradients are wanted: now it is prepared"


@pytest.mark.parametrize(
    ("section", "kind", "wanted"),
    [
        (
            {"type": "OneBitAdam", "params": {"lr": 2e-4, "freeze_step": 40, "cuda_aware": False, "comm_backend_name": "nccl"}},
            "OneBitAdam", {"lr": 2e-4, "freeze_step": 40, "eps": 1e-8},
        ),
        (
            {"type": "ZeroOneAdam", "params": {"var_freeze_step": 9, "local_step_clipper": 1, "bias_correction": True}},
            "ZeroOneAdam", {"var_freeze_step": 9, "local_step_clipper": 1, "var_update_scaler": 16},
        ),
        (
            {"type": "OneBitLamb", "params": {"betas": [0.8, 0.99], "factor_max": 3.0}},
            "OneBitLamb", {"betas": (0.8, 0.99), "factor_max": 3.0, "coeff_beta": 0.9},
        ),
        ({"type": "lamb", "params": {"max_coeff": 5.0}}, "LAMB", {"trust": (0.01, 5.0), "eps": 1e-8}),
        ({"type": "Lion"}, "Lion", {"lr": 1e-3}),
    ],
)  # fmt: skip
def test_optimizers_of_ours_by_deepspeeds_names(section, kind, wanted):
    engine, optimizer, _, _ = zeropp.initialize(
        model=model(), config={**SMALL, "optimizer": section, "zero_optimization": {"stage": 2}}
    )
    assert isinstance(optimizer, getattr(zeropp.optim, kind))
    group = optimizer.param_groups[0]
    assert {name: group[name] for name in wanted} == wanted
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"optimizer": {"type": "Muon"}}, "optimizer.type: 'Muon' is not supported"),
        ({"optimizer": {"type": "OneBitAdam", "params": {"amsgrad": True}}}, "optimizer.params.amsgrad: True is not"),
        ({"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 0}}}, "zeropp.optim's OneBitAdam.*freeze_step"),
        ({"optimizer": {"type": "Adam", "params": {"lr": "auto"}}}, "filled by a Trainer"),
        ({"optimizer": {"type": "Adam", "parms": {}}}, "did you mean 'params'"),
        ({"optimizer": {"type": "SGD", "params": {"lr": 0.1, "speed": 1}}}, "do not fit torch's SGD"),
        (
            {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "scheduler": {"type": "OneCycle"}},
            "scheduler.params.cycle_min_lr: missing",
        ),
        ({"zero_optimization": {"stage": 9}}, "zero_optimization.stage: 9"),
    ],
)
def test_what_cannot_be_says_why(more, said):
    with pytest.raises(zeropp.ConfigError, match=said):
        zeropp.initialize(model=model(), config={**SMALL, **more})


def test_no_configuration_and_no_optimizer_are_said():
    with pytest.raises(zeropp.ConfigError, match="give config="):
        zeropp.initialize(model=model())
    engine, optimizer, _, _ = zeropp.initialize(model=model(), config=SMALL)
    assert optimizer is None
    with pytest.raises(zeropp.ConfigError, match="there is no optimizer"):
        engine.step()
