"""A report as text: one line for a log, some lines for a terminal, and the blocks of lines about one record.

Files are shown as `file:line  code`, which a terminal makes clickable; equal layers are one line with their number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from moe_compiler.report_records import ChainRecord, FragmentRecord, MatchRecord, MissRecord, plural

if TYPE_CHECKING:
    from moe_compiler.report import Report

__all__ = [
    "beside_lines",
    "fragment_lines",
    "loop_lines",
    "match_lines",
    "memory_lines",
    "miss_lines",
    "pdl_text",
    "split_where",
    "summary",
    "text",
]

# The stages that one launch of a CPU chain runs by itself, in their order.
_LOOP_STAGES = {
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


def summary(report: Report) -> str:
    """One line: status, blocks, chains, programmatic edges, misses."""
    matched, missed = _total(report.matches), _total(report.misses)
    parts = [f"moepdl {report.frame}: {report.status}", f"{plural(matched, 'block')} matched{_none_found(report)}"]
    alone = _total(match for match in report.matches if match.left_alone)
    if alone:
        parts.append(f"{alone} left alone")
    if missed:
        parts.append(f"{plural(missed, 'candidate')} missed")
    if report.fragments:
        parts.append(plural(_total(report.fragments), "graph break"))
    if report.schedule:
        launches, edges, programmatic = _schedule_totals(report.schedule)
        parts.append(f"{plural(_total(report.schedule), 'chain')}, {plural(launches, 'launch', 'launches')}")
        parts.append(f"{programmatic} of {plural(edges, 'edge')} programmatic")
    if report.errors:
        parts.append(plural(len(report.errors), "error"))
    return ", ".join(parts)


def text(report: Report) -> str:
    """What `print` shows of a report: the summary, then matches, schedule, notes, breaks and misses."""
    lines = [summary(report)]
    lines += [f"  {_match_line(match)}" for match in report.folded_matches()]
    lines += [f"  {exchange}" for exchange in report.folded_exchanges()]
    lines += [f"  {overlap}" for overlap in report.folded_overlaps()]
    if report.schedule or report.phases_pending:
        lines.append(f"  schedule: {_schedule_text(report)}")
        lines += [f"  {line}" for line in loop_lines(report)]
    if report.schedule:
        lines.append(f"  {pdl_text(report)}")
        lines += [f"  {line}" for line in beside_lines(report)]
        lines += [f"  {line}" for line in memory_lines(report)]
    lines += [f"  note: {_indent(note)}" for note in report.notes]
    lines += [f"  error: {_indent(error)}" for error in report.errors]
    for fragment in report.folded_fragments():
        lines += [f"  {line}" for line in fragment_lines(fragment)]
    for miss in report.folded_misses():
        lines += [f"  {line}" for line in miss_lines(miss)]
    if report.dump_folder:
        lines.append(f"  dump: {report.dump_folder}")
    return "\n".join(lines)


def loop_lines(report: Report) -> list[str]:
    """For each launch that is a loop over the experts, which of the DAG's stages it runs."""
    lines: dict[str, None] = {}
    for chain in report.folded_schedule():
        # A block whose input or weights need no gradient has fewer stages; the DAG knows which.
        found = {
            str(node.get("label")) for dag in report.dags if dag.direction == chain.direction for node in dag.nodes
        }
        for variant in chain.variants:
            for launch in variant.launches:
                stages = _LOOP_STAGES.get(launch.kernel, ())
                stages = tuple(stage for stage in stages if stage in found) or stages
                if stages:
                    lines[f"{launch.kernel}: one loop over the experts runs {', '.join(stages)}"] = None
    return list(lines)


def beside_lines(report: Report) -> list[str]:
    """For each kind of branch that chains run beside on a second stream, up to which T, and what that gains."""
    lines = []
    for dag in report.dags:
        for branch in dag.folded_branches():
            if not branch.overlapped:
                continue
            gain = ""
            if branch.gain_us is not None:
                gain = f", gain {branch.gain_us:.1f} us predicted at T={branch.at_tokens}"
            reach = "any T" if branch.limit is None else f"T <= {branch.limit}"
            lines.append(
                f"second stream: {dag.direction} {plural(branch.count, 'chain')} beside a branch of "
                f"{plural(branch.matmuls, 'matmul')}, {reach}{gain} ({branch.why})"
            )
    return lines


def memory_lines(report: Report) -> list[str]:
    """For each chain what it takes between its kernels, by its variant for the most tokens."""
    lines: dict[str, None] = {}
    for chain in report.folded_schedule():
        memory = chain.variants[-1].memory if chain.variants else None
        if memory is not None:
            lines[f"memory: {chain.direction} {memory}"] = None
    return list(lines)


def pdl_text(report: Report) -> str:
    """Is PDL in use, and if not, why."""
    if report.pdl_off:
        return f"PDL off: {report.pdl_off}"
    used = any(variant.programmatic for chain in report.schedule for variant in chain.variants)
    return "PDL on" if used else "PDL on, no edge is programmatic"


def _schedule_text(report: Report) -> str:
    parts = []
    for chain in report.folded_schedule():
        variants = ", ".join(
            f"{variant.range_text}: {plural(len(variant.launches), 'launch', 'launches')}, "
            f"{variant.programmatic} of {plural(len(variant.edges), 'edge')} programmatic{variant.predicted_text}"
            for variant in chain.variants
        )
        parts.append(f"{chain.direction} {plural(chain.count, 'chain')} ({variants})")
    parts += [
        f"{phase} pending" + (" (compiled at the first backward call)" if phase == "backward" else "")
        for phase in report.phases_pending
    ]
    return "; ".join(parts)


def _none_found(report: Report) -> str:
    """Why nothing matched, when the search ran and met no candidate at all."""
    if report.matches or report.misses or report.errors:
        return ""
    if "find_moe" in report.options.get("disable", ()):
        return ": find_moe is disabled"
    if not any(record.name == "find_moe" for record in report.passes):
        return ""
    return ": no top-k and no expert matmul found"


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
    exchange = match.attributes.get("exchange")
    line += f"; exchange: {exchange}" if exchange else ""
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
