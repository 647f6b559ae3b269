"""What a pass is: a function over a graph with a declared level, and the context it runs in.

A pass takes (graph, context) and returns how many rewrites it made; 0 means that the graph is unchanged, and the
runner (`moe_compiler.pipeline`) holds it to that. Its name is the function's, the file's, the log's and the one that
`options={"disable": [...]}` takes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from moe_compiler.moe_ir import Level, Match, is_moepdl
from moe_compiler.options import Options
from moe_compiler.torch_private import uncached_fakes

if TYPE_CHECKING:
    from moe_compiler.launch import Chain
    from moe_compiler.numeric import NumericCheck
    from moe_compiler.report import Report

__all__ = ["Context", "GraphPass", "fake_mode_of_graph", "graph_pass", "insert", "propagate", "recorded_result"]


@dataclass
class Context:
    """What passes of one graph share.

    phase: "capture" | "forward" | "backward". `matches` is what find_moe bound for raise_moe; `chains` is what
    chain_pdl decided for lower; `numeric` runs graphs for `verify="numeric"`; `report` collects what a reader is told.
    """

    options: Options
    phase: str
    report: Report
    numeric: NumericCheck | None = None
    matches: list[Match] = field(default_factory=list)
    chains: list[Chain] = field(default_factory=list)


@dataclass(frozen=True)
class GraphPass:
    """A named rewrite. `level` is the vocabulary of the graph it leaves behind."""

    name: str
    level: Level
    numerics: str
    run: Callable[[Graph, Context], int]
    doc: str

    @property
    def summary(self) -> str:
        """The first line of the pass's docstring."""
        return self.doc.strip().splitlines()[0] if self.doc.strip() else ""

    def __call__(self, graph: Graph, context: Context) -> int:
        return self.run(graph, context)


def graph_pass(*, level: Level, numerics: str) -> Callable[[Callable[[Graph, Context], int]], GraphPass]:
    """Make a pass of a function. numerics: "exact" (bit for bit the same operators) or "rounding" (see the design)."""

    def decorate(function: Callable[[Graph, Context], int]) -> GraphPass:
        return GraphPass(
            name=function.__name__, level=level, numerics=numerics, run=function, doc=function.__doc__ or ""
        )

    return decorate


def fake_mode_of_graph(graph: Graph) -> Any:
    """The FakeTensorMode of the values recorded in a graph, None when it has none."""
    for node in graph.nodes:
        value = node.meta.get("val")
        mode = getattr(value, "fake_mode", None)
        if mode is not None:
            return mode
    return None


def recorded_result(node: Node, mode: Any) -> Any:
    """What a call's target gives for the recorded values of its arguments; `mode`: the graph's, None for none.

    Our own operators go without torch's cache of fake results: its key spells out every operand, which for the weights
    of a hundred experts takes several times as long as computing the sizes of the result.
    """
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    under = nullcontext() if mode is None else uncached_fakes(mode) if is_moepdl(node) else mode
    with under, torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def propagate(node: Node) -> None:
    """Set `meta["val"]` of a new node by running its target on the recorded values of its arguments."""
    node.meta["val"] = recorded_result(node, fake_mode_of_graph(node.graph))


def insert(like: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Node:
    """Call `target` at the graph's insertion point: fake value set, the user's line taken over from `like`."""
    node = like.graph.call_function(target, args, kwargs or {})
    for key in ("stack_trace", "nn_module_stack"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    propagate(node)
    return node
