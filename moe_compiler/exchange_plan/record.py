"""What was chosen, as plain values: what `moepdl plan --json` prints, and what its text is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moe_compiler.exchange_plan.builder import Block
from moe_compiler.exchange_plan.choose import Choice, Group, Outcome, one_rank_us
from moe_compiler.exchange_plan.operation import Rows, Way, layers
from moe_compiler.exchange_plan.routing import Routing
from moe_compiler.exchange_plan.simulate import Flight, Simulation, simulate
from moe_compiler.exchange_plan.traffic import Part

__all__ = ["VERSION", "Case", "case_record", "layered", "plan_record"]

# Of the JSON form.
VERSION = 1


@dataclass(frozen=True)
class Case:
    """A number of tokens a rank: the group, and what was chosen for each direction."""

    tokens: int
    block: Block
    group: Group
    choices: tuple[Choice, ...]


def plan_record(
    shape: str, block: Block, routing: Routing, placement: str, cases: Sequence[Case], count: int
) -> dict[str, Any]:
    """Everything of a plan. count: layers of the model. Times are microseconds, rates 10^9 bytes a second."""
    group = cases[0].group
    traffic, links, model = group.traffic, group.links, group.model
    sizes = block.sizes
    own = _mean(traffic.reach, traffic.members)
    return {
        "version": VERSION,
        "shape": shape,
        "sizes": {
            "experts": sizes.experts,
            "k": sizes.k,
            "hidden": sizes.hidden,
            "intermediate": sizes.intermediate,
            "shared": block.shared,
            "dtype": str(sizes.dtype).removeprefix("torch."),
        },
        "ranks": traffic.ranks,
        "classes": int(traffic.members.numel()),
        "placement": placement,
        "routing": {
            "name": routing.name,
            "ranks_a_token": round(traffic.reach_sum, 4),
            "other_ranks_a_token": round(traffic.reach_sum - own, 4),
        },
        "device": model.device,
        "predictions": model.label,
        "links": {
            "gbs": links.gbs,
            "latency_us": links.latency_us,
            "node": links.node,
            "node_gbs": links.node_gbs,
            "node_latency_us": links.node_latency_us,
            "transports": group.table.device,
        },
        "layers": count,
        "cases": [case_record(case, count) for case in cases],
    }


def case_record(case: Case, count: int) -> dict[str, Any]:
    """One number of tokens."""
    directions = [_choice_record(choice, case, count) for choice in case.choices]
    block_us = sum(each["block_us"] for each in directions)
    exposed = sum(each["exposed_us"] for each in directions)
    return {
        "tokens": case.tokens,
        "capacity": case.group.traffic.capacity,
        "directions": directions,
        "block_us": round(block_us, 3),
        "exposed_us": round(exposed, 3),
        "exposed_share": round(exposed / block_us, 5),
    }


def layered(choice: Choice, case: Case, count: int) -> Simulation:
    """The chosen way through `count` layers."""
    group = case.group
    return simulate(layers(choice.ops, count), group.traffic, group.links, choice.best.way, group.model)


def _choice_record(choice: Choice, case: Case, count: int) -> dict[str, Any]:
    traffic, best, simulation = case.group.traffic, choice.best, choice.simulation
    load = traffic.load(Part(""))
    pairs = traffic.slots(Part("")) * traffic.k
    waited = simulation.waited
    alone = one_rank_us(case.block, case.group.model, case.tokens, choice.direction)
    return {
        "direction": choice.direction,
        "chosen": _way_record(best.way),
        "label": best.way.label,
        "why": choice.why,
        "block_us": round(best.us, 3),
        "plain_us": round(choice.plain.us, 3),
        "plain": choice.plain.way.label,
        "gain_us": round(choice.gain_us, 3),
        "local_us": round(choice.local_us, 3),
        "exposed_us": round(choice.exposed_us, 3),
        "exposed_share": round(choice.exposed_us / best.us, 5),
        "plain_exposed_us": round(choice.plain.us - choice.local_us, 3),
        "one_rank_us": round(alone, 3),
        "speedup": round(traffic.ranks * alone / best.us, 4),
        "layers_us": round(layered(choice, case, count).us if count > 1 else best.us, 3),
        "exchanges": [
            _exchange(op.name, op.rows, simulation.flights[op.name], best.way, case)
            for op in choice.ops
            if op.rows is not None
        ],
        "imbalance": round(_ratio(load.pairs, traffic.members), 4),
        "waited_us": {
            "mean": round(_mean(waited, traffic.members), 3),
            "most": round(float(waited.max()), 3),
        },
        "unused": {
            "slots": traffic.slots(Part("")),
            "rows": round(_mean(load.rows, traffic.members), 1),
            "us": round(best.us - choice.live_us, 3),
            "pairs_bytes": pairs * case.block.row_bytes,
        },
        "not_possible_yet": None if choice.wished is None else _outcome(choice.wished),
        "considered": [_outcome(each) for each in choice.considered],
    }


def _exchange(name: str, rows: Rows, flight: Flight, way: Way, case: Case) -> dict[str, Any]:
    """An exchange by itself: bytes of a rank on average, and its time when all ranks start together."""
    traffic = case.group.traffic
    members = traffic.members
    size = rows.bytes / rows.of
    sent = _mean(flight.out_bytes + flight.node_bytes / traffic.node_ranks, members)
    # All rows of the exchange, with those that stay where they are.
    logical = _mean(traffic.kept + traffic.near + traffic.far, members) * size
    us = max(flight.call_us + float(flight.us.max()) + flight.latency_us, flight.floor_us)
    return {
        "name": name,
        "transport": (way.home if rows.home else way.out).label,
        "sent_bytes": round(sent),
        "between_nodes_bytes": round(_mean(flight.node_bytes / traffic.node_ranks, members)),
        "logical_bytes": round(logical),
        "us": round(us, 3),
        "real_gbs": round(sent / us / 1e3, 2) if us else 0.0,
        "logical_gbs": round(logical / us / 1e3, 2) if us else 0.0,
    }


def _way_record(way: Way) -> dict[str, Any]:
    return {
        "out": way.out.transport.name,
        "out_ctas": way.out.ctas,
        "home": way.home.transport.name,
        "home_ctas": way.home.ctas,
        "order": way.order,
        "chunks": way.chunks,
    }


def _outcome(outcome: Outcome) -> dict[str, Any]:
    return {**_way_record(outcome.way), "label": outcome.way.label, "us": round(outcome.us, 3)}


def _mean(values: Tensor, members: Tensor) -> float:
    """Over the ranks."""
    return float((values * members).sum() / members.sum())


def _ratio(values: Tensor, members: Tensor) -> float:
    """The largest over the mean; 1 where there is nothing."""
    mean = _mean(values, members)
    return float(values.max()) / mean if mean else 1.0
