"""Launch of the gradient of each pair's input row, with the device code of the down projection."""

from __future__ import annotations

from typing import Any

from moe_compiler.runtime_kernels.down.launch import scatter_product
from moe_compiler.runtime_kernels.gate_up.launch import split_up
from moe_compiler.runtime_kernels.launching import tile_for
from moe_compiler.runtime_kernels.tiles import Tile


def grad_pairs(
    outs: dict[str, Any], ins: dict[str, Any], attrs: dict[str, Any], *, pdl: bool, tile: Tile | None = None
) -> None:
    """pairs [S,H] in pair order from grad_preact [S,N] in sorted row order; rows of no expert are zero.

    The columns of grad_preact are in the order of the rows of the weights (see `grad_act`).
    """
    pairs, starts = outs["pairs"], ins["starts"]
    gate, up, shift = split_up(ins["gate"], ins["up"], attrs["gated"])
    parts = [gate] if shift or not attrs["gated"] else [gate, up]
    depth = ins["grad_preact"].shape[1] // len(parts)
    tile = tile or tile_for("grad_pairs", pairs, starts, (depth, pairs.shape[1]))
    scatter_product(pairs, ins["grad_preact"], ins["perm"], starts, parts, False, tile, pdl)
