"""A formulation: an ordered list of steps that bind roles, from an anchor to a Match.

Each step takes the bindings so far, adds its own, and raises `Miss(reason, node, hint)` when what it expects is not
there. There is no other way to fail: the runner records how far each attempt came, and the report shows the best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from moe_compiler.moe_ir import ExpertsSpec, Match, Miss
from moe_compiler.passes.formulations.activation import Activation
from moe_compiler.passes.formulations.walk import elements_of, is_cast, require, same_size, shape_of

__all__ = [
    "Attempt",
    "Bindings",
    "Example",
    "Formulation",
    "attempt",
    "check_sizes",
    "check_weighted_input",
    "experts_spec",
    "split_by_activation",
    "trailing_cast",
]


@dataclass
class Bindings:
    """The roles bound so far for one anchor. Attributes are set by the steps; reading an unbound one is a bug."""

    graph: Graph
    anchor: Node
    roles: dict[str, Any] = field(default_factory=dict)

    def bind(self, **roles: Any) -> None:
        """Bind roles."""
        self.roles.update(roles)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["roles"][name]
        except KeyError:
            raise AttributeError(f"role {name!r} is not bound yet") from None


@dataclass(frozen=True)
class Example:
    """A module written in one formulation, small enough for a unit test.

    inputs(tokens) makes the arguments for that many tokens; blocks says how many matches a compile must find.
    """

    module: torch.nn.Module
    inputs: Callable[[int], tuple[torch.Tensor, ...]]
    blocks: int = 1


@dataclass(frozen=True)
class Formulation:
    """One spelling of a MoE block.

    anchors(graph) lists the nodes that may start a block; steps run in order; `finish` makes the Match.
    example(dtype, experts, top_k, hidden, intermediate) builds a module written this way.
    """

    name: str
    summary: str
    anchors: Callable[[Graph], list[Node]]
    steps: tuple[Callable[[Bindings], None], ...]
    finish: Callable[[Bindings], Match]
    example: Callable[..., Example]


@dataclass
class Attempt:
    """What became of one formulation at one anchor: a match, or the step that failed and why.

    ids: the choice of experts, when it was bound before the attempt failed; attempts at one choice belong together.
    """

    formulation: Formulation
    anchor: Node
    passed: int
    ids: Node | None = None
    match: Match | None = None
    step: str = ""
    miss: Miss | None = None


def attempt(formulation: Formulation, graph: Graph, anchor: Node) -> Attempt:
    """Run the steps of a formulation at an anchor."""
    bindings = Bindings(graph, anchor)
    result = Attempt(formulation, anchor, 0)
    try:
        for step in formulation.steps:
            result.step = step.__name__
            step(bindings)
            result.passed += 1
        result.step = "finish"
        result.match = formulation.finish(bindings)
        result.passed += 1
    except Miss as miss:
        result.miss = miss
    result.ids = bindings.roles.get("ids")
    return result


def split_by_activation(activation: Activation, weight_of: Callable[[Node], Node]) -> tuple[tuple[Node, ...], ...]:
    """(gate, up) weight tuples for an activation whose halves come from matmuls; packed when they share one."""
    gate = weight_of(activation.gate.source)
    if activation.up is None or activation.gate.part is not None:
        return (gate,), ()
    return (gate,), (weight_of(activation.up.source),)


def experts_spec(activation: Activation, matmul: Node, output: Node, weight_at: str = "output") -> ExpertsSpec:
    """The attribute record: the matmul's own result says in which dtype it computes (autocast included)."""
    compute = matmul.meta["val"].dtype
    require(compute.is_floating_point, "the experts do not compute in a floating dtype", matmul)
    for half in (activation.gate, activation.up):
        own = compute if half is None else half.source.meta["val"].dtype
        require(own == compute, f"gate and up compute in {own}, down in {compute}", matmul)
    return ExpertsSpec(
        activation=activation.name,
        gated=activation.up is not None,
        weight_at=weight_at,
        dtype=output.meta["val"].dtype,
        compute_dtype=compute,
        packing=activation.packing,
    )


def check_sizes(
    x: Node, ids: Node, weights: Node | None, per_pair: bool = False, pairs: Sequence[sympy.Expr] | None = None
) -> None:
    """x [T, H], ids [T, K] and weights [T, K] must agree on T and K for every T.

    ids and weights may have more dimensions in front, and weights of one expert a token none but T: raising reshapes
    those. per_pair: x has a row for each id. pairs: (T, K) where the shape of the ids does not say it.
    """
    require(len(shape_of(x)) == 2, "the tokens are not a [T, H] matrix", x)
    if per_pair:
        require(same_size(shape_of(x)[0], elements_of(shape_of(ids))), "ids and rows differ in their number", ids)
        return
    tokens, k = pairs if pairs is not None else (elements_of(shape_of(ids)[:-1]), shape_of(ids)[-1])
    require(same_size(shape_of(x)[0], tokens), "ids and tokens differ in their number of rows", ids)
    if weights is not None:
        own = shape_of(weights)
        own = (*own, sympy.Integer(1)) if len(own) == 1 else own
        fits = own[-1] == k and same_size(elements_of(own[:-1]), tokens)
        require(fits, "weights and ids differ in shape", weights)


def check_weighted_input(tokens: Node, compute: torch.dtype, k: int) -> None:
    """Tokens that are weighted before the experts must be weighted in the experts' dtype.

    The kernels weight rows in that dtype: tokens of a wider one (autocast) would be rounded before as well as after.
    With one expert a token raising weights the tokens itself, exactly as the source does.
    """
    own = tokens.meta["val"].dtype
    require(
        own == compute or k == 1,
        f"the tokens are weighted in {own} and rounded to {compute} only after that",
        tokens,
        "cast the tokens to the experts' dtype before they are weighted",
    )


def trailing_cast(node: Node) -> Node:
    """Follow the single user of a block's result while it is a floating cast: it belongs to the block."""
    while len(node.users) == 1:
        user = next(iter(node.users))
        if not is_cast(user):
            break
        node = user
    return node
