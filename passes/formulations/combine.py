"""The end of a block in pair order or sorted order: weigh each pair's row, bring the rows home, sum over k."""

from __future__ import annotations

from torch.fx import Node

from moe_compiler.moe_ir import Miss, op_name
from moe_compiler.passes.formulations.walk import (
    arg,
    is_op,
    require,
    same_size,
    shape_of,
    strip_views,
    strip_views_casts,
    users_through,
    view_or_cast,
)

__all__ = ["match_inverse", "match_sum_over_k", "match_weigh", "next_step"]


def next_step(node: Node, what: str) -> Node:
    """The single operator that consumes `node`, seen through views and casts."""
    users = [user for user in users_through(node, view_or_cast) if user.op != "output"]
    returned = len(users_through(node, view_or_cast)) - len(users)
    require(len(users) == 1 and not returned, f"{what} is used {len(users) + returned} times instead of once", node)
    return users[0]


def match_weigh(node: Node, rows: Node, what: str = "the experts' rows") -> Node:
    """`node` must be rows * w; returns the weight operand (behind views and casts)."""
    require(is_op(node, "mul"), f"{what} are consumed by {op_name(node)}, not multiplied by the routing weights", node)
    operands = [strip_views_casts(operand) for operand in node.args[:2] if isinstance(operand, Node)]
    require(len(operands) == 2, "the rows are scaled by a constant", node)
    others = [operand for operand in operands if operand is not rows]
    require(len(others) == 1, "the rows are not multiplied by the routing weights", node)
    full = shape_of(node.args[0] if strip_views_casts(node.args[0]) is others[0] else node.args[1])  # type: ignore[arg-type]
    require(bool(full) and full[-1] == 1, "the routing weight is not one number a row", node)
    return others[0]


def match_sum_over_k(node: Node, rows: Node, tokens: object, k: int) -> Node:
    """`node` must be sum(view(rows, [T, k, H]), 1); returns it."""
    require(is_op(node, "sum"), f"the pairs are consumed by {op_name(node)}, not summed over k", node)
    source = node.args[0]
    require(isinstance(source, Node) and strip_views_casts(source) is rows, "another value is summed", node)
    shape = shape_of(source)  # type: ignore[arg-type]
    require(len(shape) == 3 and shape[1] == k and same_size(shape[0], tokens), "the pairs are not viewed as [T, k, H]", node)  # type: ignore[arg-type]
    dims = arg(node, "dim")
    require([d % 3 for d in ([dims] if isinstance(dims, int) else dims or [])] == [1], "the sum is not over k", node)
    require(not arg(node, "keepdim"), "the sum keeps the k dimension", node)
    return node


def match_inverse(node: Node, perm: Node) -> None:
    """`node` must be the inverse of the permutation `perm`: argsort, or arange written at perm."""
    node = strip_views(node)
    if is_op(node, "argsort") and strip_views(node.args[0]) is perm:  # type: ignore[arg-type]
        return
    if op_name(node) == "getitem" and node.args[1] == 1 and is_op(node.args[0], "sort"):
        require(strip_views(node.args[0].args[0]) is perm, "another permutation is inverted", node)  # type: ignore[union-attr]
        return
    if is_op(node, "index_put", "index_put_"):
        base, indices, values = node.args[:3]
        require(isinstance(base, Node) and is_op(base, "empty_like", "zeros_like", "new_empty", "empty", "zeros"), "the inverse starts from other values", node)
        require(len(indices) == 1 and indices[0] is perm, "another permutation is inverted", node)  # type: ignore[arg-type,index]
        require(not arg(node, "accumulate"), "the inverse accumulates", node)
        require(isinstance(values, Node) and is_op(values, "arange"), "the inverse is not written with arange", node)
        _is_counting(values)  # type: ignore[arg-type]
        return
    if is_op(node, "scatter", "scatter_"):
        require(node.args[2] is perm, "another permutation is inverted", node)
        require(isinstance(node.args[3], Node) and is_op(node.args[3], "arange"), "the inverse is not written with arange", node)
        _is_counting(node.args[3])  # type: ignore[arg-type]
        return
    raise Miss(f"{op_name(node)} is not the inverse of the sorting permutation", node)


def _is_counting(node: Node) -> None:
    """arange must count 0, 1, 2, ...: neither another start nor another step."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    require("start" not in names or arg(node, "start") == 0, "arange does not start at 0", node)
    require("step" not in names or arg(node, "step") == 1, "arange does not count by one", node)
