# SPDX-License-Identifier: Apache-2.0
"""Trainer with zeropp against stock Trainer (DDP over gloo), two ranks. What the ranks do stands in cases.py."""

from __future__ import annotations

import pytest

# Both sides add the same fp32 numbers in another order: relative 2**-24 a sum, a few hundred sums in a row.
FP32 = 5e-6


def apart(one: list[dict[str, float]], other: list[dict[str, float]]) -> float:
    assert [sorted(row) for row in one] == [sorted(row) for row in other]
    return max(abs(a[k] - b[k]) for a, b in zip(one, other, strict=True) for k in a)


@pytest.mark.hf_case("parity")
@pytest.mark.parametrize("stage", ["stage 1", "stage 2", "stage 3", "stage 3 gathers", "on disk"])
def test_losses_norms_and_learning_rates_equal_ddp(stage, answer):
    for found in answer("parity"):
        assert len(found["stock"]) == 8 and "eval_loss" in found["stock"][-1]
        assert apart(found["stock"], found[stage]) < FP32
        assert found["stock"][-1]["eval_loss"] < found["stock"][0]["loss"] - 0.2, (
            "it must learn, or equality shows little"
        )
        assert found[f"{stage} weights apart"] < FP32
        assert found[f"{stage} saved apart"] == 0.0, "from_pretrained reads what save_model wrote"
        assert stage == "on disk" or all(row["zeropp/traffic_bytes"] > 0 for row in found[f"{stage} metrics"])
        assert len(found[f"{stage} metrics"]) == 6
        waited = [row["zeropp/gather_ms"] for row in found[f"{stage} metrics"]]
        assert all(waited) if stage in ("stage 3 gathers", "on disk") else not any(waited), "these come before use"
        disk = [row.get("zeropp/disk_gbps", 0) > 0 for row in found[f"{stage} metrics"]]
        assert disk == [stage == "on disk"] * 6


@pytest.mark.hf_case("resume")
@pytest.mark.parametrize("stage", ["stage 2", "stage 3"])
def test_resume_equals_the_uninterrupted_run_bit_for_bit(stage, answer):
    for found in answer("resume"):
        through, again = found[stage]
        assert len(through) == 6 and through == again
        assert found[f"{stage} weights apart"] == 0.0


@pytest.mark.hf_case("warm_up")
def test_sequence_length_warm_up_equals_batches_cut_by_hand(answer):
    for found in answer("warm_up"):
        assert len(found["by hand"]) == 8 and apart(found["by hand"], found["zeropp"]) < FP32
        assert found["again"] == found["zeropp"]


@pytest.mark.hf_case("shared_sequences")
def test_ranks_that_share_sequences_train_and_evaluate_as_ranks_that_do_not(answer):
    for found in answer("shared_sequences"):
        assert len(found["stock"]) == 8 and "eval_correct" in found["stock"][-1]
        for stage in ("stage 2", "stage 3"):
            assert apart(found["stock"], found[stage]) < FP32
        assert apart(found["stock"], found["tensors"]) < FP32
        assert "cp_size: 2; context parallelism is torch's own" in found["cp"] and "CUDA alone" in found["cp"]
        assert "ParallelismConfig.sp_size: 3, of a job of 2 ranks; wanted a divisor" in found["three"]
        assert "average_tokens_across_devices: False" in found["apart"]


@pytest.mark.hf_case("adapters")
@pytest.mark.parametrize("reentrant", [False, True])
def test_lora_over_partitioned_weights_with_checkpointing(reentrant, answer):
    for found in answer("adapters"):
        stock, ours = found[f"reentrant {reentrant}"]
        assert apart(stock, ours) < FP32 and stock[-1]["loss"] != stock[0]["loss"]
        assert found[f"reentrant {reentrant} saved apart"] == 0.0
        assert found["best adapter apart"] == 0.0


@pytest.mark.hf_case("adapters")
def test_adapters_resume_bit_for_bit_and_loaded_ones_train_on(answer):
    for found in answer("adapters"):
        through, again = found["resumed"]
        assert len(through) == 6 and through == again
        stock, ours = found["loaded"]
        assert len(ours) == 2 and apart(stock, ours) < FP32


@pytest.mark.hf_case("accelerate_loop")
@pytest.mark.parametrize("stage", ["stage 1", "stage 3", "on disk"])
def test_a_raw_accelerate_loop_with_two_models(stage, answer):
    for found in answer("accelerate_loop"):
        assert len(found["stock"]) == len(found[stage]) == 6
        for ours, stock in zip(found[stage], found["stock"], strict=True):
            assert ours == pytest.approx(stock, rel=1e-5, abs=FP32)
        assert len(found["stock"][1]) == 4 and found["stock"][-1][0] < found["stock"][0][0] - 0.1
        assert found[f"{stage} again"] == found[stage][-2:] != found[stage][:2]
        assert found[f"{stage} saved apart"] == 0.0
        assert found[f"{stage} after"] == 0.0, "free_memory drops the models from its lists only"
        assert {"zeropp", "zeropp_1", "scheduler.bin"} <= set(found[f"{stage} beside"])


@pytest.mark.hf_case("low_precision")
def test_bf16_is_autocast_unless_the_file_says_otherwise(answer):
    for found in answer("low_precision"):
        # A rounding of 2**-9 relative may fall to the other side after a difference of the last fp32 bit.
        assert apart(found["stock"], found["autocast"]) < 2**-9 * 4
        assert apart(found["stock"], found["pure"]) < 2**-8 * 4


@pytest.mark.hf_case("low_precision")
def test_fp16_scales_its_loss_and_skips_what_overflows(answer):
    for found in answer("low_precision"):
        assert apart(found["plain"], found["half"]) < 2**-11 * 8
        scales, rates = found["scales"], [row["learning_rate"] for row in found["high"]]
        skipped = [row["grad_norm"] == float("inf") for row in found["high"]]
        assert 1 <= sum(skipped) < 6
        assert scales == [2.0**20 / 2 ** sum(skipped[: i + 1]) for i in range(6)]
        for i in range(5):  # a step that is skipped leaves the schedule where it is
            assert (rates[i + 1] == rates[i]) == skipped[i]


@pytest.mark.hf_case("sequences")
def test_seq2seq_evaluates_before_training_and_generates(answer):
    for found in answer("sequences"):
        stock, ours = found["logged"]
        assert apart(stock, ours) < 20 * FP32, "gradient norms of about 30"
        assert found["before"][0] == pytest.approx(found["before"][1], abs=FP32)
        assert found["moved"][0] == found["moved"][1] > 0, "gathered once a call, whatever its length"
        gathered_once, layer_by_layer, alone = found["uneven"]
        assert gathered_once == layer_by_layer == alone
        generated, expected = found["generated"]
        assert generated == expected and len({token for row in generated for token in row}) > 1


@pytest.mark.hf_case("sequences")
@pytest.mark.parametrize("stage", ["stage 1", "stage 2", "on disk"])
def test_seq2seq_predicts_with_generate_at_other_stages(stage, answer):
    for found in answer("sequences"):
        stock, ours = found["others"]["stock"], found["others"][stage]
        assert apart(stock[0], ours[0]) < 20 * FP32, "gradient norms of about 30"
        assert stock[1] == ours[1]


@pytest.mark.hf_case("behind")
def test_a_delayed_update_ends_before_an_evaluation_and_with_the_training(answer):
    for found in answer("behind"):
        during, newest = found["seen"]
        assert during == pytest.approx(newest, abs=FP32) and found["pending"] is False


@pytest.mark.hf_case("other_optimizers")
def test_neftune_draws_the_same_noise(answer):
    for found in answer("other_optimizers"):
        stock, ours = found["noisy"]
        assert apart(stock, ours) < FP32
        assert apart(stock, found["compiled"][0]) > 1e-3, "noise was added"


@pytest.mark.hf_case("other_optimizers")
def test_torchs_own_optimizers_and_label_smoothing(answer):
    for found in answer("other_optimizers"):
        assert apart(*found["sgd"]) < FP32


@pytest.mark.hf_case("other_optimizers")
def test_torch_compile_compiles_the_blocks(answer):
    for found in answer("other_optimizers"):
        assert apart(*found["compiled"]) < FP32
        assert found["graphs"] == ["function"] * 3, "each of the three layers, in place of its method"


@pytest.mark.hf_case("in_slices")
def test_from_pretrained_reads_slices(answer):
    for found in answer("in_slices"):
        assert apart(*found.pop("logged")) < FP32
        assert found.pop("readers") == ["MainThread"], "threads would read ahead, up to the whole model"
        assert len(found) == 3
        for name, (kinds, far) in found.items():
            assert kinds == ["ShardedParameter"], name
            assert far < (FP32 if "llama AutoModelForCausalLM" in name else 1e-30), name


@pytest.mark.hf_case("from_disk")
def test_generate_streams_parameters_from_disk(answer):
    reads = []
    for rank, found in enumerate(answer("from_disk")):
        written, expected = found["generated"]
        assert written == expected and len(written[0]) == 6 + 5 + 4 * rank
        assert found["held"] < 0.2 * found["model"], "small units only: embedding and head are such here"
        reads.append(found["read"])
    assert sum(reads) > 8 * 0.8 * found["model"], (
        "every token reads the model, which ranks share while they go together"
    )


@pytest.mark.hf_case("refusals")
def test_nothing_reads_or_writes_placeholders_in_silence(answer):
    for found in answer("refusals"):
        for way in ("state_dict", "save_pretrained", "deepcopy", "resize"):
            assert "is partitioned over 2 ranks" in found[way], (way, found[way])
        assert "convert the model before zeropp.prepare" in found["to"] or "is partitioned" in found["to"]
        assert "zeropp.save" in found["optimizer"]
        assert "hyperparameter_search is not supported" in found["search"]
        assert "was saved without --zeropp" in found["resume"]
        assert found["files"] == []
