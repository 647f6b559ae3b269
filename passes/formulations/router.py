"""The router behind a block's ids and weights: rules R1-R4 and R7 of the documentation, read backwards.

From the weights: casts, a constant scale, the division by the sum, a gather or the top-k's own values, the score.
From the ids: the top-k. Whatever does not fit raises Miss, and then the router stays with Inductor while the experts
are still rewritten: ids and weights are then simply inputs of the block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from moe_compiler.moe_ir import Miss, RouterSpec, op_name
from moe_compiler.passes.formulations.walk import arg, dtype_of, is_cast, is_op, require, shape_of, strip_views

__all__ = ["Router", "match_router"]


@dataclass(frozen=True)
class Router:
    """A recognised router: its operand, its rule, and the nodes whose values it replaces."""

    spec: RouterSpec
    logits: Node
    weights: Node
    ids: Node
    inner: tuple[Node, ...]


def _getitem(node: Node, index: int, *names: str) -> Node | None:
    if node.op == "call_function" and op_name(node) == "getitem" and node.args[1] == index and is_op(node.args[0], *names):
        return node.args[0]  # type: ignore[return-value]
    return None


def _topk(ids: Node) -> Node:
    node = strip_views(ids)
    topk = _getitem(node, 1, "topk")
    require(topk is not None, "the ids do not come from a top-k over the scores", node, "the router stays with Inductor")
    assert topk is not None
    require(arg(topk, "largest"), "top-k takes the smallest", topk)
    require(arg(topk, "sorted"), "top-k is unsorted", topk)
    rank = len(shape_of(topk.args[0]))  # type: ignore[arg-type]
    require(arg(topk, "dim") % rank == rank - 1, "top-k along another dimension than the experts", topk)
    require(isinstance(arg(topk, "k"), int), "k is not a constant", topk)
    return topk


def _score(node: Node) -> tuple[str, Node, torch.dtype]:
    """(score function, its input, the dtype it is computed in) of a score node; "none" when it is no score."""
    scored = node
    if is_op(scored, "softmax", "_softmax"):
        source = scored.args[0]
        rank = len(shape_of(scored))
        require(arg(scored, "dim") % rank == rank - 1, "softmax over another dimension than the experts", scored)
        return "softmax", source, dtype_of(scored)  # type: ignore[return-value]
    if is_op(scored, "sigmoid"):
        return "sigmoid", scored.args[0], dtype_of(scored)  # type: ignore[return-value]
    return "none", scored, dtype_of(scored)


def _widened(node: Node, score_dtype: torch.dtype, inner: list[Node]) -> Node:
    """Look through a widening cast in front of a score: the score's own dtype says it all."""
    while is_cast(node) and torch.finfo(dtype_of(node.args[0])).bits <= torch.finfo(score_dtype).bits:  # type: ignore[arg-type]
        inner.append(node)
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_row_sum(node: Node, of: Node, inner: list[Node]) -> float | None:
    """eps when `node` is sum(of, -1, keepdim) (+ eps), else None."""
    eps = 0.0
    path: list[Node] = []
    if is_op(node, "add") and isinstance(node.args[1], (int, float)):
        eps = float(node.args[1]) * float(arg(node, "alpha") if "alpha" in str(node.target._schema) else 1)  # type: ignore[union-attr]
        path.append(node)
        node = node.args[0]  # type: ignore[assignment]
    if not is_op(node, "sum") or node.args[0] is not of:
        return None
    rank = len(shape_of(of))
    dims = arg(node, "dim")
    dims = [dims] if isinstance(dims, int) else dims
    if not dims or [d % rank for d in dims] != [rank - 1] or not arg(node, "keepdim"):
        return None
    inner.extend([*path, node])
    return eps


def match_router(weights: Node, ids: Node) -> Router:
    """Resolve (weights [T, K], ids [T, K]) to the router that made them; raises Miss when it is another rule."""
    inner: list[Node] = []
    topk = _topk(ids)
    chosen = strip_views(ids)
    k = arg(topk, "k")

    renormalize, eps, scale = False, 0.0, 1.0
    node = weights
    while True:
        if is_cast(node):
            inner.append(node)
            node = node.args[0]  # type: ignore[assignment]
        elif is_op(node, "mul") and isinstance(node.args[1], (int, float)) and not renormalize:
            inner.append(node)
            scale *= float(node.args[1])
            node = node.args[0]  # type: ignore[assignment]
        elif is_op(node, "div") and isinstance(node.args[1], Node):
            require(not renormalize, "the weights are divided twice", node)
            found = _is_row_sum(node.args[1], node.args[0], inner)  # type: ignore[arg-type]
            require(found is not None, "the weights are divided by something else than their own sum", node)
            renormalize, eps = True, float(found or 0.0)
            inner.append(node)
            node = node.args[0]  # type: ignore[assignment]
        else:
            break

    values = _getitem(node, 0, "topk")
    if values is topk:
        inner.append(node)
        score, source, score_dtype = _score(topk.args[0])  # type: ignore[arg-type]
        if score != "none":
            inner.append(topk.args[0])  # type: ignore[arg-type]
        order = "before"
    else:
        score, source, score_dtype = _score(node)
        require(score != "none", f"the weights come from {op_name(node)}, not from the top-k's scores", node)
        inner.append(node)
        source = _widened(source, score_dtype, inner)
        require(_getitem(source, 0, "topk") is topk, "the score is not taken of the top-k's own values", node)
        inner.append(source)
        source, order = topk.args[0], "after"  # type: ignore[assignment]
    logits = source if order == "after" else _widened(source, score_dtype, inner)
    require(len(shape_of(logits)) == 2, "the router's scores are not [tokens, experts]", logits)
    require(len(shape_of(weights)) == 2 and len(shape_of(chosen)) == 2, "weights and ids are not [T, K]", weights)
    if scale != 1.0 and score == "none":
        raise Miss("raw scores are scaled", weights)
    spec = RouterSpec(
        k=k,
        score=score,
        order=order,
        renormalize=renormalize,
        eps=eps,
        scale=scale,
        score_dtype=score_dtype,
        dtype=dtype_of(weights),
    )
    inner.append(topk)
    return Router(spec, logits, weights, chosen, tuple(inner))
