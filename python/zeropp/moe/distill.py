# SPDX-License-Identifier: Apache-2.0
"""Distillation of a mixture of students (MoS, Rajbhandari et al. 2022, section 4.2), with the logits never whole.

With the student's logits x and the teacher's y of a token, temperature T and weight a, the loss is the mean over the tokens of

    cross_entropy(x, label) + a T^2 KL(softmax(y / T) || softmax(x / T)),      a = 0 from the step ``until`` on

T^2 keeps the gradients of the second term as large for every T (Hinton et al. 2015, section 2). That the term ends before the training
does is the paper's staged distillation: a student that follows its teacher to the end gets worse than one without a teacher.

Both models run without their heads. The heads, of V classes each, are computed tile by tile together with the loss, and once more in
backward, so of all logits only those of a tile exist at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeropp.config.values import finite, whole, wrong
from zeropp.errors import ConfigError, what_it_is
from zeropp.nn.tiling import LOGITS_BYTES, tiled_call

IGNORED = -100


class Distill:
    """The loss of a student that learns from labels and from a teacher; call it in place of the student.

    Args:
        student: a causal language model of transformers, prepared or not, or any module with ``get_output_embeddings()`` that is called
            with the same arguments and whose logits are what its head returns.
        teacher: the same, with as many classes. It may be prepared without an optimizer (``zeropp.prepare(teacher, None, config)``), on
            NVMe too. Distill puts it into evaluation mode, and calls it without gradients.
        weight: a above.
        temperature: T above.
        until: the first step without teacher; then it is not called any more. None: always with it.
        tile: tokens of a tile; None: as many as give 64 MiB of logits.

    Raises:
        zeropp.ConfigError: a value that cannot be, a model without a head, or heads of different numbers of classes.
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        weight: float = 1.0,
        temperature: float = 1.0,
        until: int | None = None,
        *,
        tile: int | None = None,
    ) -> None:
        if not (finite(weight) and weight >= 0):
            raise wrong("Distill.weight", weight, "a finite number >= 0")
        if not (finite(temperature) and temperature > 0):
            raise wrong("Distill.temperature", temperature, "a finite number above 0")
        if until is not None:
            whole("Distill.until", until, 0, "the first step without teacher")
        if tile is not None:
            whole("Distill.tile", tile, 1, "tokens of a tile")
        self.weight, self.temperature, self.until = float(weight), float(temperature), until
        self.student, self.teacher = _Headless("student", student), _Headless("teacher", teacher)
        classes = self.student.classes, self.teacher.classes
        if classes[0] != classes[1]:
            raise ConfigError(
                f"Distill: the student has {classes[0]} classes and the teacher {classes[1]}; wanted as many"
            )
        teacher.eval()
        self.tile = tile or max(16, LOGITS_BYTES // (8 * classes[0]))  # of both models

    def __call__(self, *, step: int | None = None, labels: Tensor | None = None, **batch: Any) -> Tensor:
        """Return the loss, a scalar in fp32.

        Args:
            step: the optimizer's steps so far; needed where ``until`` is given.
            labels: (B, S) of the tokens themselves: place s is predicted at s - 1, and -100 counts for nothing, as in transformers. None:
                the loss is the second term alone, over all tokens.
            batch: what both models are called with, such as ``input_ids`` and ``attention_mask``.

        Raises:
            zeropp.ConfigError: no ``step`` where ``until`` is given, or a model that changes its logits after its head.
        """
        if self.until is not None and step is None:
            raise ConfigError(
                f"Distill: until is {self.until} and no step was given; call it with step=, the steps so far"
            )
        taught = self.weight > 0 and (self.until is None or step is None or step < self.until)
        if labels is None and not taught:
            raise ConfigError("Distill: no labels, and no teacher in this step; wanted labels=")
        hidden, output = self.student.hidden(batch)
        beside = [_targets(hidden, labels)]
        if taught:
            with torch.no_grad():
                theirs, _ = self.teacher.hidden(batch)
            beside.append(theirs.detach().reshape(-1, theirs.shape[-1]))
        rows = hidden.reshape(-1, hidden.shape[-1])
        of_tile = self._of_tile(labels is not None)
        total = tiled_call(
            of_tile,
            rows,
            *beside,
            tile=self.tile,
            dim=0,
            params=self.student.head.parameters(),
            summed=True,
            random=False,
        )
        loss = total / (beside[0] != IGNORED).sum()
        extra = getattr(output, "aux_loss", None)  # of a mixture of experts, which transformers adds with labels alone
        if isinstance(extra, Tensor) and extra.requires_grad:
            config: Any = self.student.model.config
            loss = loss + float(config.router_aux_loss_coef) * extra.to(loss.device)
        return loss

    def _of_tile(self, labelled: bool) -> Callable[..., Tensor]:
        def loss(rows: Tensor, targets: Tensor, theirs: Tensor | None = None) -> Tensor:
            logits = _wide(self.student.head(rows))
            counts = targets != IGNORED
            total = logits.new_zeros(())
            if labelled:
                total = total + F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
            if theirs is not None:
                with torch.no_grad():
                    wanted = F.log_softmax(_wide(self.teacher.head(theirs)) / self.temperature, 1)
                ours = F.log_softmax(logits / self.temperature, 1)
                apart = F.kl_div(ours, wanted, reduction="none", log_target=True).sum(1)
                total = total + self.weight * self.temperature**2 * (apart * counts).sum()
            return total

        return loss


class _Headless:
    """A model whose forward stops before its head: what the head is given is kept, and the head sees one row of it."""

    def __init__(self, role: str, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(f"Distill: the {role} is {what_it_is(model)}; wanted a torch.nn.Module")
        find: Any = getattr(model, "get_output_embeddings", None)
        head: Any = None if find is None else find()
        if not isinstance(head, nn.Module) or not hasattr(head, "weight"):
            raise ConfigError(
                f"Distill: the {role}, a {type(model).__name__}, has no get_output_embeddings() that gives its head"
            )
        self.role, self.model, self.head = role, model, head
        weight: Any = head.weight
        self.classes = int(weight.shape[0])
        self._checked = False

    def hidden(self, batch: dict[str, Any]) -> tuple[Tensor, Any]:
        """Return what the head is given, (..., H), and what the model returns for the last token."""
        seen: list[Any] = []

        def take(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            seen.append(args[0])
            return (args[0][..., -1:, :], *args[1:])

        def give(_: nn.Module, __: Any, logits: Tensor) -> None:
            seen.append(logits)

        hooks = self.head.register_forward_pre_hook(take), self.head.register_forward_hook(give)
        try:
            output = self.model(**batch)
        finally:
            for hook in hooks:
                hook.remove()
        if len(seen) != 2:
            raise ConfigError(f"Distill: the {self.role}'s forward called its head {len(seen) // 2} times; wanted once")
        self._check(output, seen[1])
        return seen[0], output

    def _check(self, output: Any, logits: Tensor) -> None:
        """Refuse a model whose logits are not what its head returns: some scale or cap them."""
        if self._checked:
            return
        given = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        if not isinstance(given, Tensor) or not torch.equal(given.detach().float(), logits.detach().float()):
            raise ConfigError(
                f"Distill: the {self.role}, a {type(self.model).__name__}, does not return its head's logits as they are (it scales or "
                "caps them, or returns something else), which tiles would leave out; use a model that does"
            )
        self._checked = True


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _targets(hidden: Tensor, labels: Tensor | None) -> Tensor:
    """Return the class that every place predicts, flat: the next token's; -100 where nothing counts."""
    if labels is None:
        return torch.zeros(hidden.shape[:-1], dtype=torch.long, device=hidden.device).flatten()
    if labels.shape != hidden.shape[:-1]:
        raise ConfigError(
            f"Distill: labels have shape {tuple(labels.shape)}; wanted {tuple(hidden.shape[:-1])}, as the tokens"
        )
    return F.pad(labels, (0, 1), value=IGNORED)[..., 1:].flatten()
