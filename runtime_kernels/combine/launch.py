"""Launch of the weighted sum over a token's experts."""

from __future__ import annotations

from typing import Any

from moe_compiler.runtime_kernels.combine.kernel import combine_kernel
from moe_compiler.runtime_kernels.launching import check_dtype, power_of_two, start


def combine(
    outs: dict[str, Any], ins: dict[str, Any], attrs: dict[str, Any], *, pdl: bool, columns: int | None = None
) -> None:
    """y [T,H] from pairs [S,H] and weights [T,k] (None: a plain sum); `columns` of a program, for tuning."""
    pairs, weights, y = ins["pairs"], ins["weights"], outs["y"]
    check_dtype(pairs.dtype, "pairs")
    tokens, hidden = y.shape
    # Whole rows where there are tokens enough for the device, else narrower programs.
    columns = columns or min(power_of_two(hidden), 2048 if tokens >= 512 else 512 if tokens >= 32 else 256)
    constants = {"K": attrs["k"], "H": hidden, "BH": columns}
    operands = (pairs, None if weights is None else weights.contiguous(), y)
    warps = max(1, min(8, columns // 512)) if columns >= 1024 else 2
    start(combine_kernel, tokens * -(-hidden // columns), operands, (), constants, pdl=pdl, warps=warps, stages=1)
