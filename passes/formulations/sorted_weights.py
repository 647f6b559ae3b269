"""Routing weights of sorted rows: which [T, K] weights multiply them, before, inside or after the experts."""

from __future__ import annotations

import sympy
import torch
from torch.fx import Node

from moe_compiler.moe_ir import op_name
from moe_compiler.passes.formulations.base import Bindings, check_weighted_input
from moe_compiler.passes.formulations.pairs import match_weights, rows_at
from moe_compiler.passes.formulations.walk import is_op, require, same_value, shape_of, strip_ids, strip_views_casts

__all__ = ["scaled", "sorted_weights", "take", "weigh_input"]


def scaled(node: Node, pairs: sympy.Expr | None = None) -> tuple[Node, Node] | None:
    """(rows, column) when `node` multiplies rows [S, H] by one number each, [S, 1]; None for another product.

    S is not compared: the sizes of a split that come from the data sum to it without saying so. pairs: S, where the
    caller knows it; a column of one number is one for each row only of a single row.
    """
    if not is_op(node, "mul") or not all(isinstance(operand, Node) for operand in node.args[:2]):
        return None
    for rows, column in (node.args[:2], node.args[1::-1]):
        own, full = shape_of(column), shape_of(rows)  # type: ignore[arg-type]
        if len(own) == len(full) >= 2 and own[-1] == 1 != full[-1] and (own[0] != 1 or 1 in (full[0], pairs)):
            return rows, column  # type: ignore[return-value]
    return None


def take(b: Bindings, weights: Node | None, at: str, where: Node) -> None:
    """Bind the weights, which a block has once."""
    require(not b.weight_at, "the rows are weighted twice", where)
    # A weight of zero is what leaves a dropped choice out: on the output it does, whatever the biases are.
    require(at == "output" or "kept" not in b.roles, "choices are dropped, and weighted before the experts", where)
    b.bind(weights=weights, weight_at=at)


def sorted_weights(b: Bindings, column: Node) -> Node | None:
    """The [T, K] weights behind w[perm], or however else the formulation brings weights into the rows' order.

    None where the formulation bound the weights as [T, E] (`Match.weights_KTE`).
    """
    node = strip_views_casts(column)
    if "weights_of" in b.roles:
        return b.weights_of(b, node)  # type: ignore[no-any-return]
    gathered = rows_at(node)
    require(gathered is not None, f"the routing weights come from {op_name(node)}, not from w[perm]", node)
    assert gathered is not None
    at_perm = same_value(strip_ids(gathered[1]), b.perm)
    require(at_perm, "the routing weights are gathered by another index than perm", node)
    return match_weights(gathered[0], shape_of(b.ids), node)


def weigh_input(b: Bindings, compute: torch.dtype) -> None:
    """Weights on the tokens must be the routing weights; `compute` is the dtype of the first products."""
    if "weighted_rows" in b.roles:
        check_weighted_input(b.weighted_rows, compute, b.k)
    if "input_weight" in b.roles:
        take(b, sorted_weights(b, b.input_weight), "input", b.rows)
