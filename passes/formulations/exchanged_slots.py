"""An exchange that the model wrote, in equal parts: each expert's slots, of a constant capacity, travel to its rank.

    rows[e,c] = slots.bool()[t,e,c] * x[t];  came = all_to_all(rows) seen as [R, E / R, C, H]
    [E / R, R * C, H] -> W1 -> act -> W2 -> [R, E / R, C, H];  back = all_to_all(..);  y[t] = slots[t,e,c] * back[e,c]

Ahead of and behind the exchange stands what `capacity` knows: drops are exact, and each rank makes its own, among its
own tokens. No count is exchanged, since every expert gets as many slots from every rank.
"""

from __future__ import annotations

import sympy
import torch
import torch.distributed as dist
from torch.fx import Graph, Node

from moe_compiler.moe_ir import Exchange, Match, Miss, op_name
from moe_compiler.passes.formulations.activation import match_activation
from moe_compiler.passes.formulations.base import Bindings, Example, Formulation
from moe_compiler.passes.formulations.capacity import (
    choose,
    mask_product,
    rank,
    reaches,
    slots,
    slotted,
    slotted_match,
    weigh,
    weights_in_slots,
)
from moe_compiler.passes.formulations.collectives import AllToAll, arrival, group_of, landed, read_all_to_all
from moe_compiler.passes.formulations.contraction import Product
from moe_compiler.passes.formulations.pairs import token_rows
from moe_compiler.passes.formulations.walk import (
    dtype_of,
    is_op,
    rank_of,
    require,
    same_shape,
    same_size,
    shape_of,
    strip,
    strip_views,
    swaps_last_two,
    view_or_cast,
)

__all__ = ["EXCHANGED_SLOTS"]


def _equal(exchange: AllToAll) -> bool:
    """Are all parts of an exchange as large as each other, whatever the data is?"""
    sizes = (*exchange.received, *exchange.given)
    return all(isinstance(size, int) and size == sizes[0] for size in sizes)


def anchors(graph: Graph) -> list[Node]:
    """Exchanges in equal parts of what products over slots make, behind another one."""
    found, products, earlier = [], set[Node](), False
    for node in graph.nodes:
        if earlier and _of_weights(slotted(node)):
            products.add(node)
        exchange = read_all_to_all(node)
        if exchange is None or not _equal(exchange) or not dtype_of(exchange.sent).is_floating_point:
            continue
        if products and reaches(exchange.sent, products):
            found.append(node)
        earlier = True
    return found


def _of_weights(product: Product | None) -> bool:
    """Is it a product with what the model holds, not with what it has computed (attention over heads)?"""
    if product is None:
        return False
    weight = strip(product.weight, lambda node: view_or_cast(node) or swaps_last_two(node))
    return weight.op in ("placeholder", "get_attr")


def way_back(b: Bindings) -> None:
    """The experts' rows are sent back rank by rank, in equal parts, in one exchange that is waited for once."""
    back = read_all_to_all(b.anchor)
    assert back is not None
    b.bind(back=back, peers=group_of(back), last=landed(back))
    require(b.peers.ranks > 1, "the group of the exchange has one rank", back.node, "leave the exchange out")
    made = strip(back.sent, view_or_cast)
    shape = shape_of(made)
    turned = _turned(made)
    if turned is not None:
        require(
            len(shape) == 4 and shape[0] == b.peers.ranks,
            "the rows that are sent back are not [R, E / R, C, H], rank by rank",
            made,
            "place neighbouring experts on a rank: rank r has the experts r * E / R and those behind it",
        )
        made = strip(turned, view_or_cast)
    down = slotted(made)
    if down is None:
        raise Miss(f"the rows that are sent back come from {op_name(made)}, not from a product over slots", made)
    experts = shape_of(down.weight)[0]
    require(experts.is_Integer, "the number of this rank's experts is not a constant", made)
    local = int(experts)
    parted = turned is not None or local == 1
    require(parted, "the rows of one rank are not brought together before they are sent back", made)
    if turned is not None:
        fits = shape_of(turned)[:2] == (local, b.peers.ranks) and _joins(shape_of(turned), shape_of(made))
        require(fits, "the rows are not seen as [E / R, R, C, H] before they are sent back", turned)
    b.bind(down=down, local=local, experts=local * b.peers.ranks, product=made)


def _turned(node: Node) -> Node | None:
    """What `node` is with its first two dimensions exchanged; None when it is something else."""
    if is_op(node, "transpose", "swapaxes", "swapdims"):
        first_two = {dim % rank_of(node) for dim in node.args[1:3]} == {0, 1}  # type: ignore[operator]
    else:
        rest = list(range(2, rank_of(node)))
        first_two = is_op(node, "permute") and [d % rank_of(node) for d in node.args[1]] == [1, 0, *rest]  # type: ignore[union-attr]
    return node.args[0] if first_two else None  # type: ignore[return-value]


def _joins(parts: tuple[sympy.Expr, ...], whole: tuple[sympy.Expr, ...]) -> bool:
    """Are [a, b, C, H] the parts of [a, b * C, H]?"""
    joined = len(parts) == 4 and len(whole) == 3
    return joined and same_shape((parts[0], parts[1] * parts[2], parts[3]), whole)


def local_experts(b: Bindings) -> None:
    """The slots of all ranks go through gate and up, an activation and down, of this rank's experts."""
    activation = match_activation(b.down.rows)
    first: dict[Node, Product] = {}
    for half in (activation.gate, activation.up):
        if half is None:
            continue
        product = slotted(half.source)
        if product is None:
            raise Miss(f"{op_name(half.source)} is no product over slots", half.source)
        require(shape_of(product.weight)[0] == b.local, "the matrices differ in their number of experts", half.source)
        first[half.source] = product
    rows = {strip(product.rows, view_or_cast) for product in first.values()}
    require(len(rows) == 1, "gate and up read different slots", b.product)
    b.bind(activation=activation, first=first, read=next(iter(first.values())).rows, rows=rows.pop())


def way_out(b: Bindings) -> None:
    """What the experts read came rank by rank, in equal parts, in an exchange of the same group."""
    rows, ranks = b.rows, b.peers.ranks
    turned = _turned(rows)
    if turned is not None:
        fits = shape_of(turned)[:2] == (ranks, b.local) and _joins(shape_of(rows), shape_of(b.read))
        require(fits, "the rows that came are not seen as [R, E / R, C, H]", turned)
        rows = turned
    else:
        require(b.local == 1, "the rows of one expert do not lie together: they came rank by rank", rows)
    out, back = arrival(strip(rows, view_or_cast), "the experts' rows"), b.back
    landed(out)
    require(out.group == back.group, f"the rows come in group {out.group} and go back in group {back.group}", back.node)
    require(_equal(out), "the slots are not exchanged in equal parts", out.node)
    capacity = shape_of(b.product)[1] / ranks
    b.bind(out=out, sent=_slots(out.sent, b.experts, capacity), home=_home(b.last, b.experts, capacity))


def _slots(node: Node, experts: int, capacity: sympy.Expr) -> Node:
    """The slots [E, C, H] that an exchange sends, behind views."""
    found = strip(node, view_or_cast)
    fits = len(shape_of(found)) == 3 and shape_of(found)[0] == experts and same_size(shape_of(found)[1], capacity)
    require(fits, "what is sent is not [E, C, H], the same number of slots for every expert", found)
    return found


def _home(last: Node, experts: int, capacity: sympy.Expr) -> Node:
    """What came back as [E, C, H], or in the shape that it came in where a view of it is that."""
    node = last
    while True:
        shape = shape_of(node)
        if len(shape) == 3 and shape[0] == experts and same_size(shape[1], capacity):
            return node
        users = [user for user in node.users if view_or_cast(user) and strip_views(user) is not user]
        require(len(users) == 1 == len(node.users), "what came back is not seen as [E, C, H]", last)
        node = users[0]


def origin(b: Bindings) -> None:
    """Each slot is a token, by a mask of the slots that tokens have."""
    read = mask_product(b.sent)
    if read is None:
        made = op_name(b.sent)
        raise Miss(f"the slots come from {made}, not from a product of a mask of slots with the tokens", b.sent)
    mask, source, as_slots = read
    tokens = shape_of(source)[0]
    b.bind(mask=mask, as_slots=as_slots, tokens=tokens, x=token_rows(source, tokens, b.sent))
    # From here on the block reads as one of all experts, which end where the exchange has brought their rows back.
    b.anchor = b.home


def finish(b: Bindings) -> Match:
    why = Miss("a capacity drops choices after the top-k", b.weights_KTE)
    match = slotted_match(b, "exchanged_slots", b.weights_KTE, why)
    match.anchor = b.product
    own = (b.out.node, b.back.node)
    match.exchange = Exchange("equal all-to-all", b.back.group, b.peers.ranks, b.peers.rank, b.experts, tuple(own))
    return match


class ExchangedSlots(torch.nn.Module):
    """Example: the slots of `capacity`, exchanged in equal parts with the ranks that have the experts.

    `group` is the default one where None. All ranks need as many tokens.
    """

    def __init__(
        self,
        experts: int,
        top_k: int,
        hidden: int,
        intermediate: int,
        dtype: torch.dtype,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.group = dist.group.WORLD if group is None else group
        assert self.group is not None
        self.ranks, self.experts, self.top_k = self.group.size(), experts, top_k
        own = experts // self.ranks
        self.w_g = torch.nn.Linear(hidden, experts, bias=False, dtype=dtype)
        self.c_fc = torch.nn.Parameter(torch.randn(own, hidden, intermediate, dtype=dtype) * hidden**-0.5)
        self.c_proj = torch.nn.Parameter(torch.randn(own, intermediate, hidden, dtype=dtype) * intermediate**-0.5)

    def exchange(self, rows: torch.Tensor) -> torch.Tensor:
        from torch.distributed import _functional_collectives as functional

        return functional.all_to_all_single(rows, None, None, self.group)  # type: ignore[arg-type]

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        hidden = x_TH.shape[1]
        slots_TEC = weights_in_slots(self.w_g(x_TH).float(), self.top_k)
        rows = slots_TEC.bool().permute(1, 2, 0).type_as(x_TH) @ x_TH
        came = self.exchange(rows).view(self.ranks, -1, rows.shape[1], hidden)
        rows = came.transpose(0, 1).reshape(-1, self.ranks * rows.shape[1], hidden)
        done = torch.bmm(torch.nn.functional.gelu(torch.bmm(rows, self.c_fc)), self.c_proj)
        done = done.view(done.shape[0], self.ranks, -1, hidden).transpose(0, 1)
        back = self.exchange(done.reshape(self.experts, -1, hidden))
        return slots_TEC.flatten(1).type_as(x_TH) @ back.reshape(-1, hidden)


def example(
    dtype: torch.dtype = torch.float32, experts: int = 8, top_k: int = 2, hidden: int = 32, intermediate: int = 16
) -> Example:
    """A module written this way, and inputs for it. It needs torch.distributed."""
    module = ExchangedSlots(experts, top_k, hidden, intermediate, dtype)
    return Example(module, lambda tokens: (torch.randn(tokens, hidden, dtype=dtype),))


EXCHANGED_SLOTS = Formulation(
    name="exchanged_slots",
    summary="slots of a constant capacity sent to their experts' ranks by an all-to-all in equal parts, and back",
    anchors=anchors,
    steps=(way_back, local_experts, way_out, origin, slots, weigh, rank, choose),
    finish=finish,
    example=example,
)
