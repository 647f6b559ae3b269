"""Launch of the gradient through the down projection and the activation."""

from __future__ import annotations

from typing import Any

import torch

from moe_compiler.runtime_kernels.grad_act.kernel import bias_scores_kernel, grad_act_kernel, sum_parts_kernel
from moe_compiler.runtime_kernels.launching import (
    NO_BIAS,
    activation_constants,
    box,
    matrix,
    power_of_two,
    precision,
    row_major,
    scratch,
    start,
    tile_for,
    triton_dtype,
    vector,
)
from moe_compiler.runtime_kernels.tiles import Tile, slots


def grad_act(
    outs: dict[str, Any], ins: dict[str, Any], attrs: dict[str, Any], *, pdl: bool, tile: Tile | None = None
) -> None:
    """grad_preact [S,N] and, where given, act [S,I] and grad_weights [T,k] fp32, from grad_y [T,H] of any float dtype.

    attrs["turns"]: the columns of grad_preact are in turns, else gate's come before up's.
    grad_weights takes a second small launch when the intermediate size spans several column tiles, and a third one
    with down_bias.
    """
    grad_preact, act, grad_weights = outs["grad_preact"], outs.get("act"), outs.get("grad_weights")
    weights, starts = ins["weights"], ins["starts"]
    if weights is None or (grad_weights is not None and not grad_weights.numel()):
        grad_weights = None
    grad_y, dtype = row_major(ins["grad_y"]), grad_preact.dtype
    down = matrix(ins["down"], "down")
    pairs, width = grad_preact.shape
    size = width // 2 if attrs["gated"] else width
    experts, hidden = starts.shape[0] - 1, grad_y.shape[1]
    tile = tile or tile_for("grad_act", grad_preact, starts, (hidden, size))
    columns = -(-size // tile.cols)
    bias = NO_BIAS if grad_weights is None else vector(ins.get("down_bias"), "down_bias")
    parts = columns if bias.operand is None else columns + 1
    sums = grad_weights
    if grad_weights is not None and parts > 1:
        sums = scratch((parts, pairs), torch.float32, grad_preact.device)
    down_operand, box_rows = down.operand, 0
    if tile.tma and hidden % tile.depth == 0:
        transposed = down.inner != 1
        block = (tile.cols, tile.depth) if transposed else (tile.depth, tile.cols)
        rows = size if transposed else hidden
        descriptor = box(down, rows, transposed, block)
        if descriptor is not None:
            down_operand, box_rows = descriptor, rows
    tiles = slots(pairs, experts, tile.rows)
    constants = {
        "Y_ROW": grad_y.stride(0),
        "K": attrs["k"],
        "E": experts,
        "E_POW2": power_of_two(experts, 16),
        "H": hidden,
        "INTER": size,
        "DOWN_E": down.stride,
        "DOWN_H": down.out,
        "DOWN_I": down.inner,
        "TABLE": down.table,
        "ALIGNED": down.aligned,
        "WIDE": down.wide,
        "BOX": box_rows,
        "GATED": attrs["gated"],
        "TURNS": attrs.get("turns", False),
        **activation_constants(attrs["activation"]),
        "PRECISION": precision(dtype),
        "BM": tile.rows,
        "BN": tile.cols,
        "BK": tile.depth,
        "GROUP": tile.group,
        "SWAP": tile.swap,
        "HALVES": tile.halves,
        # About 32 columns at a time for a warp's rows keeps the epilogue in registers.
        "PIECES": max(1, min(tile.cols // 32, tile.rows * tile.cols // tile.warps // 512)),
    }
    operands = (
        grad_y,
        None if weights is None else weights.contiguous(),
        ins["preact"],
        ins["perm"],
        starts,
        down_operand,
        grad_preact,
        act,
        sums,
    )
    numbers = (pairs, tiles)
    start(
        grad_act_kernel,
        tiles * columns,
        operands,
        numbers,
        constants,
        pdl=pdl,
        warps=tile.warps,
        stages=tile.stages,
        registers=tile.registers,
    )
    if bias.operand is not None:
        numbers_of_bias = {
            "PART": columns,
            "Y_ROW": grad_y.stride(0),
            "K": attrs["k"],
            "E": experts,
            "E_POW2": power_of_two(experts, 16),
            "H": hidden,
            "BIAS_E": bias.stride,
            "BIAS_H": bias.step,
            "BIAS_TABLE": bias.table,
            "DTYPE": triton_dtype(dtype, "grad_preact"),
            "BH": min(1024, power_of_two(hidden)),
        }
        read = (grad_y, ins["perm"], starts, bias.operand, sums)
        start(bias_scores_kernel, pairs, read, (pairs,), numbers_of_bias, pdl=pdl, stages=1)
    if sums is not grad_weights:
        parts_constants = {"PARTS": parts, "BLOCK": 256}
        blocks = -(-pairs // 256)
        start(sum_parts_kernel, blocks, (sums, grad_weights), (pairs,), parts_constants, pdl=pdl, warps=4, stages=1)
