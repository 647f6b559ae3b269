"""Matrix products by letters: einsum, bmm, matmul, mm and linear as one thing.

A product of two operands is described as einsum does it: one letter a dimension. A matcher then asks which letters
contract and in which order the result has the others, and never cares how the user spelled it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from string import ascii_letters

import sympy
from torch.fx import Node

from moe_compiler.moe_ir import op_name
from moe_compiler.passes.formulations.walk import arg, aten_name, is_op, rank_of, require, shape_of

__all__ = ["Contraction", "Product", "contraction", "fed_by", "match_product"]

_WITH_BIAS = ("addmm", "addbmm", "baddbmm")
_PRODUCTS = frozenset({"einsum", "linear", "addmm", "baddbmm", "mm", "bmm", "matmul"})


@dataclass(frozen=True)
class Contraction:
    """out = einsum("left,right->out", left, right) + bias. An operand's dimension that is broadcast has no letter."""

    node: Node
    left: Node
    right: Node
    left_letters: str
    right_letters: str
    out_letters: str
    bias: Node | None = None


@dataclass(frozen=True)
class Product:
    """rows times expert weights: out[lead, .., o] = sum_c rows[.., c] * weight[lead, o, c].

    lead: the letters that the weight has besides its matrix (experts, or the gathered pairs), in its own order.
    rows_letters and out_letters hold no letter for a dimension of size 1 that is neither of `lead` nor of the matrix.
    transposed: the weight's matrix is [in, out] and not [out, in].
    """

    node: Node
    rows: Node
    weight: Node
    rows_letters: str
    out_letters: str
    lead: str
    contracted: str
    made: str
    transposed: bool


def contraction(node: object, *, biased: bool = False) -> Contraction | None:
    """The product that this node computes, None when it is no product of two tensors.

    One with a bias counts only when `biased`: the caller has to do something about it.
    """
    name = aten_name(node)
    if name not in _PRODUCTS:
        return None
    assert isinstance(node, Node)
    if name == "einsum":
        return _einsum(node)
    if name == "linear":
        bias = arg(node, "bias")
        if bias is not None and not biased:
            return None
        lead = ascii_letters[2 : rank_of(node.args[0]) + 1]
        return Contraction(node, node.args[0], node.args[1], lead + "b", "ab", lead + "a", bias)
    if name in ("addmm", "baddbmm"):
        if not biased or arg(node, "beta") != 1 or arg(node, "alpha") != 1:
            return None
        batch = "d" if name == "baddbmm" else ""
        letters = (batch + "cb", batch + "ba", batch + "ca")
        return Contraction(node, node.args[1], node.args[2], *letters, node.args[0])
    if name == "mm":
        return Contraction(node, node.args[0], node.args[1], "cb", "ba", "ca")
    if name == "bmm":
        return Contraction(node, node.args[0], node.args[1], "dcb", "dba", "dca")
    return _matmul(node)


def _einsum(node: Node) -> Contraction | None:
    equation, operands = str(node.args[0]).replace(" ", ""), node.args[1]
    if not isinstance(operands, (list, tuple)) or len(operands) != 2 or "." in equation:
        return None
    inputs, arrow, out = equation.partition("->")
    left, _, right = inputs.partition(",")
    if not arrow:
        out = "".join(sorted(letter for letter in set(left + right) if (left + right).count(letter) == 1))
    if any(len(set(letters)) != len(letters) for letters in (left, right, out)):
        return None
    return Contraction(node, operands[0], operands[1], left, right, out)


def _matmul(node: Node) -> Contraction | None:
    left, right = node.args[0], node.args[1]
    a, b = shape_of(left), shape_of(right)
    if len(a) < 2 or len(b) < 2:
        return None
    count = max(len(a), len(b)) - 2
    batch = ascii_letters[3 : 3 + count]

    def letters(shape: tuple[sympy.Expr, ...], other: tuple[sympy.Expr, ...], matrix: str) -> str:
        own: list[str] = []
        for place, letter in enumerate(batch):
            mine, theirs = place - count + len(shape) - 2, place - count + len(other) - 2
            if mine < 0 or (shape[mine] == 1 and theirs >= 0 and other[theirs] != 1):
                continue
            own.append(letter)
        return "".join(own) + matrix

    return Contraction(node, left, right, letters(a, b, "cb"), letters(b, a, "ba"), batch + "ca")


def _sizes(found: Contraction) -> dict[str, sympy.Expr]:
    """The size of each letter, read off the result and the operands."""
    sizes = dict(zip(found.out_letters, shape_of(found.node), strict=True))
    for operand, letters in ((found.left, found.left_letters), (found.right, found.right_letters)):
        if len(letters) == rank_of(operand):
            sizes = dict(zip(letters, shape_of(operand), strict=True)) | sizes
    return sizes


def match_product(node: Node, is_weight: Callable[[Node], bool], what: str, *, biased: bool = False) -> Product:
    """Read `node` as rows times expert weights; `is_weight` tells the operand that they are. Miss when it is not.

    biased: the caller has taken a bias apart already (`bias.split_bias`).
    """
    has_bias = is_op(node, *_WITH_BIAS) or (is_op(node, "linear") and arg(node, "bias") is not None)
    require(biased or not has_bias, f"the {what} projection has a bias", node, "write the experts without biases")
    found = contraction(node, biased=biased)
    added = " (a bias?)" if is_op(node, "add", "add_") else ""
    require(found is not None, f"{op_name(node)} is not the {what} projection of an expert{added}", node)
    assert found is not None
    right = is_weight(found.right)
    require(right or is_weight(found.left), f"no operand of the {what} projection is an expert weight", node)
    if right:
        rows, rows_letters, weight, letters = found.left, found.left_letters, found.right, found.right_letters
    else:
        rows, rows_letters, weight, letters = found.right, found.right_letters, found.left, found.left_letters
    lead, matrix = letters[:-2], letters[-2:]
    contracted = [letter for letter in matrix if letter in rows_letters and letter not in found.out_letters]
    require(len(contracted) == 1, f"the {what} projection does not contract one dimension of its weight", node)
    made = matrix.replace(contracted[0], "")
    require(made in found.out_letters, f"the {what} projection sums over the dimension that it should make", node)
    sizes = _sizes(found)
    units = {letter for letter in rows_letters + found.out_letters if letter not in letters and sizes.get(letter) == 1}
    return Product(
        node=node,
        rows=rows,
        weight=weight,
        rows_letters="".join(letter for letter in rows_letters if letter not in units),
        out_letters="".join(letter for letter in found.out_letters if letter not in units),
        lead=lead,
        contracted=contracted[0],
        made=made,
        transposed=matrix[0] == contracted[0],
    )


def fed_by(rows: Node, products: Collection[Node]) -> bool:
    """Does one of `products` reach `rows` within the few operators of an activation?"""
    level, seen = {rows}, set[Node]()
    for _ in range(12):
        if any(node in products for node in level):
            return True
        seen |= level
        stop = {
            n
            for n in level
            if is_op(n, "index", "index_select", "gather", "topk") or contraction(n, biased=True) is not None
        }
        level = {source for node in level - stop for source in node.all_input_nodes} - seen
    return False
