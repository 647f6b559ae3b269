"""Who writes into whose memory, and who shares it: read from operator schemas.

A user's Triton kernel has no schema: it counts as writing every tensor that it is given.

The facts behind three questions: may an in-place operator become functional, is an operand written to while a block
reads it, and which edges of the dependency DAG are about memory.
"""

from __future__ import annotations

import torch
from torch.fx import Node

__all__ = ["alias_root", "aliases_argument", "has_effect", "mutated_arguments"]


def _schema(node: Node) -> torch._C.FunctionSchema | None:
    return getattr(node.target, "_schema", None) if node.op == "call_function" else None


def mutated_arguments(node: Node) -> list[Node]:
    """The argument nodes that this call writes into."""
    if node.op == "call_function" and getattr(node.target, "__name__", "") == "triton_kernel_wrapper_mutation":
        return list(node.all_input_nodes)
    schema = _schema(node)
    if schema is None or not schema.is_mutable:
        return []
    written: list[Node] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            values = value if isinstance(value, (list, tuple)) else [value]
            written.extend(item for item in values if isinstance(item, Node))
    return written


def has_effect(node: Node) -> bool:
    """Does a call do more than compute its result, so that it stays although nobody reads that?

    fx's own `is_impure` takes a user's Triton kernel for pure.
    """
    return node.is_impure() or bool(mutated_arguments(node))


def aliases_argument(node: Node) -> list[Node]:
    """The argument nodes whose memory this call's result may share (views, in-place results, getitem of views)."""
    if node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem":
        source = node.args[0]
        return aliases_argument(source) if isinstance(source, Node) else []
    schema = _schema(node)
    if schema is None or not any(result.alias_info is not None for result in schema.returns):
        return []
    shared: list[Node] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None:
            value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            if isinstance(value, Node):
                shared.append(value)
    return shared


def alias_root(node: Node) -> Node:
    """The node that made the memory which `node` shares."""
    while shared := aliases_argument(node):
        node = shared[0]
    return node
