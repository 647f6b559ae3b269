"""Launch of the router's matmul: over tiles of tokens, or token by token when there are few."""

from __future__ import annotations

from typing import Any

from moe_compiler.runtime_kernels.launching import (
    capability,
    check_dtype,
    power_of_two,
    precision,
    reaches_far,
    row_major,
    start,
)
from moe_compiler.runtime_kernels.router_logits.kernel import router_logits_few_kernel, router_logits_kernel
from moe_compiler.runtime_kernels.tiles import Tile, choose_tile

# Up to here each token reads the router's weights by itself: they come from cache, and no tile is mostly empty.
_FEW = 4


def router_logits(
    outs: dict[str, Any], ins: dict[str, Any], attrs: dict[str, Any], *, pdl: bool, tile: Tile | None = None
) -> None:
    """logits [T,E] from x [T,H], router [H,E] of any strides, router_bias [E] or None."""
    logits, x, router, bias = outs["logits"], row_major(ins["x"]), ins["router"], ins["router_bias"]
    check_dtype(x.dtype, "x")
    tokens, experts = logits.shape
    hidden = x.shape[1]
    constants = {
        "X_ROW": x.stride(0),
        "ROUTER_H": router.stride(0),
        "ROUTER_E": router.stride(1),
        "BIAS": 0 if bias is None else bias.stride(0),
        "WIDE": reaches_far(router.shape, router.stride()),
        "H": hidden,
        "E": experts,
    }
    operands = (x, router, bias, logits)
    if tokens <= _FEW and tile is None:
        depth = min(1024, power_of_two(hidden))
        columns = max(1, 2048 // depth)
        constants |= {"BN": columns, "BK": depth}
        programs = tokens * -(-experts // columns)
        start(router_logits_few_kernel, programs, operands, (), constants, pdl=pdl, warps=2, stages=1)
        return
    tile = tile or choose_tile("router_logits", x.dtype, tokens, capability(x.device), (hidden, experts))
    constants |= {"PRECISION": precision(x.dtype), "BM": tile.rows, "BN": tile.cols, "BK": tile.depth}
    programs = -(-tokens // tile.rows) * -(-experts // tile.cols)
    start(router_logits_kernel, programs, operands, (tokens,), constants, pdl=pdl, warps=tile.warps, stages=tile.stages)
