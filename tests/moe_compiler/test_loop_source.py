"""A function without one of its loops: what fed only the loop goes, everything else and every line number stays."""

from __future__ import annotations

import functools
import inspect

import pytest

from moe_compiler.preparation.loop_source import read_source


def doubled(function):
    @functools.wraps(function)
    def twice(*args, **kwargs):
        return 2 * function(*args, **kwargs)

    return twice


class Sample:
    scale = 3
    seen: tuple[int, ...] = ()

    def plain(self, items, start: int = 1, *, extra: int = 0):
        total = start
        unread = 5
        fed = [item * self.scale for item in items]
        if extra:
            other = len(fed)
        else:
            other = 0
        picked = [item for item in fed if item]
        for item in picked:
            total += item
        last = total + extra + 0 * other
        return last + unread - 5

    @doubled
    def decorated(self, items):
        total = 0
        for item in items:
            total = total + item
        return total

    def branching(self, items, count):
        total = 0
        for item in items:
            if self.scale == item:
                total += 100
            if count > 1:
                total += 1
            if item == count:
                continue
            total += 10
        return total


def test_the_observer_sees_the_locals_before_and_after_each_stage():
    source = read_source(Sample.plain)
    (place,) = source.loops()
    assert source.receiver == "self" and place.after == 2
    assert {"picked", "total", "extra"} <= source.loaded(place)
    told = []
    function = source.observed(lambda index, stage, values: told.append((index, stage, values.get("total"))))
    assert function(Sample(), [1, 2]) == Sample().plain([1, 2]) == 10
    assert [(index, stage) for index, stage, _ in told] == [(0, -1), (0, 0), (0, 1)]
    assert [total for _, _, total in told] == [1, 10, 10]


def test_the_loop_and_what_only_it_read_are_left_out():
    source = read_source(Sample.plain)
    (place,) = source.loops()
    calls = []

    def dispatch(sample, *values):
        calls.append(values)
        return 1000

    function = source.without_loop(place, 0, "total", dispatch, ["start"])
    assert function(Sample(), [1], 4) == 1000 and function(Sample(), [1], extra=1) == 1001
    assert calls == [(4,), (1,)]
    names = function.__code__.co_varnames
    assert "picked" not in names and "fed" in names  # `other` still reads it
    assert "unread" in names

    function = source.without_loop(place, 1, "last", dispatch, [])
    assert function(Sample(), [1]) == 1000 and "total" not in function.__code__.co_varnames


def test_lines_defaults_names_and_decorators_stay():
    source = read_source(Sample.decorated)
    function = source.with_body(lambda sample, items: len(items), ["items"])
    assert function(Sample(), [1, 1, 1]) == 6
    changed = inspect.unwrap(function)
    original = inspect.unwrap(Sample.decorated)
    assert changed.__code__.co_filename == original.__code__.co_filename
    assert changed.__qualname__ == original.__qualname__
    first = original.__code__.co_firstlineno
    assert first <= min(line for _, _, line in changed.__code__.co_lines() if line) <= first + 2


def test_branches_on_more_than_the_module_and_the_number_are_left_out():
    source = read_source(Sample.branching)
    (place,) = source.loops()
    function = source.with_plain_loop(place, 5)
    # Five items whatever comes in: 10 each, 1 each of the flattened branch, 100 at item 3.
    assert function(Sample(), "anything", 0) == 5 * 11 + 100


def test_a_class_with_super_and_cells():
    size = 7

    class Base:
        def run(self, items):
            return 1

    class Child(Base):
        def run(self, items):
            total = super().run(items)
            for _ in items:
                total += size
            return total

    source = read_source(Child.run)
    (place,) = source.loops()
    observed = source.observed(lambda *_: None)
    assert observed(Child(), [1, 2]) == 15
    function = source.without_loop(place, 0, "total", lambda sample, total: total + 50, ["total"])
    assert function(Child(), [1, 2]) == 51


@pytest.mark.parametrize("function", [len, functools.partial(len), eval("lambda self: 0")])
def test_what_has_no_readable_definition(function):
    assert read_source(function) is None
