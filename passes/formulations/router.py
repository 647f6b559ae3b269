"""The router behind a block's ids and weights: rules R1-R7, R9 and R11 of the documentation, read backwards.

From the weights: casts, one number an expert, a constant scale, the division by the sum, a gather or the selection's
own values, the score. From the ids: the selection, and how its operand is made of the scores (`choice.py`). Whatever
does not fit raises Miss, and then the router, or its end (`router_start.py`), stays with Inductor while the experts are
still rewritten: ids and weights are then simply inputs of the block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import sympy
import torch
from torch.fx import Node

from moe_compiler.aliasing import alias_root, aliases_argument, mutated_arguments
from moe_compiler.moe_ir import RouterSpec, op_name
from moe_compiler.passes.formulations.choice import Choice, read_choice
from moe_compiler.passes.formulations.pairs import is_counting
from moe_compiler.passes.formulations.topk import STAYS, Selection, check_ties, is_last, read_selection
from moe_compiler.passes.formulations.unsorted import check_order_is_free
from moe_compiler.passes.formulations.walk import (
    arg,
    contains,
    dtype_of,
    elements_of,
    folded,
    is_op,
    read_by,
    require,
    row_source,
    same_shape,
    same_size,
    shape_of,
    strip,
    strip_ids,
    strip_views,
    widens,
)
from moe_compiler.passes.formulations.weighing import Weighing, weigh

__all__ = ["Router", "match_router"]

_GATHER = "take the weights from the scores at the ids (the top-k's values, or a gather); then divide, then scale"


@dataclass(frozen=True)
class Router:
    """A recognised router: its operands, its rule, and the nodes whose values it replaces.

    bias, expert_scale: optional operands, one number an expert; inner: every node between the operands and the
    weights and ids; values: those of them through which gradients flow, so without what is chosen by alone;
    selection: the top-k or argmax.
    """

    spec: RouterSpec
    logits: Node
    bias: Node | None
    expert_scale: Node | None
    weights: Node
    ids: Node
    selection: Node
    inner: tuple[Node, ...]
    values: tuple[Node, ...]


def _score(node: Node, width: int | sympy.Expr) -> tuple[str, Node, torch.dtype]:
    """(score function, its input, the dtype it is computed in) of scores in rows of `width`; "none" when of none."""
    if is_op(node, "softmax", "_softmax", "special_softmax"):
        rank = len(shape_of(node))
        rows = rank > 0 and arg(node, "dim") % rank == rank - 1 and shape_of(node)[-1] == width
        require(rows, "softmax over another dimension than the experts", node, STAYS)
        return "softmax", node.args[0], dtype_of(node)  # type: ignore[return-value]
    if is_op(node, "sigmoid", "special_expit"):
        return "sigmoid", node.args[0], dtype_of(node)  # type: ignore[return-value]
    return "none", node, dtype_of(node)


def _widened(node: Node, score_dtype: torch.dtype) -> Node:
    """Look through widening casts in front of a score: the score's own dtype says it all.

    A narrowing one rounds the logits, and so has a say in which experts are chosen.
    """
    return _behind(node, lambda n: widens(n) and contains(score_dtype, dtype_of(n)))


def _unwidened(node: Node) -> Node:
    """The node behind casts that change no value."""
    return _behind(node, widens)


def _behind(node: Node, through: Callable[[Node], bool]) -> Node:
    """The node behind those for which `through` holds, and behind views that keep the rows."""
    while True:
        behind = strip(row_source(node), through)
        if behind is node:
            return node
        node = behind


def _chosen_of(node: Node, selection: Selection) -> tuple[Node, bool] | None:
    """(what entries it holds of, whether they are the selection's own values) when `node` holds those of the chosen.

    Its rows are those of the selection, whatever dimensions are in front of them.
    """
    node = strip_views(node) if selection.k == 1 else row_source(node)
    if selection.has_values(node):
        return selection.operand, True
    if is_op(node, "gather", "take_along_dim"):
        source = node.args[0]
        index = node.args[2] if is_op(node, "gather") else node.args[1]
        if isinstance(source, Node) and isinstance(index, Node) and is_last(arg(node, "dim"), node):
            fits = same_shape(shape_of(index), (*shape_of(source)[:-1], sympy.Integer(selection.k)))
            return (source, False) if fits and selection.is_at(index) else None
    if is_op(node, "index") and len(node.args[1]) == 2 and all(isinstance(i, Node) for i in node.args[1]):  # type: ignore[arg-type]
        rows, index = node.args[1]  # type: ignore[misc]
        source = node.args[0]
        each = isinstance(source, Node) and same_shape(shape_of(rows), (shape_of(source)[0], *shape_of(rows)[1:]))  # type: ignore[arg-type]
        column = len(shape_of(rows)) == 2 and shape_of(rows)[1] == 1  # type: ignore[arg-type]
        column = column and shape_of(index)[-1:] == (selection.k,)  # type: ignore[arg-type]
        if each and column and is_counting(strip_ids(rows)) and selection.is_at(index):  # type: ignore[arg-type]
            return source, False  # type: ignore[return-value]
    return None


def _choice_of(chosen: tuple[Node, bool], selection: Selection, score: str | None) -> Choice:
    """The choice when the weights hold entries of `chosen`; `score` names their function, None when it comes later.

    Weights that are the masked scores' own: where no score is negative and the kept groups have k experts, filling with
    0 or -inf are the same choice but for ties (an expert outside of them is taken only when a kept one scores 0), and
    choosing among the kept alone is right in both.
    """
    source, own = chosen
    choice = read_choice(selection.operand, None if own else source)
    if not (own or choice.masked) or choice.groups == 1:
        return choice
    size = int(shape_of(choice.scores)[-1]) // choice.groups
    scores = choice.scores if own else source
    name = _score(_unwidened(scores), shape_of(scores)[-1])[0] if score is None else "none"
    require(
        name != "none" and selection.k <= choice.kept_groups * size,
        "the weights are the scores with the fill of the groups in them, and a fill may be among the chosen",
        selection.node,
        STAYS,
    )
    return Choice(choice.scores, None, choice.groups, choice.kept_groups, choice.group_top, "-inf", choice.masked)


def _between(ends: Collection[Node], operands: Collection[Node]) -> list[Node]:
    """The nodes with values between operands and ends, ends included."""
    found: dict[Node, None] = {}
    pending = list(ends)
    while pending:
        node = pending.pop()
        if node in found or node in operands or not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)):
            continue
        found[node] = None
        pending.extend(read_by(node))
    return list(found)


def _check_in_place(inner: Collection[Node]) -> None:
    """What the router writes in place is its own, and nobody else reads that memory."""
    for node in inner:
        for written in mutated_arguments(node):
            root = alias_root(written)
            require(root in inner, f"{node.name} writes into {root.name}, which is not the router's", node, STAYS)
            pending, seen = [root], {root}
            while pending:
                alias = pending.pop()
                for user in alias.users:
                    require(user in inner, f"{user.name} reads memory that the router writes in place", user, STAYS)
                    if alias in aliases_argument(user) and user not in seen:
                        seen.add(user)
                        pending.append(user)


def match_router(weights: Node, ids: Node, inside: Collection[Node] | None = None) -> Router:
    """Resolve (weights [.., K], ids [.., K]) to the router that made them; raises Miss when it is another rule."""
    selection = read_selection(ids)
    check_ties(selection)
    w = weigh(weights, selection)
    chosen = _chosen_of(w.source, selection)
    if chosen is not None:
        order = "before"
        choice = _choice_of(chosen, selection, None)
        scores = choice.scores if chosen[1] else chosen[0]
        score, source, score_dtype = _score(_unwidened(scores), shape_of(scores)[-1])
        logits = _widened(source, score_dtype) if score != "none" else scores
        if score == "none":
            score_dtype = dtype_of(logits)
        chosen_dtype = score_dtype
    else:
        order = "after"
        score, source, score_dtype = _score(w.source, selection.k)
        reason = f"the weights come from {op_name(w.source)}, not from the top-k's scores"
        require(score != "none", reason, w.source, _GATHER)
        taken = _chosen_of(_widened(source, score_dtype), selection)
        require(taken is not None, "the score is not taken of the top-k's own values", w.source, STAYS)
        assert taken is not None
        choice = _choice_of(taken, selection, score)
        logits = choice.scores if taken[1] else taken[0]
        chosen_dtype = dtype_of(logits)
    _check_operands(weights, selection, logits, choice, w, chosen_dtype)
    negative = w.absolute and score == "none"
    require(not negative, "the weights are divided by the sum of absolute values of raw scores", w.divided, STAYS)
    operands = [operand for operand in (logits, choice.bias, w.expert_scale) if operand is not None]
    inner = _between([weights, selection.ids], operands)
    _check_in_place(inner)
    if not selection.sorted:
        check_order_is_free(weights, selection, inner, inside)
    spec = RouterSpec(
        k=selection.k,
        score=score,
        order=order,
        renormalize=w.renormalize,
        eps=w.eps,
        scale=w.scale,
        score_dtype=score_dtype,
        dtype=dtype_of(weights),
        bias=choice.bias is not None,
        groups=choice.groups,
        kept_groups=choice.kept_groups,
        group_top=choice.group_top,
        fill=choice.fill,
        clamp=w.clamp,
        expert_scale=w.expert_scale is not None,
    )
    return Router(
        spec=spec,
        logits=logits,
        bias=choice.bias,
        expert_scale=w.expert_scale,
        weights=weights,
        ids=selection.ids,
        selection=selection.node,
        inner=tuple(inner),
        values=tuple(_between([weights], [*operands, selection.ids])),
    )


def _check_operands(
    weights: Node, selection: Selection, logits: Node, choice: Choice, w: Weighing, chosen_dtype: torch.dtype
) -> None:
    """Shapes are those that the operator takes, and the choice is made in the dtype that it makes it in."""
    require(len(shape_of(logits)) >= 2, "the router's scores are not [tokens, experts]", logits, STAYS)
    tokens, experts = folded(shape_of(logits), 2)
    for node in (selection.ids, weights):
        shape = shape_of(node)
        one_each = selection.k == 1 and same_size(elements_of(shape), tokens)
        rows = len(shape) > 1 and same_shape(folded(shape, 2), (tokens, sympy.Integer(selection.k)))
        require(one_each or rows, "weights and ids are not [T, K]", node, STAYS)
        sizes = [size for size in shape if not size.is_Integer]
        known = (len(sizes) <= 1 and 0 not in shape) or all(size in shape_of(logits) for size in sizes)
        require(known, f"{op_name(node)} has several symbolic sizes that the scores do not have", node, STAYS)
    if choice.bias is not None:
        made = torch.promote_types(dtype_of(choice.scores), dtype_of(choice.bias))
        same = made == torch.promote_types(chosen_dtype, dtype_of(choice.bias))
        require(same, "the scores are widened for the choice beyond their own dtype", selection.node, STAYS)
    if w.expert_scale is not None:
        one_each = same_size(elements_of(shape_of(w.expert_scale)), experts)
        require(one_each, "the experts' own scale is not one number an expert", w.expert_scale, STAYS)
