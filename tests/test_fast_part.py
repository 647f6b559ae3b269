"""What runs always shows every value, or every pair of values; everything else is there and slow."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.fast_part import covering, first_of_each, one_in, pairwise

AXES = (("a", "b", "c", "d"), (1, 2), (True, False), (None, "x"))


def always(cases: list) -> list[tuple]:
    return [case.values for case in cases if not case.marks]


@pytest.mark.parametrize("choose", [covering, pairwise])
def test_no_combination_is_lost_and_those_that_do_not_run_always_are_slow(choose):
    cases = choose(*AXES)
    assert [case.values for case in cases] == list(product(*AXES))
    assert len({case.id for case in cases}) == len(cases)
    assert {mark.name for case in cases for mark in case.marks} == {"slow"}


def test_each_value_and_each_pair_of_values_runs_always():
    assert [set(values) for values in zip(*always(covering(*AXES)), strict=True)] == [set(axis) for axis in AXES]
    assert len(always(covering(*AXES))) == 4
    kept = always(pairwise(*AXES))
    for one, other in combinations(range(len(AXES)), 2):
        assert {(values[one], values[other]) for values in kept} == set(product(AXES[one], AXES[other]))
    assert len(kept) <= 10


def test_the_first_of_each_kind_and_one_in_so_many_run_always():
    assert always(first_of_each(range(7), lambda n: n % 3, str)) == [(0,), (1,), (2,)]
    assert always(one_in(3, range(7), 1)) == [(1,), (4,)]
    assert always(one_in(2, [("a", 1), ("b", 2)])) == [("a", 1)]
