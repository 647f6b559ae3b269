"""An unsorted choice and its order: a raised router sorts, so nobody may read what only the old order makes right.

Top-k with sorted=False names a token's experts in an order of its own. The block does not care. Who else reads the ids
may only count them, or take them for a set.
"""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import Node

from moe_compiler.moe_ir import op_name
from moe_compiler.passes.formulations.topk import Selection, is_last
from moe_compiler.passes.formulations.walk import (
    CASTS,
    arg,
    filled_with,
    is_index_cast,
    is_op,
    live_users,
    require,
    shape_of,
    strip_ids,
    users_through,
    view_or_cast,
)

__all__ = ["check_order_is_free"]

_COUNTS = ("histc", "bincount", "sort", "argsort")
_ADDS = ("scatter", "scatter_add", "index_add", "scatter_reduce")


def _only_counted(ids: Node, own: Collection[Node], k: int) -> bool:
    """Do all users of the ids but the router's and the block's only count how often each expert is named?"""
    through = users_through(ids, lambda n: (view_or_cast(n) or is_index_cast(n)) and n not in own)
    return all(user in own or is_op(user, *_COUNTS) or _marks(user, k) or _encodes(user, k) for user in through)


def _whole_rows(ids: Node, k: int) -> bool:
    """Flat ids, or rows of one token's k: what is done with a row does not tell the order in it."""
    shape = shape_of(ids)
    return len(shape) == 1 or shape[-1:] == (k,)


def _marks(user: Node, k: int) -> bool:
    """One constant is written, or added, at each id of a row."""
    if not is_op(user, *_ADDS):
        return False
    index = arg(user, "index")
    value = next(arg(user, a.name) for a in user.target._schema.arguments if a.name in ("value", "src", "source"))
    along = len(shape_of(index)) == 1 or is_last(arg(user, "dim"), user)
    return along and _whole_rows(index, k) and filled_with(value) is not None


def _encodes(user: Node, k: int) -> bool:
    """one_hot of the ids, of which everybody takes the sum or the mean over a token's choices."""
    if not is_op(user, "one_hot") or not _whole_rows(user.args[0], k):
        return False
    choices = len(shape_of(user)) - 2
    readers = users_through(user, lambda n: is_op(n, *CASTS))
    return all(is_op(reader, "sum", "mean") and choices in _dims(reader) for reader in readers)


def _dims(node: Node) -> list[int]:
    """The dimensions that a reduction is over."""
    rank = len(shape_of(node.args[0]))
    named = any(argument.name == "dim" for argument in node.target._schema.arguments)
    dims = arg(node, "dim") if named else None
    dims = [dims] if isinstance(dims, int) else dims or range(rank)
    return [dim % rank for dim in dims]


def check_order_is_free(
    weights: Node, selection: Selection, inner: Collection[Node], inside: Collection[Node] | None
) -> None:
    """An unsorted top-k is replaced by a sorted one: nothing else may read what is in the old order, or the new one.

    inside: the nodes of the block that reads weights and ids.
    """
    ids = selection.ids
    own = {*inner, selection.node, *(inside or ())}
    ordered: list[Node] = []
    results = [user for user in selection.node.users if op_name(user) == "getitem"]
    pending = results or [selection.node]
    while pending:
        node = pending.pop()
        if node not in ordered:
            ordered.append(node)
            pending += [user for user in node.users if user in inner or user is weights]
    for node in ordered:
        # Without a block to compare with, the users of weights and ids are its own.
        named = strip_ids(node) is ids
        if (inside is None and node in (weights, ids)) or (named and _only_counted(node, own, selection.k)):
            continue
        outside = [user for user in live_users(node) if user not in own and user not in ordered]
        what = "ids" if named else "values"
        require(
            not outside,
            f"top-k is unsorted and its {what} are used elsewhere, in an order of their own",
            selection.node,
            "leave out sorted=False, or count the ids instead of reading them one by one",
        )
