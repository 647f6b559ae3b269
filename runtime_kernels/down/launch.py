"""Launches of the second expert matmul: `down` over sorted rows, `down_few` per token with the sum over its experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from moe_compiler.runtime_kernels.down.kernel import down_few_kernel, scatter_product_kernel
from moe_compiler.runtime_kernels.down.specialised import scatter_product_specialised_kernel
from moe_compiler.runtime_kernels.launching import (
    NO_BIAS,
    Matrix,
    Vector,
    box,
    laid_out,
    matrix,
    multiprocessors,
    power_of_two,
    precision,
    rows_box,
    specialised,
    start,
    tile_for,
    vector,
)
from moe_compiler.runtime_kernels.tiles import Tile, columns_tile, slots


def scatter_product(
    pairs: Tensor,
    left: Tensor,
    perm: Tensor,
    starts: Tensor,
    parts: Sequence[Matrix],
    inner: bool,
    tile: Tile,
    pdl: bool,
    bias: Vector = NO_BIAS,
) -> None:
    """pairs[perm[r]] = sum over the parts of left[r, part] @ matrix_e, in which left's columns run over `in` or `out`.

    Plus bias_e, where there is one.

    pairs [S,N], left [S, parts * K]; the matrices are [N, K] when `inner` (columns of left run over in), else [K, N].
    """
    rows, columns = pairs.shape
    experts = starts.shape[0] - 1
    depth = left.shape[1] // len(parts)
    boxes: list[Any] = []
    box_rows = 0
    stored_rows_run_over_k = False
    if tile.tma and depth % tile.depth == 0:
        for what in parts:
            transposed = what.inner != 1
            stored_rows_run_over_k = inner == transposed
            box_rows = depth if stored_rows_run_over_k else columns
            block = (tile.depth, tile.cols) if stored_rows_run_over_k else (tile.cols, tile.depth)
            boxes.append(box(what, box_rows, transposed, block))
        if None in boxes:
            boxes, box_rows = [], 0
    if tile.instead is not None:
        if boxes and specialised(left, depth, tile, experts, [bias]):
            sizes = {
                "E": experts,
                "E_POW2": power_of_two(experts + 1, 32),
                "K": depth,
                "N": columns,
                "PARTS": len(parts),
                "INNER": not stored_rows_run_over_k,
                "BOX": box_rows,
                "BIAS_E": bias.stride,
                "BIAS_N": bias.step,
                "BN": tile.cols,
                "BK": tile.depth,
                "GROUP": tile.group,
                "STAGES": tile.stages,
            }
            boxes = [laid_out(matrix) for matrix in boxes]
            operands = (
                rows_box(left, tile),
                perm,
                starts,
                boxes[0],
                boxes[1] if len(parts) == 2 else None,
                bias.operand,
                pairs,
            )
            programs = multiprocessors(pairs.device)
            start(scatter_product_specialised_kernel, programs, operands, (rows,), sizes, pdl=pdl, warps=tile.warps)
            return
        return scatter_product(pairs, left, perm, starts, parts, inner, tile.instead, pdl, bias)
    first, second = parts[0], parts[-1]
    strides = [(m.inner, m.out) if inner else (m.out, m.inner) for m in (first, second)]
    given = boxes or [what.operand for what in parts]
    tiles = slots(rows, experts, tile.rows)
    constants = {
        "E": experts,
        "E_POW2": power_of_two(experts, 16),
        "K": depth,
        "N": columns,
        "PARTS": len(parts),
        "FIRST_E": first.stride,
        "SECOND_E": second.stride,
        "FIRST_K": strides[0][0],
        "FIRST_N": strides[0][1],
        "SECOND_K": strides[1][0],
        "SECOND_N": strides[1][1],
        "BIAS_E": bias.stride,
        "BIAS_N": bias.step,
        "BIAS_TABLE": bias.table,
        "TABLE": first.table,
        "ALIGNED": first.aligned and second.aligned,
        "WIDE": first.wide or second.wide,
        "BOX": box_rows,
        "PRECISION": precision(pairs.dtype),
        "BM": tile.rows,
        "BN": tile.cols,
        "BK": tile.depth,
        "GROUP": tile.group,
        "SWAP": tile.swap,
        "HALVES": tile.halves,
    }
    start(
        scatter_product_kernel,
        tiles * -(-columns // tile.cols),
        (left, perm, starts, given[0], given[1] if len(parts) == 2 else None, bias.operand, pairs),
        (rows, tiles),
        constants,
        pdl=pdl,
        warps=tile.warps,
        stages=tile.stages,
        registers=tile.registers,
    )


def down(
    outs: dict[str, Any], ins: dict[str, Any], attrs: dict[str, Any], *, pdl: bool, tile: Tile | None = None
) -> None:
    """pairs [S,H] in pair order from act [S,I] in sorted row order, perm, starts, down; rows of no expert are zero."""
    pairs, starts = outs["pairs"], ins["starts"]
    tile = tile or tile_for("down", pairs, starts, (ins["act"].shape[1], pairs.shape[1]))
    bias = vector(ins.get("down_bias"), "down_bias")
    scatter_product(pairs, ins["act"], ins["perm"], starts, [matrix(ins["down"], "down")], True, tile, pdl, bias)


def down_few(
    outs: dict[str, Any], ins: dict[str, Any], attrs: dict[str, Any], *, pdl: bool, tile: Tile | None = None
) -> None:
    """y [T,H] from act [S,I] in pair order, ids [T,k], weights [T,k] or None, down. For few tokens.

    In the tile, cols counts columns of H, depth the part of I that a program takes at once.
    """
    y, act, ids, weights = outs["y"], ins["act"], ins["ids"], ins["weights"]
    down, bias = matrix(ins["down"], "down"), vector(ins.get("down_bias"), "down_bias")
    tokens, hidden = y.shape
    size = act.shape[1]
    if tile is None and down.out < down.inner:
        tile = columns_tile(hidden, size, tokens, width=y.element_size())
    elif tile is None:
        # With a token or two, narrow programs, or the device is not filled; and a short loop is unrolled.
        depth = min(1024 if tokens <= 2 else 256, power_of_two(size))
        unrolled = tokens <= 2 and ids.shape[1] * size <= 32 * depth
        tile = Tile(1, max(4, 4096 // depth), depth, stages=1 if unrolled else 3)
    constants = {
        "ID_T": ids.stride(0),
        "ID_K": ids.stride(1),
        "K": ids.shape[1],
        "E": down.shape[0],
        "H": hidden,
        "INTER": size,
        "DOWN_E": down.stride,
        "DOWN_H": down.out,
        "DOWN_I": down.inner,
        "BIAS_E": bias.stride,
        "BIAS_H": bias.step,
        "BIAS_TABLE": bias.table,
        "TABLE": down.table,
        "ALIGNED": down.aligned,
        "WIDE": down.wide,
        "BN": tile.cols,
        "BK": tile.depth,
        "AHEAD": tile.stages if tile.stages > 1 else 0,
    }
    operands = (act, ids, None if weights is None else weights.contiguous(), down.operand, bias.operand, y)
    start(
        down_few_kernel, tokens * -(-hidden // tile.cols), operands, (), constants, pdl=pdl, warps=tile.warps, stages=1
    )
