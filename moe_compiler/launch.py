"""A chain: the launches that replace a group of stages, as one value with everything a proof or a reader needs.

`Chain.program` is what `moepdl::chain` will carry; `nodes`, `operands` and `results` say how it meets the graph.
`Edge`s are the dependencies between its launches by buffer; which of them is programmatic is decided by chain_pdl
and held to the rules by `moe_compiler.verify`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch.fx import Node

from moe_compiler.cost import cost_text, costs_known
from moe_compiler.dag import block_sizes, stage_sizes
from moe_compiler.device_model import Forecast
from moe_compiler.inline import named_arguments
from moe_compiler.moe_ir import STAGES, is_moepdl, op_name, size_expr
from moe_compiler.plan import Step, variants
from moe_compiler.report import ChainRecord, EdgeRecord, LaunchRecord, MemoryRecord, VariantRecord
from moe_compiler.runtime_kernels.chain.memory import lifetimes
from moe_compiler.runtime_kernels.chain.program import Buffer, Launch, Program, Variant
from moe_compiler.runtime_kernels.registry import kernel
from moe_compiler.runtime_kernels.tiles import Tile, parse_tile

__all__ = [
    "Beside",
    "Chain",
    "Edge",
    "build_chain",
    "device_of",
    "edges",
    "is_stage_node",
    "last_uses",
    "to_record",
    "tokens_expr",
    "tokens_of",
    "with_pdl",
]

# Which results of a stage have one row a token ("T") or a pair ("S"); the others keep their recorded sizes.
_ROWS: dict[str, dict[str, str]] = {
    "router_logits": {"logits": "T"},
    "route": {"weights": "T", "ids": "T"},
    "order": {"perm": "S"},
    "gate_up": {"act": "S", "preact": "S"},
    "down": {"pairs": "S"},
    "combine": {"y": "T"},
    "grad_act": {"grad_preact": "S", "act": "S", "grad_weights": "T"},
    "grad_pairs": {"pairs": "S"},
    "grad_input_weights": {"grad_weights": "T"},
}
# Operands that have one row a token.
_BY_TOKEN = ("logits", "x", "grad_y", "ids")
# Results that have the layout of an operand.
_LIKE = {
    "grad_down": "down",
    "grad_gate": "gate",
    "grad_up": "up",
    "grad_down_bias": "down_bias",
    "grad_gate_bias": "gate_bias",
    "grad_up_bias": "up_bias",
}


@dataclass(frozen=True)
class Edge:
    """Launch `consumer` reads (raw) what launch `producer` wrote, through these buffers; indices into a variant.

    Kind "order": neighbours in the stream that share nothing. What stands before such a consumer has to be complete all
    the same, since later launches build on that.
    """

    producer: int
    consumer: int
    through: tuple[str, ...]
    kind: str = "raw"


@dataclass(frozen=True)
class Beside:
    """What the current stream does while a chain has a stream of its own.

    nodes: independent of the chain; last: those among them that must be computed before the chain is waited for.
    limit: up to how many tokens (None: any number); captured: only in a CUDA graph.
    """

    nodes: tuple[Node, ...]
    last: tuple[Node, ...]
    limit: int | None
    captured: bool

    def covers(self, variant: Variant) -> bool:
        """Whether all runs of a variant are beside."""
        return self.limit is None or (variant.max_tokens is not None and variant.max_tokens <= self.limit)


@dataclass(frozen=True)
class Chain:
    """A program and the graph nodes it replaces.

    operands: the flattened `tensors` argument. results: for each stage node and result index (None for a single
    result, (i, j) for element j of list result i) the position in the operator's list of results.
    beside: what runs beside it, None where it runs on the current stream.
    """

    program: Program
    direction: str
    device: str
    nodes: tuple[Node, ...]
    operands: tuple[Node, ...]
    results: tuple[tuple[Node, int | None, int], ...]
    beside: Beside | None = None


@dataclass
class _Builder:
    """Names the values of a group of stage nodes while its steps are written down."""

    nodes: Sequence[Node]

    def __post_init__(self) -> None:
        self.members = set(self.nodes)
        self.names: dict[object, str] = {}
        self.inputs: list[tuple[str, int | None]] = []
        self.operands: list[Node] = []
        self.taken: set[str] = set()
        self.shapes: dict[str, Buffer] = {}

    def fresh(self, wanted: str) -> str:
        name, number = wanted, 1
        while name in self.taken:
            number += 1
            name = f"{wanted}_{number}"
        self.taken.add(name)
        return name

    def operand(self, parameter: str, value: Any) -> str | None:
        """The name of what a stage reads: a value of the chain, or an input of it (named after the parameter)."""
        if value is None:
            return None
        key: object = tuple(value) if isinstance(value, (list, tuple)) else value
        if key not in self.names:
            name = self.fresh(parameter)
            self.names[key] = name
            many = isinstance(key, tuple)
            self.inputs.append((name, len(value) if many else None))
            self.operands.extend(value if many else [value])
        return self.names[key]

    def result(
        self, stage: str, parameter: str, node: Node, index: int | None, k: int, ins: dict[str, str | None]
    ) -> str:
        name = self.fresh(parameter)
        value = node.meta["val"] if index is None else node.meta["val"][index]
        if parameter in _LIKE:
            self.shapes[name] = Buffer(like=ins[_LIKE[parameter]])
        else:
            rows = _ROWS.get(stage, {}).get(parameter)
            sizes = [str(int(size)) for size in value.shape[1 if rows else 0 :]]
            first = {"T": ["T"], "S": [f"T*{k}"], None: []}[rows]
            self.shapes[name] = Buffer((*first, *sizes), str(value.dtype).removeprefix("torch."))
        return name


def _is_dtype(name: str, value: object) -> bool:
    return name.endswith("dtype") and isinstance(value, torch.dtype)


def _readers(node: Node, index: int | None) -> list[Node]:
    """Who reads result `index` of a node (its getitem nodes' users are what counts)."""
    if index is None:
        return list(node.users)
    items = [user for user in node.users if op_name(user) == "getitem" and user.args[1] == index]
    return [user for item in items for user in item.users] + [item for item in items if not item.users]


def build_chain(nodes: Sequence[Node], *, direction: str, name: str) -> Chain:
    """Write a group of stage nodes (in graph order, convex) down as a chain, no launch programmatic yet."""
    builder = _Builder(nodes)
    k = next(sizes["k"] for sizes in map(stage_sizes, nodes) if "k" in sizes)
    experts = next(sizes["E"] for sizes in map(stage_sizes, nodes) if "E" in sizes)
    steps: list[Step] = []
    outside: list[tuple[Node, int | None, str]] = []
    tokens: tuple[str, int] | None = None
    for node in nodes:
        stage = op_name(node)
        traits = kernel(stage).traits
        named = named_arguments(node)
        optional = traits.optional_reads
        ins = {
            key: None if key in optional and not named[key] else builder.operand(key, named[key])
            for key in traits.reads
        }
        attrs = {
            key: str(value).removeprefix("torch.") if _is_dtype(key, value) else value
            for key, value in named.items()
            if key not in traits.reads
        }
        if tokens is None:
            for key in _BY_TOKEN:
                source = ins.get(key)
                if source is not None and source in dict(builder.inputs):
                    tokens = (source, 0)
                    break
        outs = _results(builder, node, stage, k, ins, outside)
        steps.append(Step(stage, ins, outs, attrs))
    assert tokens is not None, "a chain's first stage always reads tokens, scores or gradients"
    outputs = tuple(dict.fromkeys(value for _, _, value in outside))
    program = Program(
        name=name,
        inputs=tuple(builder.inputs),
        symbols={"T": tokens},
        outputs=outputs,
        variants=variants(
            tuple(steps),
            outputs=frozenset(outputs),
            shapes=builder.shapes,
            device=device_of(nodes[0]),
            k=k,
            experts=experts,
        ),
    )
    return Chain(
        program=program,
        direction=direction,
        device=device_of(nodes[0]),
        nodes=tuple(nodes),
        operands=tuple(builder.operands),
        results=_positions(program, outside),
    )


def device_of(node: Node) -> str:
    """The kind of device that a stage runs on, e.g. "cuda"."""
    value = node.meta["val"]
    while isinstance(value, (tuple, list)):
        value = value[0]
    return value.device.type


def tokens_expr(node: Node) -> sympy.Expr | None:
    """T of a stage in the symbols of its graph; None for a stage that has no row a token."""
    named = named_arguments(node)
    rows = [size_expr(named[key].meta["val"].shape[0]) for key in _BY_TOKEN if isinstance(named.get(key), Node)]
    return rows[0] if rows else None


def tokens_of(node: Node) -> int | None:
    """T of a stage where it is a constant of the graph; None where it is a symbol or the stage has no row a token."""
    tokens = tokens_expr(node)
    return int(tokens) if tokens is not None and tokens.is_Integer else None


def _results(
    builder: _Builder,
    node: Node,
    stage: str,
    k: int,
    ins: dict[str, str | None],
    outside: list[tuple[Node, int | None, str]],
) -> dict[str, str]:
    """Name the results of a stage; remember those that are read outside of the chain."""
    traits = kernel(stage).traits
    value = node.meta["val"]
    outs: dict[str, str] = {}
    if all(write in traits.lists for write in traits.writes):
        return _list_results(builder, node, traits.writes, ins, outside)
    for index, parameter in enumerate(traits.writes):
        position = index if isinstance(value, (tuple, list)) else None
        readers = _readers(node, position)
        if not readers and parameter in traits.optional_writes:
            continue
        name = builder.result(stage, parameter, node, position, k, ins)
        outs[parameter] = name
        if position is None:
            builder.names[node] = name
        for item in list(node.users) if position is not None else []:
            if op_name(item) == "getitem" and item.args[1] == position:
                builder.names[item] = name
        if any(reader not in builder.members for reader in readers):
            outside.append((node, position, name))
    return outs


def _list_results(
    builder: _Builder,
    node: Node,
    writes: Sequence[str],
    ins: dict[str, str | None],
    outside: list[tuple[Node, int | None, str]],
) -> dict[str, str]:
    """Results of operators that return one flat list (weight gradients): a name a part, elements by position."""
    lengths = dict(builder.inputs)
    outs: dict[str, str] = {}
    offset = 0
    for parameter in writes:
        like = ins[_LIKE[parameter]]
        if like is None:
            continue  # the gradient of biases that are not there
        count = lengths[like] or 0
        name = builder.fresh(parameter)
        builder.shapes[name] = Buffer(like=like)
        outs[parameter] = name
        outside.extend((node, offset + element, name) for element in range(count))
        offset += count
    return outs


def _positions(
    program: Program, outside: list[tuple[Node, int | None, str]]
) -> tuple[tuple[Node, int | None, int], ...]:
    """Where each outside value stands in the operator's flat list of results."""
    counts = dict(program.inputs)
    buffers = program.variants[0].buffers
    start: dict[str, int] = {}
    at = 0
    for name in program.outputs:
        start[name] = at
        like = buffers[name].like
        length = counts[like] if like is not None else None
        at += 1 if length is None else length
    found = []
    used: dict[str, int] = {}
    for node, index, name in outside:
        within = used.get(name, 0) if buffers[name].like is not None else 0
        used[name] = within + 1
        found.append((node, index, start[name] + within))
    return tuple(found)


def last_uses(program: Program, variant: Variant) -> dict[str, int]:
    """By buffer that is no output, the last launch that uses it: its memory may be a later launch's."""
    return {name: last for name, (_, last) in lifetimes(variant, program.outputs).items()}


def edges(variant: Variant) -> tuple[Edge, ...]:
    """The dependencies between the launches of a variant: by buffer, and from each launch to its neighbour."""
    writer: dict[str, int] = {}
    found: dict[tuple[int, int], list[str]] = {}
    for index, launch in enumerate(variant.launches):
        for name in launch.ins.values():
            if name is not None and name in writer:
                through = found.setdefault((writer[name], index), [])
                if name not in through:
                    through.append(name)
        for name in launch.outs.values():
            writer[name] = index
    for consumer in range(1, len(variant.launches)):
        found.setdefault((consumer - 1, consumer), [])
    return tuple(
        Edge(producer, consumer, tuple(names), "raw" if names else "order")
        for (producer, consumer), names in sorted(found.items())
    )


def with_pdl(chain: Chain, programmatic: dict[str, frozenset[int]]) -> Chain:
    """The chain with the PDL attribute on these launches of each variant, by variant name."""
    changed = tuple(
        replace(
            variant,
            launches=tuple(
                replace(launch, pdl=index in programmatic.get(variant.name, frozenset()))
                for index, launch in enumerate(variant.launches)
            ),
        )
        for variant in chain.program.variants
    )
    return replace(chain, program=replace(chain.program, variants=changed))


def to_record(
    chain: Chain,
    why: dict[str, dict[int, str]],
    forecasts: Mapping[str, Forecast] | None = None,
    measured: Mapping[str, Mapping[int, float]] | None = None,
    memory: Mapping[str, MemoryRecord] | None = None,
) -> ChainRecord:
    """What the report shows of a chain.

    why: for each variant and launch why it waits programmatically or not; forecasts: by variant, where there are any;
    measured: gain of a programmatic edge by variant and consumer, where there is one; memory: by variant.
    """
    shown = []
    sizes = block_sizes(chain.nodes)
    for variant in chain.program.variants:
        known = (forecasts or {}).get(variant.name)
        stream = int(chain.device == "cuda" and chain.beside is not None and chain.beside.covers(variant))
        launches = tuple(
            LaunchRecord(
                kernel=launch.kernel,
                reads=tuple(name for name in launch.ins.values() if name is not None),
                writes=tuple(launch.outs.values()),
                weights=_weights(launch),
                waits=launch.pdl and kernel(launch.kernel).traits.waits,
                triggers=kernel(launch.kernel).traits.triggers and chain.device == "cuda",
                pdl=launch.pdl,
                predicted_us=None if known is None else known.launch_us[index],
                stream=stream,
                cost=cost_text(launch.kernel, sizes, _tiles(launch)) if costs_known(launch.kernel) else {},
                tiles={f"T <= {t}" if t is not None else "any T": tile or "own" for t, tile in launch.tiles},
            )
            for index, launch in enumerate(variant.launches)
        )
        gains = (measured or {}).get(variant.name, {})
        shown_edges = tuple(
            _edge_record(variant, edge, why.get(variant.name, {}), known, gains) for edge in edges(variant)
        )
        tokens = None if known is None else known.tokens
        taken = (memory or {}).get(variant.name)
        shown.append(VariantRecord(variant.name, variant.max_tokens, launches, shown_edges, tokens, taken))
    return ChainRecord(name=chain.program.name, direction=chain.direction, variants=tuple(shown))


def _tiles(launch: Launch) -> tuple[tuple[int | None, Tile | None], ...]:
    return tuple((limit, None if text is None else parse_tile(text)) for limit, text in launch.tiles)


def _edge_record(
    variant: Variant, edge: Edge, why: dict[int, str], known: Forecast | None, gains: Mapping[int, float]
) -> EdgeRecord:
    neighbours = edge.producer == edge.consumer - 1
    return EdgeRecord(
        producer=edge.producer,
        consumer=edge.consumer,
        kind=edge.kind,
        programmatic=variant.launches[edge.consumer].pdl and neighbours,
        why=why.get(edge.consumer, "")
        if neighbours
        else "not neighbours: complete since the launch between them waited",
        predicted_us=known.boundary_us if known is not None and neighbours else None,
        measured_us=gains.get(edge.consumer) if neighbours else None,
        through=edge.through,
    )


def _weights(launch: Launch) -> tuple[str, ...]:
    """What a launch reads that is constant during the chain."""
    named = (launch.ins.get(key) for key in kernel(launch.kernel).traits.weights)
    return tuple(name for name in named if name is not None)


def is_stage_node(node: Node) -> bool:
    """A call of one of our stage operators."""
    return is_moepdl(node) and op_name(node) in STAGES
