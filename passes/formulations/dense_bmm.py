"""Every expert on every token, with scores that are zero where an expert was not chosen: Llama 4.

    top-k of the logits -> scatter into full(-inf) -> sigmoid = scores [T, E], exactly 0 where not chosen
    x repeated E times, * scores.T as a column -> [E, T, H] @ W1 [E, H, 2I] -> act(gate) * up -> @ W2 [E, I, H]
    sum over E -> [T, H]

Running only the chosen experts is the same because the others add exactly zero: their weight is zero, it sits on the
output, in front of a down projection without bias, or on the input of an expert without any, for which expert(0) = 0.
So the scores must be sigmoid or softmax of a scatter into -inf, a scatter of weights into zeros, of one top-k, or
weights times a one-hot encoding of the ids, summed over k; anything else is a Miss.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy
import torch
from torch.fx import Graph, Node

from moe_compiler.moe_ir import Match, Miss, op_name
from moe_compiler.passes.formulations import combine
from moe_compiler.passes.formulations.activation import match_activation
from moe_compiler.passes.formulations.base import (
    Bindings,
    Example,
    Formulation,
    check_sizes,
    check_weighted_input,
    experts_spec,
    split_by_activation,
    trailing_cast,
)
from moe_compiler.passes.formulations.bias import behind_bias, split_biases
from moe_compiler.passes.formulations.contraction import Product, contraction, fed_by, match_product
from moe_compiler.passes.formulations.dense_scores import choose
from moe_compiler.passes.formulations.pairs import token_rows
from moe_compiler.passes.formulations.walk import (
    arg,
    elements_of,
    is_op,
    rank_of,
    require,
    same_shape,
    shape_of,
    strip_views_casts,
    swaps_last_two,
    without_units,
)

__all__ = ["DENSE_BMM"]


@dataclass(frozen=True)
class _First:
    """A first product: every token with every expert's matrix. column: the scores as [E, T, 1] on its input, if any."""

    product: Product
    tokens: Node
    column: Node | None


def _experts(weight: Node) -> int | None:
    """E of a packed [E, ., .] weight, None for another tensor."""
    if rank_of(weight) != 3:
        return None
    size = shape_of(weight)[0]
    return int(size) if size.is_Integer and size > 1 else None


def _replicated(node: Node, experts: int) -> Node | None:
    """What `node` holds once for each expert, experts slowest; None when it is something else."""
    node = strip_views_casts(node)
    source = node.args[0] if node.args else None
    if is_op(node, "stack", "cat", "concat") and isinstance(source, (list, tuple)):
        same = len(source) == experts and all(item is source[0] for item in source) and arg(node, "dim") == 0
        return source[0] if same else None
    if not isinstance(source, Node):
        return None
    before, after = shape_of(source), shape_of(node)
    if is_op(node, "repeat", "tile"):
        first, *rest = node.args[1]  # type: ignore[misc]
        whole = first == experts and all(times == 1 for times in rest)
        return source if whole and (len(before) == 2 or before[0] == 1) else None
    if is_op(node, "expand", "broadcast_to", "expand_as") and len(after) == 3 and after[0] == experts:
        inner = before[1:] if len(before) == 3 and before[0] == 1 else before
        return source if same_shape(inner, after[1:]) else None
    return None


def _rows(node: Node, experts: int) -> tuple[Node, Node | None] | None:
    """(tokens, column of scores) when `node` is the tokens for each expert, weighted or not."""
    plain = _replicated(node, experts)
    if plain is not None:
        return plain, None
    node = strip_views_casts(node)
    if not is_op(node, "mul") or not all(isinstance(operand, Node) for operand in node.args[:2]):
        return None
    full = shape_of(node)
    for tokens, column in (node.args[:2], node.args[1::-1]):
        if not same_shape(shape_of(column), (*full[:-1], sympy.Integer(1))):
            continue
        source = _replicated(tokens, experts)
        own = shape_of(tokens)
        if source is None and len(full) == 3 and full[0] == experts and same_shape(own[-2:], full[1:]):
            source = tokens if len(own) == 2 or own[0] == 1 else None  # type: ignore[assignment]
        if source is not None:
            return source, column
    return None


def _first(node: object) -> _First | None:
    """Read a product as all tokens times all experts, None when it is not."""
    found = contraction(node, biased=True)
    if found is None:
        return None
    for weight, rows in ((found.right, found.left), (found.left, found.right)):
        experts = _experts(weight)
        if experts is None:
            continue
        try:
            product = match_product(found.node, lambda operand, weight=weight: operand is weight, "expert", biased=True)  # type: ignore[misc]
        except Miss:
            continue
        if product.weight is not weight or len(product.lead) != 1 or product.lead not in product.out_letters:
            continue
        if product.lead not in product.rows_letters:
            return _First(product, rows, None)
        read = _rows(rows, experts)
        if read is not None:
            return _First(product, *read)
    return None


def _packed_product(node: Node) -> Product | None:
    """A product of rows for each expert with that expert's matrix."""
    found = contraction(node, biased=True)
    if found is None:
        return None
    for weight in (found.right, found.left):
        if _experts(weight) is None:
            continue
        try:
            product = match_product(node, lambda operand, weight=weight: operand is weight, "down", biased=True)  # type: ignore[misc]
        except Miss:
            continue
        if len(product.lead) == 1 and product.lead in product.rows_letters:
            return product
    return None


def _bias(b: Bindings, product: Product, operand: Node | None, what: str) -> tuple[Node, ...]:
    """The packed bias [E, out] behind what is added to a product, for every token alike."""
    if operand is None:
        return ()
    width = shape_of(product.node)[-1]
    bias = strip_views_casts(operand)
    if is_op(bias, "expand", "broadcast_to", "expand_as"):
        bias = strip_views_casts(bias.args[0])  # type: ignore[arg-type]
    own, packed = shape_of(operand), without_units(shape_of(bias))
    by_expert = len(own) == 3 and own[0] == b.experts and own[2] == width and (own[1] == 1 or bias is not operand)
    fits = by_expert and packed == (b.experts, width) and shape_of(bias)[0] == b.experts
    require(fits, f"what is added to the {what} projection is not a bias of one row an expert", operand)
    return (bias,)


def anchors(graph: Graph) -> list[Node]:
    """Down projections of all experts at once: fed by a product of all tokens with all experts."""
    first: set[Node] = set()
    found: list[Node] = []
    for node in graph.nodes:
        if contraction(node, biased=True) is None:
            continue
        product = _packed_product(node)
        if product is not None and fed_by(product.rows, first):
            found.append(node)
        # It may be both: a batch [B, S, H] times a plain matrix reads as B matrices for S rows, and what it feeds as a
        # down projection. The steps tell them apart.
        if _first(node) is not None:
            first.add(node)
    return found


def _check_order(product: Product, what: str) -> None:
    free = product.rows_letters.replace(product.lead, "").replace(product.contracted, "")
    ordered = product.out_letters == product.lead + free + product.made
    require(ordered, f"the {what} projection's result is not [E, T, ..]", product.node)


def down(b: Bindings) -> None:
    """The second product: each expert's rows with that expert's matrix."""
    product = _packed_product(b.anchor)
    assert product is not None
    _check_order(product, "down")
    free = product.rows_letters.replace(product.lead, "").replace(product.contracted, "")
    ordered = product.rows_letters == product.lead + free + product.contracted
    require(ordered, "the down projection's rows are not [E, T, I]", b.anchor)
    experts = _experts(product.weight)
    assert experts is not None
    shape = shape_of(b.anchor)
    b.bind(down=product, experts=experts, tokens=elements_of(shape[1:-1]), width=shape[-1])
    last, added = behind_bias(b.anchor, "down")
    b.bind(last=last, down_bias=_bias(b, product, added, "down"))


def activate(b: Bindings) -> None:
    """Its rows are act(gate) * up, or act(gate), of products of all tokens with all experts."""
    activation, added = split_biases(match_activation(b.down.rows, weighted=True))
    if activation.weight is not None:
        combine.check_weighted_inside(activation.weight, b.down_bias)
    first: dict[Node, _First] = {}
    for half in (activation.gate, activation.up):
        if half is None:
            continue
        read = _first(half.source)
        if read is None:
            match_product(half.source, lambda operand: _experts(operand) is not None, "gate and up")
            raise Miss("the gate and up projections do not read every token for every expert", half.source)
        _check_order(read.product, "gate and up")
        experts = _experts(read.product.weight)
        require(experts == b.experts, f"{experts} gate and up weights, but {b.experts} down weights", half.source)
        first[half.source] = read
    one = next(iter(first.values()))
    with_bias = next(iter(added), b.last if b.down_bias else None)
    require(
        one.column is None or with_bias is None,
        "the tokens are weighted before experts with a bias: one that was not chosen gets zeros and gives its bias",
        with_bias,
        "apply the routing weight to the experts' output",
    )
    biases = {source: _bias(b, read.product, added.get(source), "gate and up") for source, read in first.items()}
    b.bind(biases=biases)
    b.bind(activation=activation, first=first, x=token_rows(one.tokens, b.tokens, one.product.node), column=one.column)
    for other in first.values():
        same = token_rows(other.tokens, b.tokens, other.product.node) is b.x and (
            other.column is one.column
            or (
                other.column is not None
                and one.column is not None
                and strip_views_casts(other.column) is strip_views_casts(one.column)
            )
        )
        require(same, "gate and up read different rows", other.product.node)


def sum_experts(b: Bindings) -> None:
    """The experts' results are summed over E, weighted there when they were not weighted before, on their way."""
    step = combine.next_step(b.last, "the experts' rows")
    total = (sympy.Integer(b.experts), b.tokens, b.width)
    columns = [column for column in (b.column, b.activation.weight) if column is not None]
    require(len(columns) < 2, "the experts' rows are weighted before the experts and inside", step)
    if is_op(step, "sum"):
        require(bool(columns), "the experts' rows are summed without weights", step)
        scores, summed, summand = _by_expert(columns[0]), step, b.last
    else:
        require(not columns, f"the weighted experts' rows are consumed by {op_name(step)}, not summed", step)
        product = contraction(step)
        if product is not None:
            b.bind(scores=_einsum_scores(b, step), output=trailing_cast(step), weight_at="output")
            return
        scores = _by_expert(combine.match_weigh(step, b.last))
        summed, summand = combine.next_step(step, "the weighted rows"), step
    require(is_op(summed, "sum"), f"the experts' rows are consumed by {op_name(summed)}, not summed over E", summed)
    source = summed.args[0]
    require(strip_views_casts(source) is summand, "another value is summed", summed)
    shape = shape_of(source)
    seen = (shape[0], elements_of(shape[1:-1]), shape[-1])
    require(len(shape) >= 3 and same_shape(seen, total), "the experts' rows are not summed as [E, T, H]", summed)
    dims = arg(summed, "dim")
    dims = [d % len(shape) for d in ([dims] if isinstance(dims, int) else dims or [])]
    require(dims == [0] and not arg(summed, "keepdim"), "the sum is not over the experts", summed)
    b.bind(scores=scores, output=trailing_cast(summed), weight_at="input" if b.column is not None else "output")


def _by_expert(column: Node) -> Node:
    """The [T, E] scores behind their transpose as a column, [E, T, 1] or [E * T, 1]."""
    node = strip_views_casts(column)
    if swaps_last_two(node) and len(shape_of(node)) == 2:
        return node.args[0]
    rank = len(shape_of(node))
    if rank == 3 and shape_of(node)[-1] == 1 and is_op(node, "transpose", "swapaxes", "permute"):
        dims = {d % 3 for d in node.args[1:3]} if not is_op(node, "permute") else None
        if dims == {0, 1} or (dims is None and [d % 3 for d in node.args[1]] == [1, 0, 2]):
            return strip_views_casts(node.args[0])
    raise Miss("the weights on the experts' rows are not the transpose of [T, E] scores", column)


def _einsum_scores(b: Bindings, step: Node) -> Node:
    """The scores of einsum("eth,te->th", rows, scores), with any letters and in either order."""
    product = contraction(step)
    assert product is not None
    left = strip_views_casts(product.left) is b.last
    require(left or strip_views_casts(product.right) is b.last, "another value is summed", step)
    letters = product.left_letters if left else product.right_letters
    weight, own = (product.right, product.right_letters) if left else (product.left, product.left_letters)
    rows = product.left if left else product.right
    fits = len(letters) == 3 and same_shape(shape_of(rows), (sympy.Integer(b.experts), b.tokens, b.width))
    require(fits, "the experts' rows are not summed as [E, T, H]", step)
    e, t, h = letters
    require(product.out_letters == t + h and set(own) == {e, t}, "the product is not a sum over the experts", step)
    return weight if own == t + e else _by_expert(weight)


def finish(b: Bindings) -> Match:
    check_sizes(b.x, b.ids, b.weights)
    gate, up = split_by_activation(b.activation, lambda source: b.first[source].product.weight)
    products = {"gate": b.first[b.activation.gate.source].product, "down": b.down}
    if up:
        products["up"] = b.first[b.activation.up.source].product
    transposed = {role for role, product in products.items() if product.transposed}
    spec = experts_spec(b.activation, b.anchor, b.output, b.weight_at)
    if b.weight_at == "input":
        check_weighted_input(next(iter(b.first.values())).tokens, spec.compute_dtype, int(shape_of(b.ids)[-1]))
    return Match(
        formulation="dense_bmm",
        spec=spec,
        x_TH=b.x,
        ids_TK=b.ids,
        weights_TK=b.weights,
        gate=gate,
        up=up,
        down=(b.down.weight,),
        gate_bias=b.biases[b.activation.gate.source],
        up_bias=b.biases[b.activation.up.source] if up else (),
        down_bias=b.down_bias,
        transposed=frozenset(transposed),
        output=b.output,
        anchor=b.anchor,
        router=b.router,
        logits=b.logits,
    )


class DenseExperts(torch.nn.Module):
    """Example: Llama 4's router and experts, [E, H, 2I] and [E, I, H] weights, the score on the input."""

    def __init__(self, experts: int, top_k: int, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.top_k = top_k
        self.experts = experts
        self.router = torch.nn.Linear(hidden, experts, bias=False, dtype=dtype)
        self.gate_up = torch.nn.Parameter(torch.randn(experts, hidden, 2 * intermediate, dtype=dtype) * hidden**-0.5)
        self.down = torch.nn.Parameter(torch.randn(experts, intermediate, hidden, dtype=dtype) * intermediate**-0.5)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        logits = self.router(x_TH)
        values, ids = torch.topk(logits, self.top_k, dim=1)
        scores = torch.full_like(logits, float("-inf")).scatter_(1, ids, values)
        scores = torch.sigmoid(scores.float()).to(x_TH.dtype)
        rows = x_TH.repeat(self.experts, 1) * scores.transpose(0, 1).reshape(-1, 1)
        gate, up = torch.bmm(rows.view(self.experts, -1, x_TH.shape[-1]), self.gate_up).chunk(2, dim=-1)
        rows = torch.bmm(up * torch.nn.functional.silu(gate), self.down)
        return rows.view(self.experts, -1, x_TH.shape[-1]).sum(dim=0)


def example(
    dtype: torch.dtype = torch.float32, experts: int = 8, top_k: int = 2, hidden: int = 32, intermediate: int = 16
) -> Example:
    """A module written this way, and inputs for it."""
    module = DenseExperts(experts, top_k, hidden, intermediate, dtype)
    return Example(module, lambda tokens: (torch.randn(tokens, hidden, dtype=dtype),))


DENSE_BMM = Formulation(
    name="dense_bmm",
    summary="all experts on all tokens, unchosen scores exactly zero, bmm and sum over the experts (Llama 4)",
    anchors=anchors,
    steps=(down, activate, sum_experts, choose),
    finish=finish,
    example=example,
)
