# SPDX-License-Identifier: Apache-2.0
"""Facts about the keys of DeepSpeed's JSON beyond their mapping: why a section is refused and what takes its place, other
names of a key, and where DeepSpeed's documentation, its code and its earlier releases disagree.

deepspeed_json.py reads files by it, ``python -m zeropp config`` prints it. Facts of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

#: Sections that may stand in a file as long as they are switched off: why they are refused, and what to use.
REFUSED: dict[str, str] = {
    "amp": 'Apex is gone from DeepSpeed too; give "bf16" or "fp16"',
    "autotuning": "python -m zeropp estimate tells bytes and traffic of every stage before a run",
    "comet": "nothing is logged by itself; log zeropp.memory() and zeropp.traffic() from the loop, or Trainer's --report_to",
    "comms_logger": "zeropp.traffic() counts bytes and calls of every collective, always",
    "compile": "DeepCompile rewrites graphs of a GPU; here repeated blocks are compiled: block.compile(), or Trainer's --torch_compile",
    "compression_training": "zeropp has no compression while training",
    "csv_monitor": "nothing is logged by itself; write zeropp.memory() and zeropp.traffic() from the loop",
    "datastates_ckpt": "zeropp.save(..., background=True) writes beside the next steps",
    "eigenvalue": "it served quantized training, which zeropp does not have",
    "elasticity": "zeropp.elastic keeps the batch while torchrun's ranks come and go (docs/elastic.md)",
    "flops_profiler": "zeropp.trace writes a timeline of steps; torch.profiler counts operations",
    "graph_harvesting": "it is gone from DeepSpeed too",
    "hybrid_engine": "generate gathers the model once a call by itself; with zeropp.gathered(model): does it by hand",
    "mesh_param": "a mesh is an argument: zeropp.prepare(model, optimizer, config, mesh=mesh)",
    "model_info": "it served autotuning; python -m zeropp estimate reads the model itself",
    "monitor_config": "nothing is logged by itself; log zeropp.memory() and zeropp.traffic() from the loop",
    "nebula": "zeropp.save(..., background=True) writes beside the next steps",
    "pipeline": "zeropp.initialize takes it with a PipelineModule (docs/parallel.md); elsewhere torch's pipelines run in the script",
    "quantize_training": "zeropp has no quantized training",
    "tensor_parallel": "zeropp.initialize takes it (autotp_size); elsewhere zeropp.parallel.tensor(model, mesh['tp']) cuts the model, and stage 3 shards it",
    "tensorboard": "nothing is logged by itself; log zeropp.memory() and zeropp.traffic() from the loop, or Trainer's --report_to",
    "wandb": "nothing is logged by itself; log zeropp.memory() and zeropp.traffic() from the loop, or Trainer's --report_to",
    "weight_quantization": 'zeropp.Config(precision=Precision(stored="int8")) quantises weights for inference',
}
#: Where the switch of a section is not called "enabled": its name, and the values that mean off.
SWITCHES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "compile": ("deepcompile", (False,)),
    "tensor_parallel": ("autotp_size", (0, 1)),
}

#: Keys of zero_optimization that DeepSpeed has removed, or documents and refuses.
ZERO_REFUSED: dict[str, str] = {
    "grad_hooks": "DeepSpeed's documentation has it and its code refuses it; gradients are reduced while backward runs",
    "mics_shard_size": 'MiCS is gone from DeepSpeed too; zeropp.Config(comm=Comm(secondary_shard="host")) keeps a copy on each host',
    "mics_hierarchical_params_gather": "MiCS is gone from DeepSpeed too; gathers over hosts go by host first anyway",
    "zeropp_loco_param": "error feedback for quantized gradients is gone from DeepSpeed too; leave it out for plain ZeRO++",
}
#: The names of fields, which DeepSpeed takes beside the documented ones.
ZERO_ALIASES = {
    name: f"stage3_{name}"
    for name in (
        "prefetch_bucket_size",
        "param_persistence_threshold",
        "model_persistence_threshold",
        "max_live_parameters",
        "max_reuse_distance",
        "gather_16bit_weights_on_model_save",
        "module_granularity_threshold",
        "use_all_reduce_for_fetch_params",
        "allgather_sequential",
    )
}
#: Names that DeepSpeed has replaced and still converts: a section with "device": "cpu".
CONVERTED = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
AIO = (
    "block_size",
    "queue_depth",
    "intra_op_parallelism",
    "single_submit",
    "overlap_events",
    "use_gds",
    "thread_count",
)
AIO_THREADS = "DeepSpeed's documentation says thread_count, its code reads intra_op_parallelism"
LEAF_MODULE = ("classes", "names", "name_suffixes")


class Note(NamedTuple):
    """A difference between what DeepSpeed does and what one of its pages or an earlier release says."""

    said: str
    section: str = ""
    """Told of a file that lacks the key where it has this section: a path, "" for every file of DeepSpeed's."""


NOTES: dict[str, Note] = {
    "gradient_clipping": Note("left out it is 1.0 in DeepSpeed since 0.19.3, and here; before it was 0, no clipping"),
    "steps_per_print": Note("left out, DeepSpeed prints nothing since 0.15.2, nor does zeropp; its documentation says 10"),
    "dataloader_drop_last": Note("left out, the last batch of training_data may be smaller, in DeepSpeed and here"),
    "bf16.check_grad_overflow": Note(
        "left out it is true in DeepSpeed since 0.19.3, and skips a step whose gradients are not finite; here such a step is an error "
        "that names the parameter",
        "bf16",
    ),
    "zero_optimization.overlap_comm": Note(
        "left out it is true at stage 3 and false below in DeepSpeed's code, false in its documentation; here reductions never block backward",
        "zero_optimization",
    ),
    "zero_optimization.stage3_prefetch_bucket_size": Note(
        "left out it is 5e7 elements in DeepSpeed's code, 5e8 in its documentation; here Config.prefetch says", "zero_optimization"
    ),
    "zero_optimization.sub_group_size": Note(
        "DeepSpeed's code has 1e9 where it is left out, its documentation shows 1e12; here the step goes unit by unit", "zero_optimization"
    ),
    "zero_optimization.offload_param.device": Note(
        'left out it is "none" in DeepSpeed\'s code, and here; "cpu" in its documentation', "zero_optimization.offload_param"
    ),
    "zero_optimization.offload_optimizer.device": Note(
        'left out it is "none" in DeepSpeed\'s code, and here; "cpu" in its documentation', "zero_optimization.offload_optimizer"
    ),
    "zero_optimization.offload_param.pin_memory": Note(
        "left out it is true in DeepSpeed since 0.19.5, false before; it changes nothing here", "zero_optimization.offload_param"
    ),
    "zero_optimization.offload_optimizer.pin_memory": Note(
        "left out it is true in DeepSpeed since 0.19.5, false before; here buffers are locked where the system lets them",
        "zero_optimization.offload_optimizer",
    ),
}  # fmt: skip


def left_out(keys: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (path, note) of the keys that a file lacks, where that means something else than one may have read."""
    for path, note in NOTES.items():
        section = _find(keys, note.section) if note.section else keys
        if isinstance(section, Mapping) and section.get("enabled", True) is not False and _find(keys, path) is None:
            yield path, note.said


def _find(keys: Any, path: str) -> Any:
    for name in path.split("."):
        keys = keys.get(name) if isinstance(keys, Mapping) else None
    return keys
