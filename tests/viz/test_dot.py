"""DOT and Mermaid text: node and edge kinds have their own strokes, nothing breaks out of a label, limits are kept."""

from __future__ import annotations

import shutil

from moe_compiler.report import DagRecord
from moe_compiler.viz import dot, mermaid


def test_kinds_have_shapes_and_strokes(samples):
    text = dot.dags_text([samples.dag()])
    assert text.startswith("digraph moepdl {")
    assert 'label="dispatch_start\\n33.5 MB" shape=parallelogram' in text
    assert 'label="gate_up\\n805 MB · 51.5 GFLOP" shape=box' in text
    assert 'label="x\\n4096*s77 B" shape=ellipse' in text
    edges = [line.strip().replace('"', "") for line in text.splitlines() if "->" in line]
    assert "0_gate_up -> 0_down [label=pdl style=bold tooltip=raw]" in [
        " ".join(sorted_attributes(line)) for line in edges
    ]
    assert "0_x -> 0_route" in edges
    assert "0_dispatch_start -> 0_dispatch_wait [label=order style=dashed]" in edges
    assert len(edges) == 12


def sorted_attributes(line: str) -> list[str]:
    head, bracket, rest = line.partition(" [")
    return [head, "[" + " ".join(sorted(rest.rstrip("]").split())) + "]"] if bracket else [head]


def test_each_direction_is_a_cluster(samples):
    text = dot.dags_text([samples.dag("forward"), samples.dag("backward")])
    assert text.count("subgraph cluster_") == 2
    assert "label=forward" in text
    assert "label=backward" in text


def test_no_dag_is_an_empty_digraph():
    text = dot.dags_text([])
    assert text.startswith("digraph moepdl {")
    assert text.rstrip().endswith("}")
    assert "->" not in text


def test_labels_cannot_break_out(samples):
    text = dot.dags_text(samples.hostile().dags)
    # Inside a quoted string of DOT only an escaped quote may occur.
    unescaped = text.replace("\\\\", "").replace('\\"', "")
    assert unescaped.count('"') % 2 == 0
    assert '\\"quoted\\"' in text
    assert len([line for line in text.splitlines() if "->" in line]) >= 1


def test_svg_goes_through_the_dot_program(monkeypatch, tmp_path, samples):
    program = tmp_path / "dot"
    program.write_text('#!/bin/sh\ntest "$1" = -Tsvg && printf "<svg>" && grep -c -- "->" && printf "</svg>"\n')
    program.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(program) if name == "dot" else None)
    assert dot.svg(dot.dags_text([samples.dag()])) == "<svg>12\n</svg>"


def test_a_failing_program_gives_no_svg(monkeypatch, tmp_path, samples):
    program = tmp_path / "dot"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(program))
    assert dot.svg(dot.dags_text([samples.dag()])) is None


def test_without_the_program_there_is_no_svg(monkeypatch, samples):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert dot.svg(dot.dags_text([samples.dag()])) is None


def test_mermaid_has_shapes_and_strokes(samples):
    lines = [line.strip() for line in mermaid.dag_text(samples.dag()).splitlines()]
    assert lines[0] == "flowchart TD"
    assert 'n0(["x<br/>4096*s77 B"])' in lines
    assert 'n3[/"dispatch_start<br/>33.5 MB"/]' in lines
    assert 'n6["gate_up<br/>805 MB · 51.5 GFLOP"]' in lines
    assert "n6 ==>|pdl| n7" in lines
    assert 'n3 -.->|"order"| n5' in lines
    assert "n0 --> n1" in lines


def test_mermaid_escapes(samples):
    text = mermaid.dags_text(samples.hostile().dags)
    assert "<script>" not in text
    assert "#lt;script#gt;" in text
    assert "#quot;quoted#quot;" in text


def test_mermaid_folds_and_cuts_at_its_limits():
    layers = 300
    nodes = [{"id": f"{layer}.{name}", "label": name} for layer in range(layers) for name in "abc"]
    edges = [{"source": f"{layer}.{a}", "target": f"{layer}.{b}"} for layer in range(layers) for a, b in ("ab", "bc")]
    text = mermaid.dag_text(DagRecord("forward", nodes, edges))
    assert "%% 900 nodes are folded by label into 3" in text
    assert 'n0["a x300"]' in text
    distinct = [{"id": str(index), "label": f"label {index}"} for index in range(5000)]
    links = [{"source": str(index), "target": str(index + 1)} for index in range(4999)]
    text = mermaid.dag_text(DagRecord("forward", distinct, links))
    assert "cut at the limits of Mermaid" in text
    assert len(text) <= mermaid.MAX_CHARACTERS
    assert text.count("-->") <= mermaid.MAX_EDGES
