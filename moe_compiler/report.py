"""The Report: everything one compilation did, and everything it declined to do and why, as plain values.

The backend fills it, one Report a Dynamo frame; printing, HTML, timelines and the dump folder only read it. Records
hold text and numbers, never tensors, nodes or symbols, so that a report can be stored beside the compile cache, sent
between processes and read without torch. `to_dict` and `from_dict` are inverse to each other, through JSON too.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from moe_compiler.errors import MoepdlError

SCHEMA = 1
STATUSES = ("rewritten", "unchanged", "fallback", "dryrun")
_WORST_FIRST = ("fallback", "rewritten", "dryrun", "unchanged")

# The stages that one launch of a CPU chain runs by itself, in their order.
LOOP_STAGES = {
    "experts_loop": ("gate_up", "down", "combine"),
    "experts_loop_saving": ("gate_up", "down", "combine"),
    "experts_loop_backward": (
        "grad_act",
        "grad_down",
        "grad_gate_up",
        "grad_down_bias",
        "grad_gate_up_bias",
        "grad_pairs",
        "grad_input_weights",
        "combine",
    ),
}

R = TypeVar("R")


def _plain(value: Any) -> Any:
    """The value as JSON has it. Symbols become their text, and so do infinities and NaN, for which JSON has no
    number.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in (sorted(value, key=str) if isinstance(value, (set, frozenset)) else value)]
    return str(value)


@dataclass(frozen=True)
class MatchRecord:
    """A block that was recognised.

    block:       where it sits, e.g. `layers.0.mlp`
    formulation: name of the spelling that bound it
    router:      name of the router rule, or None when the router stays with Inductor; `router_why` then says why,
                 at which line, and what would help; also where only its end stays, "..., then Inductor"
    where:       the user's line, `file:line: code`
    sizes:       E, k, T, H, I (and others) as text; symbolic ones keep their symbol
    attributes:  what the canonical operators carry: score, order, renormalize, activation, weight_at, layout, dtype,
                 ...
    count:       how many equal blocks this record stands for
    left_alone:  why a recognised block was not rewritten; empty when it was
    """

    block: str
    formulation: str
    router: str | None = None
    router_why: str = ""
    where: str = ""
    sizes: dict[str, str] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    count: int = 1
    left_alone: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", {str(key): str(value) for key, value in self.sizes.items()})
        object.__setattr__(self, "attributes", _plain(self.attributes))


@dataclass(frozen=True)
class MissRecord:
    """A candidate that no formulation bound; the attempt with most steps passed is the one shown.

    candidate:   the anchor's operator, e.g. `topk`; `where` is its user line
    formulation: the nearest one, which passed `steps_passed` of `steps_total` steps and failed at `step`
    reason:      what did not hold at `node`, whose user line is `at`
    hint:        what would make it match; where the step has no advice of its own, the example to follow
    """

    candidate: str
    where: str
    formulation: str
    steps_passed: int
    steps_total: int
    step: str
    reason: str
    node: str = ""
    hint: str = ""
    at: str = ""
    count: int = 1


@dataclass(frozen=True)
class FragmentRecord:
    """A place where Dynamo ended a graph early, or gave a frame up.

    reason:   what broke it; `where` is the user's line, `file:line: code`
    remedy:   what helps
    function: the Python function whose frame it was, when it is known
    compiled: is there a graph up to this place; False for a frame that runs in eager and never reached a backend
    """

    reason: str
    where: str = ""
    remedy: str = ""
    function: str = ""
    compiled: bool = True
    count: int = 1


@dataclass(frozen=True)
class PassRecord:
    """One run of one pass. `delta` maps operator names to how many more (or fewer) of them the graph holds
    afterwards.
    """

    name: str
    phase: str  # "capture", "forward" or "backward"
    level: str
    numerics: str
    rewrites: int
    seconds: float = 0.0
    delta: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class LaunchRecord:
    """One kernel launch of a chain. `reads`, `writes` and `weights` name inputs and buffers; `weights` may be read
    before the wait.
    """

    kernel: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    waits: bool = False
    triggers: bool = False
    pdl: bool = False
    predicted_us: float | None = None
    stream: int = 0


@dataclass(frozen=True)
class EdgeRecord:
    """A dependence between two launches, given by their positions in the variant's list.

    kind:         "raw", "war", "waw" (by storage), "order" (a collective's order) or "effect" (a host effect)
    programmatic: the consumer is launched with the PDL attribute and may start before the producer ends; `why` says
                  why, or why not
    predicted_us: predicted gain of the programmatic edge, None when there is no model for it
    through:      the buffers that carry the dependence
    """

    producer: int
    consumer: int
    kind: str = "raw"
    programmatic: bool = False
    why: str = ""
    predicted_us: float | None = None
    through: tuple[str, ...] = ()


@dataclass(frozen=True)
class VariantRecord:
    """What a chain launches when T <= max_tokens (None: any T); the first variant that fits is taken at call time.

    at_tokens: the T that predicted times are for, None without predictions
    """

    name: str
    max_tokens: int | None = None
    launches: tuple[LaunchRecord, ...] = ()
    edges: tuple[EdgeRecord, ...] = ()
    at_tokens: int | None = None

    @property
    def programmatic(self) -> int:
        """Number of programmatic edges."""
        return sum(edge.programmatic for edge in self.edges)

    @property
    def predicted_us(self) -> float | None:
        """Predicted time of the variant: its launches, less what its programmatic edges gain; None when any is open."""
        times = [launch.predicted_us for launch in self.launches]
        known = [time for time in times if time is not None]
        if len(known) < len(times) or not known:
            return None
        return max(sum(known) - sum(edge.predicted_us or 0.0 for edge in self.edges if edge.programmatic), 0.0)

    @property
    def predicted_text(self) -> str:
        """ ", 23 us predicted at T=4", or nothing."""
        time = self.predicted_us
        return "" if time is None or self.at_tokens is None else f", {time:.0f} us predicted at T={self.at_tokens}"

    @property
    def range_text(self) -> str:
        return "any T" if self.max_tokens is None else f"T <= {self.max_tokens}"


@dataclass(frozen=True)
class ChainRecord:
    """A chain of launches, one operator in Inductor's code. `direction` is "forward" or "backward"."""

    name: str
    direction: str
    variants: tuple[VariantRecord, ...] = ()
    count: int = 1


@dataclass(frozen=True)
class GraphRecord:
    """The graph as a pass left it: runnable Python in `code`, kept when the pass changed something. `number` orders
    the files of a dump.
    """

    number: int
    name: str
    phase: str
    code: str
    lines: int = 0

    def __post_init__(self) -> None:
        if not self.lines:
            object.__setattr__(self, "lines", self.code.count("\n"))


@dataclass(frozen=True)
class DagRecord:
    """The dependency DAG of one direction, as values to draw.

    nodes: dicts with `id`, `label`, `kind` ("compute", "exchange", "input", "output", ...), `bytes` and `flops`
           (number, text or None), and the `grid` of a tiled kernel; a `group` names the block of a node; with
           predictions also `predicted_us`, `slack_us` (how much later it may start), `critical` (on the longest path)
    edges: dicts with `source`, `target` (node ids), `kind` as in EdgeRecord, and optionally `programmatic`
    """

    direction: str
    nodes: list[dict[str, Any]] = field(default_factory=list)
    edges: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", _plain(self.nodes))
        object.__setattr__(self, "edges", _plain(self.edges))


@dataclass
class Report:
    """What one compilation of one Dynamo frame did.

    frame:          Dynamo's compile id, e.g. `0/0`
    status:         one of STATUSES
    options:        `Options.to_dict()`; `origins` says for each key "default", "argument" or "environment"
    environment:    versions, device, capability: text or numbers by name
    predictions:    where predicted times come from, e.g. "NVIDIA H200, shipped"; empty without any
    pdl_off:        why no launch is programmatic; empty when PDL is in use or there is no chain
    schedule:       the chains, forward first
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
            dump_folder=next((report.dump_folder for report in reports if report.dump_folder), None),
        )
        for report in reports:
            for name in _BUILDERS:
                getattr(merged, name).extend(getattr(report, name))
            merged.notes += [f"frame {report.frame}: {note}" for note in report.notes]
            merged.errors += [f"frame {report.frame}: {error}" for error in report.errors]
            merged.phases_pending += [phase for phase in report.phases_pending if phase not in merged.phases_pending]
        return merged

    def folded_matches(self) -> list[MatchRecord]:
        """The matches, equal layers folded into one record with the sum of their counts."""
        return _fold(self.matches, ignore="block")

    def folded_misses(self) -> list[MissRecord]:
        """The misses, best attempt first, equal layers folded."""
        folded = _fold(self.misses, ignore="node")
        return sorted(folded, key=lambda miss: -miss.steps_passed / max(miss.steps_total, 1))

    def folded_fragments(self) -> list[FragmentRecord]:
        """The graph breaks, equal layers folded."""
        return _fold(self.fragments, ignore="function")

    def folded_schedule(self) -> list[ChainRecord]:
        """The chains, equal layers folded."""
        return _fold(self.schedule, ignore="name")

    def summary(self) -> str:
        """One line: status, blocks, chains, programmatic edges, misses."""
        matched, missed = _total(self.matches), _total(self.misses)
        parts = [f"moepdl {self.frame}: {self.status}", f"{plural(matched, 'block')} matched{self._none_found()}"]
        alone = _total(match for match in self.matches if match.left_alone)
        if alone:
            parts.append(f"{alone} left alone")
        if missed:
            parts.append(f"{plural(missed, 'candidate')} missed")
        if self.fragments:
            parts.append(plural(_total(self.fragments), "graph break"))
        if self.schedule:
            launches, edges, programmatic = _schedule_totals(self.schedule)
            parts.append(f"{plural(_total(self.schedule), 'chain')}, {plural(launches, 'launch', 'launches')}")
            parts.append(f"{programmatic} of {plural(edges, 'edge')} programmatic")
        if self.errors:
            parts.append(plural(len(self.errors), "error"))
        return ", ".join(parts)

    def __str__(self) -> str:
        lines = [self.summary()]
        lines += [f"  {_match_line(match)}" for match in self.folded_matches()]
        if self.schedule or self.phases_pending:
            lines.append(f"  schedule: {self._schedule_text()}")
            lines += [f"  {line}" for line in self.loop_lines()]
        if self.schedule:
            lines.append(f"  {self.pdl_text()}")
        lines += [f"  note: {_indent(note)}" for note in self.notes]
        lines += [f"  error: {_indent(error)}" for error in self.errors]
        for fragment in self.folded_fragments():
            lines += [f"  {line}" for line in fragment_lines(fragment)]
        for miss in self.folded_misses():
            lines += [f"  {line}" for line in miss_lines(miss)]
        if self.dump_folder:
            lines.append(f"  dump: {self.dump_folder}")
        return "\n".join(lines)

    def _none_found(self) -> str:
        """Why nothing matched, when the search ran and met no candidate at all."""
        if self.matches or self.misses or self.errors:
            return ""
        if "find_moe" in self.options.get("disable", ()):
            return ": find_moe is disabled"
        if not any(record.name == "find_moe" for record in self.passes):
            return ""
        return ": no top-k and no expert matmul found"

    def loop_lines(self) -> list[str]:
        """For each launch that is a loop over the experts, which of the DAG's stages it runs."""
        lines: dict[str, None] = {}
        for chain in self.folded_schedule():
            # A block whose input or weights need no gradient has fewer stages; the DAG knows which.
            found = {
                str(node.get("label")) for dag in self.dags if dag.direction == chain.direction for node in dag.nodes
            }
            for variant in chain.variants:
                for launch in variant.launches:
                    stages = LOOP_STAGES.get(launch.kernel, ())
                    stages = tuple(stage for stage in stages if stage in found) or stages
                    if stages:
                        lines[f"{launch.kernel}: one loop over the experts runs {', '.join(stages)}"] = None
        return list(lines)

    def pdl_text(self) -> str:
        """Is PDL in use, and if not, why."""
        if self.pdl_off:
            return f"PDL off: {self.pdl_off}"
        used = any(variant.programmatic for chain in self.schedule for variant in chain.variants)
        return "PDL on" if used else "PDL on, no edge is programmatic"

    def _schedule_text(self) -> str:
        parts = []
        for chain in self.folded_schedule():
            variants = ", ".join(
                f"{variant.range_text}: {plural(len(variant.launches), 'launch', 'launches')}, "
                f"{variant.programmatic} of {plural(len(variant.edges), 'edge')} programmatic{variant.predicted_text}"
                for variant in chain.variants
            )
            parts.append(f"{chain.direction} {plural(chain.count, 'chain')} ({variants})")
        parts += [
            f"{phase} pending" + (" (compiled at the first backward call)" if phase == "backward" else "")
            for phase in self.phases_pending
        ]
        return "; ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, ready for JSON; `Report.from_dict` gives an equal report back."""
        return {"schema": SCHEMA, **_plain(dataclasses.asdict(self))}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """The report that `to_dict` described. Raises MoepdlError when the data is of another schema."""
        if data.get("schema") != SCHEMA:
            raise MoepdlError(
                f"this is not a report of schema {SCHEMA}: schema is {data.get('schema')!r}",
                why="the report was written by another version of moepdl, or the file is something else",
                try_="write the dump again with this version",
            )
        fields = {key: value for key, value in data.items() if key != "schema"}
        for key, build in _BUILDERS.items():
            fields[key] = [build(item) for item in fields.get(key, ())]
        return cls(**fields)

    def save(self, path: str | Path) -> Path:
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
        path.write_text(render(self), encoding="utf-8")
        return path

    def to_json(self) -> str:
        """`to_dict` as text, the same bytes for the same report."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n"

    def _repr_html_(self) -> str:
        from moe_compiler.viz.html import render_fragment

        return render_fragment(self)


def fragment_lines(fragment: FragmentRecord) -> list[str]:
    """The lines that tell where a graph broke, and what helps."""
    times = f" x{fragment.count}" if fragment.count > 1 else ""
    within = f" (in {fragment.function})" if fragment.function else ""
    what = "graph break" if fragment.compiled else f"runs in eager{within}, no graph"
    lines = [f"{what}{times}: {_indent(fragment.reason)}"]
    if fragment.where:
        lines.append(f"  at {_spaced(fragment.where)}")
    if fragment.remedy:
        lines.append(f"  try: {_indent(fragment.remedy)}")
    return lines


def miss_lines(miss: MissRecord) -> list[str]:
    """The block of lines that tells why a candidate was not matched."""
    times = f" x{miss.count}" if miss.count > 1 else ""
    lines = [
        f"candidate {miss.candidate}{times} at {_spaced(miss.where)}",
        f"nearest formulation: {miss.formulation} ({miss.steps_passed} of {miss.steps_total} steps)",
        f"failed at '{miss.step}': {_indent(miss.reason)}",
    ]
    if miss.at and miss.at != miss.where:
        lines.append(f"  at {_spaced(miss.at)}")
    if miss.node:
        lines.append(f"  node {miss.node}")
    if miss.hint:
        lines.append(f"  try: {_indent(miss.hint)}")
    return lines


def match_lines(match: MatchRecord) -> list[str]:
    """Everything known about a matched block: the line of the report, then its attributes."""
    lines = [f"matched {_match_line(match)}", f"  block {match.block}"]
    return lines + [f"  {key}: {value}" for key, value in sorted(match.attributes.items())]


def _match_line(match: MatchRecord) -> str:
    times = f" x{match.count}" if match.count > 1 else ""
    router = f"router {match.router or 'left to Inductor'}"
    if match.router_why or not match.router:
        router += f" ({match.router_why or 'not recognised'})"
    sizes = " ".join(f"{key}={value}" for key, value in match.sizes.items())
    line = f"{match.formulation}{times}, {router}"
    line += f", {sizes}" if sizes else ""
    line += f", at {_spaced(match.where)}" if match.where else ""
    return line + (f"; left alone: {match.left_alone}" if match.left_alone else "")


def split_where(where: str) -> tuple[str, str]:
    """(`file:line`, code) of a user line as it is shown: a file of an installed library from its package on."""
    head, _, code = where.partition(": ")
    return re.sub(r"^.*[\\/](?:site|dist)-packages[\\/]", "", head), code


def _spaced(where: str) -> str:
    """`file:line: code` with two spaces in place of the second colon, which makes the path easy to click or copy."""
    head, code = split_where(where)
    return f"{head}  {code}" if code else head


def _indent(text: str) -> str:
    return text.replace("\n", "\n    ")


def plural(count: int, noun: str, many: str = "") -> str:
    """`1 chain`, `2 chains`; `many` is the plural where it is not the noun with an s."""
    return f"{count} {noun if count == 1 else many or noun + 's'}"


def _total(records: Iterable[Any]) -> int:
    return sum(record.count for record in records)


def _schedule_totals(schedule: Sequence[ChainRecord]) -> tuple[int, int, int]:
    """(launches, edges, programmatic edges) over all layers, each chain by its last variant, the one for the
    largest T.
    """
    chosen = [(chain.count, chain.variants[-1]) for chain in schedule if chain.variants]
    return (
        sum(count * len(variant.launches) for count, variant in chosen),
        sum(count * len(variant.edges) for count, variant in chosen),
        sum(count * variant.programmatic for count, variant in chosen),
    )


def _fold(records: Sequence[R], *, ignore: str) -> list[R]:
    """Records that agree in everything but `ignore` and their count become the first of them, with the counts
    added. Keeps order.
    """
    folded: dict[str, Any] = {}
    for record in records:
        fields = {key: value for key, value in dataclasses.asdict(record).items() if key not in ("count", ignore)}  # type: ignore[call-overload]
        key = json.dumps(fields, sort_keys=True, default=str)
        seen = folded.get(key)
        folded[key] = record if seen is None else dataclasses.replace(seen, count=seen.count + record.count)  # type: ignore[attr-defined]
    return list(folded.values())


def _launch(data: Mapping[str, Any]) -> LaunchRecord:
    return LaunchRecord(
        **{**data, "reads": tuple(data["reads"]), "writes": tuple(data["writes"]), "weights": tuple(data["weights"])}
    )


def _edge(data: Mapping[str, Any]) -> EdgeRecord:
    return EdgeRecord(**{**data, "through": tuple(data["through"])})


def _variant(data: Mapping[str, Any]) -> VariantRecord:
    launches = tuple(_launch(item) for item in data["launches"])
    return VariantRecord(**{**data, "launches": launches, "edges": tuple(_edge(item) for item in data["edges"])})


def _chain(data: Mapping[str, Any]) -> ChainRecord:
    return ChainRecord(**{**data, "variants": tuple(_variant(item) for item in data["variants"])})


_BUILDERS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "matches": lambda data: MatchRecord(**data),
    "misses": lambda data: MissRecord(**data),
    "fragments": lambda data: FragmentRecord(**data),
    "passes": lambda data: PassRecord(**data),
    "schedule": _chain,
    "dags": lambda data: DagRecord(**data),
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
    ".json": Report.to_json,
    ".txt": lambda report: f"{report}\n",
    ".dot": _to_dot,
    ".mmd": _to_mermaid,
}
