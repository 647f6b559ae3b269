"""Peers for `moepdl bench block --peers examples/peers_torch.py`: an example of such a file, and two plain ways.

Each `peer_NAME(block)` returns a function of x [T, H] that gives the block's output, or None where it offers nothing.
What `block` holds is told in `moe_compiler/bench/peers.py`. The first line of a peer's docstring stands in the results.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_compiler.bench.peers import PeerBlock


def peer_loop(block: PeerBlock) -> Callable[[Tensor], Tensor]:
    """A loop over the experts that were hit, router inside; it waits for the device, so it cannot be a CUDA graph."""

    def forward(x: Tensor) -> Tensor:
        weights, ids = block.router(x)
        y = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, weights.dtype), device=x.device)
        for expert in ids.unique().tolist():
            token, place = torch.where(ids == expert)
            rows = block.module.activate(_linear(block, "gate_up", expert, x[token]))
            y = y.index_add(0, token, _linear(block, "down", expert, rows) * weights[token, place, None])
        return _with_shared(block, x, y)

    return forward


def peer_all_experts(block: PeerBlock) -> Callable[[Tensor], Tensor] | None:
    """All experts on all tokens in batched matmuls, the router left outside."""
    if block.tokens > 64:  # E / k times the work
        return None
    gate_up, down = (w if block.shape.transposed else w.mT for w in (block.gate_up, block.down))

    def scores(x: Tensor) -> Tensor:
        """[T, E], zero where an expert was not chosen."""
        weights, ids = block.routing(x)
        return torch.zeros(x.shape[0], block.shape.experts, dtype=weights.dtype, device=x.device).scatter(
            1, ids, weights
        )

    def forward(x: Tensor) -> Tensor:
        # With backward the scores lead to the routing weights, so they are no constant that could be prepared.
        by_expert = scores(x) if block.direction == "forward_backward" else block.prepared(x, scores)
        rows = torch.matmul(x, gate_up)
        rows = rows if block.gate_up_bias is None else rows + block.gate_up_bias[:, None]
        rows = torch.matmul(block.module.activate(rows), down)
        rows = rows if block.down_bias is None else rows + block.down_bias[:, None]
        return _with_shared(block, x, torch.einsum("eth,te->th", rows.to(by_expert.dtype), by_expert))

    return forward


def _linear(block: PeerBlock, name: str, expert: int, rows: Tensor) -> Tensor:
    weight, bias = getattr(block, name)[expert], getattr(block, f"{name}_bias")
    return F.linear(rows, weight.t() if block.shape.transposed else weight, None if bias is None else bias[expert])


def _with_shared(block: PeerBlock, x: Tensor, y: Tensor) -> Tensor:
    y = y.to(x.dtype)
    return y if block.shared is None else y + block.shared(x)
