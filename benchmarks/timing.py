"""What the benchmarks share: device timings with and without a CUDA graph, and result files in JSON and Markdown.

Host-side timings in turns and the bootstrap of a ratio are `moe_compiler.timing`, which the demo uses as well.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from moe_compiler.timing import environment

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "benchmarks"


def captured(call: Callable[[Any], object], inputs: Sequence[Any]) -> Callable[[], None]:
    """The replay of one CUDA graph that holds `call(x)` for each x of inputs, in order."""
    for x in inputs:
        call(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for x in inputs:
            call(x)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x in inputs:
            call(x)
    return graph.replay


def device_us(
    ways: Mapping[str, Callable[[], object]], *, calls: int = 1, rounds: int = 30, warmup: int = 5
) -> dict[str, list[float]]:
    """Microseconds between two events around each way, in turns, divided by `calls`; idle device before each."""
    for call in ways.values():
        for _ in range(warmup):
            call()
    torch.cuda.synchronize()
    names = list(ways)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            ways[name]()
            end.record()
            torch.cuda.synchronize()
            samples[name].append(start.elapsed_time(end) * 1e3 / calls)
    return samples


def median(samples: Sequence[float]) -> float:
    return statistics.median(samples)


def commit() -> str:
    """The commit measured: what GIT_COMMIT says, else the tree's own, with `+` where the tree differs from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    if "GIT_COMMIT" in os.environ:
        return os.environ["GIT_COMMIT"]
    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


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
