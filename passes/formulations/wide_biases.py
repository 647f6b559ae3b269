"""Biases that the source adds in a wider dtype than the matmuls compute in: which roundings a rewritten block adds.

Our operators hold a bias in the dtype of the matmuls, add it in fp32 and round the sum. A source that rounds the
product and then adds in fp32 rounds as often, unless the bias itself has more digits than the matmuls' dtype, or the
sum behind the down projection reaches the result without being rounded at all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch
from torch.fx import Node

from moe_compiler.moe_ir import Match, Miss
from moe_compiler.passes.formulations.walk import contains, dtype_of, is_op, strip, view_or_cast

__all__ = ["added_roundings"]


def added_roundings(match: Match, inside: Iterable[Node], is_product: Callable[[Node], bool]) -> list[Miss]:
    """What the operator would round of biases and the source does not, each as the reason not to rewrite the block.

    inside: the nodes of the block, in graph order.
    """
    if not (match.gate_bias or match.up_bias or match.down_bias):
        return []
    compute, result = match.spec.compute_dtype, match.spec.dtype
    found: dict[str, Miss] = {}
    for total in inside:
        if not is_op(total, "add", "add_") or dtype_of(total) == compute or not contains(dtype_of(total), compute):
            continue
        for value, bias in (total.args[:2], total.args[1::-1]):
            if not isinstance(value, Node) or not isinstance(bias, Node):
                continue
            product = _first_part(strip(value, view_or_cast))
            if product is None or not is_product(product) or dtype_of(product) != compute:
                continue
            last = _reads(product, match.down)
            reason = f"the {'down' if last else 'gate and up'} bias is added in {dtype_of(total)}, not in {compute}"
            if _fits(bias, compute):
                if not last or contains(compute, result):
                    continue
                reason += f", and the result keeps {result}"
            hint = f"keep the biases in {compute}, or give them to the linear layer itself; numerics='fast' rounds them"
            found.setdefault(reason, Miss(reason, total, hint))
    return list(found.values())


def _first_part(node: Node) -> Node | None:
    """The first of the experts' products that are put together, or the node itself."""
    if not is_op(node, "cat", "concat"):
        return node
    parts = node.args[0]
    first = parts[0] if isinstance(parts, (list, tuple)) and parts else None
    return strip(first, view_or_cast) if isinstance(first, Node) else None


def _reads(product: Node, weights: Collection[Node], depth: int = 12) -> bool:
    """Is an operand of a product one of these weights, gathered, selected, transposed or viewed?"""
    for operand in product.all_input_nodes:
        node: object = operand
        for _ in range(depth):
            if node in weights:
                return True
            if not isinstance(node, Node) or not node.args:
                break
            node = node.args[0]
    return False


def _fits(bias: Node, dtype: torch.dtype) -> bool:
    """Does `dtype` hold the numbers of a bias, which may be widened, viewed and gathered ones of such a dtype?"""
    while not contains(dtype, dtype_of(bias)):
        moves = view_or_cast(bias) or is_op(bias, "index", "index_select", "expand", "expand_as", "select")
        if not moves or not isinstance(bias.args[0], Node):
            return False
        bias = bias.args[0]
    return True
