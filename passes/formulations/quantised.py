"""Quantised experts: weights kept as fp8, int8 or packed small numbers, and made floating where they are used.

They are refused: raising such a block would dequantise all experts at every call, or move the dequantisation to
another place than where the source rounds.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Node

from moe_compiler.moe_ir import Miss, op_name
from moe_compiler.passes.formulations.walk import is_op

__all__ = ["check_not_quantised", "quantised_reader"]

_HINT = "quantised experts are left as they are, with Inductor and the kernels that the model calls"
_TABLE_ENTRIES = 256


def _tensor(node: object) -> torch.Tensor | None:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _is_small(value: torch.Tensor | None) -> bool:
    """A matrix (or a stack of them) of numbers that no expert computes in: fp8, fp4, integers of any width."""
    if value is None or value.dim() < 2 or value.dtype in (torch.bool,) or value.dtype.is_complex:
        return False
    return not value.dtype.is_floating_point or value.dtype.itemsize == 1


def _dequantised(node: Node) -> Node | None:
    """The small matrix that this operator makes floating: by a cast, by arithmetic, or by a table that it indexes."""
    made = _tensor(node)
    if made is None or _is_small(made):
        return None
    if is_op(node, "index", "index_select", "embedding", "take", "gather"):
        table = _tensor(node.args[0])
        index = node.args[1]
        if is_op(node, "index"):
            index = index[0] if len(index) == 1 else None
        elif is_op(node, "index_select", "gather"):
            index = node.args[2]
        by_table = table is not None and table.dim() == 1 and table.shape[0] <= _TABLE_ENTRIES
        return index if by_table and _is_small(_tensor(index)) else None
    if op_name(node).startswith(("zeros", "empty", "full", "ones", "new_", "where", "masked_fill", "scatter")):
        return None
    return next((source for source in node.all_input_nodes if _is_small(_tensor(source))), None)


def check_not_quantised(weights: Iterable[Node], depth: int = 24) -> None:
    """Raise Miss when one of the nodes is computed from a small matrix within `depth` operators."""
    seen: set[Node] = set()
    for weight in weights:
        level = [weight]
        for _ in range(depth):
            level = [node for node in level if node not in seen and node.op == "call_function"]
            if not level:
                break
            seen.update(level)
            for node in level:
                small = _dequantised(node)
                if small is not None:
                    dtype = str(small.meta["val"].dtype).removeprefix("torch.")
                    raise Miss(f"the expert weights are quantised: {op_name(node)} reads them as {dtype}", node, _HINT)
            level = [source for node in level for source in node.all_input_nodes]


def quantised_reader(selected: Node, limit: int = 256) -> Miss | None:
    """A Miss for the first operator behind a selection that reads small matrices as numbers, None when there is none.

    For blocks that no formulation anchors at: their matmuls are quantised ones, or their weights are dequantised
    between the gather and the product.
    """
    pending, seen = [selected], {selected}
    while pending and len(seen) < limit:
        node = pending.pop(0)
        for user in node.users:
            if user in seen:
                continue
            seen.add(user)
            pending.append(user)
            for source in user.all_input_nodes:
                value = _tensor(source)
                stored = value is not None and value.dtype.itemsize == 1 and _is_small(value)
                if stored and (_dequantised(user) is not None or is_op(user, "index", "index_select")):
                    assert value is not None
                    dtype = str(value.dtype).removeprefix("torch.")
                    reason = f"the ids select expert weights that are quantised: {op_name(user)} reads {dtype}"
                    return Miss(reason, user, _HINT)
    return None
