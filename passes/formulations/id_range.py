"""Operators of a block that are an error for an id that is no expert, and what keeps that error once they are gone.

    one_hot(ids, E)           0 .. E-1         bincount(ids)              no negative id, and E counts where E are read
    scatter(0, 1, ids, v)     0 .. E-1         bias[ids], W[ids]          -E .. E-1, index_select and gather 0 .. E-1

moepdl::experts gives such a choice nothing, in silence. Eager raises, and so does Inductor, which keeps the check of
whatever operator it decomposes. So where nothing shows that the ids lie inside, raising states it as an assertion of
its own, with the operator's name and the user's line. Operators that are no error for other ids (a comparison with each
expert's number, histc) need none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch.fx import Node

from moe_compiler.moe_ir import Match, op_name, user_line
from moe_compiler.passes.formulations.pairs import in_range, keeps_values_of
from moe_compiler.passes.formulations.walk import arg, is_op, shape_of

__all__ = ["IdCheck", "id_checks"]

_SCATTERS = ("scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_")


@dataclass(frozen=True)
class IdCheck:
    """`node` is an error for an id that is not in low .. high."""

    node: Node
    low: int
    high: int

    @property
    def message(self) -> str:
        where = user_line(self.node).partition(": ")[0]
        at = f" (at {where})" if where else ""
        return f"{op_name(self.node)}: an expert's id is not in {self.low}..{self.high}{at}"


def id_checks(match: Match, inner: Iterable[Node]) -> list[IdCheck]:
    """The checks that the operators `inner` of a block make of its ids, one of each range; none that cannot fail."""
    found: dict[tuple[int, int], IdCheck] = {}
    for node in inner:
        read = _reads_ids(node)
        if read is None:
            continue
        index, low, high = read
        if low < 0 and match.ids_of_any_range:
            continue  # raising gathers by these ids itself
        if keeps_values_of(index, match.ids_TK) and not in_range(index, high + 1):
            found.setdefault((low, high), IdCheck(node, low, high))
    return list(found.values())


def _reads_ids(node: Node) -> tuple[Node, int, int] | None:
    """(index, lowest, highest) of an operator that takes an index of so many; None for others and for unknown sizes."""
    index: object = None
    size: object = None
    negative = False
    if is_op(node, "one_hot"):
        index, size = node.args[0], arg(node, "num_classes")
    elif is_op(node, "bincount"):
        index, size = node.args[0], arg(node, "minlength")
    elif is_op(node, *_SCATTERS, "gather", "index_select", "index_add", "index_add_"):
        dim, base = node.args[1], shape_of(node.args[0])  # type: ignore[arg-type]
        index, size = node.args[2], base[dim] if isinstance(dim, int) and base else None
    elif is_op(node, "index", "index_put", "index_put_") and len(node.args[1]) == 1:  # type: ignore[arg-type]
        index, size, negative = node.args[1][0], shape_of(node.args[0])[0], True  # type: ignore[arg-type, index]
    elif is_op(node, "embedding"):
        index, size = node.args[1], shape_of(node.args[0])[0]  # type: ignore[arg-type]
    constant = isinstance(size, int) or bool(getattr(size, "is_Integer", False))
    if not isinstance(index, Node) or not constant or int(size) <= 0:  # type: ignore[call-overload]
        return None
    return index, -int(size) if negative else 0, int(size) - 1  # type: ignore[call-overload]
