"""Masks for ids that stand for no expert: transformers sets the rows of ids >= E to zero, as `moepdl::experts` does.

A matcher looks through such a mask (`passes`) and checks at the end that it compares the sorted ids with E.
"""

from __future__ import annotations

from torch.fx import Node

from moe_compiler.passes.formulations.base import Bindings
from moe_compiler.passes.formulations.pairs import in_range
from moe_compiler.passes.formulations.walk import is_op, item_of, require, strip_ids, strip_views, view_or_cast

__all__ = ["check_masks", "is_sentinel_mask", "passes"]


def is_sentinel_mask(node: Node) -> bool:
    """masked_fill(rows, ids >= E, 0), whatever is compared with whatever."""
    if not is_op(node, "masked_fill", "masked_fill_") or node.args[2] != 0:
        return False
    mask = node.args[1]
    return isinstance(mask, Node) and is_op(strip_views(mask), "ge")


def passes(node: Node) -> bool:
    """What rows are seen through: views, casts and masks."""
    return view_or_cast(node) or is_sentinel_mask(node)


def check_masks(b: Bindings, operands: tuple[Node, ...]) -> None:
    """Rows that are set to zero on the way must be those of ids >= E: our operator computes nothing for them either.

    operands: where the block begins, besides x, ids and weights.
    """
    masked = False
    pending, seen = [b.output], {b.x, b.rows, b.ids, b.weights, b.roles.get("base"), *operands}
    while pending:
        node = pending.pop()
        if is_sentinel_mask(node):
            compared = strip_views(node.args[1])  # type: ignore[arg-type]
            ids = strip_ids(compared.args[0])  # type: ignore[arg-type]
            known = (b.order is not None and item_of(ids, 0, "sort") is b.order) or ids is strip_ids(b.ids)
            require(known and compared.args[1] == b.experts, "rows are set to zero by another mask than ids >= E", node)
            masked = True
        fresh = [source for source in node.all_input_nodes if source not in seen]
        seen.update(fresh)
        pending.extend(fresh)
    require(
        masked or not b.clamped or in_range(b.ids, b.experts),
        "the counted ids are clamped, and rows of ids beyond the experts are not set to zero",
        b.anchor,
    )
