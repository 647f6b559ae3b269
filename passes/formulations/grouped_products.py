"""Rows times the matrix of the expert that each belongs to, in sorted order: a grouped matmul, or parts of a split.

    grouped_mm(rows, W, offsets)          cat([linear(part, W[e]) for e, part in enumerate(split(rows, sizes))])

Both say where an expert's rows end: by offsets (a tensor) or by the sizes of the split (numbers read from one).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, Node

from moe_compiler.moe_ir import Miss, op_name
from moe_compiler.passes.formulations.bias import split_bias, vector_bias
from moe_compiler.passes.formulations.contraction import Product, contraction, fed_by
from moe_compiler.passes.formulations.matrices import collect, plain_product, stored
from moe_compiler.passes.formulations.walk import (
    arg,
    dtype_of,
    is_op,
    require,
    same_value,
    shape_of,
    strip_views_casts,
)

__all__ = [
    "Grouped",
    "check_readable",
    "feeding",
    "is_grouped_mm",
    "is_product",
    "last_grouped",
    "last_parts",
    "last_slices",
    "part_of",
    "part_product",
    "read_grouped",
    "read_parts",
    "same_groups",
]


@dataclass(frozen=True)
class Grouped:
    """node [S, out] = rows [S, in] times each row's expert's matrix (+ its bias).

    matmul: a node that computes (the node itself, or the first part's product). weights: one packed tensor or E
    matrices; matrices: always E, empty for a grouped matmul; transposed: they are [.., in, out]. biases: E vectors
    that the parts' own products add, or none. groups: the offsets, or the sizes of a split.
    """

    node: Node
    matmul: Node
    rows: Node
    weights: tuple[Node, ...]
    matrices: tuple[Node, ...]
    transposed: bool
    groups: Node | tuple[object, ...]
    biases: tuple[Node, ...] = ()

    @property
    def experts(self) -> int:
        if self.matrices:
            return len(self.matrices)
        size = shape_of(self.weights[0])[0]
        return int(size) if size.is_Integer else -1


# Grouped matmuls by name, and the namespace that each is of.
_GROUPED = {"_grouped_mm": "aten", "grouped_mm_fallback": "transformers"}


def is_grouped_mm(node: object) -> bool:
    """A grouped matmul of sorted rows: torch's own, or transformers' opaque operator."""
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    home = _GROUPED.get(op_name(node))
    return home is not None and getattr(node.target, "namespace", "") == home


def read_grouped(node: Node) -> Grouped | None:
    """`node` as a grouped matmul of 2-D rows with packed matrices and offsets, or as parts; None when it is neither."""
    if is_op(node, "cat", "concat"):
        return read_parts(node)
    if not is_grouped_mm(node):
        return None
    offs = node.args[2] if len(node.args) > 2 else node.kwargs.get("offs")
    bias = node.args[3] if len(node.args) > 3 else node.kwargs.get("bias")
    rows, weight = node.args[:2]
    plain = isinstance(rows, Node) and isinstance(weight, Node) and bias is None and isinstance(offs, Node)
    if not plain or len(shape_of(rows)) != 2 or len(shape_of(weight)) != 3:  # type: ignore[arg-type]
        return None
    return Grouped(node, node, rows, (weight,), (), True, offs)  # type: ignore[arg-type]


def part_of(node: Node) -> tuple[Node, int] | None:
    """(split, e) when `node` is part e of a split of the rows by sizes."""
    node = strip_views_casts(node)
    if op_name(node) != "getitem" or node.op != "call_function":
        return None
    split = node.args[0]
    if not is_op(split, "split_with_sizes", "split") or not isinstance(split.args[1], (list, tuple)):  # type: ignore[union-attr]
        return None
    return (split, node.args[1]) if arg(split, "dim") == 0 else None  # type: ignore[arg-type, return-value]


def part_product(node: Node, what: str) -> tuple[Product, Node | None]:
    """(product, bias [out] or None) of one part's rows times one matrix; Miss for anything else."""
    bare, operand = split_bias(node, what)
    return plain_product(bare, what, biased=True), vector_bias(operand, what)


def read_parts(node: Node) -> Grouped | None:
    """`node` as the parts of a split in order, each times its own expert's matrix, one after the other."""
    try:
        return _parts(node)
    except Miss:
        return None


def _parts(node: Node) -> Grouped:
    """As `read_parts`, with a Miss that tells what is in the way."""
    parts = node.args[0]
    listed = isinstance(parts, (list, tuple)) and bool(parts) and arg(node, "dim") == 0
    require(listed, "the parts' products are not put together along the rows", node)
    split: Node | None = None
    products: list[Product] = []
    biases: list[Node | None] = []
    for expert, part in enumerate(parts):  # type: ignore[arg-type, union-attr]
        product, bias = part_product(part, f"down (expert {expert})")  # type: ignore[arg-type]
        found = part_of(product.rows)
        own = found is not None and found[1] == expert and (split is None or found[0] is split)
        require(own, f"expert {expert} does not read part {expert} of the rows", product.node)
        assert found is not None
        require(product.rows_letters[-1:] == product.contracted, "the rows are not [n, in]", product.node)
        split = found[0]
        products.append(product)
        biases.append(bias)
    assert split is not None
    sizes = tuple(split.args[1])  # type: ignore[arg-type]
    require(len(products) == len(sizes), f"{len(sizes)} parts but {len(products)} products", node)
    stores = [stored(product) for product in products]
    kinds = {
        (transposed, shape_of(matrix), dtype_of(matrix), bias is None)
        for (matrix, transposed), bias in zip(stores, biases, strict=True)
    }
    require(len(kinds) == 1, "the parts' products differ in layout, or not all have a bias", node)
    matrices = tuple(matrix for matrix, _ in stores)
    vectors = tuple(bias for bias in biases if bias is not None)
    packed = collect(list(matrices))
    return Grouped(node, products[0].node, split.args[0], packed, matrices, stores[0][1], sizes, vectors)  # type: ignore[arg-type]


def is_product(node: Node) -> bool:
    """A product of sorted rows with their expert's matrix, in either way, without what is added behind it."""
    return is_grouped_mm(node) or (is_op(node, "cat", "concat") and read_parts(node) is not None)


def same_groups(a: Grouped, b: Grouped) -> bool:
    """Do two products split their rows at the same places?"""
    return same_value(a.groups, b.groups)


def last_grouped(graph: Graph) -> list[Node]:
    """Grouped matmuls that are fed by another one: the down projections."""
    return _last([node for node in graph.nodes if is_grouped_mm(node)])


def last_parts(graph: Graph) -> list[Node]:
    """Concatenated products of parts that are fed by others: the down projections."""
    return _last([node for node in graph.nodes if _split_source(node) is not None])


def _split_source(node: Node) -> Node | None:
    """The rows whose parts `node` multiplies and concatenates, whether or not all of it can be read."""
    if not is_op(node, "cat", "concat") or arg(node, "dim") != 0:
        return None
    parts = node.args[0]
    first = strip_views_casts(parts[0]) if isinstance(parts, (list, tuple)) and parts else None  # type: ignore[arg-type]
    for step in [first, *(first.args[:2] if is_op(first, "add", "add_") else ())]:  # type: ignore[union-attr]
        product = strip_views_casts(step) if isinstance(step, Node) else None
        if not is_op(product, "linear", "addmm", "mm", "matmul"):
            continue
        operands = [operand for operand in product.args if isinstance(operand, Node)]  # type: ignore[union-attr]
        part = next((found for operand in operands if (found := part_of(operand)) is not None), None)
        if part is not None:
            return part[0].args[0]  # type: ignore[return-value]
    return None


def last_slices(graph: Graph) -> list[Node]:
    """Copies of products of slices between counted bounds, fed by others: the first of each down projection.

    They are not read, but seen, so that the reason can be told (`check_readable`).
    """
    memory: dict[Node, Node] = {}
    found = []
    for node in graph.nodes:
        rows = _sliced_source(node)
        if rows is None:
            continue
        whole = node.args[0].args[0]
        if whole not in memory and fed_by(rows, memory):
            found.append(node)
        memory.setdefault(whole, node)
    return found


def _sliced_source(node: Node) -> Node | None:
    """The rows of which `node` copies the product of a slice into the same slice of another tensor."""
    if not is_op(node, "copy_") or _counted_bounds(node.args[0]) is None or not isinstance(node.args[1], Node):
        return None
    value = node.args[1]
    while is_op(value, "expand") or strip_views_casts(value) is not value:
        value = strip_views_casts(value.args[0])  # type: ignore[arg-type]
    found = contraction(value)
    if found is None or _counted_bounds(found.left) != _counted_bounds(node.args[0]):
        return None
    return found.left.args[0]  # type: ignore[return-value]


def _counted_bounds(node: object) -> tuple[object, object] | None:
    """(start, end) of a slice along the rows between two numbers read from a tensor."""
    if not is_op(node, "slice") or arg(node, "dim") != 0:  # type: ignore[arg-type]
        return None
    bounds = (arg(node, "start"), arg(node, "end"))  # type: ignore[arg-type]
    return bounds if all(is_op(bound, "item", "_local_scalar_dense") for bound in bounds) else None


def _last(products: list[Node]) -> list[Node]:
    """Those that are fed by others; one that cannot be read is seen too, so that the reason can be told."""
    found: list[Node] = []
    known: set[Node] = set()
    for node in products:
        rows = node.args[0] if is_grouped_mm(node) else _split_source(node)
        if isinstance(rows, Node) and fed_by(rows, known):
            found.append(node)
        known.add(node)
    return found


def check_readable(node: Node) -> None:
    """Raise the Miss that tells why `read_grouped` cannot read a down projection; nothing when it can."""
    if read_grouped(node) is not None:
        return
    if is_grouped_mm(node):
        raise Miss("the grouped matmul has a bias, no offsets, or other than packed matrices", node)
    require(
        not is_op(node, "copy_"),
        "each expert's rows are a slice between two cumulated counts, and its result is copied into a slice as well",
        node,
        "split the rows with torch.split(rows, counts.tolist()) and put the results together with torch.cat, or use "
        'transformers 5 with experts_implementation="grouped_mm"',
    )
    _parts(node)


def feeding(rows: Node, limit: int = 12) -> list[Grouped]:
    """The grouped products that feed `rows` through an activation, the nearest first."""
    level, seen, found = [rows], {rows}, []
    for _ in range(limit):
        reads = {node: read_grouped(node) for node in level}
        found += [product for product in reads.values() if product is not None]
        sources = (source for node, product in reads.items() if product is None for source in node.all_input_nodes)
        level = [node for node in dict.fromkeys(sources) if node not in seen]
        seen.update(level)
    return found
