# SPDX-License-Identifier: Apache-2.0
"""The bisecting search for a slow rank or link. It knows nothing of communication: it asks a probe for times.

A set of ranks is halved, each half is searched by itself, and then the two together are compared with the slower half: a link
between the halves shows only there. Sets of up to four are searched pair by pair: a rank whose pairs are all slow is slow, a slow pair of
two other ranks is a slow link. Nothing is known of how fast a link should be; ranks and links are compared with the best of the set, so a
fault that they all share is not found here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: Seconds that the ranks of one set need for the same exchange. Collective over all ranks; gives every rank the same number.
Probe = Callable[[tuple[int, ...]], float]

SMALL = 4
GROWTH = 2.0  # an all-reduce of many ranks moves up to twice the bytes of one of two, per rank


@dataclass(frozen=True)
class Fault:
    """A finding: one rank, or the two ends of a link."""

    kind: str
    """ "slow rank", "slow link" or "dead rank"."""

    ranks: tuple[int, ...]
    why: str

    def __str__(self) -> str:
        name = (
            f"rank {self.ranks[0]}"
            if len(self.ranks) == 1
            else f"link between ranks {self.ranks[0]} and {self.ranks[1]}"
        )
        return f"{self.kind.split()[0]}: {name}: {self.why}"


def search(ranks: Sequence[int], probe: Probe, factor: float) -> list[Fault]:
    """Return the ranks and links that are slower than `factor` times the best of their like.

    Args:
        ranks: those to be searched, joined by links of one kind; fewer than three cannot be told apart.
        probe: see :data:`Probe`.
        factor: above 1.
    """
    found = _search(tuple(ranks), (), probe, factor)
    return sorted(set(found), key=lambda fault: (fault.kind, fault.ranks))


def _search(ranks: tuple[int, ...], others: tuple[int, ...], probe: Probe, factor: float) -> list[Fault]:
    if len(ranks) <= SMALL:
        return _pair_by_pair(ranks, others, probe, factor)
    left, right = ranks[: len(ranks) // 2], ranks[len(ranks) // 2 :]
    found = _search(left, right, probe, factor) + _search(right, left, probe, factor)
    apart = max(probe(left), probe(right))
    if probe(ranks) > factor * GROWTH * apart:
        found += _between(left, right, probe, factor)
    return found


def _pair_by_pair(ranks: tuple[int, ...], others: tuple[int, ...], probe: Probe, factor: float) -> list[Fault]:
    """Compare pairs. `others`, outside of the set, complete a set of two or three that is too small to tell its ranks apart."""
    helpers = others[: max(0, SMALL - len(ranks))]
    everyone = ranks + helpers
    if len(everyone) < 3:
        return []
    times = {pair: probe(pair) for pair in itertools.combinations(everyone, 2)}
    best = min(times.values())
    found, quick = [], set()
    for rank in ranks:
        least = min(seconds for pair, seconds in times.items() if rank in pair)
        if least <= factor * best:
            quick.add(rank)
        else:
            words = f"{least / best:.1f} times the best pair's time with every partner"
            found.append(Fault("slow rank", (rank,), words))
    for (a, b), seconds in times.items():
        if seconds > factor * best and {a, b} <= quick:
            found.append(Fault("slow link", (min(a, b), max(a, b)), f"{seconds / best:.1f} times the best pair's time"))
    return found


def _between(left: tuple[int, ...], right: tuple[int, ...], probe: Probe, factor: float) -> list[Fault]:
    """Return the slow link between two sets that are quick by themselves: halve one side, keep the half that is slow with the other."""
    ends = [left, right]
    for side in (0, 1):
        while len(ends[side]) > 1:
            middle = len(ends[side]) // 2
            halves = ends[side][:middle], ends[side][middle:]
            first, second = (probe(half + ends[1 - side]) for half in halves)
            ends[side] = halves[0] if first >= second else halves[1]
    (a,), (b,) = ends
    slow = probe((a, b))
    best = min(probe((a, left[0] if left[0] != a else left[1])), probe((b, right[0] if right[0] != b else right[1])))
    if slow <= factor * best:
        return []
    return [Fault("slow link", (min(a, b), max(a, b)), f"{slow / best:.1f} times the time of its ends with others")]
