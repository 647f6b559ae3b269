"""Launch of the gradient of routing weights that scale the experts' input."""

from __future__ import annotations

from typing import Any

from moe_compiler.runtime_kernels.grad_input_weights.kernel import grad_input_weights_kernel
from moe_compiler.runtime_kernels.launching import check_dtype, power_of_two, row_major, start


def grad_input_weights(outs: dict[str, Any], ins: dict[str, Any], attrs: dict[str, Any], *, pdl: bool) -> None:
    """grad_weights [T,k] fp32 from x [T,H] and pairs [S,H], the gradient of each pair's scaled input row."""
    x, pairs = row_major(ins["x"]), ins["pairs"]
    check_dtype(x.dtype, "x")
    count, hidden = pairs.shape
    constants = {"X_ROW": x.stride(0), "K": attrs["k"], "H": hidden, "BH": min(1024, power_of_two(hidden))}
    start(grad_input_weights_kernel, count, (x, pairs, outs["grad_weights"]), (), constants, pdl=pdl, stages=1)
