"""Rows that came rank by rank, brought into the order of the experts that they are for, and back.

numbered   begin[seg] + arange(n) - start[seg],  seg = repeat_interleave(arange(E), counts in the experts' order)
sorted     argsort(repeat_interleave(arange(E / R) of every rank, counts as they came))
in parts   cat of the parts of a split by the counts, in the experts' order
"""

from __future__ import annotations

from torch.fx import Node

from moe_compiler.moe_ir import Miss, op_name
from moe_compiler.passes.formulations.collectives import AllToAll
from moe_compiler.passes.formulations.exchange_counts import bare, is_theirs, numbers_of
from moe_compiler.passes.formulations.pairs import is_counting, rows_at
from moe_compiler.passes.formulations.walk import (
    arg,
    is_op,
    require,
    same_value,
    shape_of,
    strip_ids,
    strip_views_casts,
    swaps_last_two,
)

__all__ = ["check_expert_major", "check_parts", "parts_put_together"]

_SORT = "sort the rows by the number of the own expert that each is for, or see the example of exchanged_rows"


def check_expert_major(index: Node, theirs: AllToAll, ranks: int, local: int) -> None:
    """`index` must bring rows that lie rank by rank into the order of the experts; a Miss when it may not."""
    node = strip_ids(index)
    if is_op(node, "argsort") or (op_name(node) == "getitem" and node.args[1] == 1 and is_op(node.args[0], "sort")):
        _sorted(node, theirs, ranks, local)
    elif is_op(node, "add", "sub"):
        _numbered(node, theirs, ranks, local)
    else:
        raise Miss(f"the rows of each expert are brought together by {op_name(node)}, which has no rule", node, _SORT)


# Sorted


def _sorted(node: Node, theirs: AllToAll, ranks: int, local: int) -> None:
    order = node if is_op(node, "argsort") else node.args[0]
    assert isinstance(order, Node)
    require(not arg(order, "descending"), "the own experts are sorted in descending order", order)
    each = strip_ids(order.args[0])  # type: ignore[arg-type]
    repeated = is_op(each, "repeat_interleave") and isinstance(arg(each, "repeats"), Node)
    require(repeated, f"what the rows are sorted by comes from {op_name(each)}, not from counts", each, _SORT)
    require(is_theirs(arg(each, "repeats"), theirs), "the rows are sorted by other counts than came with them", each)
    numbers = strip_ids(each.args[0])  # type: ignore[arg-type]
    require(
        _own_numbers(numbers, ranks, local),
        "the rows are not sorted by the number of the own expert that each is for",
        numbers,
        _SORT,
    )


def _own_numbers(node: Node, ranks: int, local: int) -> bool:
    """0 .. E/R - 1, once for each rank: arange(E / R).repeat(R), .expand(R, -1), arange(E) % (E / R)."""
    if shape_of(node) not in ((ranks * local,), (ranks, local)):
        return False
    if is_op(node, "remainder", "fmod"):
        return node.args[1] == local and is_counting(strip_ids(node.args[0]))  # type: ignore[arg-type]
    if is_op(node, "repeat", "tile", "expand", "broadcast_to"):
        source = strip_ids(node.args[0])  # type: ignore[arg-type]
        return is_counting(source) and shape_of(source) == (local,)
    return ranks == 1 and is_counting(node)


# Numbered


def _numbered(node: Node, theirs: AllToAll, ranks: int, local: int) -> None:
    """A row's place is where its segment begins among the rows as they came, plus its number in the segment."""
    shape = "the rows' places are not begin[seg] + arange - start[seg]"
    terms = _terms(node, 1)
    gathers = [(sign, rows_at(term)) for sign, term in terms if not is_counting(term)]
    counting = [sign for sign, term in terms if is_counting(term)]
    require(counting == [1] and all(found is not None for _, found in gathers), shape, node, _SORT)
    segments = strip_ids(gathers[0][1][1])  # type: ignore[index]
    same = all(same_value(strip_ids(found[1]), segments) for _, found in gathers)  # type: ignore[index]
    require(same, "the rows' places are made of several segments", node, _SORT)
    lengths = _segments(segments, theirs, ranks, local)
    sums = {"begin": 0, "start": 0, "length": 0}
    for sign, found in gathers:
        for own, what in _known_terms(found[0], sign, lengths, theirs, ranks, local):  # type: ignore[index]
            sums[what] += own
    # A segment begins where the counts up to and with its own end, less its own: in both orders, so these cancel.
    require(sums == {"begin": 1, "start": -1, "length": 0}, shape, node, _SORT)


def _terms(node: Node, sign: int) -> list[tuple[int, Node]]:
    """The signed terms of nested sums and differences of tensors; (sign, node) itself for anything else."""
    node = bare(node)
    plain = is_op(node, "add", "sub") and all(isinstance(a, Node) for a in node.args[:2]) and arg(node, "alpha") == 1
    if not plain:
        return [(sign, node)]
    left, right = node.args[:2]
    return [*_terms(left, sign), *_terms(right, sign if is_op(node, "add") else -sign)]  # type: ignore[arg-type]


def _segments(node: Node, theirs: AllToAll, ranks: int, local: int) -> Node:
    """The lengths [E] of the segments, in the experts' order, when `node` has the number of each row's segment."""
    known = is_op(node, "repeat_interleave") and isinstance(arg(node, "repeats"), Node)
    known = known and is_counting(strip_ids(node.args[0]))  # type: ignore[arg-type]
    require(known, f"the segments come from {op_name(node)}, not from repeat_interleave(arange, counts)", node, _SORT)
    lengths = bare(arg(node, "repeats"))
    matrix = _by_rank(lengths, ranks, local)
    require(
        matrix is not None and is_theirs(matrix, theirs),
        "the segments are not as long as the counts that came with the rows, in the order of the experts",
        node,
        _SORT,
    )
    return lengths


def _by_rank(node: Node, ranks: int, local: int) -> Node | None:
    """The matrix [R, E / R] whose transpose `node` is, None when it is none."""
    if not swaps_last_two(node):
        return None
    matrix = node.args[0]
    return matrix if shape_of(matrix) == (ranks, local) else None  # type: ignore[arg-type, return-value]


def _known_terms(
    node: Node, sign: int, lengths: Node, theirs: AllToAll, ranks: int, local: int
) -> list[tuple[int, str]]:
    """What is added up to the places of segments: their ends as they came, their ends in order, their lengths."""
    found: list[tuple[int, str]] = []
    for own, term in _terms(node, sign):
        matrix = _by_rank(term, ranks, local)
        if matrix is not None:
            for inner, part in _terms(matrix, own):
                of_theirs = is_op(part, "cumsum") and _along(part) and is_theirs(part.args[0], theirs)  # type: ignore[arg-type]
                require(
                    of_theirs or is_theirs(part, theirs),
                    "the segments' places are not made of the counts that came with the rows",
                    part,
                    _SORT,
                )
                found.append((inner, "begin" if of_theirs else "length"))
            continue
        ends = is_op(term, "cumsum") and _along(term) and same_value(bare(term.args[0]), lengths)  # type: ignore[arg-type]
        require(ends, "the segments' places are not made of the counts that came with the rows", term, _SORT)
        found.append((own, "start"))
    return found


def _along(total: Node) -> bool:
    """Is a cumulated sum one over a list?"""
    return len(shape_of(total)) == 1 and arg(total, "dim") in (0, -1)


# In parts


def parts_put_together(node: Node) -> tuple[Node, tuple[object, ...], list[int]] | None:
    """(rows, sizes, order) when `node` is cat([split(rows, sizes)[i] for i in order]); None for anything else."""
    node = strip_views_casts(node)
    if not is_op(node, "cat", "concat") or arg(node, "dim") != 0 or not isinstance(node.args[0], (list, tuple)):
        return None
    split: Node | None = None
    order: list[int] = []
    for part in node.args[0]:
        if (
            not isinstance(part, Node)
            or op_name(part) != "getitem"
            or (split is not None and part.args[0] is not split)
        ):
            return None
        split = part.args[0]  # type: ignore[assignment]
        order.append(part.args[1])  # type: ignore[arg-type]
    if not is_op(split, "split_with_sizes", "split") or not isinstance(split.args[1], (list, tuple)):  # type: ignore[union-attr]
        return None
    assert split is not None
    whole = arg(split, "dim") == 0 and sorted(order) == list(range(len(split.args[1])))
    return (split.args[0], tuple(split.args[1]), order) if whole else None  # type: ignore[return-value]


def check_parts(
    there: tuple[tuple[object, ...], list[int]],
    back: tuple[tuple[object, ...], list[int]],
    theirs: AllToAll,
    ranks: int,
    local: int,
    where: Node,
) -> None:
    """Parts of the rows as they came, put together expert by expert, and on the way back rank by rank again.

    there, back: the sizes of a split and the order in which its parts are put together. A size is the count of one
    rank's rows for one expert.
    """
    sizes, order = there
    expert_major = [rank * local + expert for expert in range(local) for rank in range(ranks)]
    require(order == expert_major, "the parts of the rows are not put together expert by expert", where, _SORT)
    counted = numbers_of(sizes, "come from each rank for each expert", where)
    require(is_theirs(counted, theirs), "the rows are split by other counts than came with them", where)
    sizes_back, order_back = back
    rank_major = [expert * ranks + rank for rank in range(ranks) for expert in range(local)]
    require(order_back == rank_major, "the parts of the rows go back in another order than they came", where)
    if sizes_back != tuple(sizes[at] for at in expert_major):
        matrix = _by_rank(bare(numbers_of(sizes_back, "go back", where)), ranks, local)
        own = matrix is not None and is_theirs(matrix, theirs)
        require(own, "the rows that go back are split by other counts than those that came", where)
