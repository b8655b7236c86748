# SPDX-License-Identifier: Apache-2.0
"""Other dimensions than data, under every ZeRO stage: sequences, tensors and pipelines (docs/parallel.md)."""

from zeropp.parallel.ulysses import ulysses, ulysses_attention

__all__ = ["ulysses", "ulysses_attention"]
