"""Open every canonical operator into its stages, in the forward and in the backward graph.

After autograd a block is one node a direction. Its stages are what the dependency DAG, the plan and the chains are
made of, so this is where order, grouped matmuls, combine and their backward counterparts become nodes of their own.
The router's backward is a handful of elementwise operators: it becomes plain ATen, which Inductor fuses with its
neighbours.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from moe_compiler.aliasing import has_effect
from moe_compiler.graph_pass import Context, graph_pass, insert
from moe_compiler.inline import named_arguments, write_out
from moe_compiler.moe_ir import EXCHANGES, Level, is_moepdl, op_name
from moe_compiler.runtime_kernels import register as _register  # noqa: F401 - defines torch.ops.moepdl
from moe_compiler.runtime_kernels.route.reference import route_backward
from moe_compiler.runtime_kernels.weights import are_in_turns, num_experts

__all__ = ["BLOCK", "expand_stages"]

# Key of a stage node's metadata: the name of the canonical node it came from. Stages of one block share it.
BLOCK = "moepdl_block"


_ops = torch.ops.moepdl


class _Expansion:
    """Inserts the stages of one canonical node before it, and replaces the node's results."""

    def __init__(self, node: Node) -> None:
        self.node = node

    def stage(self, name: str, *args: Any) -> Node:
        with self.node.graph.inserting_before(self.node):
            stage = insert(self.node, getattr(_ops, name).default, args)
        stage.meta[BLOCK] = self.node.name
        return stage

    def item(self, node: Node, index: int) -> Node:
        with self.node.graph.inserting_before(self.node):
            return insert(self.node, operator.getitem, (node, index))

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        if node.meta["val"].dtype == dtype:
            return node
        with self.node.graph.inserting_before(self.node):
            return insert(self.node, torch.ops.prims.convert_element_type.default, (node, dtype))

    def replace(self, results: list[Node | list[Node] | None]) -> None:
        """Give the users of the canonical node's results their stage; None stands for a result that nobody reads."""
        for user in list(self.node.users):
            result = results[user.args[1]]  # type: ignore[index]
            for inner in list(user.users) if isinstance(user.meta["val"], (list, tuple)) else ():
                if isinstance(result, list):
                    inner.replace_all_uses_with(result[inner.args[1]])  # type: ignore[index]
                self.node.graph.erase_node(inner)
            if isinstance(result, Node):
                user.replace_all_uses_with(result)
            self.node.graph.erase_node(user)
        self.erase()

    def replace_whole(self, result: Node) -> None:
        """The same for a node with one result."""
        self.node.replace_all_uses_with(result)
        self.erase()

    def erase(self) -> None:
        self.node.graph.erase_node(self.node)


def _values(nodes: list[Node]) -> list[torch.Tensor]:
    return [node.meta["val"] for node in nodes]


def _expand_experts(node: Node, *, saving: bool) -> None:
    a, e = named_arguments(node), _Expansion(node)
    # Under activation checkpointing the backward graph recomputes the block, and nobody reads what was saved.
    save = saving and any(user.args[1] == 1 for user in node.users)
    k = int(a["ids"].meta["val"].shape[1])
    at_input = a["weights"] if a["weight_at"] == "input" else None
    at_output = a["weights"] if a["weight_at"] == "output" else None
    order = e.stage("order", a["ids"], int(num_experts(_values(a["gate"]))))
    perm, starts = e.item(order, 0), e.item(order, 1)
    weights = (a["gate"], a["up"], a["gate_bias"], a["up_bias"])
    first = e.stage("gate_up", a["x"], at_input, perm, starts, *weights, k, a["activation"], a["gated"], save)
    pairs = e.stage("down", e.item(first, 0), perm, starts, a["down"], a["down_bias"])
    y = e.stage("combine", pairs, at_output, k, a["dtype"])
    if saving:
        e.replace([y, e.item(first, 1), perm, starts])
    else:
        e.replace_whole(y)


def _expand_experts_backward(node: Node) -> None:
    a, e = named_arguments(node), _Expansion(node)
    k = int(a["ids"].meta["val"].shape[1])
    x, weights, perm, starts = a["x"], a["weights"], a["perm"], a["starts"]
    need_x, need_weights, need_gate, need_up, need_down, need_gate_bias, need_up_bias, need_down_bias = a["needs"]
    at_output = a["weight_at"] == "output"
    results: list[Any] = [None] * 8
    scores = weights if at_output else None
    attributes = (k, a["activation"], a["gated"], are_in_turns(_values(a["gate"])))
    first = e.stage("grad_act", a["grad_y"], scores, a["preact"], perm, starts, a["down"], a["down_bias"], *attributes)
    grad_preact = e.item(first, 0)
    if need_down:
        grads = e.stage("grad_down", a["grad_y"], e.item(first, 1), perm, starts, a["down"], k)
        results[4] = [e.item(grads, i) for i in range(len(a["down"]))]
    if need_gate or need_up:
        grads = e.stage(
            "grad_gate_up",
            x,
            None if at_output else weights,
            grad_preact,
            perm,
            starts,
            a["gate"],
            a["up"],
            k,
            a["gated"],
        )
        items = [e.item(grads, i) for i in range(len(a["gate"]) + len(a["up"]))]
        results[2], results[3] = items[: len(a["gate"])], items[len(a["gate"]) :]
    if (need_gate_bias and a["gate_bias"]) or (need_up_bias and a["up_bias"]):
        grads = e.stage("grad_gate_up_bias", grad_preact, starts, a["gate_bias"], a["up_bias"])
        items = [e.item(grads, i) for i in range(len(a["gate_bias"]) + len(a["up_bias"]))]
        results[5], results[6] = items[: len(a["gate_bias"])], items[len(a["gate_bias"]) :]
    if need_down_bias and a["down_bias"]:
        grads = e.stage("grad_down_bias", a["grad_y"], scores, perm, starts, a["down_bias"], k)
        results[7] = [e.item(grads, i) for i in range(len(a["down_bias"]))]
    if need_x or (need_weights and not at_output):
        pairs = e.stage("grad_pairs", grad_preact, perm, starts, a["gate"], a["up"], a["gated"])
        if need_x:
            results[0] = e.stage("combine", pairs, None if at_output else weights, k, x.meta["val"].dtype)
        if need_weights and not at_output:
            results[1] = e.cast(e.stage("grad_input_weights", x, pairs, k), weights.meta["val"].dtype)
    if need_weights and at_output:
        results[1] = e.cast(e.item(first, 2), weights.meta["val"].dtype)
    e.replace(results)


class _Order:
    """The exchanges of each group, in the order of the graph: each start reads the token of the one before."""

    def __init__(self) -> None:
        self.tokens: dict[str, Node] = {}

    def before(self, group: str) -> list[Node]:
        return [self.tokens[group]] if group in self.tokens else []


def _expand_exchange(node: Node, order: _Order) -> None:
    """An exchange as its start and, at once, its wait; `overlap_all_to_all` moves them apart."""
    a, e = named_arguments(node), _Expansion(node)
    name, group, capacity = op_name(node), a["group"], a["capacity"]
    sent: tuple[Any, ...]
    after, told = order.before(group), (a.get("layer", ""), a.get("timeout_s", 30.0))
    if name == "ep_dispatch":
        where = (group, a["experts"], a["placement"], capacity)
        start = e.stage("ep_dispatch_start", a["x"], a["ids"], a["weights"], after, *where, *told)
        token, slots = e.item(start, 0), e.item(start, 1)
        x, scores = a["x"].meta["val"], a["weights"].meta["val"]
        sizes = (_size(a["x"], 1), _size(a["ids"], 1), x.dtype, scores.dtype)
        wait = e.stage("ep_dispatch_wait", token, [], group, capacity, *sizes)
        e.replace([*(e.item(wait, index) for index in range(3)), slots])
    elif name == "ep_combine":
        token = e.stage("ep_combine_start", a["out"], after, group, capacity, *told, a.get("phase", "combine"))
        sent = (_size(a["out"], 1), a["out"].meta["val"].dtype, a["dtype"])
        e.replace_whole(e.stage("ep_combine_wait", token, a["slots"], [], capacity, *sent))
    elif name == "ep_redispatch":
        token = e.stage("ep_redispatch_start", a["grad_y"], a["slots"], after, group, capacity, *told)
        sent = (_size(a["grad_y"], 1), a["grad_y"].meta["val"].dtype)
        e.replace_whole(e.stage("ep_redispatch_wait", token, [], group, capacity, *sent))
    else:
        token = e.stage("ep_return_weights_start", a["grads"], after, group, capacity, *told)
        where = (a["experts"], a["placement"], capacity, a["grads"].meta["val"].dtype)
        e.replace_whole(e.stage("ep_return_weights_wait", token, a["ids"], a["slots"], [], *where))
    order.tokens[group] = token


def _size(node: Node, dim: int) -> int:
    return int(node.meta["val"].shape[dim])


@graph_pass(level=Level.STAGES, numerics="exact")
def expand_stages(graph: Graph, context: Context) -> int:
    """Open moepdl::experts, its saving and backward forms, route_backward and the exchanges into stages.

    before   y = experts(x, i, w, [W1], [], [W2], "silu", ..)
    after    r, o = order(i, E); a = gate_up(x, None, r, o, [W1], ..); p = down(a, r, o, [W2]); y = combine(p, w, k)
    """
    count, order = 0, _Order()
    for node in list(graph.nodes):
        if not is_moepdl(node):
            continue
        name = op_name(node)
        if name in EXCHANGES:
            _expand_exchange(node, order)
        elif name in ("experts", "experts_saving"):
            _expand_experts(node, saving=name == "experts_saving")
        elif name == "experts_backward":
            _expand_experts_backward(node)
        elif name == "route_backward":
            write_out(node, route_backward, ("grad_weights", "logits", "ids", "expert_scale"))
        else:
            continue
        count += 1
    if count:
        graph.eliminate_dead_code(has_effect)
    return count
