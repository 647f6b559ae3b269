"""The simulated block as a timeline in the JSON format that Perfetto and chrome://tracing read.

One process for each class of ranks, at most `_MOST` of them: those that end last, and the one that ends first. In each
a thread for the current stream and one for the exchanges; an arrow from each exchange to the wait that it ends.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_compiler.exchange_plan.simulate import Simulation
from moe_compiler.exchange_plan.traffic import Traffic

__all__ = ["trace"]

_MOST = 8
_STREAM, _EXCHANGES = 1, 2


def trace(simulations: list[tuple[str, Simulation]], traffic: Traffic) -> dict[str, Any]:
    """The trace of simulations that follow each other; each with its name ("forward")."""
    ends = sum((simulation.by_class for _, simulation in simulations), torch.zeros_like(traffic.tokens))
    order = torch.argsort(ends, descending=True, stable=True).tolist()
    shown = order if len(order) <= _MOST else [*order[: _MOST - 1], order[-1]]
    events: list[dict[str, Any]] = []
    for process, index in enumerate(shown, start=1):
        events += _names(process, _class_name(traffic, index))
        begin = 0.0
        for name, simulation in simulations:
            events += _slices(process, index, name, simulation, begin)
            begin += simulation.us
    metadata = {
        "generator": "moepdl plan",
        "times": "predicted, microseconds",
        "classes": len(order),
        "classes_shown": len(shown),
    }
    return {"displayTimeUnit": "ns", "otherData": metadata, "traceEvents": events}


def _class_name(traffic: Traffic, index: int) -> str:
    ranks = (traffic.rank_class == index).nonzero().flatten().tolist()
    first = f"rank {ranks[0]}"
    return first if len(ranks) == 1 else f"{first} and {len(ranks) - 1} like it"


def _names(process: int, name: str) -> list[dict[str, Any]]:
    threads = ((_STREAM, "current stream"), (_EXCHANGES, "exchanges"))
    return [
        {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}},
        *(
            {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": label}}
            for thread, label in threads
        ),
    ]


def _slices(process: int, index: int, name: str, simulation: Simulation, begin: float) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    left: dict[str, float] = {}
    starts, ends = simulation.start[:, index].tolist(), simulation.end[:, index].tolist()
    for number, (op, start, end) in enumerate(zip(simulation.ops, starts, ends, strict=True)):
        thread = _EXCHANGES if op.kind == "send" else _STREAM
        args: dict[str, Any] = {"direction": name, "alone_us": round(float(op.us[index]), 3)}
        if op.kind == "send":
            flight = simulation.flights[op.name]
            args = {"direction": name, "sent_bytes": round(float(flight.out_bytes[index]))}
            left[op.name] = begin + end
        events.append(
            {
                "ph": "X",
                "name": op.name,
                "cat": op.kind,
                "pid": process,
                "tid": thread,
                "ts": round(begin + start, 3),
                "dur": round(end - start, 3),
                "args": args,
            }
        )
        if op.kind == "wait":
            common = {"name": "arrived", "cat": "exchange", "id": f"{process}.{name}.{number}", "pid": process}
            events += [
                {"ph": "s", **common, "tid": _EXCHANGES, "ts": round(left[op.flight], 3)},
                {"ph": "f", "bp": "e", **common, "tid": _STREAM, "ts": round(begin + end, 3)},
            ]
    return events
