"""Bytes, floating-point operations and work of a stage or kernel, as sympy expressions in T, k, E, H, I.

Roofline terms: every operand read once, every result written once; an expert's weights count once for each expert that
is expected to get a token under uniform routing, E * (1 - (1 - k/E)^T). The work is what the tiles of a kernel do: a
tile of rows that an expert fills in part takes the time of a whole one. Times are `device_model`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sympy
import torch

from moe_compiler.runtime_kernels.tiles import HOPPER_MULTIPROCESSORS, TABLES, specialised_fits

__all__ = ["StageCost", "T", "cost_text", "costs_known", "stage_cost"]

T, K, E, H, I, N, W = sympy.symbols("T k E H I N w", integer=True, positive=True)
_PAIRS = T * K
_HIT = E * (1 - (1 - K / E) ** T)


@dataclass(frozen=True)
class StageCost:
    """bytes moved, FLOPs and work of one stage; expressions in T once the block's sizes are substituted.

    work: FLOPs with the rows that pad tiles; for the kernels that compute none, the steps that their time grows with.
    grid: programs of the launch on a Hopper GPU; None for a kernel whose programs are not counted here.
    """

    bytes: sympy.Expr
    flops: sympy.Expr
    work: sympy.Expr
    grid: sympy.Expr | None


# Rows that each expert adds to fill its last tile, on average: half of the half tile that kernels end with.
_PADDED = _PAIRS + 32 * _HIT
# For the gradients of weights the rows are the depth of the product, in steps of 32.
_PADDED_DEPTH = _PAIRS + 16 * _HIT
_GATE_UP = (_HIT * N * H * W + T * H * W + _PAIRS * I * W, 2 * _PAIRS * N * H, 2 * _PADDED * N * H)
_DOWN = (_HIT * I * H * W + _PAIRS * (I + H) * W, 2 * _PAIRS * I * H, 2 * _PADDED * I * H)
_NONE = sympy.Integer(0)

# w is the size of an element in bytes, N the width of the first matmul (2 I when gated).
_COSTS: dict[str, tuple[sympy.Expr, sympy.Expr, sympy.Expr]] = {
    "router_logits": ((E * H + T * H + T * E) * W, 2 * T * E * H, 2 * T * E * H),
    "route": (T * E * W + _PAIRS * (W + 8), 5 * T * E, T * E),
    # One program compares all pairs with each other; two kernels count, and then place, by blocks of pairs.
    "order": (_PAIRS * 12 + 4 * E, _NONE, _PAIRS**2),
    "order_count": (_PAIRS * 8, _NONE, _PAIRS * E),
    "order_scatter": (_PAIRS * 12, _NONE, _PAIRS * E),
    "gate_up": _GATE_UP,
    "gate_up_few": (_HIT * N * H * W + T * H * W + _PAIRS * I * W, 2 * _PAIRS * N * H, 2 * _PAIRS * N * H),
    "down": _DOWN,
    "down_few": (_HIT * I * H * W + _PAIRS * I * W + T * H * W, 2 * _PAIRS * I * H, 2 * _PAIRS * I * H),
    "combine": (_PAIRS * H * W + T * H * W, 2 * _PAIRS * H, _NONE),
    "grad_act": (
        _HIT * I * H * W + T * H * W + _PAIRS * (2 * N + I) * W,
        2 * _PAIRS * I * H,
        2 * _PADDED * I * H,
    ),
    "grad_down": (E * I * H * W + T * H * W + _PAIRS * I * W, 2 * _PAIRS * I * H, 2 * _PADDED_DEPTH * I * H),
    "grad_gate_up": (E * N * H * W + T * H * W + _PAIRS * N * W, 2 * _PAIRS * N * H, 2 * _PADDED_DEPTH * N * H),
    "grad_down_bias": (E * H * W + T * H * W, _PAIRS * H, _NONE),
    "grad_gate_up_bias": (E * N * W + _PAIRS * N * W, _PAIRS * N, _NONE),
    "grad_pairs": (_HIT * N * H * W + _PAIRS * (N + H) * W, 2 * _PAIRS * N * H, 2 * _PADDED * N * H),
    "grad_input_weights": (_PAIRS * H * W + T * H * W, 2 * _PAIRS * H, _NONE),
}


def stage_cost(stage: str, sizes: Mapping[str, int]) -> StageCost:
    """The cost of a stage or kernel for a block of these sizes (k, E, H, I, N, w), in T. Raises KeyError."""
    return _stage_cost(stage, tuple(sorted(sizes.items())))


@lru_cache(maxsize=1024)
def _stage_cost(stage: str, items: tuple[tuple[str, int], ...]) -> StageCost:
    """`stage_cost`, once for all equal layers of a model."""
    sizes = dict(items)
    moved, flops, work = _COSTS[stage]
    values = {symbol: sizes[symbol.name] for symbol in (K, E, H, I, N, W) if symbol.name in sizes}
    grid = _grid(stage, sizes) if stage in TABLES else None
    return StageCost(bytes=moved.subs(values), flops=flops.subs(values), work=work.subs(values), grid=grid)


def cost_text(stage: str, sizes: Mapping[str, int]) -> dict[str, str]:
    """The `bytes`, `flops` and, where it is counted, `grid` of `stage_cost` as text, for records. Raises KeyError."""
    return dict(_cost_text(stage, tuple(sorted(sizes.items()))))


@lru_cache(maxsize=1024)
def _cost_text(stage: str, items: tuple[tuple[str, int], ...]) -> tuple[tuple[str, str], ...]:
    cost = _stage_cost(stage, items)
    known = (("bytes", cost.bytes), ("flops", cost.flops), ("grid", cost.grid))
    return tuple((name, str(expression)) for name, expression in known if expression is not None)


# What the columns of a kernel's tiles run over, and what its products sum over: for the gradients of weights both sides
# of a matrix.
_COLUMNS = {"gate_up": "I", "down": "H", "grad_act": "I", "grad_pairs": "H"}
_DEPTHS = {"gate_up": "H", "down": "I", "grad_act": "H", "grad_pairs": "N"}
_SIDES = {"grad_down": ("H", "I"), "grad_gate_up": ("H", "N")}


def _grid(kernel: str, sizes: Mapping[str, int]) -> sympy.Expr | None:
    """Programs of a tiled kernel: row tiles that suffice for any routing, times column tiles; by ranges of T."""
    needed = {"k", "E", "w", *_SIDES.get(kernel, (_COLUMNS.get(kernel, ""), _DEPTHS.get(kernel, "")))}
    if not needed <= sizes.keys():
        return None
    experts, pairs = sizes["E"], T * sizes["k"]
    dtype = torch.float32 if sizes["w"] == 4 else torch.bfloat16
    cases: list[tuple[sympy.Expr, Any]] = []
    for limit, tile in TABLES[kernel].ranges(dtype, 90):
        if tile.instead is not None and not specialised_fits(tile, sizes[_DEPTHS[kernel]], experts):
            tile = tile.instead
        if tile.instead is not None:
            programs = sympy.Integer(HOPPER_MULTIPROCESSORS)
        elif kernel in _SIDES:
            token_side, ordered_side = (sizes[name] for name in _SIDES[kernel])
            programs = sympy.Integer(experts * -(-token_side // tile.rows) * -(-ordered_side // tile.cols))
        else:
            suffice = sympy.floor((pairs + (experts + 1) * (tile.rows - 1)) / tile.rows)
            programs = sympy.Min(pairs, suffice) * -(-sizes[_COLUMNS[kernel]] // tile.cols)
        # ceil(pairs / experts) <= limit
        cases.append((programs, True if limit is None else pairs <= limit * experts))
    return sympy.Piecewise(*cases)


def costs_known(kernel: str) -> bool:
    """Whether there are expressions for a stage or kernel of this name."""
    return kernel in _COSTS
