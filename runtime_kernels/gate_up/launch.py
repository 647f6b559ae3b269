"""Launches of the first expert matmuls: `gate_up` over sorted rows, `gate_up_few` over pairs without a sort."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from triton.tools.tensor_descriptor import TensorDescriptor

from moe_compiler.runtime_kernels.gate_up.kernel import gate_up_few_kernel, gate_up_kernel
from moe_compiler.runtime_kernels.launching import (
    Matrix,
    activation_constants,
    box,
    matrix,
    power_of_two,
    precision,
    row_major,
    start,
    tile_for,
    vector,
)
from moe_compiler.runtime_kernels.tiles import Tile, columns_tile, slots


def split_up(gate: list[Any], up: list[Any], gated: bool) -> tuple[Matrix, Matrix, int]:
    """gate and up as kernels take them, and the rows from gate to up where both are one matrix (else 0).

    In turns (`Matrix.turns`) they are neighbours.
    """
    first = matrix(gate, "gate")
    if not gated:
        return first, first, 0
    if up:
        second = matrix(up, "up")
        if second.table != first.table:
            raise ValueError("gate and up must both be packed or both be one tensor an expert")
        return first, second, 0
    return first, first, 1 if first.turns else first.shape[1] // 2


def _boxes(gate: Matrix, up: Matrix | None, tile: Tile) -> tuple[list[Any], int]:
    """Descriptors of gate and, where it is apart, of up, and their stored rows an expert; none where one is missing.

    A box of gate and up in turns holds a tile's columns of both.
    """
    _, out, hidden = gate.shape
    if not tile.tma or hidden % tile.depth:
        return [], 0
    transposed = gate.inner != 1
    columns = 2 * tile.cols if gate.turns else tile.cols
    block = (tile.depth, columns) if transposed else (columns, tile.depth)
    rows = hidden if transposed else out
    boxes = [box(part, rows, transposed, block) for part in (gate, up) if part is not None]
    return ([], 0) if None in boxes else (boxes, rows)


def gate_up(
    outs: dict[str, Any], ins: dict[str, Any], attrs: dict[str, Any], *, pdl: bool, tile: Tile | None = None
) -> None:
    """act [S,I] and, where given, preact [S,N], both in sorted row order, from x [T,H], perm, starts, gate, up."""
    act, preact = outs["act"], outs.get("preact")
    if preact is not None and not preact.shape[0]:
        preact = None
    x, gate_list, up_list, gated = row_major(ins["x"]), ins["gate"], ins["up"], attrs["gated"]
    gate, up, shift = split_up(gate_list, up_list, gated)
    pairs, size = act.shape
    experts, k = ins["starts"].shape[0] - 1, attrs["k"]
    hidden = x.shape[1]
    tile = tile or tile_for("gate_up", act, ins["starts"], (hidden, size))
    weights = None if ins["weights"] is None else ins["weights"].contiguous()
    gate_bias, up_bias = vector(ins.get("gate_bias"), "gate_bias"), vector(ins.get("up_bias"), "up_bias")
    boxes, box_rows = _boxes(gate, up if up_list else None, tile)
    gate_operand, up_operand = gate.operand, up.operand if up_list else None
    joined = False
    if boxes:
        gate_operand, up_operand = boxes[0], boxes[1] if up_list else None
        transposed = gate.inner != 1
        chunked = gated and not up_list and not gate.turns
        joined = chunked and not transposed and not tile.swap and 2 * tile.cols <= 256
        if joined:
            stored = [2 * experts, size, hidden]
            strides = [size * gate.out, gate.out, 1]
            gate_operand = TensorDescriptor(gate_list[0], stored, strides, [2, tile.cols, tile.depth])
    tiles = slots(pairs, experts, tile.rows)
    constants = {
        "X_ROW": x.stride(0),
        "K": k,
        "E": experts,
        "E_POW2": power_of_two(experts, 16),
        "H": hidden,
        "INTER": size,
        "GATE_E": gate.stride,
        "UP_E": up.stride,
        "GATE_I": gate.out,
        "GATE_H": gate.inner,
        "UP_I": up.out,
        "UP_H": up.inner,
        "UP_SHIFT": shift,
        "GATE_BIAS_E": gate_bias.stride,
        "GATE_BIAS_I": gate_bias.step,
        "GATE_BIAS_TABLE": gate_bias.table,
        "UP_BIAS_E": up_bias.stride,
        "UP_BIAS_I": up_bias.step,
        "UP_BIAS_TABLE": up_bias.table,
        "TABLE": gate.table,
        "ALIGNED": gate.aligned and up.aligned,
        "WIDE": gate.wide or up.wide,
        "BOX": box_rows,
        "JOINED": joined,
        "GATED": gated,
        "TURNS": gate.turns,
        **activation_constants(attrs["activation"]),
        "PRECISION": precision(act.dtype),
        "BM": tile.rows,
        "BN": tile.cols,
        "BK": tile.depth,
        "GROUP": tile.group,
        "SWAP": tile.swap,
        "HALVES": tile.halves,
    }
    operands = (
        x,
        weights,
        ins["perm"],
        ins["starts"],
        gate_operand,
        up_operand,
        gate_bias.operand,
        up_bias.operand,
        act,
        preact,
    )
    programs = tiles * -(-size // tile.cols)
    start(
        gate_up_kernel,
        programs,
        operands,
        (pairs, tiles),
        constants,
        pdl=pdl,
        warps=tile.warps,
        stages=tile.stages,
        registers=tile.registers,
    )


def gate_up_few(
    outs: dict[str, Any], ins: dict[str, Any], attrs: dict[str, Any], *, pdl: bool, tile: Tile | None = None
) -> None:
    """act [S,I] in pair order from x [T,H], ids [T,k], gate, up; rows of ids out of range are zero. For few tokens.

    In the tile, cols counts columns of act, which are rows of gate, and depth the part of H that a program takes at
    once.
    """
    act = outs["act"]
    x, ids, weights = row_major(ins["x"]), ins["ids"], ins["weights"]
    gated = attrs["gated"]
    gate, up, shift = split_up(ins["gate"], ins["up"], gated)
    gate_bias, up_bias = vector(ins.get("gate_bias"), "gate_bias"), vector(ins.get("up_bias"), "up_bias")
    pairs, size = act.shape
    hidden = x.shape[1]
    if tile is None and gate.out < gate.inner:
        apart = gated and not gate.turns
        tile = columns_tile(size if apart else gate.shape[1], hidden, pairs, 2 if apart else 1, act.element_size())
        tile = replace(tile, cols=tile.cols // 2) if gate.turns else tile
    elif tile is None:
        # About 2048 elements of gate at once, whole rows where they are that short; a long loop is pipelined instead.
        depth = min(2048, power_of_two(hidden))
        tile = Tile(1, 2048 // depth, depth, warps=2, stages=1 if hidden <= 8 * depth else 3)
    constants = {
        "X_ROW": x.stride(0),
        "ID_T": ids.stride(0),
        "ID_K": ids.stride(1),
        "K": ids.shape[1],
        "E": gate.shape[0],
        "H": hidden,
        "INTER": size,
        "GATE_E": gate.stride,
        "UP_E": up.stride,
        "GATE_I": gate.out,
        "GATE_H": gate.inner,
        "UP_I": up.out,
        "UP_H": up.inner,
        "UP_SHIFT": shift,
        "GATE_BIAS_E": gate_bias.stride,
        "GATE_BIAS_I": gate_bias.step,
        "GATE_BIAS_TABLE": gate_bias.table,
        "UP_BIAS_E": up_bias.stride,
        "UP_BIAS_I": up_bias.step,
        "UP_BIAS_TABLE": up_bias.table,
        "TABLE": gate.table,
        "ALIGNED": gate.aligned and up.aligned,
        "WIDE": gate.wide or up.wide,
        "GATED": gated,
        "TURNS": gate.turns,
        **activation_constants(attrs["activation"]),
        "BN": tile.cols,
        "BK": tile.depth,
        "AHEAD": tile.stages if tile.stages > 1 else 0,
    }
    operands = (
        x,
        None if weights is None else weights.contiguous(),
        ids,
        gate.operand,
        up.operand if ins["up"] else None,
        gate_bias.operand,
        up_bias.operand,
        act,
    )
    programs = pairs * -(-size // tile.cols)
    start(gate_up_few_kernel, programs, operands, (), constants, pdl=pdl, warps=tile.warps, stages=1)
