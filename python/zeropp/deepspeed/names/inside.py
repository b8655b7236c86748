# SPDX-License-Identifier: Apache-2.0
"""Names of DeepSpeed's insides that its own tests import: the few that mean something here, values, and the rest by a sentence each.
tree.py reads the tables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

import zeropp


def required_torch_version(min_version: Any = None, max_version: Any = None) -> bool:
    """True if torch's version is between these two, both included."""
    if min_version is None and max_version is None:
        raise ValueError("required_torch_version: give min_version, max_version, or both")
    low, high = (
        None if one is None else torch.torch_version.TorchVersion(str(one)) for one in (min_version, max_version)
    )
    own = torch.torch_version.TorchVersion(torch.__version__.partition("+")[0])
    return (low is None or own >= low) and (high is None or own <= high)


def is_functorch_transforming() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


def get_gradient_clipping(param_dict: Mapping[str, Any]) -> Any:
    """Return the file's clipping, or the default."""
    return param_dict.get("gradient_clipping", 1.0)


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """The model, whole inside; hooks need not go."""
    with zeropp.gathered(getattr(model, "module", model)):
        yield model


_BLOCKS = "mixtral.Mixtral qwen2_moe.Qwen2Moe qwen3_moe.Qwen3Moe".split()


def _block(name: str) -> str:
    package, _, cls = name.partition(".")
    return f"transformers.models.{package}.modeling_{package}.{cls}SparseMoeBlock"


WORKS: dict[str, dict[str, str]] = {
    "deepspeed.runtime.config": {"inside": "get_gradient_clipping"},
    "deepspeed.runtime.zero": {"inside": "unwrap_model_for_generation", "zero": "ZeroParamStatus"},
    "deepspeed.runtime.zero.stage3": {"inside": "unwrap_model_for_generation"},
    "deepspeed.utils.torch": {"inside": "required_torch_version is_functorch_transforming"},
}

CONSTANTS: dict[str, dict[str, Any]] = {
    "deepspeed.checkpoint": {"UNIVERSAL_CHECKPOINT_INFO": "universal_checkpoint_info"},
    "deepspeed.checkpoint.constants": {
        "AUTOEP_LAYERS_KEY": "ds_autoep_layers",
        "CHECKPOINT_PARALLEL_DIMS": "checkpoint_parallel_dimensions",
        "CHECKPOINT_PP_DEGREE": "pp_degree",
        "CHECKPOINT_TP_DEGREE": "tp_degree",
        "FP32_WEIGHT_KEY": "fp32",
        "UNIVERSAL_CHECKPOINT_VERSION_KEY": "universal_checkpoint_version",
        "UNIVERSAL_CHECKPOINT_VERSION_VALUE": 0.4,
        **{
            name: name.lower()
            for name in (
                "AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS CAT_DIM FP32_FLAT_GROUPS PARAM PARAMETER_WITH_ROW_PARALLELISM_PATTERNS "
                "PARAMETER_WITH_SUB_PARAMS PARAM_GROUPS PARAM_SHAPES SUB_PARAM_SHAPE SUB_PARAM_SHARD_WIDTHS "
                "TP_REPLICATED_PARAMETER_PATTERNS UNIVERSAL_CHECKPOINT_INFO VOCABULARY_PARAMETER_PATTERNS"
            ).split()
        },
    },
    "deepspeed.git_version_info": {
        "torch_info": {
            "version": ".".join(torch.__version__.split(".")[:2]),
            "bf16_support": False,
            "cuda_version": torch.version.cuda or "0.0",
            "nccl_version": "0.0",
            "hip_version": "0.0",
        },
    },
    "deepspeed.runtime.constants": {"GRADIENT_CLIPPING": "gradient_clipping", "GRADIENT_CLIPPING_DEFAULT": 1.0},
    "deepspeed.runtime.lr_schedules": {
        "CYCLE_MAX_LR": "cycle_max_lr",
        "CYCLE_MIN_LR": "cycle_min_lr",
        "ONE_CYCLE": "OneCycle",
        "WARMUP_LR": "WarmupLR",
    },
    "deepspeed.runtime.swap_tensor": {"MIN_SWAPPABLE_BYTES": 1 << 20},
    "deepspeed.runtime.torch_autocast": {"PARAM_COMM_DTYPE_ATTR_NAME": "comm_dtype"},
    "deepspeed.runtime.zero.leaf_module_config": {
        "DEFAULT_LEAF_MODULE_CLASSES": [_block(one) for one in _BLOCKS],
        "DEFAULT_LEAF_MODULE_NAMES": [],
        "DEFAULT_LEAF_MODULE_NAME_SUFFIXES": [],
    },
    "deepspeed.runtime.zero.partition_parameters": {"partitioned_param_data_shape": [0]},
}

_CHECKPOINTS = "engine.save_checkpoint writes zeropp's format, which any number of ranks loads"
_FILE = "zeropp.Config.from_json reads the file"
_UNITS = "zeropp's units are gathered by themselves"
LATER: tuple[tuple[str, dict[str, str]], ...] = (
    (
        _CHECKPOINTS,
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
        _FILE,
        {
            "deepspeed.runtime.zero.config": "DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig",
            "deepspeed.runtime.zero.offload_config": "DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig",
        },
    ),
    (
        _UNITS,
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
    ('remove "tensor_parallel" from the configuration', {"deepspeed.module_inject.tp_shard": "get_shard_size_list"}),
    ("ranks talk over torch.distributed, or over zeropp's own backend", {"deepspeed.runtime.comm.nccl": "NcclBackend"}),
)
