"""A plan's record as lines for a reader."""

from __future__ import annotations

from typing import Any

__all__ = ["plan_text"]


def plan_text(record: dict[str, Any]) -> str:
    """The lines of `record.plan_record`."""
    sizes, routing, links = record["sizes"], record["routing"], record["links"]
    letters = {"E": "experts", "k": "k", "H": "hidden", "I": "intermediate"}
    text = " ".join(f"{letter}={sizes[name]}" for letter, name in letters.items())
    shared = f" shared={sizes['shared']}" if sizes["shared"] else ""
    between = ""
    if links["node"] is not None:
        between = (
            f"; nodes of {links['node']}, {links['node_gbs']:g} GB/s a node each way, {links['node_latency_us']:g} us"
        )
    lines = [
        f"{record['shape']}: {text}{shared} {sizes['dtype']}; {record['ranks']} ranks, {record['placement']}; "
        f"{routing['name']} routing, a token has experts on {routing['ranks_a_token']:.2f} ranks",
        f"kernels {record['device']}, {record['predictions']}; link {links['gbs']:g} GB/s each way, "
        f"{links['latency_us']:g} us{between}; {_count(record['classes'], 'class', 'classes')} of ranks",
    ]
    for case in record["cases"]:
        for each in case["directions"]:
            lines += ["", *_direction(case, each, record["layers"], record["ranks"])]
        if len(case["directions"]) > 1:
            lines += ["", f"T={case['tokens']} forward + backward: {case['block_us']:.1f} us, {_exposed(case)}"]
    return "\n".join(lines)


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _exposed(record: dict[str, Any]) -> str:
    return f"exposed {record['exposed_us']:.1f} us ({record['exposed_share']:.1%})"


def _direction(case: dict[str, Any], each: dict[str, Any], layers: int, ranks: int) -> list[str]:
    unused, waited = each["unused"], each["waited_us"]
    lines = [
        f"T={case['tokens']} a rank, {each['direction']}: {each['label']}",
        f"  block {each['block_us']:.1f} us; without overlap {each['plain_us']:.1f} us (gain {each['gain_us']:.1f}); "
        f"exchanges as local copies {each['local_us']:.1f} us: {_exposed(each)}",
        f"  why: {each['why']}",
        f"  one rank with all experts {each['one_rank_us']:.1f} us: "
        f"{_count(ranks, 'rank gives', 'ranks give')} {each['speedup']:.2f} times its tokens/s",
    ]
    if layers > 1:
        lines.append(f"  {layers} layers {each['layers_us'] / 1e3:.2f} ms")
    lines += _exchanges(each["exchanges"])
    lines.append(
        f"  ranks: the busiest has {each['imbalance']:.2f} times the mean's pairs; "
        f"they wait {waited['mean']:.1f} us on average, {waited['most']:.1f} at most"
    )
    lines.append(
        f"  slots: {unused['rows']:.0f} of {unused['slots']} in use; the others, and choices of other ranks, cost "
        f"{unused['us']:.1f} us; pairs [slots * k, H] take {_bytes(unused['pairs_bytes'])}"
    )
    wished = each["not_possible_yet"]
    if wished is not None and wished["us"] < each["block_us"]:
        lines.append(f"  not possible yet: {wished['label']}, {wished['us']:.1f} us")
    return lines


def _exchanges(exchanges: list[dict[str, Any]]) -> list[str]:
    """A line for the equal parts of each exchange."""
    parts: dict[str, list[dict[str, Any]]] = {}
    for exchange in exchanges:
        parts.setdefault(exchange["name"].partition(".")[0], []).append(exchange)
    width = max(len(name) for name in parts)
    lines = []
    for name, (first, *others) in parts.items():
        times = f"{len(others) + 1} times " if others else ""
        lines.append(
            f"  {name:<{width}}  {first['transport']}: {times}{_bytes(first['sent_bytes'])} leave a rank, "
            f"{first['us']:.1f} us, {first['real_gbs']:.0f} GB/s real, {first['logical_gbs']:.0f} logical"
        )
    return lines


def _bytes(number: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number / 1e3:.3g} kB"
