"""One MoE block as plain PyTorch: router, experts in a chosen spelling, shared expert; x [T, H] -> y [T, H].

The spellings are those of transformers 5: `grouped_mm` sorts the pairs of token and expert and multiplies group by
group, `batched_mm` gathers one matrix for each pair. All of them share one set of parameters.
"""

from __future__ import annotations

import copy
import types

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_compiler.bench.routers import make_router
from moe_compiler.bench.shapes import Shape

__all__ = ["SPELLINGS", "Block", "make_block"]

SPELLINGS = ("grouped_mm", "batched_mm")
ALPHA, LIMIT = 1.702, 7.0  # of the clamped activation


class SharedExpert(nn.Module):
    """An expert that every token has: x [T, H] -> [T, H], times a sigmoid gate of its own where there is one."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.shared, bias=False, dtype=dtype)
        self.up_proj = nn.Linear(shape.hidden, shape.shared, bias=False, dtype=dtype)
        self.down_proj = nn.Linear(shape.shared, shape.hidden, bias=False, dtype=dtype)
        self.gate = nn.Linear(shape.hidden, 1, bias=False, dtype=dtype) if shape.shared_gate else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y if self.gate is None else torch.sigmoid(self.gate(x)) * y


class Block(nn.Module):
    """Parameters: router, gate_up [E, 2I, H] and down [E, H, I] (last two turned when `shape.transposed`), biases."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.spelling = shape, "grouped_mm"
        self.router = make_router(shape, dtype)

        def packed(out: int, inner: int) -> nn.Parameter:
            sizes = (inner, out) if shape.transposed else (out, inner)
            return nn.Parameter(torch.empty(shape.experts, *sizes, dtype=dtype))

        def bias(out: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(shape.experts, out, dtype=dtype)) if shape.biases else None

        self.gate_up, self.down = packed(2 * shape.intermediate, shape.hidden), packed(shape.hidden, shape.intermediate)
        self.gate_up_bias, self.down_bias = bias(2 * shape.intermediate), bias(shape.hidden)
        self.shared = SharedExpert(shape, dtype) if shape.shared else None

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x)
        y = self._grouped(x, weights, ids) if self.spelling == "grouped_mm" else self._batched(x, weights, ids)
        return y if self.shared is None else y + self.shared(x)

    def activate(self, both: Tensor) -> Tensor:
        """[N, 2I] -> [N, I]."""
        if self.shape.activation == "silu":
            gate, up = both.chunk(2, dim=-1)
            return F.silu(gate) * up
        gate, up = both[..., ::2], both[..., 1::2]
        gate, up = gate.clamp(max=LIMIT), up.clamp(min=-LIMIT, max=LIMIT)
        return (up + 1) * (gate * torch.sigmoid(gate * ALPHA))

    def twin(self, spelling: str) -> Block:
        """The same parameters in another spelling, compiled apart from this one.

        Its forward has a code object of its own, so that what one way compiles does not stand in the cache (and the
        guards) of another.
        """
        made = copy.copy(self)  # of the parameters only the dictionary's entry is shared, not copied
        forward = types.FunctionType(Block.forward.__code__.replace(), Block.forward.__globals__, "forward")
        made.__class__ = type("Block", (Block,), {"forward": forward})
        made.spelling = spelling
        return made

    def _grouped(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        k, experts = self.shape.k, self.shape.experts
        ids, perm = torch.sort(ids.reshape(-1))
        rows = x[perm // k]
        # As transformers counts: histc has an integer kernel on CUDA only.
        counts = torch.histc(ids.float() if x.device.type == "cpu" else ids.int(), experts, min=0, max=experts - 1)
        offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
        rows = self.activate(self._grouped_linear(rows, self.gate_up, self.gate_up_bias, ids, offsets))
        rows = self._grouped_linear(rows, self.down, self.down_bias, ids, offsets)
        rows = rows * weights.reshape(-1)[perm].unsqueeze(-1)
        inverse = torch.empty_like(perm)
        inverse[perm] = torch.arange(perm.numel(), device=perm.device)
        return rows[inverse].view(x.shape[0], k, x.shape[1]).sum(dim=1).to(x.dtype)

    def _grouped_linear(
        self, rows: Tensor, matrix: Tensor, bias: Tensor | None, ids: Tensor, offsets: Tensor
    ) -> Tensor:
        rows = F.grouped_mm(rows, matrix if self.shape.transposed else matrix.transpose(-2, -1), offs=offsets)
        return rows if bias is None else rows + bias[ids]

    def _batched(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        k, flat = self.shape.k, ids.reshape(-1)
        rows = x.repeat_interleave(k, dim=0)
        rows = self.activate(self._batched_linear(rows, self.gate_up, self.gate_up_bias, flat))
        rows = self._batched_linear(rows, self.down, self.down_bias, flat)
        rows = rows * weights.reshape(-1).unsqueeze(-1)
        return rows.view(x.shape[0], k, x.shape[1]).sum(dim=1).to(x.dtype)

    def _batched_linear(self, rows: Tensor, matrix: Tensor, bias: Tensor | None, ids: Tensor) -> Tensor:
        chosen = matrix[ids]
        if self.shape.transposed:
            rows = torch.bmm(rows.unsqueeze(1), chosen).squeeze(1)
        else:
            rows = torch.bmm(chosen, rows.unsqueeze(-1)).squeeze(-1)
        return rows if bias is None else rows + bias[ids]


def make_block(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> Block:
    """A block with normal parameters of standard deviation 0.02, in evaluation mode; the seed fixes all of them."""
    with torch.device(device):
        block = Block(shape, dtype)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for tensor in (*block.parameters(), *block.buffers()):
            tensor.normal_(std=0.02, generator=generator)
    return block.eval()
