"""One-hot encodings of a choice of experts, in their spellings: one_hot(ids, E), and ids[..., None] == arange(E)."""

from __future__ import annotations

from torch.fx import Node

from moe_compiler.passes.formulations.pairs import is_counting
from moe_compiler.passes.formulations.walk import arg, is_op, require, shape_of, strip_ids

__all__ = ["encoded_ids", "is_encoding"]


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
