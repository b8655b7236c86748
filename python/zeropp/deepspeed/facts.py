# SPDX-License-Identifier: Apache-2.0
"""Properties of DeepSpeed's engine that scripts read besides training: the file's values, the number of ranks, which features are on.

The names and defaults are those of DeepSpeed 0.19.8's engine. Three tables answer most of them: what the file says (KEYS), what is
always so in zeropp (ALWAYS), and what is an error when it is called (NOT_BUILT).
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeropp.config import Config, nearest
from zeropp.errors import ConfigError
from zeropp.zero.step.optimizer import ZeroOptimizer

logger = logging.getLogger("DeepSpeed")

_LEARNING = "data_efficiency.data_sampling.curriculum_learning"
#: Methods that answer with a key of the file: its path, and DeepSpeed's default.
KEYS: dict[str, tuple[str, Any]] = {
    "activation_checkpointing_config": ("activation_checkpointing", {}),
    "checkpoint_serialization_enabled": ("checkpoint.checkpoint_serialization", True),
    "dataloader_drop_last": ("dataloader_drop_last", False),
    "dump_state": ("dump_state", False),
    "fp16_auto_cast": ("fp16.auto_cast", False),
    "gradient_predivide_factor": ("gradient_predivide_factor", 1.0),
    "is_sanity_checks_enabled": ("zero_optimization.enable_sanity_checks", False),
    "load_universal_checkpoint": ("checkpoint.load_universal", False),
    "log_level": ("log_level", None),
    "loss_scale": ("fp16.loss_scale", 0.0),
    "curriculum_enabled_legacy": ("curriculum_learning.enabled", False),
    "curriculum_learning_config": (_LEARNING, {"enabled": False}),
    "curriculum_learning_enabled": (f"{_LEARNING}.enabled", False),
    "curriculum_params_legacy": ("curriculum_learning", {}),
    "data_efficiency_config": ("data_efficiency", {"enabled": False}),
    "data_efficiency_enabled": ("data_efficiency.enabled", False),
    "data_sampling_config": ("data_efficiency.data_sampling", {"enabled": False}),
    "data_sampling_enabled": ("data_efficiency.data_sampling.enabled", False),
    "pld_params": ("progressive_layer_drop", {}),
    "random_ltd_config": ("data_efficiency.data_routing.random_ltd", {"enabled": False}),
    "random_ltd_enabled": ("data_efficiency.data_routing.random_ltd.enabled", False),
    "managed_gradient_accumulation": ("managed_gradient_accumulation", True),
    "memory_breakdown": ("memory_breakdown", False),
    "optimizer_legacy_fusion": ("optimizer.legacy_fusion", False),
    "optimizer_params": ("optimizer.params", None),
    "scheduler_name": ("scheduler.type", None),
    "scheduler_params": ("scheduler.params", None),
    "sparse_gradients_enabled": ("sparse_gradients", False),
    "use_node_local_storage": ("checkpoint.use_node_local_storage", False),
    "wall_clock_breakdown": ("wall_clock_breakdown", False),
    "zero_allgather_bucket_size": ("zero_optimization.allgather_bucket_size", 500_000_000),
    "zero_allgather_partitions": ("zero_optimization.allgather_partitions", True),
    "zero_allgather_sequential": ("zero_optimization.stage3_allgather_sequential", False),
    "zero_allow_untested_optimizer": ("zero_allow_untested_optimizer", False),
    "zero_compute_grad_norm": ("zero_optimization.compute_grad_norm", True),
    "zero_contiguous_gradients": ("zero_optimization.contiguous_gradients", True),
    "zero_elastic_checkpoint": ("zero_optimization.elastic_checkpoint", False),
    "zero_force_ds_cpu_optimizer": ("zero_force_ds_cpu_optimizer", True),
    "zero_hpz_partition_size": ("zero_optimization.zero_hpz_partition_size", 1),
    "zero_ignore_unused_parameters": ("zero_optimization.ignore_unused_parameters", True),
    "zero_legacy_stage1": ("zero_optimization.legacy_stage1", False),
    "zero_load_from_fp32_weights": ("zero_optimization.load_from_fp32_weights", True),
    "zero_log_trace_cache_warnings": ("zero_optimization.log_trace_cache_warnings", False),
    "zero_max_live_parameters": ("zero_optimization.stage3_max_live_parameters", 1_000_000_000),
    "zero_max_reuse_distance": ("zero_optimization.stage3_max_reuse_distance", 1_000_000_000),
    "zero_model_persistence_threshold": ("zero_optimization.stage3_model_persistence_threshold", sys.maxsize),
    "zero_module_granularity_threshold": ("zero_optimization.stage3_module_granularity_threshold", 0),
    "zero_multi_rank_bucket_allreduce": ("zero_optimization.use_multi_rank_bucket_allreduce", True),
    "zero_offload_optimizer": ("zero_optimization.offload_optimizer", None),
    "zero_offload_param": ("zero_optimization.offload_param", None),
    "zero_param_persistence_threshold": ("zero_optimization.stage3_param_persistence_threshold", 100_000),
    "zero_parameter_alignment": ("zero_optimization.parameter_alignment", False),
    "zero_partial_offload": ("zero_optimization.offload_optimizer.ratio", 1.0),
    "zero_prefetch_bucket_size": ("zero_optimization.stage3_prefetch_bucket_size", 50_000_000),
    "zero_quantized_gradients": ("zero_optimization.zero_quantized_gradients", False),
    "zero_quantized_nontrainable_weights": ("zero_optimization.zero_quantized_nontrainable_weights", False),
    "zero_quantized_weights": ("zero_optimization.zero_quantized_weights", False),
    "zero_reduce_bucket_size": ("zero_optimization.reduce_bucket_size", 500_000_000),
    "zero_reduce_scatter": ("zero_optimization.reduce_scatter", True),
    "zero_round_robin_gradients": ("zero_optimization.round_robin_gradients", False),
    "zero_save_muon_momentum_buffer_in_memory": ("zero_optimization.save_muon_momentum_buffer_in_memory", False),
    "zero_sub_group_size": ("zero_optimization.sub_group_size", 1_000_000_000),
    "bf16_master_weights_and_gradients": ("bf16.bf16_master_weights_and_grads", False),
    "bf16_optimizer_states": ("bf16.bf16_optimizer_states", False),
    "tensor_parallel_config": ("tensor_parallel", {}),
    "torch_autocast_enabled": ("torch_autocast.enabled", False),
}

#: Methods with one answer, because a file that asks for another is refused (deepspeed_keys.REFUSED).
ALWAYS: dict[str, Any] = {
    **dict.fromkeys(
        (
            "amp_enabled", "autotuning_enabled", "autotuning_profile_model_info", "checkpoint_writer_enabled",
            "compile_autosp", "compile_autotp",
            "eigenvalue_enabled", "elasticity_enabled",
            "flops_profiler_enabled", "fp16_master_weights_and_gradients", "graph_harvesting",
            "is_deepcompile_active", "is_deepcompile_enabled", "is_elastic_model_parallel_supported",
            "super_offload",
            "uses_parallelization_pass_only",
        ),
        False,
    ),
    "amp_params": {}, "cpuadam_cores_perc": 0.9,
    "flops_profiler_detailed": True, "flops_profiler_module_depth": -1, "flops_profiler_output_file": None,
    "flops_profiler_profile_step": 1, "flops_profiler_recompute_fwd_factor": 0.0, "flops_profiler_top_modules": 1,
    "autotuning_end_profile_step": 5, "autotuning_metric": "throughput", "autotuning_metric_path": None,
    "autotuning_model_info_path": None, "autotuning_start_profile_step": 3,
    "get_compile_time": [], "get_wall_clock_timers": {}, "mics_shard_size": -1, "postscale_gradients": True,
    "swap_tensor_config": None, "zenflow_config": None, "zero_grad_hooks": True, "zeropp_loco_param": None,
}  # fmt: skip

_UNITS = "gradients are reduced unit by unit while backward runs; zeropp.no_sync(module) holds them back"
_NO_MOE = "experts are partitioned over the ranks as any parameters are, and saved with them"
_COMPILE = "repeated blocks are compiled: block.compile(), or engine.compile()"
#: Methods that raise when they are called: why, and what to use.
NOT_BUILT: dict[str, str] = {
    **dict.fromkeys(("allreduce_and_copy", "allreduce_bucket", "allreduce_no_retain", "buffered_allreduce_fallback"), _UNITS),
    **dict.fromkeys(
        ("sparse_all_gather", "sparse_allreduce", "sparse_allreduce_bucket", "sparse_allreduce_no_retain"),
        "gradients are dense",
    ),
    "all_gather_scalar": "torch.distributed.all_gather_object does it",
    "clip_fp32_gradients": "step() clips by gradient_clipping; optimizer.clip_grad_norm_(max_norm) does it by hand",
    "get_autosp_backend": _COMPILE,
    "get_autotp_backend": _COMPILE,
    "get_deepcompile_backend": _COMPILE,
    "get_deepspeed_compile_backend": _COMPILE,
    "compile_zero_optimization_stage": _COMPILE,
    "register_compile_pass": _COMPILE,
    "get_optimizer_configuration": 'engine.optimizer.param_groups has the values, engine.config["optimizer"] those of the file',
    "load_moe_state_dict": _NO_MOE,
    "print_forward_breakdown": "zeropp.trace writes a timeline of steps",
    "quantize_training": "zeropp has no quantized training",
    "random_ltd_initialize": "zeropp has no random layer-token dropping",
    "coalesce_grad_reduction": "put all backwards of a step but the last one inside zeropp.no_sync(engine.module)",
}  # fmt: skip
_DTYPES = {None: torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_TIME_EPSILON_S = 1e-6


class Monitor:
    """``engine.monitor``: no writer is on, so events go nowhere, as there."""

    enabled = False

    def write_events(self, event_list: Any, flush: bool = True) -> None:
        """Do nothing: nothing is logged by itself; log zeropp.memory() and zeropp.traffic() from the loop."""


class ThroughputTimer:
    """``engine.tput_timer``: samples per second from the third step on, between forward and the end of ``step``."""

    start_step = 2

    def __init__(self, batch_size: int | None) -> None:
        self.batch_size = batch_size or 1
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = 0.0
        self.started = False
        self._since: float | None = None

    def update_epoch_count(self) -> None:
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        self.started = True
        if self.global_step_count >= self.start_step:
            self._since = time.perf_counter()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        if not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        self.global_step_count += bool(global_step)
        if self._since is not None:
            self.total_elapsed_time += time.perf_counter() - self._since

    def avg_samples_per_sec(self) -> float:
        """Minus infinity before the first step that is measured."""
        steps = self.global_step_count - self.start_step
        return self.batch_size * steps / (self.total_elapsed_time + _TIME_EPSILON_S) if steps > 0 else float("-inf")


class Facts(nn.Module):
    """The part of the engine that only answers. Attributes that neither it nor the model has are errors that name both."""

    config: Mapping[str, Any]
    zeropp_config: Config
    module: nn.Module
    optimizer: Any
    client_optimizer: Any
    _micro_batch: int | None
    tput_timer: ThroughputTimer

    def _begin_facts(self) -> None:
        """Set what is constant from the start."""
        self.global_rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = self.dp_world_size = self.seq_dp_world_size = (
            dist.get_world_size() if dist.is_initialized() else 1
        )
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.mp_world_size = self.sequence_parallel_size = 1
        self.data_parallel_group = self.seq_data_parallel_group = dist.group.WORLD if dist.is_initialized() else None
        self.dist_backend = dist.get_backend() if dist.is_initialized() else None
        self.mesh_device: Any = None
        self.mpu = self.quantizer = self.eigenvalue = self.progressive_layer_drop = None
        self.pipeline_parallelism = self.zenflow = self.use_ds_comm = False
        self.moe_layers: list[Any] = [one for one in self.modules() if hasattr(one, "expert_group_name")]
        self.has_moe_layers = bool(self.moe_layers)
        self.num_experts = [int(one.num_experts) for one in self.moe_layers]
        self.gate_modules: list[Any] = [one.deepspeed_moe.gate for one in self.moe_layers]
        self.sparse_tensor_module_names: set[str] = set()
        self.monitor = Monitor()
        self.batches = self.world_size
        """How many different batches the ranks have at one time."""

    def _take_mesh(self, mesh: Any) -> None:
        """Set what a mesh of data, sequences, tensors and stages changes."""
        if mesh is None:
            return
        sizes = dict(zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True))
        self.mesh_device, self.batches = mesh, int(sizes["dp"])
        self.sequence_parallel_size = int(sizes.get("sp", 1))
        self.mp_world_size, self.dp_world_size = int(sizes.get("tp", 1)), self.batches
        self.seq_dp_world_size = self.batches * self.sequence_parallel_size
        self.data_parallel_group = mesh["dp"].get_group()
        self.pipeline_parallelism = "pp" in sizes

    def _data_place(self) -> tuple[int, int]:
        """Return (over how many ranks a dataset is shared out, the place of this one). Those of one sequence have samples of their own,
        as in DeepSpeed, whose adapter of loaders goes through them in turn."""
        mesh = self.mesh_device
        if mesh is None or self.sequence_parallel_size > 1:
            return self.world_size, self.global_rank
        return self.batches, mesh.get_local_rank("dp")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            pass
        module = self.__dict__["_modules"].get("module") if "_modules" in self.__dict__ else None
        try:
            if module is not None:
                return getattr(module, name)
        except AttributeError:
            if hasattr(type(module), name):  # a property of the model that failed: its own words say more
                raise
        own = "a module that is being built" if module is None else f"the model {type(module).__name__}"
        known = (*(one for one in dir(type(self)) if not one.startswith("_")), *(self.__dict__))
        raise AttributeError(
            f"{type(self).__name__} of zeropp has no attribute '{name}'; nor has {own}{nearest(name, known)}"
        )

    @property
    def gradient_average(self) -> bool:
        return bool(self.said("gradient_allreduce_op", "mean") == "mean")

    def said(self, path: str, default: Any = None) -> Any:
        """Return the value of a key of the file, by its path; the default where it is left out or "auto"."""
        value: Any = self.config
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return default if value is None or value == "auto" else value

    # -- ranks and batches ---------------------------------------------------------------------------------------------

    def get_data_parallel_rank(self) -> int:
        return self._of_mesh("dp", self.global_rank)

    def get_tensor_parallel_rank(self) -> int:
        return self._of_mesh("tp", 0)

    def get_model_parallel_rank(self) -> int:
        return self._of_mesh("tp", 0)

    def autotp_size(self) -> int:
        return self.mp_world_size if self.mp_world_size > 1 else 0

    def get_sequence_parallel_group(self) -> Any:
        return None if self.sequence_parallel_size == 1 else self.mesh_device["sp"].get_group()

    def _of_mesh(self, name: str, otherwise: int) -> int:
        """Return this rank's place in a dimension of the mesh, or the number that it has without one."""
        mesh = self.mesh_device
        return otherwise if mesh is None or name not in mesh.mesh_dim_names else int(mesh.get_local_rank(name))

    def gradient_accumulation_steps(self) -> int:
        return self.zeropp_config.accumulate

    def train_micro_batch_size_per_gpu(self) -> int | None:
        return self._micro_batch

    def train_batch_size(self) -> int | None:
        micro = self._micro_batch
        return None if micro is None else micro * self.zeropp_config.accumulate * self.batches

    def get_batch_info(self) -> tuple[Any, Any, Any]:
        """Return the three methods, as DeepSpeed does, not their values."""
        return self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps

    # -- precision -----------------------------------------------------------------------------------------------------

    def fp16_enabled(self) -> bool:
        return self.zeropp_config.dtype_name == "fp16"

    def bfloat16_enabled(self) -> bool:
        return self.zeropp_config.dtype_name == "bf16"

    def dynamic_loss_scale(self) -> bool:
        return bool(self.loss_scale() == 0)

    def initial_dynamic_scale(self) -> int:
        return int(2 ** self.said("fp16.initial_scale_power", 16))

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": self.said("fp16.loss_scale_window", 1000),
            "delayed_shift": 1,  # the scale goes down at the first overflow, whatever fp16.hysteresis says
            "consecutive_hysteresis": False,
            "min_scale": self.said("fp16.min_loss_scale", 1),
        }

    @property
    def communication_data_type(self) -> torch.dtype:
        said = self.said("communication_data_type")
        return _DTYPES[said if said in _DTYPES and said is not None else self.zeropp_config.dtype_name]

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the types of the model and of accumulated gradients."""
        accumulated = self.said("data_types.grad_accum_dtype")
        low = _DTYPES[self.zeropp_config.dtype_name]
        return low, _DTYPES.get(accumulated, torch.float32) if accumulated else low

    def torch_autocast_dtype(self) -> torch.dtype | None:
        if not self.torch_autocast_enabled():
            return None
        name = str(self.said("torch_autocast.dtype", "bfloat16")).removeprefix("torch.")
        return torch.float16 if name in ("fp16", "float16", "half") else torch.bfloat16

    def torch_autocast_lower_precision_safe_modules(self) -> list[str]:
        kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
        usual = [f"{one.__module__}.{one.__qualname__}" for one in kinds]
        return list(self.said("torch_autocast.lower_precision_safe_modules", usual))

    # -- ZeRO ----------------------------------------------------------------------------------------------------------

    def zero_optimization(self) -> bool:
        return self.zeropp_config.stage > 0

    def zero_optimization_stage(self) -> int:
        return self.zeropp_config.stage

    def zero_optimization_partition_gradients(self) -> bool:
        return self.zeropp_config.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return self.zeropp_config.stage >= 3

    def is_first_weights_partition_group(self) -> bool:
        return self.zero_optimization_partition_weights()

    def zero_overlap_comm(self) -> bool:
        return bool(self.said("zero_optimization.overlap_comm", self.zeropp_config.stage == 3))

    def zero_use_cpu_optimizer(self) -> bool:
        """Return whether states are offloaded from a device: to host memory or to disks."""
        return self.said("zero_optimization.offload_optimizer.device") in ("cpu", "nvme") or self.zero_cpu_offload()

    def zero_cpu_offload(self) -> bool:
        old = self.said("zero_optimization.cpu_offload", False) is True
        return old or self.said("zero_optimization.offload_optimizer.device") == "cpu"

    def zero_nvme_offload_optimizer(self) -> bool:
        return bool(self.said("zero_optimization.offload_optimizer.device") == "nvme")

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Always possible; it costs rank 0 the whole model in host memory."""
        return True

    def gradient_clipping(self) -> float:
        return self.zeropp_config.clip or 0.0

    # -- the optimizer -------------------------------------------------------------------------------------------------

    def optimizer_name(self) -> str | None:
        """Return the name of the given class, else that of the file: in small letters where it is one of DeepSpeed's own."""
        if self.client_optimizer is not None:
            return (
                type(self.client_optimizer)
                .__mro__[2 if isinstance(self.client_optimizer, ZeroOptimizer) else 0]
                .__name__
            )
        name = self.said("optimizer.type")
        return name.lower() if isinstance(name, str) and name.lower() in _OWN else name

    def _of_groups(self, key: str) -> list[Any]:
        return [] if self.optimizer is None else [group.get(key, 0.0) for group in self.optimizer.param_groups]

    def get_lr(self) -> list[float]:
        return [float(one) for one in self._of_groups("lr")]

    def set_lr(self, lr: float) -> None:
        """Set the rate of every group; a scheduler may change it again."""
        for group in self.optimizer.param_groups if self.optimizer is not None else ():
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """Return ``betas`` of each group, or ``momentum`` where that is what they have."""
        groups = () if self.optimizer is None else self.optimizer.param_groups
        return self._of_groups("momentum" if any("momentum" in one for one in groups) else "betas")

    def get_type(self) -> list[Any]:
        return self._of_groups("type")

    # -- the rest ------------------------------------------------------------------------------------------------------

    def aio_config(self) -> dict[str, Any]:
        usual = {"block_size": 1 << 20, "queue_depth": 8, "intra_op_parallelism": 1, "single_submit": False}
        return {**usual, "overlap_events": True, "use_gds": False, **self.said("aio", {})}

    def checkpoint_tag_validation_enabled(self) -> bool:
        return str(self.said("checkpoint.tag_validation", "Warn")).lower() != "ignore"

    def checkpoint_tag_validation_fail(self) -> bool:
        """Ranks that save under different tags are an error, always."""
        return self.checkpoint_tag_validation_enabled()

    def collect_python_gc(self) -> int:
        return gc.collect()

    @staticmethod
    def is_map_style_dataset(obj: Any) -> bool:
        return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")

    @staticmethod
    def is_iterable_style_dataset(obj: Any) -> bool:
        return isinstance(obj, torch.utils.data.IterableDataset)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device


_OWN = ("adam", "adamw", "adagrad", "lamb", "lion", "muadam", "muadamw", "musgd", "muon")


def _from_file(path: str, default: Any) -> Callable[[Facts], Any]:
    def answer(self: Facts) -> Any:
        return self.said(path, default)

    answer.__doc__ = f"``{path}`` of the file."
    return answer


def _always(value: Any) -> Callable[[Facts], Any]:
    def answer(self: Facts) -> Any:
        return type(value)(value) if isinstance(value, (dict, list)) else value

    return answer


def _raises(name: str, why: str) -> Callable[..., Any]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError(f"engine.{name}: DeepSpeed's {name} is not there in zeropp: {why}")

    refuse.__doc__ = f"Raises: {why}."
    return refuse


for _name, (_path, _default) in KEYS.items():
    setattr(Facts, _name, _from_file(_path, _default))
for _name, _value in ALWAYS.items():
    setattr(Facts, _name, _always(_value))
for _name, _why in NOT_BUILT.items():
    setattr(Facts, _name, _raises(_name, _why))
