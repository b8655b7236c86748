# SPDX-License-Identifier: Apache-2.0
"""The random generators of one rank, in and out of a checkpoint: torch (CPU and CUDA), Python, and numpy's where it
is in use."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from zeropp.checkpoint.plain import from_plain, to_plain


def collect(tensors: dict[str, torch.Tensor]) -> Any:
    """Return the states as plain data; the larger parts go to ``tensors``."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64, device="cpu"), "gauss": gauss},
    }
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        state: Any = numpy.random.get_state(legacy=True)
        kind, key, position, has_gauss, cached = state
        states["numpy"] = {
            "kind": kind, "key": torch.from_numpy(key.astype("int64")), "position": position,
            "has_gauss": has_gauss, "cached": cached,
        }  # fmt: skip
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return to_plain(states, "random", tensors)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Whatever is drawn or restored inside, the states of before stand again afterwards."""
    tensors: dict[str, torch.Tensor] = {}
    states = collect(tensors)
    try:
        yield
    finally:
        restore(from_plain(states, tensors))


def restore(states: dict[str, Any]) -> None:
    """Restore what :func:`collect` returned, after ``from_plain``."""
    torch.set_rng_state(states["torch"])
    python = states["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    if "numpy" in states:
        import numpy

        held = states["numpy"]
        numpy.random.set_state(
            (held["kind"], held["key"].numpy().astype("uint32"), held["position"], held["has_gauss"], held["cached"])
        )
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
