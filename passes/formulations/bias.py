"""Products with a bias: what is added to an expert's projection, and whether it is the bias of the expert that ran.

A bias is a second operand of the product (linear, addmm, baddbmm) or an addition behind it. This file only takes the
two apart; which rows a bias must be broadcast or gathered to is what a formulation knows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch.fx import Node

from moe_compiler.moe_ir import op_name
from moe_compiler.passes.formulations.activation import Activation, Half
from moe_compiler.passes.formulations.contraction import contraction
from moe_compiler.passes.formulations.walk import (
    arg,
    contains,
    dtype_of,
    elements_of,
    is_op,
    live_users,
    reads_only_shape,
    require,
    same_size,
    shape_of,
    strip,
    strip_views_casts,
    users_through,
    view_or_cast,
)

__all__ = ["behind_bias", "gathered_bias", "split_bias", "split_biases", "vector_bias"]

Test = Callable[[Node], bool]


def _is_product(node: Node) -> bool:
    return contraction(node, biased=True) is not None


def split_bias(
    node: Node, what: str, is_product: Test = _is_product, through: Test = view_or_cast
) -> tuple[Node, Node | None]:
    """(product, bias operand) of `product + bias`; (node, None) when nothing is added. Views and casts are left out."""
    node = strip(node, through)
    bias = None
    if is_op(node, "add", "add_"):
        operands = [operand for operand in node.args[:2] if isinstance(operand, Node)]
        for value, other in (operands, operands[::-1]) if len(operands) == 2 else ():
            product = strip(value, through)
            if is_product(product):
                require(arg(node, "alpha") == 1, f"the {what} bias is scaled (alpha)", node)
                wide = contains(dtype_of(node), dtype_of(product))
                require(wide, f"the {what} bias is added in {dtype_of(node)}, not in {dtype_of(product)}", node)
                whole = same_size(elements_of(shape_of(node)), elements_of(shape_of(product)))
                require(whole, f"what is added to the {what} projection repeats it", node)
                node, bias = product, other
                break
    found = contraction(node, biased=True)
    if found is not None and found.bias is not None:
        require(bias is None, f"the {what} projection has two biases", node)
        bias = found.bias
    return node, bias


def split_biases(
    activation: Activation, is_product: Test = _is_product, through: Test = view_or_cast
) -> tuple[Activation, dict[Node, Node]]:
    """The activation of the bare products, and the bias operand of each product that has one."""
    found: dict[Node, Node] = {}

    def bare(half: Half) -> Half:
        product, bias = split_bias(half.source, "gate and up", is_product, through)
        if bias is not None:
            found[product] = bias
        return replace(half, source=product)

    up = None if activation.up is None else bare(activation.up)
    return replace(activation, gate=bare(activation.gate), up=up), found


def behind_bias(
    product: Node, what: str, is_product: Test = _is_product, through: Test = view_or_cast
) -> tuple[Node, Node | None]:
    """(value, bias operand): the last node of a down projection, which is an addition when the product is added to."""
    users = [user for user in users_through(product, through) if not reads_only_shape(user)]
    if len(users) == 1 and is_op(users[0], "add", "add_") and live_users(users[0]):
        found, bias = split_bias(users[0], what, is_product, through)
        if found is product and bias is not None:
            return users[0], bias
    return product, split_bias(product, what, is_product, through)[1]


def gathered_bias(operand: Node, experts: int, width: object, what: str) -> tuple[Node, Node]:
    """(packed bias [E, out], index) of a bias that is gathered for each row; Miss for anything else."""
    gather = strip_views_casts(operand)
    require(
        is_op(gather, "index", "index_select"),
        f"what is added to the {what} projection comes from {op_name(gather)}, not from a gather of the experts' bias",
        gather,
    )
    if is_op(gather, "index"):
        indices = gather.args[1]
        require(len(indices) == 1, f"the {what} bias is gathered by several indices", gather)  # type: ignore[arg-type]
        index = indices[0]  # type: ignore[index]
    else:
        require(arg(gather, "dim") == 0, f"the {what} bias is not gathered along the experts", gather)
        index = gather.args[2]
    packed = gather.args[0]
    assert isinstance(packed, Node)
    assert isinstance(index, Node)
    fits = shape_of(packed) == (experts, width) and shape_of(operand)[-1:] == (width,)
    require(fits, f"what is added to the {what} projection is not a bias of {width} numbers an expert", gather)
    return packed, index


def vector_bias(operand: Node | None, what: str) -> Node | None:
    """The bias [out] behind what is added to the rows of one expert; Miss for anything else, None for None."""
    if operand is None:
        return None
    bias = strip_views_casts(operand)
    vector = len(shape_of(bias)) == 1
    require(vector, f"what is added to the {what} projection is not a bias of one row for all tokens", bias)
    return bias
