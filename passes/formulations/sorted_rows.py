"""One row a (token, expert) pair, sorted by expert: what brings tokens into that order, and the results home.

Shared by the formulations that sort the ids and differ in what multiplies the rows and how they come home:
    perm = argsort(flat ids); x[perm // k] -> (w[perm] *) -> W1 -> act (* w[perm]) -> W2 -> (* w[perm])
    added at perm // k, or brought back to pair order (inverse permutation) and summed over k
The products are read by `grouped_products`. A routing weight in the middle of an expert is one on its output, since
the down projection is linear.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from moe_compiler.moe_ir import Match, Miss, op_name
from moe_compiler.passes.formulations import combine
from moe_compiler.passes.formulations.activation import Activation, match_activation
from moe_compiler.passes.formulations.base import (
    Bindings,
    check_sizes,
    check_weighted_input,
    experts_spec,
    trailing_cast,
)
from moe_compiler.passes.formulations.counts import match_counts, match_offsets
from moe_compiler.passes.formulations.grouped_products import (
    Grouped,
    check_readable,
    feeding,
    read_grouped,
    same_groups,
)
from moe_compiler.passes.formulations.matrices import collect
from moe_compiler.passes.formulations.pairs import (
    match_choice,
    match_pair_index,
    match_pair_rows,
    match_weights,
    row_index,
    rows_at,
    token_rows,
)
from moe_compiler.passes.formulations.walk import (
    arg,
    dtype_of,
    elements_of,
    is_op,
    is_zeros,
    require,
    same_size,
    same_value,
    shape_of,
    strip_casts,
    strip_ids,
    strip_views,
    strip_views_casts,
    users_through,
    view_or_cast,
)

__all__ = [
    "activate",
    "added_home",
    "count",
    "dispatch",
    "finish",
    "gather_tokens",
    "gathered_home",
    "home",
    "match_of",
    "match_sizes",
    "sort",
    "weigh",
    "weigh_input",
]


def _scaled(node: Node) -> tuple[Node, Node] | None:
    """(rows, column) when `node` multiplies rows [S, H] by one number each, [S, 1]; None for another product.

    S is not compared: the sizes of a split that come from the data sum to it without saying so.
    """
    if not is_op(node, "mul") or not all(isinstance(operand, Node) for operand in node.args[:2]):
        return None
    for rows, column in (node.args[:2], node.args[1::-1]):
        own, full = shape_of(column), shape_of(rows)  # type: ignore[arg-type]
        if len(own) == len(full) >= 2 and own[-1] == 1 != full[-1] and (own[0] != 1 or full[0] == 1):
            return rows, column  # type: ignore[return-value]
    return None


# Steps


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
    rows, scaled = _unscaled(whole)
    b.bind(first_rows=whole, weight_at="", weights=None)
    if scaled is not None:
        b.bind(input_weight=scaled[1], weighted_rows=strip_casts(scaled[0]))
    gathered = rows_at(rows)
    require(gathered is not None, f"the rows come from {op_name(rows)}, not from a gather of tokens", rows)
    assert gathered is not None
    b.bind(source=gathered[0], token=strip_ids(gathered[1]), rows=rows)


def _unscaled(node: Node) -> tuple[Node, tuple[Node, Node] | None]:
    """(the rows without a weight of their own, what `_scaled` says of them)."""
    rows = strip_views_casts(node)
    scaled = _scaled(rows)
    return (rows, None) if scaled is None else (strip_views_casts(scaled[0]), scaled)


def sort(b: Bindings) -> None:
    """The gather's index is the token of each pair, in the order of an ascending sort of the flat ids."""
    token = b.token
    perm, k, of_pairs = token, 1, False
    if is_op(token, "floor_divide") or (is_op(token, "div") and arg(token, "rounding_mode") in ("floor", "trunc")):
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
    in_pair_order = token is perm and k == 1
    if not in_pair_order:
        require(own == k, f"perm // {k}, but {own} experts a token", ids)
    tokens = elements_of(shape_of(ids)[:-1])
    b.bind(perm=perm, order=order, ids=ids, k=own, tokens=tokens)
    source = b.source
    if in_pair_order:
        scaled = _scaled(strip_views_casts(source))
        if scaled is not None:
            require("input_weight" not in b.roles, "the rows are weighted twice", source)
            _take(b, match_weights(scaled[1], ids, source), "input", source)
            b.bind(weighted_rows=strip_casts(scaled[0]))
            source = scaled[0]
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


def count(b: Bindings) -> None:
    """The rows are split by the counts of those ids."""
    groups = b.down.groups
    experts = match_offsets(groups, b.ids, b.order) if isinstance(groups, Node) else match_sizes(b, groups)
    b.bind(experts=experts)
    _check_experts(b, b.down)


def _check_experts(b: Bindings, product: Grouped) -> None:
    require(product.experts == b.experts, f"{b.experts} counts but {product.experts} matrices", product.node)
    require(same_groups(product, b.down), "the products split their rows differently", product.node)


def match_sizes(b: Bindings, sizes: tuple[object, ...]) -> int:
    """E when the sizes of a split are the counts of the ids, read one after the other."""
    if b.tokens == 0 and all(size == 0 for size in sizes):
        return len(sizes)  # no token at all: that they are the counts is known without looking
    counts: Node | None = None
    for expert, size in enumerate(sizes):
        if not isinstance(size, Node):
            raise Miss("the rows are split into constant sizes", b.anchor)
        item = size.args[0] if is_op(size, "item", "_local_scalar_dense") else None
        require(isinstance(item, Node), f"the sizes of the split come from {op_name(size)}, not from counts", size)
        assert isinstance(item, Node)
        if is_op(item, "select"):
            source, dim, place = item.args[0], item.args[1], item.args[2]
        elif op_name(item) == "getitem" and is_op(item.args[0], "unbind"):
            source, dim, place = item.args[0].args[0], arg(item.args[0], "dim"), item.args[1]  # type: ignore[union-attr]
        else:
            raise Miss(f"the sizes of the split come from {op_name(item)}, not from counts", item)
        require(dim == 0 and place == expert, f"part {expert} of the rows has the size of expert {place}", item)
        require(counts is None or counts is source, "the sizes of the split come from different counts", item)
        counts = source  # type: ignore[assignment]
    require(counts is not None, "the rows are split into no parts", b.anchor)
    assert counts is not None
    return match_counts(counts, b.ids, b.order)


def activate(b: Bindings) -> None:
    """The last product's rows are act(gate) * up, or act(gate), of products of the first rows.

    Weights that multiply the input or the middle of an expert must be the routing weights of the sorted pairs.
    """
    middle = _scaled(strip_views_casts(b.down.rows))
    activation = match_activation(middle[0] if middle is not None else b.down.rows)
    first = []
    for half in (activation.gate, activation.up):
        if half is None:
            continue
        product = read_grouped(half.source)
        if product is None:
            raise Miss(f"{op_name(half.source)} is no product of rows with their expert's matrix", half.source)
        require(same_value(product.rows, b.first_rows), "gate and up read different rows", product.node)
        _check_experts(b, product)
        first.append(product)
    b.bind(activation=activation, first=tuple(first))
    weigh_input(b, dtype_of(first[0].matmul))
    if middle is not None:
        _take(b, _sorted_weights(b, middle[1]), "output", b.anchor)


def weigh_input(b: Bindings, compute: torch.dtype) -> None:
    """Weights on the tokens must be the routing weights; `compute` is the dtype of the first products."""
    if "weighted_rows" in b.roles:
        check_weighted_input(b.weighted_rows, compute, b.k)
    if "input_weight" in b.roles:
        _take(b, _sorted_weights(b, b.input_weight), "input", b.rows)


def _take(b: Bindings, weights: Node, at: str, where: Node) -> None:
    require(not b.weight_at, "the rows are weighted twice", where)
    b.bind(weights=weights, weight_at=at)


def _sorted_weights(b: Bindings, column: Node) -> Node:
    """The [T, k] weights behind w[perm], or however else the formulation brings weights into the rows' order."""
    node = strip_views_casts(column)
    if "weights_of" in b.roles:
        return b.weights_of(b, node)  # type: ignore[no-any-return]
    gathered = rows_at(node)
    require(gathered is not None, f"the routing weights come from {op_name(node)}, not from w[perm]", node)
    assert gathered is not None
    at_perm = same_value(strip_ids(gathered[1]), b.perm)
    require(at_perm, "the routing weights are gathered by another index than perm", node)
    return match_weights(gathered[0], b.ids, node)


# Operators that read only the shape of their first argument.
_OF_SHAPE = frozenset(
    {
        "sym_size",
        "sym_numel",
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "new_empty",
        "new_zeros",
        "new_full",
    }
)


def _consumer(node: Node, what: str) -> Node:
    """The single consumer of rows, seen through views and casts; one that reads only their shape is none."""
    users: list[Node] = []
    for user in users_through(node, view_or_cast):
        of_other = is_op(user, "expand_as", "view_as", "reshape_as") and strip_views_casts(user.args[0]) is not node
        if not of_other and not is_op(user, *_OF_SHAPE):
            users.append(user)
    require(len(users) == 1, f"{what} are used {len(users)} times instead of once", node)
    return users[0]


def weigh(b: Bindings) -> None:
    """The last products are weighted, unless the rows were weighted before or will be in pair order."""
    step = _consumer(b.anchor, "the experts' rows")
    rows = b.anchor
    if not b.weight_at and is_op(step, "mul"):
        rows = step
        _take(b, _sorted_weights(b, _weight(step, b.anchor)), "output", step)
    elif not b.weight_at and rows_at(step) is None and _written_at(step) is None:
        raise Miss(f"the experts' rows are consumed by {op_name(step)}, not multiplied by the routing weights", step)
    b.bind(result=rows)


def _weight(product: Node, rows: Node) -> Node:
    """The column that a product multiplies `rows` with."""
    scaled = _scaled(product)
    own = scaled is not None and strip_views_casts(scaled[0]) is rows
    require(own, "the rows are not multiplied by one number each", product)
    assert scaled is not None
    return scaled[1]


def added_home(b: Bindings) -> None:
    """The rows are added at their tokens to zeros, or to a tensor of the model's own."""
    require(bool(b.weight_at), "the rows are never weighted", b.result)
    step = _consumer(b.result, "the weighted rows")
    adds = is_op(step, "index_add", "index_add_", "scatter_add", "scatter_add_", "index_put", "index_put_")
    require(adds, f"the rows are consumed by {op_name(step)}, not added at their tokens", step)
    base = step.args[0]
    if is_op(step, "index_put", "index_put_"):
        require(arg(step, "accumulate"), "rows of one token overwrite one another (no accumulation)", step)
        indices, dim, values = step.args[1], 0, step.args[2]
        index = indices[0] if len(indices) == 1 else None
    else:
        dim, index, values = step.args[1], step.args[2], step.args[3]  # type: ignore[assignment]
        scaled = is_op(step, "index_add", "index_add_") and arg(step, "alpha") != 1
        require(not scaled, "the combine scales the rows (alpha)", step)
    column = row_index(index, step) if isinstance(index, Node) else None
    at_token = dim == 0 and column is not None and _is_token(b, column)
    require(at_token, "the rows are added at another index than their tokens", step)
    require(isinstance(values, Node) and strip_views_casts(values) is b.result, "other rows are added", step)
    shape = shape_of(step)
    whole = len(shape) == 2 and same_size(shape[0], b.tokens) and shape_of(values)[-1:] == shape[1:]
    require(whole, "the result is not [T, H] of whole rows", step)
    require(isinstance(base, Node) and dtype_of(base) == dtype_of(step), "the result changes its dtype", step)
    if is_zeros(strip_views(base)):
        b.bind(output=trailing_cast(step), base=None)
    else:
        b.bind(output=step, base=base)


def home(b: Bindings) -> None:
    """The rows are added at their tokens, or brought back to pair order and summed."""
    step = _consumer(b.result, "the experts' rows")
    written = _written_at(step)
    if rows_at(step) is not None or (written is not None and same_value(strip_ids(written), b.perm)):
        gathered_home(b)
    else:
        added_home(b)


def _is_token(b: Bindings, index: Node) -> bool:
    return same_value(strip_ids(index), b.token)


def _written_at(node: Node) -> Node | None:
    """The index at which `node` writes rows into new memory, each row once; None for anything else."""
    if is_op(node, "index_put", "index_put_"):
        base, indices = node.args[:2]
        index = indices[0] if len(indices) == 1 and not arg(node, "accumulate") else None  # type: ignore[arg-type]
    elif is_op(node, "scatter", "scatter_"):
        base, dim, index = node.args[:3]
        reduces = any(a.name == "reduce" for a in node.target._schema.arguments) and arg(node, "reduce") is not None
        index = row_index(index, node) if dim == 0 and not reduces and isinstance(index, Node) else None
    else:
        return None
    new = is_op(base, "empty_like", "empty", "new_empty") or is_zeros(base)
    return index if new and isinstance(index, Node) else None


def gathered_home(b: Bindings) -> None:
    """The rows are brought back to pair order, weighted there if they were not before, and summed over k."""
    step = _consumer(b.result, "the rows")
    gathered, written = rows_at(step), _written_at(step)
    if written is not None:
        require(same_value(strip_ids(written), b.perm), "the rows are written at another index than perm", step)
        values = step.args[2] if is_op(step, "index_put", "index_put_") else step.args[3]
        whole = isinstance(values, Node) and shape_of(values)[-1:] == shape_of(step)[-1:]
        require(whole and strip_views_casts(values) is b.result, "other rows are written", step)
    elif gathered is not None:
        combine.match_inverse(gathered[1], b.perm)
    else:
        raise Miss(f"the rows are consumed by {op_name(step)}, not brought back to pair order", step)
    single = b.k == 1 and len(shape_of(step)) == 2
    if not b.weight_at and single and is_op(last := _consumer(step, "the experts' rows"), "mul"):
        _take(b, match_weights(_weight(last, step), b.ids, last), "output", last)
        output = last
    elif not b.weight_at:
        weight, product, output = combine.match_weighted_sum(step, b.tokens, b.k)
        _take(b, match_weights(weight, b.ids, product), "output", product)
    elif single:
        output = step
    else:
        output = combine.match_sum_over_k(_consumer(step, "the weighted rows"), step, b.tokens, b.k)
    known = set().union(*(size.free_symbols for size in (*shape_of(b.x), *shape_of(b.ids))))
    own = set().union(*(size.free_symbols for size in shape_of(output)))
    require(
        own <= known,
        f"the size {shape_of(output)[-1]} of the result was inferred from sizes that come from the data",
        output,
        "write the width out in place of -1 in the view that splits the rows by token",
    )
    b.bind(output=trailing_cast(output))


def finish(b: Bindings, formulation: str) -> Match:
    """The Match of a block of grouped products of sorted rows."""
    packed = b.activation.gate.part is not None
    roles = {"gate": b.first[0], "down": b.down}
    if not packed and b.activation.up is not None:
        roles["up"] = b.first[1]
    transposed = frozenset(role for role, product in roles.items() if product.transposed)
    if all(product.matrices for product in roles.values()):
        matrices = {role: product.matrices for role, product in roles.items()}
    else:
        matrices = {role: product.weights for role, product in roles.items()}
    return match_of(b, formulation, b.activation, b.down.matmul, matrices, transposed)


def _check_widths(
    b: Bindings, activation: Activation, matrices: dict[str, tuple[Node, ...]], transposed: frozenset[str]
) -> None:
    """Rows go through the products whole: a view may not have cut them in between."""
    sizes = {}
    for role, found in matrices.items():
        out, inner = shape_of(found[0])[-2:]
        sizes[role] = (inner, out) if role in transposed else (out, inner)
    halves = 1 if activation.gate.part is None else 2
    whole = all(sizes[role][1] == shape_of(b.x)[1] for role in sizes if role != "down")
    whole = whole and all(sizes[role][0] == halves * sizes["down"][1] for role in sizes if role != "down")
    require(whole, "the rows are reshaped between the tokens and the down projection", b.anchor)


def match_of(
    b: Bindings,
    formulation: str,
    activation: Activation,
    matmul: Node,
    matrices: dict[str, tuple[Node, ...]],
    transposed: frozenset[str],
) -> Match:
    """The Match of a block of sorted rows. matrices: for each role one packed tensor, or one matrix an expert.

    Matrices that are the slices of one tensor become that tensor, if it is so in all roles: a list of tensors is one
    kind for all of them.
    """
    check_sizes(b.x, b.ids, b.weights)
    _check_widths(b, activation, matrices, transposed)
    together = {role: collect(list(found)) if len(found) > 1 else found for role, found in matrices.items()}
    if len({len(found) for found in together.values()}) == 1:
        matrices = together
    return Match(
        formulation=formulation,
        spec=experts_spec(activation, matmul, b.output, b.weight_at),
        x_TH=b.x,
        ids_TK=b.ids,
        weights_TK=b.weights,
        gate=matrices["gate"],
        up=matrices.get("up", ()),
        down=matrices["down"],
        transposed=transposed,
        output=b.output,
        base=b.roles.get("base"),
        anchor=b.anchor,
    )
