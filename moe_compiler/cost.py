"""Bytes and floating-point operations of a stage, as sympy expressions in T, k, E, H, I.

Roofline terms only: every operand read once, every result written once; an expert's weights count once for each
expert that is expected to get a token under uniform routing, E * (1 - (1 - k/E)^T). Times are not predicted here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy

__all__ = ["StageCost", "stage_cost"]

T, K, E, H, I, N, W = sympy.symbols("T k E H I N w", integer=True, positive=True)
_PAIRS = T * K
_HIT = E * (1 - (1 - K / E) ** T)


@dataclass(frozen=True)
class StageCost:
    """bytes moved and FLOPs of one stage; expressions in T once the block's sizes are substituted."""

    bytes: sympy.Expr
    flops: sympy.Expr


# w is the size of an element in bytes, N the width of the first matmul (2 I when gated).
_COSTS: dict[str, tuple[sympy.Expr, sympy.Expr]] = {
    "route": (T * E * W + _PAIRS * (W + 8), 5 * T * E),
    "order": (_PAIRS * 12 + 4 * E, sympy.Integer(0)),
    "gate_up": (_HIT * N * H * W + T * H * W + _PAIRS * I * W, 2 * _PAIRS * N * H),
    "down": (_HIT * I * H * W + _PAIRS * (I + H) * W, 2 * _PAIRS * I * H),
    "combine": (_PAIRS * H * W + T * H * W, 2 * _PAIRS * H),
    "grad_act": (_HIT * I * H * W + T * H * W + _PAIRS * (2 * N + I) * W, 2 * _PAIRS * I * H),
    "grad_down": (E * I * H * W + T * H * W + _PAIRS * I * W, 2 * _PAIRS * I * H),
    "grad_gate_up": (E * N * H * W + T * H * W + _PAIRS * N * W, 2 * _PAIRS * N * H),
    "grad_down_bias": (E * H * W + T * H * W, _PAIRS * H),
    "grad_gate_up_bias": (E * N * W + _PAIRS * N * W, _PAIRS * N),
    "grad_pairs": (_HIT * N * H * W + _PAIRS * (N + H) * W, 2 * _PAIRS * N * H),
    "grad_input_weights": (_PAIRS * H * W + T * H * W, 2 * _PAIRS * H),
}


def stage_cost(stage: str, sizes: Mapping[str, int]) -> StageCost:
    """The cost of a stage for a block of these sizes (k, E, H, I, N, w); T stays symbolic. Raises KeyError."""
    moved, flops = _COSTS[stage]
    values = {symbol: sizes[symbol.name] for symbol in (K, E, H, I, N, W) if symbol.name in sizes}
    return StageCost(bytes=moved.subs(values), flops=flops.subs(values))
