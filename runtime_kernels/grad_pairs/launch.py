"""Launch of the gradient of each pair's input row, with the device code of the down projection."""

from __future__ import annotations

from typing import Any

import torch

from moe_compiler.runtime_kernels.down.launch import scatter_product
from moe_compiler.runtime_kernels.gate_up.launch import split_up
from moe_compiler.runtime_kernels.launching import Tile, capability


def choose_tile(dtype: torch.dtype, mean_rows: int, device: torch.device) -> Tile:
    """The tile for `mean_rows` rows an expert, found by benchmarks/kernels_h200.py."""
    if dtype is torch.float32:
        return Tile(16, 32, 32, stages=2) if mean_rows <= 16 else Tile(32, 32, 32, stages=2)
    if mean_rows <= 12:
        return Tile(16, 128, 128, stages=3, tma=True)
    if mean_rows <= 24:
        return Tile(32, 128, 128, stages=3, tma=True)
    if mean_rows <= 48:
        return Tile(64, 128, 64, stages=3, tma=True)
    if capability(device) < 90:
        return Tile(128, 128, 64, warps=8, stages=3, group=8)
    return Tile(128, 256, 64, warps=8, stages=4, group=8, tma=True, halves=True)


def grad_pairs(
    outs: dict[str, Any], ins: dict[str, Any], attrs: dict[str, Any], *, pdl: bool, tile: Tile | None = None
) -> None:
    """pairs [S,H] in pair order from grad_preact [S,N] in sorted row order; rows of no expert are zero."""
    pairs, starts = outs["pairs"], ins["starts"]
    gate, up, shift = split_up(ins["gate"], ins["up"], attrs["gated"])
    parts = [(ins["gate"], gate)]
    if attrs["gated"] and not shift:
        parts.append((ins["up"], up))
    tile = tile or choose_tile(pairs.dtype, -(-pairs.shape[0] // (starts.shape[0] - 1)), pairs.device)
    scatter_product(pairs, ins["grad_preact"], ins["perm"], starts, parts, False, tile, pdl)
