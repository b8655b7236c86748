# SPDX-License-Identifier: Apache-2.0
"""``zeropp.Experts``: how the experts of a mixture-of-experts model are divided among the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zeropp.config.values import refuses_unknown, whole, wrong
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

    def __post_init__(self) -> None:
        if isinstance(self.parallel, str):
            if self.parallel != "auto":
                raise wrong("Experts.parallel", self.parallel, "a number of ranks, or 'auto'")
        else:
            whole("Experts.parallel", self.parallel, 1, "ranks that hold different experts, or 'auto'")
        whole("Experts.slices", self.slices, 1, "slices of an expert")

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


def as_experts(value: Any) -> Experts | None:
    """Return what ``Config(experts=value)`` means.

    Raises:
        zeropp.ConfigError: `value` is neither None, a number, "auto" nor an :class:`Experts`.
    """
    if value is None or isinstance(value, Experts):
        return value
    if isinstance(value, bool) or not (value == "auto" or (isinstance(value, int) and value >= 1)):
        raise ConfigError(
            f"Config.experts: {shown(value)} is not allowed; wanted a number of ranks >= 1, 'auto', zeropp.Experts(...) or None"
        )
    return Experts(parallel=value)
