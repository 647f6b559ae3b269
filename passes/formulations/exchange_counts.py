"""How many rows each rank sends and gets: the exchange of counts that a model makes ahead of that of its rows.

    theirs = all_to_all(counts)        [R, E / R] of [E]: how many rows each rank has for each own expert
    given = counts.view(R, E / R).sum(1).tolist();  received = theirs.view(R, E / R).sum(1).tolist()

The experts of a rank are neighbours. `received` may also be an exchange of its own, of the numbers `given`.
"""

from __future__ import annotations

from torch.fx import Node

from moe_compiler.moe_ir import Miss, op_name
from moe_compiler.passes.formulations.collectives import AllToAll, arrival
from moe_compiler.passes.formulations.counts import EXACT, is_integer_cast
from moe_compiler.passes.formulations.walk import (
    arg,
    is_op,
    require,
    same_value,
    shape_of,
    strip,
    strip_views,
    view_or_cast,
)

__all__ = ["bare", "counted_per_rank", "exchanged_counts", "is_theirs", "local_counts", "numbers_of", "rank_major"]

_CONTIGUOUS = "place neighbouring experts on a rank: rank r has the experts r * E / R and those behind it"


def bare(node: Node) -> Node:
    """What is behind views, copies to another device and conversions between exact dtypes."""
    return strip(node, lambda n: view_or_cast(n) or is_integer_cast(n))


def numbers_of(sizes: tuple[object, ...], what: str, where: Node) -> Node:
    """The tensor [n] of which a list of sizes has the numbers, read one after the other."""
    source: Node | None = None
    for place, size in enumerate(sizes):
        require(isinstance(size, Node), f"the list of how many rows {what} holds constants", where)
        item = size.args[0] if is_op(size, "item", "_local_scalar_dense") else None  # type: ignore[attr-defined]
        if not isinstance(item, Node):
            raise Miss(f"how many rows {what} comes from {op_name(size)}, not from counts", size)  # type: ignore[arg-type]
        if is_op(item, "select") and item.args[1] in (0, -1):
            found, at = item.args[0], item.args[2]
        elif op_name(item) == "getitem" and is_op(item.args[0], "unbind"):
            found, at = item.args[0].args[0], item.args[1]  # type: ignore[union-attr]
        elif len(sizes) == 1 and shape_of(item) in ((), (1,)):
            found, at = item, 0
        else:
            raise Miss(f"how many rows {what} comes from {op_name(item)}, not from counts", item)
        require(at == place, f"rank {place} is given the number of rank {at} in the list of how many rows {what}", item)
        require(source is None or found is source, f"the list of how many rows {what} is of different counts", item)
        source = found  # type: ignore[assignment]
    if source is None:
        raise Miss(f"the list of how many rows {what} is empty", where)
    return source


def _summed(node: Node, dim: int, what: str) -> Node:
    """The matrix of which `node` is the sum over one dimension."""
    require(is_op(node, "sum"), f"{what} come from {op_name(node)}, not from a sum of counts", node)
    require(node.meta["val"].dtype in EXACT, f"{what} are summed in {node.meta['val'].dtype}", node)
    matrix = node.args[0]
    assert isinstance(matrix, Node)
    dims = arg(node, "dim") if any(a.name == "dim" for a in node.target._schema.arguments) else None  # type: ignore[union-attr]
    dims = [dims] if isinstance(dims, int) else list(dims or [])
    known = len(shape_of(matrix)) == 2 and len(dims) == 1
    require(known, f"{what} are not summed over one dimension of a matrix of counts", node)
    require(dims[0] % 2 == dim, f"{what} are summed over the wrong dimension of the counts", node, _CONTIGUOUS)
    return matrix


def rank_major(matrix: Node, ranks: int, local: int, what: str) -> Node:
    """The counts, flat or not, that a matrix [R, E / R] is a view of: row r for rank r, its experts in their order."""
    shape = shape_of(matrix)
    require(shape == (ranks, local), f"{what} are counted as {shape}, not as {(ranks, local)}", matrix, _CONTIGUOUS)
    source = bare(matrix)
    require(not is_op(source, "t", "transpose", "permute"), f"{what} are counted in another order", source, _CONTIGUOUS)
    return source


def counted_per_rank(node: Node, ranks: int, local: int, what: str) -> Node:
    """The counts [E] of which `node` [R] has the sums of each rank's experts."""
    node = bare(node)
    if local == 1 and not is_op(node, "sum"):
        return node
    return rank_major(_summed(node, 1, what), ranks, local, what)


def exchanged_counts(node: Node, exchange: AllToAll, each: int) -> AllToAll:
    """The exchange that brought counts, `each` numbers from and to each rank, in the group of the rows' exchange."""
    found = arrival(bare(node), "how many rows come from each rank")
    whole = shape_of(found.sent)[:1]
    ranks = len(exchange.given)
    sizes = {(), (each,) * ranks if whole == (ranks * each,) else (1,) * ranks}
    equal = found.received in sizes and found.given in sizes and whole in ((ranks * each,), (ranks,))
    require(equal, "the counts are not exchanged in equal parts, one a rank", found.node)
    require(
        found.group == exchange.group,
        f"the counts are exchanged in group {found.group}, the rows in group {exchange.group}",
        found.node,
    )
    return found


def local_counts(node: Node, theirs: AllToAll, ranks: int, local: int) -> None:
    """`node` [E / R] must be how many rows each own expert gets: what all ranks counted, summed over the ranks."""
    what = "the rows of each own expert"
    counts = bare(node)
    if ranks == 1 and not is_op(counts, "sum"):
        require(is_theirs(counts, theirs), f"{what} are not those that were exchanged", counts)
        return
    if local == 1 and is_op(counts, "sum") and len(shape_of(counts.args[0])) == 1:  # type: ignore[arg-type]
        matrix = counts.args[0]
    else:
        matrix = _summed(counts, 0, what)
        rank_major(matrix, ranks, local, what)
    require(is_theirs(matrix, theirs), f"{what} are not those that were exchanged", counts)  # type: ignore[arg-type]


def is_theirs(node: Node, theirs: AllToAll) -> bool:
    """Is `node` what the exchange of counts brought, in the order in which it came?"""
    try:
        found = arrival(bare(node), "")
    except Miss:
        return False
    return found.node is theirs.node or same_value(strip_views(found.node), theirs.node)
