"""Two pictures as inline SVG: the swim lanes of a chain's launches, and a dependency DAG.

Classes come from `moe_compiler.viz.style`; nothing is loaded and no script runs. Each picture has a title for screen
readers and a tooltip on each bar and box. The kind of an edge is told by its stroke (thick, thin, dashed) and a word.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from html import escape
from itertools import pairwise
from typing import Any

from moe_compiler.report import EdgeRecord, VariantRecord
from moe_compiler.viz.layout import Box, Layout, Route, text_width
from moe_compiler.viz.timeline import Span, gain_text, place, total_us

__all__ = ["dag", "edge_style", "lane_signs", "legend", "route_style", "swim_lanes"]

WIDTH = 1036.0
ROW = 30.0
BAR = 18.0
BAND_PADDING = 6.0
STREAM_WIDTH = 74.0
AXIS_HEIGHT = 30.0
MIN_BAR = 2.0
GAP = 7.0  # between two lines, so that their heads do not touch


def edge_style(edge: EdgeRecord, variant: VariantRecord) -> str:
    """ "pdl" for a programmatic edge; "plain" between neighbours of a stream, of which one reads or overwrites what the
    other wrote; else "data".
    """
    if edge.programmatic:
        return "pdl"
    return "plain" if _neighbours(edge, variant) and edge.kind not in ("order", "effect") else "data"


def _neighbours(edge: EdgeRecord, variant: VariantRecord) -> bool:
    """Are the ends launches of one stream with no other launch of it between them?"""
    streams = [launch.stream for launch in variant.launches]
    between = streams[edge.producer + 1 : edge.consumer]
    return streams[edge.producer] == streams[edge.consumer] and streams[edge.producer] not in between


def lane_signs(variants: Iterable[VariantRecord]) -> set[str]:
    """What the legend of these swim lanes has to explain: styles of edges, and "early" for the hatch."""
    signs = set()
    for variant in variants:
        count = len(variant.launches)
        signs |= {edge_style(edge, variant) for edge in variant.edges if 0 <= edge.producer < edge.consumer < count}
        signs |= {"early" for span in place(variant) if span.early}
    return signs


def swim_lanes(variant: VariantRecord, identity: str, title: str) -> str:
    """A band for each stream and in it a row for each launch, from left to right in time.

    `identity` must be unique in a page. The hatched part of a bar runs before its producer has ended: a programmatic
    start. Without predictions the axis counts units.
    """
    spans = place(variant)
    if not spans:
        return ""
    predicted = all(span.predicted for span in spans)
    unit = "µs" if predicted else "units"
    total = total_us(spans) or 1.0
    names = [f"{span.index}  {span.launch.kernel}" for span in spans]
    label = min(max(text_width(name, 12) for name in names) + 18, 260.0)
    left = STREAM_WIDTH + label
    right = WIDTH - 74.0
    scale = (right - left) / total

    rows: dict[int, float] = {}
    bands = []
    y = 4.0
    for stream in sorted({span.launch.stream for span in spans}):
        own = [span for span in spans if span.launch.stream == stream]
        height = len(own) * ROW + 2 * BAND_PADDING
        bands.append((stream, y, height))
        for number, span in enumerate(own):
            rows[span.index] = y + BAND_PADDING + number * ROW + ROW / 2
        y += height + 8.0
    bottom = y - 8.0

    parts = list(_frame(identity, title, WIDTH, bottom + AXIS_HEIGHT))
    for stream, top, height in bands:
        parts.append(_rect(0.5, top, WIDTH - 1, height, "band", radius=6))
        parts.append(_text(12, top + BAND_PADDING + ROW / 2 + 4, f"stream {stream}", "small strong"))
    for tick in _ticks(total):
        x = left + tick * scale
        parts.append(f'<line class="grid" x1="{_n(x)}" y1="4" x2="{_n(x)}" y2="{_n(bottom)}"/>')
        parts.append(_text(x, bottom + 18, f"{tick:g}", "small", anchor="middle"))
    parts.append(_text(right + 16, bottom + 18, unit, "small"))
    first = min(span.launch.stream for span in spans)
    edges = [edge for edge in variant.edges if 0 <= edge.producer < edge.consumer < len(spans)]
    near = [edge for edge in edges if edge.programmatic or _neighbours(edge, variant)]
    far = [edge for edge in edges if not (edge.programmatic or _neighbours(edge, variant))]
    bars = {
        span.index: (left + span.start * scale, left + span.start * scale + max(span.duration * scale, MIN_BAR))
        for span in spans
    }
    drawn = [
        (edge, edge_style(edge, variant), path)
        for edge, path in [
            *((edge, _near_path(edge, bars, rows)) for edge in near),
            *zip(far, _far_paths(far, bars, rows), strict=True),
        ]
    ]
    for span, name in zip(spans, names, strict=True):
        parts.append(_bar(span, name, rows[span.index], left, scale, predicted, span.launch.stream != first, identity))
    parts += [_lane_edge(edge, style, path, spans, identity) for edge, style, path in drawn]
    parts.append("</svg>")
    return "".join(parts)


def _frame(identity: str, title: str, width: float, height: float) -> Iterator[str]:
    """The svg element with its title, arrow heads and the hatch."""
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-labelledby="{identity}-title" width="{_n(width)}" '
        f'height="{_n(height)}" viewBox="0 0 {_n(width)} {_n(height)}">'
    )
    yield f'<title id="{identity}-title">{escape(title)}</title><defs>'
    for kind in ("edge", "pdl"):
        size = 4.5 if kind == "edge" else 4
        yield (
            f'<marker id="{identity}-{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="{size}" '
            f'markerHeight="{size}" orient="auto"><path class="tip {kind}" d="M0 0 L8 4 L0 8 z"/></marker>'
        )
    yield (
        f'<pattern id="{identity}-hatch" width="5" height="5" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><line class="hatch" x1="0" y1="0" x2="0" y2="5"/></pattern></defs>'
    )


def _bar(
    span: Span, name: str, y: float, left: float, scale: float, predicted: bool, other: bool, identity: str
) -> str:
    x = left + span.start * scale
    width = max(span.duration * scale, MIN_BAR)
    launch = span.launch
    how = "programmatic start" if launch.pdl else "plain launch"
    facts = [f"{launch.kernel}: {how}"]
    if predicted:
        facts.append(f"{span.start:.1f} to {span.end:.1f} µs, {span.duration:.1f} µs")
    if span.early:
        facts.append(f"starts {span.early:.1f} {'µs' if predicted else 'units'} before its producer ends")
    facts += [
        f"{verb} {', '.join(names)}"
        for verb, names in (("reads", launch.reads), ("writes", launch.writes), ("weights", launch.weights))
        if names
    ]
    parts = [f"<g><title>{escape(chr(10).join(facts))}</title>"]
    parts.append(_text(STREAM_WIDTH, y + 4, _cut(name, left - STREAM_WIDTH - 10)))
    parts.append(_rect(x, y - BAR / 2, width, BAR, "bar other" if other else "bar", radius=min(3.0, width / 2)))
    if span.early:
        hatched = max(min(span.early * scale, width), MIN_BAR)
        parts.append(
            f'<rect class="early" x="{_n(x)}" y="{_n(y - BAR / 2)}" width="{_n(hatched)}" height="{_n(BAR)}" '
            f'fill="url(#{identity}-hatch)"/>'
        )
    if predicted:
        text = f"{span.duration:.1f} µs"
        hidden = max(min(span.early * scale, width), MIN_BAR) if span.early else 0.0
        if width - hidden > text_width(text, 11) + 14:
            parts.append(_text(x + hidden + (width - hidden) / 2, y + 4, text, "inside", anchor="middle"))
        else:
            parts.append(_text(x + width + 7, y + 4, text, "small"))
    return "".join([*parts, "</g>"])


def _near_path(edge: EdgeRecord, bars: dict[int, tuple[float, float]], rows: dict[int, float]) -> str:
    """From the producer's bar to the start of the consumer's, which is in the next row, above or below it."""
    sign = 1.0 if rows[edge.consumer] > rows[edge.producer] else -1.0
    y1, y2 = rows[edge.producer] + sign * BAR / 2, rows[edge.consumer] - sign * (BAR / 2 + 0.5)
    x2 = bars[edge.consumer][0] + 1.5
    if edge.programmatic:
        return f"M{_n(x2)} {_n(y1)} V{_n(y2)}"
    x1, middle = bars[edge.producer][1] - 1, (y1 + y2) / 2
    return f"M{_n(x1)} {_n(y1)} C{_n(x1)} {_n(middle)} {_n(x2)} {_n(middle)} {_n(x2)} {_n(y2)}"


def _far_paths(edges: list[EdgeRecord], bars: dict[int, tuple[float, float]], rows: dict[int, float]) -> list[str]:
    """Down (or up) beside the bars in between, then along the consumer's row, which is empty ahead of its bar.

    No two verticals run closer than GAP, and each edge enters the consumer's bar at a height of its own.
    """
    taken: list[tuple[float, float, float]] = []
    entries: dict[int, list[EdgeRecord]] = {}
    for edge in edges:
        entries.setdefault(edge.consumer, []).append(edge)
    paths = []
    for edge in edges:
        others = entries[edge.consumer]
        step = min(8.0, (BAR - 6) / max(len(others) - 1, 1))
        y2 = rows[edge.consumer] + (others.index(edge) - (len(others) - 1) / 2) * step
        low, high = sorted((rows[edge.producer], y2))
        first, last = bars[edge.producer]
        start = bars[edge.consumer][0]
        blocked = [
            (bars[index][0] - 1, bars[index][1] + 3)
            for index, y in rows.items()
            if index not in (edge.producer, edge.consumer) and low < y < high
        ]
        # The arrow of a neighbour leaves where its consumer starts; its head is as wide as GAP.
        blocked += (
            [(bars[edge.producer + 1][0] - GAP, bars[edge.producer + 1][0] + GAP)] if edge.producer + 1 in bars else []
        )
        blocked += [(x - GAP, x + GAP) for x, top, bottom in taken if top < high and bottom > low]
        limit = start - 12  # room for the head
        x1 = _free_x(min(last - 3, limit), first + 1, limit, blocked)
        taken.append((x1, low, high))
        sign = 1.0 if y2 > rows[edge.producer] else -1.0
        if x1 <= last:
            head = f"M{_n(x1)} {_n(rows[edge.producer] + sign * BAR / 2)}"
        else:  # out of the producer's right end
            head = f"M{_n(last)} {_n(rows[edge.producer])} H{_n(x1)}"
        paths.append(f"{head} V{_n(y2)} H{_n(start - 0.5)}")
    return paths


def _free_x(wish: float, low: float, high: float, blocked: list[tuple[float, float]]) -> float:
    """The place nearest to the wish that lies in no blocked interval: to the left down to `low`, then to the right."""
    inside = [end for begin, end in blocked for end in (begin, end)]
    places = [x for x in (wish, *inside) if not any(begin < x < end for begin, end in blocked)]
    left = [x for x in places if low <= x <= wish]
    right = [x for x in places if wish <= x <= high]
    # Nothing is free only where bars are narrower than the lines: left of them all nothing is in the way but names.
    return max(left) if left else min(right) if right else min([low - GAP, *(x for x in places if x < low)])


def _lane_edge(edge: EdgeRecord, style: str, path: str, spans: list[Span], identity: str) -> str:
    words = {"pdl": "programmatic edge", "plain": "plain edge", "data": "dependence"}[style]
    title = f"{spans[edge.producer].launch.kernel} to {spans[edge.consumer].launch.kernel}: {words}, {edge.kind}"
    title += f" through {', '.join(edge.through)}" if edge.through else ""
    title += f"; {edge.why}" if edge.why else ""
    gain = gain_text(edge, "µs")
    title += f"; {gain}" if gain else ""
    head = "pdl" if style == "pdl" else "edge"
    return _line(title, style, path, f"{identity}-{head}")


def _ticks(total: float) -> list[float]:
    """Round numbers from zero, at most nine."""
    step = 10.0 ** math.floor(math.log10(total / 4 if total > 0 else 1.0))
    for factor in (1, 2, 5, 10):
        if total / (step * factor) <= 8:
            step *= factor
            break
    return [round(step * index, 6) for index in range(int(total / step + 1e-9) + 1)]


def legend(signs: Iterable[str], *, dag: bool = False) -> str:
    """What the strokes and the hatch of a picture mean, of those that it has; "" for none."""
    present = set(signs)
    plain = "what one writes the other reads" if dag else "the consumer starts after the producer has ended"
    samples = [
        ("pdl", '<path class="line pdl" d="M1 8 H27"/>', "programmatic edge (PDL)"),
        ("plain", '<path class="line plain" d="M1 8 H27"/>', f"plain edge: {plain}"),
        (
            "data",
            '<path class="line data" d="M1 8 H27"/>',
            "any other order" if dag else "between launches that are not neighbours, or an order without data",
        ),
        (
            "early",
            '<rect class="bar" x="1" y="2" width="26" height="12" rx="2"/>'
            '<path class="hatch" d="M2 13 L8 3 M6 13 L12 3 M10 13 L16 3"/>',
            "hatched: runs before its producer has ended",
        ),
    ]
    items = "".join(
        f'<li><svg width="28" height="16" viewBox="0 0 28 16" aria-hidden="true">{sample}</svg>{escape(text)}</li>'
        for sign, sample, text in samples
        if sign in present
    )
    return f'<ul class="legend">{items}</ul>' if items else ""


def route_style(route: Route) -> str:
    """The style of a DAG's edge: "pdl", "plain" for a read after a write, else "data"."""
    if route.edge.get("programmatic"):
        return "pdl"
    return "plain" if str(route.edge.get("kind", "raw")) == "raw" and not route.backward else "data"


def dag(layout: Layout, identity: str, title: str) -> str:
    """A laid out DAG. A box is a stage, a slanted one an exchange between ranks; dotted: operators around the block."""
    parts = list(_frame(identity, title, layout.width, layout.height))
    boxes = {box.id: box for box in layout.boxes}
    parts += [_route(route, boxes, identity) for route in layout.routes]
    parts += [_box(box) for box in layout.boxes]
    parts += [_mark(route) for route in layout.routes if route.edge.get("programmatic")]
    return "".join([*parts, "</svg>"])


def _box(box: Box) -> str:
    x, y, width, height = box.x, box.y, box.width, box.height
    if box.kind == "exchange":
        slant = 7.0
        corners = [(x + slant, y), (x + width + slant, y), (x + width - slant, y + height), (x - slant, y + height)]
        points = " ".join(f"{_n(a)},{_n(b)}" for a, b in corners)
        shape = f'<polygon class="box exchange" points="{points}"/>'
    elif box.kind in ("input", "output"):
        shape = _rect(x, y, width, height, "box end", radius=height / 2)
    elif box.kind == "neighbour":
        shape = _rect(x, y, width, height, "box end", radius=5)
    else:
        shape = _rect(x, y, width, height, "box", radius=5)
    first = y + height / 2 + 4 - (len(box.lines) - 1) * 8
    texts = [
        _text(x + width / 2, first + 16 * number, line, "strong" if number == 0 else "small", anchor="middle")
        for number, line in enumerate(box.lines)
    ]
    return f"<g><title>{escape(box.title)}</title>{shape}{''.join(texts)}</g>"


def _route(route: Route, boxes: dict[str, Box], identity: str) -> str:
    programmatic = bool(route.edge.get("programmatic"))
    kind = str(route.edge.get("kind", "raw"))
    style = route_style(route)
    points = route.points
    path = f"M{_n(points[0][0])} {_n(points[0][1])}"
    for (x1, y1), (x2, y2) in pairwise(points):
        middle = (y1 + y2) / 2
        path += f" C{_n(x1)} {_n(middle)} {_n(x2)} {_n(middle)} {_n(x2)} {_n(y2)}"
    source, target = boxes[route.source].lines[0], boxes[route.target].lines[0]
    word = "programmatic, " if programmatic else ""
    title = f"{source} to {target}: {word}{kind}" + (f"; {route.edge['why']}" if route.edge.get("why") else "")
    head = "pdl" if programmatic else "edge"
    return _line(title, style, path, f"{identity}-{head}")


def _line(title: str, style: str, path: str, marker: str) -> str:
    shape = f'<path class="line {style}" d="{path}" marker-end="url(#{marker})"/>'
    return f"<g><title>{escape(title)}</title>{shape}</g>"


def _mark(route: Route) -> str:
    """The word PDL beside a programmatic edge."""
    (x1, y1), (x2, y2) = route.points[0], route.points[1]
    return _text((x1 + x2) / 2, (y1 + y2) / 2 + 4, "PDL", "mark", anchor="middle")


def _rect(x: float, y: float, width: float, height: float, style: str, *, radius: float = 0.0) -> str:
    return (
        f'<rect class="{style}" x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" rx="{_n(radius)}"/>'
    )


def _text(x: float, y: float, text: str, style: str = "", *, anchor: str = "start") -> str:
    where = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text class="{style}" x="{_n(x)}" y="{_n(y)}"{where}>{escape(text)}</text>'


def _cut(text: str, width: float) -> str:
    """The text shortened to a width, with an ellipsis."""
    if text_width(text, 12) <= width:
        return text
    while text and text_width(text + "…", 12) > width:
        text = text[:-1]
    return text + "…"


def _n(value: Any) -> str:
    """A number for an attribute: two decimals at most, the same text everywhere."""
    return f"{float(value):.2f}".rstrip("0").rstrip(".")
