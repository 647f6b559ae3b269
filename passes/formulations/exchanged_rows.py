"""An exchange that the model wrote, with as many rows as were chosen: sorted rows travel to the ranks of their experts.

    rows = x[perm // k], sorted by expert; theirs = all_to_all(counts); given, received = lists of numbers
    rows = all_to_all(rows, received, given) -> [p], expert by expert -> W1 -> act -> W2 -> back to [p]
    rows = all_to_all(rows, given, received); rows * w[perm]; added at their tokens, or back in pair order and summed

Between the way out and the way back stands what the formulations of sorted rows know, with this rank's experts alone;
ahead of and behind it what they know with those of all ranks. torchtitan's dispatcher is written this way.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.fx import Graph, Node

from moe_compiler.moe_ir import Exchange, Match, Miss, op_name
from moe_compiler.passes.formulations import combine, sorted_experts, sorted_home, sorted_rows, split_experts
from moe_compiler.passes.formulations.base import Bindings, Example, Formulation
from moe_compiler.passes.formulations.collectives import (
    AllToAll,
    arrival,
    group_of,
    landed,
    read_all_to_all,
)
from moe_compiler.passes.formulations.counts import match_counts
from moe_compiler.passes.formulations.exchange_counts import (
    bare,
    counted_per_rank,
    exchanged_counts,
    local_counts,
    numbers_of,
)
from moe_compiler.passes.formulations.exchange_order import check_expert_major, check_parts, parts_put_together
from moe_compiler.passes.formulations.grouped_products import feeding, read_grouped
from moe_compiler.passes.formulations.pairs import rows_at
from moe_compiler.passes.formulations.sorted_weights import weigh_input
from moe_compiler.passes.formulations.walk import (
    dtype_of,
    is_op,
    rank_of,
    require,
    same_value,
    shape_of,
    strip,
    strip_ids,
    strip_views,
    view_or_cast,
)

__all__ = ["EXCHANGED_ROWS"]

_REACH = 400


def anchors(graph: Graph) -> list[Node]:
    """Uneven exchanges of rows, made of grouped products or the parts of a split of what another one brought."""
    found: list[Node] = []
    earlier = False
    for node in graph.nodes:
        exchange = read_all_to_all(node)
        if exchange is None or rank_of(exchange.sent) != 2 or not _is_float(exchange.sent):
            continue
        uneven = any(isinstance(size, Node) for size in (*exchange.received, *exchange.given))
        if earlier and uneven and _made_of_products(exchange.sent):
            found.append(node)
        earlier = True
    return found


def _is_float(node: Node) -> bool:
    return dtype_of(node).is_floating_point


def _made_of_products(node: Node) -> bool:
    """Do grouped products, or parts of a split, and in front of those another exchange, lead to `node`?"""
    pending, seen, products = [node], {node}, False
    while pending and len(seen) < _REACH:
        current = pending.pop(0)
        if current is not node and read_all_to_all(current) is not None and _is_float(current):
            return products
        products = products or read_grouped(current) is not None or is_op(current, "split_with_sizes", "split")
        fresh = [source for source in current.all_input_nodes if source not in seen and _rows(source)]
        seen.update(fresh)
        pending.extend(fresh)
    return False


def _rows(node: Node) -> bool:
    """Rows, or parts of them: not weights, not numbers."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return node.op == "call_function"
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point and node.op == "call_function"


# The way back and the way out


def way_back(b: Bindings) -> None:
    """The experts' rows, in the order in which they came, are sent back in one exchange that is waited for once."""
    back = read_all_to_all(b.anchor)
    assert back is not None
    ranks = group_of(back)
    b.bind(back=back, peers=ranks, last=landed(back), unsorted=None, parts_back=None)
    sent = strip(back.sent, view_or_cast)
    written, gathered, parts = sorted_home.written_at(sent), rows_at(sent), parts_put_together(sent)
    if written is not None:
        values = sent.args[2] if is_op(sent, "index_put", "index_put_") else sent.args[3]
        require(isinstance(values, Node), "a constant is sent back", sent)
        b.bind(index=strip_ids(written), computed=values)
    elif gathered is not None:
        b.bind(index=None, unsorted=gathered[1], computed=gathered[0])
    elif parts is not None and not _is_product_part(parts[0]):
        b.bind(index=None, parts_back=(parts[1], parts[2]), computed=parts[0])
    else:
        b.bind(index=None, computed=sent)


def _is_product_part(node: Node) -> bool:
    """Parts of rows that are no experts' outputs have nothing to do with the order of the rows."""
    return read_all_to_all(strip_views(node)) is not None


def local_experts(b: Bindings) -> None:
    """What is sent back are products of this rank's experts: grouped ones, or those of the parts of a split."""
    node = strip(b.computed, view_or_cast)
    inner = Bindings(b.graph, node)
    inner.bind(weight_at="", weights_of=_no_weights, tokens=0, k=1, order=None, ids=None)
    grouped = read_grouped(node)
    if grouped is not None:
        first = feeding(grouped.rows)
        require(bool(first), "no other grouped product feeds the down projection", node)
        inner.bind(down=grouped, first_rows=first[0].rows, experts=grouped.experts)
        sorted_experts.activate(inner)
        groups, kept = grouped.groups, None
    elif is_op(node, "cat", "concat") and isinstance(node.args[0], (list, tuple)):
        split_experts.experts(inner)
        split_experts.alike(inner)
        inner.bind(first_rows=inner.split.args[0], experts=len(inner.each), kept=None)
        groups, kept = inner.sizes, inner.each
    else:
        raise Miss(
            f"the rows that are sent back come from {op_name(node)}, not from products of this rank's experts",
            node,
            "compute all of this rank's experts by grouped matmuls, or by one linear layer for each part of a split",
        )
    require(inner.last is node, "the rows are changed between the experts and the way back", node)
    b.bind(inner=inner, groups=groups, each=kept, local=inner.experts)


def _no_weights(inner: Bindings, column: Node) -> None:
    raise Miss(
        "the rows are weighted on the rank of their expert",
        column,
        "weight the rows where their token is: before they are sent, or when they are back",
    )


def way_out(b: Bindings) -> None:
    """What the experts read came in an exchange of the same group, to which the way back is the mirror."""
    rows = strip(b.inner.first_rows, view_or_cast)
    gathered = rows_at(rows) if b.index is not None or b.unsorted is not None else None
    parts = parts_put_together(rows) if b.parts_back is not None else None
    b.bind(parts_there=None)
    if gathered is not None:
        source, index = gathered[0], strip_ids(gathered[1])
        if b.index is None:
            combine.match_inverse(b.unsorted, index)
        else:
            require(same_value(index, b.index), "the rows go back to other places than they were taken from", rows)
        b.bind(index=index)
    elif parts is not None:
        source = parts[0]
        b.bind(parts_there=(parts[1], parts[2]))
    else:
        ordered = b.index is None and b.unsorted is None and b.parts_back is None
        require(ordered, f"the experts read {op_name(rows)}, not the rows that came, brought into order", rows)
        source = rows
    out = arrival(strip(source, view_or_cast), "the experts' rows")
    landed(out)
    back: AllToAll = b.back
    require(out.group == back.group, f"the rows come in group {out.group} and go back in group {back.group}", back.node)
    mirrored = _same(out.given, back.received) and _same(out.received, back.given)
    require(mirrored, "the way back is not the mirror of the way out: its lists are not the same, swapped", back.node)
    require(len(out.given) == b.peers.ranks, f"{len(out.given)} ranks are sent to, {b.peers.ranks} are there", out.node)
    b.bind(out=out)


def _same(a: tuple[object, ...], b: tuple[object, ...]) -> bool:
    return len(a) == len(b) and all(same_value(x, y) for x, y in zip(a, b, strict=True))


# What the lists are of, and in which order the rows are


def lists(b: Bindings) -> None:
    """How many rows go and come is read from the counts of each rank's experts, and from those that were exchanged."""
    ranks, local, out = b.peers.ranks, b.local, b.out
    require(ranks > 1, "the group of the exchange has one rank", out.node, "leave the exchange out")
    given = numbers_of(out.given, "go to each rank", out.node)
    counts = counted_per_rank(given, ranks, local, "the rows for each rank")
    received = bare(numbers_of(out.received, "come from each rank", out.node))
    own = None
    if is_op(received, "sum") or local == 1:
        theirs = exchanged_counts(counted_per_rank(received, ranks, local, "the rows from each rank"), out, local)
    else:  # exchanged by themselves; then the counts for each expert are another exchange
        own = exchanged_counts(received, out, 1)
        require(same_value(bare(own.sent), bare(given)), "other numbers are exchanged than were sent", own.node)
        theirs = exchanged_counts(_counts_behind(b), out, local)
    sent = bare(theirs.sent)
    require(same_value(sent, counts), "the counts that are exchanged are not those of the rows that are sent", sent)
    b.bind(counts=counts, theirs=theirs, own_numbers=own)
    groups = b.groups
    if isinstance(groups, Node):
        total = bare(groups)
        require(is_op(total, "cumsum"), f"the offsets come from {op_name(total)}, not from a cumsum of counts", total)
        require(len(shape_of(total)) == 1, "the cumulated counts are not one number an expert", total)
        groups = total.args[0]
    else:
        groups = numbers_of(groups, "each own expert gets", b.anchor)
    local_counts(groups, theirs, ranks, local)


def _counts_behind(b: Bindings) -> Node:
    """What the counts of this rank's experts are summed of."""
    node = b.groups if isinstance(b.groups, Node) else numbers_of(b.groups, "each own expert gets", b.anchor)
    node = bare(node)
    node = bare(node.args[0]) if is_op(node, "cumsum") else node
    require(is_op(node, "sum"), f"the rows of each own expert come from {op_name(node)}, not from counts", node)
    return node.args[0]  # type: ignore[no-any-return]


def local_order(b: Bindings) -> None:
    """The rows, which come rank by rank, are brought into the order of this rank's experts."""
    ranks, local = b.peers.ranks, b.local
    if b.index is not None:
        check_expert_major(b.index, b.theirs, ranks, local)
    elif b.parts_there is not None:
        check_parts(b.parts_there, b.parts_back, b.theirs, ranks, local, b.anchor)
    else:
        require(1 in (ranks, local), "the rows of one expert do not lie together: they came rank by rank", b.out.node)


# Ahead of the exchange


def origin(b: Bindings) -> None:
    """The rows that are sent are gathered tokens, weighted or not, sorted by the experts of all ranks."""
    sorted_rows.gather_tokens(b, b.out.sent)
    sorted_rows.sort(b)
    first = b.each[0].first[0].node if b.each is not None else b.inner.first[0].matmul
    weigh_input(b, dtype_of(first))


def count(b: Bindings) -> None:
    """The counts are those of the chosen experts, and each rank has as many neighbouring ones of these."""
    experts = match_counts(b.counts, b.ids, b.order)
    whole = b.peers.ranks * b.local
    require(
        experts == whole, f"{experts} experts are counted; {b.peers.ranks} ranks of {b.local} have {whole}", b.anchor
    )
    b.bind(experts=experts)


def finish(b: Bindings) -> Match:
    inner = b.inner
    own = Bindings(b.graph, inner.anchor, dict(b.roles))
    if b.each is not None:
        match = split_experts.finish(own)
    else:
        names = ("activation", "first", "first_bias", "down", "down_bias")
        own.bind(**{name: inner.roles[name] for name in names})
        match = sorted_experts.finish(own, "exchanged_rows")
    match.formulation, match.anchor = "exchanged_rows", inner.anchor
    made = [exchange.node for exchange in (b.theirs, b.own_numbers, b.out, b.back) if exchange is not None]
    match.exchange = Exchange("uneven all-to-all", b.back.group, b.peers.ranks, b.peers.rank, b.experts, tuple(made))
    return match


class ExchangedExperts(torch.nn.Module):
    """Example: torchtitan's order of steps around grouped matmuls, with this rank's share of the experts.

    `group` is the default one where None; `spelling` says how an exchange is written: "functional", "autograd",
    "in place".
    """

    def __init__(
        self,
        experts: int,
        top_k: int,
        hidden: int,
        intermediate: int,
        dtype: torch.dtype,
        *,
        spelling: str = "functional",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.group = dist.group.WORLD if group is None else group
        assert self.group is not None
        self.ranks, self.experts, self.top_k, self.spelling = self.group.size(), experts, top_k, spelling
        own = experts // self.ranks
        self.router = torch.nn.Linear(hidden, experts, bias=False, dtype=dtype)
        self.w1 = torch.nn.Parameter(torch.randn(own, intermediate, hidden, dtype=dtype) * hidden**-0.5)
        self.w3 = torch.nn.Parameter(torch.randn(own, intermediate, hidden, dtype=dtype) * hidden**-0.5)
        self.w2 = torch.nn.Parameter(torch.randn(own, hidden, intermediate, dtype=dtype) * intermediate**-0.5)

    def exchange(self, rows: torch.Tensor, received: list[int] | None, given: list[int] | None) -> torch.Tensor:
        from torch.distributed import _functional_collectives as functional

        if self.spelling == "functional":
            return functional.all_to_all_single(rows, received, given, self.group)  # type: ignore[arg-type]
        if self.spelling == "autograd":
            return functional.all_to_all_single_autograd(rows, received, given, self.group)  # type: ignore[arg-type]
        count = rows.shape[0] if received is None else sum(received)
        brought = rows.new_empty((count, *rows.shape[1:]))
        dist.all_to_all_single(brought, rows, received, given, group=self.group)
        return brought

    def by_expert(self, theirs_RE: torch.Tensor, total: int) -> torch.Tensor:
        """For each row in the experts' order, where it lies among those that came rank by rank."""
        came = theirs_RE.reshape(-1)
        begin = (came.cumsum(0) - came).view(self.ranks, -1).t().reshape(-1)
        lengths = theirs_RE.t().reshape(-1)
        segment = torch.arange(lengths.shape[0], device=came.device).repeat_interleave(lengths, output_size=total)
        start = lengths.cumsum(0) - lengths
        return begin[segment] + torch.arange(segment.shape[0], device=came.device) - start[segment]

    def own_experts(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        offsets = torch.cumsum(counts, 0, dtype=torch.int32)
        gate = torch._grouped_mm(rows, self.w1.transpose(-2, -1), offs=offsets)
        up = torch._grouped_mm(rows, self.w3.transpose(-2, -1), offs=offsets)
        return torch._grouped_mm(torch.nn.functional.silu(gate) * up, self.w2.transpose(-2, -1), offs=offsets)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        scores, ids = torch.topk(torch.softmax(self.router(x_TH).float(), dim=-1), self.top_k, dim=-1)
        counts = torch.histc(ids.view(-1).float(), bins=self.experts, min=0, max=self.experts).to(torch.int64)
        perm = torch.argsort(ids.view(-1), stable=True)
        scores, token = scores.view(-1)[perm], perm // self.top_k
        rows = x_TH[token]
        with torch.no_grad():
            theirs = self.exchange(counts.view(self.ranks, -1), None, None)
            given = counts.view(self.ranks, -1).sum(dim=1).to("cpu").tolist()
            received = theirs.view(self.ranks, -1).sum(dim=1).to("cpu").tolist()
        rows = self.exchange(rows, received, given)
        place = self.by_expert(theirs.view(self.ranks, -1), rows.shape[0])
        done = self.own_experts(rows[place], theirs.view(self.ranks, -1).sum(0))
        back = done.new_empty(rows.shape)
        back[place] = done
        rows = self.exchange(back, given, received)
        rows = (rows.to(torch.float32) * scores.reshape(-1, 1)).to(x_TH.dtype)
        index = token.reshape(-1, 1).expand(-1, x_TH.shape[1])
        return torch.zeros_like(x_TH).scatter_add(0, index, rows)


def example(
    dtype: torch.dtype = torch.bfloat16, experts: int = 8, top_k: int = 2, hidden: int = 32, intermediate: int = 16
) -> Example:
    """A module written this way, and inputs for it. It needs torch.distributed, and `fullgraph=True`."""
    module = ExchangedExperts(experts, top_k, hidden, intermediate, dtype)
    return Example(module, lambda tokens: (torch.randn(tokens, hidden, dtype=dtype),))


EXCHANGED_ROWS = Formulation(
    name="exchanged_rows",
    summary="sorted rows sent to their experts' ranks by an uneven all-to-all, and back (torchtitan's dispatcher)",
    anchors=anchors,
    steps=(
        way_back,
        local_experts,
        way_out,
        lists,
        local_order,
        origin,
        count,
        sorted_home.weigh,
        sorted_home.home,
    ),
    finish=finish,
    example=example,
)
