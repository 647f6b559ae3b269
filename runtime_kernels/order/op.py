"""The operator moepdl::order: (token, expert) pairs by expert. One kernel for few pairs, two for many."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.library import define
from moe_compiler.runtime_kernels.order import reference
from moe_compiler.runtime_kernels.order.reference import ORDER_FEW, order_blocks
from moe_compiler.runtime_kernels.stage import launch


def _allocate(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    pairs = ids.shape[0] * ids.shape[1]
    return ids.new_empty((pairs,), dtype=torch.int32), ids.new_empty((num_experts + 1,), dtype=torch.int32)


def _cuda(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    results = _allocate(ids, num_experts)
    attrs = {"num_experts": num_experts}
    pairs = results[0].shape[0]
    if pairs <= ORDER_FEW:
        launch("order", results, {"ids": ids}, attrs)
        return results
    counts = ids.new_empty((order_blocks(pairs), num_experts), dtype=torch.int32)
    launch("order_count", (counts,), {"ids": ids}, attrs)
    launch("order_scatter", results, {"ids": ids, "counts": counts}, attrs)
    return results


define(
    "order(Tensor ids, int num_experts) -> (Tensor perm, Tensor starts)",
    fake=_allocate,
    cpu=reference.order,
    cuda=_cuda,
)
