"""Choices among scores that belong to no block: which are worth a word, and what they select instead of experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node

from moe_compiler.moe_ir import Miss, op_name
from moe_compiler.passes.formulations.contraction import contraction
from moe_compiler.passes.formulations.quantised import HINT, quantised_below
from moe_compiler.passes.formulations.walk import arg, is_op, shape_of, strip_views_casts, view_or_cast

__all__ = ["chooses_scores", "chosen_ids", "explain_selection", "leads_to", "masks_products"]

_FEW_EXPERTS = 4096
_WITHIN = 256  # nodes behind a choice that are looked at
_READS_ROWS = ("index", "index_select", "embedding")


def chosen_ids(node: Node) -> Node | None:
    """The indices of a top-k, a sort, an argmax: when something reads them."""
    ids: Node | None = node
    if not is_op(node, "argmax", "argsort"):
        ids = next((user for user in node.users if op_name(user) == "getitem" and user.args[1] == 1), None)
    return ids if ids is not None and ids.users else None


def chooses_scores(node: Node) -> bool:
    """An argmax or a sort along the last dimension, of a constant size, of floating scores, whose indices are read."""
    if not is_op(node, "argmax", "argsort", "sort", "max") or chosen_ids(node) is None:
        return False
    source = node.args[0]
    value = source.meta.get("val") if isinstance(source, Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or not value.dtype.is_floating_point:
        return False
    width = value.shape[-1]
    named = any(argument.name == "dim" for argument in node.target._schema.arguments)
    return named and arg(node, "dim") in (-1, value.dim() - 1) and isinstance(width, int) and 1 < width <= _FEW_EXPERTS


def leads_to(ids: Node, found: Callable[[Node], bool]) -> Node | None:
    """The nearest node behind the choice for which `found` holds."""
    pending, seen = [ids], {ids}
    while pending and len(seen) < _WITHIN:
        node = pending.pop(0)
        if node is not ids and found(node):
            return node
        fresh = [user for user in node.users if user not in seen]
        seen.update(fresh)
        pending.extend(fresh)
    return None


def explain_selection(choice: Node, ids: Node) -> Miss:
    """Why this choice selects no experts, as far as its users tell."""
    quantised = quantised_below(choice)
    if quantised is not None:
        return Miss(f"the experts are quantised: {op_name(quantised)} works on weights in few bits", quantised, HINT)
    reason = "no matmul with expert weights was found that these ids select"
    detail, node = _selected(choice, ids)
    return Miss(f"{reason}: {detail}" if detail else reason, node)


def masks_products(numbers: Node) -> Miss | None:
    """Why experts that all run on all tokens are no block, where integers say whose rows are kept (VitPose).

    For each e the rows of one product are multiplied by numbers == e; None when `numbers` is read in another way.
    """
    value = numbers.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype not in (torch.int32, torch.int64):
        return None
    found: dict[int, Node] = {}
    for mask in numbers.users:
        if is_op(mask, "eq") and isinstance(mask.args[1], int):
            masked = next((user for user in _users_behind_views(mask) if is_op(user, "mul")), None)
            rows = [n for n in masked.args[:2] if isinstance(n, Node)] if masked is not None else []
            if any(contraction(strip_views_casts(node), biased=True) is not None for node in rows):
                found.setdefault(mask.args[1], masked)  # type: ignore[arg-type]
    if len(found) < 2:
        return None
    return Miss(
        "all experts run on all tokens and a mask keeps each one's rows: no tokens are selected for an expert, "
        "and no choice among scores says whose rows are kept",
        next(iter(found.values())),
        "none where an expert is one matrix; an MLP can select its tokens first, as in where_loop: "
        "torch.where(ids == e)",
    )


def _users_behind_views(node: Node) -> list[Node]:
    """The users of a node and of its views and casts."""
    found: list[Node] = []
    for user in node.users:
        found += _users_behind_views(user) if view_or_cast(user) or is_op(user, "to", "_to_copy") else [user]
    return found


def _selected(choice: Node, ids: Node) -> tuple[str, Node]:
    if len(shape_of(choice.args[0])) == 1:  # type: ignore[arg-type]
        return f"{op_name(choice)} chooses among rows by one score each, not among experts for each token", choice
    reader = leads_to(ids, lambda node: is_op(node, *_READS_ROWS) and _indexes(node))
    if reader is None:
        return "nothing is gathered by them", choice
    table = reader.args[0]
    shape = shape_of(table)  # type: ignore[arg-type]
    sizes = ", ".join(map(str, shape))
    if len(shape) < 3:
        return f"{op_name(reader)} reads rows of a [{sizes}] matrix, and experts have matrices", reader
    products = leads_to(reader, lambda node: contraction(node) is not None)
    if products is None:
        return f"the [{sizes}] tensors that {op_name(reader)} reads are in no product", reader
    return f"what {op_name(reader)} reads of [{sizes}] is in no product behind an activation of another one", reader


def _indexes(node: Node) -> bool:
    """Is the floating table that this operator reads of a size of its own, not the scores that were chosen from?"""
    table = node.args[0].meta.get("val") if isinstance(node.args[0], Node) else None
    return isinstance(table, torch.Tensor) and table.dtype.is_floating_point and table.dim() > 1
