"""What the benchmarks share: device timings with and without a CUDA graph, and result files in JSON and Markdown.

The device timings are those of `moepdl bench`. Host-side timings in turns and the bootstrap of a ratio are
`moe_compiler.timing`, which the demo uses as well.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_compiler.bench.results import commit
from moe_compiler.bench.timed import captured, device_us
from moe_compiler.timing import environment

__all__ = ["RESULTS", "ROOT", "captured", "commit", "device_us", "median", "table", "write"]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "benchmarks"


def median(samples: Sequence[float]) -> float:
    return statistics.median(samples)


def write(
    folder: Path, name: str, title: str, rows: Sequence[Mapping[str, Any]], *, device: str, notes: Sequence[str]
) -> str:
    """Write NAME.json and NAME.md into folder and return the Markdown. Columns are the keys of the first row."""
    about = {"commit": commit(), **environment(device)}
    folder.mkdir(parents=True, exist_ok=True)
    data = {"title": title, "environment": about, "notes": list(notes), "rows": [dict(row) for row in rows]}
    (folder / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
    lines = [f"# {title}", "", ", ".join(f"{key} {value}" for key, value in about.items()), ""]
    lines += [*(f"- {note}" for note in notes), "", table(rows), ""]
    text = "\n".join(lines)
    (folder / f"{name}.md").write_text(text)
    return text


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a Markdown table; numbers with three significant digits."""
    if not rows:
        return "(no rows)"
    columns = list(rows[0])
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(column, "")) for column in columns) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value).replace("|", "\\|")
