"""docs/coverage.md from the measured rows: the table, the totals, and every miss with its step, line and remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["render", "totals"]

_CELLS = """\
How to read a cell; n is the number of modules that hold experts and ran.

- `matched n/n`: all of them are rewritten, and the outputs agree with eager's: their error against a float64 run is at
  most 1.5 times eager's own, plus 1e-6 of the norm. `in g graphs`: Dynamo broke the model at other places.
- `matched m/n; left alone: why`: the others stay with Inductor, unchanged.
- `left alone: why`: nothing is rewritten and the model runs as Inductor compiles it. `why` is the sentence of the
  attempt that came furthest.
- `fragment: remedy`: Dynamo cannot make one graph of the experts, so that a backend sees only pieces; the remedy turns
  the model into one that can be captured.
- `wrong: error`: must not occur.
- `fails in eager: why`: the model does not run this way uncompiled.
- `-`: the library offers no such setting for this class.

`as loaded` is the class with the library's defaults, `grouped_mm` and `batched_mm` after
`model.set_experts_implementation(..)`, `prepare` after `moe_compiler.prepare(model, **inputs)`. All in fp32, inference,
one graph where Dynamo can (`fullgraph=True`)."""


def _rows(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [row for row in data["rows"] if "not built" not in row]


def totals(data: Mapping[str, Any]) -> list[str]:
    """One line a column: how many classes are matched in every layer, in part, left alone, and so on."""
    lines = []
    for kind, packed in (("packed experts", True), ("other experts", False)):
        rows = [row for row in _rows(data) if row["packed"] == packed]
        for column in data["columns"]:
            counts: dict[str, int] = {}
            for row in rows:
                status = row["cells"][column]["status"]
                counts[status] = counts.get(status, 0) + 1
            words = {
                "matched": "matched in every layer", "part": "in part", "left": "left alone", "fragment": "fragments",
                "wrong": "wrong", "fails": "fail in eager", "none": "without this setting",
            }  # fmt: skip
            told = ", ".join(f"{counts[key]} {word}" for key, word in words.items() if key in counts)
            lines.append(f"{kind}, {column}: {told} (of {len(rows)})")
    return lines


def render(data: Mapping[str, Any]) -> str:
    """The page."""
    about = ", ".join(f"{key} {value}" for key, value in data["environment"].items())
    commits = sorted({row["commit"] for row in data["rows"]})
    lines = ["# MoE classes of transformers", ""]
    lines += ["Made by `python -m benchmarks.coverage`; do not edit.", "", f"{about}, commit {', '.join(commits)}", ""]
    lines += [_CELLS, "", "## Totals", "", *(f"- {line}" for line in totals(data)), ""]
    for title, packed in (("Packed experts", True), ("Other experts", False)):
        lines += [f"## {title}", "", *_table(data, packed), ""]
    lines += ["## Not built", ""]
    missing = [row for row in data["rows"] if "not built" in row]
    lines += [f"- {row['folder']}, {row['name']}: {_text(row['not built'])}" for row in missing] or ["None."]
    lines += ["", "## Misses", "", *_misses(data), "", "## Routers that stay with Inductor", "", *_routers(data), ""]
    lines += ["## Where Dynamo breaks the graph", "", *_breaks(data)]
    return "\n".join(lines).rstrip() + "\n"


def _table(data: Mapping[str, Any], packed: bool) -> Iterator[str]:
    columns = data["columns"]
    yield "| class | model | " + " | ".join(columns) + " |"
    yield "|" + "---|" * (len(columns) + 2)
    for row in _rows(data):
        if row["packed"] == packed:
            cells = " | ".join(_text(row["cells"][column]["text"]) for column in columns)
            yield f"| {row['name']} | {row['model']} | {cells} |"


def _cells(data: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for row in _rows(data):
        for column in data["columns"]:
            yield row["name"], column, row["cells"][column]


def _grouped(found: Iterator[tuple[Any, str, str]]) -> dict[Any, dict[str, list[str]]]:
    """key -> class -> columns, in order of appearance."""
    groups: dict[Any, dict[str, list[str]]] = {}
    for key, name, column in found:
        columns = groups.setdefault(key, {}).setdefault(name, [])
        if column not in columns:
            columns.append(column)
    return groups


def _who(classes: Mapping[str, Sequence[str]]) -> str:
    by_columns: dict[str, list[str]] = {}
    for name, columns in classes.items():
        by_columns.setdefault(", ".join(columns), []).append(name)
    return "; ".join(f"{', '.join(names)} ({columns})" for columns, names in by_columns.items())


_MISS = ("reason", "formulation", "step", "passed", "line", "hint")
_CAPTURE = "compile the part with the experts by itself, or switch off in the configuration what the sentence names"


def _misses(data: Mapping[str, Any]) -> Iterator[str]:
    """Every miss of a cell that is not matched in every layer, grouped by reason."""

    def found() -> Iterator[tuple[Any, str, str]]:
        for name, column, cell in _cells(data):
            if cell["status"] not in ("left", "part", "wrong", "fragment"):
                continue
            for miss in cell.get("misses", ()):
                yield tuple(miss[part] for part in _MISS), name, column
            for note in cell.get("notes", ()):
                if note.startswith("not captured"):
                    reason, _, remedy = note.partition("; try: ")
                    yield (reason, "none", "capture", "0", "", remedy or _CAPTURE), name, column

    groups = _grouped(found())
    by_reason: dict[str, list[tuple[Any, dict[str, list[str]]]]] = {}
    for key, classes in groups.items():
        by_reason.setdefault(key[0], []).append((key, classes))
    if not by_reason:
        yield "None."
    for reason, items in by_reason.items():
        yield f"### {_text(reason)}"
        yield ""
        for (_, formulation, step, passed, line, hint), classes in items:
            place = f"`{line}`: " if line else ""
            yield f"- {place}nearest formulation {formulation}, failed at step `{step}` ({passed} steps)"
            yield f"  - remedy: {_text(hint) or _usual(formulation)}"
            yield f"  - {_who(classes)}"
        yield ""


def _usual(formulation: str) -> str:
    """What can be done about a step without a hint of its own."""
    if formulation == "none":
        return "none where this is no choice of experts; else write the experts as one of the README's formulations"
    return f'write the step as in `moe_compiler.testing.examples()["{formulation}"]`; until then Inductor compiles it'


def _routers(data: Mapping[str, Any]) -> Iterator[str]:
    def found() -> Iterator[tuple[Any, str, str]]:
        for name, column, cell in _cells(data):
            for match in cell.get("matches", ()):
                if match["router_why"] and not match["left_alone"]:
                    start = f"{match['router']}: " if match["router"] else ""
                    yield start + match["router_why"], name, column

    groups = _grouped(found())
    if not groups:
        yield "None."
    for reason, classes in groups.items():
        yield f"- {_text(reason)}: {_who(classes)}"


def _breaks(data: Mapping[str, Any]) -> Iterator[str]:
    def found() -> Iterator[tuple[Any, str, str]]:
        for name, column, cell in _cells(data):
            if cell.get("broken"):
                yield cell["broken"], name, column

    groups = _grouped(found())
    if not groups:
        yield "Nowhere."
    for reason, classes in groups.items():
        yield f"- {_text(reason)}: {_who(classes)}"


def _text(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").strip()
