"""A function without one of its loops: what fed only the loop goes, everything else and every line number stays."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap

import pytest

from moe_compiler.preparation.loop_effects import LoopReading
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

    def branching(self, items, count, rows=()):
        total = 0
        for item in items:
            part = rows
            if self.scale == item:
                total += 100 + len(part)
            if count > 1:
                total += len(part) + 1000
            if len(part) == 0:
                continue
            total += 10 * len(part)
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


def test_only_branches_about_rows_are_left_out():
    source = read_source(Sample.branching)
    (place,) = source.loops()
    function = source.with_plain_loop(place, 5)
    # Five items whatever comes in, ten a row and item; item 3 is the module's own case, and `count` still decides.
    assert function(Sample(), "anything", 0, (7, 7)) == 5 * 20 + 102
    assert function(Sample(), "anything", 2, (7, 7)) == 5 * (20 + 1002) + 102
    assert function(Sample(), "anything", 0) == 100


def _reading(code):
    """What is read in the first loop of a method (self, x, ids, w, cap) with this body."""
    function = ast.parse("def run(self, x, ids, w, cap):\n" + textwrap.indent(textwrap.dedent(code), "    ")).body[0]
    loop = next(node for node in ast.walk(function) if isinstance(node, ast.For))
    return LoopReading(function, loop, "self")


NONE = """t.numel() == 0|0 == t.numel()|t.numel() < 1|1 > t.numel()|t.numel() <= 0|len(t) == 0|t.shape[0] == 0
t.size(0) == 0|t.size()[0] == 0|not t.numel()|not len(t)|not mask.any()|not mask.any().item()|mask.sum() == 0
not torch.any(ids == e)|(ids == e).sum().item() == 0|not (t.numel() > 0)|n == 0|len(t) == 0 or n < 1
mask.any() == False"""
SOME = """t.numel() > 0|t.numel() != 0|t.numel() >= 1|0 < t.numel()|t.numel()|len(t)|t.shape[0] > 0
mask.any()|mask.sum() > 0|n > 0|not t.numel() == 0|t.numel() > 0 and mask.any()"""
NEITHER = """t.numel() < 2|t.numel() > cap|t.numel() <= 1|t.numel() == 1|t.shape[1] == 0|t.size(1) == 0
x.sum() == 0|x.any()|w[t].sum() > 0|t.numel() == 0 or cap|t.numel() > 0 and t.numel() < 9|e == 0
self.scale == 0|t.numel() % 2 == 0|cap
0 < t.numel() < 4|not t.numel() > 1"""


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (kind, test)
        for kind, tests in (("none", NONE), ("some", SOME), ("", NEITHER))
        for test in re.split(r"[|\n]", tests)
    ],
)
def test_which_conditions_are_whether_there_are_rows(kind, test):
    reading = _reading(
        "for e in range(8):\n    mask = ids == e\n    t = torch.where(mask)[0]\n    n = len(t)\n    pass"
    )
    assert reading.rows(ast.parse(test, mode="eval").body) == kind


SUM = """
out = torch.zeros_like(x)
for e in ids.unique():
    t, k = torch.where(ids == e)
    {}
    y = self.experts[e](x[t]) * w[t, k, None]
    {}
    out[t] += y
    {}
return out
"""


@pytest.mark.parametrize(
    ("first", "then", "last", "with_loop", "more"),
    [
        ("", "", "", "", ""),
        ("if not len(t): continue", "y = y * 2", "", "", ""),
        ("if e == self.none: continue", "", "", "", ""),
        ("if len(t) > cap: t, k = t[:cap], k[:cap]", "", "", "not only whether", ""),
        ("t, k = t[:cap], k[:cap]", "", "", "cuts off rows", ""),
        ("n = min(len(t), cap)", "", "", "limits how many", ""),
        ("", "y = y * 2 if len(t) > 4 else y", "", "not only whether", ""),
        ("", "y = y * scale", "scale *= 0.5", "`scale` is carried", "`scale` is carried"),
        ("", "y = y * scale", "scale = scale * 0.5", "`scale` is carried", "`scale` is carried"),
        ("", "", "hit += 1", "more than one result", "counts the experts"),
        ("", "", "seen.append(e)", "more than one result", "counts the experts"),
        ("", "", "sizes.append(len(t))", "more than one result", ""),
        ("", "", "self.load[e] += len(t)", "into the module", ""),
        ("", "", "self.load[e] += 1", "into the module", "into the module"),
        ("", "", "self.load.add_(len(t))", "into the module", "into the module"),
        ("", "", "self.counts.append(len(t))", "into the module", "into the module"),
        ("", "", "self.last = e", "an attribute", "an attribute"),
        ("", "", "self.note(e)", "called for what it does", "called for what it does"),
        ("", "", "print(e)", "called for what it does", "called for what it does"),
        ("assert len(t) < cap", "", "", "not only whether", ""),
    ],
)
def test_what_a_loop_does_besides_its_sum(first, then, last, with_loop, more):
    reading = _reading(SUM.format(first, then, last))
    for found, expected in ((reading.lost_with_the_loop(), with_loop), (reading.lost_on_more_experts(), more)):
        told = "; ".join(effect.what for effect in found)
        assert expected in told and bool(expected) is bool(told), told


def test_bounds_of_sorted_rows_are_no_carried_values():
    code = """
    start, outputs = 0, []
    for e, n in enumerate(counts):
        end = start + int(n)
        if start == end:
            continue
        outputs.append(self.experts[e](x[start:end]))
        start = end
    return torch.cat(outputs)
    """
    assert _reading(code).lost_with_the_loop() == _reading(code).lost_on_more_experts() == []
    (effect,) = _reading(code.replace("torch.cat(outputs)", "torch.cat(outputs), end")).lost_with_the_loop()
    assert effect.what.startswith("`end` is read behind the loop") and effect.line == 5


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
