# SPDX-License-Identifier: Apache-2.0
"""AdamW over lists of tensors on one GPU, against torch's fused step, alone and with a copy of the parameters to bf16."""

from __future__ import annotations

from typing import Any

import torch
from gpus import in_turns, kind, require_gpus, this_device
from harness import Run

CLAIM = "on a GPU AdamW moves >= 0.85 of the memory's bandwidth, >= 1.0 of torch fused, with a bf16 copy >= 1.5 of fused + copy"
NEEDS = ()
SHAPES = {"256M in 16 tensors": [1 << 24] * 16, "1000 tensors of 65536": [1 << 16] * 1000}
TINY = {"4 tensors of 1024": [1 << 10] * 4}


def run(bench: Run) -> None:
    require_gpus(bench)
    device = this_device()
    for shape, lengths in (TINY if kind() == "sim" else SHAPES).items():
        measure(bench, shape, lengths, device)


def measure(bench: Run, shape: str, lengths: list[int], device: torch.device) -> None:
    """Measure a step in fp32, and one that also writes the parameters in bf16."""
    import zeropp

    def made(seed: int) -> list[torch.Tensor]:
        draw = torch.Generator("cpu").manual_seed(seed)
        return [torch.rand(n, generator=draw, device="cpu").to(device) for n in lengths]

    params, grads, moments, squares = (made(seed) for seed in range(4))
    theirs = [p.clone().requires_grad_() for p in params]
    for one, grad in zip(theirs, grads, strict=True):
        one.grad = grad
    peer = torch.optim.AdamW(theirs, lr=1e-3, weight_decay=0.1, **({"fused": True} if kind() == "cuda" else {}))
    peer.step()
    outs = [torch.empty(n, dtype=torch.bfloat16, device=device) for n in lengths]
    rates: dict[str, Any] = {"step": 2, "lr": 1e-3, "weight_decay": 0.1}
    check(bench, shape, lengths, device)

    def ours() -> None:
        zeropp.ops.adam_step_(params, grads, moments, squares, **rates)

    def ours_out() -> None:
        zeropp.ops.adam_step_(params, grads, moments, squares, **rates, param_outs=outs)

    def fused_out() -> None:
        peer.step()
        with torch.no_grad():
            torch._foreach_copy_(outs, theirs)

    for name, own, other, each in (("", ours, peer.step, 28), (" with a bf16 copy", ours_out, fused_out, 30)):
        half = torch.empty(each * sum(lengths) // 2, dtype=torch.uint8, device=device)
        source = torch.zeros_like(half)
        calls = {"ours": own, "torch fused": other, "copy": lambda half=half, source=source: half.copy_(source)}
        samples = in_turns(calls, rounds=5 if bench.quick else 15, repeat=1 if kind() == "sim" else 10)
        bench.compare(
            f"AdamW fp32 {shape}{name}", samples, ours="ours", peers=["torch fused"], unit="ms", limit="copy",
            extra={"device": name_of(device)},
        )  # fmt: skip


def check(bench: Run, shape: str, lengths: list[int], device: torch.device) -> None:
    """One step of both from the same values."""
    import zeropp

    values = torch.rand(lengths[0], generator=torch.Generator("cpu").manual_seed(9), device="cpu")
    param = values.to(device).requires_grad_()
    param.grad = (values * 0.5).to(device)
    own = values.to(device)
    torch.optim.AdamW([param], lr=1e-3, weight_decay=0.1).step()
    states = [torch.zeros_like(own) for _ in range(2)]
    zeropp.ops.adam_step_([own], [param.grad], [states[0]], [states[1]], step=1, lr=1e-3, weight_decay=0.1)
    bench.check(torch.allclose(own.cpu(), param.detach().cpu(), rtol=1e-5), f"{shape}: ours and torch's AdamW disagree")


def name_of(device: torch.device) -> str:
    """Return what the GPU is called."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
