"""The report as one HTML file: inline SVG and CSS, no scripts, no network, readable in any browser and in an issue.

`render` is the whole page, `render_fragment` the same content for a notebook cell. Everything that came from the user's
program is escaped. The same report gives the same text.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from html import escape
from typing import Any

from moe_compiler.report import (
    ChainRecord,
    DagRecord,
    EdgeRecord,
    FragmentRecord,
    GraphRecord,
    MatchRecord,
    MissRecord,
    PassRecord,
    Report,
    VariantRecord,
    plural,
    split_where,
)
from moe_compiler.viz import svg
from moe_compiler.viz.layout import lay_out
from moe_compiler.viz.style import CSS, PAGE_CSS
from moe_compiler.viz.timeline import UNIT_NOTE, gain_text, place, total_us

__all__ = ["render", "render_fragment"]

# A graph of a whole model is long; the dump has all of it.
MAX_CODE = 120_000
MAX_DIFF_LINES = 3000
MAX_DELTAS = 6
# A sign and a word before any colour.
_STATUS = {
    "rewritten": ("✓", "ok", "the graph was rewritten"),
    "unchanged": ("–", "warn", "the graph was left as it is"),
    "dryrun": ("○", "warn", "dry run: analysed, and compiled unchanged"),
    "fallback": ("!", "bad", "an error occurred: the unchanged graph was compiled instead"),
}


def render(report: Report) -> str:
    """A complete HTML document."""
    title = f"moepdl report, frame {report.frame}"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{PAGE_CSS}{CSS}</style>\n</head>\n<body>\n"
        f"{_content(report)}\n</body>\n</html>\n"
    )


def render_fragment(report: Report) -> str:
    """The content with its style sheet, to be put inside another page; its rules touch nothing outside."""
    return f"<style>{CSS}</style>\n{_content(report)}"


def _content(report: Report) -> str:
    sections = [
        ("notes", "Notes", _notes(report)),
        ("blocks", "Matched blocks", "".join(map(_match, report.folded_matches()))),
        ("misses", "Near misses", "".join(map(_miss, report.folded_misses()))),
        ("schedule", "Schedule", _schedule(report)),
        ("dag", "Dependency DAG", _dags(report.dags)),
        ("passes", "Passes", _passes(report.passes)),
        ("graphs", "Graphs", _graphs(report.graphs)),
        ("options", "Options", _options(report)),
        ("environment", "Environment", _environment(report.environment)),
    ]
    present = [section for section in sections if section[2]]
    links = "".join(f'<a href="#moepdl-{name}">{escape(title)}</a>' for name, title, _ in present)
    body = "\n".join(
        f'<section aria-labelledby="moepdl-{name}"><h2 id="moepdl-{name}">{escape(title)}</h2>\n{html}</section>'
        for name, title, html in present
    )
    navigation = f'<nav aria-label="Sections">{links}</nav>' if links else ""
    return f'<div class="moepdl"><main>\n{_header(report)}\n{navigation}\n{body}\n</main></div>'


def _header(report: Report) -> str:
    sign, style, sentence = _STATUS[report.status]
    matched = sum(match.count for match in report.matches)
    missed = sum(miss.count for miss in report.misses)
    last = [(chain.count, chain.variants[-1]) for chain in report.schedule if chain.variants]
    edges = sum(count * len(variant.edges) for count, variant in last)
    programmatic = sum(count * variant.programmatic for count, variant in last)
    tiles = [
        (str(matched), "block matched" if matched == 1 else "blocks matched"),
        (str(missed), "candidate missed" if missed == 1 else "candidates missed"),
    ]
    if last:
        chains = sum(count for count, _ in last)
        tiles.append((str(chains), "chain of launches" if chains == 1 else "chains of launches"))
        tiles.append((f"{programmatic} / {edges}", "edges programmatic"))
    times = "".join(f"<li><b>{escape(value)}</b><span>{escape(label)}</span></li>" for value, label in tiles)
    words = [sentence[0].upper() + sentence[1:] + "."]
    if last:
        words.append(f"{report.pdl_text()}.")
    if report.phases_pending:
        later = " (compiled at the first backward call)" if "backward" in report.phases_pending else ""
        words.append(f"Not compiled yet: {', '.join(report.phases_pending)}{later}.")
    return (
        f'<header><h1>moepdl report</h1><span class="badge {style}"><span aria-hidden="true">{sign}</span>'
        f'{escape(report.status)}</span><span class="muted">frame {escape(report.frame)}</span></header>\n'
        f'<p>{escape(" ".join(words))}</p>\n<ul class="tiles">{times}</ul>'
    )


def _notes(report: Report) -> str:
    errors = [f'<div class="card error"><b>Error.</b> <pre>{escape(error)}</pre></div>' for error in report.errors]
    notes = [f'<div class="card note">{escape(note)}</div>' for note in report.notes]
    return "".join(errors + notes + [_fragment(fragment) for fragment in report.folded_fragments()])


def _fragment(fragment: FragmentRecord) -> str:
    what = "Graph break" if fragment.compiled else "Runs in eager, no graph"
    hint = f"<p>Try: {escape(fragment.remedy)}</p>" if fragment.remedy else ""
    line = f"<p>{_where(fragment.where)}</p>" if fragment.where else ""
    return f'<div class="card note"><b>{what}{_times(fragment.count)}.</b> {escape(fragment.reason)}{line}{hint}</div>'


def _where(where: str) -> str:
    """`file:line: code` with the file told apart from the code."""
    place, code = split_where(where)
    if not code:
        return f'<span class="where mono">{escape(place)}</span>' if place else ""
    return f'<span class="where mono"><span class="file">{escape(place)}</span>  {escape(code)}</span>'


def _times(count: int) -> str:
    return f' <span class="times">×{count}</span>' if count > 1 else ""


def _chips(pairs: Iterable[tuple[str, Any]]) -> str:
    items = "".join(f"<li>{escape(key)} = <b>{escape(_text(value))}</b></li>" for key, value in pairs)
    return f'<ul class="chips">{items}</ul>' if items else ""


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)


def _match(match: MatchRecord) -> str:
    router = f"router {match.router or 'left to Inductor'}"
    if match.router_why or not match.router:
        router += f": {match.router_why or 'not recognised'}"
    alone = f"<p><b>Recognised, left alone:</b> {escape(match.left_alone)}</p>" if match.left_alone else ""
    block = match.block + (f" and {match.count - 1} equal blocks" if match.count > 1 else "")
    attributes = ""
    if match.attributes:
        attributes = f"<details><summary>Attributes</summary>{_chips(sorted(match.attributes.items()))}</details>"
    return (
        f'<article class="card"><div class="head"><h3>{escape(match.formulation)}{_times(match.count)}</h3>'
        f'<span class="muted">{escape(router)}</span></div><p class="muted">{escape(block)}</p>'
        f"{alone}{_where(match.where)}{_chips(match.sizes.items())}{attributes}</article>"
    )


def _miss(miss: MissRecord) -> str:
    total = max(miss.steps_total, miss.steps_passed)
    dots = "●" * miss.steps_passed + "○" * (total - miss.steps_passed)
    parts = [
        f'<article class="card miss"><div class="head"><h3>{escape(miss.candidate)}{_times(miss.count)}</h3>'
        f"<span>nearest formulation <b>{escape(miss.formulation)}</b></span>"
        f'<span class="steps" aria-hidden="true">{dots}</span>'
        f'<span class="muted">{miss.steps_passed} of {miss.steps_total} steps</span></div>',
        _where(miss.where),
        f"<p>Failed at <b>{escape(miss.step)}</b>: {escape(miss.reason)}</p>",
        _where(miss.at) if miss.at != miss.where else "",
    ]
    if miss.node:
        parts.append(f'<p class="muted">node <code>{escape(miss.node)}</code></p>')
    if miss.hint:
        parts.append(f"<p><b>Try:</b> {escape(miss.hint)}</p>")
    return "".join([*parts, "</article>"])


def _passes(passes: list[PassRecord]) -> str:
    if not passes:
        return ""
    timed = any(item.seconds for item in passes)
    heads = ["Phase", "Pass", "Level", "Numerics", "#Rewrites", *(["#Time"] if timed else []), "Operators"]
    rows = []
    for item in passes:
        delta = _deltas(item.delta)
        rows.append(
            f"<tr{'' if item.rewrites else ' class=idle'}><td>{escape(item.phase)}</td>"
            f'<td class="name"><code>{escape(item.name)}</code></td><td>{escape(item.level)}</td>'
            f"<td>{escape(item.numerics)}</td>"
            f'<td class="number">{item.rewrites}</td>'
            + (f'<td class="number">{item.seconds * 1e3:.1f} ms</td>' if timed else "")
            + f"<td>{delta or '<span class=muted>unchanged</span>'}</td></tr>"
        )
    return _table(heads, rows)


def _deltas(delta: dict[str, int]) -> str:
    """The largest changes first; what is beyond the first few is folded away."""
    ordered = sorted(delta.items(), key=lambda pair: (-abs(pair[1]), pair[0]))
    shown = [_delta(name, count) for name, count in ordered if count]
    if len(shown) <= MAX_DELTAS:
        return "".join(shown)
    rest = "".join(shown[MAX_DELTAS:])
    more = f"<details><summary>{len(shown) - MAX_DELTAS} more</summary>{rest}</details>"
    return "".join(shown[:MAX_DELTAS]) + more


def _delta(name: str, count: int) -> str:
    style, sign = ("plus", "+") if count > 0 else ("minus", "−")
    return f'<span class="delta {style} mono">{escape(name)} {sign}{abs(count)}</span>'


def _table(heads: list[str], rows: list[str]) -> str:
    """A table with these column heads; a head that begins with # is that of a column of numbers."""
    cells = "".join(
        f'<th class="number" scope="col">{escape(head[1:])}</th>'
        if head.startswith("#")
        else f'<th scope="col">{escape(head)}</th>'
        for head in heads
    )
    body = "".join(rows)
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def _schedule(report: Report) -> str:
    chains = report.folded_schedule()
    if not chains:
        return ""
    pictures = [_chain(chain, number) for number, chain in enumerate(chains)]
    exchanges = map(str, (*report.folded_exchanges(), *report.folded_overlaps()))
    told = [*exchanges, *report.loop_lines(), *report.memory_lines()]
    lines = "".join(f'<p class="muted">{escape(line)}</p>' for line in told)
    signs = svg.lane_signs(variant for chain in chains for variant in chain.variants)
    return svg.legend(signs) + lines + "".join(pictures)


def _chain(chain: ChainRecord, number: int) -> str:
    return "".join(
        _variant(chain, variant, f"moepdl-lanes-{number}-{place_}") for place_, variant in enumerate(chain.variants)
    )


def _variant(chain: ChainRecord, variant: VariantRecord, identity: str) -> str:
    spans = place(variant)
    predicted = bool(spans) and all(span.predicted for span in spans)
    facts = [
        variant.range_text,
        plural(len(variant.launches), "launch", "launches"),
        f"{variant.programmatic} of {plural(len(variant.edges), 'edge')} programmatic",
        f"{total_us(spans):.1f} µs predicted" if predicted else UNIT_NOTE,
    ]
    title = f"{chain.direction} chain {chain.name}, variant {variant.name}: {', '.join(facts)}"
    caption = (
        f"<figcaption><h3>{escape(chain.direction)} · {escape(variant.name)}{_times(chain.count)}</h3>"
        f'<span class="muted">{escape(chain.name)}</span>'
        f'<span class="muted">{escape(" · ".join(facts))}</span></figcaption>'
    )
    picture = svg.swim_lanes(variant, identity, title)
    return f'<figure>{caption}<div class="scroll">{picture}</div>{_launches(variant)}</figure>'


def _launches(variant: VariantRecord) -> str:
    """The launches and edges of a variant as tables: what the picture shows, in words."""
    rows = []
    for index, launch in enumerate(variant.launches):
        marks = [word for word, on in (("waits", launch.waits), ("triggers", launch.triggers)) if on]
        names = ", ".join(launch.reads)
        weights = f' <span class="muted">weights {escape(", ".join(launch.weights))}</span>' if launch.weights else ""
        time = "" if launch.predicted_us is None else f"{launch.predicted_us:.1f} µs"
        rows.append(
            f'<tr><td class="number">{index}</td><td><code>{escape(launch.kernel)}</code></td><td>{launch.stream}</td>'
            f"<td>{'programmatic' if launch.pdl else 'plain'}</td><td>{', '.join(marks)}</td>"
            f"<td>{escape(names)}{weights}</td><td>{escape(', '.join(launch.writes))}</td>"
            f'<td class="number">{time}</td></tr>'
        )
    heads = ["#No.", "Kernel", "Stream", "Launch", "Traits", "Reads", "Writes", "#Predicted"]
    edges = [_edge(edge, variant) for edge in variant.edges]
    tables = _table(heads, rows) + (_table(["Edge", "Kind", "Launch", "Why", "#Gain"], edges) if edges else "")
    return f"<details><summary>Launches and edges</summary>{tables}</details>"


def _edge(edge: EdgeRecord, variant: VariantRecord) -> str:
    count = len(variant.launches)
    ends = [
        f"{number} {variant.launches[number].kernel}" if 0 <= number < count else str(number)
        for number in (edge.producer, edge.consumer)
    ]
    through = f' <span class="muted">through {escape(", ".join(edge.through))}</span>' if edge.through else ""
    gain = gain_text(edge, "µs").removeprefix("gain ")
    return (
        f"<tr><td>{escape(ends[0])} → {escape(ends[1])}{through}</td><td>{escape(edge.kind)}</td>"
        f"<td>{'programmatic' if edge.programmatic else 'plain'}</td><td>{escape(edge.why)}</td>"
        f'<td class="number">{gain}</td></tr>'
    )


def _dags(dags: list[DagRecord]) -> str:
    parts = []
    signs: set[str] = set()
    for number, record in enumerate(dags):
        if not record.nodes:
            continue
        layout = lay_out(record)
        signs |= {svg.route_style(route) for route in layout.routes}
        note = f"<span>{escape(layout.note)}</span>" if layout.note else ""
        title = f"{record.direction} dependency DAG: {len(record.nodes)} nodes, {len(record.edges)} edges"
        caption = (
            f'<figcaption><h3>{escape(record.direction)}</h3><span class="muted">{plural(len(record.nodes), "node")}, '
            f"{plural(len(record.edges), 'edge')}</span>{note}</figcaption>"
        )
        picture = svg.dag(layout, f"moepdl-dag-{number}", title)
        beside = "".join(f'<p class="muted">{escape(str(branch))}</p>' for branch in record.folded_branches())
        parts.append(f'<figure>{caption}{beside}<div class="scroll">{picture}</div></figure>')
    return svg.legend(signs, dag=True) + "".join(parts)


def _graphs(graphs: list[GraphRecord]) -> str:
    previous: dict[str, GraphRecord] = {}
    parts = []
    for graph in graphs:
        # A captured graph begins a new frame, with nothing before it to compare to.
        before = previous.get(graph.phase) if graph.name != "captured" else None
        previous[graph.phase] = graph
        code = escape(graph.code[:MAX_CODE])
        if len(graph.code) > MAX_CODE:
            code += f"\n… {len(graph.code) - MAX_CODE} more characters are in the dump folder"
        changes = _changes(before, graph) if before is not None else ""
        parts.append(
            f'<details class="block"><summary><b class="mono">{graph.number:02d} {escape(graph.name)}</b> '
            f'<span class="muted">{escape(graph.phase)}, {plural(graph.lines, "line")}</span></summary>{changes}'
            f'<pre tabindex="0">{code}</pre></details>'
        )
    return "".join(parts)


def _changes(before: GraphRecord, after: GraphRecord) -> str:
    """What the pass changed, line by line; + and - carry the meaning, the colours repeat it."""
    if before.lines + after.lines > MAX_DIFF_LINES:
        return '<p class="muted">Too long to compare here: <code>moepdl diff</code> does it from the dump.</p>'
    old, new = before.code.splitlines(), after.code.splitlines()
    lines = list(difflib.unified_diff(old, new, n=1, lineterm=""))[2:]
    if not lines:
        return ""
    spans = []
    for line in lines:
        style = {"+": "plus", "-": "minus"}.get(line[:1])
        spans.append(f'<span class="{style}">{escape(line)}</span>' if style else f"{escape(line)}\n")
    summary = f"Changes against {before.number:02d} {before.name}"
    return f'<details open><summary>{escape(summary)}</summary><pre tabindex="0">{"".join(spans)}</pre></details>'


def _options(report: Report) -> str:
    if not report.options:
        return ""
    rows = [
        f"<tr><td><code>{escape(key)}</code></td><td><code>{escape(_text(value))}</code></td>"
        f"<td>{_origin(report.origins.get(key, 'default'), key)}</td></tr>"
        for key, value in report.options.items()
    ]
    return _table(["Option", "Value", "From"], rows)


def _origin(origin: str, key: str) -> str:
    if origin == "environment":
        return f"environment, <code>MOEPDL_{escape(key.upper())}</code>"
    return f'<span class="muted">{escape(origin)}</span>' if origin == "default" else escape(origin)


def _environment(environment: dict[str, Any]) -> str:
    rows = [
        f"<tr><td>{escape(key)}</td><td><code>{escape(_text(value))}</code></td></tr>"
        for key, value in environment.items()
    ]
    return _table(["Name", "Value"], rows) if rows else ""
