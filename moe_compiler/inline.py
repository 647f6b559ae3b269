"""Write an operator out: replace a node by the operators that its plain-torch reference computes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Node

from moe_compiler import torch_private
from moe_compiler.graph_pass import fake_mode_of_graph

__all__ = ["named_arguments", "write_out"]


def named_arguments(node: Node) -> dict[str, Any]:
    """A call's arguments by their schema names; defaults that were not given are left out."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def write_out(node: Node, reference: Callable[..., Any], tensors: Sequence[str]) -> None:
    """Replace `node` by what `reference` computes, in the ATen subset that Inductor lowers after autograd.

    tensors: the arguments that are tensors, or None when they are optional; the others are constants.
    """
    named = named_arguments(node)
    tensors = [name for name in tensors if named[name] is not None]
    attributes = {name: value for name, value in named.items() if name not in tensors}
    operands = [named[name] for name in tensors]
    traced = torch_private.make_fx_decomposed(
        lambda *values: reference(**dict(zip(tensors, values, strict=True)), **attributes),
        fake_mode_of_graph(node.graph),
        [operand.meta["val"] for operand in operands],
    )
    environment: dict[Node, Any] = dict(zip(traced.graph.find_nodes(op="placeholder"), operands, strict=True))
    result: Any = None
    with node.graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op == "output":
                result = inner.args[0]
            elif inner.op != "placeholder":
                copied = node.graph.node_copy(inner, lambda n: environment[n])
                if "stack_trace" in node.meta:
                    copied.meta["stack_trace"] = node.meta["stack_trace"]
                environment[inner] = copied
    if isinstance(result, Node):
        node.replace_all_uses_with(environment[result])
    else:
        for item in list(node.users):
            assert item.target is operator.getitem
            item.replace_all_uses_with(environment[result[item.args[1]]])
            node.graph.erase_node(item)
    node.graph.erase_node(node)
