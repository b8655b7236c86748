# SPDX-License-Identifier: Apache-2.0
"""Every module and name that is answered for deepspeed, in tables: where the implementation is (:data:`WORKS`), plain values
(constants.py), and what is to be used in place of a feature that is not built (:data:`LATER`). The modules are made from them when
they are imported, and their names when they are read.

A name that stands in no table is an AttributeError or ImportError with the nearest one; docs/from-deepspeed.md has a list by project.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from zeropp.deepspeed.names.constants import CONSTANTS
from zeropp.deepspeed.names.later import later

_LOGGING = (
    "log_dist log_dist_once print_dist print_json_dist print_configuration get_dist_msg warning_once log_levels LoggerFactory "
    "get_log_level_from_string set_log_level_from_string get_current_level should_log_le"
)
_SAFE = " ".join(
    [f"safe_{verb}_{where}_{what}" for verb in ("get", "set") for where in ("full", "local")
     for what in ("fp32_param", "grad", "optimizer_state")]
)  # fmt: skip
_COMM = (
    "broadcast broadcast_object_list all_gather all_gather_object all_gather_into_tensor all_gather_coalesced allgather_fn all_reduce "
    "all_reduce_coalesced inference_all_reduce reduce reduce_scatter reduce_scatter_tensor reduce_scatter_fn all_to_all all_to_all_single "
    "gather scatter send recv isend irecv barrier monitored_barrier get_rank get_world_size get_local_rank get_global_rank "
    "get_world_group get_all_ranks_from_group new_group destroy_process_group is_available configure initialize_mesh_device ReduceOp "
    "ProcessGroup has_all_gather_into_tensor has_reduce_scatter_tensor has_all_reduce_coalesced has_coalescing_manager has_comm_data "
    "in_aml in_aws_sm in_dlts"
)
_ZERO = "Init GatheredParameters register_external_parameter unregister_external_parameter"
_LEAF = (
    "set_z3_leaf_modules unset_z3_leaf_modules get_z3_leaf_modules z3_leaf_module z3_leaf_parameter set_z3_leaf_module "
    "set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix"
)
_ESTIMATES = "needs needs_all_live needs_all_cold"
_BUILDERS = (
    "AsyncIOBuilder GDSBuilder CPUAdamBuilder FusedAdamBuilder CPUAdagradBuilder CPULionBuilder FusedLionBuilder FusedLambBuilder "
    "CCLCommBuilder DeepCompileBuilder EvoformerAttnBuilder FPQuantizerBuilder InferenceBuilder InferenceCoreBuilder "
    "InferenceCutlassBuilder NotImplementedBuilder PinMemoryBuilder QuantizerBuilder RaggedOpsBuilder RaggedUtilsBuilder "
    "RandomLTDBuilder ShareMemCommBuilder SparseAttnBuilder SpatialInferenceBuilder StochasticTransformerBuilder TransformerBuilder "
    "UtilsBuilder OpBuilder"
)
_GROUPS = (
    "mpu mesh_device _get_zero_param_intra_parallel_group _zero_param_parallel_is_initialized _get_expert_parallel_group_dict "
    "_get_expert_data_parallel_group_dict _get_expert_model_parallel_world_size _get_broadcast_src_rank "
)
_RANKS = (
    "_get_data_parallel_group get_data_parallel_group _get_data_parallel_world_size get_data_parallel_world_size "
    "_get_data_parallel_rank get_data_parallel_rank _get_data_parallel_group_ranks _get_sequence_data_parallel_group "
    "_get_sequence_data_parallel_world_size _get_sequence_data_parallel_rank _get_sequence_parallel_group "
    "_get_sequence_parallel_world_size _get_sequence_parallel_rank get_tensor_model_parallel_group "
    "get_tensor_model_parallel_world_size get_tensor_model_parallel_rank"
)
_MODEL = "get_model_parallel_group get_model_parallel_world_size _get_model_parallel_world_size get_model_parallel_rank"
_CHECKPOINTING = "configure is_configured checkpoint non_reentrant_checkpoint partition_activations_in_checkpoint set_num_layers reset"


def _estimates(stage: int) -> str:
    return " ".join(f"estimate_zero{stage}_model_states_mem_{one}" for one in _ESTIMATES.split())


_SPARSITY = (
    "SparsityConfig DenseSparsityConfig FixedSparsityConfig VariableSparsityConfig BigBirdSparsityConfig "
    "BSLongformerSparsityConfig LocalSlidingWindowSparsityConfig SparseSelfAttention"
)

#: Module: the file here that has the names, and the names; ``theirs=ours`` where they differ.
WORKS: dict[str, dict[str, str]] = {
    "deepspeed": {
        "comm": "init_distributed",
        "modules": "initialize add_config_arguments DeepSpeedEngine DeepSpeedOptimizer PipelineEngine DualPipeVEngine=PipelineEngine "
        "__zeropp__",
        "zeropp.deepspeed.pipeline": "PipelineModule DualPipeVModule",
        "accelerator": "get_accelerator",
        "logs": "logger log_dist",
        "helpers": "OnDevice DeepSpeedConfigError is_compile_supported",
    },
    "deepspeed.accelerator": {"accelerator": "get_accelerator set_accelerator is_current_accelerator_supported DeepSpeedAccelerator"},
    "deepspeed.accelerator.abstract_accelerator": {"accelerator": "DeepSpeedAccelerator"},
    "deepspeed.accelerator.cpu_accelerator": {"accelerator": "CPU_Accelerator"},
    "deepspeed.accelerator.cuda_accelerator": {"accelerator": "CUDA_Accelerator"},
    "deepspeed.accelerator.real_accelerator": {"accelerator": "get_accelerator set_accelerator is_current_accelerator_supported"},
    "deepspeed.checkpoint": {"helpers": "enable_universal_checkpoint"},
    "deepspeed.checkpoint.utils": {"modules": "clone_tensors_for_torch_save"},
    "deepspeed.checkpointing": {"checkpointing": _CHECKPOINTING},
    "deepspeed.comm": {"comm": f"{_COMM} init_distributed is_initialized"},
    "deepspeed.compression.helper": {"helpers": "recursive_getattr recursive_setattr convert_conv1d_to_linear"},
    "deepspeed.constants": {"helpers": "default_pg_timeout"},
    "deepspeed.module_inject.layers": {"helpers": "GatherReplacedLayerParams"},
    "deepspeed.module_inject.policy": {"helpers": "transpose"},
    "deepspeed.moe.layer": {"zeropp.deepspeed.moe": "MoE"},
    "deepspeed.moe.utils": {
        "zeropp.deepspeed.moe": "is_moe_param is_moe_param_group has_moe_layers configure_moe_param_groups "
        "split_params_into_different_moe_groups_for_optimizer split_params_into_shared_and_expert_params "
        "split_params_grads_into_shared_and_expert_params",
    },
    "deepspeed.ops": {"later": "__compatible_ops__=compatible_ops __installed_ops__=installed_ops"},
    "deepspeed.ops.adagrad": {"optimizers": "DeepSpeedCPUAdagrad"},
    "deepspeed.ops.adam": {"optimizers": "DeepSpeedCPUAdam FusedAdam"},
    "deepspeed.ops.aio": {"later": "AsyncIOBuilder"},
    "deepspeed.ops.lamb": {"optimizers": "FusedLamb"},
    "deepspeed.ops.lion": {"optimizers": "DeepSpeedCPULion FusedLion"},
    "deepspeed.ops.op_builder": {"later": _BUILDERS},
    "deepspeed.ops.op_builder.all_ops": {"later": "ALL_OPS"},
    "deepspeed.ops.sparse_attention": {"zeropp.deepspeed.sparse_attention": _SPARSITY},
    "deepspeed.ops.sparse_attention.sparse_self_attention": {"zeropp.deepspeed.sparse_attention": "SparseSelfAttention"},
    "deepspeed.ops.sparse_attention.sparsity_config": {
        "zeropp.deepspeed.sparse_attention": _SPARSITY.removesuffix(" SparseSelfAttention")
    },
    "deepspeed.runtime.base_optimizer": {"modules": "DeepSpeedOptimizer"},
    "deepspeed.runtime.config": {"helpers": "DtypeEnum DeepSpeedConfigError get_gradient_clipping"},
    "deepspeed.runtime.dataloader": {"helpers": "RepeatingLoader"},
    "deepspeed.runtime.engine": {"modules": "DeepSpeedEngine"},
    "deepspeed.runtime.fp16.onebit.adam": {"optimizers": "OnebitAdam"},
    "deepspeed.runtime.fp16.onebit.lamb": {"optimizers": "OnebitLamb"},
    "deepspeed.runtime.fp16.onebit.zoadam": {"optimizers": "ZeroOneAdam"},
    "deepspeed.runtime.data_pipeline.data_routing.helper": {
        "zeropp.deepspeed.random_ltd": "convert_to_random_ltd save_without_random_ltd remove_random_ltd_state_dict"
    },
    "deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr": {
        "zeropp.deepspeed.dynamic_batching": "get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed VariableBatchSizeLR",
    },
    "deepspeed.runtime.data_pipeline.data_sampling.data_analyzer": {"zeropp.deepspeed.data_analyzer": "DataAnalyzer"},
    "deepspeed.runtime.lr_schedules": {"zeropp.deepspeed.schedules": "LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR"},
    "deepspeed.pipe": {"zeropp.deepspeed.pipeline": "PipelineModule DualPipeVModule LayerSpec TiedLayerSpec"},
    "deepspeed.runtime.pipe": {"zeropp.deepspeed.pipeline": "PipelineModule LayerSpec TiedLayerSpec ProcessTopology"},
    "deepspeed.runtime.pipe.dualpipev": {"zeropp.deepspeed.pipeline": "DualPipeVModule", "modules": "DualPipeVEngine=PipelineEngine"},
    "deepspeed.runtime.pipe.engine": {"modules": "PipelineEngine"},
    "deepspeed.runtime.pipe.module": {"zeropp.deepspeed.pipeline": "PipelineModule LayerSpec TiedLayerSpec"},
    "deepspeed.runtime.pipe.topology": {
        "zeropp.deepspeed.pipeline": "PipeDataParallelTopology PipeModelDataParallelTopology ProcessTopology"
    },
    "deepspeed.runtime.progressive_layer_drop": {"zeropp.deepspeed.efficiency": "ProgressiveLayerDrop"},
    "deepspeed.runtime.sequence_parallel.parallel_state_sp": {
        "zeropp.deepspeed.dimensions": "initialize_sequence_parallel get_sequence_parallel_group get_sequence_parallel_world_size "
        "get_sequence_parallel_rank get_sequence_data_parallel_group get_sequence_data_parallel_world_size "
        "get_sequence_data_parallel_rank"
    },
    "deepspeed.runtime.sequence_parallel.ulysses_sp": {
        "zeropp.deepspeed.dimensions": "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter"
    },
    "deepspeed.runtime.utils": {
        "helpers": "DummyOptim noop_context noop_decorator ensure_directory_exists set_random_seed is_model_parallel_parameter "
        "bwc_tensor_model_parallel_rank copy_to_device move_to_device clip_grad_norm_ get_global_norm get_ma_status empty_cache "
        "see_memory_usage",
        "accelerator": "get_accelerator",
    },
    "deepspeed.runtime.zero": {"zero": f"{_ZERO} ZeroParamStatus", "helpers": "unwrap_model_for_generation"},
    "deepspeed.runtime.zero.config": {"helpers": "ZeroStageEnum OffloadDeviceEnum"},
    "deepspeed.runtime.zero.offload_config": {"helpers": "OffloadDeviceEnum OffloadStateTypeEnum"},
    "deepspeed.runtime.zero.partition_parameters": {
        "zero": f"{_ZERO} ZeroParamStatus ZeroParamType PartitionedParamStatus",
        "modules": "zero_wrapper_for_fp_tensor_constructor=_wrapper",
        "helpers": "is_zero_param",
        "accelerator": "get_accelerator",
        "torch": "_orig_torch_arange=arange _orig_torch_empty=empty _orig_torch_zeros=zeros _orig_torch_ones=ones _orig_torch_full=full",
    },
    "deepspeed.runtime.zero.stage3": {
        "offline": f"{_estimates(3)} model_to_params",
        "helpers": "unwrap_model_for_generation",
    },
    "deepspeed.runtime.zero.stage_1_and_2": {"offline": _estimates(2)},
    "deepspeed.runtime.zero.utils": {"helpers": "ZeRORuntimeException"},
    "deepspeed.sequence.layer": {"zeropp.deepspeed.dimensions": "DistributedAttention"},
    "deepspeed.utils": {
        "comm": "is_initialized",
        "modules": _SAFE,
        "zero": _LEAF,
        "logs": "logger log_dist log_dist_once set_log_level_from_string",
        "helpers": "instrument_w_nvtx RepeatingLoader OnDevice get_caller_func",
    },
    "deepspeed.utils.comms_logging": {"helpers": "get_caller_func"},
    "deepspeed.utils.groups": {
        "helpers": _GROUPS,
        "zeropp.deepspeed.dimensions": " ".join(
            [f"{name}={name.removeprefix('_')}" for name in _RANKS.split()]
            + [f"{name}={name.removeprefix('_').replace('model', 'tensor_model')}" for name in _MODEL.split()]
        ),
    },
    "deepspeed.utils.init_on_device": {"helpers": "OnDevice"},
    "deepspeed.utils.logging": {"logs": f"logger {_LOGGING}"},
    "deepspeed.utils.nvtx": {"helpers": "instrument_w_nvtx"},
    "deepspeed.utils.tensor_fragment": {"modules": _SAFE},
    "deepspeed.utils.timer": {"helpers": "NoopTimer"},
    "deepspeed.utils.torch": {"helpers": "required_torch_version is_functorch_transforming"},
    "deepspeed.utils.z3_leaf_module": {"zero": _LEAF},
    "deepspeed.utils.zero_to_fp32": {
        "offline": "get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint get_model_state_file=_no_such_file "
        "convert_zero_checkpoint_to_fp32_state_dict get_optim_files=_no_such_file",
    },
}  # fmt: skip

#: Module: another one that has the same names.
ALIASES = {
    "deepspeed.comm.comm": "deepspeed.comm",
    "deepspeed.ops.adam.cpu_adam": "deepspeed.ops.adam",
    "deepspeed.ops.adam.fused_adam": "deepspeed.ops.adam",
    "deepspeed.runtime.activation_checkpointing.checkpointing": "deepspeed.checkpointing",
    "deepspeed.zero": "deepspeed.runtime.zero",
}

_EXPERTS = "use deepspeed.moe.layer.MoE, or zeropp.moe.MoE"
_INFERENCE = "call the model itself; zeropp.prepare(model, None, config) evaluates one that is larger than memory"
_SAMPLING = "give deepspeed.initialize a loader, or training_data, of your own"
_COMPRESSION = "train without compression"
_OPTIMIZER = "ask the optimizer that deepspeed.initialize returns"
_SPARSE = (
    "use deepspeed.ops.sparse_attention.SparseSelfAttention, or zeropp.nn.sparsify_attention for a Hugging Face model"
)
_ULYSSES = "use UlyssesSPAttentionHF, and zeropp.nn.tile_sequence(model) for its tiles"
_TENSOR = 'remove "tensor_parallel" from the configuration'
_COMPILE = "use torch.compile, or engine.compile()"
_CHECKPOINTS = "engine.save_checkpoint writes zeropp's format; python -m zeropp export reads it"
_LOADABLE = "engine.save_checkpoint writes zeropp's format, which any number of ranks loads"

#: What to use instead, and the names by module.
LATER: tuple[tuple[str, dict[str, str]], ...] = (
    (_EXPERTS, {
        "deepspeed.moe.sharded_moe": "MOELayer TopKGate", "deepspeed.moe.experts": "Experts",
        "deepspeed.utils.groups": "_get_expert_broadcast_src_rank _get_expert_data_parallel_group _get_expert_data_parallel_rank "
        "_get_expert_parallel_group _get_expert_parallel_rank _get_expert_parallel_world_size _get_local_all_to_all_group "
        "_get_max_expert_parallel_group _get_max_expert_size_name _create_expert_and_data_parallel",
    }),
    ("zeropp.parallel.pipeline runs torch's schedules", {"deepspeed.runtime.pipe.topology": "PipelineParallelGrid"}),
    (_INFERENCE, {
        "deepspeed": "init_inference InferenceEngine DeepSpeedInferenceConfig DeepSpeedHybridEngine",
        "deepspeed.inference": "DeepSpeedTPConfig RaggedInferenceEngineConfig InferenceEngineV2",
        "deepspeed.inference.config": "DeepSpeedInferenceConfig", "deepspeed.inference.engine": "InferenceEngine",
        "deepspeed.inference.v2.ragged": "DSStateManagerConfig", "deepspeed.runtime.hybrid_engine": "DeepSpeedHybridEngine",
        "deepspeed.model_implementations": "DeepSpeedTransformerInference",
    }),
    ("use torch.nn.TransformerEncoderLayer", {
        "deepspeed": "DeepSpeedTransformerConfig DeepSpeedTransformerLayer replace_transformer_layer revert_transformer_layer",
        "deepspeed.ops.transformer": "DeepSpeedTransformerConfig DeepSpeedTransformerLayer",
        "deepspeed.module_inject": "replace_transformer_layer revert_transformer_layer",
        "deepspeed.module_inject.replace_module": "replace_transformer_layer revert_transformer_layer",
        "deepspeed.module_inject.replace_policy": "HFGPT2LayerPolicy HFBertLayerPolicy",
    }),
    (_TENSOR, {"deepspeed": "set_autotp_mode tp_model_init", "deepspeed.module_inject.layers": "LinearLayer LinearAllreduce",
               "deepspeed.runtime.domino.transformer": "DominoTransformer"}),
    (_ULYSSES, {"deepspeed.sequence.fpdt_layer": "FPDT_Attention",
                "deepspeed.runtime.sequence_parallel.ulysses_sp": "TiledMLP SequenceTiledCompute TiledFusedLogitsLoss"}),
    (_SPARSE, {"deepspeed.ops.sparse_attention": "BertSparseSelfAttention SparseAttentionUtils"}),
    (_COMPILE, {
        "deepspeed.compile.passes.offload_adam_states": "move_opt_states move_opt_states_sync offload_adam_states_for_init",
        "deepspeed.compile.passes.prefetch": "schedule_prefetch", "deepspeed.compile.passes.selective_gather": "selective_gather",
        "deepspeed.compile.passes.sp_compile": "prepare_autosp_inputs", "deepspeed.compile.passes.zero3_compile": "add_z3_gather_release",
    }),
    (_COMPRESSION, {
        "deepspeed.compression": "compression_scheduler", "deepspeed.compression.compress": "init_compression redundancy_clean",
        "deepspeed.compression.helper": "rewrite_optimizer_step", "deepspeed.runtime.quantize": "Quantizer",
        "deepspeed.runtime.eigenvalue": "Eigenvalue",
    }),
    (_SAMPLING, {
        "deepspeed.runtime.data_pipeline.curriculum_scheduler": "CurriculumScheduler",
        "deepspeed.runtime.data_pipeline.data_routing.basic_layer": "RandomLayerTokenDrop",
        "deepspeed.runtime.data_pipeline.data_routing.scheduler": "RandomLTDScheduler",
        "deepspeed.runtime.data_pipeline.data_sampling.data_sampler": "DeepSpeedDataSampler",
        "deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset": "MMapIndexedDataset MMapIndexedDatasetBuilder",
        "deepspeed": "DeepSpeedDataLoader", "deepspeed.runtime.dataloader": "DeepSpeedDataLoader",
    }),
    (_OPTIMIZER, {
        "deepspeed.runtime": "ZeROOptimizer", "deepspeed.runtime.base_optimizer": "ZeROOptimizer",
        "deepspeed.runtime.bf16_optimizer": "BF16_Optimizer",
        "deepspeed.runtime.fp16.fused_optimizer": "FP16_Optimizer", "deepspeed.runtime.fp16.unfused_optimizer": "FP16_UnfusedOptimizer",
        "deepspeed.runtime.fp16.loss_scaler": "CreateLossScaler LossScaler DynamicLossScaler",
        "deepspeed.runtime.zero.mics": "MiCS_Init MiCS_Optimizer", "deepspeed.runtime.zero.parameter_offload": "DeepSpeedZeRoOffload",
        "deepspeed.runtime.zero.stage3": "DeepSpeedZeroOptimizer_Stage3", "deepspeed.runtime.zero.stage_1_and_2": "DeepSpeedZeroOptimizer",
        "deepspeed.runtime.zero.utils": "is_zero_supported_optimizer", "deepspeed.runtime.sparse_tensor": "SparseTensor",
        "deepspeed.runtime.utils": "align_dense_tensors all_gather_dp_groups clip_tensors_by_global_norm get_global_norm_of_tensors "
        "graph_process PartitionedTensor CheckOverflow get_grad_norm",
        "deepspeed.utils": "fragment_address link_hp_params lazy_init_hp_params_optimizer_state",
        "deepspeed.utils.debug": "debug_extract_module_and_param_names debug_param2name",
    }),
    (_CHECKPOINTS, {
        "deepspeed.checkpoint": "DeepSpeedCheckpoint",
        "deepspeed.checkpoint.deepspeed_checkpoint": "DeepSpeedCheckpoint",
        "deepspeed.runtime.checkpoint_engine.nebula_checkpoint_engine": "NebulaCheckpointEngine",
        "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine": "TorchCheckpointEngine",
        "deepspeed.runtime.state_dict_factory": "SDLoaderFactory",
    }),
    ("use zeropp.aio.Engine", {"deepspeed.io": "FastFileWriter FastFileWriterConfig MockFileWriter PyFileWriter"}),
    ("zeropp.Config.from_json reads the file", {
        "deepspeed": "DeepSpeedConfig add_tuning_arguments", "deepspeed.runtime.config": "DeepSpeedConfig",
        "deepspeed.runtime.zero.config": "DeepSpeedZeroConfig", "deepspeed.runtime.lr_schedules": "add_tuning_arguments",
    }),
    ("say train_batch_size yourself; docs/elastic.md tells how the number of ranks may change",
     {"deepspeed.elasticity": "compute_elastic_config elasticity_enabled"}),
    ("use torch.utils.flop_counter.FlopCounterMode", {
        "deepspeed.profiling.flops_profiler": "get_model_profile FlopsProfiler",
        "deepspeed.profiling.flops_profiler.profiler": "get_model_profile FlopsProfiler",
    }),
    ("write to your tracker in the loop; zeropp.trace and zeropp.traffic have the figures", {
        "deepspeed.monitor.monitor": "MonitorMaster Monitor", "deepspeed.utils.timer": "SynchronizedWallClockTimer ThroughputTimer",
        "deepspeed.comm": "log_summary reset_log get_logged_comm_ops get_comm_operation_count TorchBackend mpi_discovery "
        "enable_symm_mem_for_group",
    }),
    ("start the script with torchrun", {"deepspeed.launcher.runner": "main", "deepspeed.utils.numa": "get_numactl_cmd",
                                        "deepspeed.utils": "get_numactl_cmd"}),
    (
        _LOADABLE,
        {
            "deepspeed.checkpoint": "ZeROCheckpoint get_model_3d_descriptor model_3d_desc",
            "deepspeed.checkpoint.ds_to_universal": "_aggregate_autoep_zero12_metadata _group_per_tp_shapes merge_tp_slices main "
            "_validate_autotp_conversion_support",
            "deepspeed.checkpoint.universal_checkpoint": "SubparamShape _get_param_uc_restore_meta _resolve_autotp_partition "
            "load_hp_checkpoint_state",
            "deepspeed.checkpoint.utils": "get_model_ckpt_name_for_rank",
            "deepspeed.runtime.engine": "_checkpoint_parallel_metadata",
        },
    ),
    (
        "zeropp.Config.from_json reads the file",
        {
            "deepspeed.runtime.zero.config": "DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig",
            "deepspeed.runtime.zero.offload_config": "DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig",
        },
    ),
    (
        "zeropp's units are gathered by themselves",
        {
            "deepspeed.runtime.zero.linear": "LinearFunctionForZeroStage3 zero3_linear_wrap LinearModuleForZeroStage3",
            "deepspeed.runtime.zero.parameter_offload": "ZeROOrderedDict ensure_zero_ordered_dict",
            "deepspeed.runtime.zero.partition_parameters": "CUDAQuantizer InsertPostInitMethodToModuleSubClasses zero3_linear_wrap "
            "MultipleAllGatherHandles _contradicting_single_rank_pg_error get_allgather_dtype",
            "deepspeed.runtime.torch_autocast": "get_comm_dtype has_comm_dtype",
        },
    ),
    ("zeropp.memory(model) tells where states are", {"deepspeed.runtime.zero.offload_states": "get_state_devices"}),
    ("use zeropp.set_full for each parameter", {"deepspeed.utils": "safe_update_full_grad_vectorized"}),
    ("use zeropp.nn.TiledLinear", {"deepspeed.runtime.zero.tiling": "TiledLinear TiledLinearReturnBias"}),
    (_TENSOR, {"deepspeed.module_inject.tp_shard": "get_shard_size_list"}),
    ("ranks talk over torch.distributed, or over zeropp's own backend", {"deepspeed.runtime.comm.nccl": "NcclBackend"}),
)  # fmt: skip


def _rows() -> dict[str, dict[str, tuple[str, str]]]:
    """Module: name: (kind, what): ("here", "file:attribute"), ("later", what to use instead) or ("value", "")."""
    found: dict[str, dict[str, tuple[str, str]]] = {}

    def put(module: str, name: str, row: tuple[str, str]) -> None:
        parts = module.split(".")
        for length in range(1, len(parts) + 1):
            found.setdefault(".".join(parts[:length]), {})
        found[module][name] = row

    for instead, modules in LATER:
        for module, names in modules.items():
            for name in names.split():
                put(module, name, ("later", instead))
    for module, values in CONSTANTS.items():
        for name in values:
            put(module, name, ("value", ""))
    for module, homes in WORKS.items():
        for home, names in homes.items():
            for entry in names.split():
                theirs, _, ours = entry.partition("=")
                put(module, theirs, ("here", f"{home}:{ours or theirs}"))
    for alias, module in ALIASES.items():
        for name, row in found[module].items():
            put(alias, name, row)
    return found


#: Module: its names.
MODULES = _rows()


def _children(module: str) -> list[str]:
    return [name for name in MODULES if name.rpartition(".")[0] == module]


def _home(home: str) -> ModuleType:
    absolute = home == "torch" or home.startswith("zeropp.")
    return importlib.import_module(home if absolute else f"zeropp.deepspeed.names.{home}")


def resolve(module: str, name: str) -> Any:
    """The value of a name.

    Raises:
        AttributeError: it stands in no table.
    """
    kind, what = MODULES[module].get(name, ("", ""))
    if kind == "value":
        return CONSTANTS[ALIASES.get(module, module)][name]
    if kind == "later":
        return later(f"{module}.{name}", what)
    if kind == "here":
        home, _, attribute = what.partition(":")
        return getattr(_home(home), attribute)
    if f"{module}.{name}" in MODULES:
        return importlib.import_module(f"{module}.{name}")
    raise AttributeError(missing(f"{module}.{name}"))


def raises(full_name: str) -> bool:
    """True if a name, written with its module, stands for a feature that is not built."""
    if full_name.startswith("get_accelerator()"):
        return False
    module, name = full_name, ""
    while module and module not in MODULES:
        module, _, name = module.rpartition(".")
    kind, what = MODULES[module].get(name, ("", ""))
    return kind == "later" or (what.startswith("later:") and name.endswith("Builder"))


def fill(module: ModuleType) -> None:
    """Make a new module answer its names, each when it is first read."""
    name = module.__name__

    def read(attribute: str) -> Any:
        if attribute.startswith("__") and attribute not in MODULES[name]:
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        value = resolve(name, attribute)
        setattr(module, attribute, value)
        return value

    names = sorted({*MODULES[name], *(child.rpartition(".")[2] for child in _children(name))})
    module.__dict__.update(
        __path__=[],
        __doc__="Answered by zeropp (zeropp.deepspeed.names).",
        __all__=[one for one in MODULES[name] if not one.startswith("__")],
        __getattr__=read,
        __dir__=lambda: names,
    )


def missing(full_name: str, known: Iterable[str] | None = None) -> str:
    """Return the message about a name that stands in no table."""
    parent, _, name = full_name.rpartition(".")
    while known is None and parent and parent not in MODULES:
        parent, _, name = parent.rpartition(".")
    names = (
        [*MODULES.get(parent, ()), *(child.rpartition(".")[2] for child in _children(parent))]
        if known is None
        else known
    )
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    elsewhere = [module for module in MODULES if name in MODULES[module]]
    hint = f"; did you mean {parent}.{close[0]}" if close else ""
    if not close and elsewhere:
        hint = f"; {elsewhere[0]}.{name} is there"
    return f"{full_name}: zeropp stands for deepspeed in this process, and has no such name{hint}; docs/from-deepspeed.md lists the names"


__all__ = ["ALIASES", "LATER", "MODULES", "WORKS", "fill", "missing", "raises", "resolve"]
