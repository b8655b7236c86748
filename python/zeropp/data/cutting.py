# SPDX-License-Identifier: Apache-2.0
"""Sequence-length warm-up (Li et al., NeurIPS 2022): batches cut to the length of the step at hand."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zeropp.config.efficiency import count_at
from zeropp.errors import ConfigError
from zeropp.zero.engine import engine_of

_FIRST = ("input_ids", "inputs_embeds", "decoder_input_ids", "tokens", "text")
"""The tensor whose dimension 1 is the batch's sequence, by name; without any the first one of whole numbers."""
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx")
_WHAT = "zeropp.data.cut"


def cut(batch: Any, model: nn.Module, *, dims: Mapping[str, int] | None = None) -> Any:
    """Cut a batch to the sequence length of the model's next step, by ``Efficiency(seq_length=)``.

    Call it in the training loop, before anything is computed from the batch. Trainer and Lightning's strategy call it themselves.

    Args:
        batch: a tensor, or a mapping, tuple, list or dataclass of them, also nested. Of a tensor of shape (B, S, ...) dimension 1 is
            cut, where S is the length of ``input_ids``, or of the first tensor of whole numbers. ``labels`` and ``decoder_*`` may
            have a length of their own; labels of a floating-point type, as of several classes, are cut where they have S columns.
            Of position ids the last dimension is cut, of masks (B, S, S) and (B, H, S, S) the last two.
        model: prepared. In evaluation mode, or without ``seq_length`` in its configuration, the batch is returned as it is.
        dims: the sequence dimension of a tensor, by its key, where these rules are wrong.

    Returns:
        The batch in the same form; tensors that are cut are contiguous copies. Shorter batches stay as they are.

    Raises:
        zeropp.ConfigError: the model is not prepared; the batch has no tensor with a sequence, is packed from several sequences, or is
            padded on the left; or the schedule's value is no length.
    """
    return cut_to(batch, length_of(model), dims) if model.training else batch


def length_of(model: nn.Module) -> int | None:
    """Return the sequence length of a prepared model's next step; None: sequences are not cut."""
    engine = engine_of(model)
    asked = engine.config.efficiency
    if asked is None or asked.seq_length is None:
        return None
    return count_at("Efficiency.seq_length", asked.seq_length, engine.clock.step)


def cut_to(batch: Any, length: int | None, dims: Mapping[str, int] | None = None) -> Any:
    """Cut a batch to a length; None: return it as it is. As :func:`cut` otherwise."""
    if length is None:
        return batch
    found = dict(_tensors("", batch))
    seq = _sequence(found)
    if seq <= length:
        return batch
    _refuse(found, length)
    return _changed("", batch, _Cut(seq, length, dims or {}))


@dataclasses.dataclass
class _Cut:
    seq: int
    length: int
    dims: Mapping[str, int]

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        cut = tensor
        for dim in _dims(name, tensor, self.seq, self.dims):
            cut = cut.narrow(dim, 0, min(self.length, cut.shape[dim]))
        return cut if cut is tensor else cut.contiguous()


def _dims(name: str, tensor: Tensor, seq: int, given: Mapping[str, int]) -> tuple[int, ...]:
    """Return the dimensions of a tensor along the sequence."""
    if name in given:
        return (given[name],)
    shape = tuple(tensor.shape)
    if shape and name.endswith(("position_ids", "cache_position")):
        return (len(shape) - 1,)
    if len(shape) < 2:
        return ()
    if len(shape) > 2 and shape[-2:] == (seq, seq) and "mask" in name:
        return (len(shape) - 2, len(shape) - 1)
    own = (name == "labels" and not tensor.is_floating_point()) or name.startswith("decoder_")
    return (1,) if own or shape[1] == seq else ()


def _sequence(found: Mapping[str, Tensor]) -> int:
    """Return the length of the batch's sequences."""
    whole = (
        name for name, one in found.items() if one.ndim > 1 and not one.is_floating_point() and one.dtype != torch.bool
    )
    names = [*(name for name in _FIRST if name in found and found[name].ndim > 1), *whole]
    if not names:
        shapes = ", ".join(f"{name or 'batch'} {tuple(one.shape)}" for name, one in found.items()) or "no tensor"
        raise ConfigError(
            f"{_WHAT}: the batch has no tensor (batch, sequence) of whole numbers, only {shapes}; name its tokens input_ids, or "
            "leave Efficiency.seq_length at None"
        )
    return found[names[0]].shape[1]


def _refuse(found: Mapping[str, Tensor], length: int) -> None:
    """Refuse batches whose first tokens are not the first tokens of their samples."""
    packed = next((name for name in _PACKED if name in found), None)
    if packed is not None:
        raise ConfigError(
            f"{_WHAT}: the batch is packed ({packed} says where its sequences begin), so that a cut to {length} tokens would drop whole "
            "samples; pad in place of packing, or pack to the step's length in the collate function"
        )
    mask = found.get("attention_mask")
    if mask is not None and mask.ndim == 2 and bool(((mask[:, 0] == 0) & (mask != 0).any(1)).any()):
        raise ConfigError(
            f"{_WHAT}: the batch is padded on the left, so that a cut to {length} tokens would keep padding; pad on the right "
            "(tokenizer.padding_side = 'right')"
        )


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (key, tensor) of all tensors of a batch; in a tuple or list a key is that of what holds it, and a place."""
    if isinstance(value, Tensor):
        yield name, value
    for key, inner in _items(name, value):
        yield from _tensors(key, inner)


def _items(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(key), inner) for key, inner in value.items())
    elif isinstance(value, (tuple, list)):
        yield from ((f"{name}[{at}]", inner) for at, inner in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))


def _changed(name: str, value: Any, change: Any) -> Any:
    """Return a copy of a batch with each tensor changed."""
    if isinstance(value, Tensor):
        return change(name, value)
    new = [(key, _changed(key, inner, change)) for key, inner in _items(name, value)]
    if isinstance(value, Mapping):
        result: Any = copy.copy(value)
        for key, (_, inner) in zip(list(value), new, strict=True):
            result[key] = inner
        return result
    if isinstance(value, (tuple, list)):
        return (
            type(value)(*(one for _, one in new)) if hasattr(value, "_fields") else type(value)(one for _, one in new)
        )
    return dataclasses.replace(value, **dict(new)) if new else value
