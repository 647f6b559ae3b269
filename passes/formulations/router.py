"""The router behind a block's ids and weights: rules R1-R4 and R7 of the documentation, read backwards.

From the weights: casts, a constant scale, the division by the sum, a gather or the top-k's own values, the score.
From the ids: the top-k. Whatever does not fit raises Miss, and then the router stays with Inductor while the experts
are still rewritten: ids and weights are then simply inputs of the block.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch.fx import Node

from moe_compiler.moe_ir import Miss, RouterSpec, op_name
from moe_compiler.passes.formulations.walk import (
    arg,
    contains,
    dtype_of,
    is_cast,
    is_op,
    item_of,
    live_users,
    require,
    same_shape,
    shape_of,
    strip_ids,
    strip_views_casts,
    widens,
)

__all__ = ["Router", "match_router"]

_STAYS = "the router stays with Inductor; the experts are rewritten all the same"


@dataclass(frozen=True)
class Router:
    """A recognised router: its operand, its rule, and the nodes whose values it replaces.

    inner: every node between the logits and the weights; topk: the selection among them.
    """

    spec: RouterSpec
    logits: Node
    weights: Node
    ids: Node
    topk: Node
    inner: tuple[Node, ...]


def _topk(ids: Node) -> Node:
    topk = item_of(ids, 1, "topk")
    require(topk is not None, "the ids do not come from a top-k over the scores", ids, _STAYS)
    assert topk is not None
    require(arg(topk, "largest"), "top-k takes the smallest", topk, _STAYS)
    rank = len(shape_of(topk.args[0]))
    require(arg(topk, "dim") % rank == rank - 1, "top-k along another dimension than the experts", topk, _STAYS)
    require(isinstance(arg(topk, "k"), int), "k is not a constant", topk, _STAYS)
    return topk


def _score(node: Node) -> tuple[str, Node, torch.dtype]:
    """(score function, its input, the dtype it is computed in) of a score node; "none" when it is no score."""
    if is_op(node, "softmax", "_softmax", "special_softmax"):
        rank = len(shape_of(node))
        require(arg(node, "dim") % rank == rank - 1, "softmax over another dimension than the experts", node, _STAYS)
        return "softmax", node.args[0], dtype_of(node)
    if is_op(node, "sigmoid", "special_expit"):
        return "sigmoid", node.args[0], dtype_of(node)
    return "none", node, dtype_of(node)


def _widened(node: Node, score_dtype: torch.dtype, inner: list[Node]) -> Node:
    """Look through a widening cast in front of a score: the score's own dtype says it all.

    A narrowing one rounds the logits, and so has a say in which experts are chosen.
    """
    while widens(node) and contains(score_dtype, dtype_of(node)):
        inner.append(node)
        node = node.args[0]  # type: ignore[assignment]
    return node


def _row_sum(node: Node, of: Node) -> tuple[float, list[Node]] | None:
    """(eps, nodes) when `node` is sum(of, -1) as a column, plus a constant eps or nothing; else None."""
    path: list[Node] = []
    eps = 0.0
    while not is_op(node, "sum"):
        constant = is_op(node, "add") and isinstance(node.args[1], (int, float))
        if constant and eps == 0.0:
            eps = float(node.args[1]) * float(arg(node, "alpha"))
        elif strip_views_casts(node) is node:
            return None
        path.append(node)
        node = node.args[0]  # type: ignore[assignment]
    rank = len(shape_of(of))
    dims = arg(node, "dim") if len(node.target._schema.arguments) > 2 else None
    dims = [dims] if isinstance(dims, int) else dims
    if strip_views_casts(node.args[0]) is not strip_views_casts(of):
        return None
    # Of another view of the same values (all of them in one row) the last dimension is another one.
    if not same_shape(shape_of(node.args[0]), shape_of(of)):
        return None
    if not dims or [d % rank for d in dims] != [rank - 1]:
        return None
    shape = shape_of(path[0] if path else node)
    return (eps, [*path, node]) if len(shape) == rank and shape[-1] == 1 else None


def _weigh(node: Node, inner: list[Node]) -> tuple[Node, bool, float, float]:
    """(scores of the chosen, renormalize, eps, scale) behind the routing weights."""
    renormalize, eps, scale = False, 0.0, 1.0
    while True:
        if is_cast(node):
            inner.append(node)
            node = node.args[0]  # type: ignore[assignment]
        elif is_op(node, "mul") and isinstance(node.args[1], (int, float)) and not renormalize:
            inner.append(node)
            scale *= float(node.args[1])
            node = node.args[0]  # type: ignore[assignment]
        elif is_op(node, "div") and isinstance(node.args[1], Node) and node.kwargs.get("rounding_mode") is None:
            require(not renormalize, "the weights are divided twice", node, _STAYS)
            found = _row_sum(node.args[1], node.args[0])
            require(found is not None, "the weights are divided by something else than their own sum", node, _STAYS)
            assert found is not None
            renormalize, eps = True, found[0]
            inner += [node, *found[1]]
            node = node.args[0]  # type: ignore[assignment]
        else:
            return node, renormalize, eps, scale


def _chosen_scores(node: Node, topk: Node, inner: list[Node]) -> Node | None:
    """The scores over all experts when `node` holds those that the top-k chose: its values, or a gather at its ids."""
    if item_of(node, 0, "topk") is topk:
        inner.append(node)
        return topk.args[0]
    if is_op(node, "gather", "take_along_dim"):
        source = node.args[0]
        index = node.args[2] if is_op(node, "gather") else node.args[1]
        dim = arg(node, "dim")
        at_ids = item_of(strip_ids(index), 1, "topk") is topk
        if at_ids and dim is not None and dim % len(shape_of(node)) == len(shape_of(node)) - 1:
            inner.append(node)
            if source is topk.args[0]:
                return source
            raise Miss(
                "the experts are chosen by other scores than they are weighted with (a bias, groups)", node, _STAYS
            )
    return None


def _check_order_is_free(
    weights: Node, ids: Node, topk: Node, inner: list[Node], inside: Collection[Node] | None
) -> None:
    """An unsorted top-k is replaced by a sorted one: nothing else may read what is in the old order, or the new one.

    inside: the nodes of the block that reads weights and ids.
    """
    own = {*inner, topk, *(inside or ())}
    ordered: list[Node] = []
    pending = [user for user in topk.users if op_name(user) == "getitem"]
    while pending:
        node = pending.pop()
        if node not in ordered:
            ordered.append(node)
            pending += [user for user in node.users if user in inner or user in (weights, ids)]
    for node in ordered:
        outside = [user for user in live_users(node) if user not in own and user not in ordered]
        # Without a block to compare with, the users of weights and ids are its own.
        if inside is None and node in (weights, ids, strip_ids(ids)):
            continue
        what = "ids" if node in (ids, strip_ids(ids)) else "values"
        require(
            not outside,
            f"top-k is unsorted and its {what} are used elsewhere, in an order of their own",
            topk,
            _STAYS,
        )


def match_router(weights: Node, ids: Node, inside: Collection[Node] | None = None) -> Router:
    """Resolve (weights [T, K], ids [T, K]) to the router that made them; raises Miss when it is another rule."""
    chosen = strip_ids(ids)
    topk = _topk(chosen)
    inner: list[Node] = []
    node, renormalize, eps, scale = _weigh(weights, inner)
    scores = _chosen_scores(node, topk, inner)
    if scores is not None:
        score, source, score_dtype = _score(scores)
        if score != "none":
            inner.append(scores)
        order, logits = "before", _widened(source, score_dtype, inner) if score != "none" else source
    else:
        score, source, score_dtype = _score(node)
        require(score != "none", f"the weights come from {op_name(node)}, not from the top-k's scores", node, _STAYS)
        inner.append(node)
        values = _widened(source, score_dtype, inner)
        taken = _chosen_scores(values, topk, inner)
        require(taken is not None, "the score is not taken of the top-k's own values", node, _STAYS)
        assert taken is not None
        order, logits = "after", taken
    require(len(shape_of(logits)) == 2, "the router's scores are not [tokens, experts]", logits, _STAYS)
    require(len(shape_of(weights)) == 2 and len(shape_of(chosen)) == 2, "weights and ids are not [T, K]", weights)
    require(
        scale == 1.0 or score != "none",
        "raw scores are scaled, without softmax or sigmoid",
        weights,
        _STAYS,
    )
    if not arg(topk, "sorted"):
        _check_order_is_free(weights, ids, topk, inner, inside)
    spec = RouterSpec(
        k=arg(topk, "k"),
        score=score,
        order=order,
        renormalize=renormalize,
        eps=eps,
        scale=scale,
        score_dtype=score_dtype,
        dtype=dtype_of(weights),
    )
    inner.append(topk)
    return Router(spec, logits, weights, chosen, topk, tuple(inner))
