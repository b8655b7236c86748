# SPDX-License-Identifier: Apache-2.0
"""``zeropp.Experts``: how the experts of a mixture-of-experts model are divided among the ranks."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from zeropp.config.sections import Offload, Tier
from zeropp.config.values import MOST_NUMBER, instance, refuses_unknown, whole, wrong
from zeropp.errors import ConfigError, shown


@refuses_unknown
@dataclass(frozen=True, kw_only=True)
class Experts:
    """Expert parallelism (DeepSpeed-MoE, Rajbhandari et al. 2022, section 5). `Config(experts=4)` is `Experts(parallel=4)`."""

    parallel: int | str | Mapping[str, int | str] | tuple[tuple[str, int | str], ...] = "auto"
    """Number of ranks that hold different experts: of N ranks, each holds 1/parallel of the experts of every layer, and the N/parallel
    ranks with the same ones partition them as the stage says. It divides the number of ranks and the number of experts of every
    layer, times `slices`. "auto": the largest number that does. A dict says it by layer, where layers have different numbers of
    experts (PR-MoE): `{"*.layers.0.*": 2, "*": 4}` has patterns of the names of modules, of which the first that fits counts."""

    slices: int = 1
    """Slices of an expert (E+D+M): each is an expert of its own, with 1/slices of the intermediate size, that gets the tokens of the
    whole one. So there may be more ranks than experts, or more experts than fit."""

    chunks: int | str = "auto"
    """Pieces in which a layer's tokens go to other hosts and back: a piece travels while the experts compute the one before. Each
    piece costs messages, and smaller products. "auto": 1 on one host; else 1 to 4, of at least 2 MiB of tokens each."""

    cache: int | str | None = None
    """Bytes, or a size such as "4GiB", of the experts that a rank keeps in memory on demand: without gradients (`torch.no_grad`,
    `generate`) only the experts that the tokens chose come from NVMe, or out of quantised copies, and the ones that were used last
    stay. It takes `Offload(params="nvme")`, or `Precision(stored=)`; passes with gradients gather whole layers. None: every pass
    does."""

    offload: Offload | None = None
    """Tiers of the experts alone: `Experts(offload=Offload(optimizer="nvme", path="/nvme"))` keeps their optimizer states in files, and
    those of the rest of the model where `Config.offload` says. It takes `params`, `grads` and `optimizer` on "nvme", each where
    `Config.offload` has none on "nvme"; or, of a model on a GPU, `params` and `optimizer` on "cpu": page-locked memory of the host, which
    the GPU reads and writes. Without a GPU "cpu" changes nothing. None: experts are where everything else is."""

    shared_by: Any = None
    """The ranks that hold the same tokens, as a mesh of one dimension or a group: `Experts(shared_by=mesh["tp"])` (DeepSpeed-TED); or the
    name of a dimension of the mesh that `prepare` or `estimate` is given, "tp". Each of its t ranks routes 1/t of the tokens, and they
    gather what came back. Those ranks hold different experts, so `parallel` counts them too and is a multiple of t. None: every rank has
    tokens of its own."""

    def __post_init__(self) -> None:
        check_sharers(self.shared_by)
        if isinstance(self.chunks, str):
            if self.chunks != "auto":
                raise wrong("Experts.chunks", self.chunks, "a number of pieces, or 'auto'")
        else:
            whole("Experts.chunks", self.chunks, 1, "pieces of a layer's tokens, or 'auto'")
        self._check_parallel()
        whole("Experts.slices", self.slices, 1, "slices of an expert")
        if self.cache is not None:
            object.__setattr__(self, "cache", _bytes("Experts.cache", self.cache))
        if self.offload is not None:
            self._check_offload(self.offload)

    def _check_parallel(self) -> None:
        given: Any = self.parallel
        if isinstance(given, (Mapping, tuple)):
            pairs = tuple(given.items() if isinstance(given, Mapping) else given)
            if not pairs or not all(
                isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str) for one in pairs
            ):
                raise wrong(
                    "Experts.parallel", given, "a number of ranks, 'auto', or a dict from patterns of names to them"
                )
            for pattern, ranks in pairs:
                _check_ranks(f"Experts.parallel[{pattern!r}]", ranks)
            object.__setattr__(self, "parallel", pairs)
        else:
            _check_ranks("Experts.parallel", given)

    def _check_offload(self, offload: Offload) -> None:
        instance("Experts.offload", offload, Offload)
        kinds = {kind: getattr(offload, kind).kind for kind in OFFLOADED}
        if offload.activations != Tier() or offload.delayed_update is not None:
            raise wrong(
                "Experts.offload",
                offload,
                "params, grads and optimizer; activations and delayed_update are Config.offload's",
            )
        if kinds["grads"] == "cpu" or ("cpu" in kinds.values()) == ("nvme" in kinds.values()):
            raise wrong(
                "Experts.offload", offload, "params, grads or optimizer on 'nvme', or params and optimizer on 'cpu'"
            )
        if any(getattr(offload, kind).fraction != 1 for kind in kinds if kinds[kind] != "nvme"):
            raise wrong("Experts.offload", offload, "a fraction of what is on 'nvme' alone")

    def _wanted(self, name: str) -> int | str:
        """Return what `parallel` says for a layer."""
        if not isinstance(self.parallel, tuple):
            return self.parallel  # type: ignore[return-value]
        for pattern, ranks in self.parallel:
            if fnmatch.fnmatchcase(name, pattern):
                return ranks
        raise ConfigError(
            f"Experts.parallel: no pattern fits '{name}'; there are {', '.join(repr(one) for one, _ in self.parallel)}; add '*' for the "
            "other layers"
        )

    def ranks_of(self, ranks: int, layers: Sequence[tuple[str, int]], sharers: int = 1) -> list[int]:
        """Return the number of ranks that hold different experts of each layer.

        Args:
            ranks: of the job.
            layers: (name, experts) of each layer.
            sharers: ranks that hold the same tokens.

        Raises:
            zeropp.ConfigError: ranks or experts do not divide; it names the layer, and the nearest number that fits.
        """
        wanted = [self._wanted(name) for name, _ in layers]
        if isinstance(self.parallel, tuple):
            for pattern, _ in self.parallel:
                if not any(fnmatch.fnmatchcase(name, pattern) for name, _ in layers):
                    raise ConfigError(
                        f"Experts.parallel: {pattern!r} fits no layer with experts; there are {', '.join(name for name, _ in layers)}"
                    )
        same: dict[int | str, list[tuple[str, int]]] = {}
        for one, layer in zip(wanted, layers, strict=True):
            same.setdefault(one, []).append(layer)
        found = {one: self._ranks_of(ranks, together, one, sharers) for one, together in same.items()}
        return [found[one] for one in wanted]

    def _ranks_of(self, ranks: int, layers: Sequence[tuple[str, int]], wanted: int | str, sharers: int) -> int:
        """Return the number of ranks for layers of which `parallel` says the same."""

        def fits(n: int, experts: int) -> bool:
            return self.slices * experts % n == 0

        fitting = [
            n
            for n in range(sharers, ranks + 1, sharers)
            if ranks % n == 0 and all(fits(n, experts) for _, experts in layers)
        ]
        if wanted in fitting:
            return wanted
        unfit = next(
            ((name, experts) for name, experts in layers if isinstance(wanted, int) and not fits(wanted, experts)), None
        )
        if not fitting:
            few = min(self.slices * experts for _, experts in layers)
            raise ConfigError(
                f"Experts.shared_by: {sharers} ranks with the same tokens hold different experts, and no multiple of {sharers} divides {ranks} "
                f"ranks and the experts of each layer, which are at least {few}; set Experts.slices, or leave shared_by at None"
            )
        if not isinstance(wanted, int):
            return fitting[-1]
        near = min(fitting, key=lambda n: (abs(n - wanted), -n))
        raise ConfigError(
            f"Config.experts: {wanted} ranks with different experts: {self._reason(ranks, wanted, sharers, unfit)}; the nearest number that "
            f"fits is {near}"
        )

    def _reason(self, ranks: int, wanted: int, sharers: int, unfit: tuple[str, int] | None) -> str:
        """Return why a number of ranks does not fit; `unfit`: a layer whose experts it does not divide."""
        if wanted % sharers:
            return f"it is no multiple of the {sharers} ranks of Experts.shared_by"
        if ranks % wanted or unfit is None:
            return f"it does not divide {ranks} rank{'s' if ranks > 1 else ''}"
        sliced = f", in {self.slices} slices each," if self.slices > 1 else ""
        return f"it does not divide the {unfit[1]} experts{sliced} of '{unfit[0]}'"


def check_sharers(value: Any) -> None:
    """Raise zeropp.ConfigError for what is neither a mesh of one dimension, nor a group, nor a name."""
    kinds = [
        getattr(dist, "ProcessGroup", None),
        getattr(sys.modules.get("torch.distributed.device_mesh"), "DeviceMesh", None),
    ]
    fits = value is None or isinstance(value, (str, *(kind for kind in kinds if kind is not None)))
    if not fits or getattr(value, "ndim", 1) != 1:
        raise wrong(
            "Experts.shared_by",
            value,
            'a mesh of one dimension such as mesh["tp"], a torch.distributed group, the name of a dimension, or None',
        )


def with_sharers(config: Any, mesh: Any, caller: str) -> Any:
    """Return a ``Config`` whose ``Experts.shared_by`` is a part of the mesh in place of the name of a dimension of it.

    Raises:
        zeropp.ConfigError: there is no mesh, or it has no such dimension.
    """
    experts = config.experts
    name = None if experts is None else experts.shared_by
    if not isinstance(name, str):
        return config
    names = getattr(mesh, "mesh_dim_names", None) or ()
    if name not in names:
        there = f"the mesh has {', '.join(map(repr, names))}" if names else "there is no mesh with names"
        raise ConfigError(
            f"{caller}: Experts.shared_by {name!r} is the name of a dimension, and {there}; name one of its dimensions, or pass mesh="
        )
    return dataclasses.replace(config, experts=dataclasses.replace(experts, shared_by=mesh[name]))


OFFLOADED = ("params", "grads", "optimizer")
"""Kinds of state for which experts may have a tier of their own."""


def _check_ranks(path: str, value: Any) -> None:
    if isinstance(value, str):
        if value != "auto":
            raise wrong(path, value, "a number of ranks, or 'auto'")
    else:
        whole(path, value, 1, "ranks that hold different experts, or 'auto'")


def offload_with_experts(offload: Offload, experts: Experts | None) -> Offload:
    """Return the tiers of a model whose experts may have tiers of their own; other units stay in memory then, of the same kind.

    Raises:
        zeropp.ConfigError: both say "nvme" for one kind.
    """
    own = None if experts is None else experts.offload
    if own is None:
        return offload
    for kind in OFFLOADED:
        mine = getattr(own, kind).kind
        if mine != "device" and getattr(offload, kind).kind == "nvme":
            raise ConfigError(
                f"Experts.offload.{kind}: {mine!r}, and Config.offload.{kind} has all of them on 'nvme', those of experts too; leave one of the "
                "two out"
            )
    return dataclasses.replace(offload, **{kind: getattr(own, kind) for kind in kinds_on(own, "nvme")})


def kinds_on(offload: Offload | None, tier: str) -> tuple[str, ...]:
    """Return the kinds of model states that experts alone have on a tier."""
    return () if offload is None else tuple(kind for kind in OFFLOADED if getattr(offload, kind).kind == tier)


_UNITS = {"": 1, "B": 1} | {f"{k}{i}B": n**e for i, n in (("i", 1024), ("", 1000)) for e, k in enumerate("KMGT", 1)}


def _bytes(path: str, value: Any) -> int:
    """Return the bytes of a number, or of a text such as "4GiB" or "500 MB"."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)", value.strip()) if isinstance(value, str) else None
    if found is not None and found[2] in _UNITS:
        value = int(float(found[1]) * _UNITS[found[2]])
    elif isinstance(value, str):
        raise wrong(path, value, "bytes, or a size such as '4GiB', '512MiB' or '2GB'")
    whole(path, value, 1, "bytes of experts that stay in memory, or a size such as '4GiB'")
    return int(value)


def as_experts(value: Any) -> Experts | None:
    """Return what ``Config(experts=value)`` means.

    Raises:
        zeropp.ConfigError: `value` is neither None, a number, "auto" nor an :class:`Experts`.
    """
    if value is None or isinstance(value, Experts):
        return value
    if isinstance(value, bool) or not (value == "auto" or (isinstance(value, int) and 1 <= value <= MOST_NUMBER)):
        raise ConfigError(
            f"Config.experts: {shown(value)} is not allowed; wanted a number of ranks >= 1 (below 2**63), "
            "'auto', zeropp.Experts(...) or None"
        )
    return Experts(parallel=value)
