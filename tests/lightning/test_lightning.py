# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer and Fabric with zeropp against DDP, two ranks. What the ranks do stands in cases.py."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.timeout(400)

# Both sides add the same fp32 numbers in another order: relative 2**-24 a sum, losses up to 10.
FP32 = 1e-5


def apart(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other) > 0
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.lightning_case("fit")
@pytest.mark.parametrize("strategy", ["zeropp_stage_1", "zeropp_stage_2", "zeropp", "gathers"])
def test_a_fit_equals_ddp(strategy, answer):
    for found in answer("fit"):
        assert apart(found["ddp"], found[strategy]) < FP32
        for one, other in zip(found["ddp predicted"], found[f"{strategy} predicted"], strict=True):
            assert apart(one, other) < FP32
        before, after = sum(found["ddp"][8:10]), sum(found["ddp"][-4:-2])  # of the first two batches of validation
        assert after < 0.7 * before, "it must learn, or equality shows little"


@pytest.mark.lightning_case("fit")
@pytest.mark.parametrize("strategy", ["zeropp_stage_1", "zeropp_stage_2", "zeropp", "gathers"])
def test_the_checkpoint_file_is_whole_and_needs_no_zeropp(strategy, answer):
    for found in answer("fit"):
        assert found[f"{strategy} shapes"] == found["ddp shapes"]
        assert found[f"{strategy} sizes"] == found["ddp sizes"], "ModelSummary of partitioned parameters"
        assert apart(found[f"{strategy} plain"], found["ddp plain"]) < FP32


@pytest.mark.lightning_case("resume")
@pytest.mark.parametrize("strategy", ["zeropp_stage_2", "gathers"])
def test_resume_equals_the_uninterrupted_run_bit_for_bit(strategy, answer):
    for found in answer("resume"):
        through, again, seen, seen_again = found[strategy]
        assert len(through) == 12 and again == through[4:]
        assert seen_again[-8:] == seen[-8:]
        assert found[f"{strategy} beside"][:2] == ["epoch=0.ckpt", "epoch=0.ckpt.zeropp"]
        assert found["fitted again"] == 8 + 4, "one module, a second fit"


@pytest.mark.lightning_case("ways")
def test_configure_model_manual_optimization_and_autocast(answer):
    for found in answer("ways"):
        assert apart(found["ddp"]["late"], found["gathers"]["late"]) < FP32
        assert apart(found["ddp"]["manual"], found["gathers"]["manual"]) < FP32
        # A rounding of 2**-9 relative may fall to the other side after a difference of the last fp32 bit.
        assert apart(found["ddp"]["low"], found["gathers"]["low"]) < 2**-9 * 20
        losses, dtype = found["pure"]
        assert apart(found["ddp"]["late"], losses) < 2**-8 * 20 and dtype == "torch.bfloat16"


@pytest.mark.lightning_case("ways")
def test_clipping_by_value_and_fp16(answer):
    for found in answer("ways"):
        assert apart(found["ddp"]["value"], found["gathers"]["value"]) < FP32
        losses, dtype, scale = found["half"]
        # The loss itself is a half, rounded by 2**-11 relative at up to 10.
        assert apart(found["ddp"]["late"], losses) < 2**-10 * 20 and dtype == "torch.float16" and scale == 1024.0
        assert apart(found["manual plain"], found["half manual"]) < 2**-10 * 20


@pytest.mark.lightning_case("several")
@pytest.mark.parametrize("strategy", ["zeropp_stage_1", "gathers"])
def test_two_optimizers_step_in_turns_and_resume(strategy, answer):
    for found in answer("several"):
        assert len(found["ddp"]) == 2 * 4 * 2 and found["ddp"][-1] != found["ddp"][1]
        assert apart(found["ddp"], found[strategy]) < FP32
        assert apart(found["ddp plain"], found[f"{strategy} plain"]) < FP32, "the whole file, buffers too"
        assert found[f"{strategy} again"] == found[strategy][8:]
        assert found[f"{strategy} beside"] == ["0", "1", "2"], "a folder each, one for what no optimizer has"
        after, again = found["fabric"]
        assert after == again and len(after) == 4


@pytest.mark.lightning_case("ways")
def test_early_stopping_ends_all_ranks_together(answer):
    for found in answer("ways"):
        assert found["stops"] == [3, 2, 1]


@pytest.mark.lightning_case("ways")
def test_the_package_of_the_other_name(answer):
    for found in answer("ways"):
        if "other" not in found["ddp"]:
            pytest.skip("pytorch_lightning is not installed: pip install pytorch-lightning")
        assert apart(found["ddp"]["other"], found["zeropp"]["other"]) < FP32


@pytest.mark.lightning_case("fabric")
@pytest.mark.parametrize("strategy", ["zeropp_stage_1", "zeropp"])
def test_fabric_equals_ddp_and_loads_what_it_saved(strategy, answer):
    for found in answer("fabric"):
        assert apart(found["ddp"], found[strategy]) < FP32
        assert apart(found["ddp value"], found[f"{strategy} value"]) < FP32
        assert apart(found["ddp value"], found[f"{strategy} half"]) < 2**-10 * 20
        step, left, again = found[f"{strategy} again"]
        assert step == 2 and left == {} and again == found[strategy][-len(again) :]


@pytest.mark.lightning_case("refusals")
def test_what_cannot_be_says_why(answer):
    for said in answer("refusals"):
        assert "optimizers 0 and 1 have a parameter of shape (1,) in common" in said["two"]
        assert "StochasticWeightAveraging reads whole parameters" in said["average"]
        assert "unknown argument 'stge'" in said["argument"]
        assert "Trainer(gradient_clip_val=...)" in said["clip"]
        assert "was saved without zeropp" in said["resume"]
