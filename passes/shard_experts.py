"""Send the tokens to the experts, where the experts of a raised block are spread over the ranks of a group.

A model that `moe_compiler.expert_parallel` sharded reads its experts through `gather_experts`, which brings all
weights to every rank. Where a raised block is all that reads them, the weights stay where they are: each rank computes
with its own, on the tokens of all ranks that chose them. What is not such a block keeps its gathers, which is right and
slow, and the report says so.

Every rank has `capacity` slots for each source, agreed between the ranks (moe_compiler/agreement.py), so all shapes are
known when the block is compiled, and no rank asks another how many tokens will come.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from moe_compiler.agreement import Agreed, Terms, agree, rounded
from moe_compiler.aliasing import has_effect
from moe_compiler.graph_pass import Context, graph_pass, insert
from moe_compiler.inline import named_arguments
from moe_compiler.moe_ir import GATHERS, Level, is_moepdl, op_name, user_line
from moe_compiler.report import ExchangeRecord, plural
from moe_compiler.runtime_kernels import register as _register  # noqa: F401 - defines torch.ops.moepdl
from moe_compiler.runtime_kernels.exchange.groups import Group, group
from moe_compiler.runtime_kernels.exchange.placement import owned, owner
from moe_compiler.runtime_kernels.exchange.reference import Part, message_bytes
from moe_compiler.runtime_kernels.exchange.transport import transport_of

__all__ = ["shard_experts"]

_ops = torch.ops.moepdl
_aten = torch.ops.aten
_LISTS = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
_TENSORS = ("x", "ids", "weights")
# Values of a weight in another dtype or layout of memory.
_SAME = ("to", "_to_copy", "convert_element_type", "contiguous", "clone", "alias", "detach")


class _Stays(Exception):
    """Why the experts of a block stay gathered; the message is for the user."""


@dataclass(frozen=True)
class _Spread:
    """The experts of one block: whose they are, and this rank's part of each list of weights, not in the graph yet.

    lists: by role the weights of this rank, each as the tensor that it holds and the views behind it, innermost first.
    """

    group: Group
    experts: int
    placement: str
    lists: dict[str, list[tuple[Node, list[Any]]]]


def _behind(weight: Node) -> tuple[Node, list[Node]]:
    """What a weight is a view or cast of, and those, innermost first."""
    views: list[Node] = []
    while weight.op == "call_function" and not is_moepdl(weight) and len(weight.all_input_nodes) == 1:
        views.insert(0, weight)
        weight = weight.all_input_nodes[0]
    return weight, views


def _keeps_experts(node: Node) -> bool:
    """Does a view or cast of weights [E, ..] leave the experts where they are, so that it fits a part of them too?"""
    rank = node.args[0].meta["val"].dim()
    name, rest = op_name(node), node.args[1:]
    if name in _SAME:
        return True
    if name in ("transpose", "swapaxes", "swapdims"):
        return 0 not in {dim % rank for dim in rest[:2]}
    if name == "mT":
        return rank > 2
    if name == "permute":
        return rest[0][0] % rank == 0
    if name in ("slice", "squeeze", "select"):
        dim = rest[0] if rest else 0
        return isinstance(dim, int) and dim % rank != 0
    return name == "unsqueeze" and rest[0] % (rank + 1) != 0


def _spread(named: dict[str, Any]) -> _Spread | None:
    """Whose the experts of a block are; None where none of its weights is gathered. Raises _Stays."""
    weights = {role: [_behind(weight) for weight in named[role]] for role in _LISTS}
    gathers = [
        base for behind in weights.values() for base, _ in behind if is_moepdl(base) and op_name(base) in GATHERS
    ]
    if not gathers:
        return None
    count = sum(map(len, weights.values()))
    if len(gathers) < count:
        raise _Stays("some of its weights are shared between ranks and others are not")
    groups = {named_arguments(gather)["group"] for gather in gathers}
    if len(groups) > 1:
        raise _Stays(f"its weights are shared in several groups: {', '.join(sorted(groups))}")
    ranks = group(groups.pop())
    first = named["down"][0].meta["val"]
    experts = int(first.shape[0]) if first.dim() == 3 else len(named["down"])
    placement = _placement(gathers, experts, ranks)
    own = owned(experts, ranks.ranks, ranks.rank, placement)
    lists = {
        role: _packed_part(behind[0]) if len(behind) == 1 and experts > 1 else _listed_part(behind, own)
        for role, behind in weights.items()
        if behind
    }
    return _Spread(ranks, experts, placement, {role: lists.get(role, []) for role in _LISTS})


def _placement(gathers: list[Node], experts: int, ranks: Group) -> str:
    named = [named_arguments(gather) for gather in gathers]
    if op_name(gathers[0]) == "gather_experts":
        if any(
            op_name(gather) != "gather_experts" or n["experts"] != experts
            for gather, n in zip(gathers, named, strict=True)
        ):
            raise _Stays(f"its weights are not all gathered as {experts} experts")
        placements = {n["placement"] for n in named}
        if len(placements) > 1:
            raise _Stays("its weights are spread in several ways")
        return placements.pop()
    if any(op_name(gather) != "gather_expert" for gather in gathers) or len(gathers) % experts:
        raise _Stays("some of its weights are gathered one by one and others together")
    owners = [n["owner"] for n in named]
    for placement in ("contiguous", "round_robin"):
        wanted = [owner(expert, experts, ranks.ranks, placement) for expert in range(experts)]
        if all(owners[at : at + experts] == wanted for at in range(0, len(owners), experts)):
            return placement
    raise _Stays("its experts are spread over the ranks in no known way, or are not in their order")


def _packed_part(behind: tuple[Node, list[Node]]) -> list[tuple[Node, list[Any]]]:
    gather, views = behind
    strange = next((view for view in views if not _keeps_experts(view)), None)
    if strange is not None:
        raise _Stays(f"{op_name(strange)} mixes its experts before they are used")
    return [(_held(gather), list(views))]


def _held(gather: Node) -> Node:
    """This rank's share of what is gathered."""
    (local,) = gather.all_input_nodes
    return local


def _listed_part(behind: list[tuple[Node, list[Node]]], own: range) -> list[tuple[Node, list[Any]]]:
    """The weights of this rank's experts out of one weight an expert."""
    found: list[tuple[Node, list[Any]]] = []
    for expert, (gather, views) in enumerate(behind):
        if op_name(gather) == "gather_expert":
            if expert in own:
                found.append((_held(gather), list(views)))
            continue
        # One expert of packed weights: the views up to its selection concern all experts, those behind it only it.
        at = next((at for at, view in enumerate(views) if _selects(view, expert)), None)
        if at is None or not all(map(_keeps_experts, views[:at])):
            raise _Stays("its weights are taken out of the packed ones in no known way")
        if expert in own:
            found.append((_held(gather), [*views[:at], (views[at], own.index(expert)), *views[at + 1 :]]))
    return found


def _selects(view: Node, expert: int) -> bool:
    if op_name(view) != "select":
        return False
    dim, index = view.args[1], view.args[2]
    experts = view.args[0].meta["val"].shape[0]
    return dim % view.args[0].meta["val"].dim() == 0 and index % experts == expert


def _tokens(x: Node) -> int:
    """T now: of a symbolic number what it is in this call."""
    size = x.meta["val"].shape[0]
    return size if isinstance(size, int) else int(size.node.hint)


def _block_path(node: Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    path = path.replace("L['self'].", "").replace("L['self']", "").replace("['", ".").replace("']", "").strip(".")
    return path or "the block"


@dataclass(frozen=True)
class _Plan:
    """A block that is to be spread: its node, its arguments, its experts, and what the ranks have to agree on."""

    node: Node
    named: dict[str, Any]
    spread: _Spread
    terms: Terms
    chunks: int


def _plan(node: Node, named: dict[str, Any], spread: _Spread, taken: dict[str, int], context: Context) -> _Plan:
    path = _block_path(node)
    taken[path] = number = taken.get(path, 0) + 1
    path = path if number == 1 else f"{path} #{number}"
    x, chunks = named["x"].meta["val"], _chunks(named, path, context)
    terms = Terms(
        block=path,
        experts=spread.experts,
        k=int(named["ids"].meta["val"].shape[1]),
        hidden=int(x.shape[1]),
        dtype=str(x.dtype).removeprefix("torch."),
        placement=spread.placement,
        ranks=spread.group.ranks,
        transport=transport_of(spread.group).name,
        capacity=context.options.capacity,
        chunks=chunks,
        overlap=context.options.overlap,
    )
    return _Plan(node, named, spread, terms, chunks)


def _chunks(named: dict[str, Any], path: str, context: Context) -> int:
    """Into how many parts the tokens are cut: one, where nothing is known of what more would gain."""
    wanted = context.options.chunks
    if wanted in ("auto", 1):
        return 1
    dtype = named["down"][0].meta["val"].dtype
    if context.options.numerics == "strict" and dtype.itemsize < 4 and torch.is_grad_enabled():
        context.report.notes.append(
            f"{path}: its tokens are not cut in chunks, since the gradients of its experts would be rounded to "
            f'{str(dtype).removeprefix("torch.")} once a chunk; options["numerics"]="fast" allows it'
        )
        return 1
    return int(wanted)


class _Raising:
    """Writes one block as exchanges around its own experts."""

    def __init__(self, plan: _Plan, agreed: Agreed, timeout_s: float) -> None:
        self.plan, self.node, self.timeout_s = plan, plan.node, float(timeout_s)
        self.whole = agreed.capacity
        self.capacity = agreed.capacity if plan.chunks == 1 else rounded(-(-agreed.capacity // plan.chunks))

    def put(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self.node.graph.inserting_before(self.node):
            return insert(self.node, target, args, kwargs)

    def weight(self, local: Node, views: list[Any]) -> Node:
        """This rank's weight behind the views that the whole one had."""
        for view in views:
            if isinstance(view, tuple):
                view, index = view
                local = self.put(view.target, local, view.args[1], index)
            else:
                local = self.put(view.target, local, *view.args[1:], **view.kwargs)
        return local

    def run(self) -> None:
        named, spread = self.plan.named, self.plan.spread
        lists = [[self.weight(*part) for part in spread.lists[role]] for role in _LISTS]
        parts = [self.dispatch(part) for part in self.cut([named[name] for name in _TENSORS])]
        # All parts are under way before the first is computed with: every rank starts them in this order.
        results = [self.experts(part, lists) for part in parts]
        y = results[0] if len(results) == 1 else self.put(_aten.cat.default, results)
        self.node.replace_all_uses_with(y)
        self.node.graph.erase_node(self.node)

    def cut(self, tensors: list[Node]) -> list[list[Node]]:
        """The tokens in parts of ceil(T / chunks), the last ones shorter or empty."""
        if self.plan.chunks == 1:
            return [tensors]
        size = tensors[0].meta["val"].shape[0]
        total: Any = size if isinstance(size, int) else self.put(_aten.sym_size.int, tensors[0], 0)
        step = self.sum(total, self.plan.chunks - 1)
        step = (
            step // self.plan.chunks if isinstance(step, int) else self.put(operator.floordiv, step, self.plan.chunks)
        )
        parts, begin = [], 0
        for number in range(self.plan.chunks):
            end = self.smaller(self.times(step, number + 1), total)
            parts.append([self.put(_aten.slice.Tensor, tensor, 0, begin, end) for tensor in tensors])
            begin = end
        return parts

    def sum(self, a: Any, b: int) -> Any:
        return a + b if isinstance(a, int) else self.put(operator.add, a, b)

    def times(self, a: Any, b: int) -> Any:
        return a * b if isinstance(a, int) else self.put(operator.mul, a, b)

    def smaller(self, a: Any, b: Any) -> Any:
        return min(a, b) if isinstance(a, int) and isinstance(b, int) else self.put(torch.sym_min, a, b)

    def dispatch(self, tensors: list[Node]) -> list[Node]:
        spread = self.plan.spread
        where = (spread.group.name, spread.experts, spread.placement, self.capacity)
        sent = self.put(_ops.ep_dispatch.default, *tensors, *where, self.plan.terms.block, self.timeout_s)
        return [self.put(operator.getitem, sent, index) for index in range(4)]

    def experts(self, part: list[Node], lists: list[list[Node]]) -> Node:
        rows, ids, weights, slots = part
        named = self.plan.named
        attributes = [named[name] for name in ("activation", "gated", "weight_at", "dtype")]
        out = self.put(_ops.experts.default, rows, ids, weights, *lists, *attributes)
        where = (self.plan.spread.group.name, self.capacity, named["dtype"])
        return self.put(_ops.ep_combine.default, out, slots, *where, self.plan.terms.block, self.timeout_s)

    def record(self, how: str) -> ExchangeRecord:
        terms, named, ranks = self.plan.terms, self.plan.named, self.plan.spread.group
        x, scores = named["x"].meta["val"], named["weights"].meta["val"]
        out = [Part(x.dtype, (self.capacity, terms.hidden)), Part(torch.int32, (self.capacity, terms.k))]
        out.append(Part(scores.dtype, (self.capacity, terms.k)))
        hidden = int(self.node.meta["val"].shape[1])
        back = [Part(named["dtype"], (self.capacity, hidden))]
        others = (ranks.ranks - 1) * self.plan.chunks
        return ExchangeRecord(
            block=terms.block,
            where=user_line(self.node),
            group=ranks.name,
            ranks=ranks.ranks,
            experts=terms.experts,
            placement=terms.placement,
            capacity=self.capacity,
            agreed=how,
            dispatch_bytes=others * message_bytes(out),
            combine_bytes=others * message_bytes(back),
            transport=f"{terms.transport} ({ranks.backend})",
            chunks=self.plan.chunks,
        )


@graph_pass(level=Level.MOE, numerics="rounding")
def shard_experts(graph: Graph, context: Context) -> int:
    """Let the tokens of a raised block travel to the ranks that hold its experts.

    before   W1 = gather_experts(V1, ..); W2 = gather_experts(V2, ..); y = experts(x, i, w, [W1], [], [W2], ..)
    after    r, j, v, s = ep_dispatch(x, i, w, ..); o = experts(r, j, v, [V1], [], [V2], ..); y = ep_combine(o, s, ..)
    """
    plans: list[_Plan] = []
    taken: dict[str, int] = {}
    for node in list(graph.nodes):
        if not is_moepdl(node) or op_name(node) != "experts":
            continue
        named = named_arguments(node)
        try:
            spread = _spread(named)
        except _Stays as why:
            context.report.notes.append(f"{_block_path(node)}: its experts are gathered whole at every call: {why}")
            continue
        if spread is not None:
            plans.append(_plan(node, named, spread, taken, context))
    for plan, agreed in _agreed(plans, context):
        raising = _Raising(plan, agreed, context.options.timeout_s)
        record = raising.record(agreed.how)
        raising.run()
        context.report.exchanges.append(record)
    if plans:
        graph.eliminate_dead_code(has_effect)
    _note_gathered(graph, context)
    return len(plans)


def _agreed(plans: list[_Plan], context: Context) -> list[tuple[_Plan, Agreed]]:
    """The capacity of each block, asked for group by group in the order of the graph."""
    found: dict[Node, Agreed] = {}
    for name in dict.fromkeys(plan.spread.group.name for plan in plans):
        mine = [plan for plan in plans if plan.spread.group.name == name]
        blocks = [(plan.terms, _tokens(plan.named["x"])) for plan in mine]
        asked = agree(mine[0].spread.group, blocks, context.options.timeout_s, ask=not context.options.dryrun)
        found |= {plan.node: agreed for plan, agreed in zip(mine, asked, strict=True)}
    return [(plan, found[plan.node]) for plan in plans]


def _note_gathered(graph: Graph, context: Context) -> None:
    left = [node for node in graph.nodes if is_moepdl(node) and op_name(node) in GATHERS]
    if left:
        where = user_line(left[0])
        context.report.notes.append(
            f"{plural(len(left), 'weight')} that ranks share gathered whole at every call: no block that was rewritten "
            f"reads it{', first at ' + where if where else ''}; the candidates that were missed say why"
        )
