"""Timings in turns, the ratio and its interval, and the progress line."""

from __future__ import annotations

import io

import pytest

from moe_compiler import progress, timing


def test_every_way_is_called_once_a_round_and_takes_its_turn_first():
    calls: list[str] = []
    ways = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    samples = timing.interleaved(ways, budget_s=0, rounds=(4, 9), warmup=1)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab" + "abc"
    assert {name: len(values) for name, values in samples.items()} == {"a": 4, "b": 4, "c": 4}
    assert all(value >= 0 for values in samples.values() for value in values)


def test_rounds_stop_at_the_most():
    samples = timing.interleaved({"a": lambda: None}, budget_s=60, rounds=(1, 5))
    assert len(samples["a"]) == 5


def test_the_ratio_holds_its_interval_and_is_the_same_on_every_run():
    base = [1.0, 1.1, 0.9, 1.0, 1.2, 1.0, 0.95, 1.05]
    found = timing.ratio([2 * value for value in base], base)
    assert found == timing.ratio([2 * value for value in base], base)
    assert found.low <= found.value <= found.high
    # Rounds are drawn whole: noise that both ways share leaves no doubt.
    assert found.low == pytest.approx(2.0) == found.high
    assert str(found) == "2.00 (2.00-2.00)"


def test_samples_of_different_rounds_are_refused():
    with pytest.raises(ValueError, match="3 samples against 2"):
        timing.ratio([1.0, 1.0, 1.0], [1.0, 1.0])


def test_environment_names_what_a_timing_belongs_to():
    found = timing.environment("cpu")
    assert {"python", "torch", "moepdl", "device"} <= set(found)
    assert "threads" in found["device"]


def test_short_work_prints_nothing():
    stream = io.StringIO()
    with progress.Progress("work", stream) as line:
        line.step("quick")
    assert stream.getvalue() == ""


def test_long_work_says_what_it_does(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress, "QUIET_S", 0.02)
    monkeypatch.setattr(progress, "HEARTBEAT_S", 60.0)
    stream = io.StringIO()
    with progress.Progress("work", stream) as line:
        line.step("compiling")
        line._done.wait(0.3)
    assert stream.getvalue() == "moepdl [0s] work: compiling\n"
