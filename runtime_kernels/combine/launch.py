"""Launch of the weighted sum over a token's experts."""

from __future__ import annotations

from typing import Any

from moe_compiler.runtime_kernels.combine.kernel import combine_kernel
from moe_compiler.runtime_kernels.launching import check_dtype, power_of_two, start
from moe_compiler.runtime_kernels.tiles import Tile


def combine(
    outs: dict[str, Any], ins: dict[str, Any], attrs: dict[str, Any], *, pdl: bool, tile: Tile | None = None
) -> None:
    """y [T,H] from pairs [S,H] and weights [T,k] (None: a plain sum).

    Of the tile, cols and warps count: the columns of a program and its warps.
    """
    pairs, weights, y = ins["pairs"], ins["weights"], outs["y"]
    check_dtype(pairs.dtype, "pairs")
    tokens, hidden = y.shape
    if tile is None:
        # Whole rows where there are tokens enough for the device, else narrower programs.
        columns = min(power_of_two(hidden), 2048 if tokens >= 512 else 512 if tokens >= 32 else 256)
        tile = Tile(1, columns, 1, warps=max(1, min(8, columns // 512)) if columns >= 1024 else 2)
    constants = {"K": attrs["k"], "H": hidden, "BH": tile.cols}
    operands = (pairs, None if weights is None else weights.contiguous(), y)
    programs = tokens * -(-hidden // tile.cols)
    start(combine_kernel, programs, operands, (), constants, pdl=pdl, warps=tile.warps, stages=1)
