"""One class in one process: each way of running it, compiled and compared -> plain values for the table."""

from __future__ import annotations

import copy
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from benchmarks.coverage.classes import Built, Experts, build, expert_modules
from benchmarks.coverage.numbers import Choices, exactly, judge

__all__ = ["COLUMNS", "measure"]

COLUMNS = ("as loaded", "grouped_mm", "batched_mm", "prepare")


def measure(experts: Experts) -> dict[str, Any]:
    """The row of one class: {"class", "folder", "packed", "model", "layers", "cells": {column: cell}}, or "not built".

    A cell is {"text", "status", ..}; status is one of matched, part, left, fragment, wrong, fails, none.
    """
    row: dict[str, Any] = {**asdict(experts), "model": "", "layers": 0, "cells": {}}
    try:
        built = build(experts)
    except Exception as error:
        row["not built"] = _first_line(error)
        return row
    row["model"] = built.name
    eager = _eager(built, experts)
    if isinstance(eager, str):
        row["cells"] = {column: {"status": "fails", "text": f"fails in eager: {eager}"} for column in COLUMNS}
        return row
    row["layers"] = eager.calls
    row["loaded as"] = getattr(built.model.config, "_experts_implementation", None) if experts.packed else None
    for column in COLUMNS:
        if column == row["loaded as"]:
            # The library's default: the very same run.
            row["cells"][column] = row["cells"]["as loaded"]
            continue
        start = time.perf_counter()
        try:
            row["cells"][column] = _cell(column, built, experts, eager, row["cells"].get("as loaded"))
        except Exception as error:
            row["cells"][column] = _error("wrong", "wrong: ", error)
        row["cells"][column]["seconds"] = round(time.perf_counter() - start, 1)
    _name_remedies(row)
    return row


def _name_remedies(row: dict[str, Any]) -> None:
    """Say in each fragment's cell what turns the class into one that can be captured; known once all cells are."""
    cells = row["cells"]
    for cell in cells.values():
        if cell["status"] != "fragment" or "text" in cell:
            continue
        became = {column: other["status"] for column, other in cells.items()}
        settings = [column for column in COLUMNS if column not in ("as loaded", "prepare")]
        matched = [column for column in settings if became.get(column) == "matched"]
        captured = [column for column in settings if became.get(column) in ("part", "left")]
        if matched:
            remedy = f'model.set_experts_implementation("{matched[0]}")'
        elif became.get("prepare") == "matched":
            remedy = "moe_compiler.prepare(model)"
        elif captured:
            remedy = f'model.set_experts_implementation("{captured[0]}") makes it one graph; see there'
        else:
            remedy = f"none known; {cell['broken']}"
        done = f"matched {cell['matched']}/{row['layers']}; " if cell["matched"] else ""
        cell["text"] = f"{done}fragment: {remedy}"


class _Eager:
    """What the model does uncompiled: how often its experts run, the float64 result and how it was had."""

    def __init__(self, calls: int, exact: Any, note: str) -> None:
        self.calls, self.exact, self.note = calls, exact, note


def _eager(built: Built, experts: Experts) -> _Eager | str:
    """Run the model as it is, and in float64 with the same choices; text when it does not run at all."""
    calls: list[str] = []
    handles = [
        built.model.get_submodule(name).register_forward_hook(lambda *_, name=name: calls.append(name))
        for name in expert_modules(built.model, experts)
    ]
    try:
        with torch.no_grad(), Choices() as choices:
            plain = built.model(**built.inputs)
    except Exception as error:
        return _first_line(error)
    finally:
        for handle in handles:
            handle.remove()
    if not calls:
        return f"no {experts.name} ran in {built.name}"
    double = copy.deepcopy(built.model).double()
    if experts.packed:
        double.set_experts_implementation("eager")
    try:
        inputs = {key: _double(value) for key, value in built.inputs.items()}
        return _Eager(len(set(calls)), exactly(lambda: double(**inputs), choices.ids), "")
    except Exception as error:
        return _Eager(len(set(calls)), plain, f"compared with eager alone, float64 fails: {_first_line(error)}")


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _cell(column: str, built: Built, experts: Experts, eager: _Eager, loaded: dict[str, Any] | None) -> dict[str, Any]:
    """One cell; `loaded` is the cell of the class as loaded, once it is measured."""
    model, inputs = copy.deepcopy(built.model), built.inputs
    changes: list[str] = []
    if column in ("grouped_mm", "batched_mm"):
        if not experts.packed:
            return {"status": "none", "text": "-"}
        model.set_experts_implementation(column)  # type: ignore[operator]
    elif column == "prepare":
        prepare = _prepare()
        if prepare is None:
            return {"status": "none", "text": "not in this version"}
        try:
            # Without the folder of this machine's packages, as all lines of the page.
            changes = [re.sub(r"\S*site-packages/", "", str(change)) for change in prepare(model, **inputs)]
        except Exception as error:
            return _error("left", "left alone: prepare: ", error)
        if not changes:
            # The very same model.
            return dict(loaded)
    try:
        with torch.no_grad():
            plain = model(**inputs)
    except Exception as error:
        return _error("fails", "fails in eager: ", error)
    cell = _compiled(model, inputs, eager.calls)
    if changes:
        cell["changes"] = changes
    if "result" not in cell:
        return cell
    judged = judge(cell.pop("result"), plain, eager.exact)
    cell.update(error=judged.error, own=judged.own)
    if eager.note:
        cell["note"] = eager.note
    if judged.bad:
        cell.update(status="wrong", text=f"wrong: {judged.bad}")
    return cell


def _prepare() -> Callable[..., Any] | None:
    import moe_compiler

    try:
        return moe_compiler.prepare  # type: ignore[attr-defined, no-any-return]
    except AttributeError:
        return None


def _compiled(model: nn.Module, inputs: dict[str, Any], layers: int) -> dict[str, Any]:
    """Compile and call, as one graph where Dynamo can, else frame by frame."""
    from moe_compiler.backend import last_reports, moepdl

    broken = ""
    for fullgraph in (True, False):
        torch._dynamo.reset()
        known = {id(report) for report in last_reports()}
        compiled = torch.compile(model, backend=moepdl, fullgraph=fullgraph, options={"remainder": "eager"})
        try:
            with torch.no_grad():
                result = compiled(**inputs)
        except Exception as error:
            if not fullgraph or not _is_break(error):
                return _error("wrong", "wrong: does not compile: ", error)
            broken = _break_text(error)
            continue
        reports = [report for report in last_reports() if id(report) not in known]
        return {"result": result, **_described(reports, broken, layers)}
    raise AssertionError("unreachable")


def _is_break(error: Exception) -> bool:
    """Could Dynamo not make one graph? An error of ours comes as BackendCompilerFailed, which is none."""
    kind = type(error)
    of_dynamo = kind.__module__.startswith("torch._dynamo") and kind.__name__ != "BackendCompilerFailed"
    return of_dynamo or "GuardOnDataDependent" in kind.__name__


def _break_text(error: Exception) -> str:
    """What Dynamo could not put into a graph, with the model's own line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    where = [line for line in lines if line.startswith("File ") and "/torch/" not in line]
    place = where[-1].removeprefix("File ").replace('"', "") if where else ""
    place = place.partition("site-packages/")[2] or place
    said = lines[0].removeprefix("Consider annotating your code using torch._check*(). ") if lines else ""
    return (said or type(error).__name__) + (f" at {place}" if place else "")


def _described(reports: list[Any], broken: str, layers: int) -> dict[str, Any]:
    matches = [match for report in reports for match in report.matches]
    misses = [miss for report in reports for miss in report.misses]
    notes = [note for report in reports for note in report.notes]
    done = sum(match.count for match in matches if not match.left_alone)
    cell: dict[str, Any] = {
        "matched": done,
        "matches": _folded(_match(match) for match in matches),
        "misses": _folded(_miss(miss) for miss in misses),
        "broken": broken,
        "notes": list(dict.fromkeys(notes)),
        "graphs": len(reports),
    }
    why = _why(matches, misses, notes)
    if done >= layers:
        cell.update(
            status="matched", text=f"matched {done}/{layers}" + (f" in {len(reports)} graphs" if broken else "")
        )
    elif broken:
        cell.update(status="fragment")  # its text comes when the other cells are known
    else:
        part = f"matched {done}/{layers}; " if done else ""
        cell.update(status="part" if done else "left", text=f"{part}left alone: {why or 'no candidate'}")
    return cell


def _why(matches: list[Any], misses: list[Any], notes: list[str]) -> str:
    """The reason of the attempt that came furthest, or of a block that was recognised and left alone."""
    alone = [match.left_alone for match in matches if match.left_alone]
    if alone:
        return alone[0]
    if misses:
        return max(misses, key=lambda miss: (miss.formulation != "none", miss.steps_passed / miss.steps_total)).reason
    return next((note.partition("; try: ")[0] for note in notes if note.startswith("not captured")), "")


def _folded(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records that differ in nothing but their count become one."""
    folded: dict[str, dict[str, Any]] = {}
    for record in records:
        key = repr({name: value for name, value in record.items() if name != "count"})
        seen = folded.setdefault(key, {**record, "count": 0})
        seen["count"] += record["count"]
    return list(folded.values())


def _match(match: Any) -> dict[str, Any]:
    from moe_compiler.report import split_where

    return {
        "formulation": match.formulation,
        "router": match.router or "",
        "router_why": match.router_why,
        "where": split_where(match.where)[0],
        "count": match.count,
        "left_alone": match.left_alone,
    }


def _miss(miss: Any) -> dict[str, Any]:
    from moe_compiler.report import split_where

    line, code = split_where(miss.at or miss.where)
    return {
        "formulation": miss.formulation,
        "step": miss.step,
        "passed": f"{miss.steps_passed}/{miss.steps_total}",
        "reason": miss.reason,
        "hint": miss.hint,
        "line": f"{line}  {code}".strip(),
        "count": miss.count,
    }


def _first_line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:200]


def _error(status: str, prefix: str, error: BaseException) -> dict[str, Any]:
    trace = "".join(traceback.format_exception(error, limit=-6))
    print(trace, file=sys.stderr)
    return {"status": status, "text": prefix + _first_line(error), "trace": trace[-3000:]}
