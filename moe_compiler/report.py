"""The Report: everything one compilation did, and everything it declined to do and why, as plain values.

The backend fills it, one Report a Dynamo frame; printing, HTML, timelines and the dump folder only read it. What it is
made of is in `report_records`, how it reads in `report_text`, how it is stored in `report_format`; whoever uses a
report imports all of it from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_compiler import report_format, report_text
from moe_compiler.report_format import SCHEMA
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
    fold,
    plural,
)
from moe_compiler.report_text import fragment_lines, match_lines, miss_lines, split_where

__all__ = [
    "SCHEMA",
    "STATUSES",
    "BranchRecord",
    "ChainRecord",
    "DagRecord",
    "EdgeRecord",
    "ExchangeRecord",
    "FragmentRecord",
    "GraphRecord",
    "LaunchRecord",
    "MatchRecord",
    "MemoryRecord",
    "MissRecord",
    "OverlapRecord",
    "PassRecord",
    "Report",
    "VariantRecord",
    "fragment_lines",
    "match_lines",
    "miss_lines",
    "plural",
    "split_where",
]

STATUSES = ("rewritten", "unchanged", "fallback", "dryrun")
_WORST_FIRST = ("fallback", "rewritten", "dryrun", "unchanged")


@dataclass
class Report:
    """What one compilation of one Dynamo frame did.

    frame:          Dynamo's compile id, e.g. `0/0`
    status:         one of STATUSES
    options:        `Options.to_dict()`; `origins` says for each key "default", "argument" or "environment"
    environment:    versions, device, capability: text or numbers by name
    predictions:    where predicted times come from, e.g. "NVIDIA H200, shipped"; empty without any
    measured:       where the measured gains of edges come from, e.g. "measured on NVIDIA H200", or why there are none
    tiles:          where the kernels' tiles come from, e.g. "tuned on NVIDIA H200", or why they are the shipped ones
    pdl_off:        why no launch is programmatic; empty when PDL is in use or there is no chain
    schedule:       the chains, forward first
    exchanges:      of the expert-parallel blocks; overlaps: what runs while each of them travels, where any may
    fragments:      where Dynamo broke the frame: what is in pieces is no block, and counts as none
    notes:          what else the user should know, one sentence each ("overlap off: no all-to-all in this graph")
    errors:         text of errors that `on_error="fallback"` turned into an unchanged graph
    phases_pending: phases that have not run yet: the backward graph is compiled at the first backward call
    dump_folder:    where the dump of this frame was written, or None
    repro:          Python text that compiles the captured graph with the same options, or empty
    """

    frame: str
    status: str
    options: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    matches: list[MatchRecord] = field(default_factory=list)
    misses: list[MissRecord] = field(default_factory=list)
    exchanges: list[ExchangeRecord] = field(default_factory=list)
    overlaps: list[OverlapRecord] = field(default_factory=list)
    fragments: list[FragmentRecord] = field(default_factory=list)
    passes: list[PassRecord] = field(default_factory=list)
    schedule: list[ChainRecord] = field(default_factory=list)
    dags: list[DagRecord] = field(default_factory=list)
    graphs: list[GraphRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    phases_pending: list[str] = field(default_factory=list)
    pdl_off: str = ""
    predictions: str = ""
    measured: str = ""
    tiles: str = ""
    dump_folder: str | None = None
    repro: str = ""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status {self.status!r} is not one of {STATUSES}")

    @classmethod
    def merge(cls, reports: Sequence[Report]) -> Report:
        """One report of several frames of a model, e.g. one that Dynamo split; notes and errors name their frame.

        Raises ValueError for no reports.
        """
        if not reports:
            raise ValueError("there is no report to merge")
        if len(reports) == 1:
            return reports[0]
        first = reports[0]
        merged = cls(
            frame=" + ".join(report.frame for report in reports),
            status=next(status for status in _WORST_FIRST if any(report.status == status for report in reports)),
            options=first.options,
            origins=first.origins,
            environment=first.environment,
            pdl_off=next((report.pdl_off for report in reports if report.pdl_off), ""),
            predictions=next((report.predictions for report in reports if report.predictions), ""),
            measured=next((report.measured for report in reports if report.measured), ""),
            tiles=next((report.tiles for report in reports if report.tiles), ""),
            dump_folder=next((report.dump_folder for report in reports if report.dump_folder), None),
        )
        for report in reports:
            for name in report_format.RECORDS:
                getattr(merged, name).extend(getattr(report, name))
            merged.notes += [f"frame {report.frame}: {note}" for note in report.notes]
            merged.errors += [f"frame {report.frame}: {error}" for error in report.errors]
            merged.phases_pending += [phase for phase in report.phases_pending if phase not in merged.phases_pending]
        return merged

    def folded_matches(self) -> list[MatchRecord]:
        """The matches, equal layers folded into one record with the sum of their counts."""
        return fold(self.matches, ignore="block")

    def folded_misses(self) -> list[MissRecord]:
        """The misses, best attempt first, equal layers folded."""
        folded = fold(self.misses, ignore="node")
        return sorted(folded, key=lambda miss: -miss.steps_passed / max(miss.steps_total, 1))

    def folded_exchanges(self) -> list[ExchangeRecord]:
        """The exchanges, equal layers folded."""
        return fold(self.exchanges, ignore=("block", "where"))

    def folded_overlaps(self) -> list[OverlapRecord]:
        """What runs beside exchanges, equal layers folded."""
        return fold(self.overlaps, ignore="block")

    def folded_fragments(self) -> list[FragmentRecord]:
        """The graph breaks, equal layers folded."""
        return fold(self.fragments, ignore="function")

    def folded_schedule(self) -> list[ChainRecord]:
        """The chains, equal layers folded."""
        return fold(self.schedule, ignore="name")

    def summary(self) -> str:
        """One line: status, blocks, chains, programmatic edges, misses."""
        return report_text.summary(self)

    def __str__(self) -> str:
        return report_text.text(self)

    def loop_lines(self) -> list[str]:
        """For each launch that is a loop over the experts, which of the DAG's stages it runs."""
        return report_text.loop_lines(self)

    def memory_lines(self) -> list[str]:
        """For each chain what it takes between its kernels."""
        return report_text.memory_lines(self)

    def pdl_text(self) -> str:
        """Is PDL in use, and if not, why."""
        return report_text.pdl_text(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, ready for JSON; `Report.from_dict` gives an equal report back."""
        return report_format.to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """The report that `to_dict` described. Raises MoepdlError when the data is of another schema."""
        return cls(**report_format.fields_of(data))

    def save(self, path: str | Path) -> Path:
        """Write the report as the suffix says: .html, .json, .txt, .dot (the DAGs), .mmd (the same for Mermaid).
        Returns the path. Raises MoepdlError for another suffix.
        """
        return report_format.save(self, path)

    def to_json(self) -> str:
        """`to_dict` as text, the same bytes for the same report."""
        return report_format.to_json(self)

    def _repr_html_(self) -> str:
        from moe_compiler.viz.html import render_fragment

        return render_fragment(self)
