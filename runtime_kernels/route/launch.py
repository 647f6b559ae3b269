"""Launches of the router's choice and its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_compiler.runtime_kernels.launching import power_of_two, start, triton_dtype
from moe_compiler.runtime_kernels.route.kernel import route_backward_kernel, route_kernel
from moe_compiler.runtime_kernels.route.reference import check_groups, check_operand, check_route


def _tokens_a_program(tokens: int, experts_pow2: int) -> tuple[int, int]:
    """(tokens, warps) of a program: one warp for a token, more tokens where there are enough to fill the device."""
    if tokens <= 512:
        return 1, max(1, experts_pow2 // 512)
    return 4, 4


def _score_constants(attrs: dict[str, Any], k: int, block: int) -> dict[str, Any]:
    """What both kernels take of the attributes, in their order."""
    check_route(attrs["score"], attrs["order"])
    return {
        "K": k,
        "K_POW2": power_of_two(k),
        "BT": block,
        "SCORE": attrs["score"],
        "BEFORE": attrs["order"] == "before",
        "RENORMALIZE": bool(attrs["renormalize"]),
        "CLAMP": bool(attrs["clamp"]),
        "EPS": float(attrs["eps"]),
        "SCALE": float(attrs["scale"]),
        "SCORE_DTYPE": triton_dtype(attrs["score_dtype"], "score_dtype"),
    }


def _stride(operand: Tensor | None, what: str) -> int:
    """The stride of an optional operand [E]."""
    if operand is None:
        return 0
    triton_dtype(operand.dtype, what)
    return operand.stride(0)


def route(outs: dict[str, Any], ins: dict[str, Any], attrs: dict[str, Any], *, pdl: bool) -> None:
    """weights [T,k], ids int64 [T,k] from logits [T,E], bias [E] or None, expert_scale [E] or None, of any strides."""
    logits, bias, expert_scale = ins["logits"], ins["bias"], ins["expert_scale"]
    triton_dtype(logits.dtype, "logits")
    tokens, experts = logits.shape
    k, groups = attrs["k"], attrs["groups"]
    if not 1 <= k <= experts:
        raise ValueError(f"k = {k} experts a token of {experts}")
    check_groups(experts, groups, attrs["kept_groups"], attrs["group_top"], attrs["fill"])
    check_operand(bias, experts, "bias")
    check_operand(expert_scale, experts, "expert_scale")
    size = experts // groups
    slots = power_of_two(groups) * power_of_two(size)
    block, warps = _tokens_a_program(tokens, slots)
    chosen_by = attrs["score_dtype"] if attrs["order"] == "before" else logits.dtype
    if bias is not None:
        chosen_by = torch.promote_types(chosen_by, bias.dtype)
    constants = {
        "ROW": logits.stride(0),
        "COLUMN": logits.stride(1),
        "BIAS": _stride(bias, "bias"),
        "FACTOR": _stride(expert_scale, "expert_scale"),
        "SIZE": size,
        "SIZE_POW2": power_of_two(size),
        "GROUPS": groups,
        "GROUPS_POW2": power_of_two(groups),
        "KEPT": attrs["kept_groups"],
        "TOP": attrs["group_top"],
        "LOWEST_FILL": attrs["fill"] == "-inf",
        **_score_constants(attrs, k, block),
        "CHOICE_DTYPE": triton_dtype(chosen_by, "the choice"),
        "PLAIN": bias is None and groups == 1,
    }
    programs = -(-tokens // block)
    operands = (logits, bias, expert_scale, outs["weights"], outs["ids"])
    start(route_kernel, programs, operands, (tokens,), constants, pdl=pdl, warps=warps, stages=1)


def route_backward(outs: dict[str, Any], ins: dict[str, Any], attrs: dict[str, Any], *, pdl: bool) -> None:
    """grad_logits [T,E] from grad_weights [T,k], logits [T,E], ids [T,k], each of any strides.

    grad_expert_scale [E] when there is an expert_scale: a sum of each program, then the sum of these.
    """
    logits, ids, grad, expert_scale = (ins[name] for name in ("logits", "ids", "grad_weights", "expert_scale"))
    triton_dtype(logits.dtype, "logits")
    tokens, experts = logits.shape
    k = ids.shape[1]
    if not 1 <= k <= experts:
        raise ValueError(f"k = {k} experts a token of {experts}")
    check_operand(expert_scale, experts, "expert_scale")
    padded = power_of_two(experts)
    block, warps = _tokens_a_program(tokens, padded)
    programs = -(-tokens // block)
    constants = {
        "GRAD_ROW": grad.stride(0),
        "GRAD_COLUMN": grad.stride(1),
        "ROW": logits.stride(0),
        "COLUMN": logits.stride(1),
        "ID_T": ids.stride(0),
        "ID_K": ids.stride(1),
        "FACTOR": _stride(expert_scale, "expert_scale"),
        "E": experts,
        "E_POW2": padded,
        **_score_constants(attrs, k, block),
    }
    partial = None
    if expert_scale is not None:
        partial = torch.empty(programs, experts, dtype=torch.float32, device=logits.device)
    operands = (grad, logits, ids, expert_scale, outs["grad_logits"], partial)
    start(route_backward_kernel, programs, operands, (tokens,), constants, pdl=pdl, warps=warps, stages=1)
    if partial is not None and "grad_expert_scale" in outs:
        outs["grad_expert_scale"].copy_(partial.sum(0))
