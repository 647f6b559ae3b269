"""The predicted schedule as a timeline: when each launch starts and ends, as text and as a Perfetto trace.

A launch starts when the launches it depends on, and the one before it on its stream, have ended. A programmatic edge
lets it start earlier, by the predicted gain: the consumer is then resident and runs its prologue while the producer
drains, so two launches of one stream overlap and a viewer needs a second lane for them. Where a launch carries no
prediction it counts as one unit, and everything built on that says so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from moe_compiler.report import ChainRecord, EdgeRecord, LaunchRecord, Report, VariantRecord

__all__ = ["Span", "gain_text", "lanes_of", "place", "schedule_text", "trace"]

UNIT_US = 1.0
# How much of the shorter of two kernels a programmatic edge hides in the picture when its gain has no prediction.
NOMINAL_OVERLAP = 0.25
UNIT_NOTE = "no prediction: each launch is drawn as one unit"


@dataclass(frozen=True)
class Span:
    """A launch in time, in microseconds from the start of its chain.

    early:     how long it runs before its producer has ended: the part that a programmatic start hides
    lane:      which lane of its stream it needs so that no two slices of a lane overlap
    predicted: False when the duration is the unit for want of a prediction
    """

    index: int
    launch: LaunchRecord
    start: float
    duration: float
    early: float
    lane: int
    predicted: bool

    @property
    def end(self) -> float:
        return self.start + self.duration


def place(variant: VariantRecord) -> list[Span]:
    """The launches of a variant in time, in their order. Edges whose ends are no launches are ignored."""
    incoming: dict[int, list[EdgeRecord]] = defaultdict(list)
    count = len(variant.launches)
    for edge in variant.edges:
        if 0 <= edge.producer < edge.consumer < count:
            incoming[edge.consumer].append(edge)
    spans: list[Span] = []
    last: dict[int, int] = {}  # stream -> position of its latest launch
    for index, launch in enumerate(variant.launches):
        duration = UNIT_US if launch.predicted_us is None else max(float(launch.predicted_us), 0.0)
        before = last.get(launch.stream)
        programmatic = [edge for edge in incoming[index] if edge.programmatic]
        ready = max((spans[edge.producer].end for edge in incoming[index] if not edge.programmatic), default=0.0)
        if before is not None and not any(edge.producer == before for edge in programmatic):
            ready = max(ready, spans[before].end)
        # A programmatic launch waits for its producer's end too, but with `early` of its own work already behind it.
        start, early = ready, 0.0
        for edge in programmatic:
            producer = spans[edge.producer]
            limit = min(producer.duration, duration)
            gain = limit * NOMINAL_OVERLAP if edge.predicted_us is None else min(max(edge.predicted_us, 0.0), limit)
            start = max(start, producer.end - gain, producer.start)
        if programmatic:
            early = max(0.0, max(spans[edge.producer].end for edge in programmatic) - start)
        others = [(span.start, span.end, span.lane) for span in spans if span.launch.stream == launch.stream]
        lane = _free_lane(others, start)
        spans.append(Span(index, launch, start, duration, early, lane, launch.predicted_us is not None))
        last[launch.stream] = index
    return spans


def _free_lane(taken: list[tuple[float, float, int]], start: float) -> int:
    """The lowest lane whose slices have all ended at `start`. Rounding in a sum of times is no overlap."""
    busy = {lane for _, end, lane in taken if end > start + 1e-9}
    return next(lane for lane in range(len(busy) + 1) if lane not in busy)


def lanes_of(intervals: Iterable[tuple[float, float]]) -> list[int]:
    """A lane for each (start, end), in the given order, so that no two of a lane overlap; as few as greedy needs.

    Intervals may come in any order; they are assigned by their start.
    """
    items = list(intervals)
    lanes = [0] * len(items)
    taken: list[tuple[float, float, int]] = []
    for index in sorted(range(len(items)), key=lambda position: items[position]):
        start, end = items[index]
        lanes[index] = _free_lane(taken, start)
        taken = [*(item for item in taken if item[1] > start), (start, end, lanes[index])]
    return lanes


def total_us(spans: list[Span]) -> float:
    """The end of the last launch."""
    return max((span.end for span in spans), default=0.0)


def trace(report: Report) -> dict[str, Any]:
    """The schedule in the JSON format that Perfetto and chrome://tracing read.

    One process for each (chain, variant): variants are alternatives, of which a call takes one. One thread for each
    lane of a stream. Programmatic edges are flow arrows from the producer's slice to the start of the consumer's.
    """
    events: list[dict[str, Any]] = []
    unpredicted = 0
    flow = 0
    process = 0
    for chain in report.folded_schedule():
        for variant in chain.variants:
            process += 1
            spans = place(variant)
            unpredicted += sum(not span.predicted for span in spans)
            events += _names(process, chain, variant, spans)
            events += [_slice(process, span) for span in spans]
            for edge in variant.edges:
                if edge.programmatic and 0 <= edge.producer < edge.consumer < len(spans):
                    flow += 1
                    events += _arrow(process, flow, edge, spans)
    metadata = {
        "generator": "moepdl",
        "frame": report.frame,
        "times": "predicted",
        "launches_without_prediction": unpredicted,
    }
    if unpredicted:
        metadata["note"] = UNIT_NOTE
    return {"displayTimeUnit": "ns", "otherData": metadata, "traceEvents": events}


def _thread(span: Span) -> int:
    """Streams far enough apart that their lanes cannot meet."""
    return span.launch.stream * 100 + span.lane + 1


def _names(process: int, chain: ChainRecord, variant: VariantRecord, spans: list[Span]) -> list[dict[str, Any]]:
    times = f" x{chain.count}" if chain.count > 1 else ""
    name = f"{chain.direction} {chain.name}{times}, {variant.name} ({variant.range_text})"
    events = [_metadata("process_name", process, 0, {"name": name})]
    events.append(_metadata("process_sort_index", process, 0, {"sort_index": process}))
    for thread, span in sorted({_thread(span): span for span in spans}.items()):
        events.append(
            _metadata("thread_name", process, thread, {"name": f"stream {span.launch.stream} lane {span.lane}"})
        )
        events.append(_metadata("thread_sort_index", process, thread, {"sort_index": thread}))
    return events


def _metadata(name: str, process: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": args}


def _slice(process: int, span: Span) -> dict[str, Any]:
    launch = span.launch
    args = {
        "reads": ", ".join(launch.reads),
        "writes": ", ".join(launch.writes),
        "weights": ", ".join(launch.weights),
        **launch.cost,
        "programmatic": launch.pdl,
        "early_us": round(span.early, 3),
        "duration": "predicted" if span.predicted else "one unit, no prediction",
    }
    return {
        "ph": "X",
        "name": launch.kernel,
        "cat": "launch",
        "pid": process,
        "tid": _thread(span),
        "ts": round(span.start, 3),
        "dur": round(span.duration, 3),
        "args": args,
    }


def _arrow(process: int, flow: int, edge: EdgeRecord, spans: list[Span]) -> list[dict[str, Any]]:
    producer, consumer = spans[edge.producer], spans[edge.consumer]
    # The arrow leaves where the consumer becomes resident, which lies within the producer's slice.
    leaves = min(max(consumer.start, producer.start), producer.end)
    common = {"name": "programmatic launch", "cat": "pdl", "id": flow, "pid": process}
    return [
        {"ph": "s", **common, "tid": _thread(producer), "ts": round(leaves, 3)},
        {"ph": "f", "bp": "e", **common, "tid": _thread(consumer), "ts": round(consumer.start, 3)},
    ]


def gain_text(edge: EdgeRecord, unit: str = "us") -> str:
    """What a programmatic start gains, or would: "gain 0.52 us predicted, 0.61 us measured"; "" when that is open."""
    known = (("predicted", edge.predicted_us), ("measured", edge.measured_us))
    parts = [f"{gain:.2f} {unit} {how}" for how, gain in known if gain is not None]
    return f"gain {', '.join(parts)}" if parts else ""


def _reason(edge: EdgeRecord | None) -> str:
    """Why a launch follows the one before it as it does, and what a programmatic start gains."""
    text = "" if edge is None else "; ".join(filter(None, (edge.why, gain_text(edge))))
    return f"  {text}" if text else ""


def _near_edges(variant: VariantRecord) -> dict[int, EdgeRecord]:
    """By consumer, the edge from the launch before it on its stream."""
    before: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, launch in enumerate(variant.launches):
        if launch.stream in last:
            before[index] = last[launch.stream]
        last[launch.stream] = index
    return {edge.consumer: edge for edge in variant.edges if before.get(edge.consumer) == edge.producer}


def _far_edges(variant: VariantRecord, near: dict[int, EdgeRecord]) -> list[str]:
    """The edges between launches that do not follow each other on a stream, one line for each reason."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for edge in variant.edges:
        if near.get(edge.consumer) is not edge:
            through = f" ({', '.join(edge.through)})" if edge.through else ""
            by_reason[f"{'programmatic' if edge.programmatic else 'plain'}  {edge.why}".rstrip()].append(
                f"{edge.producer} > {edge.consumer}{through}"
            )
    return [f"  edges {', '.join(edges)}: {reason}" for reason, edges in by_reason.items()]


def schedule_text(report: Report) -> str:
    """The schedule as a table for logs: a line a launch with its place in time, how it is launched and what that gains,
    then the edges between launches that do not follow each other on a stream.
    """
    lines = []
    for chain in report.folded_schedule():
        times = f" x{chain.count}" if chain.count > 1 else ""
        for variant in chain.variants:
            spans = place(variant)
            predicted = all(span.predicted for span in spans)
            total = f"{total_us(spans):.1f} us predicted" if predicted and spans else "no prediction"
            lines.append(f"{chain.direction} {chain.name}{times}, {variant.name} ({variant.range_text}): {total}")
            near = _near_edges(variant)
            for span in spans:
                how = "programmatic" if span.launch.pdl else "plain"
                reason = _reason(near.get(span.index))
                when = f"{span.start:9.1f} {span.duration:9.1f}" if span.predicted else f"{'-':>9} {'-':>9}"
                name = f"{span.launch.kernel:<20}"
                lines.append(f"  {span.index:2d} stream {span.launch.stream} {name} {when}  {how}{reason}".rstrip())
            lines += _far_edges(variant, near)
    return "\n".join(lines)
