"""Activation checkpointing: what must not be recomputed, the choice of experts.

The scores that a backward graph recomputes may differ from those of the forward graph in their last bit, since other
operators are fused around them. Two experts that compete closely, or tie, would then swap places, and the gradients
would be those of another function than the one that ran. So ids and routing weights are kept from the forward pass:
T * K numbers each, next to nothing beside the activations that a checkpoint saves.

What came over the wire is kept too: an exchange that is made again in the backward would take as long as the first, and
every rank would have to make it again at the same place.
"""

from __future__ import annotations

import operator

from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from moe_compiler.aliasing import aliases_argument
from moe_compiler.inline import named_arguments
from moe_compiler.moe_ir import is_moepdl, op_name

__all__ = ["keep_choices"]

_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
_BLOCKS = ("experts", "experts_saving", "ep_dispatch")
# What an operand may be behind of, besides views, and still be the same choice.
_SAME_CHOICE = frozenset({"_to_copy", "convert_element_type", "clone"})


def keep_choices(graph: Graph) -> int:
    """Mark ids and routing weights of every block in a joint forward and backward graph as saved, if they are not.

    What a raised router gives is kept as well where steps of the model's own stand between it and its block. Only what
    a checkpoint would recompute is marked, and so are the results of exchanges. Returns the number of blocks concerned.
    """
    count = 0
    for node in graph.nodes:
        if is_moepdl(node) and op_name(node) in _BLOCKS:
            named = named_arguments(node)
            kept = [_keep(named[role]) for role in ("ids", "weights")]
            count += any(kept)
    for node in graph.nodes:
        if is_moepdl(node) and op_name(node) == "route":
            for result in node.users:
                _keep(result)
        elif is_moepdl(node) and op_name(node) == "ep_dispatch":
            for result in node.users:
                _save(result)
        elif is_moepdl(node) and op_name(node) == "ep_combine":
            _save(node)
    return count


def _keep(node: Node) -> bool:
    """Mark a node and, behind views and casts, the operator that made the choice."""
    kept = False
    while True:
        kept = _save(node) or kept
        source = node.args[0] if node.args else None
        same = node.target is operator.getitem or op_name(node) in _SAME_CHOICE or aliases_argument(node)
        if node.op != "call_function" or not same or not isinstance(source, Node):
            return kept
        if node.target is operator.getitem:
            # Of an operator that is not run again all results are kept: a tuple itself cannot be.
            for result in source.users:
                _save(result)
        node = source


def _save(node: Node) -> bool:
    if node.meta.get("recompute") not in _RECOMPUTED:
        return False
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return True
