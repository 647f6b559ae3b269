"""Raise every match to the canonical operators, still ahead of autograd.

Casts that autocast left implicit are written out, transposed weights become views, and the operators are inserted at
the block's own place, so inside of its grad-mode region. Asserts about sizes that only the block had (how many rows
an expert got) go with it; everything else that other nodes read stays.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from moe_compiler.graph_pass import Context, graph_pass, insert
from moe_compiler.moe_ir import Level, Match, op_name, user_line
from moe_compiler.passes.formulations.walk import is_op
from moe_compiler.report import MatchRecord
from moe_compiler.runtime_kernels import register

__all__ = ["raise_moe"]

_aten = torch.ops.aten



def _cast(node: Node, dtype: torch.dtype) -> Node:
    if node.meta["val"].dtype == dtype:
        return node
    return insert(node, _aten.to.dtype, (node, dtype))


def _oriented(node: Node, transposed: bool) -> Node:
    """A weight as [.., out, in]: the source of a transpose when there is one, else a transposed view."""
    if not transposed:
        return node
    if is_op(node, "transpose") and {d % node.meta["val"].dim() for d in node.args[1:3]} == {  # type: ignore[operator]
        node.meta["val"].dim() - 2,
        node.meta["val"].dim() - 1,
    }:
        return node.args[0]  # type: ignore[return-value]
    if is_op(node, "mT", "t"):
        return node.args[0]  # type: ignore[return-value]
    return insert(node, _aten.transpose.int, (node, -2, -1))


def _raise_router(graph: Graph, match: Match) -> tuple[Node, Node]:
    assert match.router is not None and match.logits is not None
    anchor = _router_place(match)
    with graph.inserting_after(anchor):
        route = insert(anchor, torch.ops.moepdl.route.default, (match.logits, *match.router.args()))
    with graph.inserting_after(route):
        weights = insert(anchor, operator.getitem, (route, 0))
    with graph.inserting_after(weights):
        ids = insert(anchor, operator.getitem, (route, 1))
    return weights, ids


def _router_place(match: Match) -> Node:
    ids = match.router_ids if match.router_ids is not None else match.ids_TK
    source = ids.args[0] if op_name(ids) == "getitem" else ids
    assert isinstance(source, Node)
    return source


def _raise_block(graph: Graph, match: Match) -> None:
    weights, ids = match.weights_TK, match.ids_TK
    if match.router is not None:
        new_weights, new_ids = _raise_router(graph, match)
        replaced_ids = match.router_ids if match.router_ids is not None else match.ids_TK
        replaced_ids.replace_all_uses_with(new_ids)
        if match.router_weights is not None:
            match.router_weights.replace_all_uses_with(new_weights)
        weights, ids = new_weights, new_ids
    spec = match.spec
    with graph.inserting_before(match.output):
        x = _cast(match.x_TH, spec.compute_dtype)
        lists = []
        for role in ("gate", "up", "down"):
            oriented = [_oriented(n, role in match.transposed) for n in getattr(match, role)]
            lists.append([_cast(n, spec.compute_dtype) for n in oriented])
        attributes = (spec.activation, spec.gated, spec.weight_at, spec.dtype)
        raised = insert(match.output, torch.ops.moepdl.experts.default, (x, ids, weights, *lists, *attributes))
    match.output.replace_all_uses_with(raised)


def _drop_inner_asserts(graph: Graph, inner: set[Node]) -> None:
    """Remove assertions about values that only the removed inside of a block had."""
    for node in reversed(list(graph.nodes)):
        if is_op(node, "_assert_scalar") and _depends_on(node, inner):
            graph.erase_node(node)


def _depends_on(node: Node, inner: set[Node]) -> bool:
    pending, seen = list(node.all_input_nodes), set()
    while pending:
        current = pending.pop()
        if current in inner:
            return True
        if current not in seen:
            seen.add(current)
            pending.extend(current.all_input_nodes)
    return False


def _describe(match: Match) -> MatchRecord:
    spec = match.spec
    attributes: dict[str, Any] = {
        "activation": spec.activation,
        "gated": spec.gated,
        "weight_at": spec.weight_at,
        "layout": "per expert" if len(match.down) > 1 else "packed" if not match.up else "separate gate and up",
        "dtype": str(spec.dtype).removeprefix("torch."),
        "compute_dtype": str(spec.compute_dtype).removeprefix("torch."),
    }
    if match.router is not None:
        attributes |= {
            "score": match.router.score,
            "score_dtype": str(match.router.score_dtype).removeprefix("torch."),
            "order": match.router.order,
            "renormalize": match.router.renormalize,
            "eps": match.router.eps,
            "scale": match.router.scale,
        }
    stack = match.output.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    return MatchRecord(
        block=_module_path(path) or match.output.name,
        formulation=match.formulation,
        router=match.router.rule if match.router is not None else None,
        router_why="" if match.router is not None else match.router_miss.reason if match.router_miss else "",
        where=user_line(match.anchor),
        sizes={name: str(size) for name, size in match.sizes.items()},
        attributes=attributes,
    )


def _module_path(path: str) -> str:
    """`L['self'].layers[0].mlp` or `L__self___layers_0` as a reader would write it."""
    return path.replace("L['self'].", "").replace("L['self']", "").replace("['", ".").replace("']", "").strip(".")


@graph_pass(level=Level.MOE, numerics="rounding")
def raise_moe(graph: Graph, context: Context) -> int:
    """Replace every matched block by moepdl::route and moepdl::experts.

    before   p = softmax(l); w, i = topk(p); s, r = sort(i); ..; a = grouped_mm(x[r // k], W1, o); ..; y = sum(..)
    after    w, i = route(l, k, "softmax", ..); y = experts(x, i, w, [W1], [], [W2], "silu", ..)
    """
    inner: set[Node] = set()
    for match in context.matches:
        context.report.matches.append(_describe(match))
        _raise_block(graph, match)
        inner |= match.inner
    if not context.matches:
        return 0
    _drop_inner_asserts(graph, inner)
    graph.eliminate_dead_code()
    return len(context.matches)
