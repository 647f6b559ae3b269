"""The predicted timeline: when launches start, which lane they need, and a trace that keeps Perfetto's rules."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_compiler.report import ChainRecord, EdgeRecord, LaunchRecord, Report, VariantRecord
from moe_compiler.viz.timeline import UNIT_NOTE, lanes_of, place, schedule_text, total_us, trace


def variant(*durations: float | None, edges=(), streams=None) -> VariantRecord:
    streams = streams or [0] * len(durations)
    launches = tuple(
        LaunchRecord(f"k{index}", predicted_us=us, stream=stream)
        for index, (us, stream) in enumerate(zip(durations, streams, strict=True))
    )
    return VariantRecord("v", None, launches, tuple(edges))


def test_plain_launches_follow_one_another():
    spans = place(variant(4.0, 10.0, 3.0))
    assert [(span.start, span.end, span.early, span.lane) for span in spans] == [
        (0, 4, 0, 0),
        (4, 14, 0, 0),
        (14, 17, 0, 0),
    ]


def test_a_programmatic_launch_starts_early_by_the_predicted_gain():
    spans = place(variant(4.0, 10.0, edges=[EdgeRecord(0, 1, "raw", True, predicted_us=1.5)]))
    assert (spans[1].start, spans[1].end, spans[1].early, spans[1].lane) == (2.5, 12.5, 1.5, 1)
    assert total_us(spans) == 12.5


def test_the_gain_cannot_exceed_either_kernel():
    spans = place(variant(2.0, 10.0, edges=[EdgeRecord(0, 1, "raw", True, predicted_us=50.0)]))
    assert spans[1].start == 0.0
    spans = place(variant(10.0, 2.0, edges=[EdgeRecord(0, 1, "raw", True, predicted_us=50.0)]))
    assert (spans[1].start, spans[1].end) == (8.0, 10.0)


def test_streams_run_beside_each_other_and_join_at_an_edge():
    spans = place(variant(4.0, 9.0, 1.0, streams=[0, 1, 0], edges=[EdgeRecord(1, 2), EdgeRecord(0, 2)]))
    assert [(span.start, span.lane) for span in spans] == [(0, 0), (0, 0), (9, 0)]


def test_a_launch_without_prediction_is_one_unit_and_says_so():
    spans = place(variant(None, None, edges=[EdgeRecord(0, 1, "raw", True)]))
    assert [(span.start, span.duration, span.predicted) for span in spans] == [(0, 1, False), (0.75, 1, False)]


def test_edges_that_name_no_launch_are_ignored():
    assert len(place(variant(1.0, edges=[EdgeRecord(0, 7), EdgeRecord(-1, 0), EdgeRecord(0, 0)]))) == 1


def test_a_chain_of_three_needs_two_lanes(samples):
    spans = place(samples.many())
    own = [(span.launch.kernel, span.lane) for span in spans if span.launch.stream == 0]
    assert own == [("order", 0), ("gate_up", 1), ("down", 0), ("combine", 0)]
    assert lanes_of([(0, 10), (8, 20), (18, 30)]) == [0, 1, 0]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=30))
def test_no_two_slices_of_a_lane_overlap(items):
    intervals = [(float(start), float(start + length)) for start, length in items]
    lanes = lanes_of(intervals)
    for lane in set(lanes):
        own = sorted(interval for interval, number in zip(intervals, lanes, strict=True) if number == lane)
        for (_, end), (start, _) in pairwise(own):
            assert end <= start
    deepest = max((sum(start <= time < end for start, end in intervals) for time, _ in intervals), default=0)
    assert len(set(lanes)) == deepest


def test_trace_has_a_process_a_variant_and_a_thread_a_lane(samples):
    events = trace(samples.sample())["traceEvents"]
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert processes == [
        "forward layers.0.mlp x32, few (T <= 4)",
        "forward layers.0.mlp x32, many (any T)",
        "backward layers.0.mlp x32, many (any T)",
    ]
    threads = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 2
    }
    assert threads == {1: "stream 0 lane 0", 2: "stream 0 lane 1", 101: "stream 1 lane 0"}


def test_slices_of_a_thread_never_overlap(samples):
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in trace(samples.sample())["traceEvents"]:
        if event["ph"] == "X":
            slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(slices) == 7
    for own in slices.values():
        own.sort()
        for (_, end), (start, _) in pairwise(own):
            assert end <= start + 1e-3


def test_flow_arrows_bind_to_slices_of_producer_and_consumer(samples):
    events = trace(samples.sample())["traceEvents"]
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert len(starts) == 1 + 2 + 4
    assert starts.keys() == ends.keys()
    slices = [event for event in events if event["ph"] == "X"]
    for number, arrow in starts.items():
        end = ends[number]
        assert end["bp"] == "e"
        for point in (arrow, end):
            inside = [
                item
                for item in slices
                if (item["pid"], item["tid"]) == (point["pid"], point["tid"])
                and item["ts"] - 1e-3 <= point["ts"] <= item["ts"] + item["dur"] + 1e-3
            ]
            assert inside, point
        assert arrow["ts"] == pytest.approx(end["ts"])


def test_metadata_says_what_is_predicted(samples):
    full = trace(samples.sample())["otherData"]
    assert full == {"generator": "moepdl", "frame": "0/0", "times": "predicted", "launches_without_prediction": 0}
    bare = Report("0/0", "rewritten", schedule=[ChainRecord("c", "forward", (variant(None, 2.0),))])
    data = trace(bare)
    assert data["otherData"]["launches_without_prediction"] == 1
    assert data["otherData"]["note"] == UNIT_NOTE
    durations = [event["args"]["duration"] for event in data["traceEvents"] if event["ph"] == "X"]
    assert durations == ["one unit, no prediction", "predicted"]


def test_trace_is_json_and_stable(samples):
    assert json.dumps(trace(samples.sample())) == json.dumps(trace(samples.sample()))
    assert trace(samples.nothing())["traceEvents"] == []


def test_schedule_text_is_a_line_a_launch(samples):
    lines = schedule_text(samples.sample()).splitlines()
    assert lines[0] == "forward layers.0.mlp x32, few (T <= 4): 8.1 us predicted"
    assert lines[1].split() == ["0", "stream", "0", "gate_up_few", "0.0", "5.8", "plain"]
    assert lines[2].split()[:7] == ["1", "stream", "0", "down_few", "4.2", "3.9", "programmatic"]
    assert lines[2].endswith("; gain 1.60 us predicted")
    assert lines[5].endswith("programmatic  adjacent; gain 2.90 us predicted")
    far = [line for line in lines if line.startswith("  edges ")]
    assert far == [
        "  edges 0 > 3 (perm, starts): plain  complete before the parent's wait returned",
        "  edges 2 > 4 (shared): plain  another stream: joined by an event",
        "  edges 0 > 2 (grad_preact): plain  complete before the parent's wait returned",
    ]
    assert len(lines) == 3 + (6 + 2) + (6 + 1)
    bare = Report("0/0", "rewritten", schedule=[ChainRecord("c", "forward", (variant(None),))])
    assert schedule_text(bare).splitlines() == [
        "forward c, v (any T): no prediction",
        "   0 stream 0 k0                           -         -  plain",
    ]
