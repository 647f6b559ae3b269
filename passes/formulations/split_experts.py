"""Sorted rows split by a list of sizes, a whole expert a part: torchtitan's loop, DeepSeek's inference.

    sizes = counts.tolist(); parts = split(x[perm // k], sizes)
    rows = cat([expert_e(part) for e, part in enumerate(parts)])
    added at perm // k, or new[perm] = rows and summed over k in pair order

As `split_linear`, but the parts stay apart until the expert is done. The code must run every expert, also those
without rows: a loop that skips them branches on the data and cannot be captured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from moe_compiler.moe_ir import Match, op_name
from moe_compiler.passes.formulations import sorted_experts, sorted_home, sorted_rows
from moe_compiler.passes.formulations.activation import Activation, match_activation
from moe_compiler.passes.formulations.base import Bindings, Example, Formulation
from moe_compiler.passes.formulations.bias import split_biases, vector_bias
from moe_compiler.passes.formulations.contraction import Product, contraction
from moe_compiler.passes.formulations.grouped_products import part_of, part_product, read_parts
from moe_compiler.passes.formulations.matrices import plain_product, stored
from moe_compiler.passes.formulations.one_hot_loop import Expert
from moe_compiler.passes.formulations.sorted_weights import weigh_input
from moe_compiler.passes.formulations.walk import arg, dtype_of, is_op, require, shape_of, strip_views_casts

__all__ = ["SPLIT_EXPERTS"]


def _split_before(node: Node, limit: int = 12) -> bool:
    """Do the parts of a split by a list of sizes reach `node`?"""
    level, seen = [node], {node}
    for _ in range(limit):
        if any(part_of(found) is not None for found in level):
            return True
        level = [n for n in dict.fromkeys(m for found in level for m in found.all_input_nodes) if n not in seen]
        seen.update(level)
    return False


def _is_product(node: object) -> bool:
    """A product, also one with a bias."""
    if is_op(node, "add", "add_"):
        return any(_is_product(source) for source in node.args[:2])  # type: ignore[attr-defined]
    return is_op(node, "linear", "addmm") or contraction(node) is not None


def anchors(graph: Graph) -> list[Node]:
    """Concatenated products, each of an activation of a part of one split."""
    found = []
    for node in graph.nodes:
        if not is_op(node, "cat", "concat") or not isinstance(node.args[0], (list, tuple)) or arg(node, "dim") != 0:
            continue
        first = strip_views_casts(node.args[0][0]) if node.args[0] else node
        if _is_product(first) and read_parts(node) is None and _split_before(first):
            found.append(node)
    return found


@dataclass(frozen=True)
class _Expert:
    """What one part of the rows goes through: gate and up (or the one that there is), an activation, down."""

    activation: Activation
    first: tuple[Product, ...]
    down: Product
    first_bias: tuple[Node | None, ...]
    down_bias: Node | None

    def kind(self) -> tuple[object, ...]:
        """What must be equal for all experts of one block."""
        products = (*self.first, self.down)
        layouts = tuple((shape_of(matrix), transposed) for matrix, transposed in map(stored, products))
        half = self.activation.gate
        own = (*vars(replace(self.activation, gate=None, up=None)).values(), half.part, self.activation.up is not None)
        biases = tuple(bias is not None for bias in (*self.first_bias, self.down_bias))
        return (*own, layouts, tuple(dtype_of(product.node) for product in products), biases)


def experts(b: Bindings) -> None:
    """Part e of the split goes through expert e, and the results are put together in that order."""
    found: list[_Expert] = []
    split: Node | None = None
    for number, part in enumerate(b.anchor.args[0]):
        down, down_bias = part_product(part, f"down (expert {number})")
        activation, added = split_biases(match_activation(down.rows))
        what = f"gate and up (expert {number})"
        halves = [half.source for half in (activation.gate, activation.up) if half is not None]
        first = tuple(plain_product(source, what, biased=True) for source in halves)
        first_bias = tuple(vector_bias(added.get(source), what) for source in halves)
        for product in first:
            read = part_of(product.rows)
            own = strip_views_casts(product.rows)
            require(read is not None, f"expert {number} reads {op_name(own)}, not a part of the rows", product.node)
            assert read is not None
            require(read[1] == number, f"expert {number} reads part {read[1]} of the rows", product.node)
            require(split is None or read[0] is split, "the experts read parts of different splits", product.node)
            split = read[0]
        for product in (*first, down):
            require(product.rows_letters[-1:] == product.contracted, "the rows are not [n, in]", product.node)
        found.append(_Expert(activation, first, down, first_bias, down_bias))
    assert split is not None
    sizes = tuple(split.args[1])  # type: ignore[arg-type]
    require(len(sizes) == len(found), f"{len(sizes)} parts but {len(found)} experts", b.anchor)
    b.bind(each=found, sizes=sizes, split=split, last=b.anchor)


def dispatch(b: Bindings) -> None:
    """The rows that are split are gathered tokens, weighted or not."""
    sorted_rows.gather_tokens(b, b.split.args[0])


def count(b: Bindings) -> None:
    """They are split by the counts of those ids."""
    counted = sorted_experts.match_sizes(b, b.sizes)
    require(counted == len(b.each), f"{counted} counts but {len(b.each)} experts", b.anchor)
    b.bind(experts=counted)


def alike(b: Bindings) -> None:
    """All experts have one activation, layout and dtype."""
    kinds: dict[tuple[object, ...], int] = {}
    for number, expert in enumerate(b.each):
        kinds.setdefault(expert.kind(), number)
    pair = " and ".join(map(str, list(kinds.values())[:2]))
    require(len(kinds) == 1, f"experts {pair} differ in activation, layout or dtype", b.anchor)
    weigh_input(b, dtype_of(b.each[0].first[0].node))


def finish(b: Bindings) -> Match:
    activation = b.each[0].activation
    packed = activation.gate.part is not None
    products = {"gate": [expert.first[0] for expert in b.each], "down": [expert.down for expert in b.each]}
    if not packed and activation.up is not None:
        products["up"] = [expert.first[1] for expert in b.each]
    columns = {role: [stored(product) for product in column] for role, column in products.items()}
    matrices = {role: tuple(matrix for matrix, _ in column) for role, column in columns.items()}
    transposed = frozenset(role for role, column in columns.items() if column[0][1])
    vectors = {"gate": [expert.first_bias[0] for expert in b.each], "down": [expert.down_bias for expert in b.each]}
    if "up" in products:
        vectors["up"] = [expert.first_bias[1] for expert in b.each]
    biases = {role: () if column[0] is None else tuple(column) for role, column in vectors.items()}
    return sorted_experts.match_of(b, "split_experts", activation, b.each[0].down.node, matrices, transposed, biases)


class SplitModules(torch.nn.Module):
    """Example: DeepSeek's order of steps with a ModuleList: sizes as a list, rows written back at perm."""

    def __init__(self, experts: int, top_k: int, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate = torch.nn.Linear(hidden, experts, bias=False, dtype=dtype)
        self.experts = torch.nn.ModuleList(Expert(hidden, intermediate, dtype) for _ in range(experts))

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        scores = torch.softmax(self.gate(x_TH), dim=-1, dtype=torch.float32)
        weights, ids = torch.topk(scores, self.top_k, dim=-1, sorted=False)
        counts = ids.new_zeros((ids.shape[0], len(self.experts))).scatter(1, ids, 1).sum(dim=0)
        perm = ids.view(-1).argsort()
        parts = torch.split(x_TH[perm // ids.shape[1]], counts.tolist())
        rows = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)], dim=0)
        pairs = torch.empty_like(rows)
        pairs[perm] = rows
        pairs = pairs.view(*ids.shape, x_TH.shape[1]).type(weights.dtype)
        return (pairs * weights.unsqueeze(dim=-1)).sum(dim=1).type(x_TH.dtype)


def example(
    dtype: torch.dtype = torch.float32, experts: int = 4, top_k: int = 2, hidden: int = 32, intermediate: int = 16
) -> Example:
    """A module written this way, and inputs for it. To arrive in one graph it needs `fullgraph=True`."""
    module = SplitModules(experts, top_k, hidden, intermediate, dtype)
    return Example(module, lambda tokens: (torch.randn(tokens, hidden, dtype=dtype),))


SPLIT_EXPERTS = Formulation(
    name="split_experts",
    summary="sorted rows split by a list of sizes, a whole expert a part (torchtitan's loop, DeepSeek's inference)",
    anchors=anchors,
    steps=(experts, dispatch, sorted_rows.sort, count, alike, sorted_home.weigh, sorted_home.home),
    finish=finish,
    example=example,
)
