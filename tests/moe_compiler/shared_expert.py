"""Layers with a shared expert beside transformers' own Qwen3-MoE block, small: what a chain can run beside."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.moe_compiler.blocks import qwen3_block

__all__ = ["Layer", "model"]


class Layer(nn.Module):
    """x + block + shared expert; gated: the shared expert has a gate of its own, as in Qwen3-Next."""

    def __init__(self, seed: int, gated: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.block = qwen3_block(dtype, seed=seed)
        self.gate, self.up = (nn.Linear(32, 24, bias=False, dtype=dtype) for _ in range(2))
        self.down = nn.Linear(24, 32, bias=False, dtype=dtype)
        self.own = nn.Linear(32, 1, bias=False, dtype=dtype) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        """x [1,T,32] -> [1,T,32]."""
        y = self.block(x)
        y = y[0] if isinstance(y, tuple) else y
        shared = self.down(F.silu(self.gate(x)) * self.up(x))
        return x + (y + (shared if self.own is None else torch.sigmoid(self.own(x)) * shared))


def model(layers: int = 2, gated: bool = True, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Some layers, their norm kept in bounds by a layer norm in between."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.LayerNorm(32, dtype=dtype), Layer(i, gated, dtype)) for i in range(layers)))
