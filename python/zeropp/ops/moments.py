# SPDX-License-Identifier: Apache-2.0
"""Moments of an optimizer in bf16 or 8 bits: to fp32 and back, outside of a step; csrc/ops/moments/moments.h has the
formats. The steps themselves decode and encode in their one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeropp.ops import checks

__all__ = ["moments_decode_", "moments_encode_", "moments_scales"]

BLOCK_ELEMS = 256
"""Elements that share a scale; blocks begin at multiples of it in the tensor."""
MOMENTS = {"exp_avg": 0, "exp_avg_sq": 1, "max_exp_avg_sq": 2, "momentum_buffer": 0, "sum": 1}
"""What moments may be, and which number C knows them by: of SGD's and Adagrad's, too. Number 0 has signs."""
CODES = (torch.bfloat16, torch.uint8)


def moments_scales(elems: int, first: int = 0) -> int:
    """Return how many scales elements ``first`` to ``first + elems`` of a tensor have in 8 bits."""
    return -(-(first % BLOCK_ELEMS + elems) // BLOCK_ELEMS) if elems else 0


def moments_encode_(
    src: Tensor,
    codes: Tensor,
    scales: Tensor,
    *,
    moment: str = "exp_avg",
    first: int = 0,
    seed: int = 0,
    stream: int = 0,
    step: int = 0,
) -> None:
    """Encode an fp32 moment as bf16, or as 8-bit codes with a scale a block of 256 elements.

    Tensors of a GPU are encoded on the CPU, and it waits: this is for checkpoints. Steps encode in their kernels.

    Args:
        src: fp32.
        codes: bfloat16 or uint8, as many elements; written.
        scales: fp32, ``moments_scales(elems, first)`` of them for uint8; without elements for bfloat16. Written.
        moment: "exp_avg" or "momentum_buffer", which have signs; "exp_avg_sq", "max_exp_avg_sq" or "sum", which have none.
        first: place of the first element in its tensor: blocks and random bits count from the tensor's first.
        seed, stream, step: what the random bits are made of, ``stream`` being the tensor's number. step 0 rounds to
            nearest; so does nothing else here, and then encoding what was decoded gives the same codes.

    Raises:
        TypeError: an argument is no tensor, or no whole number.
        ValueError: wrong device, dtype, layout or number of elements; tensors that share memory. Nothing was written.
    """
    name = "zeropp.ops.moments_encode_"
    tensors = {"codes": codes, "src": src, "scales": scales}
    for label, tensor in tensors.items():
        checks.check_tensor(name, label, tensor, checks.BOTH)
    for label, value in (("first", first), ("seed", seed), ("stream", stream), ("step", step)):
        checks.check_whole(name, label, value)
    if _is_elsewhere(name, tensors):
        made = {"codes": torch.empty_like(codes, device="cpu"), "scales": torch.empty_like(scales, device="cpu")}
        moments_encode_(src.cpu(), **made, moment=moment, first=first, seed=seed, stream=stream, step=step)
        codes.copy_(made["codes"])
        scales.copy_(made["scales"])
        return
    arguments = [src, codes, scales, _number(name, moment), first, seed, stream, step]
    checks.call(name, torch.ops.zeropp.moments_encode_.default, arguments, [codes, scales])


def moments_decode_(codes: Tensor, scales: Tensor, dst: Tensor, *, moment: str = "exp_avg", first: int = 0) -> None:
    """Decode what :func:`moments_encode_` made into ``dst`` (fp32); on the CPU, as there."""
    name = "zeropp.ops.moments_decode_"
    tensors = {"codes": codes, "scales": scales, "dst": dst}
    for label, tensor in tensors.items():
        checks.check_tensor(name, label, tensor, checks.BOTH)
    checks.check_whole(name, "first", first)
    if _is_elsewhere(name, tensors):
        values = torch.empty_like(dst, device="cpu")
        moments_decode_(codes.cpu(), scales.cpu(), values, moment=moment, first=first)
        dst.copy_(values)
        return
    arguments = [codes, scales, dst, _number(name, moment), first]
    checks.call(name, torch.ops.zeropp.moments_decode_.default, arguments, [dst])


def _is_elsewhere(name: str, tensors: dict[str, Tensor]) -> bool:
    """Return True if the tensors are on a GPU; raise ValueError where they are on several devices."""
    wanted = tensors["codes"].device
    for label, tensor in tensors.items():
        if tensor.device != wanted:
            raise ValueError(f"{name}: {label} is on {tensor.device}, wanted {wanted} as codes is")
    return wanted.type != "cpu"


def _number(name: str, moment: str) -> int:
    if moment not in MOMENTS:
        raise ValueError(f"{name}: moment is {moment!r}, wanted one of {', '.join(map(repr, MOMENTS))}")
    return MOMENTS[moment]


def are_codes(states: Sequence[Tensor], scales: Sequence[Tensor]) -> bool:
    """True if these states of an optimizer are in fewer bits."""
    return bool(scales) or bool(states and states[0].dtype in CODES)


def places_of(
    name: str,
    params: Sequence[Tensor],
    step: int | Sequence[int] | None,
    streams: Sequence[int] | None,
    firsts: Sequence[int] | None,
) -> list[int]:
    """Step, stream and first of each parameter, one after the other."""
    if step is None:
        raise ValueError(
            f"{name}: step is None, wanted the number of this update: the rounding of states in fewer bits is made of it"
        )
    columns = {
        "steps": checks.steps_of(name, step, params),
        "streams": list(range(len(params))) if streams is None else list(streams),
        "firsts": [0] * len(params) if firsts is None else list(firsts),
    }
    for label, column in columns.items():
        if len(column) != len(params):
            raise ValueError(f"{name}: {label} has {len(column)} numbers, wanted {len(params)} as params has tensors")
    return [number for place in zip(*columns.values(), strict=True) for number in place]


def _fake_parts(name: str, codes: Tensor, scales: Tensor, first: int) -> None:
    checks.fake_check(name, "codes", codes, CODES)
    wanted = moments_scales(codes.numel(), first) if codes.dtype == torch.uint8 else 0
    checks.fake_check(name, "scales", scales, checks.FP32, wanted)


def _fake_encode(src: Tensor, codes: Tensor, scales: Tensor, moment: int, first: int, *random: int) -> None:
    _fake_parts("zeropp.ops.moments_encode_", codes, scales, first)
    checks.fake_check("zeropp.ops.moments_encode_", "src", src, checks.FP32, codes.numel())


def _fake_decode(codes: Tensor, scales: Tensor, dst: Tensor, moment: int, first: int) -> None:
    _fake_parts("zeropp.ops.moments_decode_", codes, scales, first)
    checks.fake_check("zeropp.ops.moments_decode_", "dst", dst, checks.FP32, codes.numel())


def fake_check_low(
    name: str,
    moments: dict[str, list[Tensor]],
    params: list[Tensor],
    scales: list[Tensor],
    firsts: Sequence[int] = (),
) -> None:
    """Codes of one kind, and a scale for each block of 8 bits. An empty list after the first: there is none."""
    lists = list(moments.values())
    kinds = (lists[0][0].dtype,) if lists[0] and lists[0][0].dtype in CODES else CODES
    for index, (label, codes) in enumerate(moments.items()):
        if codes or index == 0:
            checks.fake_check_like(name, label, codes, params, kinds)
    wanted = sum(bool(codes) for codes in lists) * len(params) if kinds == (torch.uint8,) else 0
    if len(scales) != wanted:
        raise ValueError(f"{name}: scales has {len(scales)} tensors, wanted {wanted}")
    for index, tensor in enumerate(scales):
        at = index % len(params)
        count = moments_scales(params[at].numel(), firsts[at] if firsts else 0)
        checks.fake_check(name, f"scales[{index}]", tensor, checks.FP32, count)


def fake_check_places(name: str, places: list[int], params: list[Tensor]) -> list[int]:
    """Three numbers a parameter; the third of each."""
    if len(places) != 3 * len(params):
        raise ValueError(f"{name}: places has {len(places)} numbers, wanted {3 * len(params)}")
    return places[2::3]


FAKES = {"moments_encode_": _fake_encode, "moments_decode_": _fake_decode}
