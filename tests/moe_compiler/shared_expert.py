"""Layers with a shared expert beside transformers' own Qwen3-MoE block: what a chain can run beside."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Layer", "model"]

# hidden, intermediate, experts, k, width of the shared expert.
SMALL = (32, 16, 8, 2, 24)


class Layer(nn.Module):
    """x + block + shared expert; gated: the shared expert has a gate of its own, as in Qwen3-Next."""

    def __init__(self, sizes: tuple[int, int, int, int, int], gated: bool, dtype: torch.dtype) -> None:
        super().__init__()
        pytest.importorskip("transformers", reason="this test compiles transformers' own block")
        from transformers.models.qwen3_moe import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

        hidden, intermediate, experts, k, width = sizes
        config = Qwen3MoeConfig(
            hidden_size=hidden,
            moe_intermediate_size=intermediate,
            num_experts=experts,
            num_experts_per_tok=k,
            norm_topk_prob=True,
        )
        config._experts_implementation = "grouped_mm"
        self.block = Qwen3MoeSparseMoeBlock(config)
        self.gate, self.up = (nn.Linear(hidden, width, bias=False) for _ in range(2))
        self.down = nn.Linear(width, hidden, bias=False)
        self.own = nn.Linear(hidden, 1, bias=False) if gated else None
        self.to(dtype)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2 * (32 / hidden) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x [1,T,H] -> [1,T,H]."""
        y = self.block(x)
        y = y[0] if isinstance(y, tuple) else y
        shared = self.down(F.silu(self.gate(x)) * self.up(x))
        return x + (y + (shared if self.own is None else torch.sigmoid(self.own(x)) * shared))


def model(
    layers: int = 2,
    gated: bool = True,
    dtype: torch.dtype = torch.float32,
    sizes: tuple[int, int, int, int, int] = SMALL,
) -> nn.Module:
    """Some layers, each behind a layer norm that keeps the values in bounds."""
    torch.manual_seed(0)
    norms = (nn.LayerNorm(sizes[0], dtype=dtype) for _ in range(layers))
    return nn.Sequential(*(nn.Sequential(norm, Layer(sizes, gated, dtype)) for norm in norms))
