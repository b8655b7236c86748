# SPDX-License-Identifier: Apache-2.0
"""Config.from_json: zeropp's own keys, DeepSpeed's files, and the path in every refusal."""

from __future__ import annotations

import json
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zeropp.config import Comm, Config, LossScale, Offload, Precision, Tier
from zeropp.errors import ConfigError

# What the Hugging Face documentation recommends for stage 3, offload left out.
HUGGING_FACE = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "wall_clock_breakdown": False,
}


def sentence(source, **keywords) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.from_json(source, **keywords)
    return str(caught.value)


def test_own_keys_from_mapping_text_and_file(tmp_path):
    keys = {
        "stage": 2,
        "precision": "bf16",
        "clip": 1.0,
        "accumulate": 4,
        "units": ["Block"],
        "offload": {"params": {}},
    }
    wanted = Config(stage=2, precision="bf16", clip=1.0, accumulate=4, units=("Block",))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(keys))
    for source in (keys, json.dumps(keys), path, str(path)):
        assert Config.from_json(source) == wanted
    assert Config.from_json({"precision": {"param": "bf16"}}).precision == Precision(param="bf16")
    assert Config.from_json({}) == Config()


def test_the_loss_scale_of_fp16():
    dynamic = {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 500, "min_loss_scale": 4}
    found = Config.from_json({"fp16": dynamic})
    assert found.precision == "fp16" and found.loss_scale == LossScale(init=4096.0, interval=500, least=4.0)
    assert Config.from_json({"fp16": {"enabled": True}}).loss_scale == LossScale(interval=1000)
    fixed = Config.from_json({"fp16": {"enabled": True, "loss_scale": 128, "auto_cast": False}})
    assert fixed.loss_scale == LossScale(init=128.0, least=128.0, dynamic=False)
    with pytest.warns(UserWarning, match="fp16.hysteresis: 2 changes nothing"):
        Config.from_json({"fp16": {"enabled": True, "hysteresis": 2}})
    assert Config.from_json({"fp16": {"enabled": False, "loss_scale": 128}}).precision is None


def test_hugging_face_file_is_read_as_it_is():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Config.from_json(HUGGING_FACE) == Config(stage=3)


def test_deepspeed_keys_map():
    keys = {
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "stage3_prefetch_bucket_size": 1000},
        "bf16": {"enabled": True},
        "gradient_clipping": 0.5,
        "gradient_accumulation_steps": 8,
    }
    assert Config.from_json(keys) == Config(
        stage=2, precision="bf16", clip=0.5, accumulate=8, bucket_bytes=1_000_000_000, prefetch=2000
    )


def test_deepspeed_offload_maps():
    section = {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}}
    section["offload_optimizer"] = {"device": "nvme", "nvme_path": "/x", "ratio": 0.5, "buffer_count": 4}
    read = Config.from_json({"zero_optimization": section})
    assert read.offload == Offload(params="cpu", optimizer=Tier("nvme", path="/x", fraction=0.5))
    section["offload_optimizer"] = {"device": "none", "nvme_path": "/x"}
    assert Config.from_json({"zero_optimization": section}).offload == Offload(params="cpu")
    section["offload_param"] = {"device": "nvme", "nvme_path": ["/y", "/z"], "buffer_count": 5}
    several = Offload(params=Tier("nvme", path=["/y", "/z"]))
    assert Config.from_json({"zero_optimization": section}).offload == several
    section["offload_param"]["nvme_path"] = ["/y", "/y"]
    assert sentence({"zero_optimization": section}).startswith(
        "zero_optimization.offload_param.nvme_path: ['/y', '/y']"
    )
    native = {"offload": {"params": {"kind": "nvme", "path": ["/y", "/z"]}, "optimizer": "nvme", "path": ["/a", "/b"]}}
    read = Config.from_json(json.dumps(native)).offload
    assert read == Offload(params=Tier("nvme", path=("/y", "/z")), optimizer=Tier("nvme", path=("/a", "/b")))
    section["offload_param"] = {"device": "nvme", "nvme_path": "/y", "buffer_count": 5}
    assert Config.from_json({"zero_optimization": section}).offload == Offload(params="nvme", path="/y")


def test_buffers_of_deepspeed_offload_change_nothing():
    """A tuned file stays valid, and a warning says that the values are not needed."""
    usual = {"buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9, "pin_memory": True}
    section = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/y", **usual}}
    wanted = Config.from_json({"zero_optimization": section})
    section["offload_param"].update(buffer_count=8, buffer_size=7e9, max_in_cpu="auto")
    section["offload_optimizer"] = {"device": "nvme", "nvme_path": "/y", "buffer_count": 6}
    with pytest.warns(UserWarning, match="changes nothing in zeropp") as told:
        read = Config.from_json({"zero_optimization": section})
    assert read.offload == Offload(params="nvme", optimizer="nvme", path="/y") and read.stage == wanted.stage
    assert [str(one.message).split(":")[0].removeprefix("zero_optimization.") for one in told] == [
        "offload_param.buffer_count", "offload_param.buffer_size", "offload_optimizer.buffer_count",
    ]  # fmt: skip


def test_zeropp_of_deepspeed_maps(monkeypatch):
    section = {
        "stage": 3,
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
        "zero_hpz_partition_size": 4,
    }
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    wanted = Comm(params="int8", grads="int4", secondary_shard="host")
    assert Config.from_json({"zero_optimization": section}).comm == wanted
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert Config.from_json({"zero_optimization": section}).comm == wanted
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert "give 2, the ranks of this host" in sentence({"zero_optimization": section})


def test_names_of_fields_are_taken_as_deepspeed_takes_them():
    with pytest.warns(UserWarning, match="stage3_max_live_parameters"):
        keys = {"stage": 3, "prefetch_bucket_size": 1000, "max_live_parameters": 1e9}
        assert Config.from_json({"zero_optimization": keys}).prefetch == 4000


def test_sections_that_ask_for_nothing_are_taken():
    off = {
        "compile": {"deepcompile": False, "free_activation": True}, "tensor_parallel": {"autotp_size": 1}, "nebula": {"enabled": False},
        "data_types": {"grad_accum_dtype": None, "keep_in_fp32_modules": "auto"}, "checkpoint": {"tag_validation": "Warn"},
        "activation_checkpointing": {"partition_activations": False, "number_checkpoints": 4}, "dataloader_drop_last": True,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Config.from_json({"zero_optimization": {"stage": 2}, **off}) == Config(stage=2, clip=1.0)


def test_deepspeed_defaults_hold():
    """DeepSpeed 0.19: stage 0 by default, gradients clipped at 1.0 by default; 0 disables clipping."""
    assert Config.from_json({"bf16": {"enabled": False}}) == Config(stage=0, clip=1.0)
    assert Config.from_json({"zero_optimization": {"stage": 1}, "gradient_clipping": 0}).clip is None


def test_layout_hints_are_said_to_change_nothing():
    with pytest.warns(UserWarning, match=r"zero_optimization\.stage3_max_live_parameters: .* changes nothing"):
        Config.from_json({"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1e9}})


@pytest.mark.parametrize(
    "keys, starts, says",
    [
        ({"stag": 3}, "stag:", "did you mean 'stage'?"),
        ({"zero_optimisation": {}}, "zero_optimisation:", "did you mean 'zero_optimization'?"),
        ({"zero_optimization": {"stge": 3}}, "zero_optimization.stge:", "did you mean 'stage'?"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage:", "0, 1, 2 or 3"),
        ({"zero_optimization": 3}, "zero_optimization:", "a JSON object"),
        (
            {"zero_optimization": {"load_from_fp32_weights": False}},
            "zero_optimization.load_from_fp32_weights:",
            "not supported",
        ),
        ({"zero_optimization": {"reduce_bucket_size": -1}}, "zero_optimization.reduce_bucket_size:", "elements >= 0"),
        ({"zero_optimization": {"sub_group_size": "big"}}, "zero_optimization.sub_group_size:", "elements >= 0"),
        (
            {"zero_optimization": {"stage": 2, "zero_quantized_weights": True}},
            "zero_optimization.zero_quantized_weights:",
            "does not combine with zero_optimization.stage=2",
        ),
        (
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 0}},
            "zero_optimization.zero_hpz_partition_size:",
            "the number of ranks on a host",
        ),
        ({"zero_optimization": {"mics_shard_size": 8}}, "zero_optimization.mics_shard_size:", "secondary_shard"),
        ({"aio": {"block_sise": 1}}, "aio.block_sise:", "did you mean 'block_size'?"),
        ({"data_types": {"param_dtype": "bf16"}}, "data_types.param_dtype:", "Precision("),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel:", "stage 3 shards"),
        ({"compile": {"deepcompile": True}}, "compile:", "block.compile()"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op:", "averaged"),
        (
            {"zero_optimization": {"stage": 3, "leaf_module": {"clases": []}}},
            "zero_optimization.leaf_module.clases:",
            "'classes'",
        ),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}},
            "zero_optimization.offload_optimizer.nvme_path:",
            "a folder on a local disk",
        ),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "buffer_size": 1}}},
            "zero_optimization.offload_optimizer.buffer_size:",
            "did you mean 'buffer_count'?",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "buffer_count": -1}}},
            "zero_optimization.offload_param.buffer_count:",
            ">= 0",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "disk"}}},
            "zero_optimization.offload_optimizer.device:",
            "nvme",
        ),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled:", "switch one of them off"),
        ({"fp16": {"enabled": True, "loss_scael": 0}}, "fp16.loss_scael:", "did you mean 'loss_scale'?"),
        ({"fp16": {"enabled": True, "loss_scale": -1}}, "fp16.loss_scale:", "a number >= 0"),
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "fp16.fp16_master", "not supported"),
        ({"bf16": {"enabled": "yes"}}, "bf16.enabled:", 'true, false or "auto"'),
        ({"bf16": {"enable": True}}, "bf16.enable:", "did you mean 'enabled'?"),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": 1}}, "bf16.bf16_optimizer_states:", "true, false or"),
        ({"communication_data_type": "fp8"}, "communication_data_type:", "one of 'fp32', 'bf16', 'fp16'"),
        ({"data_types": {"grad_acc_dtype": "fp32"}}, "data_types.grad_acc_dtype:", "did you mean 'grad_accum_dtype'?"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype:", "sums are in fp32"),
        ({"torch_autocast": {"enabled": True, "dtype": "int8"}}, "torch_autocast.dtype:", "'bfloat16' or 'float16'"),
        ({"torch_autocast": {"enable": True}}, "torch_autocast.enable:", "did you mean 'enabled'?"),
        (
            {"torch_autocast": {"enabled": True}, "bf16": {"enabled": True}},
            "torch_autocast.enabled:",
            "one of them off",
        ),
        ({"optimizer": {"type": "AdamW"}}, "optimizer:", "hand it to zeropp.prepare"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler:", "hand it to zeropp.prepare"),
        (
            {"activation_checkpointing": {"cpu_checkpointing": True}},
            "activation_checkpointing.cpu_checkpointing:",
            "torch.utils.checkpoint",
        ),
        ({"flops_profiler": {"enabled": True}}, "flops_profiler:", '"enabled": false'),
        ({"gradient_clipping": -1}, "gradient_clipping:", ">= 0"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps:", ">= 1"),
        ({"stage": 3, "zero_optimization": {"stage": 3}}, "zero_optimization.stage:", "give one of the two"),
        ({"offload": {"params": {"kind": "nvm"}}}, "offload.params.kind:", "did you mean 'nvme'?"),
        ({"offload": {"parms": {}}}, "offload.parms:", "did you mean 'params'?"),
        ({"comm": {"grads": "int9"}}, "comm.grads:", "one of 'exact'"),
        ({"accumulate": "4"}, "accumulate:", "whole number"),
    ],
)
def test_a_refusal_names_the_path(keys, starts, says):
    text = sentence(keys)
    assert text.startswith(starts) and says in text, text


def test_a_hint_that_changes_nothing_warns():
    for keys, said in (
        ({"aio": {"queue_depth": 32}}, "aio: .* bench-io"),
        ({"zero_optimization": {"stage": 3, "leaf_module": {"classes": ["Block"]}}}, "leaf_module: .* Config.units"),
    ):
        with pytest.warns(UserWarning, match=said):
            Config.from_json(keys)
    with pytest.warns(UserWarning, match="steps_per_print: 10 changes nothing in zeropp"):
        assert Config.from_json({"steps_per_print": 10, "zero_optimization": {"stage": 1}}).stage == 1
    keys = {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}
    with pytest.warns(UserWarning, match="partitioned from stage 3 on"):
        assert Config.from_json(keys).offload.params.kind == "device"


def test_files_that_are_not_configurations(tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text('{"stage": 3,\n "clip" 1}')
    assert "line 2, column 9" in sentence(broken) and str(broken) in sentence(broken)
    assert "No such file" in sentence(tmp_path / "none.json")
    broken.write_text("[1]")
    assert "wanted one JSON object" in sentence(broken)
    assert sentence('{"stage": 3, "stage": 2}').startswith("stage: stands twice")
    assert "Config.from_json: config is 3, an int; wanted a zeropp.Config(...), a dict" in sentence(3)


@pytest.mark.parametrize("batch", [0, -4, 1.5, True])
def test_batch_sizes_are_checked(batch):
    assert sentence({"train_batch_size": batch}).startswith("train_batch_size:")


def test_batch_that_does_not_fit():
    keys = {"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    assert "30 does not fit train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 2 x 2 ranks" in sentence(
        keys, ranks=2
    )


@given(
    micro=st.integers(1, 64),
    steps=st.integers(1, 64),
    ranks=st.integers(1, 64),
    left_out=st.sampled_from([None, 0, 1, 2]),
)
def test_batch_arithmetic_gives_the_accumulation_of_deepspeed(micro, steps, ranks, left_out):
    keys = [
        ("train_batch_size", micro * steps * ranks),
        ("train_micro_batch_size_per_gpu", micro),
        ("gradient_accumulation_steps", steps),
    ]
    given_keys = dict(pair for index, pair in enumerate(keys) if index != left_out)
    assert Config.from_json(given_keys, ranks=ranks).accumulate == steps


def test_types_by_purpose_of_a_deepspeed_file():
    def read(**keys):
        return Config.from_json(keys).precision

    bf16 = {"enabled": True}
    assert read(bf16=bf16, communication_data_type="fp32") == Precision(param="bf16", reduce="fp32")
    assert read(bf16=bf16, data_types={"grad_accum_dtype": "fp32"}) == Precision(param="bf16", accumulate="fp32")
    assert read(bf16={**bf16, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}) == Precision(
        param="bf16", master="bf16", state="bf16"
    )
    assert read(torch_autocast={"enabled": True}) == Precision(compute="bf16")
    assert read(torch_autocast={"enabled": True, "dtype": "torch.float16"}) == Precision(compute="fp16")
    assert read(torch_autocast={"enabled": False}, communication_data_type=None, bf16={"enabled": False}) is None
    assert read(fp16={"enabled": True, "loss_scale": 128}, communication_data_type="fp32") == Precision(
        param="fp16", reduce="fp32"
    )
    with pytest.warns(UserWarning, match="lower_precision_safe_modules changes nothing"):
        read(torch_autocast={"enabled": True, "lower_precision_safe_modules": ["torch.nn.Linear"]})
