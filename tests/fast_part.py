"""Which cases of a wide test run always: enough of them to show every value; the others are marked slow.

`make test` has to stay within a quarter of an hour on two slow cores, and most of a case's time is torch's: to trace a
block takes about a second, whatever is checked afterwards. `make test-full` runs all cases.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def name_of(value: Any) -> str:
    """What a value is called in the name of a test."""
    return getattr(value, "__name__", str(value))


def covering(*axes: Sequence[Any], ids: Callable[[Any], str] = name_of) -> list[Any]:
    """Parameters of all combinations of the axes' values; each value of each axis is in one that runs always."""
    kept = {tuple(place % len(axis) for axis in axes) for place in range(max(map(len, axes)))}
    return [
        pytest.param(*values, id="-".join(map(ids, values)), marks=() if places in kept else pytest.mark.slow)
        for places, values in zip(product(*(range(len(axis)) for axis in axes)), product(*axes), strict=True)
    ]


def first_of_each(cases: Iterable[Any], kind: Callable[[Any], Hashable], name: Callable[[Any], str]) -> list[Any]:
    """Parameters of the cases; the first of each kind runs always."""
    seen: set[Hashable] = set()
    found = []
    for case in cases:
        new = kind(case) not in seen
        seen.add(kind(case))
        found.append(pytest.param(case, id=name(case), marks=() if new else pytest.mark.slow))
    return found


def pairwise(*axes: Sequence[Any], ids: Callable[[Any], str] = name_of) -> list[Any]:
    """Parameters of all combinations; of any two axes, each pair of values is in one that runs always."""
    sizes = [range(len(axis)) for axis in axes]
    pairs = {places: set(combinations(enumerate(places), 2)) for places in product(*sizes)}
    left, kept = set().union(*pairs.values()), set()
    while left:
        best = max(pairs, key=lambda places: len(pairs[places] & left))
        left -= pairs[best]
        kept.add(best)
    return [
        pytest.param(*values, id="-".join(map(ids, values)), marks=() if places in kept else pytest.mark.slow)
        for places, values in zip(pairs, product(*axes), strict=True)
    ]


def one_in(every: int, cases: Iterable[Any], first: int = 0) -> list[Any]:
    """Parameters of the cases (a tuple is one case of several values); one in `every` runs always."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if keep else pytest.mark.slow)
        for case, keep in ((case, at % every == first) for at, case in enumerate(cases))
    ]
