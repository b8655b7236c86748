# SPDX-License-Identifier: Apache-2.0
"""``zeropp.Experts``: how the experts of a mixture-of-experts model are divided among the ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zeropp.config.values import MOST_NUMBER, refuses_unknown, whole, wrong
from zeropp.errors import ConfigError, shown


@refuses_unknown
@dataclass(frozen=True, kw_only=True)
class Experts:
    """Expert parallelism (DeepSpeed-MoE, Rajbhandari et al. 2022, section 5). `Config(experts=4)` is `Experts(parallel=4)`."""

    parallel: int | str = "auto"
    """Number of ranks that hold different experts: of N ranks, each holds 1/parallel of the experts of every layer, and the N/parallel
    ranks with the same ones partition them as the stage says. It divides the number of ranks and the number of experts of every
    layer, times `slices`. "auto": the largest number that does."""

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

    def __post_init__(self) -> None:
        if isinstance(self.chunks, str):
            if self.chunks != "auto":
                raise wrong("Experts.chunks", self.chunks, "a number of pieces, or 'auto'")
        else:
            whole("Experts.chunks", self.chunks, 1, "pieces of a layer's tokens, or 'auto'")
        if isinstance(self.parallel, str):
            if self.parallel != "auto":
                raise wrong("Experts.parallel", self.parallel, "a number of ranks, or 'auto'")
        else:
            whole("Experts.parallel", self.parallel, 1, "ranks that hold different experts, or 'auto'")
        whole("Experts.slices", self.slices, 1, "slices of an expert")
        if self.cache is not None:
            object.__setattr__(self, "cache", _bytes("Experts.cache", self.cache))

    def ranks_of(self, ranks: int, layers: Sequence[tuple[str, int]]) -> int:
        """Return the number of ranks that hold different experts.

        Args:
            ranks: of the job.
            layers: (name, experts) of each layer.

        Raises:
            zeropp.ConfigError: ranks or experts do not divide; it names the layer, and the nearest number that fits.
        """
        fitting = [
            n
            for n in range(1, ranks + 1)
            if ranks % n == 0 and all(self.slices * experts % n == 0 for _, experts in layers)
        ]
        if not isinstance(self.parallel, int):
            return fitting[-1]
        wanted = self.parallel
        if wanted in fitting:
            return wanted
        near = min(fitting, key=lambda n: (abs(n - wanted), -n))
        if ranks % wanted:
            reason = f"it does not divide {ranks} rank{'s' if ranks > 1 else ''}"
        else:
            name, experts = next((name, experts) for name, experts in layers if self.slices * experts % wanted)
            sliced = f", in {self.slices} slices each," if self.slices > 1 else ""
            reason = f"it does not divide the {experts} experts{sliced} of '{name}'"
        raise ConfigError(
            f"Config.experts: {wanted} ranks with different experts: {reason}; the nearest number that fits is {near}"
        )


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
