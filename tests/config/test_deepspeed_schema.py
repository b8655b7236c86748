# SPDX-License-Identifier: Apache-2.0
"""Every key that DeepSpeed reads is honoured, mapped, or refused by a sentence: none is unknown here.

The names are those of DeepSpeed 0.19.8. Where it is installed they are compared with those that its own code asks for.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import warnings

import pytest
import warm
from zeropp.cli import main
from zeropp.config import Config
from zeropp.errors import ConfigError

REMOVED = (
    "amp compression_training curriculum_learning eigenvalue elasticity graph_harvesting nebula progressive_layer_drop "
    "quantize_training sparse_attention sparse_gradients"
).split()
TOP = (
    "activation_checkpointing aio autotuning bf16 bfloat16 checkpoint comet comms_logger communication_data_type compile "
    "csv_monitor data_efficiency data_types dataloader_drop_last datastates_ckpt disable_allgather disable_python_gc dump_state "
    "expert_parallel flops_profiler fp16 gradient_accumulation_steps gradient_allreduce_op gradient_clipping "
    "gradient_predivide_factor hybrid_engine log_level managed_gradient_accumulation memory_breakdown optimizer pipeline "
    "prescale_gradients scheduler seq_parallel_communication_data_type sequence_parallel_size steps_per_print tensor_parallel "
    "tensorboard timers torch_autocast train_batch_size train_micro_batch_size_per_gpu use_data_before_expert_parallelism "
    "vocabulary_size wall_clock_breakdown wandb weight_quantization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer "
    "zero_optimization"
).split()
SECTIONS = {
    "zero_optimization": (
        "allgather_bucket_size allgather_partitions compute_grad_norm contiguous_gradients cpu_offload cpu_offload_param "
        "cpu_offload_use_pin_memory elastic_checkpoint enable_sanity_checks ignore_unused_parameters leaf_module legacy_stage1 "
        "load_from_fp32_weights log_trace_cache_warnings memory_efficient_linear offload_optimizer offload_param overlap_comm "
        "override_module_apply parameter_alignment pipeline_loading_checkpoint reduce_bucket_size reduce_scatter "
        "round_robin_gradients save_muon_momentum_buffer_in_memory stage stage3_allgather_sequential "
        "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save stage3_max_live_parameters "
        "stage3_max_reuse_distance stage3_model_persistence_threshold stage3_module_granularity_threshold "
        "stage3_param_persistence_threshold stage3_prefetch_bucket_size stage3_use_all_reduce_for_fetch_params sub_group_size "
        "use_multi_rank_bucket_allreduce zenflow zero_hpz_partition_size zero_quantized_gradients "
        "zero_quantized_nontrainable_weights zero_quantized_weights"
    ).split(),
    "zero_optimization.offload_param": "buffer_count buffer_size device max_in_cpu nvme_path pin_memory".split(),
    "zero_optimization.offload_optimizer": (
        "buffer_count cpuadam_cores_perc device fast_init nvme_path pin_memory pipeline_read pipeline_write ratio super_offload"
    ).split(),
    "fp16": (
        "auto_cast consecutive_hysteresis enabled fp16_master_weights_and_grads hysteresis initial_scale_power loss_scale "
        "loss_scale_window min_loss_scale"
    ).split(),
    "bf16": "bf16_master_weights_and_grads bf16_optimizer_states check_grad_overflow enabled immediate_grad_update".split(),
}
GONE = ("grad_hooks", "mics_hierarchical_params_gather", "mics_shard_size", "zeropp_loco_param")
VALUES = (True, False, 3, 0, "bf16", {"enabled": True}, {"x": 1})


def answers(path: str, keys: dict) -> str:
    """How a configuration is taken; a refusal names the key, and says more than that it is unknown."""
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        try:
            Config.from_json(keys, ranks=3)
        except ConfigError as error:
            said = str(error)
            assert not said.startswith(f"{path}: unknown"), said
            assert said.startswith(path.split(".")[0]), said
            assert len(said) > len(path) + 30 or said.startswith(f"{path}.x: unknown"), said
            return "refused"
    return "taken"


@pytest.mark.parametrize("name", [*TOP, *REMOVED])
def test_a_key_of_the_first_level(name):
    found = [answers(name, {name: value}) for value in VALUES]
    assert name not in REMOVED or "refused" in found


@pytest.mark.parametrize("path", [f"{section}.{name}" for section, names in SECTIONS.items() for name in names])
def test_a_key_of_a_section(path):
    *sections, name = path.split(".")
    for value in VALUES:
        inner = {name: value}
        if sections[-1].startswith("offload"):
            inner = {"device": "cpu", **inner}
        elif sections[0] != "zero_optimization":
            inner = {"enabled": True, **inner}
        if len(sections) == 2:
            inner = {"stage": 3, sections[1]: inner}
        elif sections[0] == "zero_optimization":
            inner = {"stage": 3, **inner}
        answers(path, {sections[0]: inner})


@pytest.mark.parametrize("name", GONE)
def test_a_key_that_deepspeed_refuses_too(name):
    assert answers(f"zero_optimization.{name}", {"zero_optimization": {"stage": 3, name: 8}}) == "refused"


ASKED = """
import json, sys
from deepspeed.runtime import config, precision_config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig

asked = set()
class Keys(list):
    def __contains__(self, name):
        asked.add(name)
        return super().__contains__(name)
class Asked(dict):
    def get(self, name, default=None):
        asked.add(name)
        return super().get(name, default)
    def __contains__(self, name):
        asked.add(name)
        return super().__contains__(name)
    def keys(self):
        return Keys(super().keys())
config.DeepSpeedConfig(Asked(train_batch_size=1))
found = {"": sorted(asked)}
for path, model in (
    ("zero_optimization", DeepSpeedZeroConfig), ("zero_optimization.offload_param", DeepSpeedZeroOffloadParamConfig),
    ("zero_optimization.offload_optimizer", DeepSpeedZeroOffloadOptimizerConfig), ("fp16", precision_config.DeepSpeedFP16Config),
    ("bf16", precision_config.DeepSpeedBF16Config),
):
    found[path] = sorted(field.alias or name for name, field in model.model_fields.items())
print("found " + json.dumps(found))
"""


def is_installed(name: str) -> bool:
    """A folder of tests may have the name of a package too: it has no file of its own."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("deepspeed"), reason="deepspeed is not installed: pip install zeropp[bench]")
def test_the_names_are_those_that_deepspeed_asks_for():
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(one for one in sys.path if one)}
    done = warm.launch(1, "-c", ASKED, env=environment, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith("found ")).removeprefix("found ")
    )
    # The last one is asked for where a process group runs.
    assert {*found.pop(""), "sequence_parallel_size"} == {*TOP, *REMOVED}
    assert found == SECTIONS


def fields(keys: dict, **more: object) -> Config:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return Config.from_json(keys, **more)


def test_what_deepspeed_has_replaced_means_what_it_meant():
    """cpu_offload and its like, the oldest form of zero_optimization, and long names of types."""
    new = fields(
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}
    )
    assert new.offload.optimizer.kind == new.offload.params.kind == "cpu"
    old = {"stage": 3, "cpu_offload": True, "cpu_offload_param": True, "cpu_offload_use_pin_memory": True}
    assert fields({"zero_optimization": old}) == new
    assert (
        fields({"zero_optimization": {**old, "cpu_offload": False, "cpu_offload_param": None}}).offload
        == Config().offload
    )
    assert fields({"zero_optimization": True}).stage == 1 and fields({"zero_optimization": False}).stage == 0
    kept = {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}
    assert fields({"zero_optimization": kept, "bfloat16": {"enabled": True}}).precision == "bf16"
    short, long = (
        fields({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": name}}).precision
        for name in ("fp32", "float32")
    )
    assert short == long and long.accumulate == "fp32"
    both = {"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}
    with pytest.raises(
        ConfigError, match=r"zero_optimization.cpu_offload: True does not combine with .*offload_optimizer="
    ):
        fields({"zero_optimization": both})


@pytest.mark.parametrize(
    "name", ["wall_clock_breakdown", "prescale_gradients", "zero_optimization.pipeline_loading_checkpoint"]
)
def test_what_only_prints_or_moves_bytes_is_taken_with_a_warning(name):
    section, _, key = name.rpartition(".")
    keys = {"zero_optimization": {"stage": 2, **({key: True} if section else {})}, **({} if section else {key: True})}
    with pytest.warns(UserWarning, match=f"{name}: True changes nothing in zeropp: "):
        assert Config.from_json(keys).stage == 2


def test_what_changes_only_how_gradients_travel():
    with pytest.warns(
        UserWarning, match=r"reduce_scatter: False changes nothing in zeropp: each rank gets the same sums"
    ):
        Config.from_json({"zero_optimization": {"stage": 2, "reduce_scatter": False}})
    assert not fields({"zero_optimization": {"stage": 2}}).custom_optimizer
    for said in (True, 1):
        assert fields({"zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": said}).custom_optimizer


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op: 'sum' .* zeropp.initialize sums them"),
        ({"zero_optimization": {"stage": 2, "ignore_unused_parameters": False}}, "zeropp.initialize refuses them"),
    ],
)
def test_what_only_the_engine_follows(keys, said, capsys):
    """Refused by prepare with the way out, and explained by the command."""
    with pytest.raises(ConfigError, match=said):
        Config.from_json(keys)
    assert main(["config", json.dumps(keys)]) == 0
    shown = capsys.readouterr().out
    assert "zeropp.initialize" in shown and "refused" not in shown
