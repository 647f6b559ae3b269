"""(token, expert) pairs before any sorting: pair p = t * K + j holds the j-th choice of token t.

What brings tokens into pair order (each row K times), what flattens ids and weights into it, and which [T, K] node
is behind a flattened one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import sympy
from torch.fx import Node

from moe_compiler.moe_ir import Miss, op_name
from moe_compiler.passes.formulations.walk import (
    arg,
    dtype_of,
    elements_of,
    is_index_cast,
    is_op,
    is_written,
    item_of,
    matrix_behind,
    require,
    same_shape,
    same_size,
    shape_of,
    strip_ids,
    strip_views,
    strip_views_casts,
    view_or_cast,
    view_or_widening,
)

__all__ = [
    "are_distinct",
    "in_range",
    "is_counting",
    "is_pair_index",
    "keeps_values_of",
    "match_choice",
    "match_ids",
    "match_pair_index",
    "match_pair_rows",
    "match_weights",
    "nearest_source",
    "pairs_matrix",
    "row_index",
    "rows_at",
    "token_rows",
]


def pairs_matrix(node: Node, tokens: sympy.Expr, k: int, through: Callable[[Node], bool]) -> Node | None:
    """The [T, k] node behind a flattened or unsqueezed one; the deepest one with last dimension k when none is 2-D."""
    found = matrix_behind(node, (tokens, sympy.Integer(k)), through)
    if found is not None:
        return found
    while through(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    shape = shape_of(node)
    fits = len(shape) > 2 and shape[-1] == k and same_size(elements_of(shape), tokens * k)
    return node if fits else None


def match_ids(index: Node, experts: int) -> tuple[Node, bool]:
    """(the [T, k] ids behind the index of a gather of expert weights, is it known that they lie in 0 .. E-1).

    Where it is not, raising must say what the gather does with the others: our operator lets them contribute nothing.
    A clamp to 0 .. E-1 of a flat index is looked through only where it changes nothing: a clamped gather runs the last
    expert for what is outside.
    """
    node = strip_ids(index)
    if is_op(node, "clamp", "clip", "clamp_max", "clamp_min"):
        if len(shape_of(node)) > 1 and not in_range(node.args[0], experts):
            return match_choice(index), in_range(node, experts)
        limits = [arg(node, name) for name in ("min", "max") if _has(node, name)]
        clamp, node = node, strip_ids(node.args[0])
        require(
            all(limit in (None, 0, experts - 1) for limit in limits),
            f"the ids are clamped to {limits}, not to the range of the experts",
            clamp,
        )
        require(
            in_range(node, experts),
            "the ids are clamped to the range of the experts, and nothing shows that they lie inside of it",
            clamp,
            f"an id that is not in 0..{experts - 1} would run expert {experts - 1} here and nothing once rewritten; "
            f"take the ids from a top-k over {experts} scores, or use the grouped_mm experts",
        )
        return match_choice(clamp.args[0]), True
    return match_choice(index), in_range(node, experts)


def match_choice(index: Node) -> Node:
    """The [T, K] choice of experts that `index` flattens (any rank above two is seen as [T, K] too)."""
    node = strip_ids(index)
    shape = shape_of(node)
    if len(shape) == 1:
        # An argmax [T], seen as one expert a token on the way.
        column = matrix_behind(index, (*shape, sympy.Integer(1)), lambda n: view_or_cast(n) or is_index_cast(n))
        if column is not None:
            return column
    require(
        len(shape) >= 2,
        "the ids are not a [T, K] choice of experts",
        index,
        "choose in the same graph (topk, max or argmax over the scores), or hand the ids on as [T, 1]",
    )
    require(not dtype_of(node).is_floating_point, "the experts are chosen by numbers that are no integers", node)
    require(shape[-1].is_Integer, "the number of experts a token is not a constant", node)
    found = pairs_matrix(index, elements_of(shape[:-1]), int(shape[-1]), lambda n: view_or_cast(n) or is_index_cast(n))
    return found if found is not None else node


def _has(node: Node, name: str) -> bool:
    return any(argument.name == name for argument in node.target._schema.arguments)


# Their result holds values of their first operand alone.
_KEEPS_VALUES = frozenset(
    {"slice", "select", "index", "index_select", "gather", "take_along_dim", "transpose", "t", "permute", "expand"}
    | {"repeat", "repeat_interleave", "flip", "roll", "narrow", "detach", "unbind", "chunk", "split", "sort", "mode"}
)


def in_range(ids: Node, experts: int, depth: int = 16) -> bool:
    """Is it known that all ids lie in 0 .. experts - 1: chosen among so many, drawn, clamped or reduced to them?"""
    node = strip_ids(ids)
    if depth == 0 or is_written(node):
        return False
    source = node.args[0] if node.op == "call_function" and node.args else None
    if is_op(node, "stack", "cat", "concat") and isinstance(source, (list, tuple)):
        return all(isinstance(part, Node) and in_range(part, experts, depth - 1) for part in source)
    chosen = item_of(node, 1, *_CHOOSES)
    if chosen is not None:
        return _width(chosen) <= experts
    if is_op(node, "argmax", "argmin", "argsort"):
        return _width(node) <= experts
    if is_op(node, "multinomial"):
        width = shape_of(node.args[0])[-1]
        return bool(width.is_Integer) and int(width) <= experts
    if is_op(node, "randint"):
        low = arg(node, "low") if _has(node, "low") else 0
        high = arg(node, "high")
        return isinstance(low, int) and isinstance(high, int) and 0 <= low < high <= experts
    if is_op(node, "remainder"):
        return isinstance(node.args[1], int) and 0 < node.args[1] <= experts
    if is_op(node, "clamp", "clip", "clamp_min", "clamp_max"):
        low, high = (arg(node, name) if _has(node, name) else None for name in ("min", "max"))
        if isinstance(low, int) and isinstance(high, int):
            return 0 <= low <= high < experts
        return False
    if is_op(node, *_ZEROS):
        return True
    if is_op(node, "one_hot"):
        return experts > 1  # a mask that is taken for ids (NLLB)
    if is_op(node, "masked_fill"):
        return _filled_in_range(node, experts, depth)
    if op_name(node) == "getitem" and isinstance(source, Node) and is_op(source, *_KEEPS_VALUES):
        return (node.args[1] == 0 or not is_op(source, "sort", "mode")) and in_range(source, experts, depth - 1)
    return is_op(node, *_KEEPS_VALUES) and isinstance(source, Node) and in_range(source, experts, depth - 1)


def keeps_values_of(node: Node, ids: Node, depth: int = 16) -> bool:
    """Does `node` hold values of `ids` and no others: all or some of them, in any order?"""
    node, base = strip_ids(node), strip_ids(ids)
    if node is base:
        return True
    source = node.args[0] if node.op == "call_function" and node.args else None
    if depth == 0 or not isinstance(source, Node):
        return False
    if op_name(node) == "getitem":
        kept = is_op(source, *_KEEPS_VALUES) and (node.args[1] == 0 or not is_op(source, "sort", "mode"))
        return kept and keeps_values_of(source.args[0], ids, depth - 1)  # type: ignore[arg-type]
    return is_op(node, *_KEEPS_VALUES) and keeps_values_of(source, ids, depth - 1)


def _filled_in_range(node: Node, experts: int, depth: int) -> bool:
    """masked_fill(ids, ids == E, v), and with ids >= E: a choice that stands for no expert becomes expert v."""
    ids, mask, value = strip_ids(node.args[0]), node.args[1], node.args[2]
    if not (isinstance(value, int) and 0 <= value < experts):
        return False
    if in_range(ids, experts, depth - 1):
        return True
    mask = strip_views(mask) if isinstance(mask, Node) else mask
    if not is_op(mask, "eq", "ge") or strip_ids(mask.args[0]) is not ids or mask.args[1] != experts:
        return False
    return in_range(ids, experts + 1 if is_op(mask, "eq") else 2**31, depth - 1)


_CHOOSES = ("topk", "sort", "max", "min", "kthvalue", "mode")
_ZEROS = ("zeros", "zeros_like", "new_zeros")


def _width(choice: Node) -> float:
    """Over how many scores an operator with a `dim` chooses; infinite when it is not a constant."""
    dim = arg(choice, "dim") if _has(choice, "dim") else None
    shape = shape_of(choice.args[0])
    width = shape[dim] if isinstance(dim, int) and shape else None
    return int(width) if width is not None and width.is_Integer else float("inf")


def are_distinct(ids: Node) -> bool:
    """Is it known that no token chooses an expert twice: one choice a token, or a top-k that nobody wrote into?

    A sort over the experts, or some of its columns, is as good as a top-k.
    """
    if shape_of(ids)[-1] == 1:
        return True
    source = strip_ids(ids)
    if is_written(source):
        return False
    while is_op(source, "slice", "narrow") and _is_last(arg(source, "dim"), source):
        source = strip_ids(source.args[0])
    chosen = item_of(source, 1, "topk", "sort")
    chosen = source if chosen is None and is_op(source, "argsort") else chosen
    return chosen is not None and _is_last(arg(chosen, "dim"), chosen.args[0])


def _is_last(dim: int, tensor: Node) -> bool:
    return dim % len(shape_of(tensor)) == len(shape_of(tensor)) - 1


def match_weights(weight: Node, shape: Sequence[sympy.Expr], node: Node) -> Node:
    """The [T, k] routing weights behind the operand of a product; `node` is the product, for the reader.

    shape: (T, k), or that of the ids. With one expert a token they may be [T] where nothing on the way is [T, 1]. A
    cast that rounds them is not looked through: the operator takes weights of any floating dtype.
    """
    found = _column_behind(weight, elements_of(shape)) if shape[-1] == 1 else None
    if found is None:
        found = pairs_matrix(weight, elements_of(shape[:-1]), int(shape[-1]), view_or_widening)
    require(found is not None, "the routing weights are not one number a (token, expert) pair", node)
    assert found is not None
    return nearest_source(found, view_or_widening)


def _column_behind(node: Node, tokens: sympy.Expr) -> Node | None:
    """The farthest node behind views and widening casts that is [T] or [T, 1]: of views that a loop writes anew."""
    found = None
    while True:
        if same_shape(shape_of(node), (tokens,)) or same_shape(shape_of(node), (tokens, sympy.Integer(1))):
            found = node
        if not view_or_widening(node) or not isinstance(node.args[0], Node):
            return found
        node = node.args[0]


def is_counting(node: Node) -> bool:
    """arange that counts 0, 1, 2, ..."""
    if not is_op(node, "arange"):
        return False
    return all(
        argument.name not in ("start", "step") or arg(node, argument.name) == (0 if argument.name == "start" else 1)
        for argument in node.target._schema.arguments
    )


def _doubled(node: Node, k: int) -> Node | None:
    """The node whose entries (rows) `node` repeats k times each, neighbours together; None for anything else."""
    if is_op(node, "repeat_interleave"):
        source = node.args[0]
        if not isinstance(arg(node, "repeats"), int) or arg(node, "repeats") != k:
            return None
        flat = len(shape_of(source)) == 1
        return source if arg(node, "dim") == 0 or (arg(node, "dim") is None and flat) else None
    if is_op(node, "expand", "expand_as", "repeat", "broadcast_to", "tile"):
        source = node.args[0]
        before, after = shape_of(source), shape_of(node)
        inserted = len(before) == len(after) >= 2 and before[1] == 1 and after[1] == k
        if inserted and same_shape((before[0], *before[2:]), (after[0], *after[2:])):
            return source
    return None


def rows_at(node: Node) -> tuple[Node, Node] | None:
    """(source, index) when `node` is source[index] along the first dimension, in any spelling; else None."""
    if is_op(node, "index"):
        indices = node.args[1]
        return (node.args[0], indices[0]) if len(indices) == 1 and isinstance(indices[0], Node) else None  # type: ignore[return-value]
    if is_op(node, "index_select"):
        return (node.args[0], node.args[2]) if arg(node, "dim") == 0 else None  # type: ignore[return-value]
    if is_op(node, "gather", "take_along_dim"):
        index = node.args[2] if is_op(node, "gather") else node.args[1]
        column = row_index(index, node.args[0])  # type: ignore[arg-type]
        return (node.args[0], column) if arg(node, "dim") == 0 and column is not None else None  # type: ignore[return-value]
    return None


def row_index(index: Node, of: Node, rows: sympy.Expr | None = None) -> Node | None:
    """The index [S], or [S, 1], of whole rows of `of` [T, H] behind one for each element: index[:, None].expand(-1, H).

    None when it is something else: one that is narrower than the rows leaves out the columns beyond it. rows: how many
    there are by what the caller knows, where the size that the index is expanded to comes from the data.
    """
    if len(shape_of(index)) == 1:
        return index
    if is_op(index, "expand", "expand_as", "broadcast_to", "repeat", "tile"):
        source = index.args[0]
        inner, full = shape_of(source), shape_of(index)  # type: ignore[arg-type]
        column = len(inner) == len(full) == 2 and inner[1] == 1
        whole = column and (same_size(inner[0], full[0]) or (rows is not None and same_size(inner[0], rows)))
        if whole and same_size(full[1], shape_of(of)[-1]):
            flat = matrix_behind(source, inner[:1], lambda n: view_or_cast(n) or is_index_cast(n))  # type: ignore[arg-type]
            return source if flat is None else flat  # type: ignore[return-value]
    return None


def match_pair_index(node: Node, k: int) -> None:
    """`node` must be p // k for every pair p; Miss when it is not. With one expert a token that is p itself."""
    index = strip_ids(node)
    if k == 1 and is_counting(index):
        return
    if is_op(index, "floor_divide") or (is_op(index, "div") and arg(index, "rounding_mode") in ("floor", "trunc")):
        counted = strip_ids(index.args[0])
        require(index.args[1] == k and is_counting(counted), f"the token index is not arange // {k}", index)
        return
    source = _doubled(index, k)
    require(source is not None, f"{op_name(index)} does not give the token of each (token, expert) pair", index)
    require(is_counting(strip_ids(source)), "the token index does not count the tokens", index)


def is_pair_index(node: Node, k: int) -> bool:
    """Is `node` p // k for every pair p?"""
    try:
        match_pair_index(node, k)
    except Miss:
        return False
    return True


def match_pair_rows(node: Node, tokens: sympy.Expr, k: int) -> Node:
    """The [T, H] tokens that `node` holds k times each in pair order; Miss when it holds something else."""
    rows = strip_views_casts(node)
    gathered = rows_at(rows)
    if gathered is not None:
        match_pair_index(gathered[1], k)
        return token_rows(gathered[0], tokens, rows)
    source = _doubled(rows, k)
    if source is None and k == 1:
        source = node  # with its views: one of them makes the matrix of a batch of sequences
    require(source is not None, f"{op_name(rows)} does not bring the tokens into pair order", rows)
    assert source is not None
    return token_rows(source, tokens, rows)


def token_rows(node: Node, tokens: sympy.Expr, where: Node) -> Node:
    """The [T, H] matrix that `node` is, behind dimensions of size 1 and casts (raising casts once)."""
    shape = shape_of(node)
    width = next((size for size in reversed(shape) if size != 1), sympy.Integer(1))
    found = matrix_behind(node, (tokens, width), view_or_cast)
    if found is None:
        raise Miss("the tokens are not a [T, H] matrix", where)
    return nearest_source(found)


def nearest_source(node: Node, through: Callable[[Node], bool] = view_or_cast) -> Node:
    """A matrix without the casts and no-op views in front of it."""
    while through(node) and isinstance(node.args[0], Node) and same_shape(shape_of(node.args[0]), shape_of(node)):
        node = node.args[0]
    return node
