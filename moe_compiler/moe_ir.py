"""The vocabulary of a Mixture-of-Experts block, from the user's ATen operators to launches.

Four levels, each a set of operators; `vocabulary_errors` says which nodes of a graph do not belong to a level.
A block found in the captured graph is a `Match`: what the finder bound to each role, and the two attribute records
(`RouterSpec`, `ExpertsSpec`) that the canonical operators `moepdl::route` and `moepdl::experts` carry. A block that
was not found is a `MissRecord` of the report; inside the finder it is the exception `Miss`.

Letters used everywhere: T tokens, K experts a token, E experts, H hidden, I intermediate, S = T*K pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

__all__ = [
    "BACKWARD_STAGES",
    "COLLECTIVES",
    "EXCHANGES",
    "FORWARD_STAGES",
    "GATHERS",
    "STAGES",
    "STARTS",
    "WAITS",
    "Exchange",
    "ExpertsSpec",
    "Level",
    "Match",
    "Miss",
    "RouterSpec",
    "is_moepdl",
    "name_of",
    "op_name",
    "size_expr",
    "user_line",
    "vocabulary_errors",
]


class Level(IntEnum):
    """What a MoE block looks like; passes move a graph from one level to the next."""

    CAPTURED = 0
    MOE = 1
    STAGES = 2
    LAUNCHES = 3


MOE_OPERATORS = frozenset({"route", "route_backward", "experts", "experts_saving", "experts_backward"})
FORWARD_STAGES = ("router_logits", "route", "order", "gate_up", "down", "combine")
BACKWARD_STAGES = (
    "grad_act",
    "grad_down",
    "grad_gate_up",
    "grad_down_bias",
    "grad_gate_up_bias",
    "grad_pairs",
    "grad_input_weights",
    "combine",
)
STAGES = frozenset(FORWARD_STAGES) | frozenset(BACKWARD_STAGES)

# Experts of a sharded model that are read whole, and their gradients: part of the model's own code at every level.
GATHERS = frozenset({"gather_experts", "gather_expert"})
SHARES = GATHERS | {"reduce_experts", "reduce_expert"}
# Exchanges between the ranks that hold a block's experts; at the level of stages each is a start and a wait.
EXCHANGES = ("ep_dispatch", "ep_combine", "ep_redispatch", "ep_return_weights")
STARTS = frozenset(f"{name}_start" for name in EXCHANGES)
WAITS = frozenset(f"{name}_wait" for name in EXCHANGES)

# Those that all ranks of a group start in the same order.
COLLECTIVES = SHARES | frozenset(EXCHANGES) | STARTS

# Chains may stand beside stages that no chain took (chain_pdl disabled); the moe level is gone after expand_stages.
_VOCABULARY: dict[Level, frozenset[str]] = {
    Level.CAPTURED: GATHERS,
    Level.MOE: MOE_OPERATORS | SHARES | frozenset(EXCHANGES),
    Level.STAGES: STAGES | SHARES | STARTS | WAITS,
    Level.LAUNCHES: STAGES | SHARES | STARTS | WAITS | {"chain", "chain_start", "chain_wait"},
}


def is_moepdl(node: object) -> bool:
    """Is this node a call of one of our operators?"""
    return isinstance(node, Node) and node.op == "call_function" and getattr(node.target, "namespace", "") == "moepdl"


def op_name(node: Node) -> str:
    """The operator's name without namespace and overload: `topk`, `_grouped_mm`, `experts`."""
    return name_of(node.target)


@lru_cache(maxsize=4096)
def name_of(target: Any) -> str:
    """The name of what a node calls, without namespace and overload."""
    packet = getattr(target, "overloadpacket", None)
    if packet is not None:
        return str(packet).rsplit(".", 1)[-1]
    return getattr(target, "__name__", str(target))


def vocabulary_errors(graph: Graph, level: Level) -> list[Node]:
    """The nodes of our namespace that do not belong to `level`, in graph order."""
    allowed = _VOCABULARY[level]
    return [node for node in graph.nodes if is_moepdl(node) and op_name(node) not in allowed]


def size_expr(size: Any) -> sympy.Expr:
    """A size as a sympy expression, without asking a question that would become a guard."""
    if isinstance(size, torch.SymInt):
        return size.node.expr
    return sympy.Integer(int(size))


def user_line(node: Node | None) -> str:
    """`file:line: code` of the user's own line behind a node, innermost frame outside of torch; "" when unknown."""
    if node is None:
        return ""
    lines = (node.meta.get("stack_trace") or "").splitlines()
    frames: list[tuple[str, str]] = []
    for index, line in enumerate(lines):
        text = line.strip()
        if text.startswith('File "'):
            path, _, rest = text[6:].partition('"')
            number = rest.partition("line ")[2].partition(",")[0].strip()
            code = lines[index + 1].strip() if index + 1 < len(lines) else ""
            frames.append((f"{path}:{number}", code if not code.startswith("File ") else ""))
    for where, code in reversed(frames):
        if "/torch/" not in where:
            return f"{where}: {code}" if code else where
    return f"{frames[-1][0]}: {frames[-1][1]}" if frames else ""


class Miss(Exception):
    """A step of a formulation did not hold: `reason` for the reader, the node it was about, and what would help."""

    def __init__(self, reason: str, node: Node | None = None, hint: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.node = node
        self.hint = hint


@dataclass(frozen=True)
class RouterSpec:
    """How scores become weights and ids: the attributes of `moepdl::route`.

    score: "softmax" | "sigmoid" | "none", computed in `score_dtype`; order: "before" or "after" the top-k;
    bias: is one added for the choice alone; groups of experts, of which the `kept_groups` with the largest sum of
    their `group_top` best are chosen from, the others count as `fill` ("0" | "-inf"); one group is none;
    renormalize: divide by (sum over the K + eps), or by max(sum, eps) if `clamp`; then times `scale`, times one number
    an expert if `expert_scale`, in `dtype`.
    """

    k: int
    score: str
    order: str
    renormalize: bool
    eps: float
    scale: float
    score_dtype: torch.dtype
    dtype: torch.dtype
    bias: bool = False
    groups: int = 1
    kept_groups: int = 1
    group_top: int = 1
    fill: str = "-inf"
    clamp: bool = False
    expert_scale: bool = False

    @property
    def rule(self) -> str:
        """The name of the rule in the documentation's table of routers (R1-R7, R11) and its steps."""
        steps = [name for name, there in (("bias", self.bias), ("groups", self.groups > 1)) if there]
        score = [] if self.score == "none" else [self.score]
        steps = [*score, *steps, "top-k"] if self.order == "before" else [*steps, "top-k", *score]
        steps += [
            name
            for name, there in (("renormalise", self.renormalize), ("per-expert scale", self.expert_scale))
            if there
        ]
        return f"{self._number}{', '.join(steps)}"

    @property
    def _number(self) -> str:
        if self.expert_scale:
            return "R11 "
        if self.groups > 1:
            return "R5 "
        if self.bias:
            return "R6 "
        if self.score == "softmax" and self.order == "before":
            return "R1/R2 " if self.renormalize else "R3 "
        return {("softmax", "after"): "R4 ", ("sigmoid", "after"): "R7 "}.get((self.score, self.order), "")

    def args(self) -> tuple[Any, ...]:
        """The operator's arguments after its tensors."""
        return (
            self.k,
            self.score,
            self.order,
            self.groups,
            self.kept_groups,
            self.group_top,
            self.fill,
            self.renormalize,
            self.clamp,
            self.eps,
            self.scale,
            self.score_dtype,
            self.dtype,
        )


# Gate's rows before up's, up's before gate's, or in turns (row 0 of gate, row 0 of up, row 1 of gate, ...).
PACKINGS = ("gate_up", "up_gate", "interleaved", "interleaved_up_gate")


@dataclass(frozen=True)
class ExpertsSpec:
    """What an expert computes: the attributes of `moepdl::experts`.

    activation: "silu" | "gelu" | "gelu_tanh" | "relu" | "relu2", with parameters where they do something, as in
    "silu(alpha=1.702,limit=7.0,shift=1.0)" (runtime_kernels/activations.py); gated: act(gate) * up, else act(gate);
    weight_at: "output" or "input", where the routing weight is applied; dtype of the result;
    packing: how the source's packed weights hold gate and up, see PACKINGS (the operator sees views of them);
    compute_dtype: dtype of the matmuls (autocast makes it differ from the operands' own dtype).
    """

    activation: str
    gated: bool
    weight_at: str
    dtype: torch.dtype
    compute_dtype: torch.dtype
    packing: str = "gate_up"


@dataclass(frozen=True)
class Exchange:
    """The exchange that a model wrote around its own rank's experts: neighbours of all, as many on every rank.

    kind: for the reader. group: the process group's name, of `ranks` ranks, this being number `rank`. experts: E of the
    whole group. collectives: the nodes that start its parts.
    """

    kind: str
    group: str
    ranks: int
    rank: int
    experts: int
    collectives: tuple[Node, ...]

    def __str__(self) -> str:
        return f"{self.kind}, group {self.group} of {self.ranks}"


@dataclass
class Match:
    """One MoE block of a captured graph, with everything bound that raising it needs.

    x_TH, ids_TK, weights_TK: the operands; ids and weights may have more dimensions in front than T, and weights of one
    expert a token no dimension for K, which raising reshapes. weights_TK is None where the source has only dense scores
    [T, E]: then `router` and `logits` are bound, and the router makes the weights; or where `weights_KTE` holds each
    choice's weight in the column of its expert and zeros elsewhere, from which raising takes them. ids_of_any_range:
    nothing shows that the ids lie in 0 .. E-1, and the source indexes the weights by them: a negative one counts from
    the end, others are an error. router_bias, router_scale: a router's optional operands, one number an expert;
    router_place: the node behind which it is inserted; router_inner: the nodes that it replaces; router_weights,
    router_ids: those of them that others read. router_miss: why the router, or what comes behind the start of it that
    `router` is, stays as it is.
    gate, up, down: expert weights as nodes in the layouts of `moepdl::experts`; `transposed` names those lists whose
    nodes hold [.., in, out] and need a transposed view. gate_bias, up_bias, down_bias: nodes of the biases, [E, out] or
    one an expert; empty for none.
    output: the node whose value the block computes, [T, H]. base: a tensor of the model's own [T, H] to which the
    experts' rows are added in the output, None where they are added to zeros. inner: nodes that belong to the block
    alone.
    one_each: ids_TK has one id a token and no dimension for it, whatever its shape.
    chosen_TKE: the map of the choices whose rows the source computes, where a rule of the model's own (a capacity)
    drops some of the ids; raising gives those the id of no expert. None where all are computed.
    weights_scale: a constant that the source multiplies each weighted row with, and raising the weights.
    kept: where weights_KTE is [T, E], the map [T, E] of the choices whose rows the source computes, made by a rule of
    the model's own (a capacity); the weights of the others are zero. None where all are computed.
    exchange: what brings the tokens to the experts' ranks, where the model does so: gate, up and down are then those of
    this rank, and the ids those of all. None where all experts are here.
    per_pair: x holds one row a (token, expert) pair and so does the output, in the order of ids, which has any shape;
    the weights (none here) are applied behind the block. Our operator then sees S tokens of one expert each.
    """

    formulation: str
    spec: ExpertsSpec
    x_TH: Node
    ids_TK: Node
    weights_TK: Node | None
    gate: tuple[Node, ...]
    up: tuple[Node, ...]
    down: tuple[Node, ...]
    output: Node
    anchor: Node
    base: Node | None = None
    exchange: Exchange | None = None
    ids_of_any_range: bool = False
    weights_KTE: Node | None = None
    kept: Node | None = None
    one_each: bool = False
    weights_scale: float = 1.0
    chosen_TKE: Node | None = None
    gate_bias: tuple[Node, ...] = ()
    up_bias: tuple[Node, ...] = ()
    down_bias: tuple[Node, ...] = ()
    transposed: frozenset[str] = frozenset()
    per_pair: bool = False
    sizes: dict[str, sympy.Expr] = field(default_factory=dict)
    router: RouterSpec | None = None
    logits: Node | None = None
    router_bias: Node | None = None
    router_scale: Node | None = None
    router_weights: Node | None = None
    router_ids: Node | None = None
    router_place: Node | None = None
    router_inner: frozenset[Node] = frozenset()
    router_miss: Miss | None = None
    inner: frozenset[Node] = frozenset()

    def roles(self) -> dict[str, Node]:
        """The single-node roles, for printing and for tests."""
        found = {"x": self.x_TH, "ids": self.ids_TK, "weights": self.weights_TK, "output": self.output}
        return {name: node for name, node in found.items() if node is not None}
