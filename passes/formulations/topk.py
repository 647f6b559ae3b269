"""The operator that selects k of the experts (or of the groups) for each token, in any spelling.

    topk                          values and positions, in descending order or, with sorted=False, in none
    sort, argsort                 descending, the first k of its results; ascending, the last k (in ascending order)
    max, argmax                   one expert a token, with or without a dimension of size 1 for it

Of equal scores each of these operators names others. A top-k names any, so a block may run another of two equals; a
raised router runs a top-k, or takes the first of equals where k is 1. A sort that is stable promises the order in which
the scores stand, and the source may rely on it; one that is not has an order of its own. So a choice by sorting stays
(`check_ties`), but for the first of a stable one.

Its tensors may have any number of dimensions in front of the last one: rows of scores, rows of positions.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from moe_compiler.moe_ir import Miss, op_name
from moe_compiler.passes.formulations.walk import (
    arg,
    is_index_cast,
    is_op,
    item_of,
    require,
    row_views,
    same_value,
    shape_of,
    strip,
    strip_ids,
)

__all__ = ["STAYS", "Selection", "check_ties", "is_last", "read_selection"]

STAYS = "the router stays with Inductor; the experts are rewritten all the same"

_TOPK = "write torch.topk, which may take any of equal scores"
_CHOOSE = "hand on the indices of a topk, sort or argmax over the scores as they are; a table of experts has no rule"


@dataclass(frozen=True)
class Selection:
    """An operator that selects k of the last dimension of `operand`.

    node: the operator; ids: the node of the selected positions, [.., k], or [..] when k is 1; sorted: are they in
    descending order of what is selected; window: the [start, stop) of the operator's results that they are, None when
    they are all of them.
    """

    node: Node
    ids: Node
    operand: Node
    k: int
    sorted: bool
    window: tuple[int, int] | None = None

    @property
    def stable(self) -> bool:
        """Is the operator a sort that keeps equal entries in their order?"""
        named = any(argument.name == "stable" for argument in self.node.target._schema.arguments)  # type: ignore[union-attr]
        return named and bool(arg(self.node, "stable"))

    def has_values(self, node: Node) -> bool:
        """Does `node` hold the selected entries of `operand`?"""
        if op_name(self.node) in ("argmax", "max"):
            return self._is_maximum(node)
        window = None
        if self.window is not None:
            source, window = _windowed(node)
            node = strip(source, row_views)
        return window == self.window and item_of(node, 0, "topk", "sort") is self.node

    def _is_maximum(self, node: Node) -> bool:
        """max or amax of the operand: of equals, argmax and max may name different ones that have the value."""
        best = item_of(node, 0, "max")
        if best is None and is_op(node, "amax"):
            best = node
        if best is None or best.args[0] is not self.operand or len(best.target._schema.arguments) < 2:  # type: ignore[union-attr]
            return False
        dim = arg(best, "dim")
        dim = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
        return is_last(dim, best.args[0])

    def is_at(self, index: Node) -> bool:
        """Is `index` the selected positions, in their order?"""
        found = strip_ids(index)
        return found is self.ids or (self.window is not None and same_value(found, self.ids))


def is_last(dim: object, tensor: Node) -> bool:
    """Does `dim` name the last dimension of a tensor?"""
    rank = len(shape_of(tensor))
    return isinstance(dim, int) and rank > 0 and dim % rank == rank - 1


def check_ties(selection: Selection, what: str = "experts") -> None:
    """Miss where a raised router would name others of equal scores than the sort that the source chooses by."""
    node, k = selection.node, selection.k
    if not is_op(node, "sort", "argsort"):
        return
    require(
        selection.stable,
        f"the {what} are chosen by a sort that is not stable: it puts equal scores in an order of its own, "
        "in which no top-k takes them",
        node,
        _TOPK,
    )
    require(
        k == 1 and bool(arg(node, "descending")),
        f"the {what} are chosen by a stable sort: it keeps ties in their order, which a top-k does not promise",
        node,
        _TOPK,
    )


def _windowed(node: Node) -> tuple[Node, tuple[int, int] | None]:
    """(source, (start, stop)) of a slice of constant bounds of the last dimension; (node, None) of anything else."""
    source = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(source, Node) or not is_op(node, "slice", "narrow") or not is_last(arg(node, "dim"), source):
        return node, None
    width = shape_of(source)[-1]
    if not width.is_Integer:
        return node, None
    if is_op(node, "narrow"):
        start, length = arg(node, "start"), arg(node, "length")
        if not isinstance(start, int) or not isinstance(length, int):
            return node, None
        start = start % int(width)
        return source, (start, start + length)
    start, stop = arg(node, "start"), arg(node, "end")
    if arg(node, "step") != 1 or not all(bound is None or isinstance(bound, int) for bound in (start, stop)):
        return node, None
    start, stop, _ = slice(start, stop).indices(int(width))
    return source, (start, stop)


def read_selection(ids: Node, what: str = "experts") -> Selection:
    """The selection behind `ids`; raises Miss when it is another operator, or over another dimension."""
    node = strip_ids(ids)
    source, window = _windowed(node)
    if window is not None:
        return _of_sorted(node, strip(source, lambda n: row_views(n) or is_index_cast(n)), window, what)
    topk = item_of(node, 1, "topk")
    if topk is not None:
        _check_topk(topk, what)
        k = arg(topk, "k")
        return Selection(topk, node, topk.args[0], k, k == 1 or bool(arg(topk, "sorted")))  # type: ignore[arg-type]
    if item_of(node, 1, "sort") is not None or is_op(node, "argsort"):
        return _of_sorted(node, node, None, what)
    best = item_of(node, 1, "max")
    if best is None and is_op(node, "argmax"):
        best = node
    if best is None:
        raise Miss(f"the ids do not come from a top-k over the scores, but from {op_name(node)}", ids, _CHOOSE)
    require(is_last(arg(best, "dim"), best.args[0]), f"{op_name(best)} not over the {what}", best, STAYS)  # type: ignore[arg-type]
    return Selection(best, node, best.args[0], 1, True)  # type: ignore[arg-type]


def _check_topk(topk: Node, what: str) -> None:
    require(arg(topk, "largest"), "top-k takes the smallest", topk, STAYS)
    require(is_last(arg(topk, "dim"), topk.args[0]), f"top-k along another dimension than the {what}", topk, STAYS)  # type: ignore[arg-type]
    require(isinstance(arg(topk, "k"), int), "k is not a constant", topk, STAYS)


def _of_sorted(ids: Node, positions: Node, window: tuple[int, int] | None, what: str) -> Selection:
    """A selection of all positions of a sort, or of those in a window: its first k, or its last when it ascends."""
    topk = item_of(positions, 1, "topk")
    by = topk if topk is not None else item_of(positions, 1, "sort")
    if by is None and is_op(positions, "argsort"):
        by = positions
    if by is None:
        raise Miss(f"the ids are cut out of what {op_name(positions)} made, not of a top-k or a sort", ids, STAYS)
    operand = by.args[0]
    assert isinstance(operand, Node)
    if topk is not None:
        _check_topk(topk, what)
        width, descending = arg(topk, "k"), True
        require(arg(topk, "sorted"), "the ids are cut out of an unsorted top-k", topk, "leave out sorted=False")
    else:
        require(is_last(arg(by, "dim"), operand), f"sorted along another dimension than the {what}", by, STAYS)
        size = shape_of(operand)[-1]
        require(size.is_Integer, f"the number of {what} is not a constant", by, STAYS)
        width, descending = int(size), bool(arg(by, "descending"))
    start, stop = window if window is not None else (0, width)
    first = (0, stop) if descending else (start, width)
    require(
        start < stop and (start, stop) == first,
        "the ids are cut out of the sorted ones, and not those of the largest scores",
        ids,
        STAYS,
    )
    k = stop - start
    return Selection(by, ids, operand, k, descending or k == 1, window)
