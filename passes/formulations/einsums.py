"""Einsums over expert weights that torch.export has written out, as einsums again.

    bmm(view(permute(a)), view(permute(b))) -> view -> permute -> view         einsum("th,tkih->tki", x, W[ids])

An einsum becomes one batched product by merging dimensions and putting them in order, and its result is split and put
in order again. Each dimension of the product is followed through these views to the dimensions that it was merged of;
what it is then multiplied with, and which the result has, is the equation. The values are those of the views: an
einsum is written out in the same way when it runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from string import ascii_lowercase

import sympy
from torch import ops
from torch.fx import Graph, Node

from moe_compiler.graph_pass import insert
from moe_compiler.passes.formulations.walk import arg, is_op, same_size, shape_of, strip, strip_casts

__all__ = ["restore_einsums"]

_RESHAPES = ("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "clone", "contiguous", "flatten", "unflatten")
_ORDERS = ("permute", "transpose")


@dataclass(eq=False)
class _Dim:
    """A dimension of the product, or, once it was found to be merged of several, those."""

    size: sympy.Expr
    parts: list[_Dim] = field(default_factory=list)

    def leaves(self) -> list[_Dim]:
        return [leaf for part in self.parts for leaf in part.leaves()] if self.parts else [self]


# The dimensions that each dimension of a tensor is merged of, outermost first; none for one of size 1.
_Axes = list[list[_Dim]]


class _NotSplit(Exception):
    """The dimensions of a view do not divide into those of its source."""


def _leaves(axis: list[_Dim]) -> list[_Dim]:
    return [leaf for dim in axis for leaf in dim.leaves()]


def _split(dims: list[_Dim], shape: tuple[sympy.Expr, ...], divide: bool) -> _Axes:
    """The dimensions, in order, as those of a tensor of this shape; one that is larger than the shape's is divided.

    Raises _NotSplit where that is not possible, or would divide one and must not (`divide`).
    """
    axes: _Axes = []
    left = _leaves(dims)
    for size in shape:
        axis: list[_Dim] = []
        while not _is_one(size):
            if not left:
                raise _NotSplit
            dim = left.pop(0)
            rest, more = sympy.cancel(size / dim.size), sympy.cancel(dim.size / size)
            if sympy.denom(rest) == 1:
                axis.append(dim)
                size = rest
            elif sympy.denom(more) == 1 and divide:
                dim.parts = [_Dim(size), _Dim(more)]
                axis.append(dim.parts[0])
                left.insert(0, dim.parts[1])
                break
            else:
                raise _NotSplit
        axes.append(axis)
    if left:
        raise _NotSplit
    return axes


def _is_one(size: sympy.Expr) -> bool:
    return same_size(size, sympy.Integer(1))


def _order(node: Node) -> list[int]:
    """order[d] is the dimension of the source that dimension d of a permuted tensor is."""
    rank = len(shape_of(node))
    if is_op(node, "permute"):
        return [d % rank for d in arg(node, "dims")]
    order = list(range(rank))
    a, b = arg(node, "dim0"), arg(node, "dim1")
    order[a], order[b] = order[b], order[a]
    return order


@dataclass
class _End:
    """A node on the way from the product, its axes, and whether dimensions were put in another order on that way."""

    node: Node
    axes: _Axes
    reordered: bool = False

    @property
    def plain(self) -> bool:
        """Is each dimension one of the product's own?"""
        return all(len(_leaves(axis)) < 2 for axis in self.axes)


def _is_moved(node: object) -> bool:
    """A tensor whose elements are all those of another, in another shape or order."""
    return is_op(node, *_RESHAPES, *_ORDERS) and isinstance(node.args[0], Node)  # type: ignore[attr-defined]


def _towards_source(node: Node, axes: _Axes, divide: bool) -> _End:
    """The farthest source of an operand in which each dimension is one of the product's own.

    divide: a dimension of the product may be one that was merged of several of the source's.
    """
    end, found = _End(node, axes), _End(node, axes)
    while _is_moved(end.node):
        node, source = end.node, end.node.args[0]
        assert isinstance(source, Node)
        if is_op(node, *_ORDERS):
            order = _order(node)
            axes = [end.axes[order.index(d)] for d in range(len(order))]
        else:
            try:
                axes = _split([dim for axis in end.axes for dim in axis], shape_of(source), divide)
            except _NotSplit:
                break
        end = _End(source, axes, end.reordered or is_op(node, *_ORDERS))
        if end.plain:
            found = end
    return found


def _towards_result(product: Node, axes: _Axes) -> _End | None:
    """The first view of the product whose dimensions are all its own, none of size 1: an equation can say no other."""
    end = _End(product, axes)
    while not (end.plain and all(map(_leaves, end.axes))):
        node = next(iter(end.node.users)) if len(end.node.users) == 1 else None
        if node is None or not _is_moved(node):
            return None
        if is_op(node, *_ORDERS):
            axes = [end.axes[d] for d in _order(node)]
        else:
            try:
                axes = _split([dim for axis in end.axes for dim in axis], shape_of(node), False)
            except _NotSplit:
                return None
        end = _End(node, axes, end.reordered or is_op(node, *_ORDERS))
    return end


def _equation(states: list[_End]) -> str:
    """ "left,right->out" with one letter a dimension; those of size 1 have letters of their own."""
    letters: dict[_Dim, str] = {}
    fresh = iter(ascii_lowercase)

    def spelled(axes: _Axes) -> str:
        return "".join(
            letters.setdefault(leaves[0], next(fresh)) if leaves and leaves[0] not in letters
            else letters[leaves[0]] if leaves
            else next(fresh)
            for leaves in map(_leaves, axes)
        )  # fmt: skip

    left, right, out = (spelled(state.axes) for state in states)
    return f"{left},{right}->{out}"


def _holds_matrices(node: Node) -> bool:
    """A tensor of matrices that the graph is given, or a gather along its first dimension."""
    node = strip_casts(node)
    if node.op in ("placeholder", "get_attr"):
        return len(shape_of(node)) == 3
    if not is_op(node, "index", "index_select") or len(shape_of(node.args[0])) != 3:  # type: ignore[arg-type]
        return False
    return arg(node, "dim") == 0 if is_op(node, "index_select") else len(node.args[1]) == 1  # type: ignore[arg-type]


def _read(product: Node, restored: set[Node]) -> list[_End] | None:
    """(left, right, result) of a batched product that an einsum was written out as; None for another."""
    operands = product.args[:2]
    sources = [strip(operand, _is_moved) for operand in operands]  # type: ignore[arg-type]
    expert = [_holds_matrices(source) or source in restored for source in sources]
    shapes = [shape_of(operand) for operand in operands]  # type: ignore[arg-type]
    if not any(expert) or any(size == 0 for shape in shapes for size in shape):
        return None
    batch, rows, inner, columns = (_Dim(size) for size in (*shapes[0], shapes[1][2]))

    def axes(*dims: _Dim) -> _Axes:
        return [[] if _is_one(dim.size) else [dim] for dim in dims]

    sides = [axes(batch, rows, inner), axes(batch, inner, columns)]
    found: dict[int, _End] = {}
    for side in sorted((0, 1), key=lambda side: not expert[side]):  # what the weights' dimensions are comes first
        found[side] = _towards_source(operands[side], sides[side], expert[side])  # type: ignore[arg-type]
    result = _towards_result(product, axes(batch, rows, columns))
    ends = [found[0], found[1], result]
    if result is None or not all(end.plain for end in ends) or not any(end.reordered for end in ends):  # type: ignore[union-attr]
        return None
    return ends  # type: ignore[return-value]


def _erase(node: Node, until: set[Node]) -> None:
    """Erase a node that nobody reads, and the views and the product that it was made of."""
    pending, seen = [node], set(until)
    while pending:
        node = pending.pop()
        if node.users or node in seen or not (_is_moved(node) or is_op(node, "bmm")):
            continue
        pending.extend(node.all_input_nodes)
        seen.add(node)
        node.graph.erase_node(node)


def restore_einsums(graph: Graph) -> int:
    """Write batched products with expert weights as the einsums that they were; returns how many."""
    count = 0
    restored: set[Node] = set()
    for product in list(graph.find_nodes(op="call_function", target=ops.aten.bmm.default)):
        found = _read(product, restored)
        if found is None:
            continue
        left, right, result = found
        with graph.inserting_before(result.node):
            operands = [left.node, right.node]
            einsum = insert(result.node, ops.aten.einsum.default, (_equation(found), operands))
        result.node.replace_all_uses_with(einsum)
        _erase(result.node, set(operands))
        restored.add(einsum)
        count += 1
    return count
