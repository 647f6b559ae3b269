"""The dependency DAGs as Mermaid flowcharts, for a README, an issue or a chat that draws them.

Mermaid's defaults refuse more than 500 edges or 50 000 characters, so a larger DAG is folded by label and, if that is
not enough, cut, with a comment that says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from moe_compiler.report import DagRecord
from moe_compiler.viz.layout import amount, fold

__all__ = ["MAX_CHARACTERS", "MAX_EDGES", "dag_text", "dags_text"]

MAX_EDGES = 500
MAX_CHARACTERS = 50_000
_BRACKETS = {"exchange": ("[/", "/]"), "input": ("([", "])"), "output": ("([", "])")}


def dags_text(dags: Iterable[DagRecord]) -> str:
    """All DAGs of a report as one flowchart, a subgraph each; within Mermaid's limits."""
    dags = list(dags)
    share = max(len(dags), 1)
    lines = ["flowchart TD"]
    for index, dag in enumerate(dags):
        lines.append(f'  subgraph g{index} ["{_escaped(dag.direction)}"]')
        lines += [f"  {line}" for line in _body(dag, f"g{index}_", MAX_EDGES // share, MAX_CHARACTERS // share - 200)]
        lines.append("  end")
    return "\n".join(lines) + "\n"


def dag_text(dag: DagRecord) -> str:
    """One DAG as a flowchart."""
    return "\n".join(["flowchart TD", *_body(dag, "", MAX_EDGES, MAX_CHARACTERS - 200)]) + "\n"


def _body(dag: DagRecord, prefix: str, max_edges: int, max_characters: int) -> list[str]:
    note = ""
    lines = _lines(dag, prefix)
    if len(dag.edges) > max_edges or _size(lines) > max_characters:
        dag, note = fold(dag, limit=0)
        lines = _lines(dag, prefix)
    if len(dag.edges) > max_edges or _size(lines) > max_characters:
        lines = _cut(lines, max_edges, max_characters)
        note += "; cut at the limits of Mermaid"
    return [f"  %% {note.removeprefix('; ')}", *lines] if note else lines


def _cut(lines: list[str], max_edges: int, max_characters: int) -> list[str]:
    kept: list[str] = []
    size = edges = 0
    for line in lines:
        is_edge = not line.rstrip().endswith(("]", ")"))
        size += len(line) + 3
        edges += is_edge
        if size > max_characters or edges > max_edges:
            break
        kept.append(line)
    return kept


def _size(lines: list[str]) -> int:
    return sum(len(line) + 3 for line in lines)


def _lines(dag: DagRecord, prefix: str) -> list[str]:
    names = {node["id"]: f"{prefix}n{index}" for index, node in enumerate(dag.nodes)}
    lines = []
    for node in dag.nodes:
        detail = " · ".join(filter(None, [amount(node.get("bytes"), "B"), amount(node.get("flops"), "FLOP")]))
        label = "<br/>".join(_escaped(text) for text in (str(node.get("label", node["id"])), detail) if text)
        left, right = _BRACKETS.get(str(node.get("kind", "")), ("[", "]"))
        lines.append(f'  {names[node["id"]]}{left}"{label}"{right}')
    for edge in dag.edges:
        if edge["source"] in names and edge["target"] in names:
            lines.append(f"  {names[edge['source']]} {_arrow(edge)} {names[edge['target']]}")
    return lines


def _arrow(edge: dict[str, Any]) -> str:
    kind = str(edge.get("kind", "raw"))
    if edge.get("programmatic"):
        return "==>|pdl|"
    return "-->" if kind == "raw" else f'-.->|"{_escaped(kind)}"|'


def _escaped(text: str) -> str:
    """Text within double quotes: Mermaid knows entities only, written with # for &."""
    for character, entity in (("#", "#35;"), ('"', "#quot;"), ("<", "#lt;"), (">", "#gt;"), ("\n", " ")):
        text = text.replace(character, entity)
    return text
