"""What the experts of an unrolled loop pick: from the mask of one expert to the tokens and choices where it is set.

    t, j = where(mask [T, K] of expert e)          nonzero and its columns, masks as numbers or truth values
    t, = where(mask [T] of expert e)               one expert a token: there is no choice to name
    x[mask], y[mask] = v                           one expert a token: the mask itself is the index

Every step looks only at the users of a mask, so the work is linear in E.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Node

from moe_compiler.moe_ir import Miss, op_name
from moe_compiler.passes.formulations.activation import Activation
from moe_compiler.passes.formulations.contraction import Product
from moe_compiler.passes.formulations.walk import (
    arg,
    is_cast,
    is_op,
    rank_of,
    require,
    same_shape,
    shape_of,
    strip_ids,
    swaps_last_two,
    view_or_cast,
)

__all__ = ["Pick", "complete", "feeds_where", "match_one_each", "picks_of_mask", "reordered"]

_WHERE = ("where", "nonzero_numpy")
_BOTH = "take both from where(ids == e), and the routing weights at both: weights[token, choice]"


@dataclass
class Pick:
    """What expert `expert` picks: `token` and `choice` index [T, K]. The rest is bound by the steps.

    choice is None where masks are [T], one expert a token; token may then be the mask itself, as truth values.
    """

    expert: int
    token: Node
    choice: Node | None
    mask: Node
    adds: Node | None = None
    rows: Node | None = None
    weight_at: str = ""
    activation: Activation | None = None
    down: Product | None = None
    first: tuple[Product, ...] = ()
    first_bias: tuple[Node | None, ...] = ()
    down_bias: Node | None = None


def reordered(node: Node, letters: str) -> str | None:
    """The order of the dimensions after a transpose of a tensor whose dimensions are `letters`; None if it is none."""
    if is_op(node, "permute"):
        return "".join(letters[d] for d in node.args[1])
    if is_op(node, "transpose", "swapaxes", "swapdims"):
        order = list(letters)
        a, b = node.args[1:3]
        order[a], order[b] = order[b], order[a]
        return "".join(order)
    if is_op(node, "movedim"):
        source, target = arg(node, "source"), arg(node, "destination")
        if isinstance(source, int) and isinstance(target, int):
            order = list(letters)
            moved = order.pop(source)
            order.insert(target % len(letters), moved)
            return "".join(order)
        return None
    return letters[:-2] + letters[-1] + letters[-2] if swaps_last_two(node) else None


def picks_of_mask(expert: int, mask: Node, letters: str) -> list[Pick]:
    """The index nodes (token, choice) that `where` makes of the mask of one expert; `letters` is "tk", "kt" or "t"."""
    masks, found = [mask], []
    while masks:
        node = masks.pop()
        for user in node.users:
            order = reordered(user, letters) if len(shape_of(user)) == len(letters) == 2 else None
            if order is not None:
                found += picks_of_mask(expert, user, order)
            elif _drops_choice(user, node, letters):
                found += picks_of_mask(expert, user, "t")
            elif _is_truth(user) or _is_same(user, node):
                masks.append(user)
            elif is_op(user, *_WHERE) and len(user.args) == 1:
                found += _pick(expert, mask, [_item(user, i) for i in range(len(letters))], letters)
            elif is_op(user, "nonzero"):
                found += _pick(expert, mask, _columns(user, len(letters)), letters)
        if letters == "t" and any(_indexes_by(user, node) for user in node.users):
            found.append(Pick(expert, node, None, mask))
    return found


def _drops_choice(user: Node, mask: Node, letters: str) -> bool:
    """A view [T] of a mask [T, 1]; `letters` name the dimensions of the mask."""
    shape = shape_of(mask)
    one = "k" in letters and shape[letters.index("k")] == 1 and len(shape_of(user)) == 1
    return one and (view_or_cast(user) or (is_op(user, "select") and letters[user.args[1]] == "k"))  # type: ignore[index]


def _indexes_by(user: Node, mask: Node) -> bool:
    """Is `mask` [T], of truth values, the one index of `user`?"""
    if not is_op(user, "index", "index_put", "index_put_") or mask.meta["val"].dtype != torch.bool:
        return False
    return len(user.args[1]) == 1 and user.args[1][0] is mask  # type: ignore[arg-type, index]


def _is_same(node: Node, source: Node) -> bool:
    """A view that changes nothing: transformers drops a dimension that is not there, mask.squeeze(0)."""
    return view_or_cast(node) and same_shape(shape_of(node), shape_of(source))


def _is_truth(node: Node) -> bool:
    """The same mask as numbers or truth values: mask.bool(), mask == 1, mask > 0, mask != 0."""
    if is_op(node, "to", "_to_copy"):
        return not node.meta["val"].dtype.is_floating_point
    return (is_op(node, "eq") and node.args[1] == 1) or (is_op(node, "gt", "ne") and node.args[1] == 0)


def _item(node: Node, index: int) -> Node | None:
    return next((user for user in node.users if op_name(user) == "getitem" and user.args[1] == index), None)


def _columns(nonzero: Node, count: int) -> list[Node | None]:
    """The columns of nonzero(mask) [N, 2], or [N, 1]."""
    for user in nonzero.users:
        if is_op(user, "unbind") and arg(user, "dim") in (1, -1):
            return [_item(user, i) for i in range(count)]
    columns: list[Node | None] = [None] * count
    for user in nonzero.users:
        if count == 1 and view_or_cast(user) and len(shape_of(user)) == 1:
            return [user]
        if is_op(user, "select") and user.args[1] in (1, -1) and isinstance(user.args[2], int):
            columns[user.args[2]] = user
        elif is_op(user, "slice") and user.args[1] in (1, -1) and shape_of(user)[1] == 1:
            for squeezed in user.users:
                if is_op(squeezed, "squeeze") and len(shape_of(squeezed)) == 1 and user.args[2] in range(count):
                    columns[user.args[2]] = squeezed  # type: ignore[call-overload]
    return columns


def _pick(expert: int, mask: Node, items: list[Node | None], letters: str) -> list[Pick]:
    by_letter = dict(zip(letters, items, strict=True))
    token, choice = by_letter["t"], by_letter.get("k")
    if token is None or (choice is None and "k" in letters):
        raise Miss(f"the mask of expert {expert} does not give both the token and the choice", mask, _BOTH)
    return [Pick(expert, token, choice, mask)]


def match_one_each(index: Node, where: Node) -> Node:
    """The ids behind `index` [T], of which masks [T] are made: one expert a token, in any shape.

    Masks of flattened ids [T * K] are of pairs, which is a Miss.
    """
    ids = strip_ids(index)
    require(shape_of(ids) != (), "the masks are of one number, not of one for each token", where)
    *lead, k = shape_of(ids)
    require(
        not lead or k == 1,
        f"the masks are of {k} flattened ids a token, so that they pick pairs and not tokens",
        where,
        "compare the ids as they are, [T, K], and take token and choice from where(ids == e)",
    )
    return ids


def complete(picks: Iterable[Pick], experts: int, anchor: Node) -> list[Pick]:
    """The picks ordered by expert; a Miss names the expert that is missing or runs twice."""
    ordered: dict[int, Pick] = {}
    for pick in picks:
        require(pick.expert not in ordered, f"expert {pick.expert} picks its tokens twice", pick.mask)
        ordered[pick.expert] = pick
    missing = [e for e in range(experts) if e not in ordered]
    names = f"expert{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing[:8]))}"
    require(
        not missing,
        f"{names} of {experts} never picks its tokens",
        anchor,
        "all experts of a block must run in one graph",
    )
    beyond = sorted(set(ordered) - set(range(experts)))
    require(not beyond, f"expert {beyond[0] if beyond else ''} does not exist among {experts}", anchor)
    return [ordered[e] for e in range(experts)]


def feeds_where(mask: Node) -> bool:
    """Does a mask, or a plain rewriting of it, go into `where` or `nonzero`, or is it an index itself?"""
    pending = [mask]
    while pending:
        node = pending.pop()
        for user in node.users:
            if is_op(user, *_WHERE, "nonzero") or _indexes_by(user, node):
                return True
            same = _is_truth(user) or is_cast(user) or _is_same(user, node)
            if same or (rank_of(node) == 2 and any(_drops_choice(user, node, order) for order in ("tk", "kt"))):
                pending.append(user)
    return False
