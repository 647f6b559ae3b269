"""Quantised experts are left as they are: weights kept in few bits are neither matched nor dequantised.

A block whose weights are made from such a tensor in the graph (a conversion, times a scale) would match like any
other, and its operator would then read weights that the source never keeps. One whose matmuls are quantised themselves
matches nothing; its miss says why.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Node

from moe_compiler.moe_ir import Miss, op_name
from moe_compiler.passes.formulations.walk import is_op, strip_views

__all__ = ["check_not_quantised", "quantised_below"]

HINT = "quantised experts stay with Inductor; load the model in bfloat16, float16 or float32 to have it rewritten"
_FEW_BITS = ("float8", "float4", "int8", "uint8", "int4", "uint4", "int2", "uint2", "int1", "uint1", "qint", "quint")
_MATMULS = ("_scaled_mm", "_scaled_grouped_mm", "_weight_int8pack_mm", "_weight_int4pack_mm", "_int_mm")


def _is_few_bits(node: Node) -> bool:
    """A tensor of weights in few bits each, or of several in one int32 (GPTQ, AWQ)."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    name = str(value.dtype).removeprefix("torch.")
    return name.startswith(_FEW_BITS) or (value.dtype is torch.int32 and value.dim() >= 2)


def _is_weight_of_few_bits(node: Node) -> bool:
    """Such a tensor that the graph is given. One that it computes itself is a map of choices or a count."""
    return _is_few_bits(node) and strip_views(node).op != "call_function"


def check_not_quantised(weights: Iterable[Node]) -> None:
    """Raise Miss when one of these weights is made from a tensor of few bits."""
    pending, seen = list(weights), set[Node]()
    while pending and len(seen) < 4096:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if _is_few_bits(node):
            raise Miss(f"the experts are quantised: {node.name} is {str(node.meta['val'].dtype)[6:]}", node, HINT)
        pending.extend(node.all_input_nodes)


def quantised_below(chosen: Node) -> Node | None:
    """A quantised matmul, or a use of weights in few bits, among what depends on a choice of experts."""
    level, seen = [chosen], {chosen}
    while level and len(seen) < 512:
        for node in level:
            if is_op(node, *_MATMULS) or "mxfp" in op_name(node) or "nvfp" in op_name(node):
                return node
            found = next((n for n in node.all_input_nodes if n not in seen and _is_weight_of_few_bits(n)), None)
            if found is not None:
                return node
        level = [user for node in level for user in node.users if user not in seen]
        seen.update(level)
    return None
