# SPDX-License-Identifier: Apache-2.0
"""The bisecting search, over links that exist in a model only: up to 40 ranks, one or two faults anywhere."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from zeropp.health import search

FACTOR = 3.0


def probe_of(slow_ranks: set[int], slow_links: set[frozenset[int]]):
    """Return the time of an all-reduce when every rank exchanges with every other."""

    def probe(ranks: tuple[int, ...]) -> float:
        assert len(set(ranks)) == len(ranks) >= 2
        ill = slow_ranks & set(ranks) or any(link <= set(ranks) for link in slow_links)
        return (20.0 if ill else 1.0) * 2 * (len(ranks) - 1) / len(ranks)

    return probe


def found(ranks: int, slow_ranks=(), slow_links=()) -> list[tuple[str, tuple[int, ...]]]:
    probe = probe_of(set(slow_ranks), {frozenset(link) for link in slow_links})
    return [(fault.kind, fault.ranks) for fault in search(range(ranks), probe, FACTOR)]


@given(st.integers(1, 40))
def test_healthy_ranks_are_left_alone(ranks: int) -> None:
    assert found(ranks) == []


@given(st.integers(3, 40), st.data())
def test_a_slow_rank_is_found(ranks: int, data: st.DataObject) -> None:
    failed_rank = data.draw(st.integers(0, ranks - 1))
    assert found(ranks, [failed_rank]) == [("slow rank", (failed_rank,))]


@given(st.integers(3, 40), st.data())
def test_a_slow_link_is_found(ranks: int, data: st.DataObject) -> None:
    a, b = sorted(data.draw(st.sets(st.integers(0, ranks - 1), min_size=2, max_size=2)))
    assert found(ranks, slow_links=[(a, b)]) == [("slow link", (a, b))]


@given(st.integers(9, 40), st.data())
def test_two_slow_ranks_are_found(ranks: int, data: st.DataObject) -> None:
    a, b = sorted(data.draw(st.sets(st.integers(0, ranks - 1), min_size=2, max_size=2)))
    assert found(ranks, [a, b]) == [("slow rank", (a,)), ("slow rank", (b,))]


def test_two_ranks_cannot_be_told_apart() -> None:
    assert found(2, [1]) == []


def test_the_search_asks_for_few_sets() -> None:
    asked: list[tuple[int, ...]] = []
    probe = probe_of({17}, set())

    def counting(ranks: tuple[int, ...]) -> float:
        asked.append(ranks)
        return probe(ranks)

    search(range(64), counting, FACTOR)
    assert len(asked) < 64 * 63 / 2 / 10
