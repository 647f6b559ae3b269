"""Raise every match to the canonical operators, still ahead of autograd.

Casts that autocast left implicit are written out, transposed weights become views, and the operators are inserted at
the block's own place, so inside of its grad-mode region. Asserts about sizes that only the block had (how many rows
an expert got) go with it; everything else that other nodes read stays. Where the block's own operators were an error
for an id that is no expert, an assertion says so in their place.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from moe_compiler import device
from moe_compiler.aliasing import has_effect, mutated_arguments
from moe_compiler.graph_pass import Context, graph_pass, insert
from moe_compiler.moe_ir import Level, Match, Miss, op_name, size_expr, user_line
from moe_compiler.passes.formulations.collectives import is_wait
from moe_compiler.passes.formulations.id_range import id_checks
from moe_compiler.passes.formulations.topk import STAYS
from moe_compiler.passes.formulations.walk import is_op, swaps_last_two
from moe_compiler.report import MatchRecord, split_where
from moe_compiler.runtime_kernels import register as _register  # noqa: F401 - defines torch.ops.moepdl

__all__ = ["leave_alone", "raise_moe"]

_aten = torch.ops.aten
_ops = torch.ops.moepdl


def _cast(node: Node, dtype: torch.dtype) -> Node:
    if node.meta["val"].dtype == dtype:
        return node
    return insert(node, _aten.to.dtype, (node, dtype))


def _oriented(node: Node, transposed: bool) -> Node:
    """A weight as [.., out, in]: the source of a transpose when there is one, else a transposed view."""
    if not transposed:
        return node
    if swaps_last_two(node):
        return node.args[0]
    return insert(node, _aten.transpose.int, (node, -2, -1))


def _whole(local: list[Node], role: str, match: Match) -> list[Node]:
    """One role's tensors of all experts, as `shard_experts` reads them: those of this rank stay where they are.

    local: one packed tensor, or one an expert, of this rank's experts; the same where no exchange is replaced.
    """
    exchange = match.exchange
    if exchange is None or not local:
        return local
    group, experts, own = exchange.group, exchange.experts, exchange.experts // exchange.ranks
    name = f"{_block_of(match)}.{role}"
    if local[0].meta["val"].dim() == (2 if role.endswith("bias") else 3):
        return [insert(local[0], _ops.gather_experts.default, (local[0], group, experts, "contiguous", name))]
    shape = [int(size) for size in local[0].meta["val"].shape]
    empty = insert(local[0], _aten.slice.Tensor, (local[0], 0, 0, 0))
    found = []
    for expert in range(experts):
        owner, place = divmod(expert, own)
        one = local[place] if owner == exchange.rank else empty
        found.append(insert(one, _ops.gather_expert.default, (one, group, owner, shape, f"{name}.{expert}")))
    return found


def _flat_bias(node: Node) -> Node:
    """A bias without the dimension that a batched product needs: [E, out] of [E, 1, out]."""
    return insert(node, _aten.squeeze.dim, (node, 1)) if node.meta["val"].dim() == 3 else node


def _unpacked(nodes: list[Node], packing: str, dim: int) -> tuple[list[Node], list[Node]]:
    """gate and up as views of what packs both along `dim` in another order than the operator's own."""
    parts: tuple[list[Node], list[Node]] = ([], [])
    for node in nodes:
        half = int(node.meta["val"].shape[dim]) // 2
        first, second = ((0, half, 1), (half, 2 * half, 1))
        if packing.startswith("interleaved"):
            first, second = ((0, 2 * half, 2), (1, 2 * half, 2))
        of_gate, of_up = (second, first) if packing.endswith("up_gate") else (first, second)
        for part, bounds in zip(parts, (of_gate, of_up), strict=True):
            part.append(insert(node, _aten.slice.Tensor, (node, dim, *bounds)))
    return parts


def _in_turns(node: Node) -> Node:
    """[E, 2I, ..] with gate and up in turns as [E, 2, I, ..], a view whose halves are neighbours in memory."""
    experts, both, *rest = map(int, node.meta["val"].shape)
    pairs = insert(node, _aten.view.default, (node, [experts, both // 2, 2, *rest]))
    return insert(node, _aten.transpose.int, (pairs, 1, 2))


class _Raising:
    """The matches of one graph, raised one after the other; operands that an earlier one replaced are followed."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.order = {node: place for place, node in enumerate(graph.nodes)}
        self.replaced: dict[Node, Node] = {}

    def now(self, node: Node) -> Node:
        """What stands in the graph for a node that the finder bound."""
        while node in self.replaced:
            node = self.replaced[node]
        return node

    def replace(self, old: Node, new: Node) -> None:
        old.replace_all_uses_with(new)
        self.replaced[old] = new

    def router(self, match: Match) -> tuple[Node, Node]:
        """Insert moepdl::route, which replaces weights and ids, behind their selection -> (weights, ids)."""
        assert match.router is not None and match.logits is not None
        old_ids = match.router_ids if match.router_ids is not None else match.ids_TK
        chosen = old_ids.args[0] if op_name(old_ids) == "getitem" else old_ids
        assert isinstance(chosen, Node)
        place = match.router_place or chosen
        logits = self.now(match.logits)
        operands = []
        if len(logits.meta["val"].shape) != 2:
            with self.graph.inserting_after(place):
                place = insert(chosen, _aten.reshape.default, (logits, [-1, logits.meta["val"].shape[-1]]))
            operands.append(place)
        else:
            operands.append(logits)
        for operand in (match.router_bias, match.router_scale):
            if operand is not None and len(operand.meta["val"].shape) != 1:
                with self.graph.inserting_after(place):
                    place = insert(chosen, _aten.reshape.default, (self.now(operand), [-1]))
                operands.append(place)
            else:
                operands.append(operand if operand is None else self.now(operand))
        with self.graph.inserting_after(place):
            route = insert(chosen, torch.ops.moepdl.route.default, (*operands, *match.router.args()))
        with self.graph.inserting_after(route):
            weights = insert(chosen, operator.getitem, (route, 0))
        with self.graph.inserting_after(weights):
            ids = insert(chosen, operator.getitem, (route, 1))
        self.replace_rows(old_ids, ids, logits)
        if match.router_weights is not None:
            self.replace_rows(match.router_weights, weights, logits)
        return weights, ids

    def replace_rows(self, old: Node, rows: Node, logits: Node) -> None:
        """Replace weights or ids of any shape by the rows [T, K] of them; `logits` has their symbolic sizes."""
        shape = list(old.meta["val"].shape)
        if len(shape) == 2 and size_expr(shape[1]) == size_expr(rows.meta["val"].shape[1]):
            self.replace(old, rows)
            return
        with self.graph.inserting_before(rows.next):
            if len(shape) == 1:
                self.replace(old, insert(rows, _aten.squeeze.dim, (rows, 1)))
                return
            sizes: list[int | Node] = [size if isinstance(size, int) else -1 for size in shape]
            if sizes.count(-1) > 1 or (-1 in sizes and 0 in sizes):  # beside a 0 nothing can be inferred
                sizes = self.sizes_of(shape, logits)
            self.replace(old, insert(rows, _aten.reshape.default, (rows, sizes)))

    def sizes_of(self, shape: list[Any], tensor: Node) -> list[int | Node]:
        """A shape whose symbolic sizes are read from those of a tensor that has them too."""
        own = [size_expr(size) for size in tensor.meta["val"].shape]
        sizes: list[int | Node] = []
        for size in shape:
            if isinstance(size, int):
                sizes.append(size)
            else:
                sizes.append(insert(tensor, _aten.sym_size.int, (tensor, own.index(size_expr(size)))))
        return sizes

    def experts_at(self, ids: Node, match: Match) -> Node:
        """The experts' numbers at the ids, read as the source reads their weights.

        A negative id counts from the end, and one beyond the last expert stays the error that it is.
        """
        output = match.output
        device_of = ids.meta["val"].device
        with self.graph.inserting_before(output):
            numbers = insert(output, _aten.arange.default, (int(match.sizes["E"]),), {"device": device_of})
            return insert(output, _aten.index.Tensor, (numbers, [ids]))

    def chosen(self, ids: Node, match: Match) -> Node:
        """The ids [T, K] of which those that the source dropped are E: the operator computes nothing for it."""
        assert match.chosen_TKE is not None
        experts, k = int(match.sizes["E"]), int(match.sizes["k"])
        with self.graph.inserting_before(match.output):
            kept = _pairs(insert(match.output, _aten.any.dim, (self.now(match.chosen_TKE), -1)), k)
            return insert(match.output, _aten.where.ScalarOther, (kept, _pairs(ids, k), experts))

    def assert_range(self, ids: Node, match: Match) -> None:
        """State what the block's operators check of the ids, where nothing shows that they lie inside."""
        output = match.output
        for check in id_checks(match, sorted(match.inner, key=self.order.__getitem__)):
            with self.graph.inserting_before(output):
                for compare, bound in ((_aten.ge.Scalar, check.low), (_aten.le.Scalar, check.high)):
                    inside = insert(output, compare, (ids, bound))
                    held = insert(output, _aten.all.default, (inside,))
                    insert(output, _aten._assert_async.msg, (held, check.message))

    def weights_of_choices(self, match: Match, ids_TK: Node) -> Node:
        """The weights [T, K] out of [K, T, E] or [T, E], where each choice has its own in its expert's column."""
        assert match.weights_KTE is not None
        output = match.output
        with self.graph.inserting_before(output):
            weights_TE = self.now(match.weights_KTE)
            if weights_TE.meta["val"].dim() == 3:
                weights_TE = insert(output, _aten.sum.dim_IntList, (weights_TE, [0]))
            return insert(output, _aten.gather.default, (weights_TE, 1, ids_TK))

    def block(self, match: Match) -> None:
        """Insert moepdl::experts before the block's output, which it replaces."""
        weights: Node | None
        whole = match.router is not None and match.router_miss is None
        if match.router is not None:
            weights, ids = self.router(match)
        if not whole:
            ids = self.now(match.ids_TK)
            if match.weights_TK is not None:
                weights = self.now(match.weights_TK)
            else:
                weights = None if match.per_pair else self.weights_of_choices(match, ids)
        self.assert_range(ids, match)
        if match.chosen_TKE is not None:
            ids = self.chosen(ids, match)
        if match.ids_of_any_range:
            ids = self.experts_at(ids, match)
        spec = match.spec
        output, x, weight_at = match.output, self.now(match.x_TH), spec.weight_at
        with self.graph.inserting_before(output):
            if weights is None:
                ids = insert(output, _aten.reshape.default, (ids, [-1, 1]))
                weights = insert(output, _aten.ones_like.default, (ids,), {"dtype": spec.compute_dtype})
            else:
                k = int(match.sizes["k"])
                ids, weights = _pairs(ids, k), _scaled(_pairs(weights, k), match.weights_scale)
            if weight_at == "input" and x.meta["val"].dtype != spec.compute_dtype:
                # One expert a token (the finder saw to it): weight the tokens here, in the dtype that the source used.
                x = insert(output, _aten.mul.Tensor, (x, weights))
                weights, weight_at = insert(output, _aten.ones_like.default, (weights,)), "output"
            x = _cast(x, spec.compute_dtype)
            lists = {}
            for role in ("gate", "up", "down"):
                oriented = [_oriented(self.now(n), role in match.transposed) for n in getattr(match, role)]
                oriented = _whole(oriented, role, match)
                lists[role] = [_cast(n, spec.compute_dtype) for n in oriented]
            for role in ("gate_bias", "up_bias", "down_bias"):
                flat = _whole([_flat_bias(self.now(n)) for n in getattr(match, role)], role, match)
                lists[role] = [_cast(n, spec.compute_dtype) for n in flat]
            packed = len(lists["gate"]) == 1 and lists["gate"][0].meta["val"].dim() == 3
            if not match.up and spec.packing == "interleaved" and packed:
                for role in ("gate", "gate_bias"):
                    lists[role] = [_in_turns(n) for n in lists[role]]
            elif not match.up and spec.packing != "gate_up":
                # Up before gate: no stride leads back, so they become two tensors. So do tensors of one expert each.
                lists["gate"], lists["up"] = _unpacked(lists["gate"], spec.packing, -2)
                lists["gate_bias"], lists["up_bias"] = _unpacked(lists["gate_bias"], spec.packing, -1)
            attributes = (spec.activation, spec.gated, weight_at, spec.dtype)
            raised = insert(output, torch.ops.moepdl.experts.default, (x, ids, weights, *lists.values(), *attributes))
            result = _shaped_like(raised, output)
            if match.base is not None:
                result = insert(output, _aten.add.Tensor, (self.now(match.base), result))
            self.replace(output, result)


def _pairs(node: Node, k: int) -> Node:
    """ids or weights as [T, K]."""
    shape = node.meta["val"].shape
    fits = len(shape) == 2 and size_expr(shape[1]) == k
    return node if fits else insert(node, _aten.reshape.default, (node, [-1, k]))


def _scaled(weights: Node, scale: float) -> Node:
    """Weights times a constant, in fp32 or wider: what was a product with the rows must not round the weights."""
    if scale == 1.0:
        return weights
    wide = torch.promote_types(weights.meta["val"].dtype, torch.float32)
    return insert(weights, _aten.mul.Tensor, (_cast(weights, wide), scale))


def _shaped_like(raised: Node, output: Node) -> Node:
    """The block's [T, H] result in the shape that the source gave it."""
    shape = list(output.meta["val"].shape)
    if len(shape) == 2:
        return raised
    sizes = [size if isinstance(size, int) else -1 for size in shape]
    return insert(output, _aten.reshape.default, (raised, sizes))


# Calls that only state something about a size; they go with the values that they are about.
_STATEMENTS = ("_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size")


def _drop_inside(graph: Graph, inner: set[Node]) -> None:
    """Erase what the raised blocks leave behind and dead code elimination must not judge by itself.

    In-place operators that were the block's own count as effects, and so do the assertions about how many rows an
    expert got. They go unless something that stays still reads those values.
    """
    live: set[Node] = set()
    pending = [n for n in graph.nodes if n.op in ("output", "placeholder") or _has_effect(n, inner)]
    while pending:
        node = pending.pop()
        if node not in live:
            live.add(node)
            pending.extend(node.all_input_nodes)
    orphans: set[Node] = set()
    for node in graph.nodes:
        lost = (source in orphans or (source in inner and source not in live) for source in node.all_input_nodes)
        if node not in live and any(lost):
            orphans.add(node)
    for node in reversed(list(graph.nodes)):
        stays = node in live or node.users or (is_op(node, *_STATEMENTS) and node not in orphans)
        if not stays:
            graph.erase_node(node)


def _has_effect(node: Node, inner: set[Node]) -> bool:
    # What a block waited for and what it wrote is its own; a wait counts as an effect for its own sake.
    own = node in inner and (mutated_arguments(node) or is_wait(node))
    return has_effect(node) and not is_op(node, *_STATEMENTS) and not own


def _biased(match: Match) -> str:
    """The projections that have a bias."""
    return ", ".join(role for role in ("gate", "up", "down") if getattr(match, f"{role}_bias"))


def _block_of(match: Match) -> str:
    """The path of the module that the block is in, or the name of its result."""
    stack = match.output.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    return _module_path(path) or match.output.name


def _describe(match: Match, left_alone: str) -> MatchRecord:
    spec, done = match.spec, "left as it is" if left_alone else "replaced"
    attributes: dict[str, Any] = {
        "activation": spec.activation,
        "gated": spec.gated,
        "weight_at": spec.weight_at,
        "layout": "per expert" if len(match.down) > 1 else "packed" if not match.up else "separate gate and up",
        **({"packing": spec.packing} if spec.packing != "gate_up" else {}),
        **({"biases": _biased(match)} if _biased(match) else {}),
        **({"weights_scale": match.weights_scale} if match.weights_scale != 1.0 else {}),
        **({"exchange": f"{match.exchange}: {done}"} if match.exchange else {}),
        **({"drops": "choices that the model's own rule took out"} if match.chosen_TKE is not None else {}),
        "dtype": str(spec.dtype).removeprefix("torch."),
        "compute_dtype": str(spec.compute_dtype).removeprefix("torch."),
    }
    if match.router is not None:
        attributes |= {
            "score": match.router.score,
            "score_dtype": str(match.router.score_dtype).removeprefix("torch."),
            "order": match.router.order,
            "renormalize": match.router.renormalize,
            "clamp": match.router.clamp,
            "eps": match.router.eps,
            "scale": match.router.scale,
            "bias": match.router.bias,
            "expert_scale": match.router.expert_scale,
        }
        if match.router.groups > 1:
            attributes |= {name: getattr(match.router, name) for name in ("groups", "kept_groups", "group_top", "fill")}
    return MatchRecord(
        block=_block_of(match),
        formulation=match.formulation,
        router=match.router.rule + (", then Inductor" if match.router_miss else "") if match.router else None,
        router_why=_why_not_router(match.router_miss) if match.router_miss else "",
        where=user_line(match.anchor),
        sizes={name: str(size) for name, size in match.sizes.items()},
        attributes=attributes,
        left_alone=left_alone,
    )


def _why_not_router(miss: Miss) -> str:
    """The reason, the user's line at which the reading of the router stopped, and what would help."""
    where, code = split_where(user_line(miss.node))
    why = f"{miss.reason}, at {where}  {code}".rstrip() if where else miss.reason
    return f"{why}; try: {miss.hint}" if miss.hint and miss.hint != STAYS else why


def _uneven(match: Match) -> str:
    """Why a block with one weight tensor an expert has no kernel: all must be stored alike. "" when they are."""
    for role in ("gate", "up", "down"):
        layouts = [tuple(map(size_expr, node.meta["val"].stride())) for node in getattr(match, role)]
        for expert, layout in enumerate(layouts):
            if layout != layouts[0]:
                return f"the {role} weight of expert {expert} has strides {layout}, that of expert 0 has {layouts[0]}"
    return ""


def _module_path(path: str) -> str:
    """`L['self'].layers[0].mlp` or `L__self___layers_0` as a reader would write it."""
    return path.replace("L['self'].", "").replace("L['self']", "").replace("['", ".").replace("']", "").strip(".")


def leave_alone(context: Context, why: str) -> None:
    """Report what the finder matched as left alone: where this pass does not run."""
    context.report.matches += [_describe(match, why) for match in context.matches]


@graph_pass(level=Level.MOE, numerics="rounding")
def raise_moe(graph: Graph, context: Context) -> int:
    """Replace every matched block by moepdl::route and moepdl::experts, where its device has kernels for it.

    before   p = softmax(l); w, i = topk(p); s, r = sort(i); ..; a = grouped_mm(x[r // k], W1, o); ..; y = sum(..)
    after    w, i = route(l, k, "softmax", ..); y = experts(x, i, w, [W1], [], [W2], "silu", ..)
    """
    inner: set[Node] = set()
    raising = _Raising(graph)
    count = 0
    for match in context.matches:
        why = device.why_left_alone(match.x_TH.meta["val"].device.type, match.spec.compute_dtype) or _uneven(match)
        context.report.matches.append(_describe(match, why))
        if not why:
            raising.block(match)
            inner |= match.inner | match.router_inner
            count += 1
    if count:
        _drop_inside(graph, inner)
    return count
