# SPDX-License-Identifier: Apache-2.0
"""Attention as Llama calls it in transformers, causal with grouped heads: sparse ("zeropp") against transformers' own "sdpa".

Sparse is 12.5% of all blocks, local and global (24% of the causal ones). The forward is also held against flex_attention with the
same mask, compiled; it has no backward on CPUs. Figures are processor time of one thread, so that a machine which others use shows
little. Grouped heads are held against the same attention over keys and values that are repeated for each head, as transformers
repeats them where an attention has no grouped heads: time, and bytes of keys and values that are kept for the backward.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from harness import Need, Run, alternate
from torch import Tensor

CLAIM = (
    "Attention of Llama, 4K and 8K, causal local + global, 12.5% of all blocks: forward + backward >= 5x causal sdpa, "
    "forward >= 1.8x compiled flex_attention; grouped heads: 1/group the keys' memory, never slower."
)
NEEDS = (Need("transformers", module="transformers", install="pip install -e .[hf]"),)
HEADS, KV_HEADS, DIM, BATCH = 4, 1, 64, 1
GROUP = HEADS // KV_HEADS
SHAPES = ((4096, 64), (8192, 128))
"""Sequence and block: 64 blocks, of which the pattern has 12.5%."""


def pattern_of(block: int) -> Any:
    import zeropp

    return zeropp.nn.Fixed(block=block, window=8, causal=True)


def layer(pattern: Any) -> Any:
    """What the attention functions read of a LlamaAttention."""
    return SimpleNamespace(is_causal=True, num_key_value_groups=GROUP, zeropp_pattern=pattern, training=True)


def states(seq: int) -> list[Tensor]:
    """Queries, keys and values as a layer makes them: (batch, heads, seq, dim), where heads of a position stand together."""
    return [torch.randn(BATCH, seq, n, DIM).transpose(1, 2).requires_grad_() for n in (HEADS, KV_HEADS, KV_HEADS)]


def processor_ms(call: Callable[[], Any]) -> Callable[[], float]:
    def measure() -> float:
        start = time.thread_time_ns()
        call()
        return (time.thread_time_ns() - start) / 1e6

    return measure


def training(attend: Callable[..., Any], module: Any, leaves: list[Tensor], grad: Tensor) -> Callable[[], None]:
    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        attend(module, *leaves, None)[0].backward(grad)

    return step


def inference(attend: Callable[..., Any], module: Any, leaves: list[Tensor]) -> Callable[[], None]:
    def forward() -> None:
        with torch.no_grad():
            attend(module, *leaves, None)

    return forward


def repeated(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None) -> Any:
    """Our attention over repeated keys and values, as without grouped heads."""
    from transformers.integrations.sdpa_attention import repeat_kv
    from zeropp.efficiency.attention import attend

    return attend(module, query, repeat_kv(key, GROUP), repeat_kv(value, GROUP), mask)


def flex(seq: int, block: int) -> Callable[..., Any]:
    """Compiled flex_attention with the pattern's mask; compiling is not timed."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    seen = pattern_of(block).mask(1, seq // block)[0]
    mask = create_block_mask(
        lambda b, h, q, k: (k <= q) & seen[q // block, k // block], None, None, seq, seq, device="cpu", BLOCK_SIZE=block
    )
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda module, q, k, v, none: (
        compiled(q.detach(), k.detach(), v.detach(), block_mask=mask, enable_gqa=True).transpose(1, 2),
    )


def kept_bytes(attend: Callable[..., Any], module: Any, leaves: list[Tensor]) -> int:
    """Bytes of keys and values that the backward keeps."""
    seen: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.dim() == 4 and tensor.dtype == torch.float32:
            seen[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        attend(module, *leaves, None)
    return sum(seen.values()) - leaves[0].untyped_storage().nbytes()


def check(bench: Run, attend: Callable[..., Any], flexed: Callable[..., Any]) -> None:
    """Equal to torch's attention with the mask written out, and so is flex_attention; bounds: tests/ops."""
    seq, block = SHAPES[0]
    leaves = states(seq)
    mask = pattern_of(block).layout(1, seq).dense_mask(seq, causal=True)
    with torch.no_grad():
        want = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True).transpose(
            1, 2
        )
        for name, one in (("ours", attend), ("flex_attention", flexed)):
            off = (one(layer(pattern_of(block)), *leaves, None)[0] - want).abs().max().item()
            bench.check(off < 1e-4, f"{name} differs from attention with the mask by {off}")


def run(bench: Run) -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from zeropp.efficiency.attention import attend

    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    check(bench, attend, flex(*SHAPES[0]))
    for seq, block in SHAPES:
        pattern = pattern_of(block)
        module, leaves, grad = layer(pattern), states(seq), torch.randn(BATCH, seq, HEADS, DIM)
        share = f"{pattern.layout(HEADS, seq).density:.1%} of blocks of {block}"
        case = f"{HEADS} heads over {KV_HEADS}, {seq} x {DIM}, {share}, 1 thread"
        both = {
            "ours": training(attend, module, leaves, grad),
            "causal sdpa": training(sdpa_attention_forward, module, leaves, grad),
            "ours, keys repeated": training(repeated, module, leaves, grad),
        }
        samples = alternate({n: processor_ms(c) for n, c in both.items()}, rounds=3 if bench.quick else 5)
        bench.compare(f"forward + backward, {case}", samples, ours="ours", peers=list(both)[1:], unit="ms")
        forwards = {
            "ours": inference(attend, module, leaves),
            "causal sdpa": inference(sdpa_attention_forward, module, leaves),
            "torch flex_attention, compiled": inference(flex(seq, block), module, leaves),
        }
        samples = alternate({n: processor_ms(c) for n, c in forwards.items()}, rounds=5, warmup=2)
        bench.compare(f"forward, {case}", samples, ours="ours", peers=list(forwards)[1:], unit="ms")
        kept = {"ours": attend, "ours, keys repeated": repeated}
        sizes = {name: [kept_bytes(one, module, leaves) / 1e6] for name, one in kept.items()}
        bench.compare(f"keys and values for the backward, {case}", sizes, ours="ours", peers=list(kept)[1:], unit="MB")
