"""Launch of the gathering of rows by expert."""

from __future__ import annotations

from typing import Any

from moe_compiler.runtime_kernels.gather.kernel import gather_kernel
from moe_compiler.runtime_kernels.launching import check_dtype, power_of_two, row_major, start

_ELEMENTS = 4096


def gather(outs: dict[str, Any], ins: dict[str, Any], attrs: dict[str, Any], *, pdl: bool) -> None:
    """rows [S,H] in sorted row order from x [T,H], weights [T,k] or None, perm."""
    rows, x, weights = outs["rows"], row_major(ins["x"]), ins["weights"]
    check_dtype(rows.dtype, "rows")
    pairs, hidden = rows.shape
    columns = min(power_of_two(hidden, 16), 2048)
    height = _ELEMENTS // columns
    constants = {"X_ROW": x.stride(0), "K": attrs["k"], "H": hidden, "BR": height, "BH": columns}
    operands = (x, None if weights is None else weights.contiguous(), ins["perm"], rows)
    programs = -(-pairs // height) * -(-hidden // columns)
    start(gather_kernel, programs, operands, (pairs,), constants, pdl=pdl, warps=4, stages=1)
