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
@pytest.mark.parametrize("strategy", ["zeropp_stage_1", "zeropp_stage_2", "zeropp", "gathers", "disk"])
def test_a_fit_equals_ddp(strategy, answer):
    for found in answer("fit"):
        assert apart(found["ddp"], found[strategy]) < FP32
        norms_and_rates = found["ddp measured"]
        assert len(norms_and_rates) == 2 * 2, "four batches a rank, two of them a step"
        assert apart(norms_and_rates, found[f"{strategy} measured"]) < FP32 * max(norms_and_rates)
        for one, other in zip(found["ddp predicted"], found[f"{strategy} predicted"], strict=True):
            assert apart(one, other) < FP32
        before, after = sum(found["ddp"][8:10]), sum(found["ddp"][-4:-2])  # of the first two batches of validation
        assert after < 0.7 * before, "it must learn, or equality shows little"


@pytest.mark.lightning_case("fit")
@pytest.mark.parametrize("strategy", ["zeropp_stage_1", "zeropp_stage_2", "zeropp", "gathers", "disk"])
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


@pytest.mark.lightning_case("tensors")
def test_ranks_that_share_matrices_train_as_one(answer):
    for found in answer("tensors"):
        assert len(found["zeropp"]) == 8, "each rank has every batch"
        assert apart(found["alone"], found["zeropp"]) < FP32
        assert "tensor_parallel_size 3, of a job of 2 ranks; wanted a divisor" in found["refused"]


@pytest.mark.lightning_case("tensors")
def test_ranks_that_share_matrices_train_as_one_in_fabric(answer):
    for found in answer("tensors"):
        assert found["in fabric"] == pytest.approx(found["fabric alone"], rel=1e-5)
        assert found["sampled"] == [1, 0], "ranks that share matrices have one batch"


@pytest.mark.lightning_case("warm_up")
def test_sequence_length_warm_up_equals_batches_cut_by_hand(answer):
    for found in answer("warm_up"):
        assert [length for _, length in found["zeropp"]] == [length for _, length in found["ddp"]]
        assert {2, 4, 6} == {length for _, length in found["zeropp"]}
        assert apart([loss for loss, _ in found["ddp"]], [loss for loss, _ in found["zeropp"]]) < FP32


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


@pytest.mark.lightning_case("unfreezing")
def test_finetuning_callbacks_thaw(answer):
    for found in answer("unfreezing"):
        assert len(found["frozen"]) == 3 * 4 and found["gathers"] == found["zeropp_stage_2"]
        assert found["frozen"][:6] == found["gathers"][:6] and found["frozen"][6:] != found["gathers"][6:]
        assert sum(found["gathers"][-4:]) < sum(found["frozen"][-4:])


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
@pytest.mark.parametrize("strategy", ["zeropp_stage_1", "zeropp_stage_2", "zeropp", "disk"])
def test_fabric_equals_ddp_and_loads_what_it_saved(strategy, answer):
    for found in answer("fabric"):
        assert apart(found["ddp"], found[strategy]) < FP32
        if strategy != "disk":
            assert apart(found["ddp value"], found[f"{strategy} value"]) < FP32
        if strategy in ("zeropp_stage_1", "zeropp"):
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


@pytest.fixture
def asked(answer):
    """asked(case of upstream_cases.py) -> what each rank returned."""

    def find(name):
        found = [one[name] for one in answer("upstream")]
        for one in found:
            assert "error" not in one, one["error"]
        return found

    return find


@pytest.mark.lightning_case("upstream")
def test_evaluation_before_and_after_a_fit_leaves_weights_alone(asked):
    for found in asked("test_without_fit_and_after"):
        assert found["after"] == found["again"] < found["before"] and found["unchanged"]
        assert found["root"] == "cpu" and found["is_ddp"]
    assert [one["seen"] for one in asked("group_in_setup")] == [[True]] * 2


@pytest.mark.lightning_case("upstream")
def test_gradients_are_the_same_on_all_ranks_and_unused_parameters_are_allowed(asked):
    one, other = asked("gradients_synced")
    assert one == other and one["True"] == one["False"] and len(one["True"]) == 2
    assert all(found["same"] for found in asked("unused_parameters"))


@pytest.mark.lightning_case("upstream")
def test_weights_move_between_zeropp_and_plain_lightning(asked):
    for found in asked("state_on_rank_0"):
        assert found["names"] and found["weights"] and found["optimizer"] == {}
        assert found["regular"] == pytest.approx(found["ours"], abs=FP32)
    for found in asked("standard_checkpoint"):
        assert found["loss"][0] == pytest.approx(found["loss"][1], abs=FP32)
        assert "was saved without zeropp" in found["refused"]
    for found in asked("compiled_module"):
        assert found["same"] and found["apart"] < FP32
    for found in asked("other_sharding"):
        assert "ZeroRedundancyOptimizer" in found["said"] and found["said"].startswith("ConfigError"), found["said"]


@pytest.mark.lightning_case("upstream")
def test_modules_are_made_in_the_precision_asked_for(asked):
    for found in asked("init_module"):
        for name, kinds in found.items():
            dtype = "torch.float32" if name.startswith("32") else "torch.bfloat16"
            assert kinds == [dtype, "cpu", dtype]


@pytest.mark.lightning_case("upstream")
def test_a_delayed_update_ends_before_validation_and_with_the_fit(asked):
    for found in asked("newest_weights"):
        assert len(found["seen"][0]) == 8 and found["seen"][0] == pytest.approx(found["seen"][1], abs=1e-7)
        assert found["pending"] is False


@pytest.mark.lightning_case("upstream")
def test_fabric_saves_and_loads_before_and_after_setup(asked):
    for found in asked("save_before_and_after_setup"):
        assert len(found) == 4 and all(found.values()), found
    for found in asked("strict_and_raw"):
        assert "'coconut' that does not exist" in found["missing"] and found["coconut"] == 11
        assert found["moved"] and found["raw"] and "4 names are missing" in found["wrong"]
    assert asked("filtered")[0] == {"names": ["0.bias", "2.bias"], "kinds": ["Tensor", "Tensor"]}


@pytest.mark.lightning_case("upstream")
def test_fabric_keeps_groups_places_and_compiled_models(asked):
    for found in asked("groups_and_places"):
        assert found["rates"] == [1e-2, 1e-6] and found["device"] == "cpu" and found["low"] == "torch.bfloat16"
        assert found["moved"]["0.weight"] > 1e-3 > 1e-5 > found["moved"]["2.weight"] > 0
        assert found["kinds"][0] == found["kinds"][1]
    for found in asked("compiled_again"):
        plain, compiled = found["losses"]
        assert plain == compiled and plain[2] < plain[0]
