"""The layout of DAG pictures: layers follow the edges, boxes never overlap and hold their text, large DAGs fold."""

from __future__ import annotations

import time
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from moe_compiler.report import DagRecord
from moe_compiler.viz.layout import PADDING_X, amount, fold, fold_parts, lay_out, text_width


def chain_of(count: int, label: str = "n{}") -> DagRecord:
    nodes = [{"id": str(index), "label": label.format(index)} for index in range(count)]
    edges = [{"source": str(index), "target": str(index + 1), "kind": "raw"} for index in range(count - 1)]
    return DagRecord("forward", nodes, edges)


@st.composite
def dags(draw) -> DagRecord:
    count = draw(st.integers(1, 24))
    pairs = draw(st.sets(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=50))
    nodes = [{"id": str(index), "label": f"{index} {'x' * draw(st.integers(0, 50))}"} for index in range(count)]
    edges = [{"source": str(a), "target": str(b), "kind": "raw"} for a, b in sorted(pairs) if a < b]
    return DagRecord("forward", nodes, edges)


@given(dags())
def test_layers_follow_edges_and_boxes_do_not_overlap(dag):
    layout = lay_out(dag)
    boxes = {box.id: box for box in layout.boxes}
    assert len(boxes) == len(dag.nodes)
    for edge in dag.edges:
        assert boxes[edge["source"]].layer < boxes[edge["target"]].layer
        assert boxes[edge["source"]].y + boxes[edge["source"]].height < boxes[edge["target"]].y
    for one, two in combinations(layout.boxes, 2):
        if one.layer == two.layer:
            left, right = sorted((one, two), key=lambda box: box.x)
            assert left.x + left.width < right.x + 1e-6
    for box in layout.boxes:
        assert box.x >= 0
        assert box.x + box.width <= layout.width + 1e-6
        assert box.y >= 0
        assert box.y + box.height <= layout.height + 1e-6


@given(dags())
def test_every_edge_has_a_route_from_box_to_box(dag):
    layout = lay_out(dag)
    boxes = {box.id: box for box in layout.boxes}
    assert len(layout.routes) == len(dag.edges)
    for route in layout.routes:
        source, target = boxes[route.source], boxes[route.target]
        assert route.points[0] == (source.centre, source.y + source.height)
        assert route.points[-1] == (target.centre, target.y)
        heights = [y for _, y in route.points]
        assert heights == sorted(heights)
        # two bends for each layer in between
        assert len(route.points) == 2 + 2 * (target.layer - source.layer - 1)


@given(dags())
def test_the_same_dag_gives_the_same_picture(dag):
    assert lay_out(dag) == lay_out(dag)


def test_boxes_are_as_wide_as_their_text():
    layout = lay_out(DagRecord("f", [{"id": "a", "label": "a rather long label"}, {"id": "b", "label": "b"}], []))
    wide, narrow = layout.boxes
    assert wide.width >= text_width("a rather long label", 13) + 2 * PADDING_X
    assert narrow.width < wide.width
    assert text_width("WWWW", 12) > text_width("iiii", 12)
    assert text_width("abcd", 10, mono=True) == text_width("....", 10, mono=True)


def test_crossed_lines_are_uncrossed():
    nodes = [{"id": name, "label": name} for name in "abcdef"]
    edges = [{"source": a, "target": b} for a, b in ("af", "be", "cd")]
    boxes = {box.id: box for box in lay_out(DagRecord("f", nodes, edges)).boxes}
    upper = sorted("abc", key=lambda name: boxes[name].x)
    lower = sorted("def", key=lambda name: boxes[name].x)
    assert [{"a": "f", "b": "e", "c": "d"}[name] for name in upper] == lower


def test_a_circle_is_drawn_and_its_closing_edge_goes_up():
    dag = DagRecord("f", [{"id": "a"}, {"id": "b"}], [{"source": "a", "target": "b"}, {"source": "b", "target": "a"}])
    layout = lay_out(dag)
    assert [box.layer for box in layout.boxes] == [0, 1]
    assert [route.backward for route in layout.routes] == [False, True]


def test_edges_of_unknown_nodes_are_left_out():
    layout = lay_out(DagRecord("f", [{"id": "a"}], [{"source": "a", "target": "gone"}]))
    assert len(layout.boxes) == 1
    assert layout.routes == []


def test_an_empty_dag_has_a_size():
    layout = lay_out(DagRecord("f"))
    assert layout.boxes == []
    assert layout.width > 0
    assert layout.height > 0


def test_folding_starts_above_the_limit_and_says_so():
    dag, note = fold(chain_of(400))
    assert len(dag.nodes) == 400
    assert note == ""
    repeated = DagRecord(
        "forward",
        [
            {"id": f"{layer}.{name}", "label": name, "kind": "compute"}
            for layer in range(150)
            for name in ("a", "b", "c")
        ],
        [
            {"source": f"{layer}.{a}", "target": f"{layer}.{b}", "kind": "raw"}
            for layer in range(150)
            for a, b in ("ab", "bc")
        ],
    )
    dag, note = fold(repeated)
    assert [node["label"] for node in dag.nodes] == ["a x150", "b x150", "c x150"]
    assert [(edge["source"], edge["target"]) for edge in dag.edges] == [("0.a", "0.b"), ("0.b", "0.c")]
    assert note == "450 nodes are folded by label into 3; dag.dot has all of them"
    assert lay_out(repeated).note == ("150 separate parts, equal ones drawn once: 1 shown; dag.dot has all of them")


def test_equal_parts_are_drawn_once():
    layers = [("a", "route"), ("b", "experts"), ("c", "route"), ("d", "experts"), ("e", "route"), ("f", "shared")]
    nodes = [{"id": name, "label": label, "group": f"layer of {name}"} for name, label in layers]
    edges = [{"source": a, "target": b, "kind": "raw"} for a, b in ("ab", "cd", "ef")]
    dag, note = fold_parts(DagRecord("forward", nodes, edges))
    assert [node["id"] for node in dag.nodes] == ["a", "b", "e", "f"]
    assert len(dag.edges) == 2
    assert note == "3 separate parts, equal ones drawn once: 2 shown; dag.dot has all of them"
    assert len(fold_parts(DagRecord("forward", nodes[::-1], edges[::-1]))[0].nodes) == 4
    edges[1] = {**edges[1], "programmatic": True}
    assert fold_parts(DagRecord("forward", nodes, edges))[1] == ""


def test_a_large_dag_is_laid_out_in_seconds():
    dag = chain_of(2000)
    for index in range(0, 1990, 3):
        dag.edges.append({"source": str(index), "target": str(index + 7), "kind": "raw"})
    start = time.monotonic()
    assert len(lay_out(dag, limit=10**6).boxes) == 2000
    assert time.monotonic() - start < 10


def test_amounts():
    assert amount(805e6, "B") == "805 MB"
    assert amount(51.5e9, "FLOP") == "51.5 GFLOP"
    assert amount(12, "B") == "12 B"
    assert amount("4096*s77", "B") == "4096*s77 B"
    assert amount("2**(9 - 2*T)*(-64*3**T + E)", "B") == "f(T, E) B"
    assert amount(None, "B") == amount(0, "B") == ""
