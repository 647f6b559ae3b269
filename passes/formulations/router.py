"""The router behind a block's ids and weights: rules R1-R7, R9 and R11 of the documentation, read backwards.

From the weights: casts, one number an expert, a constant scale, the division by the sum, a gather or the selection's
own values, the score. From the ids: the selection, and how its operand is made of the scores (`choice.py`). Whatever
does not fit raises Miss, and then the router stays with Inductor while the experts are still rewritten: ids and
weights are then simply inputs of the block.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from moe_compiler.aliasing import alias_root, aliases_argument, mutated_arguments
from moe_compiler.moe_ir import RouterSpec, op_name
from moe_compiler.passes.formulations.choice import (
    STAYS,
    Choice,
    Selection,
    is_last,
    read_choice,
    read_selection,
)
from moe_compiler.passes.formulations.pairs import is_counting
from moe_compiler.passes.formulations.walk import (
    arg,
    contains,
    dtype_of,
    elements_of,
    is_cast,
    is_index_cast,
    is_op,
    live_users,
    read_by,
    require,
    same_shape,
    same_size,
    shape_of,
    strip,
    strip_ids,
    strip_views,
    strip_views_casts,
    users_through,
    view_or_cast,
    widens,
)

__all__ = ["Router", "match_router"]


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


@dataclass
class _Weighing:
    """What is done with the chosen scores on the way to the weights; `source` is what it is done with."""

    source: Node
    renormalize: bool = False
    clamp: bool = False
    eps: float = 0.0
    scale: float = 1.0
    expert_scale: Node | None = None
    seen: list[Node] = field(default_factory=list)


def _score(node: Node) -> tuple[str, Node, torch.dtype]:
    """(score function, its input, the dtype it is computed in) of a score node; "none" when it is no score."""
    if is_op(node, "softmax", "_softmax", "special_softmax"):
        rank = len(shape_of(node))
        require(arg(node, "dim") % rank == rank - 1, "softmax over another dimension than the experts", node, STAYS)
        return "softmax", node.args[0], dtype_of(node)
    if is_op(node, "sigmoid", "special_expit"):
        return "sigmoid", node.args[0], dtype_of(node)
    return "none", node, dtype_of(node)


def _widened(node: Node, score_dtype: torch.dtype) -> Node:
    """Look through a widening cast in front of a score: the score's own dtype says it all.

    A narrowing one rounds the logits, and so has a say in which experts are chosen.
    """
    while widens(node) and contains(score_dtype, dtype_of(node)):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _unwidened(node: Node) -> Node:
    """The node behind casts that change no value."""
    return strip(node, widens)


def _row_sum(node: Node, of: Node) -> tuple[bool, float] | None:
    """(clamp, eps) when `node` is sum(of, -1) as a column, plus eps or at least eps (clamp); None when it is not."""
    outermost, clamp, eps = node, False, 0.0
    while not is_op(node, "sum"):
        limited = _lower_limit(node)
        constant = is_op(node, "add") and isinstance(node.args[1], (int, float))
        if (constant or limited is not None) and eps == 0.0 and not clamp:
            clamp = limited is not None
            eps = limited if limited is not None else float(node.args[1]) * float(arg(node, "alpha"))  # type: ignore[arg-type]
        elif strip_views_casts(node) is node:
            return None
        node = node.args[0]  # type: ignore[assignment]
    rank = len(shape_of(of))
    dims = arg(node, "dim") if len(node.target._schema.arguments) > 2 else None  # type: ignore[union-attr]
    dims = [dims] if isinstance(dims, int) else dims
    if strip_views_casts(node.args[0]) is not strip_views_casts(of):  # type: ignore[arg-type]
        return None
    # Of another view of the same values (all of them in one row) the last dimension is another one.
    if not same_shape(shape_of(node.args[0]), shape_of(of)):  # type: ignore[arg-type]
        return None
    if not dims or [d % rank for d in dims] != [rank - 1]:
        return None
    shape = shape_of(outermost)
    return (clamp, eps) if len(shape) == rank and shape[-1] == 1 else None


def _lower_limit(node: Node) -> float | None:
    """The constant that `node` is clamped to from below, and from nowhere else."""
    if not is_op(node, "clamp", "clip", "clamp_min"):
        return None
    low, high = arg(node, "min"), None if is_op(node, "clamp_min") else arg(node, "max")
    return float(low) if isinstance(low, (int, float)) and high is None else None


def _constant_factor(node: Node) -> float | None:
    """The constant that a node multiplies its first operand with; a division where it is the same to the last bit."""
    if len(node.args) < 2 or not isinstance(node.args[1], (int, float)):
        return None
    if is_op(node, "mul"):
        return float(node.args[1])
    if is_op(node, "div") and node.kwargs.get("rounding_mode") is None and math.frexp(node.args[1])[0] == 0.5:
        return 1.0 / float(node.args[1])
    return None


def _of_each_expert(node: object, selection: Selection) -> Node | None:
    """The [E] numbers of which `node` holds those of the selected experts."""
    if not isinstance(node, Node):
        return None
    found = strip_views_casts(node)
    if not is_op(found, "index", "index_select", "embedding", "gather", "take"):
        return None
    source, index = found.args[0], found.args[1]
    if is_op(found, "index"):
        index = index[0] if isinstance(index, (list, tuple)) and len(index) == 1 else None  # type: ignore[assignment]
    elif is_op(found, "index_select", "gather"):
        index = found.args[2]
    numbers = isinstance(source, Node) and (len(shape_of(source)) == 1 or is_op(found, "embedding"))
    at_ids = isinstance(index, Node) and selection.is_at(index)
    if not numbers or not at_ids or not same_size(elements_of(shape_of(found)), elements_of(shape_of(selection.ids))):
        return None
    # The product promotes, so a cast that widens is not needed.
    return strip(source, lambda n: widens(n) or strip_views(n) is not n)  # type: ignore[arg-type]


def _weigh(node: Node, selection: Selection) -> _Weighing:
    """What is behind the routing weights, up to the scores of the chosen."""
    w = _Weighing(node)
    while True:
        node = w.source
        factor = _constant_factor(node)
        behind = strip_views(node)
        if is_cast(node):
            w.source = node.args[0]  # type: ignore[assignment]
        elif selection.k == 1 and behind is not node and same_size(*(elements_of(shape_of(n)) for n in (node, behind))):
            w.source = behind
        elif factor is not None:
            where = "the weights are scaled before they are renormalised"
            require(not w.renormalize, where, node, STAYS)
            w.scale *= factor
            w.source = node.args[0]  # type: ignore[assignment]
        elif is_op(node, "mul") and _factors(node, selection) is not None:
            source, numbers = _factors(node, selection)  # type: ignore[misc]
            require(
                not w.renormalize, "the experts' own scale is applied before the weights are renormalised", node, STAYS
            )
            require(w.expert_scale is None, "the weights have two scales for each expert", node, STAYS)
            w.source, w.expert_scale = source, numbers
        elif is_op(node, "div") and isinstance(node.args[1], Node) and node.kwargs.get("rounding_mode") is None:
            require(not w.renormalize, "the weights are divided twice", node, STAYS)
            found = _row_sum(node.args[1], node.args[0])  # type: ignore[arg-type]
            require(found is not None, "the weights are divided by something else than their own sum", node, STAYS)
            assert found is not None
            w.renormalize, (w.clamp, w.eps) = True, found
            w.source = node.args[0]  # type: ignore[assignment]
        else:
            return w


def _factors(node: Node, selection: Selection) -> tuple[Node, Node] | None:
    """(weights, the [E] numbers) of a product of weights with one number of the chosen expert."""
    for weights, other in (node.args[:2], node.args[1::-1]):
        numbers = _of_each_expert(other, selection)
        if numbers is not None and isinstance(weights, Node) and same_shape(shape_of(weights), shape_of(node)):
            return weights, numbers
    return None


def _chosen_of(node: Node, selection: Selection) -> tuple[Node, bool] | None:
    """(what entries it holds of, whether they are the selection's own values) when `node` holds those of the chosen."""
    if selection.has_values(node):
        return selection.operand, True
    if is_op(node, "gather", "take_along_dim"):
        source = node.args[0]
        index = node.args[2] if is_op(node, "gather") else node.args[1]
        if isinstance(source, Node) and selection.is_at(index) and is_last(arg(node, "dim"), node):  # type: ignore[arg-type]
            return source, False
    if is_op(node, "index") and len(node.args[1]) == 2 and all(isinstance(i, Node) for i in node.args[1]):  # type: ignore[arg-type]
        rows, index = node.args[1]  # type: ignore[misc]
        source = node.args[0]
        each = isinstance(source, Node) and same_shape(shape_of(rows), (shape_of(source)[0], *shape_of(rows)[1:]))  # type: ignore[arg-type]
        column = len(shape_of(rows)) == 2 and shape_of(rows)[1] == 1  # type: ignore[arg-type]
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
    name = _score(_unwidened(choice.scores if own else source))[0] if score is None else "none"
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


_COUNTS = ("histc", "bincount", "sort", "argsort")


def _only_counted(ids: Node, own: Collection[Node]) -> bool:
    """Do all users of the ids but the router's and the block's only count how often each expert is named?"""
    through = users_through(ids, lambda n: (view_or_cast(n) or is_index_cast(n)) and n not in own)
    for user in through:
        marks = is_op(user, "scatter") and not isinstance(user.args[-1], Node)
        if user not in own and not marks and not is_op(user, *_COUNTS):
            return False
    return True


def _check_order_is_free(
    weights: Node, selection: Selection, inner: Collection[Node], inside: Collection[Node] | None
) -> None:
    """An unsorted top-k is replaced by a sorted one: nothing else may read what is in the old order, or the new one.

    inside: the nodes of the block that reads weights and ids.
    """
    ids = selection.ids
    own = {*inner, selection.node, *(inside or ())}
    ordered: list[Node] = []
    pending = [user for user in selection.node.users if op_name(user) == "getitem"]
    while pending:
        node = pending.pop()
        if node not in ordered:
            ordered.append(node)
            pending += [user for user in node.users if user in inner or user is weights]
    for node in ordered:
        # Without a block to compare with, the users of weights and ids are its own.
        if (inside is None and node in (weights, ids)) or (node is ids and _only_counted(ids, own)):
            continue
        outside = [user for user in live_users(node) if user not in own and user not in ordered]
        what = "ids" if node is ids else "values"
        require(
            not outside,
            f"top-k is unsorted and its {what} are used elsewhere, in an order of their own",
            selection.node,
            STAYS,
        )


def match_router(weights: Node, ids: Node, inside: Collection[Node] | None = None) -> Router:
    """Resolve (weights [T, K], ids [T, K]) to the router that made them; raises Miss when it is another rule."""
    selection = read_selection(ids)
    w = _weigh(weights, selection)
    node = w.source
    chosen = _chosen_of(node, selection)
    if chosen is not None:
        order = "before"
        choice = _choice_of(chosen, selection, None)
        scores = choice.scores if chosen[1] else chosen[0]
        score, source, score_dtype = _score(_unwidened(scores))
        logits = _widened(source, score_dtype) if score != "none" else scores
        if score == "none":
            score_dtype = dtype_of(logits)
        chosen_dtype = score_dtype
    else:
        order = "after"
        score, source, score_dtype = _score(node)
        require(score != "none", f"the weights come from {op_name(node)}, not from the top-k's scores", node, STAYS)
        taken = _chosen_of(_widened(source, score_dtype), selection)
        require(taken is not None, "the score is not taken of the top-k's own values", node, STAYS)
        assert taken is not None
        choice = _choice_of(taken, selection, score)
        logits = choice.scores if taken[1] else taken[0]
        chosen_dtype = dtype_of(logits)
    _check_operands(weights, selection, logits, choice, w, chosen_dtype)
    raw = w.scale != 1.0 and score == "none" and choice.bias is None and choice.groups == 1
    require(not raw, "raw scores are scaled, without softmax or sigmoid", weights, STAYS)
    operands = [operand for operand in (logits, choice.bias, w.expert_scale) if operand is not None]
    inner = _between([weights, selection.ids], operands)
    _check_in_place(inner)
    if not selection.sorted:
        _check_order_is_free(weights, selection, inner, inside)
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
    weights: Node, selection: Selection, logits: Node, choice: Choice, w: _Weighing, chosen_dtype: torch.dtype
) -> None:
    """Shapes are those that the operator takes, and the choice is made in the dtype that it makes it in."""
    require(len(shape_of(logits)) == 2, "the router's scores are not [tokens, experts]", logits, STAYS)
    tokens, experts = shape_of(logits)
    rank = len(shape_of(selection.ids))
    chosen = same_size(elements_of(shape_of(selection.ids)), tokens * selection.k)
    require(rank == 2 or (rank == 1 and selection.k == 1), "weights and ids are not [T, K]", weights, STAYS)
    require(len(shape_of(weights)) == 2 and chosen, "weights and ids are not [T, K]", weights, STAYS)
    if choice.bias is not None:
        made = torch.promote_types(dtype_of(choice.scores), dtype_of(choice.bias))
        same = made == torch.promote_types(chosen_dtype, dtype_of(choice.bias))
        require(same, "the scores are widened for the choice beyond their own dtype", selection.node, STAYS)
    if w.expert_scale is not None:
        one_each = same_size(elements_of(shape_of(w.expert_scale)), experts)
        require(one_each, "the experts' own scale is not one number an expert", w.expert_scale, STAYS)
