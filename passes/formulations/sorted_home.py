"""Sorted rows on their way home: weighted, then added at their tokens, or brought back to pair order and summed over k.

    zeros.index_add(0, perm // k, rows * w[perm])                        rows[argsort(perm)].view(T, k, H).sum(1)
    new[perm] = rows; (new.view(T, k, H) * w[..., None]).sum(1)          einsum("tkh,tk->th", rows[inverse], w)

A block may also end with the sorted rows themselves, where a norm follows before they are weighted.
"""

from __future__ import annotations

from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from moe_compiler.moe_ir import Miss, op_name
from moe_compiler.passes.formulations import combine
from moe_compiler.passes.formulations.base import Bindings, trailing_cast
from moe_compiler.passes.formulations.pairs import match_weights, row_index, rows_at
from moe_compiler.passes.formulations.sentinels import passes
from moe_compiler.passes.formulations.sorted_rows import is_token
from moe_compiler.passes.formulations.sorted_weights import scaled, sorted_weights, take
from moe_compiler.passes.formulations.walk import (
    arg,
    dtype_of,
    is_fresh,
    is_op,
    is_zeros,
    item_of,
    reads_only_shape,
    require,
    same_size,
    same_value,
    shape_of,
    strip,
    strip_ids,
    strip_views,
    strip_views_casts,
    users_through,
)

__all__ = ["added", "added_home", "gathered_home", "home", "returned", "weigh", "written_at"]


def _consumer(node: Node, what: str) -> Node:
    """The single consumer of rows, seen through views, casts and masks; one that reads only their shape is none."""
    users: list[Node] = []
    for user in users_through(node, passes):
        of_other = is_op(user, "expand_as", "view_as", "reshape_as") and strip_views_casts(user.args[0]) is not node  # type: ignore[arg-type]
        if not of_other and not reads_only_shape(user):
            users.append(user)
    require(len(users) == 1, f"{what} are used {len(users)} times instead of once", node)
    return users[0]


def weigh(b: Bindings) -> None:
    """The last products are weighted, unless the rows were weighted before or will be in pair order."""
    norm = combine.row_norm(b.last) if not b.weight_at else None
    b.bind(per_pair=norm is not None)
    if norm is not None:
        _end_with_rows(b, norm)
        return
    step = _consumer(b.last, "the experts' rows")
    rows = b.last
    if not b.weight_at and is_op(step, "mul"):
        rows = step
        take(b, sorted_weights(b, _weight(b, step, b.last)), "output", step)
    elif not b.weight_at and rows_at(step) is None and written_at(step) is None:
        raise Miss(f"the experts' rows are consumed by {op_name(step)}, not multiplied by the routing weights", step)
    b.bind(result=rows)


def _end_with_rows(b: Bindings, norm: Node) -> None:
    """The block ends with the sorted rows, which are normalised before they are weighted: x and ids in their order."""
    users = b.order.users if b.order is not None else ()
    sorted_ids = next((n for n in users if item_of(n, 0, "sort") is b.order), None)
    require(
        sorted_ids is not None,
        "the rows are normalised before they are weighted, and nothing holds the sorted ids",
        norm,
        "sort the ids with torch.sort, and use both of its results",
    )
    require(
        _symbols(b.last) <= _symbols(b.rows),
        "the rows are normalised before they are weighted, and how many there are comes from the data",
        norm,
        "use grouped matmuls with offsets in place of a split by a list of sizes",
    )
    b.bind(x=b.rows, ids=sorted_ids, weights=None, result=b.last, output=b.last)


def _symbols(*nodes: Node) -> set[object]:
    """The symbols in the sizes of tensors."""
    return {symbol for node in nodes for size in shape_of(node) for symbol in size.free_symbols}


def _weight(b: Bindings, product: Node, rows: Node) -> Node:
    """The column that a product multiplies `rows` with."""
    operands = [operand for operand in product.args[:2] if isinstance(operand, Node)]
    require(len(operands) == 2, "the rows are scaled by a constant", product)
    found = scaled(product, b.tokens * b.k)
    own = found is not None and strip(found[0], passes) is rows
    require(own, "the rows are not multiplied by one number each", product)
    assert found is not None
    return found[1]


def _comes_by_index(b: Bindings, step: Node) -> bool:
    """Is `step` a gather of the rows, or a write of them at the permutation: not an addition at tokens?"""
    written = written_at(step)
    return rows_at(step) is not None or (written is not None and same_value(strip_ids(written), b.perm))


def returned(b: Bindings) -> None:
    """The rows are brought back to pair order by index (or end the block)."""
    if b.per_pair:
        return
    step = _consumer(b.result, "the experts' rows")
    by_index = _comes_by_index(b, step)
    require(by_index, f"the rows are consumed by {op_name(step)}, not brought back to pair order", step)


def added(b: Bindings) -> None:
    """The rows are added at their tokens, by whatever index."""
    require(not b.per_pair, "the rows are normalised before they are weighted", b.last)
    step = _consumer(b.result, "the weighted rows")
    adds = is_op(step, "index_add", "index_add_", "scatter_add", "scatter_add_", "index_put", "index_put_")
    require(adds, f"the rows are consumed by {op_name(step)}, not added at their tokens", step)


def added_home(b: Bindings) -> None:
    """The rows are added at their tokens to zeros, or to a tensor of the model's own."""
    require(bool(b.weight_at), "the rows are never weighted", b.result)
    added(b)
    step = _consumer(b.result, "the weighted rows")
    base = step.args[0]
    if is_op(step, "index_put", "index_put_"):
        require(arg(step, "accumulate"), "rows of one token overwrite one another (no accumulation)", step)
        indices, dim, values = step.args[1], 0, step.args[2]
        index = indices[0] if len(indices) == 1 else None  # type: ignore[arg-type, index]
    else:
        dim, index, values = step.args[1], step.args[2], step.args[3]  # type: ignore[assignment]
        alpha = is_op(step, "index_add", "index_add_") and arg(step, "alpha") != 1
        require(not alpha, "the combine scales the rows (alpha)", step)
    column = row_index(index, step, b.tokens * b.k) if isinstance(index, Node) else None
    at_token = dim == 0 and column is not None and is_token(b, column)
    require(at_token, "the rows are added at another index than their tokens", step)
    require(isinstance(values, Node) and strip(values, passes) is b.result, "other rows are added", step)
    assert isinstance(values, Node)
    shape = shape_of(step)
    whole = len(shape) == 2 and same_size(shape[0], b.tokens) and _as_wide(values, step)
    require(whole, "the result is not [T, H] of whole rows", step)
    require(isinstance(base, Node) and dtype_of(base) == dtype_of(step), "the result changes its dtype", step)
    assert isinstance(base, Node)
    if is_zeros(strip_views(base)):
        b.bind(output=trailing_cast(step), base=None)
    else:
        b.bind(output=step, base=base)


def _as_wide(values: Node, step: Node) -> bool:
    """Are two matrices equally wide, also where a size of one is known from a guard alone?"""
    own, full = (node.meta["val"].shape[-1] for node in (values, step))
    return statically_known_true(own == full)


def home(b: Bindings) -> None:
    """The rows are added at their tokens, or brought back to pair order and summed."""
    if b.per_pair or _comes_by_index(b, _consumer(b.result, "the experts' rows")):
        gathered_home(b)
    else:
        added_home(b)


def written_at(node: Node) -> Node | None:
    """The index at which `node` writes rows into new memory, each row once; None for anything else."""
    if is_op(node, "index_put", "index_put_"):
        base, indices = node.args[:2]
        index = indices[0] if len(indices) == 1 and not arg(node, "accumulate") else None  # type: ignore[arg-type, index]
    elif is_op(node, "scatter", "scatter_", "index_copy", "index_copy_"):
        base, dim, index = node.args[:3]
        reduces = any(a.name == "reduce" for a in node.target._schema.arguments) and arg(node, "reduce") is not None  # type: ignore[union-attr]
        index = row_index(index, node) if dim == 0 and not reduces and isinstance(index, Node) else None
    else:
        return None
    new = is_fresh(base)
    return index if new and isinstance(index, Node) else None


def gathered_home(b: Bindings) -> None:
    """The rows are brought back to pair order, weighted there if they were not before, and summed over k."""
    if b.per_pair:
        return
    step = _consumer(b.result, "the rows")
    gathered, written = rows_at(step), written_at(step)
    if written is not None:
        require(same_value(strip_ids(written), b.perm), "the rows are written at another index than perm", step)
        values = step.args[2] if is_op(step, "index_put", "index_put_") else step.args[3]
        whole = isinstance(values, Node) and shape_of(values)[-1:] == shape_of(step)[-1:]
        require(whole and strip(values, passes) is b.result, "other rows are written", step)  # type: ignore[arg-type]
    elif gathered is not None:
        require(strip(gathered[0], passes) is b.result, "the rows are not what is gathered", step)
        combine.match_inverse(gathered[1], b.perm)
    else:
        raise Miss(f"the rows are consumed by {op_name(step)}, not brought back to pair order", step)
    output = _in_pair_order(b, step)
    require(
        _symbols(output) <= _symbols(b.x, b.ids),
        f"the size {shape_of(output)[-1]} of the result was inferred from sizes that come from the data",
        output,
        "write the width out in place of -1 in the view that splits the rows by token",
    )
    b.bind(output=trailing_cast(output))


def _in_pair_order(b: Bindings, step: Node) -> Node:
    """The result [T, H] of rows that `step` brought into pair order: weighted, if not before, and summed over k."""
    single = b.k == 1 and len(shape_of(step)) == 2
    if not b.weight_at and single and is_op(last := _consumer(step, "the experts' rows"), "mul"):
        take(b, match_weights(_weight(b, last, step), shape_of(b.ids), last), "output", last)
        return last
    if not b.weight_at:
        weight, product, output = combine.match_weighted_sum(step, b.tokens, b.k)
        take(b, match_weights(weight, shape_of(b.ids), product), "output", product)
        return output
    if single:
        return step
    return combine.match_sum_over_k(_consumer(step, "the weighted rows"), step, b.tokens, b.k)
