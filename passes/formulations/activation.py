"""The middle of an expert: which activation joins the gate and up halves, and where the halves come from.

act(gate) * up, or act(gate)           silu, gelu, gelu(tanh), relu, relu squared, gate * sigmoid(alpha * gate)
gate clamped from above and up to both sides by one limit; a number added to up          (gpt-oss, DeepSeek-V4)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from moe_compiler.aliasing import mutated_arguments
from moe_compiler.moe_ir import Miss, op_name
from moe_compiler.passes.formulations.walk import (
    arg,
    is_op,
    number,
    require,
    same_shape,
    same_value,
    shape_of,
    strip_views_casts,
    without_units,
)
from moe_compiler.runtime_kernels.activations import ActivationRule

__all__ = ["Activation", "Half", "match_activation"]


@dataclass(frozen=True)
class Half:
    """One operand of the activation: a whole matmul (`part` None) or half `part` (0 or 1) of a packed one.

    interleaved: the half is every other column, from column `part` on.
    """

    source: Node
    part: int | None
    interleaved: bool = False


@dataclass(frozen=True)
class Activation:
    """act(gate) * up when `up` is given, else act(gate).

    name: the text of the ActivationRule. packing: how a packed matmul holds its halves (`moe_ir.PACKINGS`).
    weight: the routing weight that the result is multiplied with before the down projection, None for none.
    """

    name: str
    gate: Half
    up: Half | None
    packing: str = "gate_up"
    weight: Node | None = None


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
            return Half(_whole(parts.args[0], node), int(index) % 2)
    if is_op(node, "slice"):
        source = node.args[0]
        require(isinstance(source, Node), "slice of a constant", node)
        assert isinstance(source, Node)
        value = source.meta["val"]
        width = value.shape[-1]
        require(arg(node, "dim") % value.dim() == value.dim() - 1, "gate and up are sliced off another dimension", node)
        start, end, step = arg(node, "start") or 0, arg(node, "end"), arg(node, "step")
        full = end is None or (isinstance(end, int) and isinstance(width, int) and end >= width)
        if step == 2 and start in (0, 1) and full and width % 2 == 0:
            return Half(_whole(source, node), int(start), interleaved=True)
        require(step == 1, f"every {step}th column of a matmul is neither gate nor up", node)
        if start == 0 and not full and isinstance(end, int) and 2 * end == width:
            return Half(_whole(source, node), 0)
        if full and isinstance(start, int) and 2 * start == width:
            return Half(_whole(source, node), 1)
        raise Miss("a slice that is not one half", node)
    return _turn(node) or Half(node, None)


def _turn(node: Node) -> Half | None:
    """[.., I, 2] read at 0 or 1 of its last dimension: halves that take turns in a packed matmul."""
    if is_op(node, "select"):
        pairs, dim, index = node.args[:3]
    elif op_name(node) == "getitem" and is_op(node.args[0], "unbind"):
        pairs, dim, index = node.args[0].args[0], arg(node.args[0], "dim"), node.args[1]  # type: ignore[union-attr]
    else:
        return None
    shape = shape_of(pairs) if isinstance(pairs, Node) else ()
    if len(shape) < 3 or shape[-1] != 2 or dim % len(shape) != len(shape) - 1:  # type: ignore[operator]
        return None
    source = strip_views_casts(pairs)  # type: ignore[arg-type]
    if shape_of(source)[-1] != 2 * shape[-2]:
        return None
    return Half(source, int(index) % 2, interleaved=True)  # type: ignore[call-overload]


def _whole(node: Node, half: Node) -> Node:
    """The matmul whose result `node` is, with the same last dimension: else half of it is not gate or up."""
    source = strip_views_casts(node)
    wide, own = without_units(shape_of(source)), without_units(shape_of(node))
    require(bool(wide) and bool(own) and wide[-1] == own[-1], "the halves are split off a reshaped matmul", half)
    return source


def _function(node: Node) -> tuple[str, float, Node] | None:
    """(name, alpha, input) of the activation function that `node` applies, in any of its usual spellings."""
    node = strip_views_casts(node)
    if is_op(node, "silu"):
        return "silu", 1.0, node.args[0]
    if is_op(node, "gelu"):
        return ("gelu_tanh" if arg(node, "approximate") == "tanh" else "gelu"), 1.0, node.args[0]
    if is_op(node, "relu"):
        return "relu", 1.0, node.args[0]
    if is_op(node, "square") or (is_op(node, "pow") and node.args[1] == 2):
        inner = node.args[0]
        if isinstance(inner, Node) and is_op(strip_views_casts(inner), "relu"):
            return "relu2", 1.0, strip_views_casts(inner).args[0]
    if is_op(node, "mul"):
        left, right = (strip_views_casts(a) if isinstance(a, Node) else None for a in node.args[:2])
        for value, other in ((left, right), (right, left)):
            if value is None or other is None:
                continue
            if is_op(other, "sigmoid"):
                inner, factor = _scaled(strip_views_casts(other.args[0]))
                alpha = number(factor) if same_value(value, inner) else None
                if alpha is not None:
                    return "silu", alpha, value
            if is_op(value, "relu") and is_op(other, "relu") and value.args[0] is other.args[0]:
                return "relu2", 1.0, value.args[0]
    return None


def _is_tensor(value: object) -> bool:
    return isinstance(value, Node) and isinstance(value.meta.get("val"), torch.Tensor)


def _scaled(node: Node) -> tuple[Node, object]:
    """(x, alpha) of alpha * x with a number alpha; alpha is 1 where nothing is scaled."""
    if is_op(node, "mul"):
        for value, factor in (node.args[:2], node.args[1::-1]):
            if _is_tensor(value) and not _is_tensor(factor):
                return strip_views_casts(value), factor  # type: ignore[arg-type]
    return node, 1.0


def _limits(node: Node) -> tuple[Node, float | None, float | None]:
    """(x, lowest, highest) of a clamp of x between numbers; None where it has no bound."""
    node = strip_views_casts(node)
    bounds: dict[str, float | None] = {"min": None, "max": None}
    if is_op(node, "clamp", "clip", "clamp_min", "clamp_max", "hardtanh"):
        names = {"min": "min_val", "max": "max_val"} if is_op(node, "hardtanh") else {"min": "min", "max": "max"}
        given = {argument.name for argument in node.target._schema.arguments}  # type: ignore[union-attr]
        for end, name in names.items():
            value = arg(node, name) if name in given else None
            bound = None if value is None else number(value)
            require(value is None or bound is not None, "gate or up is clamped by a tensor", node)
            bounds[end] = None if bound is None or abs(bound) == float("inf") else bound
        node = strip_views_casts(node.args[0])  # type: ignore[arg-type]
    return node, bounds["min"], bounds["max"]


def _gate(node: Node) -> tuple[Half, float | None]:
    """(half, limit) of the gate: clamped from above, or not at all."""
    source, low, high = _limits(node)
    require(low is None, f"the gate is clamped from below, by {low}", node)
    require(high is None or high > 0, f"the gate is clamped to {high}", node)
    return _half(source), high


def _up(node: Node) -> tuple[Half, float | None, float]:
    """(half, limit, shift) of up: clamped to both sides of zero or not at all, then a number added."""
    node, shift = strip_views_casts(node), 0.0
    if is_op(node, "add"):
        value, added = node.args[:2]
        if _is_tensor(value) and not _is_tensor(added):
            shift = number(added) or 0.0
            require(number(added) is not None and arg(node, "alpha") == 1, "a number minus or times up", node)
            node = value  # type: ignore[assignment]
    source, low, high = _limits(node)
    require(
        (low is None) == (high is None) and (high is None or low == -high),
        f"up is clamped to {low}..{high}, not to both sides of zero alike",
        node,
    )
    return _half(source), high, shift


def _clamped(limit: float | None) -> str:
    return "not clamped" if limit is None else f"clamped to {limit}"


def _peeled(node: Node) -> tuple[Node, Node | None]:
    """(value, column) of a value times one number a row; (node, None) when it is no such product."""
    if is_op(node, "mul") and all(isinstance(operand, Node) for operand in node.args[:2]):
        full = shape_of(node)
        for value, column in (node.args[:2], node.args[1::-1]):
            own = shape_of(column)  # type: ignore[arg-type]
            if full[-1:] != (1,) and same_shape(own[:-1], full[:-1]) and own[-1:] == (1,):
                return strip_views_casts(value), column  # type: ignore[arg-type, return-value]
    return node, None


def match_activation(node: Node, *, weighted: bool = False) -> Activation:
    """Resolve the left operand of a down projection to its activation; raises Miss when there is none.

    weighted: the caller knows what to do with an activation that is multiplied by the routing weight.
    """
    node, weight = strip_views_casts(node), None
    if weighted:
        node, weight = _peeled(node)
    plain = _function(node)
    if plain is not None:
        name, alpha, source = plain
        half, limit = _gate(source)
        require(half.part is None, "the activation reads only one half and the other is unused", node)
        return Activation(ActivationRule(name, alpha, limit).text, half, None, weight=weight)
    operands, more = _product(node)
    for operand in operands:
        inner = strip_views_casts(operand)
        require(
            not mutated_arguments(inner),
            f"{op_name(inner)} works in place: it writes into the result of the matmul that its input is part of",
            inner,
            "write the activation without inplace=True",
        )
    found = [_function(operand) for operand in operands]
    cap = _soft_cap(operands) if found == [None, None] else None
    capped = "" if cap is None else ", but a soft cap (tanh) on the way"
    require(
        (found[0] is None) != (found[1] is None),
        f"not one activated operand times one plain one{capped}",
        node if cap is None else cap,
        "supported: silu, gelu, gelu(tanh), relu, relu squared, gate * sigmoid(alpha * gate); gate * up",
    )
    which = 0 if found[0] is not None else 1
    require(not more or which == 0, "the gate is added to its product with up", node)
    name, alpha, source = found[which]  # type: ignore[misc]
    gate, limit = _gate(source)
    up, up_limit, shift = _up(operands[1 - which])
    require(
        limit == up_limit,
        f"the gate is {_clamped(limit)} and up is {_clamped(up_limit)}",
        node,
        "clamp the gate from above and up to both sides by one number, or neither",
    )
    require(same_shape(shape_of(operands[0]), shape_of(operands[1])), "gate and up are broadcast", node)
    rule = ActivationRule(name, alpha, limit, shift + more)
    return Activation(rule.text, gate, up, _packing(gate, up, node), weight)


def _soft_cap(operands: list[Node], depth: int = 4) -> Node | None:
    """A tanh few operators behind the operands (Inkling 2 caps gate and up by it)."""
    level = operands
    for _ in range(depth):
        level = [strip_views_casts(node) for node in level]
        found = next((node for node in level if is_op(node, "tanh")), None)
        if found is not None:
            return found
        level = [source for node in level if is_op(node, "mul", "div") for source in node.all_input_nodes]
    return None


def _product(node: Node) -> tuple[list[Node], float]:
    """The operands of a * b, and what is added to the second: 1 when the product is written as a + a * b."""
    if is_op(node, "addcmul"):
        base, first, second = node.args[:3]
        whole = arg(node, "value") == 1 and isinstance(second, Node) and same_value(base, first)
        require(whole, "addcmul does not give a + a * b", node)
        return [first, second], 1.0  # type: ignore[list-item]
    require(is_op(node, "mul"), f"{op_name(node)} is not an activation of the gate, times up", node)
    operands = [operand for operand in node.args[:2] if isinstance(operand, Node)]
    require(len(operands) == 2, "the activation is scaled by a constant", node)
    return operands, 0.0


def _packing(gate: Half, up: Half, node: Node) -> str:
    """How one matmul holds both halves; "gate_up" too where each has a matmul of its own."""
    alike = (gate.part is None) == (up.part is None) and gate.interleaved == up.interleaved
    require(alike, "gate and up come from different layouts", node)
    if gate.part is None:
        require(gate.source is not up.source, "gate and up are the same matmul", node)
        return "gate_up"
    require(gate.source is up.source, "gate and up are halves of different matmuls", node)
    require(gate.part != up.part, "gate and up are the same half of the matmul", node)
    order = "gate_up" if gate.part == 0 else "up_gate"
    return order if not gate.interleaved else {"gate_up": "interleaved", "up_gate": "interleaved_up_gate"}[order]


def is_float(dtype: torch.dtype) -> bool:
    """The dtypes that experts compute in."""
    return dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
