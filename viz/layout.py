"""Where the boxes and lines of a DAG picture go: layers from top to bottom, few crossings, boxes as wide as their text.

Layers are networkx's topological generations; a line that skips layers gets a bend in each of them, so that it goes
around boxes and not behind them; order within a layer is by barycentre, swept down and up; then boxes move towards the
middle of their neighbours as far as their order allows. Fast enough for ten thousand nodes, and the same input gives
the same picture. Equal parts (the layers of a model) are drawn once, and since more than `VISIBLE_NODES` boxes help
nobody, beyond that number equal labels are merged.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import networkx as nx

from moe_compiler.report import DagRecord

__all__ = ["VISIBLE_NODES", "Box", "Layout", "Route", "amount", "fold", "lay_out", "text_width"]

VISIBLE_NODES = 400
MAX_FORMULA = 20

LINE_HEIGHT = 16.0
PADDING_X = 12.0
PADDING_Y = 8.0
GAP_X = 22.0
GAP_Y = 40.0
MARGIN = 12.0
_SWEEPS = 8
_SHIFTS = 12
_ROUNDS = 8

# Advance widths of a common sans-serif face, in 1/1000 of the font size; other characters count as the average.
_WIDTHS = {
    **dict.fromkeys("ijl'|", 235), **dict.fromkeys("ft()[]{}.,:;!/ I", 310), **dict.fromkeys("rs-", 390),
    **dict.fromkeys("ackvxyzJ", 530), **dict.fromkeys("bdeghnopqu0123456789_+=<>", 580),
    **dict.fromkeys("ABEFKLPRSTVXYZ", 660), **dict.fromkeys("CDGHNOQU&", 740), **dict.fromkeys("mMwW%@", 880),
}  # fmt: skip
_AVERAGE = 600


def text_width(text: str, size: float, *, mono: bool = False) -> float:
    """Width of a line of text in pixels at a font size, from a table, as the writer of a report may have no font."""
    if mono:
        return len(text) * size * 0.602
    return sum(_WIDTHS.get(character, _AVERAGE) for character in text) * size / 1000.0


@dataclass
class Box:
    """A node's rectangle, by its upper left corner. `lines` are its texts, the first one larger."""

    id: str
    lines: list[str]
    kind: str
    title: str
    width: float
    height: float
    x: float = 0.0
    y: float = 0.0
    layer: int = 0

    @property
    def centre(self) -> float:
        return self.x + self.width / 2


@dataclass
class Route:
    """A line from the lower edge of one box to the upper edge of another, through the bends between them."""

    source: str
    target: str
    points: list[tuple[float, float]]
    edge: dict[str, Any]
    backward: bool = False


@dataclass
class Layout:
    """A picture of `width` by `height` pixels. `note` says what was folded, and is empty when nothing was."""

    boxes: list[Box]
    routes: list[Route]
    width: float
    height: float
    note: str = ""


def amount(value: Any, unit: str) -> str:
    """`12.6 MB`, `3.2 GFLOP`; text (a symbolic size) stays as it is with the unit behind it; None and 0 give ""."""
    if value is None or value == 0 or value == "":
        return ""
    if isinstance(value, str):
        # A long formula says little in a picture: name what it depends on.
        symbols = dict.fromkeys(re.findall(r"[A-Za-z_]\w*", value))
        formula = value if len(value) <= MAX_FORMULA else f"f({', '.join(symbols)})"
        return f"{formula} {unit}"
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def fold_parts(dag: DagRecord) -> tuple[DagRecord, str]:
    """The DAG with one part for all its equal ones, and a note that says so: the layers of a model look the same.

    A part is a connected piece. Two are equal when a picture of them is the same, in whatever order their nodes come.
    """
    graph = nx.Graph()
    graph.add_nodes_from(node["id"] for node in dag.nodes)
    joined = [edge for edge in dag.edges if edge["source"] in graph and edge["target"] in graph]
    graph.add_edges_from((edge["source"], edge["target"]) for edge in joined)
    home = {identity: number for number, part in enumerate(nx.connected_components(graph)) for identity in part}
    nodes: dict[int, list[dict[str, Any]]] = defaultdict(list)
    edges: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for node in dag.nodes:
        nodes[home[node["id"]]].append(node)
    for edge in joined:
        edges[home[edge["source"]]].append(edge)
    seen: dict[str, int] = {}
    for number, part in nodes.items():
        seen.setdefault(_looks(part, edges[number]), number)
    if len(seen) == len(nodes):
        return dag, ""
    kept = set(seen.values())
    note = f"{len(nodes)} separate parts, equal ones drawn once: {len(kept)} shown; dag.dot has all of them"
    return (
        DagRecord(
            dag.direction,
            [node for number in kept for node in nodes[number]],
            [edge for number in kept for edge in edges[number]],
        ),
        note,
    )


def _looks(nodes: list[dict[str, Any]], edges: list[dict[str, Any]]) -> str:
    """Text that is equal for parts that look equal: a node is named by itself and, round by round, its neighbours."""
    name = {node["id"]: repr([node.get(key) for key in ("label", "kind", "bytes", "flops")]) for node in nodes}
    for _ in range(min(len(nodes), _ROUNDS)):
        around: dict[str, list[str]] = {identity: [] for identity in name}
        for edge in edges:
            how = f"{edge.get('kind')} {bool(edge.get('programmatic'))}"
            around[edge["source"]].append(f"> {how} {name[edge['target']]}")
            around[edge["target"]].append(f"< {how} {name[edge['source']]}")
        name = {
            identity: hashlib.sha256("\n".join([text, *sorted(around[identity])]).encode()).hexdigest()
            for identity, text in name.items()
        }
    return " ".join(sorted(name.values()))


def fold(dag: DagRecord, limit: int = VISIBLE_NODES) -> tuple[DagRecord, str]:
    """The DAG with nodes of equal label and kind merged when it has more than `limit` nodes, and a note that says so.

    A merged node is called `label x32`; its bytes and FLOPs are those of the first. Edges within a merged node go.
    """
    if len(dag.nodes) <= limit:
        return dag, ""
    merged: dict[tuple[str, str], dict[str, Any]] = {}
    counts: dict[tuple[str, str], int] = defaultdict(int)
    home: dict[str, str] = {}
    for node in dag.nodes:
        key = (str(node.get("label", node["id"])), str(node.get("kind", "")))
        merged.setdefault(key, dict(node))
        counts[key] += 1
        home[node["id"]] = merged[key]["id"]
    nodes = []
    for key, node in merged.items():
        times = f" x{counts[key]}" if counts[key] > 1 else ""
        nodes.append({**node, "label": f"{node.get('label', node['id'])}{times}"})
    edges: dict[Hashable, dict[str, Any]] = {}
    for edge in dag.edges:
        source, target = home.get(edge["source"]), home.get(edge["target"])
        if source is not None and target is not None and source != target:
            place = (source, target, edge.get("kind"), bool(edge.get("programmatic")))
            edges.setdefault(place, {**edge, "source": source, "target": target})
    note = f"{len(dag.nodes)} nodes are folded by label into {len(nodes)}; dag.dot has all of them"
    return DagRecord(dag.direction, nodes, list(edges.values())), note


@dataclass
class _Sheet:
    """The layers while they are being ordered: rows of box ids and of bends, and who is joined to whom."""

    rows: list[list[Hashable]]
    width: dict[Hashable, float]
    above: dict[Hashable, list[Hashable]] = field(default_factory=lambda: defaultdict(list))
    below: dict[Hashable, list[Hashable]] = field(default_factory=lambda: defaultdict(list))

    def join(self, upper: Hashable, lower: Hashable) -> None:
        self.below[upper].append(lower)
        self.above[lower].append(upper)


def lay_out(dag: DagRecord, limit: int = VISIBLE_NODES) -> Layout:
    """Positions for a DAG. Edges that name an unknown node are left out; an edge that closes a circle (folding can make
    one) does not take part in the layering and is drawn upwards."""
    dag, parts_note = fold_parts(dag)
    dag, label_note = fold(dag, limit)
    note = "; ".join(filter(None, [parts_note, label_note]))
    boxes = {str(node["id"]): _box(node) for node in dag.nodes}
    edges = [edge for edge in dag.edges if str(edge["source"]) in boxes and str(edge["target"]) in boxes]
    forward, backward = _acyclic(boxes, edges)
    for layer, generation in enumerate(nx.topological_generations(forward)):
        for identity in generation:
            boxes[identity].layer = layer
    sheet, chains = _sheet(boxes, forward)
    _reduce_crossings(sheet)
    middle = _positions(sheet)

    y = MARGIN
    tops: list[float] = []
    heights: list[float] = []
    for row in sheet.rows:
        tall = max((boxes[item].height for item in row if isinstance(item, str)), default=0.0)
        tops.append(y)
        heights.append(tall)
        y += tall + GAP_Y
    for box in boxes.values():
        box.x = middle[box.id] - box.width / 2
        box.y = tops[box.layer] + (heights[box.layer] - box.height) / 2
    height = y - GAP_Y + MARGIN if boxes else 2 * MARGIN

    routes = []
    for edge in edges:
        source, target = boxes[str(edge["source"])], boxes[str(edge["target"])]
        if (source.id, target.id) in backward:
            points = [(source.centre, source.y), (target.centre, target.y + target.height)]
            routes.append(Route(source.id, target.id, points, edge, backward=True))
            continue
        points = [(source.centre, source.y + source.height)]
        for bend in chains.get((source.id, target.id), ()):
            layer = bend[2]
            points += [(middle[bend], tops[layer]), (middle[bend], tops[layer] + heights[layer])]
        points.append((target.centre, target.y))
        routes.append(Route(source.id, target.id, points, edge))
    right = max((middle[item] + sheet.width[item] / 2 for row in sheet.rows for item in row), default=0.0)
    return Layout(list(boxes.values()), routes, right + MARGIN, height, note)


def _box(node: dict[str, Any]) -> Box:
    label = str(node.get("label", node["id"]))
    detail = " · ".join(filter(None, [amount(node.get("bytes"), "B"), amount(node.get("flops"), "FLOP")]))
    lines = [_shorten(label, 34)] + ([_shorten(detail, 40)] if detail else [])
    width = max(text_width(lines[0], 13) * 1.06, *(text_width(line, 11) for line in lines[1:]), 30.0) + 2 * PADDING_X
    kind = str(node.get("kind", "compute"))
    facts = [f"{name} {node[name]}" for name in ("bytes", "flops") if node.get(name)]
    title = "\n".join(filter(None, [label, kind, str(node.get("group") or ""), *facts]))
    return Box(str(node["id"]), lines, kind, title, width, len(lines) * LINE_HEIGHT + 2 * PADDING_Y)


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _acyclic(boxes: Iterable[str], edges: list[dict[str, Any]]) -> tuple[nx.DiGraph, set[tuple[str, str]]]:
    """The graph without the edges that close circles, and those edges."""
    graph = nx.DiGraph()
    graph.add_nodes_from(boxes)
    graph.add_edges_from(
        (str(edge["source"]), str(edge["target"])) for edge in edges if edge["source"] != edge["target"]
    )
    backward = {(str(edge["source"]), str(edge["target"])) for edge in edges if edge["source"] == edge["target"]}
    if not nx.is_directed_acyclic_graph(graph):
        position = {identity: index for index, identity in enumerate(graph)}
        for part in list(nx.strongly_connected_components(graph)):
            inner = [pair for pair in graph.subgraph(part).edges if position[pair[0]] > position[pair[1]]]
            backward.update(inner)
            graph.remove_edges_from(inner)
    return graph, backward


def _sheet(
    boxes: dict[str, Box], graph: nx.DiGraph
) -> tuple[_Sheet, dict[tuple[str, str], list[tuple[str, str, int]]]]:
    """Rows of boxes and of the bends of long lines; the bends of each line."""
    rows: list[list[Hashable]] = [[] for _ in range(max((box.layer for box in boxes.values()), default=-1) + 1)]
    sheet = _Sheet(rows, {identity: box.width for identity, box in boxes.items()})
    for box in boxes.values():
        rows[box.layer].append(box.id)
    chains = {}
    for source, target in graph.edges:
        bends = [(source, target, layer) for layer in range(boxes[source].layer + 1, boxes[target].layer)]
        for bend in bends:
            rows[bend[2]].append(bend)
            sheet.width[bend] = 2.0
        stops: list[Hashable] = [source, *bends, target]
        for upper, lower in pairwise(stops):
            sheet.join(upper, lower)
        chains[source, target] = bends
    return sheet, chains


def _reduce_crossings(sheet: _Sheet) -> None:
    """Sort each row by the mean place of its neighbours in the row before, downwards and upwards, keeping the best."""
    best, fewest = [list(row) for row in sheet.rows], _crossings(sheet)
    for sweep in range(_SWEEPS):
        if fewest == 0:
            break
        down = sweep % 2 == 0
        order = range(1, len(sheet.rows)) if down else range(len(sheet.rows) - 2, -1, -1)
        for index in order:
            place = {item: spot for spot, item in enumerate(sheet.rows[index - 1 if down else index + 1])}
            joined = sheet.above if down else sheet.below
            own = {item: spot for spot, item in enumerate(sheet.rows[index])}
            sheet.rows[index].sort(key=lambda item: (_mean([place[n] for n in joined[item]], own[item]), own[item]))
        crossings = _crossings(sheet)
        if crossings < fewest:
            best, fewest = [list(row) for row in sheet.rows], crossings
    sheet.rows[:] = best


def _mean(values: list[Any], default: float) -> float:
    return sum(values) / len(values) if values else default


def _crossings(sheet: _Sheet) -> int:
    """Pairs of lines that cross, counted between neighbouring rows with a Fenwick tree."""
    total = 0
    for upper, lower in pairwise(sheet.rows):
        place = {item: spot for spot, item in enumerate(lower)}
        tree = [0] * (len(lower) + 1)
        seen = 0
        for item in upper:
            spots = sorted(place[other] for other in sheet.below[item])
            for spot in spots:
                index, smaller = spot + 1, 0
                while index:
                    smaller += tree[index]
                    index &= index - 1
                total += seen - smaller
            for spot in spots:
                index = spot + 1
                while index < len(tree):
                    tree[index] += 1
                    index += index & -index
            seen += len(spots)
    return total


def _positions(sheet: _Sheet) -> dict[Hashable, float]:
    """The middle of every box and bend: packed to the left first, then pulled towards neighbours, order unchanged."""
    middle: dict[Hashable, float] = {}
    for row in sheet.rows:
        x = MARGIN
        for item in row:
            middle[item] = x + sheet.width[item] / 2
            x += sheet.width[item] + GAP_X
    for shift in range(_SHIFTS):
        down = shift % 2 == 0
        for row in sheet.rows if down else reversed(sheet.rows):
            first, second = (sheet.above, sheet.below) if down else (sheet.below, sheet.above)
            wanted = [_mean([middle[n] for n in first[item] or second[item]], middle[item]) for item in row]
            for item, centre in zip(row, _spread(row, wanted, sheet.width), strict=True):
                middle[item] = centre
    left = min((middle[item] - sheet.width[item] / 2 for row in sheet.rows for item in row), default=0.0)
    return {item: centre - left + MARGIN for item, centre in middle.items()}


def _spread(row: list[Hashable], wanted: list[float], width: dict[Hashable, float]) -> list[float]:
    """Centres as near to the wanted ones as the gaps allow, in the row's order: least squares by merging neighbours.

    Subtracting each item's packed place turns "at least a gap apart" into "not decreasing"; the best non-decreasing
    sequence averages the runs that are out of order.
    """
    packed, x = [], 0.0
    for item in row:
        packed.append(x + width[item] / 2)
        x += width[item] + GAP_X
    runs: list[tuple[float, int]] = []
    for centre, place in zip(wanted, packed, strict=True):
        mean, size = centre - place, 1
        while runs and runs[-1][0] > mean:
            before, count = runs.pop()
            mean = (mean * size + before * count) / (size + count)
            size += count
        runs.append((mean, size))
    offsets = [mean for mean, size in runs for _ in range(size)]
    return [place + offset for place, offset in zip(packed, offsets, strict=True)]
