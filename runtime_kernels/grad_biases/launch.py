"""Launches of the gradients of the expert biases, written with the strides or addresses of the given tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from moe_compiler.runtime_kernels.grad_biases.kernel import grad_bias_kernel
from moe_compiler.runtime_kernels.launching import power_of_two, row_major, start, triton_dtype, vector


def _grad(
    grads: Sequence[Tensor],
    what: str,
    rows: Tensor,
    weights: Tensor | None,
    perm: Tensor | None,
    starts: Tensor,
    first: int,
    k: int,
    pdl: bool,
) -> None:
    rows = row_major(rows)
    written = vector(grads, what, written=True)
    size = grads[0].shape[-1] if grads[0].dim() < 3 else grads[0].shape[1:].numel()
    columns = min(64, power_of_two(size, 16))
    constants = {
        "ROW": rows.stride(0),
        "FROM": first,
        "K": k,
        "SIZE": size,
        "GRAD_E": written.stride,
        "GRAD_N": written.step,
        "TABLE": written.table,
        "DTYPE": triton_dtype(grads[0].dtype, what),
        "BN": columns,
        "BK": 32,
    }
    programs = (starts.shape[0] - 1) * -(-size // columns)
    operands = (rows, None if weights is None else weights.contiguous(), perm, starts, written.operand)
    start(grad_bias_kernel, programs, operands, (), constants, pdl=pdl, warps=4, stages=2)


def grad_down_bias(outs: dict[str, Any], ins: dict[str, Any], attrs: dict[str, Any], *, pdl: bool) -> None:
    """grad_down_bias like down_bias from grad_y [T,H] of any float dtype, times weights [T,k] where given."""
    operands = (ins["grad_y"], ins["weights"], ins["perm"], ins["starts"])
    _grad(outs["grad_down_bias"], "grad_down_bias", *operands, 0, attrs["k"], pdl)


def grad_gate_up_bias(outs: dict[str, Any], ins: dict[str, Any], attrs: dict[str, Any], *, pdl: bool) -> None:
    """grad_gate_bias like gate_bias and grad_up_bias like up_bias, where given, from grad_preact [S,N]."""
    rows, starts = ins["grad_preact"], ins["starts"]
    for name, last in (("grad_gate_bias", False), ("grad_up_bias", True)):
        grads = outs.get(name)
        if grads:
            # Of gate and up in turns the columns of grad_preact are in turns as well, and there is no up_bias.
            first = rows.shape[1] - grads[0].shape[-1] if last else 0
            _grad(grads, name, rows, None, None, starts, first, 1, pdl)
