"""What must hold between passes, and what must hold of a chain before it is launched.

Graphs: well formed, every call has its fake value and the value its target computes, only the level's vocabulary,
placeholders and outputs as they were. Chains: the rules of programmatic launch by buffer. A failure names the pass,
the invariant, the node and the user's line.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from moe_compiler.aliasing import mutated_arguments
from moe_compiler.dag import storages
from moe_compiler.errors import PassError, VerifyError
from moe_compiler.graph_pass import GraphPass, fake_mode_of_graph, recorded_result
from moe_compiler.inline import named_arguments
from moe_compiler.launch import Chain, last_uses
from moe_compiler.moe_ir import STARTS, WAITS, is_moepdl, op_name, size_expr, user_line, vocabulary_errors
from moe_compiler.options import Options
from moe_compiler.pdl_rules import Grid, Kind, Trigger, Wait, check
from moe_compiler.runtime_kernels.chain.program import Variant
from moe_compiler.runtime_kernels.registry import kernel

__all__ = ["check_chain", "check_exchanges", "check_flights", "check_graph", "grids", "interface", "returned"]

# What stands before and behind a chain on its second stream: events, which are full dependencies.
_FORK, _JOIN = (Grid(name, kind=Kind.JOIN, trigger=Trigger.NONE) for name in ("fork", "join"))


def _metadata(value: Any) -> Any:
    """dtype, device and sizes of a value, comparable without guarding on symbols."""
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.device, tuple(size_expr(s) for s in value.shape))
    if isinstance(value, (tuple, list)):
        return tuple(_metadata(item) for item in value)
    return None


def returned(graph: Graph) -> list[Node]:
    """The nodes that a graph returns, in order, repeated ones as often as they stand there."""
    nodes: list[Node] = []

    def keep(node: Node) -> Node:
        nodes.append(node)
        return node

    map_arg(graph.output_node().args, keep)
    return nodes


def interface(graph: Graph) -> tuple[Any, ...]:
    """What a pass may not change: names and metadata of the placeholders, metadata of the outputs."""
    inputs = tuple((node.name, _metadata(node.meta.get("val"))) for node in graph.find_nodes(op="placeholder"))
    return inputs, tuple(_metadata(node.meta.get("val")) for node in returned(graph))


def _fail(graph_pass: GraphPass, invariant: str, node: Node | None) -> PassError:
    return PassError(
        graph_pass.name,
        "it left a graph that breaks an invariant",
        invariant=invariant,
        node=(node.format_node() or node.name) if node is not None else "",
        where=user_line(node),
    )


def check_graph(graph: Graph, graph_pass: GraphPass, before: tuple[Any, ...]) -> None:
    """Raise PassError unless the graph that `graph_pass` left behind is well formed; `before` is its old interface."""
    try:
        graph.lint()
    except Exception as error:
        raise _fail(graph_pass, f"the graph is malformed: {error}", None) from error
    wrong = vocabulary_errors(graph, graph_pass.level)
    if wrong:
        raise _fail(
            graph_pass, f"{op_name(wrong[0])} does not belong to level {graph_pass.level.name.lower()}", wrong[0]
        )
    mode = fake_mode_of_graph(graph)
    for node in graph.nodes:
        if not is_moepdl(node):
            continue
        if "val" not in node.meta:
            raise _fail(graph_pass, "a call has no recorded value", node)
        if mode is not None and _metadata(recorded_result(node, mode)) != _metadata(node.meta["val"]):
            raise _fail(graph_pass, "the recorded value is not what the operator computes", node)
    broken = check_flights(graph) or check_exchanges(graph)
    if broken is not None:
        raise _fail(graph_pass, *broken)
    after = interface(graph)
    if after != before:
        changed = next((a for a, b in zip(after[1], before[1], strict=False) if a != b), "an input")
        raise _fail(graph_pass, f"inputs or outputs changed: {changed}", None)


def check_flights(graph: Graph) -> tuple[str, Node] | None:
    """The first fault of the chains that run on a second stream, and its node; None when there is none.

    Each start has one wait, behind it, on the same operands. In between the chain runs beside every other node: none of
    them may write what the chain reads, nor read its token. What the chain itself writes is memory of its own, which
    has no name before the wait, so the reverse cannot happen: a program never writes its inputs (`Program.to_text`).
    """
    under_way: dict[Node, frozenset[object]] = {}
    for node in graph.nodes:
        operator = op_name(node) if is_moepdl(node) else ""
        if operator == "chain_start":
            if len(node.users) != 1 or any(op_name(user) != "chain_wait" for user in node.users):
                return "a chain that was started has one wait, and nobody else has its token", node
            under_way[node] = frozenset(storage for operand in node.args[0] for storage in storages(operand))  # type: ignore[union-attr, arg-type]
        elif operator == "chain_wait":
            start = node.args[0]
            if not isinstance(start, Node) or start not in under_way:
                return "a chain is waited for that was not started", node
            if (node.args[1], node.args[3]) != (start.args[0], start.args[1]):
                return "a chain is waited for with other operands, or another program, than it was started with", node
            del under_way[start]
        for written in mutated_arguments(node) if under_way else ():
            touched = storages(written)
            for start, read in under_way.items():
                if touched & read:
                    return f"it writes into {written.name}, which {start.name} reads on a second stream", node
    return None


def check_exchanges(graph: Graph) -> tuple[str, Node] | None:
    """The first fault of the exchanges that are a start and a wait, and its node; None when there is none.

    Each start has one wait behind it, of its own kind, and each start but a group's first reads the token of the one
    before it: that is what keeps their order the same on every rank, whatever orders the graph anew.
    """
    last: dict[str, Node] = {}
    for node in graph.nodes:
        operator = op_name(node) if is_moepdl(node) else ""
        if operator in STARTS:
            named = named_arguments(node)
            group, tokens = str(named["group"]), _tokens(node)
            waits = [u for u in _readers(tokens) if op_name(u) in WAITS and named_arguments(u)["token"] in tokens]
            if len(waits) != 1 or op_name(waits[0]) != operator.removesuffix("_start") + "_wait":
                return "an exchange that was started has one wait, of its own kind", node
            before = last.get(group)
            if before is not None and not any(token in named["after"] for token in _tokens(before)):
                return f"an exchange reads the token of the one before it in its group, {before.name}", node
            last[group] = node
        elif operator in WAITS and not _is_token(named_arguments(node)["token"]):
            return "an exchange is waited for that was not started", node
    return None


def _tokens(start: Node) -> list[Node]:
    """The nodes that are the token of a start: its only result, or the first of several."""
    if not isinstance(start.meta["val"], (tuple, list)):
        return [start]
    return [user for user in start.users if op_name(user) == "getitem" and user.args[1] == 0]


def _readers(nodes: list[Node]) -> set[Node]:
    return {user for node in nodes for user in node.users if is_moepdl(user)}


def _is_token(node: Node) -> bool:
    source = node.args[0] if op_name(node) == "getitem" else node
    return isinstance(source, Node) and is_moepdl(source) and op_name(source) in STARTS


def grids(chain: Chain, variant: Variant) -> list[Grid]:
    """The launches of a variant as the rules of programmatic launch see them, from what their kernels declare.

    Buffers of a chain are written once and never alias its inputs, so a buffer's name stands for its memory. Memory is
    used again inside the chain: whatever a launch writes may lie where a buffer was that nothing reads any more, so it
    counts as writing those too.

    A variant in chunks is seen twice over: the second chunk works in the memory of the first, on buffers of the same
    names. Its rows of the inputs and outputs are other ones, but go by one name, which is stricter. What holds between
    two chunks holds between any two that follow each other.
    """
    found: list[Grid] = []
    last = last_uses(chain.program, variant)
    rounds = 1 if variant.chunks is None else 2
    for index, launch in list(enumerate(variant.launches)) * rounds:
        again = len(found) >= len(variant.launches)
        reused = frozenset(name for name, use in last.items() if use < index or again)
        traits = kernel(launch.kernel).traits
        weights = frozenset(name for key in traits.weights if (name := launch.ins.get(key)) is not None)
        found.append(
            Grid(
                name=launch.kernel,
                attribute=launch.pdl,
                wait=Wait.ALL if traits.waits else Wait.NONE,
                trigger=Trigger.AFTER_WAIT if traits.triggers else Trigger.NONE,
                early_reads=weights,
                reads=frozenset(name for name in launch.ins.values() if name is not None) - weights,
                writes=frozenset(launch.outs.values()) | reused,
                constants=weights,
            )
        )
    return found


def check_chain(chain: Chain, options: Options) -> None:
    """Raise VerifyError unless every programmatic launch of the chain is provably safe, by the rules of `pdl_rules`.

    A chain's first launch is a plain one besides: it separates the chain from whatever ran before. A chain on a second
    stream stands between a fork and a join; nothing in it waits for the other stream (rule R12: no kernel of a chain
    spins), so it cannot keep that one from the device for good.
    """
    if options.verify == "off":
        return
    for variant in chain.program.variants:
        where = f"chain {chain.program.name}, variant {variant.name}"
        for index, launch in enumerate(variant.launches):
            one = f"{where}, launch {index} ({launch.kernel})"
            if launch.pdl and index == 0:
                raise VerifyError(f"{one}: the first launch of a chain carries the PDL attribute")
            if launch.pdl and chain.device != "cuda":
                raise VerifyError(f"{one}: it carries the PDL attribute on a {chain.device} device")
        sequence = grids(chain, variant)
        if chain.beside is None:
            broken = check(sequence)
        else:
            between = check([_FORK, *sequence, _JOIN])
            broken = [replace(violation, launch=violation.launch - 1) for violation in between]
        if broken:
            raise VerifyError(f"{where}: {broken[0]}" + (f" (and {len(broken) - 1} more)" if broken[1:] else ""))
