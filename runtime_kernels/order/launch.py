"""Launches of the ordering of pairs by expert: one kernel for few pairs, two for many."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.launching import power_of_two, scratch, start
from moe_compiler.runtime_kernels.order.kernel import order_count_kernel, order_kernel, order_scatter_kernel
from moe_compiler.runtime_kernels.order.reference import ORDER_BLOCK, ORDER_FEW, order_blocks


def _layout(ids: Tensor) -> dict[str, int]:
    return {"ID_T": ids.stride(0), "ID_K": ids.stride(1), "K": ids.shape[1]}


def order(outs: dict[str, Any], ins: dict[str, Any], attrs: dict[str, Any], *, pdl: bool) -> None:
    """perm int32 [S], starts int32 [E+1] from ids [T,k].

    Meant for up to ORDER_FEW pairs, in one kernel whose work grows as S squared; with more it starts the two kernels.
    """
    ids, experts = ins["ids"], attrs["num_experts"]
    pairs = ids.numel()
    if pairs > ORDER_FEW:
        counts = scratch((order_blocks(pairs), experts), torch.int32, ids.device)
        order_count({"counts": counts}, ins, attrs, pdl=pdl)
        order_scatter(outs, {**ins, "counts": counts}, attrs, pdl=pdl)
        return
    # One wave of programs: as many as stay on the device together.
    queries = 8 if pairs <= 1024 else 16
    width = min(8192 // queries, power_of_two(pairs, 16))
    constants = {**_layout(ids), "E": experts, "BQ": queries, "BS": width}
    programs = -(-(pairs + experts + 1) // queries)
    start(order_kernel, programs, (ids, outs["perm"], outs["starts"]), (pairs,), constants, pdl=pdl, stages=1)


def order_count(outs: dict[str, Any], ins: dict[str, Any], attrs: dict[str, Any], *, pdl: bool) -> None:
    """counts int32 [ceil(S / ORDER_BLOCK), E] from ids [T,k]."""
    ids, counts, experts = ins["ids"], outs["counts"], attrs["num_experts"]
    width = min(32, power_of_two(experts))
    constants = {**_layout(ids), "E": experts, "BLOCK": ORDER_BLOCK, "BE": width, "BS": 256}
    programs = counts.shape[0] * -(-experts // width)
    start(order_count_kernel, programs, (ids, counts), (ids.numel(),), constants, pdl=pdl, stages=1)


def order_scatter(outs: dict[str, Any], ins: dict[str, Any], attrs: dict[str, Any], *, pdl: bool) -> None:
    """perm int32 [S], starts int32 [E+1] from ids [T,k] and counts [B,E]."""
    ids, counts, experts = ins["ids"], ins["counts"], attrs["num_experts"]
    padded = power_of_two(experts, 16)
    constants = {
        **_layout(ids),
        "E": experts,
        "E_POW2": padded,
        "BLOCK": ORDER_BLOCK,
        "BB": max(1, min(64, 8192 // padded)),
    }
    # Without any pair one program still writes the starts.
    programs = max(1, counts.shape[0])
    operands = (ids, counts, outs["perm"], outs["starts"])
    numbers = (ids.numel(), counts.shape[0])
    start(order_scatter_kernel, programs, operands, numbers, constants, pdl=pdl, warps=8, stages=1)
