"""Find the MoE blocks of a captured graph.

Every formulation is tried at each of its anchors; a match must also be closed (nothing of the block's inside is read
elsewhere, nothing from elsewhere is read inside), lie in one autocast and grad-mode region, and have operands that
nobody writes to while the block runs. The router is resolved apart: when its rule is not known the experts are still
a match, with ids and weights as inputs.

The pass changes nothing: it fills `context.matches`, and the report's misses with the best attempt at each candidate.
A formulation that the user has disabled is tried as well, so that the report can say that it would have matched; where
it would not, it is not told, however near it came.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

import sympy
import torch
from torch.fx import Graph, Node

from moe_compiler.aliasing import alias_root, aliases_argument, has_effect, mutated_arguments
from moe_compiler.graph_pass import Context, graph_pass
from moe_compiler.moe_ir import Level, Match, Miss, op_name, user_line
from moe_compiler.passes.formulations.base import Attempt, attempt
from moe_compiler.passes.formulations.contraction import contraction
from moe_compiler.passes.formulations.exchange_closed import check_exchange
from moe_compiler.passes.formulations.quantised import check_not_quantised
from moe_compiler.passes.formulations.registry import EXCHANGES, FORMULATIONS, exchange_names
from moe_compiler.passes.formulations.router import Router, match_router
from moe_compiler.passes.formulations.router_start import match_start
from moe_compiler.passes.formulations.selection import (
    chooses_scores,
    chosen_ids,
    explain_selection,
    leads_to,
    masks_products,
)
from moe_compiler.passes.formulations.walk import contains, dtype_of, is_cast, is_op, read_by, shape_of
from moe_compiler.passes.formulations.wide_biases import added_roundings
from moe_compiler.report import MissRecord

__all__ = ["find_moe"]


def _operands(match: Match) -> list[Node]:
    found = [match.x_TH, match.ids_TK, *match.gate, *match.up, *match.down]
    found += [*match.gate_bias, *match.up_bias, *match.down_bias]
    optional = (match.weights_TK, match.weights_KTE, match.kept, match.chosen_TKE, match.base)
    return found + [node for node in optional if node is not None]


_MATMULS = ("_grouped_mm", "grouped_mm_fallback", "addmm", "addbmm", "baddbmm")


def _inside(match: Match) -> frozenset[Node]:
    """The nodes between the block's operands and its output; a Miss when something unbound is read on the way."""
    boundary = set(_operands(match))
    if match.logits is not None:
        boundary.add(match.logits)
    inside: set[Node] = set()
    pending = [match.output]
    while pending:
        node = pending.pop()
        if node in inside or node in boundary:
            continue
        if not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)):
            pending.extend(_behind_size(node, inside))
            continue
        if node.op in ("placeholder", "get_attr"):
            raise Miss(f"the block also reads {node.name}, which no role explains", node)
        inside.add(node)
        pending.extend(read_by(node))
    return frozenset(inside)


def _behind_size(node: Node, inside: set[Node]) -> list[Node]:
    """What a size is computed from: nothing when from shapes alone; a tensor when its numbers are read (`item`)."""
    if is_op(node, "item", "_local_scalar_dense"):
        inside.add(node)
        return node.all_input_nodes
    return [source for source in node.all_input_nodes if not isinstance(source.meta.get("val"), torch.Tensor)]


def _leads_somewhere(node: Node, inside: frozenset[Node]) -> bool:
    """Does a user outside of the block have an effect, other than asserting what the block itself guarantees?"""
    pending, seen = [node], set()
    while pending:
        current = pending.pop()
        if current in seen or current in inside:
            continue
        seen.add(current)
        if current.op == "output":
            return True
        if has_effect(current) and not is_op(current, "_assert_scalar"):
            return True
        pending.extend(current.users)
    return False


def _is_matmul(node: Node) -> bool:
    return contraction(node, biased=True) is not None or op_name(node) in _MATMULS


def _check_closed(match: Match, inside: frozenset[Node], order: dict[Node, int]) -> None:
    """What the experts' matmuls compute may not be read outside, but for the output.

    It would be right, since whatever is still read stays in the graph, but the matmuls would run twice. What is before
    them (tokens in another order, masks, counts) may have any users.
    """
    computed: set[Node] = set()
    for node in sorted(inside, key=order.__getitem__):
        if not _is_matmul(node) and not any(source in computed for source in read_by(node)):
            continue
        computed.add(node)
        if node is match.output:
            continue
        for user in node.users:
            if user not in inside and _leads_somewhere(user, inside):
                raise Miss(
                    f"{node.name}, a value from inside the block, is also used by {user.name}",
                    user,
                    "a block is rewritten only when its intermediate values stay inside",
                )


def _regions(graph: Graph) -> dict[Node, tuple[object, ...]]:
    """For each node the autocast regions it stands in and the grad mode in force, as an opaque comparable value."""
    autocast: list[Node] = []
    # What the first change of the grad mode changes: the mode in which the graph is entered.
    first = next((node for node in graph.nodes if op_name(node) == "_set_grad_enabled"), None)
    grad: object = None if first is None else not first.args[0]
    region: dict[Node, tuple[object, ...]] = {}
    for node in graph.nodes:
        name = op_name(node) if node.op == "call_function" else ""
        if name == "_enter_autocast":
            autocast.append(node)
        elif name == "_exit_autocast" and node.args[0] in autocast:
            autocast.remove(node.args[0])
        elif name == "_set_grad_enabled":
            grad = node.args[0]
        region[node] = (tuple(autocast), grad)
    return region


def _check_region(nodes: Iterable[Node], output: Node, region: dict[Node, tuple[object, ...]], what: str) -> None:
    for node in nodes:
        value = node.meta.get("val")
        floating = isinstance(value, torch.Tensor) and value.dtype.is_floating_point
        if floating and region[node] != region[output]:
            raise Miss(f"{what} spans two autocast or grad-mode regions", node)


def _keep_in_region(match: Match, region: dict[Node, tuple[object, ...]]) -> None:
    """Leave casts of the result that stand behind the end of an autocast or grad-mode region outside of the block."""
    output = match.output
    while is_cast(match.output):
        source = match.output.args[0]
        assert isinstance(source, Node)
        if region[match.output] != region[source]:
            output = source
        match.output = source
    match.output = output
    match.spec = replace(match.spec, dtype=dtype_of(output))


def _check_shape(match: Match) -> None:
    """Raising gives the [T, H] result the source's shape again, with at most one size left to be inferred."""
    shape = shape_of(match.output)
    if len(shape) > 2 and sum(not size.is_Integer for size in shape) > 1:
        raise Miss(
            f"the result has {len(shape)} dimensions of which several are symbolic",
            match.output,
            "let the experts return [T, H] and reshape it afterwards",
        )


def _check_rounding(match: Match, inside: frozenset[Node]) -> None:
    """Nothing inside is rounded beyond the dtype that the matmuls compute in, except on the way out to the result."""
    compute, result = match.spec.compute_dtype, dtype_of(match.output)
    ending, pending = set[Node](), [match.output]
    while pending:
        node = pending.pop()
        if node in inside and node not in ending and not _is_matmul(node) and not is_op(node, "mul"):
            ending.add(node)
            pending.extend(read_by(node))
    for node in inside:
        after = _float(node)
        if after is None or contains(after, compute) or (node in ending and contains(after, result)):
            continue
        for source in read_by(node):
            before = _float(source)
            if before is not None and not contains(after, before):
                raise Miss(f"{op_name(node)} rounds to {after} inside of a block that computes in {compute}", node)


def _float(node: Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) and value.dtype.is_floating_point else None


class _Writes:
    """Who writes into which memory: the in-place operators of a graph by the node that made the memory."""

    def __init__(self, graph: Graph) -> None:
        self.order = {node: index for index, node in enumerate(graph.nodes)}
        self.by_root: dict[Node, list[Node]] = {}
        for node in graph.nodes:
            for written in mutated_arguments(node):
                self.by_root.setdefault(alias_root(written), []).append(node)

    def between(self, nodes: Iterable[Node], first: Node, last: Node, own: Collection[Node]) -> Node | None:
        """A node between two others that writes into the memory of one of `nodes` and is not one of `own`."""
        for root in {alias_root(node) for node in nodes}:
            for writer in self.by_root.get(root, ()):
                if self.order[first] < self.order[writer] < self.order[last] and writer not in own:
                    return writer
        return None


def _check_not_mutated(match: Match, inside: frozenset[Node], writes: _Writes) -> None:
    first = min(inside, key=writes.order.__getitem__)
    writer = writes.between([*_operands(match), *inside], first, match.output, inside)
    if writer is not None:
        raise Miss(f"{writer.name} writes into memory that the block still reads", writer)
    for node in inside:
        for written in mutated_arguments(node):
            root = alias_root(written)
            if root not in inside:
                raise Miss(f"{node.name}, inside of the block, writes into {root.name}, which is not the block's", node)
            late = next((user for user in _views(root) if user not in inside and user.op != "output"), None)
            if late is not None and writes.order[late] < writes.order[match.output]:
                raise Miss(f"{late.name} reads memory that the block writes in place", late)


def _views(root: Node) -> list[Node]:
    """The users of a node and of everything that shares its memory."""
    found: list[Node] = []
    pending, seen = [root], {root}
    while pending:
        alias = pending.pop()
        for user in alias.users:
            found.append(user)
            if alias in aliases_argument(user) and user not in seen:
                seen.add(user)
                pending.append(user)
    return found


def _bind_router(match: Match, writes: _Writes, region: dict[Node, tuple[object, ...]]) -> None:
    """Resolve the router of a match in place; what it is not is kept in `router_miss`, also where its start is one.

    Values of the router that are used elsewhere (scores that the model returns, an auxiliary loss) stay where they
    are, beside the raised router: only its weights and ids are replaced.
    """
    if match.per_pair:
        match.router_miss = Miss("the weights are applied behind the block, to rows that are normalised first")
    weights = match.weights_TK if match.weights_TK is not None else match.weights_KTE
    if match.router is not None or weights is None:
        return

    def check(router: Router) -> None:
        _check_router(router, region, writes)

    try:
        if match.router_miss is not None:
            raise match.router_miss
        router = match_router(weights, match.ids_TK, match.inner)
        check(router)
    except Miss as miss:
        match.router_miss = miss
        try:
            router = match_start(weights, match.ids_TK, match.inner, check)
        except Miss:
            return
    match.router, match.logits = router.spec, router.logits
    match.router_bias, match.router_scale = router.bias, router.expert_scale
    match.router_weights, match.router_ids = router.weights, router.ids
    match.router_place = _router_place(router, region, writes.order)
    match.router_inner = frozenset(router.inner)


def _check_router(router: Router, region: dict[Node, tuple[object, ...]], writes: _Writes) -> None:
    """Miss unless the raised router can stand at one place, where all that it reads is there and unchanged."""
    place = _router_place(router, region, writes.order)
    first, last = (pick(router.inner, key=writes.order.__getitem__) for pick in (min, max))
    operands = [node for node in (router.logits, router.bias, router.expert_scale) if node is not None]
    writer = writes.between([*router.inner, *operands], first, last, router.inner)
    if writer is not None:
        raise Miss(f"{writer.name} writes into memory of the router", writer)
    late = next((node for node in operands if writes.order[node] > writes.order[place]), None)
    if late is not None:
        raise Miss(f"{late.name}, which the router reads, is made after its choice", late)
    # An argmax may stand behind the amax that gives its weight, and more behind that.
    readers = () if router.weights is None else router.weights.users
    early = [user for user in readers if user not in router.inner and writes.order[user] < writes.order[place]]
    if early:
        what = f"{early[0].name} reads the routing weights before the experts are chosen"
        raise Miss(what, early[0], "choose the experts first: the largest score and its index by one max or topk")


def _router_place(router: Router, region: dict[Node, tuple[object, ...]], order: dict[Node, int]) -> Node:
    """The node behind which the raised router stands: its selection, or the end of a region that has the choice alone.

    A cast computes the same under any autocast state, so only its grad mode counts; what is chosen by alone has no
    gradient, so its grad mode does not.
    """
    last = max((node for node in router.values if not is_cast(node)), key=order.__getitem__, default=router.selection)
    home = autocast, grad = region[last]
    for node in router.inner:
        here = region[node]
        strays = (not is_cast(node) and here[0] != autocast) or (node in router.values and here[1] != grad)
        if strays and (node is router.selection or _float(node) is not None):
            raise Miss("the router spans two autocast or grad-mode regions", node)
    if region[router.selection] == home:
        return router.selection
    place = router.selection.next
    while region[place] != home:
        place = place.next
    early = [user for user in router.ids.users if order[user] < order[place] and user not in router.inner]
    if early:
        raise Miss(f"{early[0].name} reads the ids inside of the grad-mode region of the choice", early[0])
    return place


def _sizes(match: Match) -> None:
    tokens, hidden = shape_of(match.x_TH)
    down = shape_of(match.down[0])
    experts = down[0] if len(down) == 3 else sympy.Integer(len(match.down))
    experts = experts if match.exchange is None else sympy.Integer(match.exchange.experts)
    match.sizes = {
        "T": tokens,
        "E": experts,
        "k": sympy.Integer(1) if match.per_pair or match.one_each else shape_of(match.ids_TK)[-1],
        "H": hidden,
        "I": down[-2] if "down" in match.transposed else down[-1],
    }


def _choosing(ids: Node) -> frozenset[Node]:
    """What the ids of a block are computed by, up to matmuls: a top-k over groups of experts is no block of its own."""
    found: set[Node] = set()
    pending = [ids]
    while pending:
        node = pending.pop()
        if node not in found and node.op == "call_function" and not is_op(node, "linear") and not _is_matmul(node):
            found.add(node)
            pending.extend(node.all_input_nodes)
    return frozenset(found)


def _choices(match: Match) -> frozenset[Node]:
    """What chooses the experts of a block, and which of the choices it keeps."""
    chosen = [node for node in (match.ids_TK, match.kept, match.chosen_TKE) if node is not None]
    return frozenset().union(*map(_choosing, chosen))


def _candidate(anchor: Node) -> Node:
    """The nearest choice among scores that an anchor depends on, else the anchor: attempts at one belong together."""
    level, seen = [anchor], {anchor}
    while level and len(seen) < 128:
        for node in level:
            if is_op(node, "topk") or chooses_scores(node):
                return node
        sources = dict.fromkeys(source for node in level for source in node.all_input_nodes)
        level = [source for source in sources if source not in seen]
        seen.update(level)
    return anchor


def _line(*nodes: Node | None) -> str:
    """The user's line of the first of these nodes that has one, or that is read at one: an input has none itself."""
    for node in nodes:
        for found in () if node is None else (node, *node.users):
            line = user_line(found)
            if line:
                return line
    return ""


def _remedy(formulation: str) -> str:
    """What can be done about a step without a hint of its own."""
    if formulation == "none":
        return "nothing where this is no choice of experts; else write them as one of moe_compiler.testing.examples()"
    kind = "exchange_examples" if formulation in exchange_names() else "examples"
    return f'write the step as moe_compiler.testing.{kind}()["{formulation}"] does; until then Inductor compiles it'


def _record(best: Attempt, candidate: Node) -> MissRecord:
    miss = best.miss
    assert miss is not None
    return MissRecord(
        candidate=op_name(candidate),
        where=_line(candidate, best.anchor),
        formulation=best.formulation.name,
        steps_passed=best.passed,
        steps_total=len(best.formulation.steps) + 2,  # and finish, and whether the block is closed
        step=best.step,
        reason=miss.reason,
        node=miss.node.format_node() or miss.node.name if miss.node is not None else "",
        hint=miss.hint or _remedy(best.formulation.name),
        at=_line(miss.node, best.anchor),
    )


@graph_pass(level=Level.CAPTURED, numerics="exact")
def find_moe(graph: Graph, context: Context) -> int:
    """Bind every MoE block of the graph to a formulation, or say which step failed at which line."""
    writes, region = _Writes(graph), _regions(graph)
    order = writes.order
    failed: dict[Node, list[Attempt]] = {}
    claimed: set[Node] = set()
    explained: set[Node] = set()  # choices of a block that only a disabled formulation matches
    for formulation in (*EXCHANGES, *FORMULATIONS):
        disabled = formulation.name in context.options.disable
        for anchor in formulation.anchors(graph):
            if anchor in claimed:
                continue
            result = attempt(formulation, graph, anchor)
            candidate = _candidate(result.ids if result.ids is not None else anchor)
            if result.match is not None:
                _keep_in_region(result.match, region)
                try:
                    result.step = "closed"
                    _check_shape(result.match)
                    check_not_quantised([*result.match.gate, *result.match.up, *result.match.down])
                    inside = _inside(result.match)
                    _check_closed(result.match, inside, order)
                    _check_region(inside, result.match.output, region, "the block")
                    _check_rounding(result.match, inside)
                    roundings = added_roundings(result.match, sorted(inside, key=order.__getitem__), _is_matmul)
                    if roundings and context.options.numerics == "strict":
                        raise roundings[0]
                    _check_not_mutated(result.match, inside, writes)
                    check_exchange(result.match, inside, order, _leads_somewhere)
                    if disabled:
                        result.step, by = "disabled", context.options.source_of("disable")
                        explained |= _choices(result.match)
                        raise Miss(f"{formulation.name} is disabled by {by}", anchor, "leave it out of that list")
                except Miss as miss:
                    result.miss = miss
                else:
                    result.match.inner = inside
                    told = [f"numerics fast: {miss.reason}, at {user_line(miss.node)}" for miss in roundings]
                    context.report.notes += [note for note in told if note not in context.report.notes]
                    _bind_router(result.match, writes, region)
                    _sizes(result.match)
                    context.matches.append(result.match)
                    claimed |= inside | result.match.router_inner | _choices(result.match)
                    failed.pop(candidate, None)
                    claimed.add(candidate)
                    continue
            if not disabled or result.step == "disabled":
                failed.setdefault(candidate, []).append(result)
    for candidate, attempts in failed.items():
        if candidate in claimed or any(a.anchor in claimed for a in attempts):
            continue
        # Of a block whose experts are on several ranks no other formulation has anything to say.
        best = max(attempts, key=lambda a: (a.formulation in EXCHANGES, a.passed))
        context.report.misses.append(_record(best, candidate))
    _record_lonely_selections(graph, context, claimed | explained, set(failed))
    context.matches.sort(key=lambda match: order[match.output])
    return 0


def _record_lonely_selections(graph: Graph, context: Context, claimed: set[Node], tried: set[Node]) -> None:
    """A choice among scores that no formulation had anything to say about is still a candidate.

    A top-k is one always; an argmax or a sort of scores where what it chose leads to a product; and numbers from
    elsewhere that mask the products of experts.
    """
    for node in graph.nodes:
        masked = masks_products(node) if node not in tried and node not in claimed else None
        if masked is not None and _candidate(node) is node:
            context.report.misses.append(_lonely(node, masked))
        if node in tried or node in claimed or not (is_op(node, "topk") or chooses_scores(node)):
            continue
        ids = chosen_ids(node)
        if ids is None or ids in claimed or any(user in claimed for user in ids.users):
            continue
        if not is_op(node, "topk") and leads_to(ids, _is_matmul) is None:
            continue
        context.report.misses.append(_lonely(node, explain_selection(node, ids)))


def _lonely(node: Node, miss: Miss) -> MissRecord:
    return MissRecord(
        candidate=op_name(node),
        where=_line(node, miss.node),
        formulation="none",
        steps_passed=0,
        steps_total=1,
        step="anchor",
        reason=miss.reason,
        node=node.format_node() or node.name,
        hint=miss.hint or _remedy("none"),
        at=_line(miss.node, node),
    )
