"""The dependency DAGs as DOT text, for graphviz and everything that reads its language. Writing it needs no program.

Shapes and line styles carry the meaning: a box computes, a parallelogram exchanges, an ellipse is an input or output;
a bold line is a programmatic edge, a thin one a read after a write, a dashed one any other order; a bold frame is on
the critical path, and a dashed one in a branch that may run beside a chain.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from typing import Any

import graphviz

from moe_compiler.report import DagRecord
from moe_compiler.viz.layout import amount

__all__ = ["dags_text", "svg"]

_SHAPES = {"exchange": "parallelogram", "input": "ellipse", "output": "ellipse"}
_RENDER_SECONDS = 20


def dags_text(dags: Iterable[DagRecord]) -> str:
    """One DOT digraph with a cluster for each direction; a digraph without nodes when there is no DAG."""
    graph = graphviz.Digraph("moepdl", node_attr={"shape": "box", "fontname": "sans-serif", "style": "rounded"})
    for index, dag in enumerate(dags):
        with graph.subgraph(name=f"cluster_{index}") as cluster:
            cluster.attr(label=graphviz.escape(dag.direction))
            for node in dag.nodes:
                cluster.node(_id(index, node["id"]), **_node(node))
            for edge in dag.edges:
                cluster.edge(_id(index, edge["source"]), _id(index, edge["target"]), **_edge(edge))
    return graph.source


def _id(index: int, identity: Any) -> str:
    # A colon in an identifier would be read as a port.
    return f"{index}_{identity}".replace(":", "_")


def _node(node: dict[str, Any]) -> dict[str, str]:
    detail = [amount(node.get("bytes"), "B"), amount(node.get("flops"), "FLOP")]
    lines = [str(node.get("label", node["id"])), " · ".join(filter(None, detail)), _time(node)]
    label = "\\n".join(graphviz.escape(line) for line in lines if line)
    kind = str(node.get("kind", "compute"))
    found = {"label": label, "shape": _SHAPES.get(kind, "box"), "tooltip": graphviz.escape(kind)}
    if kind == "branch":
        found["style"] = "rounded,dashed"
    return found | ({"penwidth": "2.5"} if node.get("critical") and "predicted_us" in node else {})


def _time(node: dict[str, Any]) -> str:
    """Predicted time, and the slack of what is not on the critical path."""
    if "predicted_us" not in node:
        return ""
    slack = "" if node.get("critical") else f", slack {node.get('slack_us', 0.0):.1f} µs"
    return f"{node['predicted_us']:.1f} µs{slack}"


def _edge(edge: dict[str, Any]) -> dict[str, str]:
    kind = str(edge.get("kind", "raw"))
    if edge.get("programmatic"):
        return {"style": "bold", "label": "pdl", "tooltip": graphviz.escape(str(edge.get("why", "")) or kind)}
    if kind == "raw":
        return {}
    return {"style": "dashed", "label": graphviz.escape(kind)}


def svg(text: str) -> str | None:
    """DOT text as SVG through the `dot` program, None where there is none or where it takes too long."""
    program = shutil.which("dot")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "-Tsvg"], input=text, capture_output=True, text=True, timeout=_RENDER_SECONDS, check=True
        )
    except (subprocess.SubprocessError, OSError):
        return None
    return done.stdout
