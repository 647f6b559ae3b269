"""A report as data and as a file: plain values and back again, JSON, and what each suffix of a file name means.

`to_dict` and `fields_of` are inverse to each other, through JSON too.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_compiler.errors import MoepdlError
from moe_compiler.report_records import (
    BranchRecord,
    ChainRecord,
    DagRecord,
    EdgeRecord,
    ExchangeRecord,
    FragmentRecord,
    GraphRecord,
    LaunchRecord,
    MatchRecord,
    MemoryRecord,
    MissRecord,
    OverlapRecord,
    PassRecord,
    VariantRecord,
    plain,
)

if TYPE_CHECKING:
    from moe_compiler.report import Report

__all__ = ["RECORDS", "SCHEMA", "fields_of", "save", "to_dict", "to_json"]

SCHEMA = 1


def to_dict(report: Report) -> dict[str, Any]:
    """Plain values only, ready for JSON; `Report.from_dict` gives an equal report back."""
    return {"schema": SCHEMA, **plain(dataclasses.asdict(report))}


def fields_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the report that `to_dict` described. Raises MoepdlError when the data is of another schema."""
    if data.get("schema") != SCHEMA:
        raise MoepdlError(
            f"this is not a report of schema {SCHEMA}: schema is {data.get('schema')!r}",
            why="the report was written by another version of moepdl, or the file is something else",
            try_="write the dump again with this version",
        )
    fields = {key: value for key, value in data.items() if key != "schema"}
    for key, build in RECORDS.items():
        fields[key] = [build(item) for item in fields.get(key, ())]
    return fields


def to_json(report: Report) -> str:
    """`to_dict` as text, the same bytes for the same report."""
    return json.dumps(to_dict(report), indent=1, ensure_ascii=False) + "\n"


def save(report: Report, path: str | Path) -> Path:
    """Write the report as the suffix says: .html, .json, .txt, .dot (the DAGs), .mmd (the same for Mermaid).
    Returns the path.
    """
    path = Path(path)
    render = _RENDERERS.get(path.suffix)
    if render is None:
        raise MoepdlError(
            f"cannot save a report as {path.name!r}",
            why=f"the suffix says the format, one of {', '.join(_RENDERERS)}",
            try_=str(path.with_suffix(".html")),
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(report), encoding="utf-8")
    return path


def _launch(data: Mapping[str, Any]) -> LaunchRecord:
    return LaunchRecord(
        **{**data, "reads": tuple(data["reads"]), "writes": tuple(data["writes"]), "weights": tuple(data["weights"])}
    )


def _edge(data: Mapping[str, Any]) -> EdgeRecord:
    return EdgeRecord(**{**data, "through": tuple(data["through"])})


def _variant(data: Mapping[str, Any]) -> VariantRecord:
    launches = tuple(_launch(item) for item in data["launches"])
    edges = tuple(_edge(item) for item in data["edges"])
    memory = data.get("memory")
    told = None if memory is None else MemoryRecord(**memory)
    return VariantRecord(**{**data, "launches": launches, "edges": edges, "memory": told})


def _chain(data: Mapping[str, Any]) -> ChainRecord:
    return ChainRecord(**{**data, "variants": tuple(_variant(item) for item in data["variants"])})


def _dag(data: Mapping[str, Any]) -> DagRecord:
    return DagRecord(**{**data, "branches": tuple(_branch(item) for item in data.get("branches", ()))})


def _branch(data: Mapping[str, Any]) -> BranchRecord:
    return BranchRecord(**{**data, **{key: tuple(data[key]) for key in ("nodes", "operators", "beside")}})


# The lists of records that a report holds, and how each record is made of its plain values.
RECORDS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "matches": lambda data: MatchRecord(**data),
    "misses": lambda data: MissRecord(**data),
    "exchanges": lambda data: ExchangeRecord(**data),
    "overlaps": lambda data: OverlapRecord(**{**data, "stages": tuple(data["stages"])}),
    "fragments": lambda data: FragmentRecord(**data),
    "passes": lambda data: PassRecord(**data),
    "schedule": _chain,
    "dags": _dag,
    "graphs": lambda data: GraphRecord(**data),
}


def _to_html(report: Report) -> str:
    from moe_compiler.viz.html import render

    return render(report)


def _to_dot(report: Report) -> str:
    from moe_compiler.viz.dot import dags_text

    return dags_text(report.dags)


def _to_mermaid(report: Report) -> str:
    from moe_compiler.viz.mermaid import dags_text

    return dags_text(report.dags)


_RENDERERS: dict[str, Callable[[Report], str]] = {
    ".html": _to_html,
    ".json": to_json,
    ".txt": lambda report: f"{report}\n",
    ".dot": _to_dot,
    ".mmd": _to_mermaid,
}
