"""The matrices of experts that are multiplied one by one: how each is stored, whether all are one tensor's."""

from __future__ import annotations

import sympy
from torch.fx import Node

from moe_compiler.moe_ir import op_name
from moe_compiler.passes.formulations.contraction import Product, match_product
from moe_compiler.passes.formulations.walk import (
    arg,
    is_op,
    item_of,
    same_value,
    shape_of,
    strip_casts,
    strip_views,
    swaps_last_two,
)

__all__ = ["are_all", "collect", "plain_product", "stored"]


def plain_product(node: Node, what: str, *, biased: bool = False) -> Product:
    """`node` as rows [n, in] times one matrix; a Miss when it is not. biased: the caller takes its bias apart."""

    def is_matrix(operand: Node) -> bool:
        place = node.args[2 if is_op(node, "addmm") else 1]
        second = place[1] if is_op(node, "einsum") else place  # type: ignore[index]
        return len(shape_of(operand)) == 2 and operand is second

    return match_product(node, is_matrix, what, biased=biased)


def stored(product: Product) -> tuple[Node, bool]:
    """(matrix, is it [in, out]) of an expert's product, behind casts and a transpose."""
    node = strip_casts(product.weight)
    if swaps_last_two(node):
        return strip_casts(node.args[0]), not product.transposed
    return node, product.transposed


def _slice_of(node: Node) -> tuple[Node, int] | None:
    """(packed, e) when `node` is packed[e], or packed.to(dtype)[e] with a cast of its own."""
    if is_op(node, "select") and node.args[1] == 0:
        return strip_casts(node.args[0]), node.args[2]
    if op_name(node) == "getitem" and item_of(node, node.args[1], "unbind") is not None:
        unbind = node.args[0]
        return (unbind.args[0], node.args[1]) if arg(unbind, "dim") == 0 else None
    # One row of matrices off a chunk or a split: dbrx, whose weights are a view of [E * I, H].
    row = strip_views(node)
    parts = item_of(row, row.args[1], "chunk", "split") if op_name(row) == "getitem" else None
    if parts is None or arg(parts, "dim") != 0 or shape_of(row)[:1] != (1,):
        return None
    return (parts.args[0], row.args[1]) if shape_of(row)[1:] == shape_of(node) else None


def collect(matrices: list[Node]) -> tuple[Node, ...]:
    """One packed tensor when the matrices are all its slices in order, else one node an expert."""
    slices = [_slice_of(matrix) for matrix in matrices]
    if all(found is not None and found == (slices[0][0], e) for e, found in enumerate(slices)):
        packed = slices[0][0]
        if shape_of(packed)[0] == sympy.Integer(len(matrices)):
            return (packed,)
    return tuple(matrices)


def are_all(matrices: tuple[Node, ...]) -> bool:
    """Are these the matrices of all the experts that there are: a packed tensor, or all the slices of one?

    Each slice may be of a view of its own, so that only one with all of them is a tensor to hand on.
    """
    slices = [_slice_of(matrix) for matrix in matrices]
    if len(matrices) == 1 or slices[0] is None:
        return len(matrices) == 1
    packed, _ = slices[0]
    ordered = all(
        found is not None and found[1] == e and same_value(found[0], packed) for e, found in enumerate(slices)
    )
    return ordered and shape_of(packed)[0] == sympy.Integer(len(matrices))
