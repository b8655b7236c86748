# SPDX-License-Identifier: Apache-2.0
"""Plain values that scripts read from deepspeed: keys of its files and of its checkpoints, names of optimizers and timers."""

from __future__ import annotations

import math
from typing import Any

import torch

from zeropp.deepspeed.names.finder import VERSION

_BLOCKS = "mixtral.Mixtral qwen2_moe.Qwen2Moe qwen3_moe.Qwen3Moe".split()


def _block(name: str) -> str:
    package, _, cls = name.partition(".")
    return f"transformers.models.{package}.modeling_{package}.{cls}SparseMoeBlock"


#: Module: name: value.
CONSTANTS: dict[str, dict[str, Any]] = {
    "deepspeed": {
        "__version__": VERSION,
        "version": VERSION,
        **dict(
            zip(
                ("__version_major__", "__version_minor__", "__version_patch__"),
                map(int, VERSION.split(".")),
                strict=True,
            )
        ),
        "__git_hash__": None,
        "__git_branch__": None,
        "TORCH_DISTRIBUTED_DEFAULT_PORT": 29500,
        "HAS_TRITON": False,
        "ADAM_OPTIMIZER": "adam",
        "LAMB_OPTIMIZER": "lamb",
    },
    "deepspeed.checkpoint": {"UNIVERSAL_CHECKPOINT_INFO": "universal_checkpoint_info"},
    "deepspeed.checkpoint.constants": {
        "AUTOEP_LAYERS_KEY": "ds_autoep_layers",
        "BASE_OPTIMIZER_STATE": "base_optimizer_state",
        "BASE_OPTIMIZER_STATE_STEP": "base_optimizer_state_step",
        "CHECKPOINT_PARALLEL_DIMS": "checkpoint_parallel_dimensions",
        "CHECKPOINT_PP_DEGREE": "pp_degree",
        "CHECKPOINT_TP_DEGREE": "tp_degree",
        "CLIP_GRAD": "clip_grad",
        "DS_VERSION": "ds_version",
        "FP32_WEIGHT_KEY": "fp32",
        "FROZEN_PARAM_FRAGMENTS": "frozen_param_fragments",
        "GROUP_PADDINGS": "group_paddings",
        "LOSS_SCALER": "loss_scaler",
        "OPTIMIZER_STATE_DICT": "optimizer_state_dict",
        "PARAM_SLICE_MAPPINGS": "param_slice_mappings",
        "PARTITION_COUNT": "partition_count",
        "SINGLE_PARTITION_OF_FP32_GROUPS": "single_partition_of_fp32_groups",
        "UNIVERSAL_CHECKPOINT_VERSION_KEY": "universal_checkpoint_version",
        "UNIVERSAL_CHECKPOINT_VERSION_VALUE": 0.4,
        "ZERO_STAGE": "zero_stage",
        **{
            name: name.lower()
            for name in (
                "AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS CAT_DIM FP32_FLAT_GROUPS PARAM PARAMETER_WITH_ROW_PARALLELISM_PATTERNS "
                "PARAMETER_WITH_SUB_PARAMS PARAM_GROUPS PARAM_SHAPES SUB_PARAM_SHAPE SUB_PARAM_SHARD_WIDTHS "
                "TP_REPLICATED_PARAMETER_PATTERNS UNIVERSAL_CHECKPOINT_INFO VOCABULARY_PARAMETER_PATTERNS"
            ).split()
        },
    },
    "deepspeed.compression.constants": {
        "SHARED_PARAMETERS": "shared_parameters",
        "WEIGHT_QUANTIZATION": "weight_quantization",
        "WEIGHT_QUANTIZE_CHANGE_RATIO": "quantize_change_ratio",
        "WEIGHT_QUANTIZE_ENABLED": "enabled",
        "WEIGHT_QUANTIZE_FP16_MIXED_QUANTIZE": "fp16_mixed_quantize",
        "WEIGHT_QUANTIZE_GROUPS": "quantize_groups",
        "WEIGHT_QUANTIZE_IN_FORWARD_ENABLED": "quantize_weight_in_forward",
        "WEIGHT_QUANTIZE_KERNEL": "quantizer_kernel",
        "WEIGHT_QUANTIZE_ROUNDING": "rounding",
        "WEIGHT_QUANTIZE_TYPE": "quantization_type",
        "WEIGHT_QUANTIZE_VERBOSE": "quantize_verbose",
    },
    "deepspeed.constants": {
        "CROSS_RANK": "CROSS_RANK",
        "CROSS_SIZE": "CROSS_SIZE",
        "TORCH_DISTRIBUTED_DEFAULT_PORT": 29500,
    },
    "deepspeed.runtime.config": {
        "ADAGRAD_OPTIMIZER": "adagrad",
        "ADAMW_OPTIMIZER": "adamw",
        "ADAM_OPTIMIZER": "adam",
        "ADAM_W_MODE": "adam_w_mode",
        "ADAM_W_MODE_DEFAULT": True,
        "DEEPSPEED_OPTIMIZERS": [
            "adagrad",
            "adam",
            "adamw",
            "lamb",
            "onebitadam",
            "onebitlamb",
            "zerooneadam",
            "muadam",
            "muadamw",
            "musgd",
            "lion",
            "muon",
        ],
        "LAMB_OPTIMIZER": "lamb",
        "LION_OPTIMIZER": "lion",
        "MUADAMW_OPTIMIZER": "muadamw",
        "MUADAM_OPTIMIZER": "muadam",
        "MUSGD_OPTIMIZER": "musgd",
        "ONEBIT_ADAM_OPTIMIZER": "onebitadam",
        "ONEBIT_LAMB_OPTIMIZER": "onebitlamb",
        "TORCH_ADAM_PARAM": "torch_adam",
        "ZERO_ONE_ADAM_OPTIMIZER": "zerooneadam",
    },
    "deepspeed.runtime.constants": {
        "AMP": "amp",
        "BFLOAT16": "bf16",
        "DATA_PARALLEL_GROUP": "data_parallel_group",
        "FP16": "fp16",
        "GLOBAL_RANK": "global_rank",
        "GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
        "GRADIENT_CLIPPING": "gradient_clipping",
        "GRADIENT_CLIPPING_DEFAULT": 1.0,
        "PIPE_REPLICATED": "ds_pipe_replicated",
        "PLD_GAMMA": "gamma",
        "PLD_THETA": "theta",
        "ROUTE_EVAL": "eval",
        "ROUTE_PREDICT": "predict",
        "ROUTE_TRAIN": "train",
    },
    "deepspeed.runtime.data_pipeline.constants": {
        "CURRICULUM_LEARNING": "curriculum_learning",
        "CURRICULUM_LEARNING_ENABLED": "enabled",
        "DATA_EFFICIENCY": "data_efficiency",
        "DATA_ROUTING": "data_routing",
        "DATA_SAMPLING": "data_sampling",
        "DATA_SAMPLING_ENABLED": "enabled",
        "DATA_SAMPLING_NUM_WORKERS": "num_workers",
        "RANDOM_LTD": "random_ltd",
        "RANDOM_LTD_ENABLED": "enabled",
        "RANDOM_LTD_GLOBAL_BATCH_SIZE": "global_batch_size",
        "RANDOM_LTD_LAYER_ID": "random_ltd_layer_id",
        "RANDOM_LTD_LAYER_NUM": "random_ltd_layer_num",
        "RANDOM_LTD_LAYER_TOKEN_LR_ENABLED": "enabled",
        "RANDOM_LTD_LAYER_TOKEN_LR_SCHEDULE": "layer_token_lr_schedule",
        "RANDOM_LTD_MICRO_BATCH_SIZE": "micro_batch_size",
    },
    "deepspeed.runtime.lr_schedules": {
        "CYCLE_MAX_LR": "cycle_max_lr",
        "CYCLE_MIN_LR": "cycle_min_lr",
        "ONE_CYCLE": "OneCycle",
        "VALID_LR_SCHEDULES": ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"],
        "WARMUP_LR": "WarmupLR",
    },
    "deepspeed.runtime.swap_tensor": {"MIN_SWAPPABLE_BYTES": 1 << 20},
    "deepspeed.runtime.torch_autocast": {"PARAM_COMM_DTYPE_ATTR_NAME": "comm_dtype"},
    "deepspeed.runtime.zero.config": {
        "ZERO_OPTIMIZATION": "zero_optimization",
    },
    "deepspeed.runtime.zero.leaf_module_config": {
        "DEFAULT_LEAF_MODULE_CLASSES": [_block(one) for one in _BLOCKS],
        "DEFAULT_LEAF_MODULE_NAMES": [],
        "DEFAULT_LEAF_MODULE_NAME_SUFFIXES": [],
    },
    "deepspeed.runtime.zero.partition_parameters": {"partitioned_param_data_shape": [0]},
    "deepspeed.utils.timer": {
        "BACKWARD_GLOBAL_TIMER": "bwd",
        "BACKWARD_INNER_GLOBAL_TIMER": "bwd_inner",
        "BACKWARD_INNER_MICRO_TIMER": "bwd_inner_microstep",
        "BACKWARD_MICRO_TIMER": "bwd_microstep",
        "BACKWARD_REDUCE_GLOBAL_TIMER": "bwd_allreduce",
        "BACKWARD_REDUCE_MICRO_TIMER": "bwd_allreduce_microstep",
        "FORWARD_GLOBAL_TIMER": "fwd",
        "FORWARD_MICRO_TIMER": "fwd_microstep",
        "STEP_GLOBAL_TIMER": "step",
        "STEP_MICRO_TIMER": "step_microstep",
    },
    "deepspeed.launcher.runner": {
        "DEEPSPEED_ENVIRONMENT_NAME": ".deepspeed_env",
    },
    "deepspeed.git_version_info": {
        "version": VERSION,
        "git_hash": None,
        "git_branch": None,
        "torch_info": {
            "version": ".".join(torch.__version__.split(".")[:2]),
            "bf16_support": False,
            "cuda_version": torch.version.cuda or "0.0",
            "nccl_version": "0.0",
            "hip_version": "0.0",
        },
    },
    "deepspeed.runtime.engine": {
        "MEMORY_OPT_ALLREDUCE_SIZE": 500_000_000,
    },
    "deepspeed.runtime.utils": {
        "inf": math.inf,
    },
}
