"""One row a (token, expert) pair, sorted by expert: how tokens are brought into that order.

    perm = argsort(flat ids); rows = x[perm // k]                       (before: rows * w[perm], or x * w with k = 1)

Shared by the formulations that sort the ids. What multiplies the rows is read by `sorted_experts`, how they come home
by `sorted_home`, and what weighs them by `sorted_weights`.
"""

from __future__ import annotations

from torch.fx import Node

from moe_compiler.moe_ir import op_name
from moe_compiler.passes.formulations.base import Bindings
from moe_compiler.passes.formulations.grouped_products import check_readable, feeding, read_grouped
from moe_compiler.passes.formulations.pairs import (
    is_pair_index,
    match_choice,
    match_pair_index,
    match_pair_rows,
    match_weights,
    rows_at,
    token_rows,
)
from moe_compiler.passes.formulations.sentinels import passes
from moe_compiler.passes.formulations.sorted_weights import scaled, take
from moe_compiler.passes.formulations.walk import (
    arg,
    elements_of,
    is_op,
    require,
    same_value,
    shape_of,
    strip,
    strip_casts,
    strip_ids,
    strip_views_casts,
)

__all__ = ["dispatch", "gather_tokens", "is_token", "sort"]


def dispatch(b: Bindings) -> None:
    """The first products' rows are gathered tokens, weighted or not."""
    down = read_grouped(b.anchor)
    check_readable(b.anchor)
    assert down is not None
    first = feeding(down.rows)
    require(bool(first), "no other grouped matmul feeds the down projection", b.anchor)
    reads = [(product.rows, _unscaled(product.rows)[0]) for product in first]
    b.bind(down=down)
    gather_tokens(b, next((whole for whole, rows in reads if rows_at(rows) is not None), reads[0][0]))


def gather_tokens(b: Bindings, whole: Node) -> None:
    """`whole`, what the first products read, must be gathered tokens, weighted or not."""
    rows, column = _unscaled(whole)
    b.bind(first_rows=whole, weight_at="", weights=None, clamped=False)
    if column is not None:
        b.bind(input_weight=column[1], weighted_rows=strip_casts(column[0]))
    gathered = rows_at(rows)
    require(gathered is not None, f"the rows come from {op_name(rows)}, not from a gather of tokens", rows)
    assert gathered is not None
    b.bind(source=gathered[0], token=strip_ids(gathered[1]), rows=rows)


def _unscaled(node: Node) -> tuple[Node, tuple[Node, Node] | None]:
    """(the rows without a weight of their own, what `scaled` says of them)."""
    rows = strip(node, passes)
    found = scaled(rows)
    return (rows, None) if found is None else (strip(found[0], passes), found)


def _divides(node: Node) -> bool:
    return is_op(node, "floor_divide") or (is_op(node, "div") and arg(node, "rounding_mode") in ("floor", "trunc"))


def sort(b: Bindings) -> None:
    """The gather's index is the token of each pair, in the order of an ascending sort of the flat ids."""
    token = b.token
    perm, k, of_pairs = token, 1, False
    if _divides(token):
        require(isinstance(token.args[1], int), "the token index is not perm // k", token)
        perm, k = strip_ids(token.args[0]), token.args[1]
    elif (found := rows_at(token)) is not None:
        pair, perm = found[0], strip_ids(found[1])
        of_pairs = True
    order = _sorting(perm)
    ids = match_choice(order.args[0])
    require(len(shape_of(order.args[0])) == 1, "the ids are not sorted as one list", order)
    own = int(shape_of(ids)[-1])
    if of_pairs:
        match_pair_index(pair, own)
        k = own
    in_pair_order = token is perm
    if not in_pair_order:
        require(own == k, f"perm // {k}, but {own} experts a token", ids)
    tokens = elements_of(shape_of(ids)[:-1])
    b.bind(perm=perm, order=order, ids=ids, k=own, tokens=tokens)
    source = b.source
    if in_pair_order:
        found = scaled(strip_views_casts(source))
        if found is not None:
            require("input_weight" not in b.roles, "the rows are weighted twice", source)
            take(b, match_weights(found[1], shape_of(ids), source), "input", source)
            b.bind(weighted_rows=strip_casts(found[0]))
            source = found[0]
        b.bind(x=token_rows(source, tokens, b.rows) if own == 1 else match_pair_rows(source, tokens, own))
    else:
        b.bind(x=token_rows(source, tokens, b.rows))


def _sorting(perm: Node) -> Node:
    """The ascending sort whose permutation `perm` is."""
    if op_name(perm) == "getitem" and perm.args[1] == 1 and is_op(perm.args[0], "sort"):
        order = perm.args[0]
    else:
        require(is_op(perm, "argsort"), f"the permutation comes from {op_name(perm)}, not from a sort of the ids", perm)
        order = perm
    assert isinstance(order, Node)
    require(not arg(order, "descending"), "the ids are sorted in descending order", order)
    return order


def is_token(b: Bindings, index: Node) -> bool:
    """Is `index` [S] the token of each sorted row, in the source's own way of writing it or another one?"""
    node = strip_ids(index)
    if b.order is None or b.token is not b.perm:
        if same_value(node, b.token):
            return True
        if b.order is None:
            return False
    if _divides(node):
        return node.args[1] == b.k and same_value(strip_ids(node.args[0]), b.perm)  # type: ignore[arg-type]
    found = rows_at(node)
    if found is not None:
        return same_value(strip_ids(found[1]), b.perm) and is_pair_index(found[0], b.k)
    return b.k == 1 and same_value(node, b.perm)  # type: ignore[no-any-return]
