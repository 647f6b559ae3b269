"""Fewer spellings of the same thing, before the finder looks.

Only what leaves every value as it was: an in-place operator on memory that nobody else can see becomes the operator
that returns a new tensor, and casts, reshapes, slices and dropouts that change nothing disappear. An in-place operator
on an input, on a view of one, or on anything still read under its old name afterwards stays as it is. What an exported
program states about the dtype of a value has been checked by the capture, and goes; the einsums over expert weights
that it has written out as batched products are einsums again, and its slices of one entry whose dimension is dropped
are selects (unbind). A cast that a loop writes once an expert is one cast. A choice of one expert a token keeps its
dimension, [T, 1], which a view then drops: as a top-k of one it has that dimension too.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from moe_compiler.aliasing import alias_root, aliases_argument, mutated_arguments
from moe_compiler.graph_pass import Context, graph_pass, insert, propagate
from moe_compiler.moe_ir import Level, op_name, size_expr
from moe_compiler.passes.formulations.einsums import restore_einsums
from moe_compiler.passes.formulations.selection import chooses_scores
from moe_compiler.passes.formulations.walk import arg, is_op

__all__ = ["canonicalize"]

_aten = torch.ops.aten
_END = 2**63 - 1
_REGIONS = ("_enter_autocast", "_exit_autocast", "_set_grad_enabled")
_DROPOUTS = (_aten.dropout, _aten.feature_dropout, _aten.alpha_dropout, _aten.feature_alpha_dropout)
_SAME_SHAPE_NO_OPS = (_aten.reshape, _aten.view, _aten.expand)


def _private(node: Node, base: Node, order: dict[Node, int]) -> bool:
    """Can nobody but the users of `node` see that it wrote into `base`?"""
    root = alias_root(base)
    if root.op != "call_function" or not isinstance(root.meta.get("val"), torch.Tensor):
        return False
    seen = {root}
    pending = [root]
    while pending:
        alias = pending.pop()
        for user in alias.users:
            if user is node:
                continue
            if order[user] > order[node]:
                return False
            if alias in aliases_argument(user) and user not in seen:
                seen.add(user)
                pending.append(user)
    return True


def _functional_target(node: Node) -> torch._ops.OpOverload | None:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    name = target._schema.name.partition("::")[2]
    if not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(_aten, name[:-1], None)
    overload = target._overloadname
    return getattr(packet, overload, None) if packet is not None and overload in packet.overloads() else None


def _promotes(node: Node) -> bool:
    """Would the functional operator return another dtype than the memory that the in-place one keeps?"""
    own = node.meta["val"].dtype
    operands = [a.meta["val"] for a in node.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor)]
    floating = [value for value in operands if value.dtype.is_floating_point and value.dim() > 0]
    return any(value.dtype != own for value in floating)


def _functionalize(graph: Graph) -> int:
    order = {node: index for index, node in enumerate(graph.nodes)}
    changed = 0
    for node in graph.nodes:
        written = mutated_arguments(node)
        if len(written) != 1 or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        target = _functional_target(node)
        if target is None or _promotes(node) or not _private(node, written[0], order):
            continue
        node.target = target
        changed += 1
    return changed


def _is_no_op(node: Node) -> bool:
    value = node.meta.get("val")
    source = node.args[0] if node.args else None
    if not isinstance(value, torch.Tensor) or not isinstance(source, Node):
        return False
    before = source.meta.get("val")
    if not isinstance(before, torch.Tensor) or before.dtype != value.dtype or before.device != value.device:
        return False
    if node.target is _aten.to.dtype:
        copy = node.args[3] if len(node.args) > 3 else node.kwargs.get("copy", False)
        return not copy and node.kwargs.get("memory_format") is None and len(node.args) < 5
    packet = getattr(node.target, "overloadpacket", None)
    if packet in _DROPOUTS:
        return arg(node, "train") is False
    if packet in _SAME_SHAPE_NO_OPS:
        return [size_expr(s) for s in before.shape] == [size_expr(s) for s in value.shape]
    return packet is _aten.slice and _is_whole(node)


def _is_whole(node: Node) -> bool:
    """x[:] along one dimension: what indexing with symbolic sizes leaves behind."""
    start, end = arg(node, "start"), arg(node, "end")
    return start in (0, None) and arg(node, "step") == 1 and (end is None or (isinstance(end, int) and end == _END))


def _drop_no_ops(graph: Graph) -> int:
    mutated = {alias_root(argument) for node in graph.nodes for argument in mutated_arguments(node)}
    changed = 0
    for node in list(graph.nodes):
        # An output must stay its own node: returning an input twice has another meaning than returning a view of it.
        if node.op != "call_function" or not _is_no_op(node) or any(user.op == "output" for user in node.users):
            continue
        if alias_root(node) in mutated:
            continue
        source = node.args[0]
        assert isinstance(source, Node)
        node.replace_all_uses_with(source)
        graph.erase_node(node)
        changed += 1
    return changed


def _count_from_the_front(graph: Graph) -> int:
    """Number the results of an operator from its first: parts[-1] of two is parts[1]."""
    changed = 0
    for node in graph.find_nodes(op="call_function", target=operator.getitem):
        source, index = node.args
        value = source.meta.get("val") if isinstance(source, Node) else None
        if isinstance(value, (tuple, list)) and isinstance(index, int) and -len(value) <= index < 0:
            node.args = (source, index + len(value))
            changed += 1
    return changed


def _drop_statements(graph: Graph) -> int:
    """Drop what torch.export asserts about dtype, device and layout: the recorded values have just been held to it."""
    changed = 0
    for node in graph.find_nodes(op="call_function", target=_aten._assert_tensor_metadata.default):
        if arg(node, "size") is None and arg(node, "stride") is None:
            graph.erase_node(node)
            changed += 1
    return changed


def _restore_selects(graph: Graph) -> int:
    """Write the slices of one entry that torch.export makes of unbind, each without its dimension, as selects."""
    parts: dict[tuple[Node, int], dict[int, tuple[Node, Node]]] = {}
    for node in graph.nodes:
        part = node.args[0] if is_op(node, "squeeze") and len(node.args) > 1 else None
        if not is_op(part, "slice") or not isinstance(part, Node) or not isinstance(part.args[0], Node):
            continue
        start, end, rank = arg(part, "start"), arg(part, "end"), part.meta["val"].dim()
        dim = arg(part, "dim") % rank
        dims = node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]
        if [d % rank for d in dims] == [dim] and isinstance(start, int) and end == start + 1:  # type: ignore[operator]
            parts.setdefault((part.args[0], dim), {})[start] = (node, part)
    changed = 0
    for (source, dim), found in parts.items():
        if len(found) < 2 or list(found) != list(range(len(found))) or source.meta["val"].shape[dim] != len(found):
            continue
        for place, (node, part) in found.items():
            node.target, node.args = _aten.select.int, (source, dim, place)
            if not part.users:
                graph.erase_node(part)
            changed += 1
    return changed


def _merge_casts(graph: Graph) -> int:
    """Let the first of several equal casts of a tensor stand for all of them, within one autocast or grad-mode region.

    Not one that is written to, or whose source is; and not one that is returned, which is a tensor of its own.
    """
    mutated = {alias_root(argument) for node in graph.nodes for argument in mutated_arguments(node)}
    first: dict[tuple[object, ...], Node] = {}
    changed = 0
    for node in list(graph.nodes):
        if node.op == "call_function" and op_name(node) in _REGIONS:
            first.clear()
        if not is_op(node, "to", "_to_copy", "type_as") or any(user.op == "output" for user in node.users):
            continue
        if alias_root(node) in mutated or any(alias_root(source) in mutated for source in node.all_input_nodes):
            continue
        key = (node.target, node.args, tuple(sorted(node.kwargs.items())))
        known = first.setdefault(key, node)
        if known is not node:
            node.replace_all_uses_with(known)
            graph.erase_node(node)
            changed += 1
    return changed


def _keep_dimension(graph: Graph) -> int:
    """Let argmax and max over scores keep the dimension that they reduce, and squeeze their results instead."""
    changed = 0
    for node in list(graph.nodes):
        if not is_op(node, "argmax", "max") or not chooses_scores(node) or arg(node, "keepdim"):
            continue
        results = [node] if is_op(node, "argmax") else [user for user in node.users if op_name(user) == "getitem"]
        node.args, node.kwargs = (node.args[0], arg(node, "dim"), True), {}
        propagate(node)
        for result in results:
            users = list(result.users)
            if result is not node:
                propagate(result)
            with graph.inserting_before(result.next):
                squeezed = insert(result, _aten.squeeze.dim, (result, -1))
            for user in users:
                user.replace_input_with(result, squeezed)
        changed += 1
    return changed


@graph_pass(level=Level.CAPTURED, numerics="exact")
def canonicalize(graph: Graph, context: Context) -> int:
    """Make private in-place operators functional, einsums of what was written out; drop what has no effect.

    And let equal casts be one, and a choice of one expert keep its dimension.

    before   p = topk(s); w = p.values.div_(sum(p.values)); w = w.to(float32); y = zeros.index_add_(0, t, v)
    after    p = topk(s); w = div(p.values, sum(p.values));                    y = index_add(zeros, 0, t, v)
    """
    changed = _drop_statements(graph) + _count_from_the_front(graph) + _restore_selects(graph)
    changed += _functionalize(graph) + _drop_no_ops(graph) + _merge_casts(graph)
    return changed + restore_einsums(graph) + _keep_dimension(graph)
