# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed-Ulysses (arXiv 2309.14509): ranks that hold parts of one sequence, under the model's own attention and mask.

Every layer but attention works on tokens one by one, so a rank can do its part of a sequence alone. For attention the ranks exchange
tokens for heads: each gets the whole sequence for some of the heads, and gives its result back. Bytes that a rank reads in a layer's
forward, and again in its backward: (P - 1) / P * T / P * width * (2 * query heads + 2 * key heads) elements, of T tokens over P ranks.

transformers asks two registries, one for the function of attention and one for that of the mask. :func:`ulysses` gives a model an entry
of its own in both, which wraps the one that the model had. So eager, sdpa, flex and flash attention and zeropp's own see the whole
sequence, and the mask is the one that transformers makes of it.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeropp.comm.group import close, own_communicator
from zeropp.comm.heads import Cut, Spans, gather_tokens, key_spans, query_spans, to_heads, to_tokens
from zeropp.efficiency.attention import layers_of, models_of
from zeropp.errors import ConfigError, ranks_named
from zeropp.parallel.loader import IGNORED, SequenceLoader, shard, shift

_SEQUENCE = "_zeropp_sequence"  # of the position ids that a model's layers are given
_numbers = itertools.count()
#: Parts of names of classes whose layers carry a state from token to token.
_RECURRENT = (
    "mamba",
    "rwkv",
    "recurrent",
    "deltanet",
    "linearattention",
    "lightningattention",
    "shortconv",
    "lstm",
    "gru",
)
_ATTENDING = ("full_attention", "sliding_attention", "chunked_attention", "attention")


def ulysses(model: nn.Module, mesh: Any) -> Ulysses:
    """Let the ranks of a group work on parts of each sequence that ``model`` is given.

        handle = zeropp.parallel.ulysses(model, mesh["sp"])
        for batch in handle.loader(loader):
            model(**batch).loss.backward()

    Every rank calls the model with its own part, of any length, in the order of the ranks. A forward that is given ``past_key_values``, as
    ``generate`` does, takes whole sequences on every rank instead.

    Args:
        model: a transformers model, or a module around one, before or after ``zeropp.prepare``; ZeRO counts these ranks as data ranks.
        mesh: a DeviceMesh of one dimension, or a torch.distributed group.

    Returns:
        A handle, which puts the model back as it was with ``remove()``.

    Raises:
        zeropp.ConfigError: more ranks than heads of queries; a layer carries a state from token to token, or its attention is not
            transformers'; another handle is attached.
    """
    group = group_of(mesh)
    models = models_of(model)
    named = type(model).__name__
    if not models or not layers_of(model):
        raise ConfigError(
            f"ulysses: {named} has no attention of transformers' interface; wanted a transformers model whose layers ask "
            "AttentionInterface, or zeropp.parallel.ulysses_attention(...) in the attention of a model of your own"
        )
    if any(hasattr(one, "_zeropp_ulysses") for one in models):
        raise ConfigError(f"ulysses: {named} is attached to a group already; call remove() of that handle first")
    for one in models:
        _check_model(one, group.size())
    return Ulysses(model, models, group, mesh)


def ulysses_attention(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, *, group: Any, lengths: Any = None
) -> Tensor:  # fmt: skip
    """Return the attention of a sequence that is cut over the ranks of a group. Differentiable; collective.

        out = ulysses_attention(partial(F.scaled_dot_product_attention, is_causal=True), q, k, v, group=mesh["sp"])

    Args:
        attention: takes the whole sequence's q, k, v for some of the heads and returns (batch, heads, all tokens, width). It is given
            a whole number of queries' heads for each head of keys, so ``enable_gqa=True`` works.
        q: (batch, heads, own tokens, width).
        k: (batch, kv heads, own tokens, width); kv heads divide heads, and may be fewer than the ranks.
        v: the same; its width may differ.
        group: a DeviceMesh of one dimension, or a torch.distributed group.
        lengths: how many tokens each rank has; None: the ranks tell each other.

    Returns:
        (batch, heads, own tokens, width of v), laid out as (batch, tokens, heads, width).

    Raises:
        zeropp.ConfigError: more ranks than heads, or shapes that are no part of such a sequence.
    """
    group = group_of(group)
    if lengths is None:
        part = Cut(group, (1,) * group.size())
        lengths = gather_tokens(part, torch.tensor([[q.shape[2]]]))[0].tolist()
    return _attend_over(Cut(group, tuple(lengths)), attention, q, k, v)


def _attend_over(cut: Cut, attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    spans, shared = _spans(q.shape[1], k.shape[1], len(cut.lengths))
    q, k, v = to_heads(cut, (q, k, v), (spans, shared, shared))
    k, v = _matched(cut.rank, spans, shared, q, k, v)
    return to_tokens(cut, attention(q, k, v), spans)


def _spans(heads: int, kv_heads: int, ranks: int) -> tuple[Spans, Spans]:
    if heads < ranks:
        raise too_many(ranks, heads, "this attention")
    if kv_heads < 1 or heads % kv_heads:
        raise ConfigError(f"ulysses: {heads} heads of queries and {kv_heads} of keys; wanted a multiple of the latter")
    spans = query_spans(heads, ranks)
    return spans, key_spans(spans, heads // kv_heads)


def _matched(rank: int, spans: Spans, shared: Spans, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Give each query's head its keys' head where the own heads do not fall into groups of one size."""
    groups = spans[-1][1] // shared[-1][1]
    (first, end), (first_key, _) = spans[rank], shared[rank]
    wanted = [head // groups - first_key for head in range(first, end)]
    if q.shape[1] % k.shape[1] == 0 and wanted == [at // (q.shape[1] // k.shape[1]) for at in range(q.shape[1])]:
        return k, v
    return k[:, wanted], v[:, wanted]


def group_of(mesh: Any) -> Any:
    """Return the torch.distributed group of a mesh of one dimension, or the group itself."""
    if isinstance(mesh, dist.device_mesh.DeviceMesh):
        if mesh.ndim != 1:
            raise ConfigError(
                f'ulysses: a mesh of the dimensions {mesh.mesh_dim_names}; wanted one of them, as mesh["sp"]'
            )
        return mesh.get_group()
    if not isinstance(mesh, dist.ProcessGroup):
        raise ConfigError(f"ulysses: {type(mesh).__name__}; wanted a DeviceMesh of one dimension, or a process group")
    return mesh


def too_many(ranks: int, heads: int, what: str) -> ConfigError:
    return ConfigError(
        f"ulysses: {ranks} ranks share the sequence, but {what} has {heads} heads of queries, and each rank needs one; wanted sp of at most "
        f"{heads}. Beyond that the sequence itself has to go round: torch.distributed.tensor.experimental.context_parallel (cp, CUDA)"
    )


def _check_model(model: Any, ranks: int) -> None:
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    named = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(
            f"ulysses: {named} has an encoder and a decoder, whose sequences differ; wanted one or the other"
        )
    for at, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in _ATTENDING:
            raise ConfigError(_carries_state(named, f"layer {at}", kind))
    for name, module in model.named_modules():
        if any(part in type(module).__name__.lower().replace("_", "") for part in _RECURRENT):
            raise ConfigError(_carries_state(named, name, type(module).__name__))
    heads = getattr(config, "num_attention_heads", None)
    fewest = min(heads) if isinstance(heads, (list, tuple)) else heads
    if isinstance(fewest, int) and fewest < ranks:
        raise too_many(ranks, fewest, named)


def _carries_state(named: str, where: str, kind: str) -> str:
    return (
        f"ulysses: {where} of {named} is {kind}, which carries a state from token to token, so a rank cannot begin in the middle of a "
        "sequence; wanted layers of attention alone; leave sp at 1 for this model, and tile or offload its activations"
    )


@dataclass
class Sequence:
    """Describe one forward's sequence as a whole.

    Attributes:
        positions, mask, packed: (batch, all tokens); which sequence a token belongs to, where a row packs several.
    """

    cut: Cut
    positions: Tensor
    mask: Tensor | None
    packed: Tensor | None


@dataclass(eq=False)
class Ulysses:
    """A model whose sequences are cut over the ranks of ``group``: made by :func:`zeropp.parallel.ulysses`.

    Attributes:
        group: the ranks that share each sequence, in their order.
        mesh: what the handle was made of.
        core: the ``_C.Comm`` that the sequences of this model alone go over; None: one rank.
        whole_in_eval: a model in ``eval()`` is given whole sequences, on every rank.
    """

    model: nn.Module
    models: list[Any]
    group: Any
    mesh: Any
    whole_in_eval: bool = False
    _current: Sequence | None = None
    _whole: bool = False
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        number = next(_numbers)
        self.core = (
            own_communicator(self.group, f"sp {number}, {_named(self.group)}") if self.group.size() > 1 else None
        )
        self._inner: dict[int, str] = {}
        this = weakref.ref(self)
        for one in self.models:
            one._zeropp_ulysses = this
            self._undo.append(lambda one=one: delattr(one, "_zeropp_ulysses"))  # type: ignore[misc]
            self._undo.append(one.register_forward_pre_hook(self._before, with_kwargs=True).remove)
        for config in self._configs():
            inner = config._attn_implementation
            name = f"{inner}_zeropp_ulysses_{number}"
            self._inner[id(config)] = inner
            _transformers("modeling_utils").AttentionInterface.register(name, self._attend)
            _transformers("masking_utils").AttentionMaskInterface.register(name, self._mask)
            config._attn_implementation_internal = name
            self._undo.append(lambda config=config, inner=inner, name=name: _restore(config, inner, name))  # type: ignore[misc]

    def _configs(self) -> list[Any]:
        modules = [module for one in layers_of(self.model).values() for module in one]
        found = {id(module.config): module.config for module in modules}
        for one in self.models:
            for part in one.modules():
                config = getattr(part, "config", None)
                if config is not None and any(module in part.modules() for module in modules[:1]):
                    found[id(config)] = config
        return [config for config in found.values() if getattr(config, "_attn_implementation", None)]

    @property
    def ranks(self) -> int:
        return self.group.size()  # type: ignore[no-any-return]

    @property
    def rank(self) -> int:
        return self.group.rank()  # type: ignore[no-any-return]

    def remove(self) -> None:
        """Put the model back as it was. A second call does nothing."""
        while self._undo:
            self._undo.pop()()
        if self.core is not None:
            close(self.core)
            self.core = None

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside the block each rank gives the model whole sequences, and nothing is exchanged; for ``generate(use_cache=False)``."""
        before, self._whole = self._whole, True
        try:
            yield
        finally:
            self._whole = before

    def loader(self, loader: Any, *, accumulate: int = 1) -> Any:
        """Return a loader of this rank's parts: see :func:`zeropp.parallel.loader.SequenceLoader`."""
        return SequenceLoader(self, loader, accumulate)

    def shard(self, batch: Any) -> dict[str, Any]:
        """Return this rank's part of a batch that every rank of the group has: see :func:`zeropp.parallel.loader.shard`."""
        return shard(self, [batch])[0]

    def gather(self, part: Tensor) -> Tensor:
        """Return the whole of what this rank has a part of, (batch, own tokens, ...) -> (batch, all tokens, ...). Collective; without a
        gradient."""
        ones = Cut(self.group, (1,) * self.ranks, self.core)
        lengths = gather_tokens(ones, torch.tensor([[part.shape[1]]]))[0].tolist()
        return gather_tokens(Cut(self.group, tuple(lengths), self.core), part)

    # -- what the model calls ----------------------------------------------------------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Tell the ranks what each has, before the forward; make what the model needs to know of the whole."""
        whole = self._whole or (self.whole_in_eval and not module.training)
        if whole or self.ranks == 1 or kwargs.get("past_key_values") is not None:
            if not whole and self.ranks > 1 and torch.is_grad_enabled() and module.training:
                raise ConfigError(
                    "ulysses: past_key_values in training; a cache holds whole sequences, and training has parts of them; wanted None"
                )
            self._current = None
            return None
        names = [name for name in inspect.signature(type(module).forward).parameters if name != "self"]
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
        self._current = sequence = self._describe(module, kwargs)
        kwargs["use_cache"] = False
        positions = sequence.positions[:, sequence.cut.slice_of(self.rank)].contiguous()
        setattr(positions, _SEQUENCE, sequence)  # a recomputed layer finds its own sequence by it
        kwargs["position_ids"] = positions
        kwargs["attention_mask"] = torch.ones_like(positions)  # keeps transformers from looking for packing in a part
        return (), kwargs

    def _describe(self, module: Any, kwargs: dict[str, Any]) -> Sequence:
        tokens = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")
        if tokens is None:
            raise ConfigError(f"ulysses: {type(module).__name__} is called without input_ids and inputs_embeds")
        given = {name: kwargs.get(name) for name in ("position_ids", "attention_mask", "labels", "shift_labels")}
        _check_inputs(module, tokens, given, kwargs)
        shifted = given["shift_labels"]
        counted = 0 if shifted is None else int((shifted != IGNORED).sum())
        facts = [tokens.shape[0], *(int(value is not None) for value in given.values())]
        cut, counted = self._meet(tokens.shape[1], counted, facts)
        positions, mask = given["position_ids"], given["attention_mask"]
        positions = (
            torch.arange(cut.tokens, device=tokens.device)[None]
            if positions is None
            else gather_tokens(cut, positions.expand(tokens.shape[0], -1))
        )
        mask = None if mask is None else gather_tokens(cut, mask.to(torch.int64)).bool()
        self._weigh(cut, counted, kwargs)
        return Sequence(cut, positions.expand(tokens.shape[0], -1), mask, _packed(positions) if mask is None else None)

    def _weigh(self, cut: Cut, counted: int, kwargs: dict[str, Any]) -> None:
        """Shift labels over the cuts, and have the model divide its sum so that the mean over the ranks is that over the tokens."""
        if kwargs.get("labels") is None:
            return
        if kwargs.get("shift_labels") is None:
            whole = shift(gather_tokens(cut, kwargs["labels"]))
            kwargs["shift_labels"] = whole[:, cut.slice_of(self.rank)].contiguous()
            counted = int((whole != IGNORED).sum())
        if kwargs.get("num_items_in_batch") is None:
            kwargs["num_items_in_batch"] = max(counted, 1) / self.ranks

    def _meet(self, tokens: int, counted: int, facts: list[int]) -> tuple[Cut, int]:
        """Compare what the ranks are called with; return how the sequence lies, and how many labels count."""
        said = [tokens, counted, *facts]
        cut = Cut(self.group, (len(said),) * self.ranks, self.core)
        rows = gather_tokens(cut, torch.tensor([said])).view(self.ranks, -1).tolist()
        names = ("rows", "position_ids", "attention_mask", "labels", "shift_labels")
        for rank, row in enumerate(rows):
            for name, seen, wanted in zip(names, row[2:], rows[0][2:], strict=True):
                if seen != wanted:
                    job = dist.get_process_group_ranks(self.group)
                    seen, wanted = (seen, wanted) if name == "rows" else (bool(seen), bool(wanted))
                    raise ConfigError(
                        f"ulysses: rank {job[rank]} of the job has {name}: {seen}, and rank {job[0]}: {wanted}, of one sequence; wanted "
                        "parts of one batch on the ranks of sp, as handle.shard(batch) and handle.loader(loader) make them"
                    )
        return Cut(self.group, tuple(row[0] for row in rows), self.core), sum(row[1] for row in rows)

    def _mask(self, **kw: Any) -> Any:
        """In place of transformers' function of the mask: the same, of the whole sequence."""
        masks = _transformers("masking_utils")
        inner = self._inner[id(kw["config"])]
        if inner not in masks.ALL_MASK_ATTENTION_FUNCTIONS:
            return None  # transformers makes none for such an attention
        make = masks.ALL_MASK_ATTENTION_FUNCTIONS[inner]
        sequence = self._current
        if sequence is None:
            return make(**kw)
        function = kw["mask_function"]
        if kw.get("use_vmap") or _reads_tensors(function):
            raise ConfigError(
                f"ulysses: {type(kw['config']).__name__} makes a mask of its own from the tokens of this rank's part (images, prefixes, "
                "chunks after padding); wanted causal, bidirectional or sliding attention with padding or packed rows"
            )
        if sequence.packed is not None:
            function = masks.packed_sequence_compatibility_function(function, sequence.positions, sequence.packed)
            kw["allow_is_causal_skip"] = False
        kw.update(
            q_length=sequence.cut.tokens, kv_length=sequence.cut.tokens, q_offset=0, kv_offset=0, mask_function=function,
            attention_mask=sequence.mask,
        )  # fmt: skip
        return make(**kw)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _attend(self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> tuple[Tensor, None]:
        """In place of the attention of a layer: the same, of the whole sequence, for this rank's heads."""
        inner = _attention(self._inner[id(module.config)], module)
        sequence = getattr(kw.get("position_ids"), _SEQUENCE, None) or self._current
        if sequence is None:
            return inner(module, q, k, v, mask, **kw)  # type: ignore[no-any-return]
        cut = sequence.cut
        if q.shape[2] != cut.lengths[cut.rank] or k.shape[2] != q.shape[2]:
            raise ConfigError(
                f"ulysses: {type(module).__name__} attends from {q.shape[2]} tokens to {k.shape[2]}, where this rank has "
                f"{cut.lengths[cut.rank]} of {cut.tokens}; wanted self-attention of the part that the model was given"
            )
        if q.shape[1] < len(cut.lengths):
            raise too_many(len(cut.lengths), q.shape[1], type(module).__name__)
        first, end = _spans(q.shape[1], k.shape[1], len(cut.lengths))[0][cut.rank]
        _check_layer(module, kw)
        if kw.get("s_aux") is not None:
            kw["s_aux"] = kw["s_aux"][first:end]
        if kw.get("position_ids") is not None:
            kw["position_ids"] = sequence.positions

        def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with _groups(module, q.shape[1] // k.shape[1]):
                out: Tensor = inner(module, q, k, v, mask, **kw)[0]
            return out.transpose(1, 2)

        return _attend_over(cut, whole, q, k, v).transpose(1, 2), None


@contextmanager
def _groups(module: Any, groups: int) -> Iterator[None]:
    """Let the layer think that it has so many heads of queries to each of keys."""
    before = getattr(module, "num_key_value_groups", None)
    if before is not None:
        module.num_key_value_groups = groups
    try:
        yield
    finally:
        if before is not None:
            module.num_key_value_groups = before


def _transformers(name: str) -> Any:
    """Return a module of transformers, which its models have loaded."""
    return sys.modules[f"transformers.{name}"]


def _named(group: Any) -> str:
    ranks = dist.get_process_group_ranks(group)
    return ranks_named(ranks) if len(ranks) <= 4 else f"ranks {ranks[0]} to {ranks[-1]}"


def _restore(config: Any, inner: str, name: str) -> None:
    config._attn_implementation_internal = inner
    _transformers("modeling_utils").AttentionInterface._global_mapping.pop(name, None)
    _transformers("masking_utils").AttentionMaskInterface._global_mapping.pop(name, None)


def _attention(inner: str, module: Any) -> Callable[..., Any]:
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return _transformers("modeling_utils").ALL_ATTENTION_FUNCTIONS.get_interface(inner, eager)  # type: ignore[no-any-return]


def _check_inputs(module: Any, tokens: Tensor, given: dict[str, Any], kwargs: dict[str, Any]) -> None:
    named = type(module).__name__
    for name, value in given.items():
        if value is not None and (
            not isinstance(value, Tensor) or value.dim() != 2 or value.shape[1] != tokens.shape[1]
        ):
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(
                f"ulysses: {name} of {named} is {shape}; wanted (batch, {tokens.shape[1]}), this rank's part, or None"
            )
    if kwargs.get("output_attentions") or getattr(module.config, "output_attentions", False):
        raise ConfigError("ulysses: output_attentions: each rank has the weights of its own heads only; wanted False")
    if given["labels"] is not None and not _shifts_labels(module):
        raise ConfigError(
            f"ulysses: {named} computes its own loss of labels, which this cannot divide over the ranks; wanted a ForCausalLM model, or "
            "the loss computed from its logits: (this rank's sum) * sp / (all tokens), so that the mean over the ranks is exact"
        )


def _shifts_labels(module: Any) -> bool:
    losses = _transformers("loss.loss_utils")
    return losses.LOSS_MAPPING.get(getattr(module, "loss_type", None)) is losses.ForCausalLMLoss


def _check_layer(module: Any, kw: dict[str, Any]) -> None:
    named = type(module).__name__
    if kw.get("position_bias") is not None:
        raise ConfigError(
            f"ulysses: {named} adds position_bias, made for this rank's part; wanted attention without it"
        )
    if hasattr(module, "sinks") and kw.get("s_aux") is None:
        raise ConfigError(
            f"ulysses: {named} reads its sinks itself; wanted an attention that is given them: flex_attention"
        )


def _reads_tensors(function: Any) -> bool:
    """True if a function of the mask holds tensors, which are those of this rank's part."""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    held = [one for cell in cells for one in (cell if isinstance(cell, tuple) else (cell,))]
    return any(isinstance(one, Tensor) or (callable(one) and _reads_tensors(one)) for one in held)


def _packed(positions: Tensor) -> Tensor | None:
    packed: Tensor | None = _transformers("masking_utils").find_packed_sequence_indices(positions)
    return packed
