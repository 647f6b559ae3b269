"""How many (token, expert) pairs each expert gets: every usual way to count the ids, and offsets made of counts.

    histc, bincount, one_hot(ids, E).sum, a [T, E] map of the choices summed over the tokens, ones added at the ids

A map says only whether a token chose an expert, so counting one needs ids that are distinct within a token.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from moe_compiler.moe_ir import Miss, op_name
from moe_compiler.passes.formulations.pairs import are_distinct, in_range, is_counting, match_choice, rows_at
from moe_compiler.passes.formulations.walk import (
    arg,
    is_op,
    is_zeros,
    require,
    same_size,
    same_value,
    shape_of,
    strip,
    strip_ids,
    swaps_last_two,
    view_or_cast,
)

__all__ = [
    "EXACT",
    "choice_map",
    "holds_sorted_ids",
    "is_integer_cast",
    "kept_choices",
    "map_choice",
    "match_counts",
    "match_kept_counts",
    "match_offsets",
]

# Every number of an expert, and every count, is exact in these.
EXACT = (torch.int32, torch.int64, torch.float32, torch.float64)


def is_integer_cast(node: Node) -> bool:
    """A conversion that keeps counts and ids as they are: to integers, or to a floating dtype that holds them."""
    if not is_op(node, "to", "_to_copy", "type_as") or not isinstance(node.args[0], Node):
        return False
    before, after = (getattr(n.meta.get("val"), "dtype", None) for n in (node.args[0], node))
    return before in (torch.bool, *EXACT) and after in EXACT


def _behind(node: Node, *, truth: bool = False) -> Node:
    """What is behind views and conversions of zeros and ones; with `truth` also of others to truth values."""

    def through(n: Node) -> bool:
        if view_or_cast(n) or is_integer_cast(n):
            return True
        if not is_op(n, "to", "_to_copy", "type_as") or not isinstance(n.args[0], Node):
            return False
        return truth or n.meta["val"].dtype != torch.bool

    return strip(node, through)


def match_kept_counts(node: Node, kept: Node) -> int:
    """E when `node` [E] is how many tokens each expert has in the map `kept` [T, E]; a Miss when it is not."""
    counts = strip(node, lambda n: view_or_cast(n) or is_integer_cast(n))
    require(is_op(counts, "sum"), f"{op_name(counts)} does not count the choices that are kept", counts)
    require(counts.meta["val"].dtype in EXACT, f"the choices are counted in {counts.meta['val'].dtype}", counts)
    dims = arg(counts, "dim") if _has_dim(counts) else None
    over = [d % 2 for d in ([dims] if isinstance(dims, int) else dims or [])]
    source = _behind(counts.args[0], truth=True)  # type: ignore[arg-type]
    if swaps_last_two(source):
        source, over = _behind(source.args[0], truth=True), [1 - d for d in over]  # type: ignore[arg-type]
    own = source is _behind(kept, truth=True) and over == [0] and shape_of(counts)[0].is_Integer
    require(own, "the counts are not of the choices that are kept", counts)
    return int(shape_of(counts)[0])


def match_offsets(node: Node, ids: Node, sort: Node | None, kept: Node | None = None) -> tuple[int, bool]:
    """(E, clamped) when `node` [E] is where each expert's rows end among the sorted ones: cumsum of counts of `ids`.

    Ids beyond the experts may be there where they are left out of the counts: their rows are behind the last offset,
    and a grouped matmul computes nothing for them. clamped: they count as the last expert's instead.
    kept: a map [T, E] whose choices are counted in place of all.
    """
    total = strip(node, lambda n: view_or_cast(n) or is_integer_cast(n))
    require(is_op(total, "cumsum"), f"the offsets come from {op_name(total)}, not from a cumsum of counts", total)
    require(len(shape_of(total)) == 1, "the cumulated counts are not one number an expert", total)
    if kept is not None:
        return match_kept_counts(total.args[0], kept), False  # type: ignore[arg-type]
    counts = strip(total.args[0], lambda n: view_or_cast(n) or is_integer_cast(n))  # type: ignore[arg-type]
    experts = _counted(counts, ids, sort, clamps=True)
    # bincount would have another length than there are matrices.
    left_out = is_op(counts, "bincount") or (is_op(counts, "histc") and 1 < experts == arg(counts, "max") + 1)
    if not left_out:
        _check_range(ids, experts)
    return experts, left_out and _clamp(counts.args[0], experts) is not None


def match_counts(node: Node, ids: Node, sort: Node | None) -> int:
    """E when `node` [E] is how often each of 0 .. E-1 is among `ids` [T, K]; a Miss when it is something else.

    sort: the operator that sorted the ids, whose values may be counted in their place.
    """
    experts = _counted(strip(node, lambda n: view_or_cast(n) or is_integer_cast(n)), ids, sort)
    _check_range(ids, experts)
    return experts


def _check_range(ids: Node, experts: int) -> None:
    require(
        in_range(ids, experts),
        f"nothing shows that the ids lie in 0..{experts - 1}: others would shift the sorted rows",
        ids,
        f"take the ids from a top-k over {experts} scores",
    )


def _counted(counts: Node, ids: Node, sort: Node | None, *, clamps: bool = False) -> int:
    """E of `counts` [E] of the ids, as far as those lie in 0 .. E-1."""
    shape = shape_of(counts)
    if is_op(counts, "bincount"):
        experts = arg(counts, "minlength")
        require(isinstance(experts, int) and experts > 0, "bincount has no minlength: the counts' size is data", counts)
        require(arg(counts, "weights") is None, "the ids are counted with weights", counts)
        _check_ids(counts.args[0], ids, sort, counts, experts if clamps else None)
        return experts  # type: ignore[no-any-return]
    require(len(shape) == 1 and shape[0].is_Integer, "the counts are not one number an expert", counts)
    experts = int(shape[0])
    if is_op(counts, "histc"):
        _histogram(counts)
        _check_ids(counts.args[0], ids, sort, counts, experts if clamps else None)
    elif is_op(counts, "sum"):
        _summed(counts, ids)
    elif is_op(counts, "scatter_add", "index_add", "index_put"):
        _added(counts, ids, sort)
    else:
        raise Miss(f"{op_name(counts)} does not count the ids", counts)
    return experts


def _clamp(node: object, experts: int) -> Node | None:
    """The clamp of ids to 0 .. E-1 behind counted numbers, None without one; a Miss for one to another range."""
    source = strip(node, lambda n: view_or_cast(n) or is_integer_cast(n)) if isinstance(node, Node) else None
    if not is_op(source, "clamp", "clamp_", "clip", "clip_", "clamp_max"):
        return None
    assert source is not None
    low, high = (None if is_op(source, "clamp_max") else arg(source, "min")), arg(source, "max")
    whole = high == experts - 1 and low in (None, 0)
    require(whole, f"the counted ids are clamped to {low}..{high}, not to 0..{experts - 1}", source)
    return source


def _histogram(counts: Node) -> None:
    """histc with one bin a number; with `max=E` the bins are [e, e+1), which is the same for ids below E."""
    bins, low, high = (arg(counts, name) for name in ("bins", "min", "max"))
    whole = low == 0 and high in (bins - 1, bins)
    require(whole, f"the histogram has {bins} bins over {low}..{high}, not one for each id", counts)


def _check_ids(node: object, ids: Node, sort: Node | None, where: Node, clamped_to: int | None = None) -> None:
    """`node` must hold the ids, in any order; clamped to 0 .. clamped_to - 1 where that is given."""
    if not isinstance(node, Node):
        raise Miss("constants are counted", where)
    clamp = _clamp(node, clamped_to) if clamped_to is not None else None
    source = strip(clamp.args[0] if clamp is not None else node, lambda n: view_or_cast(n) or is_integer_cast(n))  # type: ignore[arg-type]
    rounded = is_op(source, "to", "_to_copy", "type_as") and source.meta["val"].dtype not in EXACT
    require(not rounded, f"the ids are rounded to {source.meta['val'].dtype} before they are counted", source)
    require(
        holds_sorted_ids(source, ids, sort)
        or strip_ids(source) is strip_ids(ids)
        or same_value(strip_ids(source), strip_ids(ids)),
        "the counts are not of the sorted ids",
        where,
    )


def holds_sorted_ids(node: Node, ids: Node, sort: Node | None) -> bool:
    """Is `node` what `sort` sorted the ids to: its own values, or the flat ids at its permutation?"""
    source = strip_ids(node)
    if sort is None:
        return False
    if op_name(source) == "getitem" and source.args[1] == 0 and source.args[0] is sort:
        return True
    found = rows_at(source)
    return found is not None and _is_permutation(found[1], sort) and strip_ids(found[0]) is strip_ids(ids)


def _is_permutation(index: object, sort: Node) -> bool:
    if not isinstance(index, Node):
        return False
    node = strip_ids(index)
    return node is sort or (op_name(node) == "getitem" and node.args[1] == 1 and node.args[0] is sort)


def _summed(counts: Node, ids: Node) -> None:
    """A one-hot encoding or a map of the choices, summed over everything but the experts."""
    experts = shape_of(counts)[0]
    node = counts
    while is_op(node, "sum"):
        require(node.meta["val"].dtype in EXACT, f"the ids are counted in {node.meta['val'].dtype}", node)
        source = node.args[0]
        rank = len(shape_of(source))
        dims = arg(node, "dim") if _has_dim(node) else None
        dims = [dims] if isinstance(dims, int) else dims
        over = {d % rank for d in dims} if dims else set(range(rank))
        turned = _behind(source, truth=True)  # type: ignore[arg-type]
        if rank == 2 and swaps_last_two(turned):
            source, over = turned.args[0], {1 - d for d in over}
        require(rank - 1 not in over, "the encoding of the ids is summed over the experts", node)
        node = _behind(source)
        last = shape_of(node)[-1:]
        require(bool(last) and same_size(last[0], experts), "the encoding of the ids is reshaped before the sum", node)
    if not _is_one_hot(_behind(node, truth=True), ids):
        choice_map(node, ids)


def _has_dim(node: Node) -> bool:
    return any(argument.name == "dim" for argument in node.target._schema.arguments)


def _is_one_hot(node: Node, ids: Node) -> bool:
    """one_hot(ids), or ids[..., None] == arange(E)."""
    if is_op(node, "one_hot"):
        require(strip_ids(node.args[0]) is strip_ids(ids), "another choice is encoded", node)
        return True
    if is_op(node, "eq") and isinstance(node.args[1], Node):
        for chosen, numbers in (node.args[:2], node.args[1::-1]):
            flat = strip_ids(numbers)
            column = shape_of(chosen)[-1:] == (1,)
            if is_counting(flat) and len(shape_of(flat)) == 1 and column and strip_ids(chosen) is strip_ids(ids):
                return True
    return False


def map_choice(node: Node) -> Node:
    """The ids [T, K] whose map `node` [T, E] is, whatever it holds: the index of the scatter behind it."""
    behind = _behind(node, truth=True)
    if is_op(behind, "sum", "any", "amax"):
        behind = _behind(behind.args[0], truth=True)  # type: ignore[arg-type]
    index = behind.args[2] if is_op(behind, "scatter") else behind.args[0] if is_op(behind, "one_hot") else None
    if not isinstance(index, Node):
        raise Miss(f"{op_name(behind)} does not make a map of the choices", behind)
    return match_choice(index)


def kept_choices(node: Node) -> Node | None:
    """The map of all choices of which `node` [T, E] keeps some: map & mask, in any order; None for another map."""
    kept = _behind(node, truth=True)
    if not is_op(kept, "logical_and", "bitwise_and", "__and__", "mul"):
        return None
    for operand in kept.args[:2]:
        try:
            choice_map(operand, map_choice(operand))  # type: ignore[arg-type]
        except Miss:
            continue
        return operand  # type: ignore[return-value]
    return None


def choice_map(node: Node, ids: Node) -> None:
    """`node` [T, E] must be 1 (or True) where a token chose an expert and 0 elsewhere; a Miss when it is not."""
    node = _behind(node, truth=True)
    if is_op(node, "sum", "any", "amax"):
        source = _behind(node.args[0], truth=True)
        rank = len(shape_of(source))
        dims = arg(node, "dim") if _has_dim(node) else None
        dims = [dims] if isinstance(dims, int) else dims
        inner = rank == 3 and dims is not None and [d % rank for d in dims] == [1]
        if inner and _is_one_hot(source, ids):
            _check_distinct(node, ids)
            return
    require(is_op(node, "scatter"), f"{op_name(node)} does not make a map of the choices", node)
    base, dim, index, value = node.args[:4]
    require(isinstance(base, Node) and is_zeros(_behind(base, truth=True)), "the map does not start as zeros", node)
    require(not _has_reduce(node) or arg(node, "reduce") is None, "the map is reduced into", node)
    require(dim in (1, -1) and len(shape_of(node)) == 2, "the map is not [T, E]", node)
    require(isinstance(index, Node) and strip_ids(index) is strip_ids(ids), "the map holds another choice", node)
    require(_is_ones(value), "the map does not hold ones", node)
    _check_distinct(node, ids)


def _is_ones(value: object) -> bool:
    """The number one, or a tensor of ones."""
    if not isinstance(value, Node):
        return value == 1
    made = strip(value, lambda n: view_or_cast(n) or is_integer_cast(n) or is_op(n, "expand"))
    filled = is_op(made, "full", "full_like", "new_full") and arg(made, "fill_value") == 1
    return filled or is_op(made, "ones_like", "ones", "new_ones")


def _has_reduce(node: Node) -> bool:
    return any(argument.name == "reduce" for argument in node.target._schema.arguments)


def _check_distinct(node: Node, ids: Node) -> None:
    require(
        are_distinct(ids),
        "a map of the choices counts an expert once a token, and nothing shows that a token chooses it only once",
        node,
        "take the ids from a top-k, or count them with bincount",
    )


def _added(counts: Node, ids: Node, sort: Node | None) -> None:
    """Ones added at the ids to zeros."""
    require(is_zeros(counts.args[0]), "the counts do not start at zero", counts)
    if is_op(counts, "index_put"):
        require(arg(counts, "accumulate"), "ones are written at the ids, not added", counts)
        indices = counts.args[1]
        index, value = indices[0], counts.args[2]
    else:
        index, value = counts.args[2], counts.args[3]
        scaled = is_op(counts, "index_add") and arg(counts, "alpha") != 1
        require(not scaled, "the counts are scaled (alpha)", counts)
    require(_is_ones(value), "other numbers than ones are added at the ids", counts)
    _check_ids(index, ids, sort, counts)
