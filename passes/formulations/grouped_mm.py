"""Sorted rows and a grouped matmul: transformers 5 with `experts_implementation="grouped_mm"`, and its relatives.

    ids -> sort -> perm; x[perm // k]; histc / bincount -> cumsum = offsets
    grouped_mm(rows, W1, offsets) -> act(gate) * up -> grouped_mm(.., W2, offsets)
    rows * w[perm]; rows[inverse perm] -> view [T, k, H] -> sum(1)         (or index_add at perm // k)

Both `aten._grouped_mm` and transformers' opaque `grouped_mm_fallback` count as the grouped matmul. The masks that
transformers writes for expert parallelism (rows of ids >= E become zero) say what `moepdl::experts` says about such
ids, and are looked through.
"""

from __future__ import annotations

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
    experts_spec,
    split_by_activation,
    trailing_cast,
)
from moe_compiler.passes.formulations.bias import behind_bias, gathered_bias, split_biases
from moe_compiler.passes.formulations.counts import match_counts
from moe_compiler.passes.formulations.pairs import in_range, match_choice, match_pair_index, match_weights, rows_at
from moe_compiler.passes.formulations.walk import (
    arg,
    elements_of,
    is_op,
    item_of,
    require,
    same_size,
    same_value,
    shape_of,
    strip,
    strip_ids,
    strip_views,
    strip_views_casts,
    users_through,
    view_or_cast,
)

__all__ = ["GROUPED_MM"]


def _is_grouped(node: object) -> bool:
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    namespace = getattr(node.target, "namespace", "")
    return (namespace == "aten" and op_name(node) == "_grouped_mm") or (
        namespace == "transformers" and op_name(node) == "grouped_mm_fallback"
    )


def _offsets_of(node: Node) -> Node | None:
    return node.args[2] if len(node.args) > 2 else node.kwargs.get("offs")


def _is_sentinel_mask(node: Node) -> bool:
    """masked_fill(rows, ids >= E, 0): what our operator does to such rows anyway."""
    if not is_op(node, "masked_fill", "masked_fill_") or node.args[2] != 0:
        return False
    mask = node.args[1]
    return isinstance(mask, Node) and is_op(strip_views(mask), "ge")


def _check_masks(b: Bindings) -> None:
    """Rows that are set to zero on the way must be those of ids >= E: our operator computes nothing for them either."""
    masked = False
    pending, seen = [b.output], {b.x, b.ids, b.weights}
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if _is_sentinel_mask(node):
            compared = strip_views(node.args[1])
            ids = strip_ids(compared.args[0])
            known = item_of(ids, 0, "sort") is b.sort or ids is strip_ids(b.ids)
            require(known and compared.args[1] == b.experts, "rows are set to zero by another mask than ids >= E", node)
            masked = True
        pending.extend(node.all_input_nodes)
    require(
        masked or not b.clamped or in_range(b.ids, b.experts),
        "the counted ids are clamped, and rows of ids beyond the experts are not set to zero",
        b.anchor,
    )


def _passes(node: Node) -> bool:
    return view_or_cast(node) or _is_sentinel_mask(node)


def _rows(node: Node) -> Node:
    return strip(node, _passes)


def anchors(graph: Graph) -> list[Node]:
    """Grouped matmuls whose rows are gathered tokens: the first matmul of a block."""
    found = []
    for node in graph.nodes:
        if _is_grouped(node) and not any(_is_grouped(n) for n in _ancestors(node.args[0], 12)):
            found.append(node)
    return found


def _ancestors(node: Node, limit: int) -> set[Node]:
    seen: set[Node] = set()
    level = {node}
    for _ in range(limit):
        seen |= level
        if any(_is_grouped(n) for n in level):
            break
        level = {n for parent in level for n in parent.all_input_nodes if not is_op(parent, "index", "index_select")}
    return seen


def gather(b: Bindings) -> None:
    rows = _rows(b.anchor.args[0])
    gathered = rows_at(rows)
    require(gathered is not None, f"the rows come from {op_name(rows)}, not from a gather of tokens", rows)
    assert gathered is not None
    token = strip_ids(gathered[1])
    divided = is_op(token, "floor_divide") or (
        is_op(token, "div") and arg(token, "rounding_mode") in ("floor", "trunc")
    )
    of_pairs = None if divided else rows_at(token)  # the token of each pair, brought into the sorted order
    require(
        of_pairs is not None or (divided and isinstance(token.args[1], int)), "the token index is not perm // k", token
    )
    perm = token.args[0] if of_pairs is None else of_pairs[1]
    pairs, k = (None, token.args[1]) if of_pairs is None else (of_pairs[0], None)
    b.bind(x=gathered[0], perm=strip_views(perm), k=k, pairs=pairs, token=token, rows=rows)


def order(b: Bindings) -> None:
    perm = b.perm
    if op_name(perm) == "getitem" and perm.args[1] == 1 and is_op(perm.args[0], "sort"):
        sort = perm.args[0]
    else:
        require(is_op(perm, "argsort"), f"the permutation comes from {op_name(perm)}, not from a sort of the ids", perm)
        sort = perm
    require(not arg(sort, "descending"), "the ids are sorted in descending order", sort)
    ids = match_choice(sort.args[0])
    own = int(shape_of(ids)[-1])
    if b.pairs is not None:
        match_pair_index(b.pairs, own)
        b.bind(k=own)
    require(own == b.k, f"perm // {b.k}, but {own} experts a token", ids)
    b.bind(sort=sort, ids=ids)


def offsets(b: Bindings) -> None:
    offs = _offsets_of(b.anchor)
    require(offs is not None, "the grouped matmul has no offsets", b.anchor)
    total = strip_views(offs)
    total = total.args[0] if is_op(total, "to", "_to_copy") else total  # type: ignore[assignment]
    require(is_op(total, "cumsum"), f"the offsets come from {op_name(total)}, not from a cumsum of counts", total)
    counts = total.args[0]
    if is_op(counts, "histc"):
        experts, low, high = arg(counts, "bins"), arg(counts, "min"), arg(counts, "max")
        require((low, high) == (0, experts - 1), "the histogram does not count ids 0 .. E-1", counts)
    elif not is_op(counts, "bincount"):
        b.bind(offs=offs, experts=match_counts(counts, b.ids, b.sort), clamped=False)
        return
    else:
        experts = arg(counts, "minlength")
    source = counts.args[0]
    if is_op(source, "to", "_to_copy"):
        exact = source.meta["val"].dtype in (torch.int32, torch.int64, torch.float32, torch.float64)
        require(exact, f"the ids are rounded to {source.meta['val'].dtype} before they are counted", source)
        source = source.args[0]
    clamped = is_op(source, "clamp", "clamp_", "clip", "clip_")
    if clamped:
        low, high = arg(source, "min"), arg(source, "max")
        whole = high == experts - 1 and (low is None or low == 0)
        require(whole, f"the counted ids are clamped to {low}..{high}, not to 0..{experts - 1}", source)
        source = source.args[0]
    known = strip_ids(source) is strip_ids(b.ids) or (
        op_name(source) == "getitem" and source.args[1] == 0 and source.args[0] is b.sort
    )
    require(known, "the counts are not of the sorted ids", counts)
    b.bind(offs=offs, experts=experts, clamped=clamped)


def _weight(b: Bindings, matmul: Node, what: str) -> Node:
    weight = matmul.args[1]
    shape = shape_of(weight)
    require(len(shape) == 3, f"the {what} weights are not packed", matmul)
    require(shape[0] == b.experts, f"{b.experts} counts but {shape[0]} {what} weights", matmul)
    require(len(matmul.args) < 4 or matmul.args[3] is None, "the grouped matmul has a bias", matmul)
    return weight


def _bias(b: Bindings, product: Node, operand: Node, what: str) -> tuple[Node, ...]:
    """The packed bias behind what is added to a grouped matmul: gathered by the sorted ids."""
    packed, index = gathered_bias(operand, b.experts, shape_of(product)[-1], what)
    ids = strip_ids(index)
    if is_op(ids, "clamp", "clamp_", "clip", "clip_", "clamp_max"):
        # Rows of ids beyond the experts get the last expert's bias, unless they are set to zero behind it.
        low, high = (arg(ids, "min") if not is_op(ids, "clamp_max") else None), arg(ids, "max")
        require(high == b.experts - 1 and low in (None, 0), f"the ids of the {what} bias are clamped", ids)
        ids = strip_ids(ids.args[0])
        masked = any(_is_sentinel_mask(user) for adder in users_through(operand, view_or_cast) for user in adder.users)
        require(
            masked or in_range(b.ids, b.experts),
            f"the {what} bias is added to rows of ids beyond the experts",
            product,
        )
    require(item_of(ids, 0, "sort") is b.sort, f"the {what} bias is not gathered by the sorted ids", operand)
    return (packed,)


def down(b: Bindings) -> None:
    candidates = [n for n in b.offs.users if _is_grouped(n) and n is not b.anchor]
    require(bool(candidates), "no second grouped matmul uses the same offsets", b.anchor)
    errors: list[Miss] = []
    for candidate in candidates:
        try:
            activation, biases = split_biases(match_activation(candidate.args[0], weighted=True), _is_grouped, _passes)
        except Miss as miss:
            errors.append(miss)
            continue
        halves = [activation.gate] + ([activation.up] if activation.up else [])
        if all(_is_grouped(half.source) and half.source.args[0] is b.anchor.args[0] for half in halves):
            b.bind(second=candidate, activation=activation)
            _weight(b, candidate, "down")
            b.bind(biases={product: _bias(b, product, operand, "gate and up") for product, operand in biases.items()})
            last, added = behind_bias(candidate, "down", _is_grouped, _passes)
            b.bind(last=last, down_bias=() if added is None else _bias(b, candidate, added, "down"))
            return
    if errors:
        raise errors[0]
    raise Miss("the activation does not come from grouped matmuls of the same rows", candidates[0])


def _weights_at_pairs(b: Bindings, node: Node) -> Node:
    """The [T, k] weights behind w[perm] (rows sorted) or behind a plain flattening (rows in pair order)."""
    require(
        is_op(node, "index", "index_select", "gather"),
        f"the routing weights come from {op_name(node)}, not from w[perm]",
        node,
    )
    index = node.args[1][0] if is_op(node, "index") else node.args[2]
    require(same_value(strip_views(index), b.perm), "the routing weights are gathered by another index than perm", node)
    return match_weights(node.args[0], b.ids, node)


def weigh(b: Bindings) -> None:
    norm = combine.row_norm(b.last) if b.activation.weight is None else None
    b.bind(per_pair=norm is not None)
    if norm is not None:
        _end_with_rows(b, norm)
        return
    if b.activation.weight is not None:
        combine.check_weighted_inside(b.activation.weight, b.down_bias)
        b.bind(weights=_weights_at_pairs(b, strip_views_casts(b.activation.weight)), home=False, weighted=b.second)
        return
    step = _next(b.last)
    if is_op(step, "index"):
        combine.match_inverse(step.args[1][0], b.perm)
        rows = step
        step = _next(step)
        if not is_op(step, "mul"):
            weight, product, output = combine.match_weighted_sum(rows, elements_of(shape_of(b.ids)[:-1]), b.k)
            b.bind(weights=match_weights(weight, b.ids, product), home=True, output=trailing_cast(output))
            return
        weight = combine.match_weigh(step, rows)
        b.bind(weights=match_weights(weight, b.ids, step), home=True)
    else:
        weight = combine.match_weigh(step, _behind(step, b.last))
        b.bind(weights=_weights_at_pairs(b, strip_views_casts(weight)), home=False)
    b.bind(weighted=step)


def _end_with_rows(b: Bindings, norm: Node) -> None:
    """The block ends with the sorted rows, which are normalised before they are weighted: x and ids in their order."""
    sorted_ids = next((n for n in b.sort.users if item_of(n, 0, "sort") is b.sort), None)
    require(
        sorted_ids is not None,
        "the rows are normalised before they are weighted, and nothing holds the sorted ids",
        norm,
        "sort the ids with torch.sort, and use both of its results",
    )
    b.bind(x=b.rows, ids=sorted_ids, weights=None, output=b.last)


def _behind(step: Node, rows: Node) -> Node:
    """The operand of `step` that is `rows` behind sentinel masks, as `match_weigh` will see it."""
    for operand in step.args[:2]:
        if isinstance(operand, Node) and _rows(operand) is rows:
            return strip_views_casts(operand)
    return rows


def _next(node: Node) -> Node:
    """The consumer of rows, seen through views, casts and sentinel masks."""
    users = users_through(node, _passes)
    require(len(users) == 1, f"the experts' rows are used {len(users)} times instead of once", node)
    return users[0]


def home(b: Bindings) -> None:
    if "output" in b.roles:  # rows that end the block, or rows that are weighted and summed by one product
        return
    step = _next(b.weighted)
    tokens = elements_of(shape_of(b.ids)[:-1])
    if not b.home and is_op(step, "index_add", "index_add_", "scatter_add", "scatter_add_"):
        require(
            is_op(step.args[0], "zeros", "zeros_like", "new_zeros"),
            "the combine adds to something else than zeros",
            step,
        )
        require(
            step.args[1] == 0 and same_value(strip_views(step.args[2]), b.token),
            "rows are added at another index than perm // k",
            step,
        )
        require(same_size(shape_of(step)[0], tokens), "the combine has another number of rows", step)
        scaled = is_op(step, "index_add", "index_add_") and arg(step, "alpha") != 1
        require(not scaled, "the combine scales the rows (alpha)", step)
        b.bind(output=trailing_cast(step))
        return
    rows = b.weighted
    if not b.home:
        require(
            is_op(step, "index", "index_select"),
            f"the weighted rows are consumed by {op_name(step)}, not brought back to pair order",
            step,
        )
        index = step.args[1][0] if is_op(step, "index") else step.args[2]
        combine.match_inverse(index, b.perm)
        rows, step = step, _next(step)
    b.bind(output=trailing_cast(combine.match_sum_over_k(step, rows, tokens, b.k)))


def finish(b: Bindings) -> Match:
    _check_masks(b)
    check_sizes(b.x, b.ids, b.weights, per_pair=b.per_pair)
    gate, up = split_by_activation(b.activation, lambda matmul: _weight(b, matmul, "gate and up"))
    return Match(
        formulation="grouped_mm",
        spec=experts_spec(b.activation, b.second, b.output),
        x_TH=b.x,
        ids_TK=b.ids,
        weights_TK=b.weights,
        gate=gate,
        up=up,
        down=(b.second.args[1],),
        gate_bias=b.biases.get(b.activation.gate.source, ()),
        up_bias=b.biases.get(b.activation.up.source, ()) if up else (),
        down_bias=b.down_bias,
        transposed=frozenset({"gate", "up", "down"}),
        per_pair=b.per_pair,
        output=b.output,
        anchor=b.anchor,
    )


class GroupedExperts(torch.nn.Module):
    """Example: softmax router, packed [E, 2I, H] and [E, H, I] weights, sorted rows and `aten._grouped_mm`."""

    def __init__(self, experts: int, top_k: int, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.top_k = top_k
        self.experts = experts
        self.router = torch.nn.Linear(hidden, experts, bias=False, dtype=dtype)
        self.gate_up = torch.nn.Parameter(torch.randn(experts, 2 * intermediate, hidden, dtype=dtype) * hidden**-0.5)
        self.down = torch.nn.Parameter(torch.randn(experts, hidden, intermediate, dtype=dtype) * intermediate**-0.5)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        scores = torch.softmax(self.router(x_TH).float(), dim=-1)
        weights, ids = torch.topk(scores, self.top_k, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x_TH.dtype)
        sorted_ids, perm = torch.sort(ids.reshape(-1))
        rows = x_TH[perm // self.top_k]
        counts = torch.histc(
            sorted_ids.float() if x_TH.device.type == "cpu" else sorted_ids.int(),
            bins=self.experts,
            min=0,
            max=self.experts - 1,
        )
        offsets = torch.cumsum(counts, 0, dtype=torch.int32)
        gate, up = _grouped(rows, self.gate_up.transpose(-2, -1), offsets).chunk(2, dim=-1)
        rows = _grouped(torch.nn.functional.silu(gate) * up, self.down.transpose(-2, -1), offsets)
        rows = rows * weights.reshape(-1)[perm].unsqueeze(-1)
        inverse = torch.empty_like(perm)
        inverse[perm] = torch.arange(perm.numel(), device=perm.device)
        return rows[inverse].view(x_TH.shape[0], self.top_k, x_TH.shape[1]).sum(1).to(x_TH.dtype)


def _grouped(rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return torch._grouped_mm(rows, weight, offs=offsets)


def example(
    dtype: torch.dtype = torch.bfloat16, experts: int = 8, top_k: int = 2, hidden: int = 32, intermediate: int = 16
) -> Example:
    module = GroupedExperts(experts, top_k, hidden, intermediate, dtype)
    return Example(module, lambda tokens: (torch.randn(tokens, hidden, dtype=dtype),))


GROUPED_MM = Formulation(
    name="grouped_mm",
    summary="rows sorted by expert, grouped matmuls, inverse permutation and sum (transformers 5 grouped_mm)",
    anchors=anchors,
    steps=(gather, order, offsets, down, weigh, home),
    finish=finish,
    example=example,
)
