# SPDX-License-Identifier: Apache-2.0
"""Long sequences in a model as it is: its MLPs, and its logits with their loss, computed in tiles of the sequence (ALST,
Bekman et al. 2025, arXiv:2506.13996). See zeropp/nn/tiling.py for what a tile saves.

    model = AutoModelForCausalLM.from_pretrained(...)
    zeropp.nn.tile_sequence(model)          # before or after zeropp.prepare; .remove() takes it back
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zeropp.errors import ConfigError, Error
from zeropp.nn.tiling import tiled_call, tiled_cross_entropy

__all__ = ["TiledSequence", "tile_sequence"]

_MLP_NAMES = ("mlp", "ffn", "feed_forward")
_OURS = "_zeropp_tiles"
_SCALES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""What some configurations do to logits between the head and the loss, when it is neither None nor 1."""


class TiledSequence:
    """Changes of :func:`tile_sequence`: ``mlps``, by name, and whether the ``loss`` is tiled."""

    def __init__(self) -> None:
        self.mlps: list[str] = []
        self.loss = False
        self._undo: list[Callable[[], Any]] = []

    def remove(self) -> None:
        """Make the model as it was. A second call does nothing."""
        while self._undo:
            self._undo.pop()()


def tile_sequence(
    model: nn.Module, *, mlp: bool = True, loss: bool = True, mlp_tile: int | None = None, loss_tile: int | None = None
) -> TiledSequence:
    """Have the MLPs and the loss of a Hugging Face model computed in tiles of the sequence.

    Args:
        model: any model whose MLPs are modules named ``mlp``, ``ffn`` or ``feed_forward`` (or of a class ``...MLP``) that take
            and give one tensor ``(B, T, D)``; mixtures of experts are left alone. The loss: a causal language model with
            ``lm_head`` and ``loss_function``, as transformers' are; it may be inside of ``model``, as under PEFT.
        mlp_tile: tokens of a tile; None: as many as the model is wide (ALST's choice).
        loss_tile: tokens of a tile; None: as many as give 64 MiB of logits.

    While training with ``labels`` the model's ``logits`` are None: they are never whole. Everything else, evaluation
    included, is as it was.

    Raises:
        ValueError: a tile is not a whole number of tokens.
        zeropp.ConfigError: there is nothing to tile, or it is tiled already; or the loss cannot be, because the model changes its logits before
            the loss (soft-capping, scaling), or has none of that shape: ``loss=False`` tiles the MLPs alone.
    """
    for name, tile in (("mlp_tile", mlp_tile), ("loss_tile", loss_tile)):
        if tile is not None and (isinstance(tile, bool) or not isinstance(tile, int) or tile < 1):
            raise ValueError(f"tile_sequence: {name} is {tile!r}, wanted a whole number of tokens, at least 1, or None")
    done = TiledSequence()
    if mlp:
        _tile_mlps(done, model, mlp_tile)
    if loss:
        try:
            _Loss(model, done, loss_tile)
        except BaseException:
            done.remove()
            raise
        done.loss = True
    if not done.mlps and not done.loss:
        raise ConfigError(
            f"tile_sequence: {type(model).__name__} has no module named {', '.join(_MLP_NAMES)} or of a class ...MLP that "
            "takes one tensor; zeropp.nn.tiled_call tiles any call"
        )
    return done


def _tile_mlps(done: TiledSequence, model: nn.Module, tile: int | None) -> None:
    for name, module in model.named_modules():
        if not _is_mlp(name, module):
            continue
        if hasattr(module.__dict__.get("forward"), _OURS):
            raise ConfigError(f"tile_sequence: {name} is tiled already; .remove() of what did that takes it back")
        _tile_mlp(done, module, tile)
        done.mlps.append(name)


def _is_mlp(name: str, module: nn.Module) -> bool:
    """True if a module has the name or the class of an MLP, no experts, two matrices, and takes one tensor."""
    kind = type(module).__name__
    if isinstance(module, nn.ModuleList) or _has_word(kind, "moe", "sparse", "expert", "router"):
        return False
    if name.rsplit(".", 1)[-1] not in _MLP_NAMES and not kind.endswith("MLP"):
        return False
    if any(_has_word(inner, "expert", "router") for inner, _ in module.named_modules()):
        return False
    return _takes_one(module) and sum(p.dim() >= 2 for p in module.parameters()) >= 2


def _has_word(name: str, *words: str) -> bool:
    return any(word in name.lower() for word in words)


def _takes_one(module: nn.Module) -> bool:
    """True if a module's forward has one argument that must be given by its position."""
    needed = [
        one
        for one in inspect.signature(module.forward).parameters.values()
        if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    return len(needed) == 1


def _tile_mlp(done: TiledSequence, module: nn.Module, tile: int | None) -> None:
    plain: Callable[..., Any] = module.forward

    def forward(x: Any, *args: Any, **kwargs: Any) -> Any:
        size = tile if tile is not None else (x.shape[-1] if isinstance(x, Tensor) else 0)
        if args or kwargs or not isinstance(x, Tensor) or x.dim() < 2 or x.shape[-2] <= size:
            return plain(x, *args, **kwargs)
        return tiled_call(plain, x, tile=size, params=list(module.parameters()))

    setattr(forward, _OURS, True)
    done._undo.append(_put_forward(module, forward))


def _put_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], Any]:
    """Set a module's forward, and return a function that restores the class's forward, or the one that the module had before."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    return lambda: module.__dict__.pop("forward", None) if before is None else module.__dict__.update(forward=before)


class _Loss:
    """``lm_head`` hands on what it was given, and the loss takes the head's matrix to it, tile by tile.

    Only between a forward that is given labels while training, and its loss; what comes out as logits is None then.
    """

    def __init__(self, model: Any, done: TiledSequence, tile: int | None) -> None:
        model = next((one for one in model.modules() if "lm_head" in one._modules), model)  # PEFT's has it inside
        head: Any = getattr(model, "lm_head", None)
        plain_loss: Any = getattr(model, "loss_function", None)
        kind = type(model).__name__
        if isinstance(getattr(plain_loss, "__self__", None), _Loss):
            raise ConfigError(
                f"tile_sequence: the loss of {kind} is tiled already; .remove() of what did that takes it back"
            )
        calls = getattr(inspect.unwrap(type(model).forward), "__code__", None)
        its_own = calls is not None and "loss_function" not in calls.co_names  # T5: a loss in its forward
        if type(head) is not nn.Linear or getattr(plain_loss, "__name__", "") != "ForCausalLMLoss" or its_own:
            raise ConfigError(
                f"tile_sequence: {kind} has no lm_head (nn.Linear) whose logits go to transformers' ForCausalLMLoss; pass "
                "loss=False, and zeropp.nn.tiled_cross_entropy where the loss is computed"
            )
        config = getattr(model, "config", None)
        for name in _SCALES:
            if getattr(config, name, None) not in (None, 1, 1.0):
                raise ConfigError(
                    f"tile_sequence: {kind} changes its logits before the loss (config.{name} is "
                    f"{getattr(config, name)!r}), which is not tiled yet; pass loss=False"
                )
        self.head: Any = head
        self.tile, self.plain_head, self.plain_loss = tile, head.forward, plain_loss
        self.active = False
        self.passed: Tensor | None = None
        self.took = False  # the loss had what was passed
        had_own = "_loss_function" in model.__dict__
        take_head_back = _put_forward(head, self._head)
        model.loss_function = self._loss
        before = model.register_forward_pre_hook(self._before, with_kwargs=True)
        after = model.register_forward_hook(self._after, always_call=True)

        def undo() -> None:
            before.remove()
            after.remove()
            take_head_back()
            if had_own:
                model.loss_function = self.plain_loss
            else:
                model.__dict__.pop("_loss_function", None)

        done._undo.append(undo)

    def _before(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.active = model.training and torch.is_grad_enabled() and kwargs.get("labels") is not None

    def _head(self, hidden: Tensor) -> Tensor:
        if not self.active:
            logits: Tensor = self.plain_head(hidden)
            return logits
        self.passed, self.took = hidden, False
        return hidden

    def _loss(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """transformers' ForCausalLMLoss, from hidden values in the place of logits."""
        if not self.active:
            plain: Tensor = self.plain_loss(
                logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
            )
            return plain
        if logits is not self.passed:
            raise Error(
                "tile_sequence: the model changes its logits between lm_head and the loss, which cannot be tiled; take it "
                "back with .remove(), and call tile_sequence(model, loss=False)"
            )
        self.took = True
        if shift_labels is None:
            labels = nn.functional.pad(labels, (0, 1), value=ignore_index)
            shift_labels = labels[..., 1:]
        reduction = "mean" if num_items_in_batch is None else "sum"
        total = tiled_cross_entropy(
            logits, self.head.weight, shift_labels.to(logits.device), self.head.bias, tile=self.tile,
            ignore_index=ignore_index, reduction=reduction,
        )  # fmt: skip
        if num_items_in_batch is None:
            return total
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total / num_items_in_batch

    def _after(self, model: nn.Module, args: Any, output: Any) -> Any:
        passed, self.passed, was_active = self.passed, None, self.active
        self.active = False
        if not was_active or passed is None or output is None:
            return None
        if not self.took:
            raise Error(
                f"tile_sequence: {type(model).__name__} was given labels, and its loss did not come from its loss_function; take it "
                "back with .remove(), and call tile_sequence(model, loss=False)"
            )
        if isinstance(output, tuple):
            return tuple(None if one is passed else one for one in output)
        if getattr(output, "logits", None) is passed:
            output.logits = None
        return output
