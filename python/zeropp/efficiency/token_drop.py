# SPDX-License-Identifier: Apache-2.0
"""Random layer-token dropping (random-LTD, Yao et al. 2022): some layers work on a random part of each sample's tokens.

A layer that drops tokens has two hooks, so that the names in a state dict stay. The first one hands over the kept tokens, and what
belongs to them in the layer's other arguments; the second one puts what the layer made of them in their places among all tokens.
Which tokens are kept is a function of the seed, the step, the layer, and the sample's place in the global batch.
"""

from __future__ import annotations

import hashlib
import inspect
import struct
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zeropp import ops
from zeropp.config import Config, TokenDrop
from zeropp.config.efficiency import count_at
from zeropp.efficiency import layers
from zeropp.errors import ConfigError, Error

_WHAT = "Efficiency.token_drop"
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx")
_OF_ANOTHER_SEQUENCE = ("encoder_hidden_states", "encoder_attention_mask", "past_key_values", "layer_past")


# -- what a layer is given ---------------------------------------------------------------------------------------------------


def _rows(tensor: Tensor, kept: Tensor) -> Tensor:
    """Return the kept tokens of (B or 1, S, ...) or (S, ...), as (B, K, ...)."""
    if tensor.dim() == 1 or tensor.shape[0] not in (1, kept.shape[0]):
        return tensor[kept.long()]
    if tensor.shape[0] == 1:
        return tensor[0][kept.long()]
    flat = tensor.reshape(*tensor.shape[:2], -1)
    return ops.token_gather(flat, kept).reshape(*kept.shape, *tensor.shape[2:])


def _mask(mask: Tensor, kept: Tensor) -> Tensor:
    """Return a mask (B or 1, S) or (B or 1, H, S or 1, S) of the kept tokens."""
    if mask.dim() == 2:
        return _rows(mask, kept)
    at = kept.long()
    mask = mask.expand(kept.shape[0], -1, -1, -1)
    if mask.shape[2] > 1:
        mask = mask.gather(2, at[:, None, :, None].expand(-1, mask.shape[1], -1, mask.shape[3]))
    return mask.gather(3, at[:, None, None, :].expand(-1, mask.shape[1], mask.shape[2], -1))


def _is_mask(value: Any, seq: int) -> bool:
    if not isinstance(value, Tensor) or value.dim() not in (2, 4) or value.shape[-1] != seq:
        return False
    return value.dim() == 2 or value.shape[2] in (1, seq)


def _is_positions(value: Any, seq: int) -> bool:
    """True for position ids (B or 1, S), and for cos or sin (B or 1, S, D) or (S, D)."""
    return isinstance(value, Tensor) and seq in value.shape[:2] and value.dim() in (2, 3)


def _is_cos_and_sin(value: Any, seq: int) -> bool:
    return isinstance(value, (tuple, list)) and all(_is_positions(one, seq) for one in value)


def _has_sequence(value: Any, seq: int) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_has_sequence(one, seq) for one in value)
    return isinstance(value, Tensor) and seq in value.shape


def cut(name: str, value: Any, seq: int, kept: Tensor, layer: str) -> Any:
    """Return an argument of a layer for the kept tokens.

    Raises:
        zeropp.Error: it belongs to all tokens in a way that is not known; the error names the way out.
    """
    if value is None or name in _OF_ANOTHER_SEQUENCE:
        return value
    _refuse_all_tokens(name, layer)
    if name.endswith("mask") and _is_mask(value, seq):
        return _mask(value, kept)
    if name.endswith("position_ids") and _is_positions(value, seq):
        return _rows(value, kept)
    if name == "position_embeddings" and _is_cos_and_sin(value, seq):
        return tuple(_rows(one, kept) for one in value)
    if name.endswith("mask") or _has_sequence(value, seq):
        raise _refusal(
            layer, name, f"{_told(value)}, and may belong to all {seq} tokens in a way that is not known",
            "pass masks of 2 or 4 dimensions, position_ids or position_embeddings",
        )  # fmt: skip
    return value


def _told(value: Any) -> str:
    return f"has shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"is a {type(value).__name__}"


def _refuse_all_tokens(name: str, layer: str) -> None:
    """Raise zeropp.Error for an argument whose name says that it holds for the whole sequence alone."""
    if name in _PACKED:
        raise _refusal(
            layer,
            name,
            "says where packed sequences begin, which does not hold for some of their tokens",
            "pad in place of packing",
        )
    if name == "alibi" or "position_bias" in name:
        raise _refusal(
            layer,
            name,
            "biases the scores of all tokens (ALiBi, or T5's position bias)",
            "take a model with rotary or learned positions",
        )


def _refusal(layer: str, name: str, what: str, instead: str) -> Error:
    return Error(
        f"token_drop: argument '{name}' of layer '{layer}' {what}; {instead}, or leave out Efficiency(token_drop=)"
    )


# -- the hooks of a layer ------------------------------------------------------------------------------------------------------


class TokenHooks:
    """The two hooks of one layer that drops tokens. ``choose(batch, seq, device)`` returns the kept positions; None: all."""

    def __init__(self, name: str, module: nn.Module, choose: Callable[[nn.Module, Tensor], Tensor | None]) -> None:
        self.name, self.choose = name, choose
        self.names = list(inspect.signature(type(module).forward).parameters)[1:]
        self.module = weakref.ref(module)
        self.full: Tensor | None = None
        self.kept: Tensor | None = None
        module.register_forward_pre_hook(self.before, with_kwargs=True)
        module.register_forward_hook(self.after, prepend=True)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Hand over the kept tokens."""
        self.full = None
        if module is not self.module():
            return None  # a copy of a prepared model is a plain module
        full = layers.hidden_of(self.names[0], args, kwargs)
        if not isinstance(full, Tensor) or full.dim() != 3:
            told = f"{tuple(full.shape)}" if isinstance(full, Tensor) else f"a {type(full).__name__}"
            raise Error(
                f"token_drop: layer '{self.name}' was given {told} first; wanted hidden states (batch, tokens, width); name other "
                "layers in TokenDrop(layers=), or leave out Efficiency(token_drop=)"
            )
        kept = self.choose(module, full)
        if kept is None:
            return None
        seq = full.shape[1]
        given = zip(self.names[1:], args[1:], strict=False)
        cut_args = [cut(name, value, seq, kept, self.name) for name, value in given]
        cut_kwargs = {
            name: value if name == self.names[0] else cut(name, value, seq, kept, self.name)
            for name, value in kwargs.items()
        }
        self.full, self.kept = full, kept
        part = ops.token_gather(full, kept)
        if args:
            return (part, *cut_args), cut_kwargs
        return (), {**cut_kwargs, self.names[0]: part}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Put the kept tokens in their places."""
        full, kept, self.full, self.kept = self.full, self.kept, None, None
        if full is None or kept is None:
            return None
        if not layers.one_tensor(output):
            told = (
                f"{type(output).__name__} of {len(output)}"
                if isinstance(output, (tuple, list, dict))
                else type(output).__name__
            )
            raise Error(
                f"token_drop: layer '{self.name}' returns a {told}, wanted hidden states alone: what else it returns is of some of the "
                "tokens; name other layers in TokenDrop(layers=), or leave out Efficiency(token_drop=)"
            )
        part = output if isinstance(output, Tensor) else output[0]
        whole = ops.token_scatter(full, part.to(full.dtype), kept)
        return whole if isinstance(output, Tensor) else (whole,)

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenHooks:
        return self


# -- a prepared model ----------------------------------------------------------------------------------------------------------


def dropping_layers(model: nn.Module, drop: TokenDrop) -> tuple[list[tuple[int, str, nn.Module]], int]:
    """Return the layers that drop tokens, (number, name, module), and the number of all layers.

    Raises:
        zeropp.ConfigError: there are none, or TokenDrop.layers names one that is not there.
    """
    found = layers.require_layers(model, _WHAT)
    every = [named for stack in found for named in stack]
    ends = {named[0] for stack in found for named in (stack[0], stack[-1])}
    chosen = drop.layers
    if chosen is None:
        chosen = tuple(number for number, (name, _) in enumerate(every) if name not in ends)
        if not chosen:
            raise ConfigError(
                f"{_WHAT}: {type(model).__name__} has {len(every)} layers, and the first and the last of a stack work on all tokens; name "
                "layers in TokenDrop(layers=), or leave token_drop at None"
            )
    if chosen[-1] >= len(every):
        raise ConfigError(f"{_WHAT}.layers: {chosen[-1]} is not allowed; the model has layers 0 to {len(every) - 1}")
    return [(number, *every[number]) for number in chosen], len(every)


def layer_tokens(drop: TokenDrop, step: int, batch: int, seq: int, dropping: int, count: int) -> int:
    """Return the tokens that all layers of a step work on together, for a global batch of ``batch`` sequences of ``seq`` tokens.

    Args:
        drop: the schedule of kept tokens.
        step: of the optimizer, counted from 0.
        batch: samples of a step over all ranks.
        seq: tokens of each sample.
        dropping: how many layers drop tokens.
        count: how many layers there are.
    """
    kept = min(count_at("TokenDrop.keep", drop.keep, step), seq)
    return batch * (kept * dropping + seq * (count - dropping))


class TokenDropping:
    """The choice of the tokens that one prepared model's layers keep."""

    def __init__(self, engine: Any) -> None:
        efficiency = engine.config.efficiency
        self.drop, self.seed, self.clock = efficiency.token_drop, efficiency.seed, engine.clock

    def of_layer(self, number: int) -> Callable[[nn.Module, Tensor], Tensor | None]:
        """Return the choice of one layer, for :class:`TokenHooks`."""

        def choose(module: nn.Module, hidden: Tensor) -> Tensor | None:
            if not self.clock.training(module):
                return None
            batch, seq = hidden.shape[:2]
            keep = count_at("TokenDrop.keep", self.drop.keep, self.clock.step)
            if keep >= seq:
                return None
            return ops.token_sample(
                batch, seq, keep, seed=seed_of(self.seed, self.clock.step), layer=number, first=self.clock.first_sample(batch),
                device=hidden.device,
            )  # fmt: skip

        return choose


def seed_of(seed: int, step: int) -> int:
    """Return the seed of a step's draws."""
    digest = hashlib.blake2b(struct.pack("<2q", seed, step), digest_size=8, person=b"zeropp tokens")
    return int.from_bytes(digest.digest(), "little") >> 1


def check(model: nn.Module, config: Config) -> None:
    """Raise zeropp.ConfigError for a model whose layers cannot drop tokens."""
    assert config.efficiency is not None and config.efficiency.token_drop is not None
    dropping_layers(model, config.efficiency.token_drop)
    biased = next((name for name, _ in model.named_modules() if name.endswith("relative_attention_bias")), None)
    if biased is not None:
        raise ConfigError(
            f"{_WHAT}: '{biased}' biases the scores of all tokens (T5's position bias), and its first layer makes it for the others; take a "
            "model with rotary or learned positions, or leave token_drop at None"
        )


def attach(model: nn.Module, engine: Any) -> None:
    """Let layers of a prepared model drop tokens."""
    dropping = TokenDropping(engine)
    for number, name, module in dropping_layers(model, dropping.drop)[0]:
        TokenHooks(name, module, dropping.of_layer(number))
