"""The middle of an expert: which activation joins the gate and up halves, and where the halves come from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from moe_compiler.aliasing import mutated_arguments
from moe_compiler.moe_ir import Miss, op_name
from moe_compiler.passes.formulations.walk import (
    arg,
    is_op,
    require,
    same_shape,
    shape_of,
    strip_views_casts,
    without_units,
)

__all__ = ["Activation", "Half", "match_activation"]


@dataclass(frozen=True)
class Half:
    """One operand of the activation: a whole matmul (`part` None) or half `part` (0 or 1) of a packed one."""

    source: Node
    part: int | None


@dataclass(frozen=True)
class Activation:
    """act(gate) * up when `up` is given, else act(gate). `inner`: the nodes between the matmuls and the result."""

    name: str
    gate: Half
    up: Half | None


def _half(node: Node) -> Half:
    """Resolve chunk, split and slice along the last dimension to (source, which half)."""
    node = strip_views_casts(node)
    if node.op == "call_function" and op_name(node) == "getitem":
        parts, index = node.args
        if is_op(parts, "chunk", "split", "split_with_sizes", "tensor_split"):
            value = parts.meta["val"]
            last = parts.args[0].meta["val"].dim() - 1
            require(
                arg(parts, "dim") in (last, -1), "gate and up are split along another dimension than the last", node
            )
            require(len(value) == 2, f"split into {len(value)} parts, not gate and up", node)
            sizes = [piece.shape[-1] for piece in value]
            require(sizes[0] == sizes[1], "gate and up have different widths", node)
            return Half(_whole(parts.args[0], node), int(index))
    if is_op(node, "slice"):
        source = node.args[0]
        require(isinstance(source, Node), "slice of a constant", node)
        assert isinstance(source, Node)
        value = source.meta["val"]
        width = value.shape[-1]
        require(arg(node, "dim") % value.dim() == value.dim() - 1, "gate and up are sliced off another dimension", node)
        require(
            arg(node, "step") == 1,
            "gate and up are interleaved",
            node,
            "interleaved halves are not supported yet; store them as [gate; up]",
        )
        start, end = arg(node, "start") or 0, arg(node, "end")
        full = end is None or (isinstance(end, int) and isinstance(width, int) and end >= width)
        if start == 0 and not full and isinstance(end, int) and 2 * end == width:
            return Half(_whole(source, node), 0)
        if full and isinstance(start, int) and 2 * start == width:
            return Half(_whole(source, node), 1)
        raise Miss("a slice that is not one half", node)
    return Half(node, None)


def _whole(node: Node, half: Node) -> Node:
    """The matmul whose result `node` is, with the same last dimension: else half of it is not gate or up."""
    source = strip_views_casts(node)
    wide, own = without_units(shape_of(source)), without_units(shape_of(node))
    require(bool(wide) and bool(own) and wide[-1] == own[-1], "the halves are split off a reshaped matmul", half)
    return source


def _function(node: Node) -> tuple[str, Node] | None:
    """The activation function applied by `node` and its input, in any of its usual spellings."""
    node = strip_views_casts(node)
    if is_op(node, "silu"):
        return "silu", node.args[0]
    if is_op(node, "gelu"):
        return ("gelu_tanh" if arg(node, "approximate") == "tanh" else "gelu"), node.args[0]
    if is_op(node, "relu"):
        return "relu", node.args[0]
    if is_op(node, "square") or (is_op(node, "pow") and node.args[1] == 2):
        inner = node.args[0]
        if isinstance(inner, Node) and is_op(strip_views_casts(inner), "relu"):
            return "relu2", strip_views_casts(inner).args[0]
    if is_op(node, "mul"):
        left, right = (strip_views_casts(a) if isinstance(a, Node) else None for a in node.args[:2])
        for value, other in ((left, right), (right, left)):
            if value is None or other is None:
                continue
            if is_op(other, "sigmoid") and _same_value(value, strip_views_casts(other.args[0])):
                return "silu", value
            if is_op(value, "relu") and is_op(other, "relu") and value.args[0] is other.args[0]:
                return "relu2", value.args[0]
    return None


def _same_value(a: Node, b: Node) -> bool:
    if a is b:
        return True
    return op_name(a) == op_name(b) == "getitem" and a.args == b.args


def match_activation(node: Node) -> Activation:
    """Resolve the left operand of a down projection to its activation; raises Miss when there is none."""
    node = strip_views_casts(node)
    plain = _function(node)
    if plain is not None:
        name, source = plain
        half = _half(source)
        require(half.part is None, "the activation reads only one half and the other is unused", node)
        return Activation(name, half, None)
    require(is_op(node, "mul"), f"{op_name(node)} is not an activation of the gate, times up", node)
    operands = [operand for operand in node.args[:2] if isinstance(operand, Node)]
    require(len(operands) == 2, "the activation is scaled by a constant", node)
    for operand in operands:
        inner = strip_views_casts(operand)
        require(
            not mutated_arguments(inner),
            f"{op_name(inner)} works in place: it writes into the result of the matmul that its input is part of",
            inner,
            "write the activation without inplace=True",
        )
    found = [_function(operand) for operand in operands]
    require(
        (found[0] is None) != (found[1] is None),
        "not one activated operand times one plain one",
        node,
        "supported: silu, gelu, gelu(tanh), relu, relu squared; gate * up",
    )
    which = 0 if found[0] is not None else 1
    name, source = found[which]  # type: ignore[misc]
    gate, up = _half(source), _half(operands[1 - which])
    require((gate.part is None) == (up.part is None), "gate and up come from different layouts", node)
    if gate.part is not None:
        require(gate.source is up.source, "gate and up are halves of different matmuls", node)
        require((gate.part, up.part) == (0, 1), "up comes before gate", node, "store the weights as [gate; up]")
    else:
        require(gate.source is not up.source, "gate and up are the same matmul", node)
    require(same_shape(shape_of(operands[0]), shape_of(operands[1])), "gate and up are broadcast", node)
    return Activation(name, gate, up)


def is_float(dtype: torch.dtype) -> bool:
    """The dtypes that experts compute in."""
    return dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
