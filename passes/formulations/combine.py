"""The end of a block in pair order or sorted order: weigh each pair's row, bring the rows home, sum over k."""

from __future__ import annotations

import sympy
from torch.fx import Node

from moe_compiler.moe_ir import Miss, op_name
from moe_compiler.passes.formulations.contraction import contraction
from moe_compiler.passes.formulations.pairs import match_pair_index
from moe_compiler.passes.formulations.walk import (
    arg,
    is_fresh,
    is_op,
    is_zeros,
    require,
    same_shape,
    same_size,
    same_value,
    shape_of,
    strip_ids,
    strip_views_casts,
    swaps_last_two,
    users_through,
    view_or_cast,
    without_units,
)

__all__ = [
    "check_weighted_inside",
    "match_inverse",
    "match_sum_over_k",
    "match_weigh",
    "match_weighted_sum",
    "next_step",
    "row_norm",
    "squeezed",
]


def check_weighted_inside(weight: Node, down_bias: tuple[Node, ...]) -> None:
    """A routing weight between the activation and the down projection weights all that comes out: the same as after it.

    Not so with a bias, which is added unweighted.
    """
    require(
        not down_bias,
        "the routing weight is applied before the down projection, whose bias it does not weight",
        weight,
        "apply the routing weight to the experts' output",
    )


def next_step(node: Node, what: str) -> Node:
    """The single operator that consumes `node`, seen through views and casts; one that reads only its shape is none."""
    found = [user for user in users_through(node, view_or_cast) if not _reads_shape(user, node)]
    users = [user for user in found if user.op != "output"]
    returned = len(found) - len(users)
    require(len(users) == 1 and not returned, f"{what} is used {len(users) + returned} times instead of once", node)
    return users[0]


def _reads_shape(user: Node, node: Node) -> bool:
    return is_op(user, "expand_as", "view_as", "reshape_as") and strip_views_casts(user.args[0]) is not node


# What a norm over a row is made of, up to the operator that tells that it is one.
_NORM_PARTS = ("mul", "add", "pow", "square", "mean", "sub", "var_mean")
_NORMS = ("rsqrt", "rms_norm", "_fused_rms_norm", "layer_norm", "native_layer_norm", "linalg_vector_norm")


def row_norm(rows: Node, depth: int = 8) -> Node | None:
    """The norm that the experts' rows go through, one by one, before they are weighted and summed; None without one.

    It is no part of the block: the block then ends with the rows themselves (`Match.per_pair`).
    """
    level, seen = [rows], {rows}
    for _ in range(depth):
        users = dict.fromkeys(user for node in level for user in node.users if user not in seen)
        found = next((user for user in users if is_op(user, *_NORMS)), None)
        if found is not None:
            return found
        level = [user for user in users if view_or_cast(user) or is_op(user, *_NORM_PARTS)]
        seen.update(level)
    return None


def match_weigh(node: Node, rows: Node, what: str = "the experts' rows") -> Node:
    """`node` must be rows * w; returns the weight operand (behind views and casts)."""
    require(is_op(node, "mul"), f"{what} are consumed by {op_name(node)}, not multiplied by the routing weights", node)
    operands = [strip_views_casts(operand) for operand in node.args[:2] if isinstance(operand, Node)]
    require(len(operands) == 2, "the rows are scaled by a constant", node)
    others = [operand for operand in operands if operand is not rows]
    require(len(others) == 1, "the rows are not multiplied by the routing weights", node)
    weight, row = (0, 1) if strip_views_casts(node.args[0]) is others[0] else (1, 0)
    full, own = shape_of(node.args[weight]), shape_of(node.args[row])
    fits = len(full) == len(own) and full[-1] == 1 and same_shape(full[:-1], own[:-1])
    require(fits, "the routing weight is not one number a row", node)
    return node.args[weight]


def match_weighted_sum(rows: Node, tokens: sympy.Expr, k: int) -> tuple[Node, Node, Node]:
    """sum over k of w[t, k] * rows[t, k], whatever the spelling -> (weight operand, the product's node, the sum).

    A product with one number a row and a sum over k; an einsum; a bmm or matmul of [T, 1, k] and [T, k, H].
    """
    step = next_step(rows, "the experts' rows")
    if swaps_last_two(step):
        step = next_step(step, "the experts' rows")
    found = contraction(step)
    if found is None:
        weight = match_weigh(step, rows)
        return weight, step, _summed(step, tokens, k)
    own = [_untransposed(operand) is rows for operand in (found.left, found.right)]
    require(own.count(True) == 1, "the experts' rows are multiplied by themselves", step)
    left = own[0]
    operand, letters = (found.left, found.left_letters) if left else (found.right, found.right_letters)
    weight, weight_letters = (found.right, found.right_letters) if left else (found.left, found.left_letters)
    if swaps_last_two(operand):
        operand, letters = operand.args[0], letters[:-2] + letters[-1] + letters[-2]  # type: ignore[assignment]
    shape = shape_of(operand)
    per_pair = len(letters) == len(shape) == 3 and same_shape(shape[:2], (tokens, sympy.Integer(k)))
    require(per_pair, "the experts' rows are not summed as [T, k, H]", step)
    t, j, h = letters
    units = set(weight_letters + found.out_letters) - set(letters)
    sizes = dict(zip(weight_letters, shape_of(weight), strict=False))
    require(all(sizes.get(unit) == 1 for unit in units), "the weighted sum has a dimension of its own", step)
    kept = "".join(letter for letter in weight_letters if letter not in units)
    result = "".join(letter for letter in found.out_letters if letter not in units)
    require(kept == t + j and len(weight_letters) == len(shape_of(weight)), "the routing weights are not [T, k]", step)
    require(result == t + h, f"the product sums to {result or 'a number'}, not over k", step)
    return weight, step, squeezed(step)


def _summed(rows: Node, tokens: sympy.Expr, k: int) -> Node:
    """The sum over k of the weighted rows. With one expert a token they are the result, and need no sum."""
    try:
        return match_sum_over_k(next_step(rows, "the weighted rows"), rows, tokens, k)
    except Miss:
        if k != 1:
            raise
    return squeezed(rows)


def _untransposed(node: Node) -> Node:
    node = strip_views_casts(node)
    return strip_views_casts(node.args[0]) if swaps_last_two(node) else node


def squeezed(node: Node) -> Node:
    """The node, or the view of it that drops its dimensions of size 1: the block's result is [T, H]."""
    while len(shape_of(node)) > 2 and len(node.users) == 1:
        user = next(iter(node.users))
        if not view_or_cast(user) or not same_shape(without_units(shape_of(user)), without_units(shape_of(node))):
            break
        node = user
    return node


def match_sum_over_k(node: Node, rows: Node, tokens: object, k: int) -> Node:
    """`node` must be sum(view(rows, [T, k, H]), 1), or zeros with the rows added at p // k; returns it."""
    if is_op(node, "index_add", "index_add_", "scatter_add", "scatter_add_", "index_put", "index_put_"):
        _match_added(node, rows, tokens, k)
        return node
    require(is_op(node, "sum"), f"the pairs are consumed by {op_name(node)}, not summed over k", node)
    source = node.args[0]
    require(isinstance(source, Node) and strip_views_casts(source) is rows, "another value is summed", node)
    shape = shape_of(source)
    require(
        len(shape) == 3 and shape[1] == k and same_size(shape[0], tokens), "the pairs are not viewed as [T, k, H]", node
    )
    dims = arg(node, "dim")
    require([d % 3 for d in ([dims] if isinstance(dims, int) else dims or [])] == [1], "the sum is not over k", node)
    require(not arg(node, "keepdim"), "the sum keeps the k dimension", node)
    return node


def _match_added(node: Node, rows: Node, tokens: object, k: int) -> None:
    """`node` must add the rows of all pairs, in pair order, to zeros [T, H] at the pairs' tokens."""
    base, dim, index, values = (*node.args[:4], None)[:4]
    if is_op(node, "index_put", "index_put_"):
        indices, values = node.args[1:3]
        require(len(indices) == 1 and isinstance(indices[0], Node), "the rows are added at several indices", node)
        require(arg(node, "accumulate"), "the rows are written and not added", node)
        dim, index = 0, indices[0]
    require(is_zeros(base), "the rows are added to something else than zeros", node)
    require(dim == 0 and strip_views_casts(values) is rows, "other rows are added, or along another dimension", node)
    if is_op(node, "index_add", "index_add_"):
        require(arg(node, "alpha") == 1, "the combine scales the rows (alpha)", node)
    elif is_op(node, "scatter_add", "scatter_add_"):
        whole = is_op(index, "expand", "expand_as") and shape_of(index.args[0])[1:] == (1,)
        require(whole, "the rows are added element by element, at other places than one a row", node)
        index = index.args[0]
    match_pair_index(index, k)
    shape = shape_of(node)
    require(len(shape) == 2 and same_size(shape[0], tokens), "the result is not [T, H]", node)


def match_inverse(node: Node, perm: Node) -> None:
    """`node` must be the inverse of the permutation `perm`: argsort, or arange written at perm."""
    node = strip_ids(node)
    if is_op(node, "argsort") and same_value(strip_ids(node.args[0]), perm):
        require(not arg(node, "descending"), "the inverse is sorted in descending order", node)
        return
    if op_name(node) == "getitem" and node.args[1] == 1 and is_op(node.args[0], "sort"):
        require(same_value(strip_ids(node.args[0].args[0]), perm), "another permutation is inverted", node)
        require(not arg(node.args[0], "descending"), "the inverse is sorted in descending order", node)
        return
    if is_op(node, "index_put", "index_put_"):
        base, indices, values = node.args[:3]
        require(
            is_fresh(base),
            "the inverse starts from other values",
            node,
        )
        one = len(indices) == 1 and isinstance(indices[0], Node) and same_value(strip_ids(indices[0]), perm)
        require(one, "another permutation is inverted", node)
        require(not arg(node, "accumulate"), "the inverse accumulates", node)
        _is_counting(values, node)
        return
    if is_op(node, "scatter", "scatter_"):
        require(same_value(strip_ids(node.args[2]), perm), "another permutation is inverted", node)
        _is_counting(node.args[3], node)
        return
    raise Miss(f"{op_name(node)} is not the inverse of the sorting permutation", node)


def _is_counting(values: object, where: Node) -> None:
    """What is written must be arange that counts 0, 1, 2, ...: neither another start nor another step."""
    node = strip_ids(values) if isinstance(values, Node) else None
    require(is_op(node, "arange"), "the inverse is not written with arange", where)
    assert node is not None
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    require("start" not in names or arg(node, "start") == 0, "arange does not start at 0", node)
    require("step" not in names or arg(node, "step") == 1, "arange does not count by one", node)
