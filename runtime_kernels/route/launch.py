"""Launches of the router's choice and its gradient."""

from __future__ import annotations

from typing import Any

from moe_compiler.runtime_kernels.launching import power_of_two, start, triton_dtype
from moe_compiler.runtime_kernels.route.kernel import route_backward_kernel, route_kernel
from moe_compiler.runtime_kernels.route.reference import check_route


def _tokens_a_program(tokens: int, experts_pow2: int) -> tuple[int, int]:
    """(tokens, warps) of a program: one warp for a token, more tokens where there are enough to fill the device."""
    if tokens <= 512:
        return 1, max(1, experts_pow2 // 512)
    return 4, 4


def _constants(attrs: dict[str, Any], experts: int, k: int, tokens: int) -> tuple[dict[str, Any], int]:
    check_route(attrs["score"], attrs["order"])
    if not 1 <= k <= experts:
        raise ValueError(f"k = {k} experts a token of {experts}")
    padded = power_of_two(experts)
    block, warps = _tokens_a_program(tokens, padded)
    constants = {
        "E": experts,
        "E_POW2": padded,
        "K": k,
        "K_POW2": power_of_two(k),
        "BT": block,
        "SCORE": attrs["score"],
        "BEFORE": attrs["order"] == "before",
        "RENORMALIZE": bool(attrs["renormalize"]),
        "EPS": float(attrs["eps"]),
        "SCALE": float(attrs["scale"]),
        "SCORE_DTYPE": triton_dtype(attrs["score_dtype"], "score_dtype"),
    }
    return constants, warps


def route(outs: dict[str, Any], ins: dict[str, Any], attrs: dict[str, Any], *, pdl: bool) -> None:
    """weights [T,k], ids int64 [T,k] from logits [T,E] of any strides."""
    logits = ins["logits"]
    triton_dtype(logits.dtype, "logits")
    tokens, experts = logits.shape
    constants, warps = _constants(attrs, experts, attrs["k"], tokens)
    constants = dict(ROW=logits.stride(0), COLUMN=logits.stride(1), **constants)
    programs = -(-tokens // constants["BT"])
    operands = (logits, outs["weights"], outs["ids"])
    start(route_kernel, programs, operands, (tokens,), constants, pdl=pdl, warps=warps, stages=1)


def route_backward(outs: dict[str, Any], ins: dict[str, Any], attrs: dict[str, Any], *, pdl: bool) -> None:
    """grad_logits [T,E] from grad_weights [T,k], logits [T,E], ids [T,k], each of any strides."""
    logits, ids, grad = ins["logits"], ins["ids"], ins["grad_weights"]
    triton_dtype(logits.dtype, "logits")
    tokens, experts = logits.shape
    constants, warps = _constants(attrs, experts, ids.shape[1], tokens)
    constants = dict(
        GRAD_ROW=grad.stride(0),
        GRAD_COLUMN=grad.stride(1),
        ROW=logits.stride(0),
        COLUMN=logits.stride(1),
        ID_T=ids.stride(0),
        ID_K=ids.stride(1),
        **constants,
    )
    programs = -(-tokens // constants["BT"])
    operands = (grad, logits, ids, outs["grad_logits"])
    start(route_backward_kernel, programs, operands, (tokens,), constants, pdl=pdl, warps=warps, stages=1)
