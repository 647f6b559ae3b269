"""What a router chooses by: how the operand of its selection is made of the scores.

    bias        one number an expert, added to the scores for the choice alone
    groups      scores outside of the best groups of experts are filled with 0 or -inf

Scores are rows of E, whatever dimensions are in front of it. Read backwards, from the selection's operand to the scores
that the weights are taken of. Whatever does not fit raises Miss: the router then stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import sympy
import torch
from torch.fx import Node

from moe_compiler.moe_ir import Miss, op_name
from moe_compiler.passes.formulations.topk import STAYS, check_ties, is_last, read_selection
from moe_compiler.passes.formulations.walk import (
    CASTS,
    arg,
    dtype_of,
    elements_of,
    filled_with,
    folded,
    is_op,
    item_of,
    require,
    row_source,
    same_shape,
    shape_of,
    strip_views,
    widens,
)

__all__ = ["Choice", "nearest", "read_choice"]


@dataclass(frozen=True)
class Choice:
    """What the operand of a selection is: `scores` [T, E], plus bias, with `fill` outside of the best groups.

    masked: the scores themselves were written to, so that whoever reads them after the choice sees the fill.
    """

    scores: Node
    bias: Node | None = None
    groups: int = 1
    kept_groups: int = 1
    group_top: int = 1
    fill: str = "-inf"
    masked: bool = False


def nearest(node: Node) -> Node:
    """The node behind what changes no value that is chosen by.

    Casts that widen, detach (a choice has no gradient), views that keep the rows.
    """
    while True:
        source = row_source(node)
        if source is node and (widens(node) or is_op(node, "detach")):
            source = node.args[0]  # type: ignore[assignment]
        if source is node or not isinstance(source, Node):
            return node
        node = source


def read_choice(operand: Node, scores: Node | None) -> Choice:
    """How `operand` [T, E] is made of `scores`, or, where the weights are its own entries (None), of what it masks."""
    choice = _Reader(scores).read(operand)
    require(
        scores is None or nearest(choice.scores) is nearest(scores),
        "the experts are chosen by other scores than they are weighted with",
        operand,
        STAYS,
    )
    return choice


class _Reader:
    def __init__(self, scores: Node | None) -> None:
        self.scores = scores

    def reached(self, node: Node) -> bool:
        return self.scores is not None and nearest(node) is nearest(self.scores)

    def read(self, operand: Node) -> Choice:
        if self.reached(operand):
            return Choice(operand)
        outer = operand if self.scores is None else nearest(operand)
        shaped = strip_views(outer)
        if is_op(shaped, "masked_fill", "masked_fill_", "where"):
            return self._masked(shaped, dtype_of(operand))
        if self.scores is None:
            return Choice(operand)
        return self._biased(outer)

    def _biased(self, node: Node) -> Choice:
        """scores + bias, one of which is [T, E] and the other one number an expert."""
        node = nearest(node)
        if self.reached(node):
            return Choice(node)
        require(
            is_op(node, "add", "add_") and all(isinstance(operand, Node) for operand in node.args[:2]),
            f"the experts are chosen by other scores than they are weighted with: {op_name(node)} is neither a bias "
            "for each expert nor a limit to groups",
            node,
            STAYS,
        )
        require(arg(node, "alpha") == 1, "the bias for the choice has a factor", node, STAYS)
        scores, bias = node.args[:2] if self.reached(node.args[0]) else node.args[1::-1]
        require(self.reached(scores), "the experts are chosen by other scores than they are weighted with", node, STAYS)
        experts = shape_of(node)[-1]
        one_each = shape_of(bias)[-1:] == (experts,) and same_shape((elements_of(shape_of(bias)),), (experts,))
        require(one_each, "what is added for the choice is not one number an expert", node, STAYS)
        return Choice(scores, bias=bias)

    def _masked(self, node: Node, dtype: torch.dtype) -> Choice:
        """The choice behind a fill of all groups but the best."""
        base, mask, fill, keeps = _fill_parts(node)
        inner = strip_views(base)
        choice = Choice(inner) if self.scores is None else self._biased(inner)
        require(
            dtype_of(node) == dtype and dtype_of(inner) == _choice_dtype(choice),
            "the groups are compared in a wider dtype than the scores have",
            node,
            STAYS,
        )
        scatter, marks_kept, spread = _read_mask(mask)
        require(marks_kept == keeps, "the best groups are filled instead of the others", node, STAYS)
        tokens, groups = folded(shape_of(scatter), 2)
        experts = shape_of(inner)[-1]
        require(
            groups.is_Integer and experts.is_Integer and int(experts) % int(groups) == 0,
            "the number of groups is not a constant that divides the number of experts",
            scatter,
            STAYS,
        )
        size = sympy.Integer(int(experts) // int(groups))
        _check_spread(node, base, mask, spread, (tokens, groups, size))
        selection = read_selection(scatter.args[2], "groups")  # type: ignore[arg-type]
        check_ties(selection, "groups")
        index = shape_of(scatter.args[2])  # type: ignore[arg-type]
        chosen = same_shape(index, (*shape_of(scatter)[:-1], sympy.Integer(selection.k)))
        require(chosen, "the groups are not chosen for each token", scatter, STAYS)
        top = _group_top(selection.operand, inner, (tokens, groups, size))
        in_place = op_name(node) == "masked_fill_"
        return replace(
            choice,
            groups=int(groups),
            kept_groups=selection.k,
            group_top=top,
            fill=fill,
            masked=in_place and choice.bias is None,
        )


def _choice_dtype(choice: Choice) -> torch.dtype:
    scores = dtype_of(choice.scores)
    return scores if choice.bias is None else torch.promote_types(scores, dtype_of(choice.bias))


def _fill_parts(node: Node) -> tuple[Node, Node, str, bool]:
    """(scores, mask, fill, whether the mask is true where they are kept) of a masked_fill or where."""
    if is_op(node, "where"):
        mask, first, second = node.args[:3] if len(node.args) > 2 else (node.args[0], None, None)
        keeps = filled_with(second) is not None
        base, value = (first, second) if keeps else (second, first)
    else:
        keeps = False
        base, mask, value = node.args[:3]
    number = filled_with(value)
    if not isinstance(base, Node) or not isinstance(mask, Node) or number is None:
        raise Miss(f"{op_name(node)} does not fill scores with a constant", node, STAYS)
    fill = {0.0: "0", float("-inf"): "-inf"}.get(number)
    require(fill is not None, f"the groups that are not kept are filled with {number}, not 0 or -inf", node, STAYS)
    assert fill is not None
    return base, mask, fill, keeps


def _read_mask(mask: Node) -> tuple[Node, bool, Node | None]:
    """(scatter [T, G], whether the mask is true at the scattered groups, the node that spreads it over experts)."""
    node, straight, spread = mask, True, None
    while not is_op(node, "scatter", "scatter_"):
        source = node.args[0] if node.op == "call_function" and node.args else None
        if not isinstance(source, Node):
            raise Miss("the mask of the groups is not made by a scatter", mask, STAYS)
        flips, other = _flips(node), strip_views(node)
        if flips is not None:
            straight = straight != flips
        elif is_op(node, "expand", "expand_as", "broadcast_to", "repeat_interleave") and spread is None:
            spread = node
        elif other is not node:
            source = other
        else:
            require(is_op(node, *CASTS), f"{op_name(node)} in the mask of the groups", node, STAYS)
        node = source
    # Whatever value is written, the mask is read as zero or not.
    value = node.args[3] if len(node.args) > 3 else node.kwargs.get("value", node.kwargs.get("src"))
    before, after = filled_with(node.args[0]), filled_with(value)
    marks = {(0.0, 1.0): True, (1.0, 0.0): False}.get((before, after))  # type: ignore[arg-type]
    reduced = any(argument.name == "reduce" for argument in node.target._schema.arguments)  # type: ignore[union-attr]
    fits = marks is not None and not reduced and is_op(node, "scatter") and len(shape_of(node)) >= 2
    require(fits and is_last(node.args[1], node), "the mask does not mark the chosen groups", node, STAYS)
    return node, bool(marks) == straight, spread


def _flips(node: Node) -> bool | None:
    """Does a comparison turn a mask of 0 and 1 around? None when the node is no comparison."""
    if is_op(node, "logical_not") or (is_op(node, "bitwise_not") and dtype_of(node) == torch.bool):
        return True
    if is_op(node, "eq", "ne", "gt") and node.args[1] in (0, 1) and not (is_op(node, "gt") and node.args[1] == 1):
        return is_op(node, "eq") == (node.args[1] == 0)
    return None


def _check_spread(
    node: Node, base: Node, mask: Node, spread: Node | None, sizes: tuple[sympy.Expr, sympy.Expr, sympy.Expr]
) -> None:
    """Miss unless the mark of group g meets the experts g * size .. (g + 1) * size - 1."""
    tokens, groups, size = sizes
    grouped, one_each, flat = sizes, (tokens, groups, sympy.Integer(1)), (tokens, groups * size)

    def is_(shape: tuple[sympy.Expr, ...], wanted: tuple[sympy.Expr, ...]) -> bool:
        return same_shape(folded(shape, len(wanted)), wanted)

    if spread is None:
        marks, filled = shape_of(mask), shape_of(base)
        aligned = same_shape(marks[:-1], filled[:-1])  # the marks of a row meet that row
        fits = aligned and is_(marks, one_each) and is_(filled, grouped)
        fits = fits or (aligned and size == 1 and is_(marks, flat) and is_(filled, flat))
    else:
        before, after = shape_of(spread.args[0]), shape_of(spread)  # type: ignore[arg-type]
        if is_op(spread, "repeat_interleave"):
            times = arg(spread, "repeats")
            fits = is_(before, (tokens, groups)) and is_(after, flat)
            fits = fits and isinstance(times, int) and is_last(arg(spread, "dim"), spread)
        else:
            fits = same_shape(before[:-1], after[:-1]) and is_(before, one_each) and is_(after, grouped)
        # Behind the spread there are views alone, so the shapes say which expert meets which mark.
        fits = fits and same_shape(shape_of(mask), shape_of(base))
        fits = fits and any(is_(shape_of(base), shape) for shape in (grouped, flat))
    require(fits, "the mask of the groups does not cover neighbouring experts", node, STAYS)


def _group_top(node: Node, scores: Node, sizes: tuple[sympy.Expr, sympy.Expr, sympy.Expr]) -> int:
    """Of how many of its best experts a group's score is the sum; `scores` are the [T, E] that must be grouped."""
    tokens, groups, _size = sizes
    node = strip_views(node)
    require(same_shape(folded(shape_of(node), 2), (tokens, groups)), "there is not one score a group", node, STAYS)
    best = item_of(node, 0, "max")
    if best is not None or is_op(node, "amax"):
        top, by, dim = 1, best if best is not None else node, None
        dim = arg(by, "dim")
        dim = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
    else:
        source = node.args[0] if is_op(node, "sum") else None
        topk = item_of(source, 0, "topk") if isinstance(source, Node) else None
        if topk is None:
            raise Miss(f"the groups are scored by {op_name(node)}, not by their best experts", node, STAYS)
        assert isinstance(source, Node)
        dims = arg(node, "dim")
        dims = [dims] if isinstance(dims, int) else list(dims or [])
        summed = len(dims) == 1 and is_last(dims[0], source) and dtype_of(node) == dtype_of(source)
        require(summed, "the best experts of a group are summed in another way", node, STAYS)
        require(arg(topk, "largest") and isinstance(arg(topk, "k"), int), "groups by their smallest", topk, STAYS)
        top, by, dim = arg(topk, "k"), topk, arg(topk, "dim")
    grouped = by.args[0]
    require(
        is_last(dim, grouped) and same_shape(folded(shape_of(grouped), 3), sizes), "groups of other experts", by, STAYS
    )  # type: ignore[arg-type]
    same = strip_views(grouped) is scores  # type: ignore[arg-type]
    require(same, "the groups are scored by something else than the choice", by, STAYS)
    return top
