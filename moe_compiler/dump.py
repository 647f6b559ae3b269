"""The dump folder: everything about one compilation, in files that can be read, compared and run again.

    rank0/0_0/                    one folder a rank and Dynamo frame
      00_captured.py ...          the graph after each pass that changed it; runnable (`moe_compiler.graph_file`)
      passes.txt  timings.json    what each pass did; how long it took
      matches.json schedule.json  blocks and near misses; chains, launches and edges
      dag.dot  dag.txt            the dependency DAG as a picture and as text
      timeline.json               the predicted schedule for Perfetto
      report.html report.txt report.json   all of it, to read and to load
      repro.py                    compiles the captured graph again with the same options

The same compilation gives the same bytes: wall times are in `timings.json` and nowhere else, and no file holds the path
of the folder it lies in. Reading and writing a dump needs no torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_compiler.errors import MoepdlError, near_name
from moe_compiler.report import GraphRecord, PassRecord, Report

if TYPE_CHECKING:
    from moe_compiler.graph_file import load_graph as load_graph
    from moe_compiler.graph_text import render_graph as render_graph
    from moe_compiler.graph_text import render_repro as render_repro

__all__ = ["find_frames", "load_graph", "load_report", "numbered", "pass_diffs", "passes_text", "render_graph"]
__all__ += ["render_repro", "write_dump"]

_NUMBERED = re.compile(r"\d{2,}_\w+\.py")
_LAZY = {
    "load_graph": "moe_compiler.graph_file",
    "render_graph": "moe_compiler.graph_text",
    "render_repro": "moe_compiler.graph_text",
}


def __getattr__(name: str) -> Any:
    # These need torch, which the commands that only read a dump should not have to load.
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _by_phase(graphs: Iterable[GraphRecord]) -> list[GraphRecord]:
    phases = ("capture", "forward", "backward")
    return sorted(graphs, key=lambda graph: phases.index(graph.phase) if graph.phase in phases else len(phases))


def graph_files(graphs: Iterable[GraphRecord]) -> dict[str, str]:
    """File name -> text, numbered through all phases: `03_raise_moe.py` for capture, `05_forward_lower.py` after."""
    files = {}
    for number, graph in enumerate(_by_phase(graphs)):
        phase = "" if graph.phase == "capture" else f"{graph.phase}_"
        files[f"{number:02d}_{phase}{graph.name}.py"] = graph.code
    return files


def write_dump(report: Report, folder: str | Path, *, rank: int | None = None) -> Path:
    """Write the dump of one frame below `folder` and return the frame's own folder, `folder/rank0/0_0`.

    A second call for the same frame (the backward graph comes later) replaces the files of the first. `rank` is the
    environment's RANK, else 0, when not given. Sets `report.dump_folder`. Raises MoepdlError when the folder cannot be
    written.
    """
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    frame = Path(folder) / f"rank{rank}" / re.sub(r"\W+", "_", report.frame)
    files = dump_files(report)
    files["timings.json"] = _json([[item.phase, item.name, item.seconds] for item in report.passes])
    try:
        frame.mkdir(parents=True, exist_ok=True)
        for stale in frame.iterdir():
            if _NUMBERED.fullmatch(stale.name) and stale.name not in files:
                stale.unlink()
        for name, text in files.items():
            _write(frame / name, text)
    except OSError as error:
        raise MoepdlError(
            f"the dump folder {frame} cannot be written: {error.strerror or error}",
            try_='another path in options={"dump": ...} or MOEPDL_DUMP',
        ) from error
    report.dump_folder = str(frame)
    return frame


def _write(path: Path, text: str) -> None:
    """Replace the file as a whole, so that a reader never sees half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def dump_files(report: Report) -> dict[str, str]:
    """The files of a frame by name, without the timings: the same report gives the same text on any machine and day."""
    from moe_compiler.viz import dot, html, timeline

    stable = _without_times(report)
    files = graph_files(report.graphs)
    files["passes.txt"] = passes_text(stable.passes)
    files["matches.json"] = _json(
        {"matches": _records(stable.matches), "misses": _records(stable.misses), "notes": stable.notes}
    )
    files["schedule.json"] = _json({"chains": _records(stable.schedule), "dags": _records(stable.dags)})
    files["dag.dot"] = dot.dags_text(stable.dags)
    files["dag.txt"] = "".join(f"{dag}\n" for dag in stable.dags)
    files["timeline.json"] = _json(timeline.trace(stable))
    files["report.html"] = html.render(stable)
    files["report.txt"] = f"{stable}\n"
    # The code lies beside it; a whole model's would double the folder.
    bare = [dataclasses.replace(graph, code="", lines=graph.lines) for graph in _by_phase(report.graphs)]
    files["report.json"] = dataclasses.replace(stable, graphs=bare, repro="").to_json()
    if stable.repro:
        files["repro.py"] = stable.repro
    return files


def _without_times(report: Report) -> Report:
    """A copy that says nothing of when and where it was written."""
    options = dict(report.options)
    if options.get("dump"):
        options["dump"] = "."
    passes = [dataclasses.replace(item, seconds=0.0) for item in report.passes]
    return dataclasses.replace(report, passes=passes, options=options, dump_folder=None)


def _records(records: Iterable[Any]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(record) for record in records]


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def passes_text(passes: Iterable[PassRecord], *, times: bool = False) -> str:
    """A table of the passes: phase, name, level, numerics, rewrites and how the number of each operator changed."""
    head = ["phase", "pass", "level", "numerics", "rewrites", *(["ms"] if times else []), "operators"]
    rows = [head]
    for item in passes:
        delta = " ".join(f"{name}{count:+d}" for name, count in sorted(item.delta.items()) if count)
        milliseconds = [f"{item.seconds * 1e3:.1f}"] if times else []
        rows.append([item.phase, item.name, item.level, item.numerics, str(item.rewrites), *milliseconds, delta or "-"])
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines) + "\n"


def find_frames(folder: str | Path) -> list[Path]:
    """The frame folders in a dump: `folder` itself, or those below it, in order.

    Raises MoepdlError when there is none.
    """
    folder = Path(folder)
    if (folder / "report.json").is_file():
        return [folder]
    frames = sorted((path.parent for path in folder.glob("**/report.json")), key=_natural)
    if not frames:
        raise MoepdlError(
            f"{folder} holds no dump",
            why="no report.json in it or below it",
            try_='the path that was given as options={"dump": ...} or MOEPDL_DUMP',
        )
    return frames


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sorts frame 10_0 after frame 2_0."""
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"(\d+)", str(path))]


def load_report(frame: str | Path) -> Report:
    """The report of one frame folder, with the code of its graph files and the times of `timings.json`.

    Raises MoepdlError when the folder holds no report that this version can read.
    """
    frame = Path(frame)
    try:
        report = Report.from_dict(json.loads((frame / "report.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise MoepdlError(
            f"{frame / 'report.json'} cannot be read: {error}", try_="write the dump again with this version"
        ) from error
    report.dump_folder = str(frame)
    repro = frame / "repro.py"
    report.repro = repro.read_text(encoding="utf-8") if repro.is_file() else ""
    files = numbered(frame)
    if len(files) == len(report.graphs):
        report.graphs = [
            dataclasses.replace(graph, code=path.read_text(encoding="utf-8"))
            for graph, path in zip(report.graphs, files, strict=True)
        ]
    timings = frame / "timings.json"
    if timings.is_file():
        seconds = [entry[2] for entry in json.loads(timings.read_text(encoding="utf-8"))]
        if len(seconds) == len(report.passes):
            pairs = zip(report.passes, seconds, strict=True)
            report.passes = [dataclasses.replace(item, seconds=value) for item, value in pairs]
    return report


def numbered(frame: str | Path) -> list[Path]:
    """The graph files of a frame folder, in the order in which the passes ran."""
    files = [path for path in Path(frame).iterdir() if _NUMBERED.fullmatch(path.name)]
    return sorted(files, key=lambda path: (int(path.name.partition("_")[0]), path.name))


def pass_diffs(frame: str | Path, name: str | None = None) -> list[tuple[str, str]]:
    """(file name, unified diff against the file before it) for each pass that changed the graph; `name` picks one.

    Files are compared within a phase; the first of a phase, and each captured graph, begins a new row of comparisons.
    Raises MoepdlError when no file belongs to the pass `name`.
    """
    diffs = []
    previous: dict[str, Path] = {}
    for path in numbered(frame):
        phase = _phase_of(path)
        before = previous.get(phase)
        previous[phase] = path
        if before is not None and _pass_of(path.name) != "captured":
            diffs.append((path.name, _diff(before, path)))
    if name is not None:
        wanted = [item for item in diffs if _pass_of(item[0]) == name]
        if not wanted:
            names = dict.fromkeys(_pass_of(item[0]) for item in diffs)
            raise MoepdlError(
                f"no pass {name!r} changed a graph in {frame}",
                why=f"the passes that did are {', '.join(names) or 'none'}",
                try_=near_name(name, names) or ("one of these names" if names else "leave the name out"),
            )
        diffs = wanted
    return diffs


def _phase_of(path: Path) -> str:
    rest = path.stem.partition("_")[2]
    return next((phase for phase in ("forward", "backward") if rest.startswith(f"{phase}_")), "capture")


def _pass_of(file: str) -> str:
    return re.sub(r"^\d+_(forward_|backward_)?", "", file).removesuffix(".py")


def _diff(before: Path, after: Path) -> str:
    old, new = (path.read_text(encoding="utf-8").splitlines() for path in (before, after))
    return "\n".join(difflib.unified_diff(old, new, before.name, after.name, n=1, lineterm="")) + "\n"
