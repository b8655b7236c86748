# SPDX-License-Identifier: Apache-2.0
"""Properties of DeepSpeed's engine that scripts read, and its keys, optimizers and names: one rank, in this process."""

from __future__ import annotations

import importlib.util
import json
import os
import sys

import pytest
import torch
import warm
import zeropp
from torch import nn
from zeropp.deepspeed.names import optimizers, zero
from zeropp.deepspeed.names.modules import initialize

SGD = {"type": "SGD", "params": {"lr": 0.1}}
KEYS = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0,
    "optimizer": SGD,
    "zero_optimization": {"stage": 2},
}
# The public names of DeepSpeedEngine in DeepSpeed 0.19.8 that torch's Module has not, in its order.
NAMES = """
    aio_config all_gather_scalar allreduce_and_copy allreduce_bucket allreduce_gradients allreduce_no_retain autotp_size
    autotuning_enabled autotuning_end_profile_step autotuning_metric autotuning_metric_path autotuning_model_info_path
    autotuning_profile_model_info autotuning_start_profile_step backward bf16_master_weights_and_gradients bf16_optimizer_states
    bfloat16_enabled buffered_allreduce_fallback checkpoint_serialization_enabled checkpoint_tag_validation_enabled
    checkpoint_tag_validation_fail checkpoint_writer_enabled clip_fp32_gradients coalesce_grad_reduction collect_python_gc
    communication_data_type compile_autosp compile_autotp compile_zero_optimization_stage cpuadam_cores_perc
    curriculum_learning_config curriculum_learning_enabled data_efficiency_config data_efficiency_enabled data_sampling_config
    data_sampling_enabled dataloader_drop_last deepspeed_io destroy dump_state dynamic_loss_scale dynamic_loss_scale_args
    empty_partition_cache flops_profiler_detailed flops_profiler_enabled flops_profiler_module_depth flops_profiler_output_file
    flops_profiler_profile_step flops_profiler_recompute_fwd_factor flops_profiler_top_modules fp16_auto_cast fp16_enabled
    fp16_master_weights_and_gradients get_autosp_backend get_autotp_backend get_batch_info get_compile_time get_data_parallel_rank
    get_data_types get_deepcompile_backend get_deepspeed_compile_backend get_global_grad_norm get_lr get_model_parallel_rank get_mom
    get_optimizer_configuration get_sequence_parallel_group get_tensor_parallel_rank get_type get_wall_clock_timers
    gradient_accumulation_steps gradient_clipping gradient_predivide_factor initial_dynamic_scale is_compiled is_deepcompile_active
    is_deepcompile_enabled is_first_weights_partition_group is_gradient_accumulation_boundary is_iterable_style_dataset
    is_map_style_dataset is_sanity_checks_enabled load_checkpoint load_module_state_dict load_moe_state_dict
    load_universal_checkpoint log_level loss_scale managed_gradient_accumulation memory_breakdown module_state_dict no_sync
    offload_states optimizer_legacy_fusion optimizer_name optimizer_params postscale_gradients print_forward_breakdown
    random_ltd_config random_ltd_enabled random_ltd_initialize register_compile_pass reload_states save_16bit_model save_checkpoint
    save_fp16_model scale scheduler_name scheduler_params set_custom_curriculum_learning_schedule set_data_post_process_func
    set_gradient_accumulation_boundary set_train_batch_size set_train_micro_batch_size sparse_all_gather sparse_allreduce
    sparse_allreduce_bucket sparse_allreduce_no_retain step steps_per_print super_offload swap_tensor_config tensor_parallel_config
    torch_autocast_dtype torch_autocast_enabled torch_autocast_lower_precision_safe_modules train_batch_size
    train_micro_batch_size_per_gpu use_node_local_storage uses_parallelization_pass_only wall_clock_breakdown was_step_applied
    zenflow_config zero_allgather_bucket_size zero_allgather_partitions zero_allgather_sequential zero_allow_untested_optimizer
    zero_compute_grad_norm zero_contiguous_gradients zero_cpu_offload zero_elastic_checkpoint zero_force_ds_cpu_optimizer
    zero_gather_16bit_weights_on_model_save zero_hpz_partition_size zero_ignore_unused_parameters zero_legacy_stage1
    zero_load_from_fp32_weights zero_log_trace_cache_warnings zero_max_live_parameters zero_max_reuse_distance
    zero_model_persistence_threshold zero_module_granularity_threshold zero_multi_rank_bucket_allreduce zero_nvme_offload_optimizer
    zero_offload_optimizer zero_offload_param zero_optimization zero_optimization_partition_gradients
    zero_optimization_partition_weights zero_optimization_stage zero_overlap_comm zero_param_persistence_threshold
    zero_parameter_alignment zero_partial_offload zero_prefetch_bucket_size zero_quantized_gradients
    zero_quantized_nontrainable_weights zero_quantized_weights zero_reduce_bucket_size zero_reduce_scatter
    zero_round_robin_gradients zero_save_muon_momentum_buffer_in_memory zero_sub_group_size zero_use_cpu_optimizer
    basic_optimizer client_optimizer collate_fn config data_parallel_group device dist_backend dp_world_size global_rank
    global_samples global_steps gradient_average has_moe_layers local_rank lr_scheduler micro_steps module monitor mp_world_size mpu
    optimizer pipeline_parallelism sequence_parallel_size skipped_steps tput_timer training_data training_dataloader world_size
""".split()


@pytest.fixture(scope="module", autouse=True)
def no_group_stays():
    """initialize makes a process group of one rank, as DeepSpeed does; tests of other files find none."""
    environment = dict(os.environ)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))


def engine_for(keys=None, trained=None, **more):
    return initialize(model=trained if trained is not None else model(), config={**KEYS, **(keys or {})}, **more)[0]


def train(engine, steps=1):
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 4)).mean())
        engine.step()


def test_every_public_name_of_the_engine_is_answered():
    engine = engine_for()
    missing = [name for name in NAMES if not hasattr(type(engine), name) and name not in dir(engine)]
    assert not missing
    with pytest.raises(
        zeropp.ConfigError, match=r"engine.sparse_allreduce: .* is not there in zeropp: gradients are dense"
    ):
        engine.sparse_allreduce(None, None)


ASKED = """
import json, torch
from deepspeed.runtime.engine import DeepSpeedEngine
print("found " + json.dumps([n for n in dir(DeepSpeedEngine) if not n.startswith("_") and n not in dir(torch.nn.Module)]))
"""


@pytest.mark.slow
def test_the_names_are_those_of_deepspeeds_own_engine():
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        pytest.skip("deepspeed is not installed: pip install zeropp[bench]")
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(one for one in sys.path if one)}
    done = warm.launch(1, "-c", ASKED, env=environment, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("found "))
    assert set(json.loads(line.removeprefix("found "))) <= set(NAMES)


def test_facts_of_a_file():
    keys = {
        "gradient_accumulation_steps": 4, "gradient_clipping": 0.5, "bf16": {"enabled": True}, "steps_per_print": 7,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 1000, "stage3_max_live_parameters": "auto"},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "betas": [0.8, 0.9]}},
    }  # fmt: skip
    with pytest.warns(UserWarning, match="changes nothing"):
        keys["zero_optimization"]["stage3_max_reuse_distance"] = 5
        engine = engine_for(keys)
    asked = {
        "train_batch_size": 8, "gradient_accumulation_steps": 4, "gradient_clipping": 0.5, "bfloat16_enabled": True,
        "fp16_enabled": False, "zero_optimization": True, "zero_optimization_partition_weights": True, "steps_per_print": 7,
        "zero_reduce_bucket_size": 1000, "zero_max_live_parameters": 10**9, "zero_max_reuse_distance": 5, "zero_overlap_comm": True,
        "optimizer_name": "adamw", "scheduler_name": "WarmupLR", "scheduler_params": {"warmup_num_steps": 5}, "loss_scale": 0.0,
        "dynamic_loss_scale": True, "get_mom": [(0.8, 0.9)], "get_data_types": (torch.bfloat16, torch.bfloat16),
    }  # fmt: skip
    assert {name: getattr(engine, name)() for name in asked} == asked
    assert engine.communication_data_type == torch.bfloat16 and engine.dp_world_size == engine.world_size == 1
    assert (engine.local_rank, engine.global_rank, engine.monitor.enabled) == (0, 0, False)
    engine.set_lr(0.25)
    assert engine.get_lr() == [0.25] == [engine.optimizer.param_groups[0]["lr"]]
    trained = model()
    given = torch.optim.SGD(trained.parameters(), 0.1, momentum=0.9)
    other = engine_for(trained=trained, optimizer=given)
    assert other.optimizer_name() == "SGD" and other.get_mom() == [0.9] and other.client_optimizer is given


def test_steps_are_counted_and_batches_change():
    engine = engine_for({"gradient_accumulation_steps": 2})
    train(engine)
    assert not engine.was_step_applied() and (engine.global_steps, engine.micro_steps) == (0, 1)
    train(engine)
    assert engine.was_step_applied() and (engine.global_steps, engine.global_samples) == (1, 4)
    engine.set_train_batch_size(2)
    assert engine.gradient_accumulation_steps() == 1
    train(engine, 3)
    assert (engine.global_steps, engine.global_samples) == (4, 10)
    with pytest.raises(ValueError, match="3 is not allowed; wanted a multiple of 2"):
        engine.set_train_batch_size(3)
    engine.set_train_micro_batch_size(5)
    assert engine.train_micro_batch_size_per_gpu() == 5 == engine.train_batch_size()
    assert engine.tput_timer.global_step_count == 4 and engine.tput_timer.avg_samples_per_sec() > 0
    assert engine.empty_partition_cache() is None


def test_a_second_engine_takes_over_the_model():
    first = engine_for()
    train(first)
    second = engine_for(trained=first.module)
    train(second)
    assert second.module is first.module and second.optimizer is not first.optimizer
    with pytest.raises(zeropp.Error, match="another optimizer has taken over the model"):
        train(first)


def test_a_name_that_nobody_has_is_the_engines():
    class Odd(nn.Linear):
        @property
        def broken(self):
            return self.nowhere

    engine = engine_for(trained=Odd(4, 1))
    assert engine.in_features == 4
    with pytest.raises(
        AttributeError, match=r"^DeepSpeedEngine of zeropp has no attribute 'gobal_steps'; nor has the model Odd"
    ):
        _ = engine.gobal_steps
    with pytest.raises(AttributeError, match="did you mean 'global_steps'"):
        _ = engine.gobal_steps
    with pytest.raises(AttributeError, match="'Odd' object has no attribute 'broken'"):
        _ = engine.broken


def test_the_callers_own_backward_counts_for_its_part():
    """As in DeepSpeed, loss.backward() is divided by gradient_accumulation_steps, and engine.scale() scales fp16."""
    found = []
    for own in (False, True):
        engine = engine_for({"gradient_accumulation_steps": 2})
        for _ in range(2):
            loss = engine(torch.ones(2, 4)).mean()
            loss.backward() if own else engine.backward(loss)
            engine.step()
        found.append(zeropp.full_state_dict(engine.module))
    assert all(torch.allclose(found[0][name], found[1][name], atol=1e-7) for name in found[0])
    engine = engine_for({"gradient_accumulation_steps": 2})
    engine.backward(engine(torch.ones(2, 4)).mean())
    engine.step()
    engine(torch.ones(2, 4)).mean().backward()
    with pytest.raises(zeropp.Error, match=r"1 of 2 backwards of this step were loss.backward"):
        engine.step()
    half = engine_for({"fp16": {"enabled": True, "initial_scale_power": 4}})
    half.scale(half(torch.ones(2, 4)).float().mean()).backward()
    half.step()
    assert half.was_step_applied() and half.global_steps == 1


def test_gradients_are_summed_where_the_file_says_so():
    engine = engine_for({"gradient_allreduce_op": "sum"})
    assert engine._factor == 1.0 and not engine.gradient_average
    engine._factor = 3.0  # of three ranks
    engine.backward(engine(torch.ones(2, 4)).mean())
    assert torch.allclose(zeropp.get_full(engine.module[1].bias, "grad"), torch.tensor([3.0]))


def test_unused_parameters_are_refused_where_the_file_says_so():
    engine = engine_for({"zero_optimization": {"stage": 2, "ignore_unused_parameters": False}})
    train(engine)
    engine.backward(engine.module[0](torch.ones(2, 4)).mean())
    with pytest.raises(zeropp.Error, match=r"parameter '1.weight' had no part in the losses"):
        engine.step()


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_parameters_stay_out_of_a_checkpoint(stage, tmp_path):
    def made():
        frozen = model()
        frozen[0].requires_grad_(False)
        return frozen

    keys = {"zero_optimization": {"stage": stage}}
    engine = engine_for(keys, made())
    train(engine)
    engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True, client_state={"epoch": 2})
    wanted = zeropp.full_state_dict(engine.module)
    again = engine_for(keys, made())
    with zeropp.gathered(again.module, write=True), torch.no_grad():
        for parameter in again.module.parameters():
            parameter.fill_(5.0)
    folder, client = again.load_checkpoint(tmp_path)
    assert folder.endswith("global_step1") and client == {"epoch": 2} and again.global_samples == 2
    found = zeropp.full_state_dict(again.module)
    assert (found["0.weight"] == 5.0).all() and torch.equal(found["1.weight"], wanted["1.weight"])
    engine.save_16bit_model(tmp_path, "small.bin", exclude_frozen_parameters=True)
    assert sorted(torch.load(tmp_path / "small.bin", weights_only=True)) == ["1.bias", "1.weight"]
    assert engine.save_fp16_model(tmp_path)
    assert torch.equal(torch.load(tmp_path / "pytorch_model.bin", weights_only=True)["0.weight"], wanted["0.weight"])


def test_a_checkpoint_of_a_part_of_the_model(tmp_path):
    """load_module_strict, custom_load_fn, module_state_dict and load_module_state_dict, at the stage that splits parameters."""
    keys = {"zero_optimization": {"stage": 3}}
    engine = engine_for(keys)
    train(engine)
    engine.save_checkpoint(tmp_path, "here")
    larger = nn.Sequential(*model(), nn.Linear(1, 1))
    other = engine_for(keys, larger)
    with pytest.raises(zeropp.CheckpointError, match="2 parameters are not in it"):
        other.load_checkpoint(tmp_path, "here", load_module_only=True)
    other.load_checkpoint(tmp_path, "here", load_module_only=True, load_module_strict=False)
    assert other.global_steps == 0
    values = engine.module_state_dict()
    assert all(torch.equal(value, other.module_state_dict()[name]) for name, value in values.items())

    def double(src, dst):
        dst.load_state_dict({name: 2 * value for name, value in src.items()})

    again = engine_for(keys)
    again.load_checkpoint(tmp_path, "here", custom_load_fn=double)
    assert torch.equal(again.module_state_dict()["0.weight"], 2 * values["0.weight"]) and again.global_steps == 1
    again.load_module_state_dict({"module": values})
    assert torch.equal(again.module_state_dict(prefix="x.")["x.0.weight"], values["0.weight"])
    with pytest.raises(zeropp.ConfigError, match=r'wanted {"module": state dict}'):
        again.load_module_state_dict(values)


def test_parameters_built_under_zero_init_say_so_on_one_rank():
    with zero.Init():
        built = model()
    weight = built[0].weight
    assert weight.ds_status == zero.ZeroParamStatus.NOT_AVAILABLE and (weight.ds_numel, weight.ds_tensor.numel()) == (
        12,
        12,
    )
    with zero.GatheredParameters([weight], modifier_rank=0):
        assert weight.ds_status == zero.ZeroParamStatus.AVAILABLE
    assert weight.ds_status == zero.ZeroParamStatus.NOT_AVAILABLE
    engine_for(trained=built)
    assert not hasattr(weight, "ds_id"), "at stage 2 nothing is split"


def test_leaf_modules_by_class_and_by_name():
    net = model()
    assert zero.set_z3_leaf_modules(net, [nn.Linear]) == [net[0], net[1]] == zero.get_z3_leaf_modules(net)
    assert zero.unset_z3_leaf_modules(net, ["Linear"]) == [net[0], net[1]] and not zero.get_z3_leaf_modules(net)
    assert zero.set_z3_leaf_modules(net, ["torch.nn.modules.container.Sequential"]) == [net] and zero.z3_leaf_module(
        net
    )
    for wanted in ([nn.Conv2d], ["Conv2d"], ["nn.Linear"]):
        with pytest.raises(ValueError, match=r"No modules of type .* found in model Sequential"):
            zero.set_z3_leaf_modules(net, wanted)
        assert zero.set_z3_leaf_modules(net, wanted, raise_if_not_found=False) == []
    assert zero.set_z3_leaf_modules_by_name(net, ["1", "7"], raise_if_not_found=False) == ([net[1]], ["7"])


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("FusedAdam", torch.optim.AdamW), ("DeepSpeedCPUAdam", torch.optim.AdamW), ("DeepSpeedCPUAdagrad", torch.optim.Adagrad),
        ("FusedLion", zeropp.optim.Lion), ("DeepSpeedCPULion", zeropp.optim.Lion), ("FusedLamb", zeropp.optim.LAMB),
        ("OnebitAdam", zeropp.optim.OneBitAdam),
    ],
)  # fmt: skip
def test_optimizers_are_classes(name, base):
    """They can be subclassed, used with isinstance, and stepped as their base class."""
    cls = getattr(optimizers, name)
    derived = type("Mine", (cls,), {})
    found = []
    for kind in (derived, cls):
        trained = model()
        optimizer = kind(trained.parameters(), lr=0.1)
        engine = engine_for(trained=trained, optimizer=optimizer)
        train(engine, 2)
        assert (
            isinstance(engine.optimizer, kind) and isinstance(engine.optimizer, base) and engine.optimizer is optimizer
        )
        found.append(zeropp.full_state_dict(engine.module)["0.weight"])
    assert torch.equal(*found) and not torch.equal(found[0], model()[0].weight)


def test_adam_without_decoupled_decay_is_torchs_adam():
    plain, trained = model(), model()
    rates = {"lr": 0.1, "weight_decay": 0.5}
    engine = engine_for(
        trained=trained, optimizer=optimizers.FusedAdam(params=trained.parameters(), adam_w_mode=False, **rates)
    )
    train(engine)
    optimizer = torch.optim.Adam(plain.parameters(), **rates)
    plain(torch.ones(2, 4)).mean().backward()
    optimizer.step()
    assert torch.allclose(engine.module[0].weight, plain[0].weight, atol=1e-6)


class Signs(torch.optim.Optimizer):
    """An optimizer that zeropp does not know: the sign of a momentum, and a count of its own."""

    def __init__(self, params, speed, shapes=None):
        super().__init__(params, {"lr": speed})
        self.shapes = shapes if shapes is not None else []

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.shapes.append(p.dim())
                state = self.state[p]
                if not state:
                    state["step"], state["held"] = 0, torch.zeros_like(p)
                state["step"] += 1
                state["held"].mul_(0.9).add_(p.grad)
                p.add_(state["held"].sign(), alpha=-group["lr"] / state["step"])


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_optimizer_of_the_users_own(stage, tmp_path):
    """At stage 0 always, where it sees matrices; else under zero_allow_untested_optimizer, where it sees pieces."""
    keys = {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": stage > 0}
    plain, shapes = model(), []
    reference = Signs(plain.parameters(), 0.1)

    def made():
        trained = model()
        return engine_for(keys, trained, optimizer=Signs(trained.parameters(), 0.1, shapes))

    engine = made()
    train(engine, 2)
    engine.save_checkpoint(tmp_path)
    train(engine)
    again = made()
    again.load_checkpoint(tmp_path)
    train(again)
    for _ in range(3):
        reference.zero_grad()
        plain(torch.ones(2, 4)).mean().backward()
        reference.step()
    for one in (engine, again):
        found = zeropp.full_state_dict(one.module)
        assert all(torch.allclose(found[name], value, atol=1e-6) for name, value in plain.state_dict().items())
    assert set(shapes) == ({1, 2} if stage == 0 else {1})
    if stage:
        with pytest.raises(
            zeropp.ConfigError, match=r'optimizer Signs does not combine with .*"zero_allow_untested_optimizer": true'
        ):
            trained = model()
            engine_for(
                {**keys, "zero_allow_untested_optimizer": False}, trained, optimizer=Signs(trained.parameters(), 0.1)
            )
