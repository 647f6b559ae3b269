"""One-hot encodings of a choice of experts, in their spellings: one_hot(ids, E), and ids[..., None] == arange(E)."""

from __future__ import annotations

import torch
from torch.fx import Node

from moe_compiler.passes.formulations.pairs import is_counting
from moe_compiler.passes.formulations.walk import (
    arg,
    is_op,
    require,
    same_shape,
    shape_of,
    strip_ids,
    strip_views,
)

__all__ = ["encoded_ids", "is_encoding", "is_kept_part"]


def is_encoding(node: Node) -> bool:
    """Is this a one-hot encoding, of whatever?"""
    return is_op(node, "one_hot") or _compared(node) is not None


def encoded_ids(node: Node) -> tuple[Node, int]:
    """(ids [..], E) of a one-hot encoding [.., E]; a Miss where E is no constant."""
    pair = _compared(node)
    if pair is not None:
        ids, numbers = pair
        return ids, int(shape_of(numbers)[-1])
    experts = arg(node, "num_classes")
    require(isinstance(experts, int) and experts > 0, "the number of classes comes from the data", node)
    return node.args[0], experts  # type: ignore[return-value]


def is_kept_part(product: Node, encoding: Node) -> bool:
    """Is this the encoding times a map of its shape of what is kept, so that what is left is zeros and ones, too?"""
    if not is_op(product, "mul", "logical_and", "bitwise_and", "__and__") or len(product.args) < 2:
        return False
    others = [operand for operand in product.args[:2] if operand is not encoding]
    kept = others[0] if len(others) == 1 else None
    return isinstance(kept, Node) and _is_truth(kept) and same_shape(shape_of(kept), shape_of(encoding))


def _is_truth(node: Node) -> bool:
    """Truth values, or the numbers 0 and 1 that they were converted to."""
    while is_op(node, "to", "_to_copy", "type_as") or strip_views(node) is not node:
        node = strip_views(node) if strip_views(node) is not node else node.args[0]  # type: ignore[assignment]
        if node.meta["val"].dtype == torch.bool:
            return True
    return bool(node.meta["val"].dtype == torch.bool)


def _compared(node: Node) -> tuple[Node, Node] | None:
    """(ids, numbers) of ids[..., None] == arange(E)."""
    if not is_op(node, "eq") or not all(isinstance(operand, Node) for operand in node.args[:2]):
        return None
    for column, numbers in (node.args[:2], node.args[1::-1]):
        counting = strip_ids(numbers)  # type: ignore[arg-type]
        size = shape_of(counting)[-1:]
        alone = is_counting(counting) and size == shape_of(numbers)[-1:] and size[0].is_Integer  # type: ignore[arg-type]
        if not alone or shape_of(column)[-1:] != (1,):  # type: ignore[arg-type]
            continue
        # The nearest node without the column's own dimension: [T, K] behind [T, K, 1].
        ids = column.args[0] if is_op(column, "unsqueeze", "view", "reshape") else None  # type: ignore[union-attr]
        if isinstance(ids, Node) and shape_of(ids) == shape_of(column)[:-1]:  # type: ignore[arg-type]
            return ids, numbers  # type: ignore[return-value]
    return None
