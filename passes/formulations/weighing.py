"""What is done with the chosen scores on the way to the routing weights, read backwards from the weights.

    weights = chosen / sum(chosen) * scale * expert_scale[ids]      each of the three may be missing

Views that keep the rows and casts may be anywhere between. What is left at the end is the `source`: the chosen scores,
or what the score function makes of them. Whatever does not fit raises Miss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import sympy
import torch
from torch.fx import Node

from moe_compiler.moe_ir import Miss
from moe_compiler.passes.formulations.topk import STAYS, Selection, is_last
from moe_compiler.passes.formulations.walk import (
    arg,
    dtype_of,
    elements_of,
    folded,
    is_cast,
    is_op,
    is_written,
    number,
    require,
    row_source,
    same_shape,
    same_size,
    shape_of,
    strip,
    strip_views,
    strip_views_casts,
    widens,
)

__all__ = ["Weighing", "constant_factor", "weigh"]

_DIVIDE = "the operator divides by weights.sum(-1, keepdim=True) alone, plus or at least a constant"
_SCALE = "scale the weights after they are divided by their sum"


@dataclass
class Weighing:
    """What is done with the chosen scores on the way to the weights; `source` is what it is done with.

    renormalize: divided by their sum plus eps, or by max(sum, eps) if clamp; absolute: by the sum of absolute values,
    which is the same where no score is negative; divided: the node that divides; expert_scale: one number an expert.
    """

    source: Node
    renormalize: bool = False
    clamp: bool = False
    eps: float = 0.0
    absolute: bool = False
    divided: Node | None = None
    scale: float = 1.0
    expert_scale: Node | None = None


@dataclass(frozen=True)
class _Divisor:
    clamp: bool
    eps: float
    absolute: bool


_NORMS = ("linalg_vector_norm", "linalg_norm", "norm")


def _divisor(node: Node, of: Node, k: int) -> _Divisor | None:
    """`node` as the sum over each row of the k of `of`, plus eps or at least eps (clamp); None when it is not."""
    outermost, clamp, eps = node, False, 0.0
    while not is_op(node, "sum", *_NORMS):
        limit, added = _lower_limit(node), _added(node)
        if (added is not None or limit is not None) and eps == 0.0 and not clamp:
            clamp, eps = limit is not None, limit if limit is not None else added  # type: ignore[assignment]
        elif is_op(node, "expand", "expand_as", "broadcast_to") and outermost is node:
            outermost = node.args[0]  # type: ignore[assignment]
        elif strip_views_casts(node) is node:
            return None
        node = node.args[0]  # type: ignore[assignment]
    summed = _summed_rows(node)
    if summed is None:
        return None
    source, absolute = summed
    # Of another view of the same values (all of them in one row) the last dimension is another one.
    same = strip_views_casts(source) is strip_views_casts(of)
    if not same or not same_shape(folded(shape_of(source), 2), folded(shape_of(of), 2)):
        return None
    column = (*shape_of(of)[:-1], sympy.Integer(1))
    each = shape_of(of)[-1] == k and same_shape(shape_of(outermost), column)
    return _Divisor(clamp, eps, absolute) if each else None


def _summed_rows(node: Node) -> tuple[Node, bool] | None:
    """(source, of absolute values?) when `node` is the sum over the last dimension of source; None when it is not."""
    source, absolute = node.args[0], False
    if not isinstance(source, Node) or not any(argument.name == "dim" for argument in node.target._schema.arguments):  # type: ignore[union-attr]
        return None
    dims = arg(node, "dim")
    dims = [dims] if isinstance(dims, int) else dims
    if not dims or len(dims) != 1 or not is_last(dims[0], source):
        return None
    if not is_op(node, "sum"):
        order = _order(node)
        require(
            order == 1,
            f"the weights are divided by their norm of order {order}, something else than their own sum",
            node,
            _DIVIDE,
        )
        absolute = True
    elif is_op(source, "abs"):
        source, absolute = source.args[0], True
    return (source, absolute) if isinstance(source, Node) else None


def _order(node: Node) -> float | None:
    """The order of a vector norm, None when it is not a number."""
    name = next((a.name for a in node.target._schema.arguments if a.name in ("ord", "p")), None)  # type: ignore[union-attr]
    value = arg(node, name) if name is not None else None
    return number(2.0 if value is None else value)


def _added(node: Node) -> float | None:
    """The constant that a node adds to its first operand."""
    constant = number(node.args[1]) if is_op(node, "add") else None
    return None if constant is None else constant * float(arg(node, "alpha"))


def _lower_limit(node: Node) -> float | None:
    """The constant that `node` is clamped to from below, and from nowhere else."""
    if not is_op(node, "clamp", "clip", "clamp_min"):
        return None
    high = None if is_op(node, "clamp_min") else arg(node, "max")
    return number(arg(node, "min")) if high is None else None


def _constant(value: object) -> float | None:
    """A number, or a tensor without dimensions that was made of one (torch.tensor(2.5)), as its dtype holds it."""
    if not isinstance(value, Node) or not isinstance(value.meta.get("val"), torch.Tensor):
        return number(value)
    made = value
    while is_op(made, "lift_fresh_copy", "lift_fresh", "detach", "detach_", "clone", "alias"):
        made = made.args[0]  # type: ignore[assignment]
    held: object = None
    if made.op == "call_function" and made.target is torch.tensor:
        held = made.args[0]
    elif is_op(made, "scalar_tensor", "full"):
        held = arg(made, "s" if is_op(made, "scalar_tensor") else "fill_value")
    found = number(held)
    if found is None or shape_of(value) or not dtype_of(value).is_floating_point or is_written(made):
        return None
    return float(torch.tensor(found, dtype=dtype_of(value)))


def constant_factor(node: Node) -> tuple[Node, float] | None:
    """(operand, constant) of a product with one; of a division where it is the same product to the last bit."""
    if len(node.args) < 2 or not is_op(node, "mul", "div"):
        return None
    first, second = node.args[:2]
    if is_op(node, "mul"):
        for operand, other in ((first, second), (second, first)):
            constant = _constant(other)
            if constant is not None and isinstance(operand, Node) and dtype_of(operand) == dtype_of(node):
                return operand, constant
        return None
    constant = _constant(second)
    halves = constant is not None and constant != 0 and abs(math.frexp(constant)[0]) == 0.5
    if halves and node.kwargs.get("rounding_mode") is None and isinstance(first, Node):
        return first, 1.0 / constant  # type: ignore[operator]
    return None


def _of_each_expert(node: object, selection: Selection) -> Node | None:
    """The [E] numbers of which `node` holds those of the selected experts."""
    if not isinstance(node, Node):
        return None
    found = strip_views_casts(node)
    if not is_op(found, "index", "index_select", "embedding", "gather", "take"):
        return None
    source, index = found.args[0], found.args[1]
    if is_op(found, "index"):
        index = index[0] if isinstance(index, (list, tuple)) and len(index) == 1 else None  # type: ignore[assignment]
    elif is_op(found, "index_select", "gather"):
        index = found.args[2]
    numbers = isinstance(source, Node) and (len(shape_of(source)) == 1 or is_op(found, "embedding"))
    at_ids = isinstance(index, Node) and selection.is_at(index)
    if not numbers or not at_ids or not same_size(elements_of(shape_of(found)), elements_of(shape_of(selection.ids))):
        return None
    # The product promotes, so a cast that widens is not needed.
    return strip(source, lambda n: widens(n) or strip_views(n) is not n)  # type: ignore[arg-type]


def weigh(node: Node, selection: Selection) -> Weighing:
    """What is behind the routing weights, up to the scores of the chosen."""
    w = Weighing(node)
    while True:
        # One weight a token may lose its dimension, [T] of [T, 1]; else the rows of k must stay what they are.
        node = w.source = strip_views(w.source) if selection.k == 1 else row_source(w.source)
        scaled, own = constant_factor(node), _factors(node, selection)
        if is_cast(node):
            w.source = node.args[0]  # type: ignore[assignment]
        elif scaled is not None:
            require(not w.renormalize, "the weights are scaled before they are renormalised", node, _SCALE)
            w.source, factor = scaled
            w.scale *= factor
        elif own is not None:
            require(
                not w.renormalize, "the experts' own scale is applied before the weights are renormalised", node, _SCALE
            )
            require(w.expert_scale is None, "the weights have two scales for each expert", node, STAYS)
            w.source, w.expert_scale = own
        elif is_op(node, "div") and isinstance(node.args[1], Node) and node.kwargs.get("rounding_mode") is None:
            require(not w.renormalize, "the weights are divided twice", node, STAYS)
            found = _divisor(node.args[1], node.args[0], selection.k)  # type: ignore[arg-type]
            if found is None:
                raise Miss("the weights are divided by something else than their own sum", node, _DIVIDE)
            w.renormalize, w.clamp, w.eps, w.absolute = True, found.clamp, found.eps, found.absolute
            w.source, w.divided = node.args[0], node  # type: ignore[assignment]
        else:
            return w


def _factors(node: Node, selection: Selection) -> tuple[Node, Node] | None:
    """(weights, the [E] numbers) of a product of weights with one number of the chosen expert."""
    if not is_op(node, "mul"):
        return None
    for weights, other in (node.args[:2], node.args[1::-1]):
        numbers = _of_each_expert(other, selection)
        if numbers is not None and isinstance(weights, Node) and same_shape(shape_of(weights), shape_of(node)):
            return weights, numbers
    return None
