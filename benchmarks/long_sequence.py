# SPDX-License-Identifier: Apache-2.0
"""The longest sequence that a step of training takes within a fixed memory: a Llama-shaped model with a large vocabulary,
fp32, gradient checkpointing on both sides; ours with ``zeropp.nn.tile_sequence``.

Every attempt is a child process whose address space is limited (RLIMIT_AS: all memory counts, shared or not) to what it
has after the model is built, and so many MiB more. Lengths double, and the last gap is halved twice.
"""

from __future__ import annotations

import os
import resource
import traceback
from pathlib import Path
from typing import Any

import torch
import zeropp
from harness import Need, Run

CLAIM = (
    "At a fixed memory, MLP and loss in tiles of the sequence take sequences >= 4x as long as plain checkpointing does."
)
NEEDS: tuple[Need, ...] = (Need("transformers", "transformers", None, "pip install -e .[hf]"),)
LIMIT_MIB = 256
FIRST = 256
MOST = 8  # times the peer's: longer ones would only cost time


def plain_model() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=32, intermediate_size=128, num_hidden_layers=2, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=1 << 20, use_cache=False, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).train()
    model.gradient_checkpointing_enable()
    return model


def loss_of(model: Any, length: int) -> float:
    rows = torch.randint(1, 32000, (1, length), generator=torch.Generator().manual_seed(length))
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    model.zero_grad()
    return float(loss.detach())


def address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


def fits(model: Any, length: int, limit_bytes: int) -> bool:
    """In a child, so that whatever fails there, however it does, is gone afterwards."""
    child = os.fork()
    if child == 0:
        try:
            bound = address_space() + limit_bytes
            resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
            loss_of(model, length)
            os._exit(0)
        except (MemoryError, RuntimeError) as error:
            if "allocate" not in str(error) and not isinstance(error, MemoryError):
                traceback.print_exc()
                os._exit(3)
            os._exit(1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == 3:
        raise RuntimeError(f"a step of {length} tokens failed, and not for want of memory")
    return code == 0


def longest(model: Any, first: int, most: int, limit_bytes: int) -> int:
    """The longest length from ``first`` to ``most`` that was seen to fit; 0: not even the first."""
    good, bad, length = 0, 0, first
    while length <= most:
        if not fits(model, length, limit_bytes):
            bad = length
            break
        good, length = length, 2 * length
    for _ in range(2):
        middle = (good + bad) // 2
        if bad and good:
            good, bad = (middle, bad) if fits(model, middle, limit_bytes) else (good, middle)
    return good


def both(args: dict[str, Any]) -> dict[str, float]:
    """Worker: the same model plain, then in tiles; the lengths, and the loss of a short sequence."""
    torch.set_num_threads(1)
    model, limit_bytes = plain_model(), LIMIT_MIB << 20
    plain_loss = loss_of(model, FIRST)  # also warms up what is loaded late
    plain = longest(model, FIRST, 1 << 20, limit_bytes)
    zeropp.nn.tile_sequence(model, mlp_tile=256, loss_tile=64)
    tiled_loss = loss_of(model, FIRST)
    tiled = longest(model, plain, MOST * plain, limit_bytes) if plain else 0
    return {"plain": plain, "tiled": tiled, "plain_loss": plain_loss, "tiled_loss": tiled_loss}


def run(bench: Run) -> None:
    samples: dict[str, list[float]] = {"ours": [], "torch checkpointing": []}
    for turn in range(1 if bench.quick else 3):
        bench.log(f"round {turn + 1}")
        (seen,) = bench.launch("both", ranks=1)
        bench.check(abs(seen["tiled_loss"] - seen["plain_loss"]) < 1e-5 * seen["plain_loss"], f"losses differ: {seen}")
        bench.check(seen["plain"] > 0, f"plain torch cannot take {FIRST} tokens within {LIMIT_MIB} MiB")
        samples["ours"].append(seen["tiled"])
        samples["torch checkpointing"].append(seen["plain"])
    bench.compare(
        f"fp32 32000 classes {LIMIT_MIB} MiB", samples, ours="ours", peers=["torch checkpointing"], unit="tokens",
        better="higher", extra={"most_tried": f"{MOST}x"},
    )  # fmt: skip
