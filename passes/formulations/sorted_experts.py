"""Experts on sorted rows: where each expert's rows end, the products, their biases, and the Match that they make.

    W1 (+ bias) -> act (* w[perm]) -> W2 (+ bias)

A bias is one row for all rows of an expert: `bias[sorted ids]`, `repeat_interleave(bias, counts)`, or one vector in
each part's own product. A routing weight in the middle of an expert is one on its output, since the down projection is
linear, unless that has a bias.
"""

from __future__ import annotations

from torch.fx import Node

from moe_compiler.moe_ir import Match, Miss, op_name
from moe_compiler.passes.formulations import combine
from moe_compiler.passes.formulations.activation import Activation, match_activation
from moe_compiler.passes.formulations.base import Bindings, check_sizes, experts_spec
from moe_compiler.passes.formulations.bias import behind_bias, gathered_bias, split_biases
from moe_compiler.passes.formulations.counts import holds_sorted_ids, match_counts, match_kept_counts, match_offsets
from moe_compiler.passes.formulations.grouped_products import Grouped, is_product, read_grouped, same_groups
from moe_compiler.passes.formulations.matrices import collect
from moe_compiler.passes.formulations.pairs import in_range
from moe_compiler.passes.formulations.sentinels import check_masks, is_sentinel_mask, passes
from moe_compiler.passes.formulations.sorted_weights import scaled, sorted_weights, take, weigh_input
from moe_compiler.passes.formulations.walk import (
    arg,
    dtype_of,
    is_op,
    require,
    same_value,
    shape_of,
    strip,
    strip_ids,
    strip_views_casts,
    users_through,
    view_or_cast,
)

__all__ = ["activate", "count", "counts_of_sizes", "finish", "match_of", "match_sizes"]


def count(b: Bindings) -> None:
    """The rows are split by the counts of those ids."""
    groups = b.down.groups
    if isinstance(groups, Node):
        experts, clamped = match_offsets(groups, b.ids, b.order, b.roles.get("kept"))
    else:
        experts, clamped = match_sizes(b, groups), False
    b.bind(experts=experts, clamped=clamped)
    _check_experts(b, b.down)


def _check_experts(b: Bindings, product: Grouped) -> None:
    require(product.experts == b.experts, f"{b.experts} counts but {product.experts} matrices", product.node)
    require(same_groups(product, b.down), "the products split their rows differently", product.node)


def match_sizes(b: Bindings, sizes: tuple[object, ...]) -> int:
    """E when the sizes of a split are the counts of the ids, read one after the other."""
    if b.tokens == 0 and all(size == 0 for size in sizes):
        return len(sizes)  # no token at all: that they are the counts is known without looking
    return _counted(b, counts_of_sizes(b, sizes))


def counts_of_sizes(b: Bindings, sizes: tuple[object, ...]) -> Node:
    """The tensor [E] of which the sizes of a split are the numbers, in order; a Miss when they are not."""
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
    return counts


def _counted(b: Bindings, counts: Node) -> int:
    """E of counts of the ids, or of those that the model keeps of them."""
    kept = b.roles.get("kept")
    return match_counts(counts, b.ids, b.order) if kept is None else match_kept_counts(counts, kept)


def activate(b: Bindings) -> None:
    """The last product's rows are act(gate) * up, or act(gate), of products of the first rows.

    Weights that multiply the input or the middle of an expert must be the routing weights of the sorted pairs.
    """
    middle = scaled(strip(b.down.rows, passes), b.tokens * b.k)
    activation = match_activation(middle[0] if middle is not None else b.down.rows)
    activation, added = split_biases(activation, is_product, passes)
    first, biases = [], []
    for half in (activation.gate, activation.up):
        if half is None:
            continue
        product = read_grouped(half.source)
        if product is None:
            raise Miss(f"{op_name(half.source)} is no product of rows with their expert's matrix", half.source)
        require(same_value(product.rows, b.first_rows), "gate and up read different rows", product.node)
        _check_experts(b, product)
        first.append(product)
        biases.append(_bias(b, product, added.get(half.source), "gate and up"))
    b.bind(activation=activation, first=tuple(first), first_bias=tuple(biases))
    last, operand = behind_bias(b.anchor, "down", is_product, passes)
    b.bind(last=last, down_bias=_bias(b, b.down, operand, "down"))
    weigh_input(b, dtype_of(first[0].matmul))
    if middle is not None:
        combine.check_weighted_inside(middle[1], b.down_bias)
        take(b, sorted_weights(b, middle[1]), "output", b.anchor)


# Biases


def _bias(b: Bindings, product: Grouped, operand: Node | None, what: str) -> tuple[Node, ...]:
    """The biases of a product: in its parts, or in what is added to all rows behind it; () without one."""
    if operand is None:
        return product.biases
    require(not product.biases, f"the {what} projection has two biases", operand)
    _check_dtype(product, operand, what)
    source = strip_views_casts(operand)
    if is_op(source, "repeat_interleave"):
        return (_repeated(b, product, source, what),)
    packed, index = gathered_bias(operand, b.experts, shape_of(product.node)[-1], what)
    _check_bias_ids(b, product, operand, strip_ids(index), what)
    return (packed,)


def _check_dtype(product: Grouped, operand: Node, what: str) -> None:
    """A bias behind concatenated parts must be added in their dtype: a wider sum is rounded otherwise than ours."""
    for user in users_through(operand, view_or_cast):
        if product.matrices and is_op(user, "add", "add_"):
            own, full = dtype_of(product.node), dtype_of(user)
            require(own == full, f"the {what} bias is added in {full}, not in {own}", user)


def _repeated(b: Bindings, product: Grouped, node: Node, what: str) -> Node:
    """The packed bias of repeat_interleave(bias, counts): each expert's row once for each of its rows."""
    packed, counts = node.args[0], arg(node, "repeats")
    if not isinstance(packed, Node) or not isinstance(counts, Node) or arg(node, "dim") != 0:
        raise Miss(f"what is added to the {what} projection is not repeated as often as each expert has rows", node)
    width = shape_of(product.node)[-1]
    fits = shape_of(packed) == (b.experts, width)
    require(fits, f"what is added to the {what} projection is not a bias of {width} numbers an expert", node)
    _counted(b, counts)
    return packed


def _check_bias_ids(b: Bindings, product: Grouped, operand: Node, ids: Node, what: str) -> None:
    """A bias must be gathered by the sorted ids, clamped at most where no row is left of what the clamp changes."""
    if is_op(ids, "clamp", "clamp_", "clip", "clip_", "clamp_max"):
        # Rows of ids beyond the experts get the last expert's bias, unless they are set to zero behind it.
        low, high = (arg(ids, "min") if not is_op(ids, "clamp_max") else None), arg(ids, "max")
        require(high == b.experts - 1 and low in (None, 0), f"the ids of the {what} bias are clamped", ids)
        ids = strip_ids(ids.args[0])  # type: ignore[arg-type]
        masked = any(is_sentinel_mask(user) for adder in users_through(operand, view_or_cast) for user in adder.users)
        require(
            masked or in_range(b.ids, b.experts),
            f"the {what} bias is added to rows of ids beyond the experts",
            product.node,
        )
    own = holds_sorted_ids(ids, b.ids, b.order)
    require(own, f"the {what} bias is not gathered by the sorted ids", operand)


# The match


def finish(b: Bindings, formulation: str) -> Match:
    """The Match of a block of grouped products of sorted rows."""
    packed = b.activation.gate.part is not None
    roles = {"gate": b.first[0], "down": b.down}
    biases = {"gate": b.first_bias[0], "down": b.down_bias}
    if not packed and b.activation.up is not None:
        roles["up"], biases["up"] = b.first[1], b.first_bias[1]
    transposed = frozenset(role for role, product in roles.items() if product.transposed)
    if all(product.matrices for product in roles.values()):
        matrices = {role: product.matrices for role, product in roles.items()}
    else:
        matrices = {role: product.weights for role, product in roles.items()}
    return match_of(b, formulation, b.activation, b.down.matmul, matrices, transposed, biases)


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
    biases: dict[str, tuple[Node, ...]],
) -> Match:
    """The Match of a block of sorted rows. matrices, biases: for each role one packed tensor, or one an expert.

    Matrices that are the slices of one tensor become that tensor, if it is so in all roles: a list of tensors is one
    kind for all of them.
    """
    check_sizes(b.x, b.ids, b.weights, per_pair=b.per_pair)
    _check_widths(b, activation, matrices, transposed)
    check_masks(b, tuple(node for found in (*matrices.values(), *biases.values()) for node in found))
    together = {role: collect(list(found)) if len(found) > 1 else found for role, found in matrices.items()}
    if len({len(found) for found in together.values()}) == 1:
        matrices = together
    vectors = {role: collect(list(found)) if len(found) > 1 else found for role, found in biases.items()}
    return Match(
        formulation=formulation,
        spec=experts_spec(activation, matmul, b.output, b.weight_at or "output"),
        x_TH=b.x,
        ids_TK=b.ids,
        weights_TK=b.weights,
        weights_KTE=b.roles.get("weights_TE"),
        kept=b.roles.get("kept"),
        router_miss=b.roles.get("router_miss"),
        gate=matrices["gate"],
        up=matrices.get("up", ()),
        down=matrices["down"],
        gate_bias=vectors["gate"],
        up_bias=vectors.get("up", ()),
        down_bias=vectors["down"],
        transposed=transposed,
        per_pair=b.per_pair,
        output=b.output,
        base=b.roles.get("base"),
        anchor=b.anchor,
    )
