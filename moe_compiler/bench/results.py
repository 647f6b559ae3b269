"""Result files: one JSON a shape, the same as a Markdown table, and reading the JSON back.

The JSON is an object: `schema` (its version), `shape` (sizes and rules), `environment`, `floor`, `notes` and `rows`,
one a measurement:

    shape, tokens, direction, mode   what: forward | forward_backward, graph | nograph
    us, floor_us, fraction_of_floor  median of moepdl (null where it failed), the floor of the drawn routing, floor / us
    peers                            {name: us} of eager, inductor and the peers; wrong ones are not in it
    ratios                           {name: [moepdl / name, low, high]}, with the ends of a 95 % interval
    spellings, outside               which spelling was faster; what a peer leaves outside its timed calls
    memory_bytes, peers_memory_bytes peak of a call above inputs, parameters, gradients and output; null on a CPU
    problems                         {way: what was wrong}
    experts_hit, near_ties, calls    mean distinct experts of an input; tokens left out of the check; calls in one graph
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_compiler.errors import MoepdlError

__all__ = [
    "DIRECTIONS",
    "FORWARD",
    "FORWARD_BACKWARD",
    "GRAPH",
    "MODES",
    "NOGRAPH",
    "SCHEMA",
    "Results",
    "commit",
    "load",
    "markdown",
    "save",
    "table",
    "title_of",
]

SCHEMA = 1
DIRECTIONS = FORWARD, FORWARD_BACKWARD = "forward", "forward_backward"
MODES = GRAPH, NOGRAPH = "graph", "nograph"
_TITLES = {FORWARD: "forward", FORWARD_BACKWARD: "forward + backward"}


@dataclass
class Results:
    """What one shape gave; fields as in the JSON."""

    shape: dict[str, Any]
    environment: dict[str, Any]
    floor: dict[str, Any]
    notes: list[str]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as the JSON holds them."""
        return {"schema": SCHEMA, **vars(self)}

    @property
    def file_name(self) -> str:
        """The shape's name as a name for files: sizes are joined by x."""
        return str(self.shape["name"]).replace(",", "x")

    def groups(self) -> list[tuple[str, str]]:
        """(direction, mode) of the rows, in order."""
        return list(dict.fromkeys((row["direction"], row["mode"]) for row in self.rows))

    def peers(self) -> list[str]:
        """Names of all columns but ours, in order of appearance; of failed ways too."""
        return list(dict.fromkeys(name for row in self.rows for name in row["peers"]))


def save(results: Results, folder: Path, name: str) -> list[Path]:
    """Write NAME.json and NAME.md into a folder, which is made; each file is replaced as a whole."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    texts = {"json": json.dumps(results.to_dict(), indent=1) + "\n", "md": markdown(results)}
    for suffix, text in texts.items():
        path = folder / f"{name}.{suffix}"
        # An interrupt between two bytes must not leave half a file in place of a whole one.
        partial = path.with_suffix(f".{suffix}.partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
        written.append(path)
    return written


def load(path: Path) -> Results:
    """The results that a JSON of `save` holds. Raises MoepdlError for any other file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise MoepdlError(
                f"{path} has schema {data['schema']}, not {SCHEMA}", try_="measure again with this version"
            )
        return Results(**{name: data[name] for name in ("shape", "environment", "floor", "notes", "rows")})
    except FileNotFoundError:
        raise MoepdlError(f"there is no file {path}", try_="the .json that `moepdl bench block` wrote") from None
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise MoepdlError(
            f"{path} holds no results of `moepdl bench block`: {type(error).__name__}: {error}",
            try_="the .json that it wrote",
        ) from error


def title_of(results: Results) -> str:
    """One line: name and sizes."""
    s = results.shape
    shared = f" shared={s['shared']}" if s["shared"] else ""
    return f"{s['name']}: E={s['experts']} k={s['k']} H={s['hidden']} I={s['intermediate']}{shared}"


def markdown(results: Results) -> str:
    """The results as a page: where measured, notes, one table a direction, what went wrong."""
    about = ", ".join(f"{key} {value}" for key, value in results.environment.items() if value not in ("", {}, [], None))
    lines = [f"# One MoE block, {title_of(results)}", "", about, "", *(f"- {note}" for note in results.notes)]
    for direction in dict.fromkeys(row["direction"] for row in results.rows):
        rows = [row for row in results.rows if row["direction"] == direction]
        lines += ["", f"## {_TITLES[direction].capitalize()}, us", "", table(rows)]
    problems = _problems(results.rows)
    if problems:
        lines += ["", "## Not in the tables", "", *(f"- {text}" for text in problems)]
    return "\n".join(lines) + "\n"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of one direction as a Markdown table; a dash where something was not measured."""
    names = list(dict.fromkeys(name for row in rows for name in (*row["peers"], *row.get("outside", {}))))
    columns = ["T", "mode", "floor", "moepdl", "floor / moepdl", *names]
    if any(row.get("ratios") for row in rows):
        columns.append("moepdl / best of them (95 %)")
    memory = any(row.get("memory_bytes") is not None for row in rows)
    if memory:
        columns.append("MiB: moepdl (least of them)")
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        fraction = row.get("fraction_of_floor")
        us = _number(row["us"]) if row["us"] is not None else _why(row, "moepdl")
        cells = [str(row["tokens"]), row["mode"], _number(row["floor_us"]), us, f"{fraction:.2f}" if fraction else "-"]
        cells += [_peer(row, name) for name in names]
        if any(other.get("ratios") for other in rows):
            cells.append(_best_ratio(row))
        if memory:
            cells.append(_memory(row))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _peer(row: Mapping[str, Any], name: str) -> str:
    if name in row["peers"]:
        return _number(row["peers"][name])
    return _why(row, name)


def _why(row: Mapping[str, Any], name: str) -> str:
    """Why a column has no time, in a word or three."""
    for way, text in row["problems"].items():
        if way.split(" ")[0].rstrip(",") == name:
            return next((known for known in ("out of memory", "wrong") if text.startswith(known)), "failed")
    return "-"


def _best_ratio(row: Mapping[str, Any]) -> str:
    if not row.get("ratios"):
        return "-"
    name = min(row["ratios"], key=lambda name: row["peers"][name])
    value, low, high = row["ratios"][name]
    return f"{value:.2f} ({low:.2f}-{high:.2f}) {name}"


def _memory(row: Mapping[str, Any]) -> str:
    if row.get("memory_bytes") is None:
        return "-"
    others = row.get("peers_memory_bytes", {}).values()
    least = f" ({min(others) / 2**20:.4g})" if others else ""
    return f"{row['memory_bytes'] / 2**20:.4g}{least}"


def _problems(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line a problem; those of the same text in several rows together."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        for way, text in row["problems"].items():
            tokens = found.setdefault((row["direction"], way, text), [])
            if str(row["tokens"]) not in tokens:
                tokens.append(str(row["tokens"]))
    return [
        f"{_TITLES[direction]}, T={', '.join(tokens)}, {way}: {text}"
        for (direction, way, text), tokens in found.items()
    ]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def commit() -> str:
    """The commit measured: what GIT_COMMIT says, else that of the clone this runs from, `+` where files differ."""
    if "GIT_COMMIT" in os.environ:
        return os.environ["GIT_COMMIT"]
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return "unknown"

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
