# SPDX-License-Identifier: Apache-2.0
"""A Llama from safetensors files in fp32 onto two CPU ranks in bf16, to its first logits: time, and peak memory summed
over the ranks. Ours is ``from_pretrained`` inside ``zeropp.sharded_init``; beside it plain ``from_pretrained`` on every
rank, which leaves each a whole model, and FSDP2's recipe: rank 0 reads, the others build on ``meta``, values are
broadcast. Files are in the page cache for all. Each contender is a launch of its own; logits must agree.

The files are not in the model's dtype because plain ``from_pretrained`` would else map them and read nothing.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from harness import ROOT, Need, Run, alternate
from peak_memory import PeakMemory

CLAIM = "from_pretrained inside sharded_init takes less memory than FSDP2's recipe, and no longer"
NEEDS = (
    Need("transformers", module="transformers", install="pip install -e .[hf]"),
    Need("accelerate", module="accelerate", install="pip install -e .[hf]"),
)
RANKS = 2
PEERS = ("plain from_pretrained", "FSDP2")
LOGITS_TOLERANCE = 0.0  # the same weights in the same layers


def config(layers: int) -> Any:
    """Return the configuration of a Llama of 16M + 12.6M x layers parameters."""
    import transformers

    return transformers.LlamaConfig(
        vocab_size=8192, hidden_size=1024, intermediate_size=2752, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=16, max_position_embeddings=256, use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip


def write(args: dict[str, Any]) -> int:
    """Worker: the files. Returns the number of parameters."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config(args["layers"]))
    model.save_pretrained(args["folder"], max_shard_size="500MB")
    return sum(p.numel() for p in model.parameters())


def ours(folder: str) -> Any:
    import torch
    import transformers
    import zeropp

    with zeropp.sharded_init():
        model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return zeropp.prepare(model)[0]


def plain(folder: str) -> Any:
    import torch
    import transformers

    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def fsdp2(folder: str) -> Any:
    import torch
    import torch.distributed as dist
    import transformers
    from accelerate import init_empty_weights
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    values = {}
    if dist.get_rank() == 0:
        values = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    with init_empty_weights(include_buffers=False):
        config = transformers.LlamaConfig.from_pretrained(folder)
        model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return model


WAYS = {"ours": ours, "plain from_pretrained": plain, "FSDP2": fsdp2}


def load(args: dict[str, Any]) -> dict[str, Any]:
    """Worker: one rank of one contender."""
    import torch
    import torch.distributed as dist
    import transformers.models.llama.modeling_llama
    import transformers.utils.logging
    import zeropp  # noqa: F401

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    dist.init_process_group("zeropp" if args["way"] == "ours" else "gloo")
    dist.barrier()
    with PeakMemory() as memory:
        start = time.perf_counter_ns()
        model = WAYS[args["way"]](args["folder"]).eval()
        with torch.no_grad():
            logits = model(input_ids=torch.arange(64)[None]).logits[0, -1, :4].tolist()
        dist.barrier()
        ms = (time.perf_counter_ns() - start) / 1e6
    dist.destroy_process_group()
    return {"ms": ms, "peak_mib": memory.peak_mib - memory.base_mib, "logits": logits}


def one(bench: Run, folder: str, wanted: list[list[float]], way: str) -> dict[str, float]:
    """A launch of one contender: the slowest rank's time, the sum of the memory."""
    ranks = bench.launch("load", ranks=RANKS, args={"way": way, "folder": folder})
    for rank in ranks:
        wanted.append(rank["logits"])
        far = max(abs(a - b) for a, b in zip(rank["logits"], wanted[0], strict=True))
        bench.check(far <= LOGITS_TOLERANCE, f"{way}: logits {rank['logits']} are not {wanted[0]}")
    return {"ms": max(rank["ms"] for rank in ranks), "MiB": sum(rank["peak_mib"] for rank in ranks)}


def run(bench: Run) -> None:
    """Time and memory of the same launches."""
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".load-bench-") as name:
        folder = str(Path(name))
        (parameters,) = bench.launch("write", ranks=1, args={"layers": 6 if bench.quick else 40, "folder": folder})
        wanted: list[list[float]] = []
        calls = {way: partial(one, bench, folder, wanted, way) for way in WAYS}
        samples = alternate(calls, rounds=1 if bench.quick else 5, warmup=0)
    case = f"Llama fp32 {parameters / 1e6:.0f}M {RANKS} ranks"
    for unit, ending in (("ms", ""), ("MiB", " memory")):
        figures = {way: [sample[unit] for sample in found] for way, found in samples.items()}
        bench.compare(case + ending, figures, ours="ours", peers=list(PEERS), unit=unit)
