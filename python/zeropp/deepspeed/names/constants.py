# SPDX-License-Identifier: Apache-2.0
"""Plain values that scripts read from deepspeed: keys of its files and of its checkpoints, names of optimizers and timers."""

from __future__ import annotations

import math
from typing import Any

from zeropp.deepspeed.names.finder import VERSION

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
    "deepspeed.checkpoint.constants": {
        "BASE_OPTIMIZER_STATE": "base_optimizer_state",
        "BASE_OPTIMIZER_STATE_STEP": "base_optimizer_state_step",
        "CLIP_GRAD": "clip_grad",
        "DS_VERSION": "ds_version",
        "FROZEN_PARAM_FRAGMENTS": "frozen_param_fragments",
        "GROUP_PADDINGS": "group_paddings",
        "LOSS_SCALER": "loss_scaler",
        "OPTIMIZER_STATE_DICT": "optimizer_state_dict",
        "PARAM_SLICE_MAPPINGS": "param_slice_mappings",
        "PARTITION_COUNT": "partition_count",
        "SINGLE_PARTITION_OF_FP32_GROUPS": "single_partition_of_fp32_groups",
        "ZERO_STAGE": "zero_stage",
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
        "VALID_LR_SCHEDULES": ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"],
    },
    "deepspeed.runtime.zero.config": {
        "ZERO_OPTIMIZATION": "zero_optimization",
    },
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
    },
    "deepspeed.runtime.engine": {
        "MEMORY_OPT_ALLREDUCE_SIZE": 500_000_000,
    },
    "deepspeed.runtime.utils": {
        "inf": math.inf,
    },
}
