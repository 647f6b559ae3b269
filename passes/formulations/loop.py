"""A Python loop over the experts, unrolled: each picks its tokens, runs, and adds its weighted rows to the result.

What the loops share, whatever picks the tokens (a one-hot mask, a comparison of the ids):
    t, j = where(mask of expert e);  y[t] += w[t, j] * down_e(act(gate_e(x[t])) * up_e(x[t]))      e = 0 .. E-1
With one expert a token the masks may be [T], there is no j, and rows may be written instead of added: no two experts
have a row in common.
Every step looks only at the users of an expert's own index nodes, so the work is linear in E.
"""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from moe_compiler.moe_ir import Match, Miss, op_name
from moe_compiler.passes.formulations.activation import match_activation
from moe_compiler.passes.formulations.base import (
    Bindings,
    check_sizes,
    check_weighted_input,
    experts_spec,
    trailing_cast,
)
from moe_compiler.passes.formulations.bias import split_bias, split_biases
from moe_compiler.passes.formulations.combine import check_weighted_inside
from moe_compiler.passes.formulations.contraction import Product, match_product
from moe_compiler.passes.formulations.matrices import collect as _collect
from moe_compiler.passes.formulations.matrices import stored as _stored
from moe_compiler.passes.formulations.pairs import are_distinct, match_weights, row_index, rows_at, token_rows
from moe_compiler.passes.formulations.picks import Pick
from moe_compiler.passes.formulations.walk import (
    arg,
    dtype_of,
    elements_of,
    is_index_cast,
    is_op,
    is_zeros,
    require,
    same_shape,
    same_value,
    shape_of,
    strip,
    strip_casts,
    strip_ids,
    strip_views,
    strip_views_casts,
    users_through,
    view_or_cast,
)
from moe_compiler.passes.formulations.weighing import constant_factor

__all__ = ["accumulate", "additions", "compute", "finish", "part", "weigh"]

_SCALE = "scale the routing weights, or the result of all experts"
_ADD = "add the rows at the tokens that the mask picks: y.index_add_(0, token, rows)"
_WRITES = (
    *("index_copy", "index_copy_", "index_fill", "index_fill_", "index_reduce", "index_reduce_"),
    *("scatter", "scatter_", "scatter_reduce", "scatter_reduce_"),
)
_ADDS = ("index_add", "index_add_", "scatter_add", "scatter_add_", "index_put", "index_put_")


def accumulate(b: Bindings) -> None:
    """Each expert adds rows at its own tokens, once, in a chain of additions that starts at zeros."""
    by_node: dict[Node, Pick] = {}
    for pick in b.picks:
        adds = additions(pick)
        if not adds:
            _explain_no_addition(pick)
        require(
            len(adds) == 1, f"expert {pick.expert} adds its rows to a result {len(adds)} times, not once", pick.token
        )
        pick.adds = adds[0]
        _check_place(b, pick)
        by_node[adds[0]] = pick
    read = {strip_views(node.args[0]) for node in by_node}
    last = [node for node in by_node if node not in read]
    require(len(last) == 1, f"the experts' additions form {len(last)} chains instead of one", b.anchor)
    node = last[0]
    order: list[Pick] = []
    while node in by_node:
        base = node.args[0]
        require(isinstance(base, Node) and dtype_of(base) == dtype_of(node), "the result changes its dtype", node)
        order.insert(0, by_node[node])
        node = strip_views(base)
    require(len(order) == len(by_node), "the experts' additions form more than one chain", b.anchor)
    require(is_zeros(node), f"the experts' rows are added to {op_name(node)}, not to zeros", node)
    shape = shape_of(last[0])
    rank2 = len(shape) == 2 and same_shape(shape_of(node), shape)
    require(rank2, "the experts' rows are not added to a [T, H] matrix", node)
    b.bind(output=trailing_cast(last[0]), order=order)


def additions(pick: Pick) -> list[Node]:
    """The additions that read the tokens of a pick."""
    return [user for user in users_through(pick.token, _same_tokens) if is_op(user, *_ADDS)]


def _explain_no_addition(pick: Pick) -> None:
    """Raise Miss where the rows are written, but otherwise, or at another list of tokens than the picked ones."""
    users = users_through(pick.token, _same_tokens)
    for user in users:
        if is_op(user, *_WRITES) and strip(arg(user, "index"), _same_tokens) is strip(pick.token, _same_tokens):
            raise Miss(f"expert {pick.expert} writes its rows by {op_name(user)}, which has no rule", user, _ADD)
    for changed in filter(_is_list_of_tokens, users):
        lists, pending = {changed}, [changed]
        while pending:
            for user in pending.pop().users:
                if is_op(user, *_ADDS, *_WRITES) and not lists.isdisjoint(_places(user)):
                    reason = f"expert {pick.expert} writes its rows at what {op_name(changed)} makes of its tokens"
                    raise Miss(reason, changed, _ADD)
                if user not in lists and (_is_list_of_tokens(user) or _same_tokens(user)):
                    lists.add(user)
                    pending.append(user)


def _same_tokens(node: Node) -> bool:
    """The list of tokens again, in another shape or integer dtype, or once for each column of the rows."""
    return view_or_cast(node) or is_index_cast(node) or is_op(node, "expand", "expand_as")


def _places(write: Node) -> list[Node]:
    """The indices at which an operator writes."""
    return list(write.args[1]) if is_op(write, "index_put", "index_put_") else [arg(write, "index")]  # type: ignore[arg-type]


def _is_list_of_tokens(node: Node) -> bool:
    """Integers that are computed of others, one a row: a part of a list of tokens, or the list plus a number."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.dtype in (torch.int32, torch.int64)


def _check_place(b: Bindings, pick: Pick) -> None:
    """The addition is at the picked tokens, along the first dimension, and unscaled."""
    node = pick.adds
    assert node is not None
    if is_op(node, "index_add", "index_add_"):
        factor = arg(node, "alpha")
        require(factor == 1, f"expert {pick.expert} adds its rows times alpha={factor}", node, _SCALE)
        place = node.args[1] == 0 and _is_token(pick, node.args[2])
        pick.rows = node.args[3]  # type: ignore[assignment]
    elif is_op(node, "scatter_add", "scatter_add_"):
        place = node.args[1] == 0 and _is_token(pick, node.args[2], node)
        place = place and shape_of(node.args[3])[-1:] == shape_of(node)[-1:]  # type: ignore[arg-type]
        pick.rows = node.args[3]  # type: ignore[assignment]
    else:
        indices = node.args[1]
        place = len(indices) == 1 and _is_token(pick, indices[0])
        pick.rows = node.args[2]  # type: ignore[assignment]
        if place and not arg(node, "accumulate"):
            if "once" not in b.roles:  # the same answer for every expert
                _check_once(b, node)
                b.bind(once=True)
            pick.rows = _increment(b, pick)
    require(place, f"expert {pick.expert} adds its rows at another place than its tokens", node)


def _is_token(pick: Pick, index: object, of: Node | None = None) -> bool:
    """Does an index name the tokens that an expert picked: whole rows, or each element of the rows of `of`?"""
    rows = row_index(index, of) if isinstance(index, Node) and of is not None else index
    return isinstance(rows, Node) and len(shape_of(rows)) == 1 and strip_ids(rows) is strip_ids(pick.token)


def _is_choice(pick: Pick, index: object) -> bool:
    return isinstance(index, Node) and pick.choice is not None and strip_ids(index) is strip_ids(pick.choice)


def _check_once(b: Bindings, node: Node) -> None:
    """Rows written without accumulation keep one of two that a token adds: no token may choose an expert twice."""
    require(
        b.pairs[-1] == 1 or are_distinct(b.ids),
        "rows are written without accumulation, and nothing shows that a token chooses an expert only once",
        node,
        "take the ids from a top-k, or add the rows with index_add",
    )


def _increment(b: Bindings, pick: Pick) -> Node:
    """v in y[t] = y[t] + v: right without accumulation, since a token picks an expert at most once.

    With one expert a token also in y[t] = v: there is one row a token, and the others stay zero.
    """
    node = pick.adds
    assert node is not None
    written = node.args[2]
    value = strip_casts(written)  # type: ignore[arg-type]
    adds = is_op(value, "add", "add_")
    for old, new in (value.args[:2], value.args[1::-1]) if adds else ():
        read = strip_casts(old) if isinstance(old, Node) else None
        if is_op(read, "index") and read.args[0] is node.args[0]:
            indices = read.args[1]
            if len(indices) == 1 and _is_token(pick, indices[0]) and isinstance(new, Node):
                require(arg(value, "alpha") == 1, f"expert {pick.expert} scales its rows", value)
                return new
    if b.pairs[-1] == 1:
        return written  # type: ignore[return-value]
    require(adds, f"expert {pick.expert} replaces rows instead of adding to them", node)
    raise Miss(f"expert {pick.expert} adds to other rows than it writes", value)


def weigh(b: Bindings) -> None:
    """Each expert's rows are multiplied by w[t, j] after the expert; else before it or inside, which `compute` sees.

    Around that they may be multiplied by a constant, the same for all experts (NLLB: 1 - dropout). The weights take it,
    in fp32 or wider: a row (y * w) * c is rounded twice, and y * (w * c) once, since the weights are not rounded to the
    rows' dtype again. All are products, so nothing differs but roundings, in the gradients as well.
    """
    weights: dict[Node, None] = {}
    scales: dict[float, int] = {}
    for pick in b.picks:
        assert pick.rows is not None
        pick.rows, scale = _unscaled(pick.rows)
        scales.setdefault(scale, pick.expert)
        rows = strip_views_casts(pick.rows)
        if is_op(rows, "mul"):
            weight, value = _weighted(b, pick, rows)
            pick.rows, pick.weight_at = value, "output"
            weights.setdefault(weight)
    (scale, expert), *others = scales.items()
    for other, of in others:
        raise Miss(f"the rows of expert {expert} are scaled by {scale:g}, those of expert {of} by {other:g}", b.anchor)
    b.bind(scale=scale)
    at_output = {pick.weight_at == "output" for pick in b.picks}
    require(len(at_output) == 1, "some experts' rows are weighted and some are not", b.anchor)
    if at_output == {True}:
        b.bind(weights=_only(list(weights), "experts use different routing weights", b.anchor), weight_at="output")
    else:
        behind = f"rows are scaled by {scale:g} behind experts that are weighted elsewhere"
        require(scale == 1.0, behind, b.anchor, _SCALE)
        b.bind(weights=None, weight_at="input")


def _unscaled(rows: Node) -> tuple[Node, float]:
    """(rows, c) of rows that are multiplied by a constant c, 1 when they are not; behind casts and views."""
    found, scale = constant_factor(strip_views_casts(rows)), 1.0
    while found is not None and math.isfinite(found[1]):
        rows, scale = found[0], scale * found[1]
        found = constant_factor(strip_views_casts(rows))
    return rows, scale


def part(b: Bindings) -> None:
    """Experts that give their tokens back as they are (LongCat) come last: the block ends ahead of them.

    They stay in the graph as they were written. Their ids are beyond the experts of the block, which gives those
    choices nothing.
    """
    plain = [pick.expert for pick in b.picks if _is_identity(pick)]
    if not plain:
        return
    count = len(b.picks) - len(plain)
    hint = "number the experts without weights behind the others, and add their tokens last"
    require(count > 0, "no expert has weights", b.anchor)
    require(plain == list(range(count, len(b.picks))), f"expert {plain[0]} has no weights", b.anchor, hint)
    weighed = b.order[:count]
    late = next((pick for pick in weighed if pick.expert >= count), None)
    require(late is None, f"expert {plain[0]}, which has no weights, adds its tokens before others", b.anchor, hint)
    b.bind(picks=b.picks[:count], experts=count, output=weighed[-1].adds)


def _is_identity(pick: Pick) -> bool:
    """Are an expert's rows the tokens that it picked?"""
    assert pick.rows is not None
    rows = strip_views_casts(pick.rows)
    return is_op(rows, "index", "index_select", "gather") and _is_token(pick, _gathered(pick, rows)[1])


def _only(nodes: list[Node], reason: str, where: Node) -> Node:
    require(bool(nodes), reason, where)
    if len(nodes) > 1 and all(same_value(node, nodes[0]) for node in nodes):
        made = f"{op_name(nodes[0])} computes the same anew for each expert"
        raise Miss(made, nodes[1], "compute what all experts share once, ahead of the loop")
    require(len(nodes) == 1, reason, nodes[-1], "let all experts read the same tokens and routing weights")
    return nodes[0]


def _weighted(b: Bindings, pick: Pick, product: Node) -> tuple[Node, Node]:
    """(weights [T, K], rows) of rows * w[t, j, None]."""
    operands = [operand for operand in product.args[:2] if isinstance(operand, Node)]
    require(
        len(operands) == 2,
        f"the rows of expert {pick.expert} are scaled by a constant",
        product,
        _SCALE,
    )
    for weight, rows in (operands, operands[::-1]):
        found = _pair_weights(b, pick, weight)
        if found is not None:
            return found, rows
    raise Miss(f"the rows of expert {pick.expert} are not multiplied by its routing weights", product)


def _pair_weights(b: Bindings, pick: Pick, column: Node) -> Node | None:
    """The weights [T, K] of which `column` [n, 1] holds those of an expert's own pairs; None for no gather."""
    index = strip_views_casts(column)
    indices = [item for item in index.args[1] if item is not None] if is_op(index, "index") else []
    gathered = rows_at(index) if pick.choice is None else None
    if gathered is not None and elements_of(shape_of(index)) == shape_of(index)[0]:
        indices, source = [gathered[1]], gathered[0]
    elif len(indices) == 2:
        source = index.args[0]  # type: ignore[assignment]
    else:
        return None
    own = _is_token(pick, indices[0]) and (len(indices) == 1 or _is_choice(pick, indices[1]))
    require(own, f"the routing weights of expert {pick.expert} are not w[t, j] of the pairs that it picked", index)
    full = shape_of(column)
    require(len(full) == 2 and full[1] == 1, "the routing weight is not one number a row", column)
    return match_weights(source, b.pairs, index)


def compute(b: Bindings) -> None:
    """Each expert is down(act(gate(x[t])) * up(x[t])), or without up, of the tokens it picked."""
    tokens: dict[Node, None] = {}
    weights: dict[Node, None] = {}
    kinds: dict[tuple[object, ...], int] = {}
    for pick in b.picks:
        assert pick.rows is not None
        what = f"down (expert {pick.expert})"
        last, added = split_bias(pick.rows, what)
        pick.down, pick.down_bias = _linear(last, what), _vector(added, what)
        unweighted = match_activation(pick.down.rows, weighted=b.weight_at != "output")
        activation, biases = split_biases(unweighted)
        pick.activation = activation
        if activation.weight is not None:
            weights.setdefault(_weight_inside(b, pick, activation.weight))
        halves = [half.source for half in (activation.gate, activation.up) if half is not None]
        pick.first_bias = tuple(_vector(biases.get(source), f"gate and up (expert {pick.expert})") for source in halves)
        pick.first = tuple(_linear(source, f"gate and up (expert {pick.expert})") for source in halves)
        for product in pick.first:
            x, weight = _tokens(b, pick, product)
            tokens.setdefault(x)
            if weight is not None:
                weights.setdefault(weight)
        kinds.setdefault(_kind(pick), pick.expert)
    x = _only(list(tokens), "the experts read different tokens", b.anchor)
    require(
        len(kinds) == 1,
        f"experts {' and '.join(map(str, list(kinds.values())[:2]))} differ in activation, layout or dtype",
        b.anchor,
    )
    if b.weight_at == "input":
        b.bind(weights=_only(list(weights), "experts use different routing weights, or none", b.anchor))
    if b.picks[0].activation.weight is not None:
        b.bind(weight_at="output")
    b.bind(x=x, down=b.picks[0].down, activation=b.picks[0].activation)


def _weight_inside(b: Bindings, pick: Pick, column: Node) -> Node:
    """The weights [T, K] that an expert's activation is multiplied with before its down projection."""
    check_weighted_inside(column, () if pick.down_bias is None else (pick.down_bias,))
    found = _pair_weights(b, pick, column)
    reason = f"the activation of expert {pick.expert} is multiplied by something else than its routing weights"
    require(found is not None, reason, column)
    assert found is not None
    return found


def _kind(pick: Pick) -> tuple[object, ...]:
    """What must be equal for all experts of one block."""
    assert pick.activation is not None and pick.down is not None
    packed, inside = pick.activation.gate.part is not None, pick.activation.weight is not None
    shapes = tuple(shape_of(_stored(p)[0]) for p in (*pick.first, pick.down))
    dtypes = tuple(dtype_of(product.node) for product in (*pick.first, pick.down))
    orientation = tuple(_stored(product)[1] for product in (*pick.first, pick.down))
    biases = tuple(bias is not None for bias in (*pick.first_bias, pick.down_bias))
    names = (pick.activation.name, pick.activation.packing, pick.activation.up is not None)
    return *names, packed, inside, orientation, shapes, dtypes, biases


def _linear(node: Node, what: str) -> Product:
    """`node` as rows [n, in] times one expert's matrix."""
    return match_product(node, lambda operand: _is_matrix(node, operand), what, biased=True)


def _is_matrix(node: Node, operand: Node) -> bool:
    place = node.args[2 if is_op(node, "addmm") else 1]
    return len(shape_of(operand)) == 2 and operand is (place[1] if is_op(node, "einsum") else place)  # type: ignore[index]


def _vector(bias: Node | None, what: str) -> Node | None:
    """The bias [out] behind what is added to an expert's rows."""
    if bias is None:
        return None
    bias = strip_views_casts(bias)
    require(
        len(shape_of(bias)) == 1,
        f"what is added to the {what} projection is not a bias of one row for all tokens",
        bias,
    )
    return bias


def _tokens(b: Bindings, pick: Pick, product: Product) -> tuple[Node, Node | None]:
    """(x [T, H], weights or None) of the rows x[t], or x[t] * w[t, j], that an expert reads."""
    rows, weight = strip_views_casts(product.rows), None
    require(product.rows_letters[-1:] == product.contracted, "the rows are not [n, H]", product.node)
    assert pick.activation is not None
    if b.weight_at == "input" and pick.activation.weight is None:
        require(is_op(rows, "mul"), f"the rows of expert {pick.expert} are never weighted", rows)
        weight, value = _weighted(b, pick, rows)
        check_weighted_input(value, dtype_of(product.node), int(b.pairs[-1]))
        rows = strip_views_casts(value)
    source, index = _gathered(pick, rows)
    require(_is_token(pick, index), f"expert {pick.expert} reads other tokens than it picked", rows)
    return token_rows(source, b.pairs[0], rows), weight


def _gathered(pick: Pick, rows: Node) -> tuple[Node, Node]:
    """(x, index) of rows x[index], or of x[None, index], a gather along the second dimension of a [1, T, H] view."""
    gathered = rows_at(rows)
    if gathered is not None:
        return gathered
    reason = f"the rows of expert {pick.expert} come from {op_name(rows)}, not from a gather of its tokens"
    require(is_op(rows, "index"), reason, rows)
    *lead, index = rows.args[1]  # type: ignore[misc]
    skipped = all(item is None for item in lead) and all(size == 1 for size in shape_of(rows.args[0])[: len(lead)])  # type: ignore[arg-type]
    require(skipped and isinstance(index, Node), reason, rows)
    return rows.args[0], index  # type: ignore[return-value]


def finish(b: Bindings, formulation: str) -> Match:
    """The Match of an unrolled loop: E separate matrices a projection, or the packed tensor that they are slices of."""
    check_sizes(b.x, b.ids, b.weights, pairs=b.pairs)
    first = [[_stored(pick.first[i]) for pick in b.picks] for i in range(len(b.picks[0].first))]
    down = [_stored(pick.down) for pick in b.picks]
    packed = b.activation.gate.part is not None
    gate = _collect([matrix for matrix, _ in first[0]])
    up = () if packed or b.activation.up is None else _collect([matrix for matrix, _ in first[1]])
    columns = {"gate": first[0], "down": down} | ({"up": first[1]} if up else {})
    transposed = {role for role, column in columns.items() if column[0][1]}
    downs = _collect([matrix for matrix, _ in down])
    # A list of tensors is one kind: all packed, or all one an expert.
    if len({len(found) for found in (gate, up, downs) if found}) > 1:
        gate, downs = tuple(m for m, _ in first[0]), tuple(m for m, _ in down)
        up = tuple(m for m, _ in first[1]) if up else ()
    biases = [*zip(*(pick.first_bias for pick in b.picks), strict=True), [pick.down_bias for pick in b.picks]]
    collected = [() if column[0] is None else _collect(list(column)) for column in biases]  # type: ignore[arg-type]
    return Match(
        formulation=formulation,
        spec=experts_spec(b.activation, b.down.node, b.output, b.weight_at),
        x_TH=b.x,
        ids_TK=b.ids,
        weights_scale=b.scale,
        one_each=b.one_each,
        chosen_TKE=b.roles.get("chosen"),
        weights_TK=b.weights,
        gate=gate,
        up=up,
        down=downs,
        gate_bias=collected[0],
        up_bias=collected[1] if up else (),
        down_bias=collected[-1],
        transposed=frozenset(transposed),
        output=b.output,
        anchor=b.anchor,
    )
