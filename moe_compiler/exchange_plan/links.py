"""What links and transports take: the table of measured numbers, and the links of a group of ranks.

A transport moves the rows of one exchange. From the start of its kernel (or copy) to the arrival of the last row:

    call_us + peer_us * peers + bytes / rate + latency          at least floor_us

`bytes / rate` is the slowest of the rank's own way out, the receiver's way in and, between nodes, both nodes' uplinks,
which all their ranks share. A rate is the table's share of the reference link, applied to the link that is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

__all__ = ["LinkTable", "Links", "Transport", "link_table", "load_links"]

_SHIPPED = Path(__file__).resolve().parent.parent / "links"


@dataclass(frozen=True)
class Transport:
    """One way to move the rows of an exchange.

    call_us        its own launches, whatever the bytes;  peer_us: for each other rank of the group
    floor_us       no exchange takes less
    shares         by CTAs (0: none), the share of the link's bandwidth that it reaches
    beside         by CTAs, how fast kernels run while it sends: 1 as if alone, 0 not at all
    whole_slots    it sends whole slices of slots, used or not, since the host knows no counts
    packs          rows are copied together first, on the way out
    between_nodes  it works between nodes, too
    """

    name: str
    call_us: float
    shares: Mapping[int, float] = field(hash=False)
    beside: Mapping[int, float] = field(hash=False)
    peer_us: float = 0.0
    floor_us: float = 0.0
    whole_slots: bool = False
    packs: bool = False
    between_nodes: bool = False
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Links:
    """What joins the ranks of a group.

    gbs         10^9 bytes a second, each way, between a rank and the others of its node
    latency_us  a flag there and back
    node        ranks of a node; None: all ranks are in one
    node_gbs    each way, between a node and the others; its ranks share it
    """

    gbs: float
    latency_us: float
    node: int | None = None
    node_gbs: float = 0.0
    node_latency_us: float = 0.0

    def nodes(self, ranks: int) -> int:
        """How many nodes so many ranks fill; the last one may be smaller."""
        return 1 if self.node is None else -(-ranks // self.node)

    def several(self, ranks: int) -> bool:
        """Whether the ranks are on more than one node."""
        return self.nodes(ranks) > 1


@dataclass(frozen=True)
class LinkTable:
    """Transports by name, the link that they were measured on, and where the numbers come from."""

    device: str
    link_gbs: float
    latency_us: float
    transports: Mapping[str, Transport]
    about: Mapping[str, str]

    def links(self, gbs: float | None = None, latency_us: float | None = None, **between: Any) -> Links:
        """Links with the table's own numbers where none are given; `between`: fields of Links for several nodes."""
        return Links(
            self.link_gbs if gbs is None else gbs, self.latency_us if latency_us is None else latency_us, **between
        )


@lru_cache
def link_table(name: str = "nvidia_h200") -> LinkTable:
    """A table that is shipped."""
    return load_links(_SHIPPED / f"{name}.json")


def load_links(path: Path) -> LinkTable:
    """The table of a file, every number of which is a pair [number, where it comes from].

    Raises ValueError, naming the file and the entry, when it is not one of ours.
    """
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        gbs = _number("link_gbs", data["link_gbs"], 1e-9)
        transports = {name: _transport(name, fields, gbs) for name, fields in data["transports"].items()}
        if not transports:
            raise ValueError("it has no transport")
        return LinkTable(
            str(data["device"]),
            gbs,
            _number("latency_us", data["latency_us"], 0.0),
            transports,
            {str(key): str(value) for key, value in data["about"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is no table of links ({error!r})") from error


def _transport(name: str, fields: dict[str, Any], gbs: float) -> Transport:
    origins: dict[str, str] = {}

    def number(key: str, least: float, most: float = float("inf")) -> float:
        value = _number(f"{name}.{key}", fields[key], least, most)
        origins[key] = str(fields[key][1])
        return value

    def by_ctas(key: str, least: float, most: float, unit: float) -> dict[int, float]:
        found = {}
        for ctas, pair in fields[key].items():
            found[int(ctas)] = _number(f"{name}.{key}[{ctas}]", pair, least, most) / unit
            origins[f"{key}[{ctas}]"] = str(pair[1])
        if not found:
            raise ValueError(f"{name}.{key} is empty")
        return dict(sorted(found.items()))

    flags = ("whole_slots", "packs", "between_nodes")
    for key in flags:
        if not isinstance(fields.get(key, True), bool):
            raise ValueError(f"{name}.{key} is {fields[key]!r}, not true or false")
    unknown = set(fields) - {"about", "call_us", "peer_us", "floor_us", "rates_gbs", "beside", *flags}
    if unknown:
        raise ValueError(f"{name} has unknown entries: {', '.join(sorted(unknown))}")
    shares, beside = by_ctas("rates_gbs", 1e-9, 1e9, gbs), by_ctas("beside", 0.0, 1.0, 1.0)
    if set(shares) != set(beside):
        raise ValueError(f"{name}: rates_gbs and beside are for different numbers of CTAs")
    return Transport(
        name,
        number("call_us", 0.0),
        shares,
        beside,
        peer_us=number("peer_us", 0.0) if "peer_us" in fields else 0.0,
        floor_us=number("floor_us", 0.0) if "floor_us" in fields else 0.0,
        origins=origins,
        **{key: fields[key] for key in flags if key in fields},
    )


def _number(what: str, pair: Any, least: float, most: float = float("inf")) -> float:
    value, origin = pair
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise ValueError(f"{what} is {value!r}, not a number from {least:g} to {most:g}")
    if not isinstance(origin, str) or not origin:
        raise ValueError(f"{what} does not say where it comes from")
    return float(value)
