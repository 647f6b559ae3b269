"""The passes in the order they run, and the runner that holds each to its word.

Phase "capture" runs before autograd on the captured graph; phase "graph" runs after it, on the forward and on the
backward graph. Membership in PIPELINE is registration.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from torch.fx import Graph, GraphModule, Node

from moe_compiler.collective_order import Order, changed_order, collectives
from moe_compiler.errors import MoepdlError, PassError
from moe_compiler.garbage import collection_paused
from moe_compiler.graph_pass import Context, GraphPass
from moe_compiler.graph_text import render_graph
from moe_compiler.moe_ir import op_name, user_line
from moe_compiler.numeric import compare, copy_graph
from moe_compiler.passes.canonicalize import canonicalize
from moe_compiler.passes.chain_pdl import chain_pdl
from moe_compiler.passes.expand_stages import expand_stages
from moe_compiler.passes.find_moe import find_moe
from moe_compiler.passes.formulations.registry import exchange_names, formulation_names
from moe_compiler.passes.inline_few import inline_few
from moe_compiler.passes.join_router import join_router
from moe_compiler.passes.lower import lower
from moe_compiler.passes.overlap_all_to_all import overlap_all_to_all
from moe_compiler.passes.raise_moe import raise_moe
from moe_compiler.passes.shard_experts import shard_experts
from moe_compiler.report import GraphRecord, PassRecord
from moe_compiler.verify import check_graph, interface

__all__ = ["PIPELINE", "known_names", "pass_named", "pass_names", "run_passes", "run_phase"]

PIPELINE: tuple[tuple[str, GraphPass], ...] = (
    ("capture", canonicalize),  # fewer spellings, so that a formulation is written once
    ("capture", find_moe),  # before raise_moe: analysis only, it changes nothing
    ("capture", raise_moe),  # before autograd: the canonical operators are differentiable
    ("capture", shard_experts),  # behind raise_moe, and ahead of autograd: the exchanges have their own backward
    ("graph", inline_few),  # before expand_stages: what Inductor itself does best needs no stages
    ("graph", expand_stages),  # first after autograd: everything below reasons about stages
    ("graph", join_router),  # before chain_pdl: one more stage for the chain
    ("graph", overlap_all_to_all),  # before chain_pdl: chains are made of what stays in one place
    ("graph", chain_pdl),  # needs all stages of a block at once
    ("graph", lower),  # last: the remainder of the graph is Inductor's
)


def known_names() -> frozenset[str]:
    """Names that `options={"disable": [...]}` accepts: passes and formulations."""
    return frozenset(pass_names()) | frozenset((*formulation_names(), *exchange_names()))


def pass_names() -> tuple[str, ...]:
    """The names of the passes, in their order."""
    return tuple(graph_pass.name for _, graph_pass in PIPELINE)


def pass_named(name: str) -> GraphPass:
    """The pass called `name`. Raises KeyError with the names there are."""
    for _, graph_pass in PIPELINE:
        if graph_pass.name == name:
            return graph_pass
    raise KeyError(f"no pass is called {name!r}; passes: {', '.join(pass_names())}")


def _snapshot(graph: Graph) -> list[tuple[Node, Any, Any, Any]]:
    """What a graph says, by identity: fx gives a node new arguments whenever they change. Far cheaper than its text."""
    return [(node, node.target, node.args, node.kwargs) for node in graph.nodes]


def _differs(before: list[tuple[Node, Any, Any, Any]], after: list[tuple[Node, Any, Any, Any]]) -> bool:
    if len(before) != len(after) or any(a[0] is not b[0] for a, b in zip(before, after, strict=True)):
        return True
    return any(
        x is not y and str(x) != str(y)
        for old, new in zip(before, after, strict=True)
        for x, y in zip(old[1:], new[1:], strict=True)
    )


def _operators(graph: Graph) -> Counter[str]:
    return Counter(op_name(node) for node in graph.nodes if node.op == "call_function")


def run_passes(module: GraphModule, passes: tuple[GraphPass, ...], context: Context) -> int:
    """Run passes in order on one graph, checking it after each; returns the number of rewrites.

    Raises PassError when a pass leaves a graph that breaks an invariant, or miscounts its rewrites.
    """
    with collection_paused():
        total = _run_each(module, passes, context)
        if total:
            module.recompile()
    return total


def _run_each(module: GraphModule, passes: tuple[GraphPass, ...], context: Context) -> int:
    total = 0
    checked = context.options.verify != "off"
    graph = module.graph
    started = time.perf_counter()
    # What one pass leaves is what the next one finds, and no pass may change the interface: each is read once.
    snapshot, operators, before = _snapshot(graph), _operators(graph), interface(graph) if checked else ()
    order = collectives(graph)
    for graph_pass in passes:
        if graph_pass.name in context.options.disable:
            continue
        original = copy_graph(module) if context.numeric is not None else None
        try:
            rewrites = graph_pass(graph, context)
        except MoepdlError:
            raise
        except Exception as error:
            raise PassError(graph_pass.name, f"{type(error).__name__}: {error}") from error
        after = _snapshot(graph)
        changed = _differs(snapshot, after)
        if changed != (rewrites > 0):
            raise PassError(
                graph_pass.name,
                f"it reported {rewrites} rewrites, but the graph has{'' if changed else ' not'} changed",
            )
        if checked and changed:
            check_graph(graph, graph_pass, before)
            order = _check_order(order, graph, graph_pass)
        if original is not None and changed:
            _check_numbers(original, module, graph_pass.name, context)
        left = _operators(graph) if changed else operators
        delta = Counter(left)
        delta.subtract(operators)
        snapshot, operators = after, left
        context.report.passes.append(
            PassRecord(
                name=graph_pass.name,
                phase=context.phase,
                level=graph_pass.level.name.lower(),
                numerics=graph_pass.numerics,
                rewrites=rewrites,
                seconds=time.perf_counter() - started,
                delta={name: count for name, count in sorted(delta.items()) if count},
            )
        )
        if changed:
            record_graph(module, graph_pass.name, context)
        total += rewrites
        started = time.perf_counter()
    return total


def _check_order(before: Order, graph: Graph, graph_pass: GraphPass) -> Order:
    """The order of the collectives that a pass leaves behind; raises PassError when it is not the one before."""
    after = collectives(graph)
    broken = changed_order(before, after)
    if broken is not None:
        what, node = broken
        raise PassError(
            graph_pass.name,
            "it left a graph that breaks an invariant",
            invariant=what,
            node=node.format_node() or node.name,
            where=user_line(node),
        )
    return after


def _check_numbers(original: GraphModule, module: GraphModule, name: str, context: Context) -> None:
    """options["verify"] = "numeric": both graphs on the same inputs."""
    check = context.numeric
    assert check is not None
    inputs = check.inputs(original, context.phase)
    if inputs is None:
        note = f"{context.phase} graph not compared numerically: its forward graph was not run in this compile"
        if note not in context.report.notes:
            context.report.notes.append(note)
        return
    results = check.outputs(module, inputs)
    compare(name, check.outputs(original, inputs), results)
    if context.phase == "forward":
        check.remember(module, inputs, results)


def record_graph(module: GraphModule, name: str, context: Context) -> None:
    """Keep the graph for the dump, as runnable text, when one was asked for."""
    if context.options.dump is None:
        return
    number = sum(record.phase == context.phase for record in context.report.graphs)
    code = render_graph(module, title=f"{context.phase}: {name}", provenance=f"after pass {name}")
    context.report.graphs.append(GraphRecord(number=number, name=name, phase=context.phase, code=code))


def run_phase(module: GraphModule, phase: str, context: Context) -> int:
    """Run the passes of a phase ("capture" or "graph") on a graph; returns the number of rewrites."""
    return run_passes(module, tuple(graph_pass for own, graph_pass in PIPELINE if own == phase), context)
