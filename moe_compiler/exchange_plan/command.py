"""`moepdl plan`: how an expert-parallel block would run over many ranks, simulated; transport, order, what is exposed.

    moepdl plan --shape qwen3 --tokens 128 4096 --ranks 8
    moepdl plan --ranks 2 --direction forward_backward --timeline out/plan.json
    moepdl plan --shape deepseek-v3 --ranks 64 --node 8 --node-gbs 400 --node-latency-us 8 --skew zipf --layers 58
    moepdl plan --ranks 8 --skew counts.json                    a JSON list: how often each expert was chosen

The kernels' times are the cost model's for --device, the transports' those of two H200 that NVLink joins, in
proportion to the links given here. Nothing of this was compared with a run on several GPUs yet.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

from moe_compiler.bench.shapes import NAMED, Shape, find_shape
from moe_compiler.block_program import BlockSizes
from moe_compiler.device_model import DeviceModel, device_model
from moe_compiler.errors import MoepdlError, UsageError, near_name
from moe_compiler.exchange_plan.builder import Block
from moe_compiler.exchange_plan.choose import Group, Limits, carriers, choose
from moe_compiler.exchange_plan.links import Links, LinkTable, link_table
from moe_compiler.exchange_plan.record import Case, layered, plan_record
from moe_compiler.exchange_plan.routing import routing_of
from moe_compiler.exchange_plan.text import plan_text
from moe_compiler.exchange_plan.trace import trace
from moe_compiler.exchange_plan.traffic import traffic

__all__ = ["MOST_RANKS", "main"]

MOST_RANKS = 4096
DIRECTIONS = {"forward": ("forward",), "forward_backward": ("forward", "backward")}


def main(argv: Sequence[str]) -> int:
    """Run `moepdl plan` with these arguments and return 0. Raises UsageError for what cannot be meant."""
    arguments = _parser().parse_args(list(argv))
    shape = find_shape(arguments.shape)
    tokens = list(dict.fromkeys(arguments.tokens))
    table = link_table()
    links = _links(arguments, table)
    _check(arguments, tokens)
    model = _model(arguments.device)
    routing = routing_of(arguments.skew, shape.experts, shape.k)
    directions = DIRECTIONS[arguments.direction]
    block = _block(shape, save="backward" in directions)
    limits = _limits(arguments, table, links)
    cases = []
    for count in tokens:
        rows = traffic(
            routing,
            [count] * arguments.ranks,
            links,
            placement=arguments.placement,
            capacity=arguments.capacity,
        )
        group = Group(rows, links, model, table)
        cases.append(Case(count, block, group, tuple(choose(block, group, each, limits) for each in directions)))
    record = plan_record(shape.name, block, routing, arguments.placement, cases, arguments.layers)
    if arguments.timeline is not None:
        _write_timeline(cases[0], arguments.layers, arguments.timeline)
    print(json.dumps(record, indent=1, sort_keys=True) if arguments.json else plan_text(record))
    return 0


def _parser() -> argparse.ArgumentParser:
    prose, _, examples = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="moepdl plan", description=prose, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", default="qwen3", help=f"{', '.join(NAMED)}, or sizes E,k,H,I[,shared]; default qwen3")
    add("--tokens", nargs="+", type=int, default=[4096], metavar="T", help="of each rank; default 4096")
    add("--ranks", type=int, default=8, metavar="R", help=f"up to {MOST_RANKS}; default 8")
    add("--direction", choices=tuple(DIRECTIONS), default="forward", help="default forward")
    add("--link-gbs", type=float, metavar="GB/S", help="of a rank, each way; default: as measured on two H200")
    add("--latency-us", type=float, metavar="US", help="a flag there and back; default: as measured on two H200")
    add("--node", type=int, metavar="RANKS", help="ranks of a node; default: all are in one")
    add("--node-gbs", type=float, metavar="GB/S", help="of a node, each way; its ranks share it")
    add("--node-latency-us", type=float, default=8.0, metavar="US", help="between nodes; default 8")
    add("--skew", default="uniform", metavar="ROUTING", help="uniform, zipf, or a JSON file with E counts")
    add("--placement", choices=("contiguous", "round_robin"), default="contiguous", help="of experts on ranks")
    add("--capacity", type=int, default=0, metavar="C", help="slots a rank; default: T rounded up to a multiple of 16")
    add("--transports", nargs="+", metavar="NAME", help="only these; by default all of the table")
    add("--overlap", choices=("auto", "on", "off"), default="auto", help="as the compiler's option; default auto")
    add("--chunks", type=int, default=0, metavar="N", help="of the tokens; default: as many as are predicted best")
    add("--layers", type=int, default=1, metavar="N", help="equal blocks one after the other; default 1")
    add("--device", default="NVIDIA H200", metavar="NAME", help='whose kernel times; default "NVIDIA H200"')
    add("--timeline", type=Path, metavar="FILE", help="a Perfetto trace of the first number of tokens")
    add("--json", action="store_true", help="print one JSON value instead of text")
    return parser


def _check(arguments: argparse.Namespace, tokens: Sequence[int]) -> None:
    if not 1 <= arguments.ranks <= MOST_RANKS:
        raise UsageError(
            f"--ranks {arguments.ranks}: a group has 1 to {MOST_RANKS} ranks",
            why="expert parallelism over more was never simulated here",
            try_=f"--ranks {min(max(arguments.ranks, 1), MOST_RANKS)}",
        )
    if min(tokens) < 1:
        raise UsageError(
            f"--tokens {min(tokens)}: numbers of tokens are from 1 on",
            why="they are the tokens of each rank",
            try_="--tokens 128 4096",
        )
    if arguments.layers < 1:
        raise UsageError(
            f"--layers {arguments.layers}: a model has one layer or more",
            why="blocks follow each other",
            try_="--layers 1",
        )
    if arguments.capacity and arguments.capacity < max(tokens):
        raise UsageError(
            f"--capacity {arguments.capacity} is less than --tokens {max(tokens)}",
            why="a rank may send all its tokens to one other, and each takes a slot there",
            try_=f"--capacity {-(-max(tokens) // 16) * 16}, or none",
        )


def _links(arguments: argparse.Namespace, table: LinkTable) -> Links:
    for name, least in (("link_gbs", 0), ("latency_us", None), ("node_gbs", 0), ("node_latency_us", None)):
        value = getattr(arguments, name)
        if value is not None and (math.isnan(value) or value < 0 or value == least):
            raise UsageError(
                f"--{name.replace('_', '-')} {value:g} is no {'bandwidth' if least == 0 else 'time'}",
                why="bandwidths are above zero, latencies from zero on",
                try_=f"--{name.replace('_', '-')} {370 if least == 0 else 3}",
            )
    if arguments.node is None:
        if arguments.node_gbs is not None:
            raise UsageError(
                "--node-gbs without --node",
                why="without it all ranks are in one node, and nothing crosses between nodes",
                try_="--node 8",
            )
        return table.links(arguments.link_gbs, arguments.latency_us)
    if arguments.node < 1:
        raise UsageError(
            f"--node {arguments.node}: a node has one rank or more",
            why="it is the number of its ranks",
            try_="--node 8",
        )
    if arguments.node_gbs is None:
        raise UsageError(
            f"--node {arguments.node} without --node-gbs",
            why="what crosses between nodes takes as long as their links let it",
            try_="--node-gbs 400, which is eight network cards of 400 Gbit/s",
        )
    return table.links(
        arguments.link_gbs,
        arguments.latency_us,
        node=arguments.node,
        node_gbs=arguments.node_gbs,
        node_latency_us=arguments.node_latency_us,
    )


def _limits(arguments: argparse.Namespace, table: LinkTable, links: Links) -> Limits:
    if arguments.chunks < 0:
        raise UsageError(
            f"--chunks {arguments.chunks}: tokens are cut into one chunk or more",
            why="0 leaves the number to the prediction",
            try_="--chunks 2",
        )
    if arguments.transports is None:
        return Limits(None, arguments.overlap, arguments.chunks)
    for name in arguments.transports:
        if name not in table.transports:
            raise UsageError(
                f"there is no transport {name!r}",
                why=f"the transports are {', '.join(table.transports)}",
                try_=f"--transports {near_name(name, table.transports) or next(iter(table.transports))}",
            )
    limits = Limits(frozenset(arguments.transports), arguments.overlap, arguments.chunks)
    several = links.several(arguments.ranks)
    if not carriers(table, several_nodes=several, among=limits.transports):
        possible = [name for name, each in table.transports.items() if each.between_nodes]
        raise UsageError(
            f"--transports {' '.join(arguments.transports)} with {links.nodes(arguments.ranks)} nodes",
            why=f"between nodes works {', '.join(possible)} alone",
            try_=f"--transports {' '.join(possible)}",
        )
    return limits


def _model(device: str) -> DeviceModel:
    model = device_model(device)
    if model.source.startswith("derived"):
        raise UsageError(
            f"there is no table of kernel times for --device {device!r}",
            why="tables are those that are shipped (NVIDIA H200) and those that `moepdl calibrate` made here",
            try_='--device "NVIDIA H200", or moepdl calibrate on a machine with that GPU',
        )
    return model


def _block(shape: Shape, *, save: bool) -> Block:
    sizes = BlockSizes(shape.experts, shape.k, shape.hidden, shape.intermediate)
    return Block(sizes, shape.shared, save)


def _write_timeline(case: Case, layers: int, path: Path) -> None:
    simulations = [(choice.direction, layered(choice, case, layers)) for choice in case.choices]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(trace(simulations, case.group.traffic)) + "\n", encoding="utf-8")
    except OSError as error:
        raise MoepdlError(
            f"--timeline {path} cannot be written ({error.strerror})",
            why="the trace is one file",
            try_="a path in a folder of yours",
        ) from error
