"""Bytes, floating-point operations and work of a stage or kernel, as sympy expressions in T, k, E, H, I.

Roofline terms: every operand read once, every result written once; an expert's weights count once for each expert that
is expected to get a token under uniform routing, E * (1 - (1 - k/E)^T). The work is what the tiles of a kernel do: a
tile of rows that an expert fills in part takes the time of a whole one. Times are `device_model`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sympy
import torch

from moe_compiler.runtime_kernels.tiles import (
    COLUMNS,
    DEPTHS,
    HOPPER_MULTIPROCESSORS,
    SIDES,
    TABLES,
    Tile,
    fitted,
    specialised_fits,
)

__all__ = ["StageCost", "T", "cost_text", "costs_known", "load_cost", "stage_cost"]

T, K, E, H, I, N, W = sympy.symbols("T k E H I N w", integer=True, positive=True)
# Pairs of a token and an expert, and experts that get one.
_PAIRS, _HIT = sympy.symbols("S hit", positive=True)
_UNIFORM = {_PAIRS: T * K, _HIT: E * (1 - (1 - K / E) ** T)}
# (largest T, tile, None for the kernel's own) of a launch: see `chain/program.py`.
Tiles = tuple[tuple[int | None, Tile | None], ...]


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


def stage_cost(stage: str, sizes: Mapping[str, int], tiles: Tiles = ()) -> StageCost:
    """The cost of a stage or kernel for a block of these sizes (k, E, H, I, N, w), in T. Raises KeyError.

    tiles: those of a launch, by largest T, where they are not the kernel's own; only the grid depends on them.
    """
    return _stage_cost(stage, tuple(sorted(sizes.items())), tiles)


@lru_cache(maxsize=256)
def load_cost(stage: str, sizes: tuple[tuple[str, int], ...]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Bytes and work of a stage or kernel as functions of (T, pairs, experts hit, E); numbers or tensors of them.

    For rows that some ranks got, where the pairs are not T * k and the experts hit are known. sizes: (name, value) of
    H, I, N, w, sorted. Raises KeyError.
    """
    moved, _, work = _COSTS[stage]
    values = {symbol: dict(sizes)[symbol.name] for symbol in (H, I, N, W)}
    given = (T, _PAIRS, _HIT, E)
    bytes_of, work_of = (sympy.lambdify(given, expression.subs(values), modules="math") for expression in (moved, work))
    return bytes_of, work_of


@lru_cache(maxsize=1024)
def _stage_cost(stage: str, items: tuple[tuple[str, int], ...], tiles: Tiles) -> StageCost:
    """`stage_cost`, once for all equal layers of a model."""
    sizes = dict(items)
    moved, flops, work = (expression.subs(_UNIFORM) for expression in _COSTS[stage])
    values = {symbol: sizes[symbol.name] for symbol in (K, E, H, I, N, W) if symbol.name in sizes}
    grid = _grid(stage, sizes, tiles) if stage in TABLES else None
    return StageCost(bytes=moved.subs(values), flops=flops.subs(values), work=work.subs(values), grid=grid)


def cost_text(stage: str, sizes: Mapping[str, int], tiles: Tiles = ()) -> dict[str, str]:
    """The `bytes`, `flops` and, where it is counted, `grid` of `stage_cost` as text, for records. Raises KeyError."""
    return dict(_cost_text(stage, tuple(sorted(sizes.items())), tiles))


@lru_cache(maxsize=1024)
def _cost_text(stage: str, items: tuple[tuple[str, int], ...], tiles: Tiles) -> tuple[tuple[str, str], ...]:
    cost = _stage_cost(stage, items, tiles)
    known = (("bytes", cost.bytes), ("flops", cost.flops), ("grid", cost.grid))
    return tuple((name, str(expression)) for name, expression in known if expression is not None)


def _grid(kernel: str, sizes: Mapping[str, int], tiles: Tiles) -> sympy.Expr | None:
    """Programs of a tiled kernel: row tiles that suffice for any routing, times column tiles; by ranges of T."""
    sides = SIDES.get(kernel) or (DEPTHS[kernel], COLUMNS[kernel])
    if kernel == "router_logits" or not {"k", "E", "w", *sides} <= sizes.keys():
        return None
    experts, pairs = sizes["E"], T * sizes["k"]
    dtype = torch.float32 if sizes["w"] == 4 else torch.bfloat16
    both = (sizes[sides[0]], sizes[sides[1]])

    def programs(tile: Tile) -> sympy.Expr:
        if tile.instead is not None:
            if specialised_fits(tile, both[0], experts):
                return sympy.Integer(HOPPER_MULTIPROCESSORS)
            tile = tile.instead
        if kernel in SIDES:
            return sympy.Integer(experts * -(-both[0] // tile.rows) * -(-both[1] // tile.cols))
        suffice = sympy.floor((pairs + (experts + 1) * (tile.rows - 1)) / tile.rows)
        return sympy.Min(pairs, suffice) * -(-both[1] // tile.cols)

    # ceil(pairs / experts) <= limit
    cases: list[tuple[sympy.Expr, Any]] = [
        (programs(fitted(kernel, tile, both)), True if limit is None else pairs <= limit * experts)
        for limit, tile in TABLES[kernel].ranges(dtype, 90)
    ]
    usual = sympy.Piecewise(*cases)
    if not tiles:
        return usual
    tuned = [
        (usual if tile is None else programs(tile), True if limit is None else limit >= T) for limit, tile in tiles
    ]
    return sympy.Piecewise(*tuned)


def costs_known(kernel: str) -> bool:
    """Whether there are expressions for a stage or kernel of this name."""
    return kernel in _COSTS
